"""The three-line use: the controller in a training loop that is not ours.

controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
...
loss.backward()
controller.step()          # before clipping and optimizer.step()
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.blame import NO_LEVEL, Again, Level, Seen, Start, Verdict, explain, find_nonfinite, replaying
from gnmr.controller import Controller, ControlSpec, Decision, OutputGradients, Unit
from gnmr.controller.evidence import EVIDENCE, PATH_EVIDENCE, PRICE_EVIDENCE
from gnmr.controller.norms import Distinct, UnitNorms, gradient_norms, to_device
from gnmr.controller.observed import adapters, watched
from gnmr.controller.signals.base import whole
from gnmr.distributed.reduce import Ranks
from gnmr.distributed.world import rank
from gnmr.doctor.plan import PATHS, PinPlan, read_plan
from gnmr.errors import nearest
from gnmr.paths import PathSpec, Plan, Recipe, convert
from gnmr.paths.conversion import operator_shapes
from gnmr.paths.memory import is_sharded
from gnmr.paths.plan import nominal_bits
from gnmr.paths.price import PriceMeter
from gnmr.paths.probe import Probe
from gnmr.paths.units import PathUnit, module_of
from gnmr.recording import Recording, plain

_Link: TypeAlias = tuple[dict[str, Any], str, Any]
"""A module's modules or parameters by name, one of the names, what stood there."""


def costs_of(plan: Plan, control: ControlSpec) -> tuple[list[float], float]:
    """(what recovery of each unit costs, what pins take), as shares of what recovery of everything costs: of the GEMMs'
    arithmetic, or where there is a budget of what `control.cost` says. ValueError for a table of other units."""
    cost = control.cost if control.budget is not None else "gemm"
    if isinstance(cost, str):
        return plan.costs(cost)
    names = [unit.name for unit in plan.units]
    for wrong in (*(set(names) - cost.keys()), *(cost.keys() - set(names))):
        raise ValueError(f"cost: {wrong!r} is {'missing' if wrong in names else 'no unit'}; units are {names[0]} ...")
    if not (every := sum(cost.values())):
        raise ValueError("cost: no unit costs anything")
    pinned = [cost[unit.name] for unit in plan.units if not unit.routable]
    return [cost[name] / every for name in names], sum(pinned) / every


def units_of(
    plan: Plan, model: nn.Module | None = None, observe: str = "parameters", costs: Sequence[float] | None = None
) -> list[Unit]:
    """The plan's units; monitored only where it has no recovery path, or where pins leave nothing to recover: routed,
    such a unit would take one of the max_o places for nothing, and what is measured of it says what its pin is worth.

    Their costs are `costs`; None: shares of the GEMMs' arithmetic. Their extra bytes are Eq. 5's a token above the low
    path with its pins, with the bits of the input that wgrad reads. 1 where recovery adds none.

    Their parameters are the operators' own; with observe="adapter" (`gnmr.controller.observed`) the trainable ones
    below their names in `model`. ValueError for a unit without any.
    """

    def extra_bytes(unit: PathUnit) -> float:
        more = sum(
            o.in_features * max(0, nominal_bits(unit.path_of(o)) - nominal_bits(o.low))
            for o in unit.operators
            if o.recovery is not None
        )
        return more / 8 if more > 0 else 1.0

    def parameters(unit: PathUnit) -> tuple[nn.Parameter, ...]:
        if observe == "adapter" and model is not None:
            return adapters(model, module_of(unit.name))
        return tuple(parameter for operator in unit.operators for parameter in operator.parameters())

    return [
        Unit(
            unit.name,
            parameters(unit),
            unit.switch if unit.routable else None,
            cost=cost,
            extra_bytes=extra_bytes(unit),
        )
        for unit, cost in zip(plan.units, plan.costs("gemm")[0] if costs is None else costs, strict=True)
    ]


def norms_of(model: nn.Module, units: Sequence[Unit], observe: str) -> OutputGradients | None:
    """What `Controller(norms=...)` takes: hooks on the units' outputs for "input_grad", else None."""
    return OutputGradients(model, [module_of(unit.name) for unit in units]) if observe == "input_grad" else None


def _links(model: nn.Module, modules: Iterable[nn.Module], read: Iterable[nn.Module]) -> list[_Link]:
    """Where these modules stand in `model`, and the parameters in and below those that are `read`."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[tuple[int, str], _Link] = {}
    for module in modules:
        at = model
        for part in filter(None, names[module].split(".")):
            found[id(at), part] = at._modules, part, at._modules[part]
            at = at.get_submodule(part)
    for module in {below: None for one in read for below in one.modules()}:
        for where in (module._modules, module._parameters):
            found |= {(id(where), name): (where, name, value) for name, value in where.items()}
    return list(found.values())


class AttachedController(Controller):
    """A controller that knows the plan it routes, and the model: the protocol of one step.

        micro_step()         after each micro-batch's backward pass
        measure()            after the last of them: norms, what the paths measured; the paths' step is over
        observe(evidence)    signal and policy, as a packet for the host
        apply(host)          units are switched, the paths' next step begins

    `step` is the last three in one; `discard` ends a step that is not to count. `gnmr train` calls them one by one,
    because its optimizer steps, and other numbers join the packet, before the one transfer to the host.

    A parameter of a unit that was exchanged for another one is followed from the next step on; a module that was, and
    parameters that were sharded, are refused there (`ValueError`).
    """

    plan: Plan
    _detached = False
    _recording: Recording | None = None
    _recorded_elsewhere = False
    """By another process."""
    _measured = False
    """The step's passes are over for the paths, its decision is not applied yet."""

    def attach_plan(self, plan: Plan, model: nn.Module, probe_tokens: int = 1, price_tokens: int = 16) -> None:
        """Takes the plan of `model` and has its operators measure what the signal needs of them."""
        self.plan, self._model = plan, model
        observe = self.spec.observe
        outside = [] if observe == "parameters" else [module_of(name) for name in self.names]
        around: list[nn.Module] = [watched(model, name) for name in dict.fromkeys(outside)]
        self._modules = dict.fromkeys([*plan.operators, *around])
        self._read: list[nn.Module] = around if observe == "adapter" else [*plan.operators]
        self._links = _links(model, self._modules, self._read)
        needs = self._path_needs()
        names = [name for name in needs if name in PATH_EVIDENCE]
        self._probe = plan.probe(names, probe_tokens) if names else None
        prices = [name for name in needs if name in PRICE_EVIDENCE]
        self._prices = plan.price(prices, price_tokens) if prices else None
        self._begin()

    def _path_needs(self) -> tuple[str, ...]:
        """Evidence that may be the paths' to measure."""
        return self.needs

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of pickle and deepcopy: a copy of the model alone has no probe."""
        self.__dict__.update(state)
        self.plan.shared.probe, self.plan.shared.prices = self._probe, self._prices

    def _check_attached(self) -> None:
        """RuntimeError after `detach`."""
        if self._detached:
            raise RuntimeError("this controller was detached: its model has plain linears again; attach another")

    def _check_alone(self, what: str) -> None:
        """ValueError where several processes train the model, or its parameters are sharded."""
        if self.together() or is_sharded(*self._model.parameters()):
            raise ValueError(f"{what}: runs in one process, on parameters that are whole; not under DDP or FSDP")

    def follow(self) -> None:
        """Takes note of what was exchanged in the model since the last step."""
        self._check_attached()
        for where, name, found in self._links:
            if where.get(name) is not found:
                break
        else:
            return
        inside = set(self._model.modules())
        for module in self._modules:
            if module not in inside:
                name = getattr(module, "operator_name", type(module).__name__)
                raise ValueError(
                    f"{name}: its module is no longer in the model (replaced or taken out since attach), so nothing "
                    "runs on its paths: exchange its parameters instead, or detach and attach again"
                )
        costs = [unit.cost for unit in self.units]
        self._exchange(units_of(self.plan, self._model, self.spec.observe, costs))
        self._links = _links(self._model, self._modules, self._read)

    def _begin(self) -> None:
        """A step of the paths: measured only if somebody reads it, and in 16 bits in a warm-up there."""
        self._measured = False
        self.plan.begin_step(self.t + 1)
        if self._probe is not None:
            self._probe.enabled = self.reads_next()
        if self._prices is not None:
            self._prices.enabled = self.reads_next()
            self._prices.begin_step(self.t + 1)

    def _end(self) -> None:
        """The step's passes are over for the paths."""
        if not self._measured:
            amax = self.plan.shared.amax
            if self.ranks is not None and amax is not None and amax.history is not None:
                self.ranks.take_largest(amax.history[:, :, 0])  # delayed scales are those of the whole step
            self.plan.end_step()
            self._measured = True

    def micro_step(self, fraction: float | None = None) -> None:
        """As `Controller.micro_step`."""
        self.follow()
        super().micro_step(fraction)

    def _own_evidence(self) -> set[str]:
        measured = [one.names for one in (self._probe, self._prices) if one is not None]
        return super()._own_evidence().union(*measured)

    def parts(self, plain: Tensor | None = None) -> dict[str, Tensor]:
        """As `Controller.parts`, with what the paths measured."""
        self.follow()
        found = super().parts(plain)
        if self._probe is not None and self.ranks is not None:
            found["probe"] = self._probe.parts(self.ranks.share)
        if self._prices is not None and self.ranks is not None:
            rows = torch.tensor(self._prices.rows, dtype=torch.float64)
            found |= {"prices": self._prices.parts(self.ranks.share), "price_rows": to_device(rows, self._device)}
        return found

    def measure(
        self,
        grad_scale: float = 1.0,
        norms: tuple[Tensor, Tensor] | None = None,
        sums: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """As `Controller.measure`, with what the paths measured; their step ends. RuntimeError after `detach`."""
        self.follow()
        sums = self.summed(sums)
        found = super().measure(grad_scale, norms, sums)
        if self._probe is not None:
            # Squared gradients carry the loss scale twice.
            found |= {
                name: value / grad_scale**2 if name.startswith("gap") else value
                for name, value in self._probe.read(None if sums is None else sums["probe"]).items()
            }
            self._probe.reset()
        if self._prices is not None:
            found |= self._prices.read(grad_scale, None if sums is None else (sums["prices"], sums["price_rows"]))
            self._prices.reset()
        self._end()
        return found

    def true_gap(self, backward: Callable[[], object]) -> Tensor:
        """The evidence `true_gap`: the gradients of both paths on one batch (corollary 1), (U,).

        Call it before the step's own passes. `backward` runs them, forward and backward, and is called once a path.
        Paths and generators are afterwards as they were, all gradients are None. Does not wait for the device.
        """
        self._check_attached()
        self._check_alone("true_gap")
        gradients: list[list[list[Tensor]]] = []
        distinct = Distinct(unit.parameters for unit in self.units)
        devices = [self._device] if self._device.type == "cuda" else []
        with self.unmeasured():
            for recovering in (False, True):
                # Dropout draws in each of them what the step will draw.
                with self.plan.no_side_effects(), torch.random.fork_rng(devices):
                    for operator in self.plan.operators:
                        operator.switch(recovering)
                    backward()
                # Where one path leaves a parameter without gradient (an expert without tokens), the other's is the gap.
                gradients.append(
                    [
                        [torch.zeros_like(p).float() if p.grad is None else p.grad.float() for p in group]
                        for group in distinct.groups
                    ]
                )
                self._model.zero_grad(set_to_none=True)
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        return distinct.of_each(
            torch.stack(
                [
                    sum(((a - b).square().sum(dtype=torch.float64) for a, b in zip(low, high, strict=True)), nothing)
                    for low, high in zip(*gradients, strict=True)
                ]
            )
        )

    def explain(
        self,
        loss_of_batch: Callable[[], Tensor | Iterable[Tensor]],
        *,
        loss: float | None = None,
        usual: tuple[float, float] | None = None,
        grad_scale: float = 1.0,
    ) -> Verdict:
        """What is to blame for the step whose gradients are there now: data, precision (of which units) or chance.

        Call it between the step's last backward pass and `step`, for a step that spikes or is not finite.

            if not loss.isfinite() or loss > 2 * usual_loss:
                print(controller.explain(lambda: model(batch).loss, loss=loss.item(), usual=(usual_loss, usual_norm)))

        Args:
            loss_of_batch: runs the step's forward passes and returns what backward started from, the mean loss; or
                gives its parts one after the other (a generator), of which each has its backward pass before the next.
            loss: of the step as it was seen; None: that of a repetition.
            usual: loss and gradient norm of ordinary steps. ValueError where it is missing and both are finite.
            grad_scale: the loss scale that the gradients carry.

        Takes four times the step's time at the most, a third of it for a loss that is not finite in 16 bits either.
        Gradients, generators, buffers, paths and history are afterwards as they were. Dropout draws anew, so passes
        that differ by less than a quarter are called equal. Waits for the device. See docs/blame.md.
        """
        self.follow()
        self._check_alone("explain")
        _check_explain(loss_of_batch, loss, usual, grad_scale)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        kept = [p.grad for p in parameters]
        norm = float(gradient_norms(parameters).square().sum().sqrt()) / grad_scale
        distinct = Distinct(unit.parameters for unit in self.units)
        of_units = UnitNorms(distinct.groups)

        def run(backward: bool) -> Tensor:
            total: Tensor | None = None
            for part in _parts(loss_of_batch(), backward):
                if backward:
                    part.backward()
                total = part.detach() if total is None else total + part.detach()
            if total is None:
                raise ValueError("loss_of_batch: gave no loss")
            return total

        def both() -> Seen:
            value = float(run(True))
            if all(parameter.grad is None for parameter in parameters):
                raise ValueError("loss_of_batch: its backward pass reaches no parameter of the attached model")
            units = distinct.of_each(of_units()[0]).cpu().numpy()
            found = Seen(value, float(gradient_norms(parameters).square().sum().sqrt()), units)
            for parameter in parameters:
                parameter.grad = None
            return found

        start = Start.of(self.plan, self._device)
        again = Again(self.plan, start, self._device, lambda: run(False), both)
        for parameter in parameters:
            parameter.grad = None
        try:
            with replaying(self.plan, self._model, self.unmeasured(), self._device):
                seen = Seen(again.loss() if loss is None else loss, norm)
                if not math.isfinite(seen.loss):
                    return find_nonfinite(again, self.t + 1)
                if all(gradient is None for gradient in kept):
                    raise ValueError("no gradients: call explain between the step's last backward pass and step()")
                return explain(again, seen, _levels(seen, usual), self.t + 1, same=0.25)
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Inside, passes leave nothing in the probe and in norms of outputs."""
        watching = [
            one
            for one in (self._probe, self._prices, self.norms)
            if isinstance(one, (Probe, PriceMeter, OutputGradients))
        ]
        enabled = [one.enabled for one in watching]
        for one in watching:
            one.enabled = False
        try:
            yield
        finally:
            for one, was in zip(watching, enabled, strict=True):
                one.enabled = was

    def apply(self, host: Mapping[str, np.ndarray]) -> Decision:
        """As `Controller.apply`; the next step begins for the paths too."""
        self._check_attached()
        spent = None if self._recording is None else self.plan.spent()
        self._end()
        self._begin()
        decision = super().apply(host)
        if self._recording is not None and spent is not None:
            self._recording.step(decision, spent)
        return decision

    def log(self, **figures: float) -> None:
        """Puts loss, lr, tokens or val_loss beside the step that was taken last, where `attach` was given a folder to
        record to (gnmr/recording.py); of several processes the first one records. ValueError for other figures."""
        if self._recording is not None:
            self._recording.log(**figures)
        elif not self._recorded_elsewhere:
            raise ValueError("log: nothing is recorded: attach(..., record='runs/mine') names a folder for it")

    def begin_again(self) -> None:
        """The step that was undone begins again for the paths too."""
        self._begin()

    def discard(self) -> None:
        """As `Controller.discard`, with what the paths measured and remember of the step."""
        self._check_attached()
        super().discard()
        for measured in (self._probe, self._prices):
            if measured is not None:
                measured.reset()
        self._end()
        self._begin()

    def _advice(self, decision: Decision) -> str:
        if advice := super()._advice(decision):
            return advice
        for unit in self.plan.units:
            for operator in unit.operators:
                ran = operator.read is not None or operator.in_graphs is not None  # graphs do not tell
                if not ran and operator.weight.grad is not None:
                    return (
                        f"{operator.operator_name}: has a gradient but never ran: something reads its weight without "
                        "calling the module (a fused projection, F.linear), so its path is never in force; leave it "
                        "out of the targets"
                    )
        return ""

    def detach(self) -> None:
        """Gives the model its plain linears back; the controller is of no use afterwards. A recorded run is done."""
        if self._recording is not None:
            self._recording.finish()
            self._recording = None
        self.plan.restore()
        self._detached = True
        if isinstance(self.norms, OutputGradients):
            self.norms.close()

    def state_dict(self) -> dict[str, Any]:
        """As `Controller.state_dict`, with the generator of stochastic rounding and delayed scales."""
        return {**super().state_dict(), "plan": self.plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Controller.load_state_dict`; ValueError if it belongs to other paths too."""
        super().load_state_dict(state)
        self.plan.load_state_dict(state["plan"])
        self._begin()

    def check_state(self, state: Any) -> None:
        """As `Controller.check_state`, and of the paths."""
        self._check_attached()
        if isinstance(state, Mapping):
            self.plan.check_state(state.get("plan"))
        super().check_state(state)


def _check_explain(
    loss_of_batch: object, loss: float | None, usual: tuple[float, float] | None, grad_scale: float
) -> None:
    """ValueError for what `explain` cannot be given."""
    if not callable(loss_of_batch):
        kind = type(loss_of_batch).__name__
        raise ValueError(f"loss_of_batch: must be a function that runs the step's forward passes again, not a {kind}")
    if loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        raise ValueError(f"loss: must be a number (loss.item()), not a {type(loss).__name__}")
    if usual is not None:
        numbers = [*usual] if isinstance(usual, Sequence) else []
        if (
            len(numbers) != 2
            or not all(isinstance(one, int | float) for one in numbers)
            or not (math.isfinite(numbers[0]) and numbers[1] > 0)
        ):
            raise ValueError(f"usual={usual!r}: must be two numbers, loss and gradient norm of ordinary steps")
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, int | float) or not 0 < grad_scale < math.inf:
        raise ValueError(f"grad_scale={grad_scale!r}: must be a positive number")


def _parts(given: object, backward: bool) -> Iterator[Tensor]:
    """The losses that `loss_of_batch` gave. ValueError for what is none, or has no graph for `backward`."""
    if not isinstance(given, Iterable):
        raise ValueError(f"loss_of_batch: gave a {type(given).__name__}, not the loss that backward started from")
    for part in [given] if isinstance(given, Tensor) else given:
        if not isinstance(part, Tensor) or part.numel() != 1:
            what = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise ValueError(f"loss_of_batch: gave {what}, not the scalar loss that backward started from")
        if backward and not part.requires_grad:
            raise ValueError("loss_of_batch: its loss has no graph (detached, or made under no_grad)")
        yield part


def _levels(seen: Seen, usual: tuple[float, float] | None) -> tuple[Level, Level]:
    """From a fifth above what is `usual` on it is a spike; where neither is that far, the loss is one."""
    if usual is None:
        if math.isfinite(seen.norm):
            raise ValueError("usual: give loss and gradient norm of ordinary steps, or nothing says what a spike is")
        return NO_LEVEL, NO_LEVEL
    loss, norm = (Level(value, value + abs(value) / 5) for value in usual)
    return (loss, norm) if loss.spike(seen.loss) or norm.spike(seen.norm) else (Level(usual[0], usual[0]), norm)


def specs_of(
    paths: PathSpec | None, control: ControlSpec | None, named: Mapping[str, Any]
) -> tuple[PathSpec, ControlSpec]:
    """Both specs, of which `named` may give single fields in place of the spec itself.

    TypeError, with the nearest name, for a name that is no field of either; ValueError for senseless values and for a
    field given beside its spec.
    """
    of_paths, of_control = ({field.name for field in fields(spec)} for spec in (PathSpec, ControlSpec))
    for name in named:
        if name not in of_paths | of_control:
            near = nearest(name, sorted(of_paths | of_control | {"paths", "control", "steps", "record"}))
            raise TypeError(f"attach has no option {name!r}{near}")
        for given, own, word in ((paths, of_paths, "paths"), (control, of_control, "control")):
            if given is not None and name in own:
                raise ValueError(f"{name}: is a field of {word}, which is given too; set it there")
    if paths is None:
        mine = {name: value for name, value in named.items() if name in of_paths}
        if any(isinstance(mine.get(word), Recipe) for word in ("low", "recovery")):
            usual = PathSpec()
            mine = {"low": usual.low, "recovery": usual.recovery} | mine
            paths = PathSpec.of(**mine)
        else:
            paths = PathSpec(**mine)
    if control is None:
        control = ControlSpec(**{name: value for name, value in named.items() if name in of_control})
    return paths, control


def attach(
    model: nn.Module,
    paths: PathSpec | None = None,
    control: ControlSpec | None = None,
    *,
    plan: PinPlan | str | PathLike[str] | None = None,
    steps: int | None = None,
    seed: int = 0,
    record: str | PathLike[str] | Sequence[str] = (),
    **named: Any,
) -> AttachedController:
    """Gives the model's linears two paths and returns the controller that routes them.

    Args:
        model: any module with `nn.Linear` inside, on its final device and in its final dtype.
        paths: the two paths and which linears get them. Two formats ("int4", "e4m3", "bf16") compress what the linears
            save for the backward pass and leave the forward pass as it is; two recipes ("fp8_hybrid", "llm_int8",
            "bf16") compute in low precision.
        control: signal, routing and thresholds; a warning says which thresholds the signal does not read.
        plan: plan.json of `gnmr diagnose`, or what it holds: says low, recovery, recipes, targets and pins, and the
            threshold of a signal of prices that has none.
        steps, seed: see `gnmr.controller.Controller`; `seed` is that of stochastic rounding too.
        record: a new folder for the records of this loop, which `gnmr report` reads (gnmr/recording.py); or names of
            evidence, see `gnmr.controller.Controller`.
        named: single fields of `PathSpec` and `ControlSpec`, in place of the spec.

    Call `controller.step()` once per optimizer step: after the backward pass of the last micro-batch, before clipping.
    Where a step is thrown away, call `controller.discard()`. ValueError for senseless values; the model is then as it
    was. Parameters may be exchanged afterwards, modules not (`AttachedController`); the model may change its dtype, but
    not its device. The operators are differentiable once: no gradient penalty (`create_graph=True`) goes through them.
    """
    folder, evidence = (Path(record), ()) if isinstance(record, str | PathLike) else (None, record)
    if isinstance(record, str) and record in EVIDENCE:
        raise ValueError(f"record={record!r}: must be a list, where evidence is meant: [{record!r}]")
    pins, where = (plan, "plan") if isinstance(plan, PinPlan | None) else (read_plan(plan), f"plan={plan}")
    if pins is not None:
        named |= _of_plan(pins, paths, named)
    paths, control = specs_of(paths, control, named)
    if pins is not None and (more := pins.threshold(control.signal, control.options)):
        control = replace(control, options={**control.options, **more})
    whole(seed, "seed", 0)
    _check_request(model, paths, control)
    if unread := control.unread():
        warnings.warn(
            f"{', '.join(unread)}: has no effect, the signal {control.signal_name} does not read it", stacklevel=2
        )
    if pins is not None:
        pins.refuse_other(where, operator_shapes(model, paths))
    converted = convert(model, paths, seed=seed, store=False, shown=False)
    norms = None
    try:
        costs, pinned = costs_of(converted, control)
        units = units_of(converted, model, control.observe, costs)
        _check_trained(converted, units, control)
        norms = norms_of(model, units, control.observe)
        controller = AttachedController(
            units,
            control,
            steps=steps,
            seed=seed,
            record=evidence,
            norms=norms,
            whole_cost=1.0,
            pinned=pinned,
            ranks=Ranks(),
        )
        converted.warmup_steps = control.warmup_steps if control.warmup_path == "16bit" else 0
        controller.attach_plan(converted, model, paths.probe_tokens, paths.price_tokens)
        converted.store(paths.weights)  # late: it cannot be undone to the bit
        controller.follow()  # or the units would hold the 16-bit weights
        if folder is not None:
            controller._recorded_elsewhere = rank() != 0
            controller._recording = _recording(folder, controller, paths, seed) if rank() == 0 else None
    except BaseException:
        converted.restore()
        if norms is not None:
            norms.close()
        raise
    return controller


def _recording(folder: Path, controller: AttachedController, paths: PathSpec, seed: int) -> Recording:
    """The records of this loop, with what is known of it. UserError for a folder that is not empty."""
    plan, spec, model = controller.plan, controller.spec, controller._model
    header = {
        "units": controller.names,
        "cost": [unit.extra_bytes for unit in controller.units],
        "spend": [unit.cost for unit in controller.units],
        "spend_pinned": controller.pinned,
        "recoverable": plan.recovery is not None,
        "pinned": [unit.name for unit in plan.units if not unit.routable and plan.recovery is not None],
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    control = plain(vars(spec)) | {"signal": spec.signal_name}
    return Recording(folder, {"paths": plain(vars(paths)), "controller": control}, header, seed=seed, max_o=spec.max_o)


def _of_plan(plan: PinPlan, paths: PathSpec | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `PathSpec` that a plan says. ValueError where they were given too."""
    given = ["paths"] * (paths is not None) + [name for name in named if name in PATHS]
    if given:
        raise ValueError(f"{given[0]}: the plan says which paths; leave one of them out")
    return plan.paths()


def _check_request(model: nn.Module, paths: PathSpec, control: ControlSpec) -> None:
    """ValueError for a model that cannot be attached, and for a warm-up without its path."""
    if paths.recovery is None and control.warmup_steps:
        raise ValueError(f"warmup_steps={control.warmup_steps}: a high-fidelity warm-up needs a recovery path")
    if control.warmup_path == "16bit" and not control.warmup_steps:
        raise ValueError("warmup_path='16bit': there is no warm-up; give warmup_steps")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: must be an nn.Module, not {type(model).__name__}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model: has parameters on the meta device; attach when its weights are loaded")


def _check_trained(plan: Plan, units: Sequence[Unit], control: ControlSpec) -> None:
    """ValueError for paths that change nothing; a warning where units have no gradient to watch."""
    if plan.without_effect:
        raise ValueError(
            f"low={plan.low.name!r}: compresses what the weight gradient reads, and all converted weights are "
            "frozen; use a recipe (low='llm_int8', recovery='bf16') or site='forward'"
        )
    frozen = [unit.name for unit in units if not any(p.requires_grad for p in unit.parameters)]
    if frozen and control.observe == "parameters":
        warnings.warn(
            f"{len(frozen)} of {len(units)} units have no trainable parameter, so no gradient norm to watch "
            f"(the first is {frozen[0]}): they stay on the low-cost path; use observe='adapter' where adapters are "
            "trained in them, else observe='input_grad' (a format does nothing for a frozen weight; a recipe, or "
            "site='forward', does)",
            stacklevel=3,
        )
