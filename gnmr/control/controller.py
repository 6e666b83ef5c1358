"""The controller: observe -> decide -> apply, once a step, with one host synchronisation.

    loss.backward()                 gradients of the whole step, unscaled, not yet clipped
    decision = controller.step()    norms, signal, policy; units are switched for the next step
    clip_grad_norm_(...); optimizer.step(); optimizer.zero_grad()

Norms of step t exist only after its backward pass, so the set chosen from step t is in force in step t + 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.control.admission import budget_left, check_ranks, check_signal, unit_names, warn_of_cap
from gnmr.control.calibration import NO_TRIGGER, Calibration
from gnmr.control.decision import Decision, Event, few
from gnmr.control.evidence import (
    EVIDENCE,
    PATH_EVIDENCE,
    PRICE_EVIDENCE,
    MicroNorms,
    missing,
    weight_std,
    without_zeros,
)
from gnmr.control.hints import Hints
from gnmr.control.norms import UnitNorms, flags
from gnmr.control.observed import OutputGradients
from gnmr.control.packet import HostPacket
from gnmr.control.policy import Budget, Choice, decide
from gnmr.control.ranks import Ranks
from gnmr.control.signals import build_signal
from gnmr.control.signals.always import AlwaysHigh, AlwaysLow
from gnmr.control.signals.base import TINY, BlindSignal, Context, Evidence, SignalBase, positive, whole
from gnmr.control.signals.history import all_finite
from gnmr.control.spec import NO_CAP, ControlSpec
from gnmr.control.units import Unit
from gnmr.errors import users_level


@dataclass(frozen=True)
class Mark:
    """A controller before a step (`Controller.mark`)."""

    t: int
    lock: Tensor
    chosen: Tensor
    risk: Tensor
    signal: Mapping[str, Tensor]


class Controller:
    """GNMR's controller over any units (paper, sections 2 and 3).

    Args:
        units: in a fixed order, the same on every rank; ids must differ. All are put on the low-cost path (on the
            recovery path for a warm-up).
        spec: signal, routing and thresholds.
        steps: length of the run, where known, for signals that go by it (static_k).
        seed: of signals that draw.
        record: names of evidence that each `Decision` shall hold.
        whole_cost: what recovery of everything costs, in the units' costs, of which `spec.budget` is a share; None: the
            sum of the units' costs.
        pinned: the share of it that is always spent.
        norms: gives (norm (U,) float64, observed (U,) bool) of the step on the device, loss scale included; None: of
            the gradients of the units' parameters. `gnmr.control.observed` has another one.
        ranks: the processes that train one model, of which each has a controller; None: this one alone. Norms and
            evidence are then summed over them, in one collective a step, and all choose the same units.

    If all observed risks are Inf (a loss scale overflowed, or the loss itself is not finite) and they are more than
    max_o, set and locks stay as they are. **Choice 41**: the paper says nothing of such steps, and ranking equal risks
    by unit order would mean nothing; `spec.nonfinite="order"` does it all the same.

    Works with no file system, no configuration library and no process group. ValueError for values without sense.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        spec: ControlSpec | None = None,
        *,
        steps: int | None = None,
        seed: int = 0,
        record: Sequence[str] = (),
        norms: Callable[[], tuple[Tensor, Tensor]] | None = None,
        whole_cost: float | None = None,
        pinned: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        self.units = units = list(units)
        self.names = unit_names(units)
        self.spec = spec = ControlSpec() if spec is None else spec
        whole(1 if steps is None else steps, "steps")
        if isinstance(record, str) or not isinstance(record, Sequence):
            raise ValueError(f"record={record!r}: must be a list of names")
        context = Context.of(units, spec.max_o, steps, seed, spec.hold)
        if spec.budget is not None:
            context = replace(context, spend=tuple(float(unit.cost) for unit in units))
        self.signal = build_signal(spec.signal, spec.signal_options(), context)
        self.record = tuple(record)
        self.needs = tuple(dict.fromkeys([*self.signal.needs, *record]))
        """Evidence besides norm and observed that every step has to bring."""
        check_signal(self.signal, self.needs, self.record, norms is not None)
        self.ranks = ranks
        self.norms = UnitNorms([unit.parameters for unit in units], ranks) if norms is None else norms
        check_ranks(ranks, units, self.needs, self.norms)
        warn_of_cap(units, self.signal, spec.max_o)
        self.max_o, self.t_lock, self.warmup_steps, self.hold = spec.max_o, spec.t_lock, spec.warmup_steps, spec.hold
        self.ranked, self.trigger = spec.ranked, spec.trigger
        self._calibration: Calibration | None = None
        self._calibrated = False
        self.t = 0
        """Steps observed so far."""

        self._micro = MicroNorms(units) if "micro_square" in self.needs else None
        self._device = units[0].parameters[0].device
        self._recoverable = torch.tensor([unit.recoverable for unit in units], device=self._device)
        self.pinned = pinned
        """The share of all costs that is always spent."""
        self._budget: Budget | None = None
        if spec.budget is not None:
            self._budget = budget_left(units, spec.budget, whole_cost, pinned, self._device)
        self._lock = torch.zeros(len(units), dtype=torch.int64, device=self._device)
        self._active = np.zeros(len(units), dtype=bool)
        self._chosen = self._recoverable & (self.warmup_steps > 0)  # what `apply` will have made of it
        self._risk = torch.zeros(len(units), dtype=torch.float64, device=self._device)  # of the last step
        self._pending: list[Event] = []
        self._hints, self._advised = Hints(units), False
        self._agreement: Tensor | None = None  # of the step that is being observed
        if self.warmup_steps > 0:
            self._switch(self._recoverable.cpu().numpy(), 0, None, None, self._pending)
        else:
            for unit in units:
                if unit.switch is not None:
                    unit.switch(False)

    def _exchange(self, units: list[Unit]) -> None:
        """Watches other parameters of the same units. ValueError for sharded ones, if something of them is read."""
        of_parameters = isinstance(self.norms, UnitNorms)
        if of_parameters or "weight_std" in self.needs:
            check_ranks(self.ranks, units, self.needs, self.norms)
        self.units = units
        self._hints.look(units)
        if of_parameters:
            self.norms = UnitNorms([unit.parameters for unit in units], self.ranks)
        if self._micro is not None:
            self._micro = MicroNorms(units)

    def __repr__(self) -> str:
        """What it is and where it is."""
        names = self.active
        now = f"{len(names)} in recovery{f': {few(names)}' if names else ''}"
        return f"<{type(self).__name__} of {len(self.units)} units, {self._told()}; step {self.t}: {now}>"

    def _told(self) -> str:
        """How units are chosen."""
        spec = self.spec
        if not any(unit.recoverable for unit in self.units):
            return "static"
        if isinstance(self.signal, AlwaysLow | AlwaysHigh):
            return f"static ({spec.signal_name})"
        trigger = "calibrating" if self._calibration is not None else f"trigger {self.trigger:.4g}"
        budget = [] if spec.budget is None else [f"budget={spec.budget:g}"]
        cap = [] if self.max_o >= NO_CAP else [f"max_o={self.max_o}"]
        return ", ".join([f"signal {spec.signal_name}", "ranked" if self.ranked else trigger, *budget, *cap])

    def calibrate(self, fraction: float = 0.01, steps: int = 100) -> None:
        """Sets `trigger` by this loop's own norms: over it is `fraction` of the unit-steps of the next `steps` steps.

        Published thresholds belong to the batches that they were published for; with small ones they flood max_o. Call
        it once, before the first step. In these steps nothing is promoted but units whose risk is not finite; the
        trigger comes from the second half of them. Locks, holds and max_o then make of it what is spent. `state_dict`
        holds the trigger, or how far the calibration is: `load_state_dict` goes on with either, and a loop that calls
        `calibrate` in any case calls it before.

        ValueError where there is no threshold (routing="ranked", signals that read no evidence), or nothing to learn
        from. Waits for nothing that `step` does not wait for.
        """
        if self.ranked:
            raise ValueError("calibrate: routing='ranked' has no threshold, max_o or a budget is what it spends")
        if isinstance(self.signal, BlindSignal):
            raise ValueError(
                f"calibrate: {self.spec.signal_name} reads no evidence, its option share is what it spends"
            )
        self._calibration = Calibration(fraction, max(self.t, self.warmup_steps) + 1, steps)
        self.trigger, self._calibrated = NO_TRIGGER, True

    def _learn(self, decision: Decision) -> None:
        """Of a step while calibrating."""
        assert self._calibration is not None
        routed = decision.observed & np.array([unit.recoverable for unit in self.units])
        trigger = self._calibration.add(decision.step, decision.risk, routed)
        if trigger is None:
            return
        if math.isnan(trigger):
            trigger = self.spec.trigger
            text = f"calibrate: no unit had a risk above 0; the trigger is {trigger:g}, as before"
            warnings.warn(text, stacklevel=users_level())
            self._calibrated = False
        self.trigger, self._calibration = trigger, None

    @property
    def calibrating(self) -> tuple[int, int] | None:
        """(Steps that the calibration has seen, steps that it takes); None where there is none, or it is over."""
        one = self._calibration
        return None if one is None else (max(self.t - one.first + 1, 0), one.steps)

    @property
    def calibrated(self) -> float | None:
        """The trigger that `calibrate` found; None before it has, where it found none and where it was not called."""
        return self.trigger if self._calibrated and self._calibration is None else None

    @property
    def active(self) -> list[str]:
        """Units on the recovery path now, in unit order."""
        return [name for name, active in zip(self.names, self._active, strict=True) if active]

    def micro_step(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """Call it after each micro-batch's backward pass; only signals that need micro_square make it do anything.

        `fraction`: the part of the step's loss that this micro-batch is, for all of them or none; None: all are equal.
        `gradients`: see `MicroNorms.add`.
        """
        if self._micro is not None:
            self._micro.add(fraction, gradients)

    def step(self, grad_scale: float = 1.0, evidence: Evidence | None = None) -> Decision:
        """Observes this step's gradients and routes the units for the next one. Waits for the device once.

        Call it after the backward pass of the whole step (all micro-batches) and before clipping. Where gradients
        still carry a loss scale, give it as `grad_scale`. `evidence`: what the signal needs and this controller cannot
        measure by itself, each (U,) on the units' device (docs/signals.md says of what signals, and how). ValueError
        for what is missing, unknown or of another shape. Warns, once, of what makes all of it pointless.

        A step that the loop throws away ends with `discard` in place of this. What a unit's `switch` raises comes
        through; the step counts then, and the set in force (`active`) is what it had come to: units leave it before
        others join, so never more than max_o, and the next step goes on from there.
        """
        given = dict(evidence or {})
        if unknown := [name for name in given if name not in EVIDENCE]:
            raise ValueError(f"evidence {unknown[0]!r} is not known: use one of {', '.join(EVIDENCE)}")
        self._check_evidence(given, self._own_evidence())  # before anything is read that can be read once
        packet = self.observe(self.measure(grad_scale) | given)
        packet.add("left", self._hints.left(self._device))
        host = packet.to_host()
        decision = self.apply(host)
        hints = self._hints.of(decision, host["left"])
        if not self._advised and (advice := self._advice(decision)):
            self._advised = True
            hints.append(advice)
        self._hints.watch()
        for hint in hints:
            warnings.warn(hint, stacklevel=users_level())
        return decision

    def discard(self) -> None:
        """Forgets what backward passes brought since the last `step`, and decides nothing.

        For passes that are not to count: a batch that is skipped, gradients that are thrown away, a second backward
        pass of another loss. Call it with `zero_grad()`. Needless where `step` is called in every step.
        """
        if self._micro is not None:
            self._micro.reset()
        if callable(reset := getattr(self.norms, "reset", None)):
            reset()

    def _advice(self, decision: Decision) -> str:
        """What the user should know of this step besides `Hints`; empty: nothing."""
        return ""

    def together(self) -> bool:
        """Whether several processes train this model."""
        return self.ranks is not None and self.ranks.size > 1

    @torch.no_grad()
    def parts(self, plain: Tensor | None = None) -> dict[str, Tensor]:
        """What this rank has measured of the step, each a term of a sum over ranks (`Ranks.sum`), whose result
        `measure` takes. Does not wait for the device.

        `plain`: of `UnitNorms.parts`, where the loop takes the norms of the units' gradients itself. ValueError for
        what is measured in one process alone.
        """
        ranks = self.ranks
        assert ranks is not None, "one process has no parts"
        check_ranks(ranks, (), self.needs, self.norms)  # there may have been fewer when it was made
        found: dict[str, Tensor] = {}
        if isinstance(self.norms, OutputGradients):
            square, observed = self.norms.parts()
            found = {"square": square * ranks.share**2, "observed": observed}
        elif plain is None:
            assert isinstance(self.norms, UnitNorms)
            square, observed, plain = self.norms.parts()
            found = {"square": square, "observed": observed}
        if plain is None:
            plain = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._micro is not None:
            found["micro"] = self._micro.parts()
        settings = self.t, self.names, self.max_o, self.t_lock, self.trigger, self.warmup_steps
        return found | {"agreement": ranks.agreement(settings, self._active, plain)}

    def summed(self, sums: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """`sums` where the loop made them; else `parts` over all ranks, or None in one process. `measure` begins so."""
        if sums is not None or not self.together():
            return sums
        assert self.ranks is not None
        return self.ranks.sum(self.parts())

    @torch.no_grad()
    def measure(
        self,
        grad_scale: float = 1.0,
        norms: tuple[Tensor, Tensor] | None = None,
        sums: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The evidence that this controller can make of its units alone. Does not wait for the device.

        `norms`: (norm, observed) of the units' gradients where the loop took them together with those of other
        parameters (`UnitNorms`); without effect where norms are of something else. `sums`: of `parts` over all ranks,
        where the loop summed them together with numbers of its own; None: they are made here, if there are several.
        """
        if isinstance(grad_scale, bool) or not isinstance(grad_scale, (int, float)) or not 0 < grad_scale < math.inf:
            raise ValueError(
                f"grad_scale={grad_scale!r}: must be a positive number; of a GradScaler it is scaler.get_scale()"
            )
        if (here := self.units[0].parameters[0].device) != self._device:
            raise ValueError(
                f"the model is on {here} by now, its controller on {self._device}: move it before attaching"
            )
        sums = self.summed(sums)
        if sums is not None:
            self._agreement = sums["agreement"]
        if sums is not None and "square" in sums:
            norm, observed = sums["square"].sqrt(), sums["observed"] > 0
        else:
            norm, observed = self.norms() if norms is None or not isinstance(self.norms, UnitNorms) else norms
        found = {"norm": norm / grad_scale, "observed": observed}
        if sums is not None and "micro" in sums:
            found["micro_square"] = sums["micro"][:-1] / sums["micro"][-1] / grad_scale**2
        elif self._micro is not None:
            found["micro_square"] = self._micro.take() / grad_scale**2
        if "weight_std" in self.needs:
            found["weight_std"] = weight_std(self.units, self.ranks)
        return found

    def _own_evidence(self) -> set[str]:
        """What `measure` gives."""
        own = {"micro_square"} if self._micro is not None else set()
        return {"norm", "observed"} | own | ({"weight_std"} & set(self.needs))

    def _check_evidence(self, evidence: Evidence, more: Iterable[str] = ()) -> None:
        """ValueError for what neither this nor `more` has, and for another shape."""
        if lacking := missing(self.needs, (*evidence, *more)):
            raise ValueError(f"{type(self.signal).__name__} needs {', '.join(lacking)}: hand it to step(evidence=...)")
        for name, values in evidence.items():
            if values.shape != (len(self.units),):
                raise ValueError(f"evidence {name}: has shape {tuple(values.shape)}, not ({len(self.units)},)")

    def reads_next(self) -> bool:
        """Whether anybody looks at the paths' evidence of the coming step; where not, nobody has to measure it."""
        reads = getattr(self.signal, "reads", None)
        return bool(set(self.record) & {*PATH_EVIDENCE, *PRICE_EVIDENCE}) or reads is None or reads(self.t + 1)

    def mark(self) -> Mark:
        """What `observe` changes, as it is now: `undo` takes it back. Copies nothing of our signals; does not wait."""
        state = self.signal.state_dict()
        return Mark(
            self.t,
            self._lock,
            self._chosen,
            self._risk,
            state if isinstance(self.signal, SignalBase) else deepcopy(state),
        )

    def undo(self, mark: Mark) -> None:
        """Takes back an `observe` whose packet was not applied: the step begins again."""
        self.t, self._lock, self._chosen, self._risk = mark.t, mark.lock, mark.chosen, mark.risk
        self.signal.load_state_dict(dict(mark.signal))

    def promote(self, names: Iterable[str]) -> bool:
        """Puts these units on the recovery path at once, between two steps, in the places of the least risky ones.

        False, and nothing changes, where they are more than max_o or the budget allow, or one has no recovery path.
        They are locked like any unit that was over its threshold; the events (cause "retry") come with the next
        decision. Waits for the device. KeyError for a name that is no unit's.
        """
        places = {name: i for i, name in enumerate(self.names)}
        wanted = flags([i in {places[name] for name in names} for i in range(len(self.units))], self._device)
        stay = torch.where(self._chosen, self._risk.nan_to_num(posinf=1.0).clamp(min=TINY), 0.0)
        state = self._recoverable, self._lock, self.max_o, self.t_lock
        risk = torch.where(wanted, torch.inf, stay)
        choice = decide(risk, wanted | self._chosen, *state, 0.0, self._budget)
        if bool((wanted & ~choice.active).any()):
            return False
        before, self._chosen = self._active, choice.active
        self._lock = torch.where(wanted, self.t_lock, self._lock * choice.active)
        events: list[Event] = []
        self._switch(choice.active.cpu().numpy(), self.t + 1, None, None, events)
        full = "max_o" if self._budget is None or int(before.sum()) >= self.max_o else "budget"
        self._pending += [replace(one, cause="retry" if one.event == "promote" else full) for one in events]
        return True

    @torch.no_grad()
    def observe(self, evidence: Evidence, keep: bool = False) -> HostPacket:
        """Risk and choice of this step, (U,) each, as a packet for the host. Does not wait for the device.

        For loops that send other numbers to the host in the same transfer (`HostPacket.add`), for replay and for
        foreign norms; hand `to_host()` of it to `apply`. `evidence`: norm (U,) float64, observed (U,) bool and what
        `needs` names. `keep`: set and locks stay as they are, whatever the risks (no unit is to blame).
        """
        self._check_evidence(evidence)
        evidence = without_zeros(evidence)
        norm, observed = evidence["norm"], evidence["observed"]
        risk, columns = self._judged(evidence)
        if not (finite := all_finite(risk)):
            risk = torch.where(risk.isnan(), torch.inf, risk)  # a risk that is no number
        self.t += 1
        if self.t < self.warmup_steps:
            nothing = torch.zeros_like(self._recoverable)
            choice = Choice(nothing, self._recoverable, self._lock, torch.arange(len(self.units), device=self._device))
        else:
            trigger = 0.0 if self.ranked else self.trigger
            state = self._recoverable, self._lock, self.max_o, self.t_lock
            choice = decide(risk, observed, *state, trigger, self._budget)
            if (self.t - max(self.warmup_steps, 1)) % self.hold:
                choice = self._held(choice, risk, observed)
            if keep or (not finite and self.spec.nonfinite != "order"):
                choice = self._unless_all_infinite(choice, risk, observed, keep)
        self._lock, self._chosen, self._risk = choice.lock, choice.active, risk.double()
        agreement = {} if self._agreement is None else {"agreement": self._agreement}
        return HostPacket(
            agreement
            | {"norm": norm.double(), "observed": observed.bool(), "risk": risk.double()}
            | choice._asdict()
            | {f"column/{name}": values.double() for name, values in zip(self.signal.columns, columns, strict=True)}
            | {f"evidence/{name}": evidence[name].double() for name in self.record}
        )

    def _judged(self, evidence: Evidence) -> tuple[Tensor, Sequence[Tensor]]:
        """The signal's verdict, of the shape that it has to have."""
        found: Any = self.signal.observe(evidence, self.t + 1)
        names, shape = self.signal.columns, (len(self.units),)
        two = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], (tuple, list))
        tensors: list[Tensor] = [found[0], *found[1]] if two else []
        if len(tensors) != 1 + len(names) or any(getattr(one, "shape", None) != shape for one in tensors):
            raise ValueError(
                f"{type(self.signal).__name__}.observe() must return the risk and a tuple of its columns "
                f"({', '.join(names) or 'none'}), each a tensor of shape ({shape[0]},)"
            )
        risk, *columns = tensors
        return risk, columns

    def _unless_all_infinite(self, choice: Choice, risk: Tensor, observed: Tensor, keep: bool) -> Choice:
        """If all observed risks are infinite (loss-scale overflow) and more than max_o, or to `keep` it, keep the
        current set."""
        routed = observed & self._recoverable
        # Right after the warm-up more than that may be in force; then the cap comes first.
        stays = (risk.isinf() | ~observed).all() & ~self._may(routed) & self._may(self._chosen)
        if keep:
            stays = self._may(self._chosen)
        return choice._replace(
            candidate=choice.candidate | (stays & self._chosen),
            active=torch.where(stays, self._chosen, choice.active),
            lock=torch.where(stays, self._lock, choice.lock),
        )

    def _may(self, chosen: Tensor) -> Tensor:
        """Whether these units (U,) bool may be on the recovery path at once: a scalar bool on the device."""
        fits = chosen.sum() <= self.max_o
        if self._budget is None:
            return fits
        return fits & (torch.where(chosen, self._budget.cost, 0.0).sum() <= self._budget.most)

    def _held(self, choice: Choice, risk: Tensor, observed: Tensor) -> Choice:
        """The set in force and the units whose risk is not finite, by rank up to the cap."""
        urgent = risk.isinf() & observed & self._recoverable
        stay = torch.where(self._chosen | urgent, risk.clamp(min=TINY), 0.0)
        state = self._recoverable, self._lock, self.max_o, self.t_lock
        kept = decide(stay, observed | self._chosen, *state, 0.0, self._budget)
        lock = torch.where(urgent, kept.lock, self._lock * kept.active)
        return kept._replace(candidate=choice.candidate | kept.candidate, lock=lock)

    def apply(self, host: Mapping[str, np.ndarray]) -> Decision:
        """Switches the units as `observe` chose; `host` holds the arrays of its packet, and may hold others.

        Raises what `Ranks.check` does, and switches nothing, where ranks disagree."""
        self._agreement = None
        if self.ranks is not None and "agreement" in host:
            self.ranks.check(host["agreement"], self.t)
        decision = Decision(
            step=self.t,
            units=self.names,
            **{name: host[name] for name in ("norm", "observed", "risk", *Choice._fields)},
            columns={name: host[f"column/{name}"] for name in self.signal.columns},
            evidence={name: host[f"evidence/{name}"] for name in self.record},
            in_force=self._active,
            thresholds=tuple(None if x is None else x * self.trigger for x in self.signal.thresholds(self.t)),
            events=self._pending,
            trigger=0.0 if self.ranked else self.trigger,
        )
        self._pending = []
        try:
            self._switch(decision.active, self.t, decision, decision.risk, decision.events)
        except BaseException:
            self._pending = decision.events
            self._chosen = flags(self._active.tolist(), self._device)
            self._lock = self._lock * self._chosen
            raise
        if self._calibration is not None:
            self._learn(decision)
        return decision

    def _switch(
        self, active: np.ndarray, step: int, causes: Decision | None, risk: np.ndarray | None, events: list[Event]
    ) -> None:
        """Moves the units that change, those first that leave, and adds which and why to `events`, in unit order."""
        changed: list[int] = np.flatnonzero(active != self._active).tolist()
        self._active = self._active.copy()  # decisions hold the one before
        moved: dict[int, Event] = {}
        try:
            for index in sorted(changed, key=lambda i: bool(active[i])):
                unit, promoted = self.units[index], bool(active[index])
                assert unit.switch is not None
                unit.switch(promoted)
                self._active[index] = promoted
                cause = self._cause(index, promoted, step, causes)
                observed = risk is not None and (causes is None or bool(causes.observed[index]))
                value = float(risk[index]) if risk is not None and observed else None
                moved[index] = Event(step, unit.name, "promote" if promoted else "release", cause, value)
        finally:
            events.extend(moved[index] for index in sorted(moved))

    def _cause(self, index: int, promoted: bool, step: int, decision: Decision | None) -> str:
        if step < self.warmup_steps or decision is None:
            return "warmup"
        if not promoted:
            if step == self.warmup_steps:
                return "warmup"
            if not decision.candidate[index]:
                return "lock"
            return "max_o" if self._budget is None or int(decision.active.sum()) >= self.max_o else "budget"
        if not np.isfinite(decision.norm[index]):
            return "nonfinite"
        ratios = {
            name: values[index] / threshold
            for (name, values), threshold in zip(decision.columns.items(), decision.thresholds, strict=True)
            if threshold is not None
        }
        highest = max(ratios, key=lambda name: ratios[name], default="risk")
        over = ratios and ratios[highest] > 1
        return "rank" if self.ranked and not over else highest

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decision depends on: step count, active set, locks and the signal's history, and a
        trigger that was calibrated, or what it is being calibrated from."""
        found: dict[str, Any] = {"trigger": self.trigger} if self._calibrated else {}
        if self._calibration is not None:
            found["calibration"] = self._calibration.state()
        return found | {
            "units": list(self.names),
            "t": self.t,
            "active": torch.from_numpy(self._active.copy()),
            "lock": self._lock,
            "signal": self.signal.state_dict(),
        }

    def check_state(self, state: Any) -> None:
        """ValueError, one line, for what is no state, or one of other units, paths or settings."""
        if not isinstance(state, Mapping) or "units" not in state:
            raise ValueError("state: is not what a controller's state_dict() returned")
        if list(state["units"]) != self.names:
            raise ValueError("the controller's state belongs to other units than this model has")
        if lacking := [name for name in ("t", "active", "lock", "signal") if name not in state]:
            raise ValueError(f"state: has no {', '.join(lacking)}")
        t = whole(state["t"], "state: t", 0)
        if positive(state.get("trigger", 1.0), "state: trigger") >= NO_TRIGGER:
            if "calibration" in state:
                Calibration.of(state["calibration"])
            elif self._calibration is None:
                raise ValueError("state: was saved while calibrating; call calibrate() before load_state_dict()")
        for name, least, most in (("active", 0, 1), ("lock", 0, self.t_lock)):
            values = state[name]
            if not isinstance(values, Tensor) or values.shape != (len(self.units),) or values.is_floating_point():
                raise ValueError(f"state: {name} must be {len(self.units)} whole numbers or flags, one a unit")
            if (wrong := values[(values < least) | (values > most)]).numel():
                raise ValueError(f"state: {name} holds {wrong[0].item()}: must lie between {least} and {most} here")
        active = state["active"].cpu().bool()
        if foreign := [n for n, on, u in zip(self.names, active, self.units, strict=True) if on and not u.recoverable]:
            raise ValueError(f"state: {foreign[0]} is on the recovery path, and has none here")
        if t >= self.warmup_steps and (number := int(active.sum())) > self.max_o:
            raise ValueError(
                f"state: {number} units are on the recovery path, max_o={self.max_o} allows {self.max_o}: load it into "
                f"a controller with max_o={number} or more"
            )
        if t >= self.warmup_steps and not bool(self._may(flags(active.tolist(), self._device))):
            raise ValueError("state: the units on the recovery path cost more than the budget allows here")
        if not isinstance(state["signal"], Mapping):
            raise ValueError("state: signal must map names to tensors")
        if isinstance(self.signal, SignalBase) and type(self.signal).load_state_dict is SignalBase.load_state_dict:
            self.signal.check_state(state["signal"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state and puts every unit on the path it had.

        ValueError if it belongs to other units or settings (more of them on the recovery path than max_o allows), is
        damaged, or is no state at all. Everything stays as it was then, and where a switch or the signal itself raises.
        """
        self.check_state(state)
        active = state["active"].cpu().numpy().astype(bool)
        before = deepcopy(self.signal.state_dict())
        switched = []
        try:
            self.signal.load_state_dict(state["signal"])
            for unit, on, was in zip(self.units, active, self._active, strict=True):
                if unit.switch is not None:
                    switched.append((unit.switch, bool(was)))
                    unit.switch(bool(on))
        except BaseException:
            for switch, was in switched:
                with suppress(Exception):
                    switch(was)
            self.signal.load_state_dict(before)
            raise
        self.t = int(state["t"])
        if (trigger := state.get("trigger", NO_TRIGGER)) < NO_TRIGGER:
            self.trigger, self._calibration, self._calibrated = trigger, None, True
        elif "calibration" in state:
            self._calibration = Calibration.of(state["calibration"])
            self.trigger, self._calibrated = NO_TRIGGER, True
        elif self._calibration is not None:  # nothing was calibrated there
            self._calibration = self._calibration.again(max(self.t, self.warmup_steps) + 1)
        self._lock = state["lock"].to(self._device, torch.int64, copy=True)
        self._active = active
        self._chosen = flags(active.tolist(), self._device)
        self._pending = []
