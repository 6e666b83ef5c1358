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
from gnmr.control.checks import budget_left, check_signal, check_state, judged, unit_names, warn_of_cap
from gnmr.control.decision import Decision, Event, Switches, few
from gnmr.control.device import HostPacket, all_finite
from gnmr.control.evidence import PATH_EVIDENCE, PRICE_EVIDENCE, Measured, missing, without_zeros
from gnmr.control.hints import Hints
from gnmr.control.policy import Budget
from gnmr.control.ranks import Ranks
from gnmr.control.routing import Routed, Routing
from gnmr.control.signals import BlindSignal, Context, Evidence, SignalBase, build_signal
from gnmr.control.signals.blind import AlwaysHigh, AlwaysLow
from gnmr.control.spec import NO_CAP, ControlSpec
from gnmr.control.unit import Unit
from gnmr.errors import whole


class Controller:
    """GNMR's controller over any units (paper, sections 2 and 3).

    Args:
        units: in a fixed order, the same on every rank; ids must differ. All are put on the low-cost path (on the
            recovery path for a warm-up).
        spec: signal, routing and thresholds.
        steps: length of the run, if known, for signals that go by it (static_k).
        seed: of signals that draw.
        record: names of evidence that each `Decision` shall hold.
        whole_cost: what recovery of everything costs, in the units' costs, of which `spec.budget` is a share; None: the
            sum of the units' costs.
        pinned: the share of it that is always spent.
        norms: gives (norm (U,) float64, observed (U,) bool) of the step on the device, loss scale included; None: of
            the gradients of the units' parameters. `gnmr.control.norms` has another one.
        ranks: the processes that train one model, of which each has a controller; None: this one alone. Norms and
            evidence are then summed over them, in one collective a step, and all choose the same units.

    If all observed risks are Inf (a loss scale overflowed, or the loss itself is not finite) and they are more than
    max_o, set and locks stay as they are. The paper says nothing of such steps, and ranking equal risks by unit order
    would mean nothing.

    Works with no file system, no configuration library and no process group. Raises ValueError if an argument is
    invalid.
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
        whole(or_null=True, steps=steps)
        if isinstance(record, str) or not isinstance(record, Sequence):
            raise ValueError(f"record={record!r}: must be a list of names")
        spend = None if spec.budget is None else tuple(float(unit.cost) for unit in units)
        context = Context.of(units, max_o=spec.max_o, steps=steps, seed=seed, hold=spec.hold, spend=spend)
        self.signal = build_signal(spec.signal, spec.signal_options(), context)
        self.record = tuple(record)
        self.needs = tuple(dict.fromkeys([*self.signal.needs, *record]))
        """Evidence besides norm and observed that every step has to bring."""
        check_signal(self.signal, self.needs, self.record, norms is not None)
        self.measured = Measured(units, self.needs, norms, ranks)
        warn_of_cap(units, self.signal, spec.max_o)
        self._trigger = Trigger(spec.trigger)
        self.t = 0
        """Steps observed so far."""
        self.pinned = pinned
        """The share of all costs that is always spent."""
        self.device = units[0].parameters[0].device
        self.hints = Hints(units)
        self._recoverable = np.array([unit.recoverable for unit in units])
        budget = None
        if spec.budget is not None:
            budget = budget_left(units, spec.budget, whole_cost, pinned)
        self._routing, self._keep = Routing(spec, self._recoverable, budget), False
        self._switches = Switches(units, spec)
        self._pending: list[Event] = []
        self._agreement: Tensor | None = None  # of the step that is being observed
        if spec.warmup_steps > 0:
            self._switches.move(self._recoverable, 0, None, self._pending)
        else:
            for unit in units:
                if unit.switch is not None:
                    unit.switch(False)

    def __repr__(self) -> str:
        """Return what it is and where it is."""
        return f"<{type(self).__name__} of {len(self.units)} units, {self.described()}; {self.now()}>"

    def now(self) -> str:
        """Return the step and the units in recovery, in words."""
        names = self.active
        return f"step {self.t}: {len(names)} in recovery{f': {few(names)}' if names else ''}"

    def described(self) -> str:
        """Return how units are chosen, in words."""
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

        Published thresholds belong to the batches that they were published for; with small ones they flood max_o. Call
        it once, before the first step. In these steps nothing is promoted but units whose risk is not finite; the
        trigger comes from the second half of them. Locks, holds and max_o then make of it what is spent. `state_dict`
        holds the trigger, or how far the calibration is: `load_state_dict` goes on with either, and a loop that calls
        `calibrate` in any case calls it before.

        Raises ValueError if there is no threshold (routing="ranked", signals that read no evidence). Waits for nothing
        that `step` does not wait for.
        """
        if self.spec.ranked:
            raise ValueError("calibrate: routing='ranked' has no threshold, max_o or a budget is what it spends")
        if isinstance(self.signal, BlindSignal):
            raise ValueError(
                f"calibrate: {self.spec.signal_name} reads no evidence, its option active_frac is what it spends"
            )
        self._trigger.calibrate(fraction, max(self.t, self.spec.warmup_steps) + 1, steps)

    @property
    def calibrating(self) -> tuple[int, int] | None:
        """(Steps that the calibration has seen, steps that it takes); None if there is none, or it is over."""
        return self._trigger.progress(self.t)

    @property
    def calibrated(self) -> float | None:
        """The trigger that `calibrate` found; None before it has, and if it found none or was not called."""
        return self._trigger.found

    @property
    def active(self) -> list[str]:
        """Units on the recovery path now, in unit order."""
        return [name for name, active in zip(self.names, self._switches.active, strict=True) if active]

    def micro_step(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """Take note of a micro-batch after its backward pass; needed for signals that need micro_square alone.

        `fraction`: the part of the step's loss that this micro-batch is, for all of them or none; None: all are equal.
        `gradients`: see `MicroNorms.add`.
        """
        if self.measured.micro is not None:
            self.measured.micro.add(fraction, gradients)

    def step(self, grad_scale: float = 1.0, evidence: Evidence | None = None) -> Decision:
        """Observe this step's gradients and route the units for the next one. Waits for the device once.

        Call it after the backward pass of the whole step (all micro-batches) and before clipping. If gradients still
        carry a loss scale, give it as `grad_scale`. `evidence`: what the signal needs and this controller cannot
        measure by itself, each (U,) on the units' device (docs/signals.md says of what signals, and how). Raises
        ValueError if something is missing, unknown or of another shape. Warns, once, of what makes all of it pointless.

        A step that the loop throws away ends with `discard` in place of this. What a unit's `switch` raises comes
        through; the step counts then, and the set in force (`active`) is what it had come to: units leave it before
        others join, so never more than max_o, and the next step goes on from there.
        """
        packet = self.observe(self.measure(grad_scale, evidence))
        decision = self.apply(self.hints.to_host(packet))
        self.hints.say(decision)
        return decision

    def exchange(self, units: list[Unit]) -> None:
        """Watch other parameters of the same units. Raises ValueError if they are sharded and something reads them."""
        self.measured.exchange(units)
        self.units = units
        self.hints.look(units)

    def recost(self, costs: Sequence[float], pinned: float) -> None:
        """Count other costs of the same units from the next decision on, of which everything together costs 1."""
        self.units = [replace(unit, cost=cost) for unit, cost in zip(self.units, costs, strict=True)]
        self.pinned = pinned
        if self.spec.budget is not None:
            self._routing.budget = Budget.of(self.spec.budget - pinned, costs)
            if isinstance(self.signal, SignalBase):
                self.signal.context = replace(self.signal.context, spend=tuple(costs))

    def discard(self) -> None:
        """Forget what backward passes brought since the last `step`, and decide nothing.

        For passes that are not to count: a batch that is skipped, gradients that are thrown away, a second backward
        pass of another loss. Call it with `zero_grad()`. Not needed if `step` is called every step.
        """
        self.measured.reset()

    @torch.no_grad()
    def parts(self, plain: Tensor | None = None) -> dict[str, Tensor]:
        """Return what this rank has measured of the step, each a term of a sum over ranks (`Ranks.sum`), whose result
        `measure` takes. Does not wait for the device.

        `plain`: of `UnitNorms.parts`, if the loop takes the norms of the units' gradients itself. Raises ValueError for
        evidence that is measured in one process alone.
        """
        spec, ranks = self.spec, self.ranks
        assert ranks is not None
        settings = self.t, self.names, spec.max_o, spec.t_lock, self.trigger, spec.warmup_steps
        return self.measured.parts(plain, lambda plain: ranks.agreement(settings, self._switches.active, plain))

    def measure(
        self,
        grad_scale: float = 1.0,
        evidence: Evidence | None = None,
        norms: tuple[Tensor, Tensor] | None = None,
        sums: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return the evidence of this step, `evidence` that the caller measured included. Does not wait for the device.

        `norms`: (norm, observed) of the units' gradients if the loop took them together with those of other
        parameters (`UnitNorms`); without effect if norms are of something else. `sums`: of `parts` over all ranks,
        if the loop summed them together with numbers of its own; None: they are made here, if there are several.
        """
        given = dict(evidence or {})
        missing(tuple(given), ())  # refuses unknown names
        self._check_evidence(given, self.measured.names)  # before anything is read that can be read once
        self.measured.check_call(grad_scale)
        if sums is None and self.measured.together:
            assert self.ranks is not None
            sums = self.ranks.sum(self.parts())
        if sums is not None:
            self._agreement = sums["agreement"]
        return self.measured.read(grad_scale, norms, sums) | given

    def _check_evidence(self, evidence: Evidence, more: Iterable[str] = ()) -> None:
        """Raises ValueError for evidence that neither this nor `more` has, and for another shape."""
        if lacking := missing(self.needs, (*evidence, *more)):
            raise ValueError(f"{type(self.signal).__name__} needs {', '.join(lacking)}: hand it to step(evidence=...)")
        for name, values in evidence.items():
            if values.shape != (len(self.units),):
                raise ValueError(f"evidence {name}: has shape {tuple(values.shape)}, not ({len(self.units)},)")

    def reads_next(self) -> bool:
        """Return True if anybody looks at the paths' evidence of the coming step; if not, nobody has to measure it."""
        reads = getattr(self.signal, "reads", None)
        return bool(set(self.record) & {*PATH_EVIDENCE, *PRICE_EVIDENCE}) or reads is None or reads(self.t + 1)

    def mark(self) -> tuple[int, Mapping[str, Tensor]]:
        """Return what `observe` changes, for `undo`. Copies nothing of our signals; does not wait."""
        state = self.signal.state_dict()
        signal = state if isinstance(self.signal, SignalBase) else deepcopy(state)
        return self.t, signal

    def undo(self, mark: tuple[int, Mapping[str, Tensor]]) -> None:
        """Take back an `observe` whose packet was not applied: the step begins again."""
        self.t, signal = mark
        self.signal.load_state_dict(dict(signal))

    def promote(self, names: Iterable[str]) -> bool:
        """Put these units on the recovery path at once, between two steps, in the places of the least risky ones.

        Returns False, and changes nothing, if they are more than max_o or the budget allow, or one has no recovery
        path. They are locked like any unit that was over its threshold; the events (cause "retry") come with the next
        decision. Raises KeyError for a name that is no unit's.
        """
        places = {name: i for i, name in enumerate(self.names)}
        wanted = np.zeros(len(self.units), dtype=bool)
        wanted[[places[name] for name in names]] = True
        if (chosen := self._routing.promoted(wanted)) is None:
            return False
        events, full = list[Event](), self._switches.full(self._switches.active)
        self._switches.move(chosen, self.t + 1, None, events)
        self._pending += [replace(one, cause="retry" if one.event == "promote" else full) for one in events]
        return True

    @torch.no_grad()
    def observe(self, evidence: Evidence, keep: bool = False) -> HostPacket:
        """Return what `apply` chooses from, (U,) each, as a packet for the host. Does not wait for the device.

        For loops that send other numbers to the host in the same transfer (`HostPacket.add`), for replay and for
        foreign norms; hand `to_host()` of it to `apply`. `evidence`: norm (U,) float64, observed (U,) bool and what
        `needs` names. `keep`: set and locks stay as they are, whatever the risks (no unit is to blame).
        """
        self._check_evidence(evidence)
        evidence = without_zeros(evidence)
        norm, observed = evidence["norm"], evidence["observed"]
        risk, columns = judged(self.signal, evidence, self.t + 1)
        if not all_finite(risk := risk.double()):
            risk = torch.where(risk.isnan(), torch.inf, risk)  # a risk that is no number
        self._keep = keep
        self.t += 1
        agreement = {} if self._agreement is None else {"agreement": self._agreement}
        return HostPacket(
            agreement
            | {"norm": norm.double(), "observed": observed.bool(), "risk": risk}
            | {f"column/{name}": values.double() for name, values in zip(self.signal.columns, columns, strict=True)}
            | {f"evidence/{name}": evidence[name].double() for name in self.record}
        )

    def apply(self, host: Mapping[str, np.ndarray]) -> Decision:
        """Choose the units (`gnmr.control.policy`) and switch them; `host` holds the arrays of the packet of `observe`,
        and may hold others.

        Raises what `Ranks.check` does, and switches nothing, if ranks disagree."""
        self._agreement = None
        if self.ranks is not None and "agreement" in host:
            self.ranks.check(host["agreement"], self.t)
        trigger = 0.0 if self.spec.ranked else self.trigger
        choice = self._routing.choose(host["risk"], host["observed"], self.t, trigger, self._keep)
        decision = Decision(
            step=self.t,
            units=self.names,
            **{name: host[name] for name in ("norm", "observed", "risk")},
            **choice._asdict(),
            columns={name: host[f"column/{name}"] for name in self.signal.columns},
            evidence={name: host[f"evidence/{name}"] for name in self.record},
            in_force=self._switches.active,
            thresholds=tuple(None if x is None else x * self.trigger for x in self.signal.thresholds(self.t)),
            events=self._pending,
            trigger=trigger,
        )
        self._pending = []
        try:
            self._switches.move(decision.active, self.t, decision, decision.events)
        except BaseException:
            self._pending = decision.events
            self._routing.back_to(self._switches.active)
            raise
        self._trigger.learn(decision.step, decision.risk, decision.observed & self._recoverable)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next decision depends on: step count, active set, locks and the signal's history,
        and a trigger that was calibrated, or what it is being calibrated from."""
        return self._trigger.state_dict() | {
            "units": list(self.names),
            "t": self.t,
            "active": torch.from_numpy(self._switches.active.copy()),
            "lock": torch.from_numpy(self._routing.now.lock.copy()),
            "signal": self.signal.state_dict(),
        }

    def check_state(self, state: Any) -> None:
        """Raises ValueError, one line, for an object that is no state, and for one of other units or settings."""
        check_state(state, self.units, self.spec, self._routing.budget)
        self._trigger.check_state(state)
        if isinstance(self.signal, SignalBase) and type(self.signal).load_state_dict is SignalBase.load_state_dict:
            self.signal.check_state(state["signal"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state and put every unit on the path it had.

        Raises ValueError if it belongs to other units or settings (more of them on the recovery path than max_o
        allows), is damaged, or is no state at all. Everything stays as it was then, and if a switch or the signal
        itself raises.
        """
        self.check_state(state)
        active = state["active"].cpu().numpy().astype(bool)
        before = deepcopy(self.signal.state_dict())
        try:
            self.signal.load_state_dict(state["signal"])
            self._switches.put(active)
        except BaseException:
            self.signal.load_state_dict(before)
            raise
        self.t = int(state["t"])
        self._trigger.load_state_dict(state, max(self.t, self.spec.warmup_steps) + 1)
        lock = state["lock"].cpu().numpy().astype(np.int64)
        self._routing.now = Routed(lock, active, self._routing.now.risk)
        self._pending = []
