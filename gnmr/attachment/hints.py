"""Warnings about how a loop calls `step`, each given once.

    zeros    all gradients are 0, and no unit has had another one yet   step() after zero_grad(set_to_none=False)
    left     gradients of the previous step were still there            no zero_grad() between two steps
    twice    no backward pass since the last step                       step() twice after one backward pass
    clipped  the norm of all gradients is the same in each of           clipping before step()
             the first steps, and the units' norms are not
    idle     half of the units never have a gradient, or a unit that    a part of the model that the loss does not
             had one has none in some step                              depend on; experts may be idle
    never    the use of a model ended, and nothing was ever routed      no step() at all, or a calibration that is
                                                                        longer than the training

Hooks on one parameter per unit detect `left` and `twice`. They exist only until the first backward pass after each of
the first steps. Nothing here waits for the device: norms of left-over gradients go to the host with the step's other
numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gnmr.control import Decision, HostPacket, Unit
from gnmr.control.unit import Slice
from gnmr.errors import warn

_HOOKED_STEPS = 10
"""Number of first steps in which hooks check gradients."""
_CLIPPED_STEPS, _EQUAL_TOTALS, _DIFFERENT_NORMS = 5, 1e-3, 0.02
"""Steps whose norms of all gradients are compared, their largest relative difference, and the least of units' norms."""
_STEPS_TO_BE_IDLE = 3
"""Steps after which a unit that never had a gradient counts as one without."""


class LoopHints:
    """Checks the steps of one router."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._observed_before = np.zeros(len(units), dtype=bool)
        """(U,) bool: units that had a gradient in any step."""
        self._warned: set[str] = set()
        self._model: ReferenceType[nn.Module] | None = None
        self._totals: list[np.ndarray] = []
        """Norm of all gradients of the model in each of the first steps, (1,), or (0,) where it is not known."""
        self._unit_norms: list[np.ndarray] = []
        self._num_observed_steps = self._num_hooked_steps = 0
        self._handles: dict[str, tuple[RemovableHandle, RemovableHandle]] = {}
        """Hooks by unit name, for parameters that no backward pass has reached since `watch`."""
        self._left_norms: dict[str, Tensor] = {}
        """Norms of the gradients that existed when the first backward pass began, by unit name."""
        self.trained = False
        """Whether there was a backward pass in any step."""
        self.stepped = False
        """Whether `step` was called, even if it raised."""
        self._calibrating: tuple[int, int] | None = None
        """(steps taken, steps wanted) of a calibration that is not over."""
        self._end: weakref.finalize[..., nn.Module] | None = None
        self.exchange(units)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy: copies of parameters have no hooks."""
        return {**self.__dict__, "_handles": {}, "_left_norms": {}, "_end": None, "_model": None}

    def exchange(self, units: Sequence[Unit]) -> None:
        """Use the units' current parameters."""
        self.release()
        trained = [[p for p in unit.parameters if p.requires_grad] for unit in units]
        self._first = {unit.name: parameters[0] for unit, parameters in zip(units, trained, strict=True) if parameters}
        # An expert without tokens has no gradient, and that is no mistake.
        self._expected = np.array(
            [bool(parameters) and "expert" not in unit.name for unit, parameters in zip(units, trained, strict=True)],
            dtype=bool,
        )
        """(U,) bool: units that are expected to have a gradient in every step."""

    def watch(self, other_parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        """Set the hooks for the next backward pass; if no unit is trained, on the first trained other parameter."""
        self.release()
        self._first = self._first or dict([(name, p) for name, p in other_parameters if p.requires_grad][:1])
        # A loop that calls `step` wrongly does so from the beginning; later steps need no hooks.
        if self._num_hooked_steps > _HOOKED_STEPS:
            return
        self._num_hooked_steps += 1
        for name, parameter in self._first.items():
            # FSDP2 gives gradients to other tensors
            if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
                before = parameter.register_hook(unserializable_hook(partial(self._before, name, parameter)))
                after = unserializable_hook(partial(self._after, name))
                self._handles[name] = before, parameter.register_post_accumulate_grad_hook(after)

    def add_norms(self, packet: HostPacket) -> None:
        """Add the norms of left-over gradients and of all gradients to the packet. Does not wait for the device."""
        device = packet.tensors["norm"].device
        # A parameter that still has its hooks got no gradient since, so that its norm says nothing.
        norms = [norm.to(device, torch.float64) for name, norm in self._left_norms.items() if name not in self._handles]
        packet.add(left=torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=device))
        if len(self._totals) < _CLIPPED_STEPS:
            packet.add(total=self._total_norm().to(device))

    def _total_norm(self) -> Tensor:
        """Return the norm of all gradients of the model, (1,) float64; (0,) if they are sharded or there are none."""
        model = None if self._model is None else self._model()
        # Clipping makes the norm of all gradients the same in each step.
        gradients = [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]
        if not gradients or any(gradient.is_sparse or hasattr(gradient, "device_mesh") for gradient in gradients):
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        # A norm in bfloat16 would be the same in steps that differ by 0.4%.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        stacked = torch.stack([norm.to(norms[0].device) for norm in norms]).double()
        total: Tensor = torch.linalg.vector_norm(stacked, dim=0, keepdim=True)
        return total

    def warn(self, decision: Decision, packet: HostPacket, calibrating: tuple[int, int] | None = None) -> None:
        """Give the warnings of a step, each once.

        Args:
            decision: the decision of the step.
            packet: its packet, on the host, with the numbers of `add_norms`.
            calibrating: see `Controller.calibrating`.
        """
        self._calibrating = calibrating
        if "total" in packet.host:
            self._totals.append(packet.host["total"])
        self._num_observed_steps += bool(decision.observed.any())
        texts = {
            "zeros": self._zeros(decision),
            "left": self._left_over(packet.host["left"]),
            "twice": self._twice(decision),
            "clipped": self._clipped(decision),
            "idle": self._idle(decision),
        }
        # Only now: the checks above compare this step with the ones before.
        self._observed_before |= decision.observed
        self.watch()
        for kind, text in texts.items():
            if text and kind not in self._warned:
                self._warned.add(kind)
                warn(text)

    def _zeros(self, decision: Decision) -> str:
        # Without any gradient it is `UnitNorms` that warns.
        if decision.observed.any() or self._observed_before.any() or all(p.grad is None for p in self._first.values()):
            return ""
        return "every gradient norm is 0 in this step: call step() before zero_grad()"

    def _left_over(self, norms: np.ndarray) -> str:
        # The same selection and order as in `add_norms`.
        names = [name for name in self._left_norms if name not in self._handles]
        for name, norm in zip(names, norms, strict=True):
            if norm > 0:
                return (
                    f"{name}: its gradient of the step before was still there when the next backward pass began, so "
                    "gradients add up from step to step: call zero_grad() and step() once per optimizer step each"
                )
        return ""

    def _twice(self, decision: Decision) -> str:
        # Gradients that are set by hand fire no hooks, so nothing is known.
        unreached = bool(self._handles) and self._handles.keys() == self._first.keys()
        if not (unreached and self.trained and decision.observed.any()):
            return ""
        return (
            "no backward pass came since the last step(), whose gradients are observed again: call step() once per "
            "optimizer step, after the backward pass of its last micro-batch"
        )

    def _clipped(self, decision: Decision) -> str:
        if len(self._unit_norms) >= _CLIPPED_STEPS:
            return ""
        self._unit_norms.append(decision.norm.copy())
        if len(self._unit_norms) < _CLIPPED_STEPS or sum(total.size for total in self._totals) < _CLIPPED_STEPS:
            return ""
        totals, norms = np.concatenate(self._totals), np.stack(self._unit_norms)
        if not (np.isfinite(totals).all() and np.isfinite(norms).all()) or totals.max() == 0:
            return ""
        # Equal totals show clipping only if the units' own norms differ between steps.
        moved = (norms.max(axis=0) - norms.min(axis=0)).max() > _DIFFERENT_NORMS * norms.max()
        if np.ptp(totals) > _EQUAL_TOTALS * totals.max() or not moved:
            return ""
        return (
            f"the norm of all gradients was {totals[0]:.4g} in each of the first {_CLIPPED_STEPS} steps: they seem to "
            "be clipped before step(), which hides a unit whose gradient grows; call step() first, then clip"
        )

    def _idle(self, decision: Decision) -> str:
        observed = decision.observed
        if not observed.any():
            return ""
        # Never observed: half of the units or more, after some steps
        never = self._expected & ~self._observed_before & ~observed
        if self._num_observed_steps == _STEPS_TO_BE_IDLE and 2 * never.sum() >= self._expected.sum() > 0:
            return (
                f"{never.sum()} of {self._expected.sum()} units had no gradient in the first {_STEPS_TO_BE_IDLE} steps "
                f"(the first is {decision.units[int(never.argmax())]}): the loss does not depend on them, so they are "
                "never routed; leave them out of the targets, or call step() after the backward pass that reaches them"
            )
        # Observed before, and not now
        gone = np.flatnonzero(self._expected & self._observed_before & ~observed)
        if not len(gone):
            return ""
        more = f", nor have {len(gone) - 1} others" if len(gone) > 1 else ""
        return (
            f"{decision.units[gone[0]]}: has no gradient in step {decision.step}, but had one before{more}: it did not "
            "run, or its part of the loss was masked; such steps do not count for it"
        )

    def watch_use(self, model: nn.Module, low: str) -> None:
        """Warn once if nothing was routed by the end of the use of `model`.

        The use ends at `end_use`, with the model, or with the process. `low` names the path that the model stays on if
        nobody calls `step`.
        """
        self.watch(model.named_parameters())
        self._model = ReferenceType(model)
        # It runs when the model is freed or the process ends, and does not keep the model alive.
        self._end = weakref.finalize(model, self._warn_at_end, low)

    def end_use(self) -> None:
        """End the use that `watch_use` began, if any."""
        if self._end is not None:
            self._end()

    def _warn_at_end(self, low: str) -> None:
        for text in self._texts_at_end(low):
            warn(text)

    def _texts_at_end(self, low: str) -> Iterator[str]:
        if not self.stepped and self.trained:
            yield (
                f"step() was never called: the model was trained on its low path ({low}) and nothing was ever "
                "routed; call controller.step() once per optimizer step, after its last backward pass"
            )
        elif self._calibrating is not None:
            taken, wanted = self._calibrating
            yield (
                f"still calibrating after {taken} of {wanted} steps: nothing was ever routed; "
                "calibrate(steps=...) must be shorter than the run"
            )

    def release(self) -> None:
        """Remove the hooks and forget their findings."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles, self._left_norms = {}, {}

    @torch.no_grad()
    def _before(self, name: str, parameter: nn.Parameter | Slice, _gradient: Tensor) -> None:
        """Run before a gradient is added; `torch.autograd.grad` triggers it too, but not `_after`."""
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            self._left_norms.pop(name, None)
        else:
            self._left_norms[name] = torch.linalg.vector_norm(gradient)

    def _after(self, name: str, _parameter: Tensor) -> None:
        self.trained = True
        for handle in self._handles.pop(name, ()):
            handle.remove()
