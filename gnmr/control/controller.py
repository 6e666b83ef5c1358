"""The controller: measure -> observe -> apply, once a step, with one host synchronization.

    loss.backward()                 gradients of the whole step, unscaled, not yet clipped
    decision = controller.step()    norms, signal, policy; units are switched for the next step
    clip_grad_norm_(...); optimizer.step(); optimizer.zero_grad()

Norms of step t exist only after its backward pass, so the set chosen from step t is in force in step t + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.control.calibration import Trigger
from gnmr.control.decision import Decision, few
from gnmr.control.device import HostPacket, all_finite
from gnmr.control.evidence import PATH_EVIDENCE, PRICE_EVIDENCE, missing, without_zeros
from gnmr.control.measurements import Measurements, Norms
from gnmr.control.policy import ActiveSet, Budget, may
from gnmr.control.ranks import Ranks
from gnmr.control.signals import BlindSignal, Context, Evidence, SignalBase, build_signal
from gnmr.control.signals.blind import AlwaysHigh, AlwaysLow
from gnmr.control.spec import NO_CAP, ControlSpec
from gnmr.control.unit import Unit
from gnmr.errors import warn
from gnmr.options import whole_number

_COLUMNS_OF_EVERY_RUN = {"norm", "observed", "risk", "active", "lock", "step", "unit"}


class Controller:
    """GNMR's controller over any units (paper, sections 2 and 3).

    Args:
        units: in a fixed order, the same on every rank; ids must differ. All are put on the low-cost path (on the
            recovery path for a warm-up).
        spec: signal, routing and thresholds.
        steps: length of the run, if known, for signals that depend on it (static_k).
        seed: seed of signals that draw random numbers.
        record: names of evidence that each `Decision` shall hold.
        whole_cost: cost of recovering everything, in the units' costs; `spec.budget` is a share of it. None: the sum of
            the units' costs.
        pinned: the share of `whole_cost` that is always spent.
        counted: False if the costs are estimates until `recost`; call `check_budget` then.
        norms: returns (norm (U,) float64, observed (U,) bool) of the step on the device, loss scale included; None: the
            norms of the gradients of the units' parameters. `OutputGradients` is another one.
        ranks: the processes that train one model, each of which has a controller; None: this one alone. Norms and
            evidence are then summed over them, in one collective per step, and all choose the same units.

    If all observed risks are Inf and they are more than max_o, the set and the locks stay unchanged. This happens if a
    loss scale overflowed or the loss itself is not finite. The paper does not define these steps, and ranking equal
    risks by unit order would be arbitrary.

    The controller needs no file system, no configuration library and no process group.

    Raises:
        ValueError: if an argument is invalid.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        spec: ControlSpec | None = None,
        *,
        steps: int | None = None,
        seed: int = 0,
        record: Sequence[str] = (),
        norms: Callable[[], Norms] | None = None,
        whole_cost: float | None = None,
        pinned: float = 0.0,
        counted: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.units = units = list(units)
        self.names = _unit_names(units)
        self.spec = spec = ControlSpec() if spec is None else spec
        whole_number(or_null=True, steps=steps)
        spend = None if spec.budget is None else tuple(float(unit.cost) for unit in units)
        context = Context.of(units, max_o=spec.max_o, steps=steps, seed=seed, hold=spec.hold, spend=spend)
        # The signal decides which evidence is measured at all.
        self.signal = build_signal(spec.signal, spec.signal_options(), context)
        self.record = tuple(record)
        self._records_paths = bool({*record} & {*PATH_EVIDENCE, *PRICE_EVIDENCE})
        self.needs = tuple(dict.fromkeys([*self.signal.needs, *record]))
        """Evidence besides norm and observed that every step has to bring."""
        missing(self.needs, ())  # refuses unknown names
        if norms is not None and "micro_square" in self.needs:
            raise ValueError(
                "micro_square is of the gradients of the units' parameters, and the norms are of others "
                "(observe='input_grad'): use another signal"
            )
        if reserved := _COLUMNS_OF_EVERY_RUN & {*self.signal.columns, *record}:
            raise ValueError(
                f"{', '.join(sorted(reserved))}: recorded in every run; name columns and evidence otherwise"
            )
        # What a step is measured by, and what its decision is limited by
        self.measured = Measurements(units, self.needs, norms, ranks)
        self._trigger = Trigger(spec.trigger)
        self.t = 0
        """Steps observed so far."""
        self.pinned = pinned
        """Share of all costs that is always spent."""
        self.device = units[0].parameters[0].device
        budget = None if spec.budget is None else _budget(units, spec.budget, whole_cost, pinned)
        num_recoverable = sum(unit.recoverable for unit in units)
        if self.signal.columns and 1 < num_recoverable <= spec.max_o < NO_CAP:
            warn(
                f"max_o={spec.max_o} caps nothing: all {num_recoverable} units may be on the recovery path at once (in "
                "the paper a quarter of them)"
            )
        self._agreement: Tensor | None = None  # of the current step
        # Estimated costs are checked later, by `check_budget`.
        if counted and budget is not None:
            _check_budget(units, spec, budget, pinned)
        self._set = ActiveSet(units, spec, budget)

    def __repr__(self) -> str:
        """Return the settings and the current state, for display."""
        return f"<{type(self).__name__} of {len(self.units)} units, {self.described()}; {self.now()}>"

    def now(self) -> str:
        """Return the step and the units in recovery, for display."""
        names = self.active
        return f"step {self.t}: {len(names)} in recovery{f': {few(names)}' if names else ''}"

    def described(self) -> str:
        """Return how units are chosen, for display."""
        spec = self.spec
        if not any(unit.recoverable for unit in self.units):
            return "static"
        if isinstance(self.signal, AlwaysLow | AlwaysHigh):
            return f"static ({spec.signal_name})"
        trigger = "calibrating" if self.calibrating else f"trigger {self.trigger:.4g}"
        budget = [] if spec.budget is None else [f"budget={spec.budget:g}"]
        cap = [] if spec.max_o >= NO_CAP else [f"max_o={spec.max_o}"]
        return ", ".join([f"signal {spec.signal_name}", "ranked" if spec.ranked else trigger, *budget, *cap])

    @property
    def ranks(self) -> Ranks | None:
        """The processes that train this model."""
        return self.measured.ranks

    @property
    def trigger(self) -> float:
        """The value that a risk has to exceed."""
        return self._trigger.value

    def calibrate(self, fraction: float = 0.01, steps: int = 100) -> None:
        """Calibrate `trigger` on the next `steps` steps so that `fraction` of all (unit, step) pairs exceed it.

        Published thresholds fit the batches that they were published for; with small batches they fill max_o. Call this
        once, before the first step. During these steps only units whose risk is not finite are promoted. The trigger
        comes from the second half of the steps. Locks, holds and max_o then determine the share spent.

        `state_dict` holds the trigger or the progress of the calibration, and `load_state_dict` continues with either.
        A loop that always calls `calibrate` calls it before loading.

        Adds no synchronization to `step`.

        Args:
            fraction: share of the pairs, above 0 and below 1; a string such as "1%" is read as 0.01.
            steps: length of the calibration in optimizer steps, at least 2.

        Raises:
            ValueError: without a threshold (routing="ranked", signals that read no evidence).
        """
        if self.spec.ranked:
            raise ValueError("calibrate: routing='ranked' has no threshold, max_o or a budget is what it spends")
        if isinstance(self.signal, BlindSignal):
            raise ValueError(
                f"calibrate: {self.spec.signal_name} reads no evidence, its option active_frac is what it spends"
            )
        # A warm-up chooses nothing, so its steps do not count.
        self._trigger.calibrate(fraction, max(self.t, self.spec.warmup_steps) + 1, steps)

    @property
    def calibrating(self) -> tuple[int, int] | None:
        """(Steps that the calibration has seen, steps that it takes), or None without a running calibration."""
        return self._trigger.progress(self.t)

    @property
    def calibrated(self) -> float | None:
        """The trigger that `calibrate` found; None before it is found, or without a calibration."""
        return self._trigger.found

    @property
    def active(self) -> list[str]:
        """Units on the recovery path now, in unit order."""
        return [name for name, active in zip(self.names, self._set.active, strict=True) if active]

    def micro_step(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """Record a micro-batch after its backward pass; needed only for signals that need micro_square.

        Args:
            fraction: the part of the step's loss that this micro-batch contributes; give it for all micro-batches or
                for none. None: all contribute equally. 0: it is left out.
            gradients: see `MicroNorms.add`.

        Raises:
            ValueError: if only some micro-batches of a step have a fraction.
        """
        if self.measured.micro is not None:
            self.measured.micro.add(fraction, gradients)

    def step(
        self, grad_scale: float = 1.0, evidence: Evidence | None = None, *, loss_scale: float | None = None
    ) -> Decision:
        """Observe this step's gradients and route the units for the next one. Waits for the device once.

        Call it after the backward pass of the whole step (all micro-batches) and before clipping. To throw a step away,
        call `discard` instead.

        If a unit's `switch` raises, the error propagates and the step counts. `active` is then the set that was
        reached. Units leave before others join, so it never exceeds max_o, and the next step continues from it.

        Args:
            grad_scale: the loss scale that the gradients still carry.
            evidence: evidence that the signal needs and this controller cannot measure, each (U,) on the units' device.
                docs/signals.md says which signals need it, and how to measure it.
            loss_scale: the loss scale of the backward passes, if the gradients no longer carry it (after
                `GradScaler.unscale_`): it is still in what was measured during these passes. None: `grad_scale`.

        Returns:
            What was seen and chosen; its set is in force in the next step.

        Raises:
            ValueError: if evidence is missing, unknown or of another shape.
        """
        return self.apply(self.observe(self.measure(grad_scale, evidence, loss_scale=loss_scale)).to_host())

    def exchange(self, units: list[Unit]) -> None:
        """Monitor other parameters of these units.

        Raises:
            ValueError: if they are sharded and something reads them.
        """
        self.measured.exchange(units)
        self.units = units

    def recost(self, costs: Sequence[float], pinned: float) -> None:
        """Use other costs of the same units from the next decision on.

        Args:
            costs: the cost of recovering each unit; recovering everything costs 1.
            pinned: the share that is always spent.
        """
        self.units = [replace(unit, cost=cost) for unit, cost in zip(self.units, costs, strict=True)]
        self.pinned = pinned
        if self.spec.budget is not None:
            # Costs are shares of recovering everything, and so is the budget; pins spend their part first.
            self._set.budget = Budget.of(self.spec.budget - pinned, costs)
            # Blind draws are weighed by what each unit takes of the budget.
            if isinstance(self.signal, SignalBase):
                self.signal.context = replace(self.signal.context, spend=tuple(costs))

    def check_budget(self) -> None:
        """Raise ValueError if no unit fits the budget."""
        if self._set.budget is not None:
            _check_budget(self.units, self.spec, self._set.budget, self.pinned)

    def discard(self) -> None:
        """Forget the backward passes since the last `step`, and decide nothing.

        Use it for passes that should not count: a skipped batch, discarded gradients, a second backward pass of another
        loss. Call it with `zero_grad()`. Not needed if `step` is called every step.
        """
        self.measured.reset()

    @torch.no_grad()
    def parts(self, plain: Tensor | None = None) -> dict[str, Tensor]:
        """Return this rank's measurements of the step, each a term of a sum over ranks (`Ranks.sum`), for `measure`.

        Does not wait for the device.

        Args:
            plain: the square of the unsharded gradients (`UnitNorms.parts`), if the loop computes the norms of the
                units' gradients.

        Raises:
            ValueError: if evidence can be measured only in a single process.
        """
        spec, ranks = self.spec, self.ranks
        assert ranks is not None
        # Ranks that differ in one of these would choose different sets.
        settings = self.t, self.names, spec.max_o, spec.t_lock, self.trigger, spec.warmup_steps
        return self.measured.parts(plain, lambda plain: ranks.agreement(settings, self._set.active, plain))

    def measure(
        self,
        grad_scale: float = 1.0,
        evidence: Evidence | None = None,
        norms: Norms | None = None,
        sums: Mapping[str, Tensor] | None = None,
        loss_scale: float | None = None,
    ) -> dict[str, Tensor]:
        """Return the evidence of this step, with the caller's `evidence`. Does not wait for the device.

        Args:
            grad_scale: see `step`.
            evidence: see `step`.
            norms: (norm, observed) of the units' gradients, if the loop computed them together with other parameters
                (`UnitNorms`). No effect if the signal reads norms of something else.
            sums: sums of `parts` over all ranks, if the loop summed them with its own numbers; None: they are computed
                here if there are several ranks.
            loss_scale: see `step`.
        """
        handed = dict(evidence or {})
        if handed or self.needs:  # before anything is read that can be read only once
            missing(tuple(handed), ())  # refuses unknown names
            self._check_evidence(handed, self.measured.names)
        self.measured.check_call(grad_scale, loss_scale)
        # Every rank decides from the same bits of one sum, which also shows whether ranks differ.
        if sums is None and self.measured.together:
            assert self.ranks is not None
            sums = self.ranks.sum(self.parts())
        if sums is not None:
            self._agreement = sums["agreement"]
        return self.measured.read(grad_scale, loss_scale, norms, sums) | handed

    def _check_evidence(self, evidence: Evidence, more: Iterable[str] = ()) -> None:
        """Raise ValueError if evidence has a wrong shape, or a name that neither this controller nor `more` knows."""
        if absent := missing(self.needs, (*evidence, *more)):
            raise ValueError(f"{type(self.signal).__name__} needs {', '.join(absent)}: hand it to step(evidence=...)")
        for name, values in evidence.items():
            if not isinstance(values, Tensor):
                kind = type(values).__name__
                raise ValueError(f"evidence {name}: must be a tensor ({len(self.units)},), not a {kind}")
            if values.shape != (len(self.units),):
                raise ValueError(f"evidence {name}: has shape {tuple(values.shape)}, not ({len(self.units)},)")

    def reads_next(self) -> bool:
        """Return True if the paths' evidence of the coming step is read; otherwise it need not be measured."""
        reads = getattr(self.signal, "reads", None)
        return self._records_paths or reads is None or reads(self.t + 1)

    def mark(self) -> tuple[int, Mapping[str, Tensor]]:
        """Return the state that `observe` changes, for `undo`. Does not wait for the device."""
        state = self.signal.state_dict()
        # Our signals bind new tensors in each update, so that the ones of a state never change.
        return self.t, state if isinstance(self.signal, SignalBase) else deepcopy(state)

    def undo(self, mark: tuple[int, Mapping[str, Tensor]]) -> None:
        """Undo an `observe` whose packet was not applied: the step begins again.

        Args:
            mark: what `mark` returned before that step was observed.
        """
        self.t, signal = mark
        self.signal.load_state_dict(dict(signal))

    def promote(self, names: Iterable[str]) -> bool:
        """Put these units on the recovery path immediately, between two steps, replacing the least risky ones.

        They are locked like any unit over its threshold. Their events (cause "retry") come with the next decision.

        Args:
            names: ids of the units.

        Returns:
            False, with nothing changed, if they exceed max_o or the budget, or one has no recovery path.

        Raises:
            KeyError: if a name is not a unit's.
        """
        indices = {name: i for i, name in enumerate(self.names)}
        wanted = np.zeros(len(self.units), dtype=bool)
        wanted[[indices[name] for name in names]] = True
        # The step that runs now is t + 1: t steps were observed.
        return self._set.promote(wanted, self.t + 1)

    @torch.no_grad()
    def observe(self, evidence: Evidence) -> HostPacket:
        """Return the inputs of `apply`, (U,) each, as a packet for the host. Does not wait for the device.

        Loops use this to send other numbers to the host in the same transfer (`HostPacket.add`), for replay, and for
        norms of other sources. Pass the packet's `to_host()` to `apply`.

        Args:
            evidence: norm (U,) float64, observed (U,) bool and the evidence in `needs`.

        Raises:
            ValueError: if evidence is missing or has another shape, or if the signal returns something else.
        """
        self._check_evidence(evidence)
        # A gradient of exact zeros counts as none.
        evidence = without_zeros(evidence)
        norm, observed = evidence["norm"], evidence["observed"]
        risk, columns = _verdict(self.signal.observe(evidence, self.t + 1), self.signal, norm.shape)
        if not all_finite(risk := risk.double()):
            risk = torch.where(risk.isnan(), torch.inf, risk)  # a NaN risk counts as Inf
        # From here on the step counts. Everything that a decision reads goes to the host in one transfer.
        self.t += 1
        packet = HostPacket({"norm": norm.double(), "observed": observed.bool(), "risk": risk})
        packet.add(**{f"column/{name}": x.double() for name, x in zip(self.signal.columns, columns, strict=True)})
        packet.add(**{f"evidence/{name}": evidence[name].double() for name in self.record})
        if self._agreement is not None:
            packet.add(agreement=self._agreement)
        return packet

    def apply(self, host: Mapping[str, np.ndarray], keep: bool = False) -> Decision:
        """Choose the units (`gnmr.control.policy`) and switch them.

        Args:
            host: the arrays of the packet of `observe`, and maybe others.
            keep: leave set and locks unchanged, whatever the risks (no unit is to blame).

        Raises:
            RunFailed: if ranks disagree (`Ranks.check`); nothing is switched.
        """
        self._agreement = None
        # Before any unit is switched: if ranks differ, all of them stop here.
        if self.ranks is not None and "agreement" in host:
            self.ranks.check(host["agreement"], self.t)
        # Ranked routing has no threshold: every unit with a risk is a candidate.
        trigger = 0.0 if self.spec.ranked else self.trigger
        choice = self._set.choose(host["risk"], host["observed"], self.t, trigger, keep)
        decision = Decision(
            step=self.t,
            units=self.names,
            **{name: host[name] for name in ("norm", "observed", "risk")},
            **{name: values.copy() for name, values in choice._asdict().items()},
            columns={name: host[f"column/{name}"] for name in self.signal.columns},
            evidence={name: host[f"evidence/{name}"] for name in self.record},
            in_force=self._set.active.copy(),
            thresholds=tuple(None if x is None else x * self.trigger for x in self.signal.thresholds(self.t)),
            events=self._set.events,
            trigger=trigger,
            own_norm=self.measured.own_norm,
        )
        self._set.move(decision)  # if a switch raises, its events come with the next decision
        self._set.events = []
        # Only units that can be promoted enter the quantile.
        if self.calibrating:
            self._trigger.learn(decision.step, decision.risk, decision.observed & self._set.recoverable)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next decision depends on.

        This is the step count, the active set, the locks, the signal's history, and the trigger or the state of its
        calibration.
        """
        return self._trigger.state_dict() | {
            "units": list(self.names),
            "t": self.t,
            "active": torch.from_numpy(self._set.active.copy()),
            "lock": torch.from_numpy(self._set.lock.copy()),
            "signal": self.signal.state_dict(),
        }

    def check_state(self, state: Any) -> None:
        """Check a state before it is loaded.

        Raises:
            ValueError: it is not a state, or belongs to other units or settings; the message is one line.
        """
        _check_state(state, self.units, self.spec, self._set.budget)
        self._trigger.check_state(state)
        # A signal with its own loader checks the state itself, when it is loaded.
        if isinstance(self.signal, SignalBase) and type(self.signal).load_state_dict is SignalBase.load_state_dict:
            self.signal.check_state(state["signal"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state and put every unit on the path it had.

        Raises:
            ValueError: if the state is damaged, is not a state, or belongs to other units or settings, such as a
                smaller max_o than its active set. After this error, or one from a switch or the signal, nothing has
                changed.
        """
        # A state is loaded whole or not at all: check it, then load what may still fail, then the rest.
        self.check_state(state)
        active = state["active"].cpu().numpy().astype(bool)
        before = deepcopy(self.signal.state_dict())
        try:
            self.signal.load_state_dict(state["signal"])
            self._set.restore(active)
        except BaseException:
            self.signal.load_state_dict(before)
            raise
        self.t = int(state["t"])
        self._trigger.load_state_dict(state, max(self.t, self.spec.warmup_steps) + 1)
        self._set.lock, self._set.events = state["lock"].cpu().numpy().astype(np.int64), []


def _unit_names(units: Sequence[Unit]) -> list[str]:
    """Return the units' ids. Raises ValueError if there are none, or if two are equal."""
    if not units:
        raise ValueError("no units: there is nothing to control")
    names = [unit.name for unit in units]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"unit ids must differ: {repeated} appear twice")
    return names


def _budget(units: Sequence[Unit], share: float, whole_cost: float | None, pinned: float) -> Budget:
    """Return the budget of `Controller`. Raises ValueError if a cost is invalid or no unit costs anything."""
    costs = [float(unit.cost) for unit in units]
    if invalid := [unit.name for unit, cost in zip(units, costs, strict=True) if not 0 <= cost < np.inf]:
        raise ValueError(f"budget={share:g}: unit {invalid[0]!r} must cost a number of 0 or more")
    # Costs become shares of `total`, so that they compare with the budget's share.
    total = sum(costs) if whole_cost is None else whole_cost
    if not total > 0:
        raise ValueError(f"budget={share:g}: no unit costs anything")
    return Budget.of(share - pinned, [cost / total for cost in costs])


def _check_budget(units: Sequence[Unit], spec: ControlSpec, budget: Budget, pinned: float) -> None:
    """Raise ValueError if no unit fits the budget."""
    routed = [cost for unit, cost in zip(units, budget.cost.tolist(), strict=True) if unit.recoverable]
    if routed and budget.most < min(routed):
        pins = f" in addition to pins, which take {pinned:.3g}" if pinned else ""
        raise ValueError(
            f"budget={spec.budget:g}: is too small for any unit{pins}; the cheapest takes {min(routed):.3g}"
        )


def _verdict(returned: Any, signal: Any, shape: torch.Size) -> tuple[Tensor, Sequence[Tensor]]:
    """Return (risk, columns) of the shape (U,). Raises ValueError if `signal.observe` returned something else."""
    names = signal.columns
    pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], (tuple, list))
    tensors: list[Tensor] = [returned[0], *returned[1]] if pair else []
    if len(tensors) != 1 + len(names) or any(getattr(tensor, "shape", None) != shape for tensor in tensors):
        raise ValueError(
            f"{type(signal).__name__}.observe() must return the risk and a tuple of its columns "
            f"({', '.join(names) or 'none'}), each a tensor of shape ({shape[0]},)"
        )
    return tensors[0], tensors[1:]


def _check_state(state: Any, units: Sequence[Unit], spec: ControlSpec, budget: Budget | None) -> None:
    """Raise ValueError, in one line, if `state` is not a state or belongs to other units, paths or settings."""
    if not isinstance(state, Mapping) or "units" not in state:
        raise ValueError("state: is not what a controller's state_dict() returned")
    if list(state["units"]) != [unit.name for unit in units]:
        raise ValueError("the controller's state belongs to other units than this model has")
    if absent := [name for name in ("t", "active", "lock", "signal") if name not in state]:
        raise ValueError(f"state: has no {', '.join(absent)}")
    active = state["active"].cpu().bool().numpy()
    # During the warm-up everything is on the recovery path, whatever the cap.
    if state["t"] < spec.warmup_steps:
        return
    if (number := int(active.sum())) > spec.max_o:
        raise ValueError(
            f"state: {number} units are on the recovery path, max_o={spec.max_o} allows {spec.max_o}: load it into "
            f"a controller with max_o={number} or more"
        )
    if not may(active, spec.max_o, budget):
        raise ValueError("state: the units on the recovery path cost more than the budget allows here")
