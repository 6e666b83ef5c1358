"""The protocol of one step: a converted model and the controller that routes it.

    norms -> evidence -> decide -> apply -> record        `Router.finish_step`

A loop of one's own calls it as `step`, `gnmr train` with its optimizer's step in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment.assembly import close_hooks, costs_of, units_of
from gnmr.attachment.blame import Verdict, explain_step
from gnmr.attachment.linked import Linked
from gnmr.attachment.path_steps import PathSteps
from gnmr.attachment.repeat import Start, true_gap
from gnmr.control import Controller, ControlSpec, Decision, Evidence, HostPacket, OutputGradients, Unit
from gnmr.control.norms import watched
from gnmr.control.signals.blind import AlwaysLow
from gnmr.errors import first_few, users_level
from gnmr.measure.coverage import READ, Counting, Coverage, percent
from gnmr.names import GEMMS
from gnmr.precision import ConvertedModel
from gnmr.precision.conversion import tensor_parallel
from gnmr.precision.converted import DETACHED
from gnmr.precision.cost import Work
from gnmr.precision.reads import is_sharded
from gnmr.precision.units import module_of

if TYPE_CHECKING:
    from gnmr.attachment.record import Recording

Norms = tuple[Tensor, Tensor]


class Router:
    """Routes the units of a converted model as its controller decides.

        micro_step()    after each micro-batch's backward pass
        step()          after the last of them, before clipping: units are switched for the next step
        discard()       ends a step that is not to count

    A parameter of a unit that was exchanged for another one is followed from the next step on, and so is an adapter
    that was added or switched to; a module that was exchanged, and parameters that were sharded, are refused there
    (`ValueError`). After `detach` every call raises RuntimeError.
    """

    plan_of: str | None = None
    """What the plan that was attached is of, as it says itself."""
    recording: Recording | None = None
    recorded_elsewhere = False
    """By another process."""
    coverage: Coverage | None = None
    """What the model ran in the first step, of which costs and what is spent are shares; None before, and of a compiled
    model."""
    _detached = _checked_batches = False
    _counting: Counting | None = None
    _counts_itself = _told_never = False

    def __init__(
        self,
        converted: ConvertedModel,
        controller: Controller,
        model: nn.Module,
        probe_tokens: int = 1,
        price_tokens: int = 16,
    ) -> None:
        """The paths of `converted`, which is `model`, measure what the signal needs and the controller cannot."""
        self.converted, self.controller, self.model = converted, controller, model
        observe = self.spec.observe
        outside = dict.fromkeys(module_of(name) for name in self.names if observe != "parameters")
        around: list[nn.Module] = [watched(model, name) for name in outside]
        modules = [operator.module for operator in converted.operators]
        read = around if observe == "adapter" else modules
        self._linked = Linked(model, [*modules, *around], read, trained=observe == "adapter")
        needs = [name for name in controller.needs if name not in controller.measured.names]
        self._paths = PathSteps(converted, model, controller.ranks, needs, probe_tokens, price_tokens)
        controller.measured.sources.append(self._paths)
        self._mark = controller.mark()
        self._evidence: dict[str, Tensor] = {}
        self._begin()

    @property
    def units(self) -> list[Unit]:
        """The units, in order."""
        return self.controller.units

    @property
    def names(self) -> list[str]:
        """The units' ids."""
        return self.controller.names

    @property
    def spec(self) -> ControlSpec:
        """Signal, routing and thresholds."""
        return self.controller.spec

    @property
    def needs(self) -> tuple[str, ...]:
        """Evidence besides norm and observed that every step has to bring."""
        return self.controller.needs

    @property
    def t(self) -> int:
        """Steps observed so far."""
        return self.controller.t

    @property
    def active(self) -> list[str]:
        """Units on the recovery path now, in unit order."""
        return self.controller.active

    @property
    def trigger(self) -> float:
        """The value that a risk has to exceed."""
        return self.controller.trigger

    @property
    def calibrating(self) -> tuple[int, int] | None:
        """As `Controller.calibrating`."""
        return self.controller.calibrating

    @property
    def calibrated(self) -> float | None:
        """As `Controller.calibrated`."""
        return self.controller.calibrated

    def __repr__(self) -> str:
        """Return what it is and where it is, with the GEMMs that are pinned, and whose plan says so."""
        name = f"<{type(self).__name__} of {len(self.units)} units"
        if self._detached:
            return f"{name}, detached; step {self.t}>"
        pinned = sum(len(operator.pinned) for operator in self.converted.operators)
        of = "" if self.plan_of is None else f" by the plan of {self.plan_of}"
        share = "" if self.coverage is None else f", {percent(self._share())} of all GEMMs' arithmetic"
        gemms = f", {pinned} of {len(GEMMS) * len(self.converted.operators)} GEMMs pinned{of}" if pinned or of else ""
        return f"{name}, {self.controller.described()}{share}{gemms}; {self.controller.now()}>"

    def _share(self) -> float:
        work = self.converted.cost.work
        return 0.0 if work is None else sum(work.operators) / (sum(work.operators) + work.rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy (pickle, deepcopy): a copy of the model alone has no probe."""
        self.__dict__.update(state)
        self._counting = None
        self._paths.share_meters()

    def calibrate(self, fraction: float = 0.01, steps: int = 100) -> None:
        """As `Controller.calibrate`."""
        self._check_attached()
        self.controller.calibrate(fraction, steps)

    def promote(self, names: Iterable[str]) -> bool:
        """As `Controller.promote`."""
        self._check_attached()
        return self.controller.promote(names)

    def micro_step(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """As `Controller.micro_step`."""
        self._check_attached()
        if self.controller.measured.micro is not None:
            self.follow()
        if self._counting is not None:
            self._counting.disarm()
        self.controller.micro_step(fraction, gradients)

    def step(self, grad_scale: float = 1.0, evidence: Evidence | None = None) -> Decision:
        """As `Controller.step`; what the paths measure needs no `evidence`."""
        decision = self.finish_step(grad_scale, evidence, between=self.controller.hints.to_host)
        never = self._paths.never_ran(decision.observed)
        for text in self._of_first_step(never):
            warnings.warn(text, stacklevel=users_level())
        self.controller.hints.say(decision, calibrating=self.calibrating)
        return decision

    def _of_first_step(self, never: Sequence[str]) -> Iterator[str]:
        """Say, once, what is left out, and which operators never run, though their weights are read."""
        found, operators = self.coverage, self.converted.operators
        if found is not None and self.t == 1:
            never = [name for name, why in found.missed(o.operator_name for o in operators).items() if why == READ]
            if found.misses(operators):
                yield f"attach {found.line([o.operator_name for o in operators])}"
        elif self._told_never:
            return
        if never:
            self._told_never = True
            yield (
                f"{first_few(never)}: never ran: something reads the weight without calling the module (a fused "
                "projection, F.linear), so its path is never in force; leave it out of the targets"
            )

    def finish_step(
        self,
        grad_scale: float = 1.0,
        evidence: Evidence | None = None,
        *,
        norms: Norms | None = None,
        sums: Mapping[str, Tensor] | None = None,
        between: Callable[[HostPacket], Mapping[str, np.ndarray]] = HostPacket.to_host,
    ) -> Decision:
        """Take the step's norms and evidence, decide, switch the units for the next step and record it.

        Args:
            grad_scale, evidence, norms, sums: see `Controller.measure`.
            between: brings the packet of the decision to the host. A loop may add numbers of its own to it, take its
                optimizer's step before, and observe again (`choose_again`, `retry`) after it.
        """
        host = between(self.decide(grad_scale, evidence, norms=norms, sums=sums))
        self._check_attached()
        spent = None if self.recording is None else self.converted.cost.spent()
        self._begin()
        decision = self.controller.apply(host)
        if self.recording is not None and spent is not None:
            self.recording.step(decision, spent, self.calibrated)
        return decision

    def decide(
        self,
        grad_scale: float = 1.0,
        evidence: Evidence | None = None,
        *,
        norms: Norms | None = None,
        sums: Mapping[str, Tensor] | None = None,
    ) -> HostPacket:
        """Return the choice of this step; the first half of `finish_step`. Does not wait for the device."""
        self.follow()
        self._check_batches()
        self._end_count()
        self._evidence = self.controller.measure(grad_scale, evidence, norms, sums)
        self._paths.end()
        self._mark = self.controller.mark()
        return self.controller.observe(self._evidence)

    def count_first(self) -> None:
        """Count what the model runs in the passes of the first step, until `micro_step` or `step`."""
        self._counts_itself, self._counting = True, Counting(self.model, self.converted.operators)
        self._counting.arm()

    def _end_count(self) -> None:
        """Make what was counted, over all processes, what costs are shares of. Waits for the device, once."""
        counting, self._counting = self._counting, None
        if counting is None:
            return
        counting.disarm()
        work, ranks = counting.found.work(self.converted.operators), self.controller.ranks
        if ranks is not None and self.controller.measured.together:
            parts = torch.tensor([*work.operators, work.rest], dtype=torch.float64, device=self.controller.device)
            *counts, rest = map(int, ranks.sum({"work": parts})["work"].tolist())
            work = work._replace(operators=tuple(counts), rest=rest)
        if sum(work.operators):
            self.coverage = counting.found
            self._recount(work)

    def _recount(self, work: Work | None) -> None:
        self.converted.cost.count(work)
        costs, pinned = costs_of(self.converted, self.spec)
        self.controller.recost(costs, pinned)
        if self.recording is not None:
            self.recording.recost([unit.cost for unit in self.units], pinned)

    def choose_again(self, keep: bool = False) -> HostPacket:
        """Return the choice of this step once more, in place of the one before. `keep`: see `Controller.observe`."""
        self.controller.undo(self._mark)
        return self.controller.observe(self._evidence, keep)

    def retry(self, names: Iterable[str], start: Start) -> bool:
        """Begin this step again, at its `start`, with these units on the recovery path.

        Returns False if they cannot be promoted, or there are none; `choose_again` comes next then."""
        self.controller.undo(self._mark)
        if not (names := list(names)) or not self.controller.promote(names):
            return False
        start.again(self.converted)
        self.converted.begin_again(start.paths)
        self._begin()
        return True

    def parts(self, plain: Tensor | None = None) -> dict[str, Tensor]:
        """As `Controller.parts`."""
        self.follow()
        self._check_batches()
        return self.controller.parts(plain)

    def discard(self) -> None:
        """As `Controller.discard`, with what the paths measured and remember of the step."""
        self._check_attached()
        self.controller.discard()
        self._paths.undo()
        self._begin()

    def follow(self) -> None:
        """Take note of what was exchanged in the model since the last step."""
        self._check_attached()
        if not self._linked.changed():
            return
        self._linked.refuse_missing()
        costs = [unit.cost for unit in self.units]
        self.controller.exchange(units_of(self.converted, self.model, self.spec.observe, costs, self.units))
        self._linked.look()

    def _check_attached(self) -> None:
        if self._detached:
            raise RuntimeError(DETACHED)

    def _check_batches(self) -> None:
        """Raises ValueError if ranks have the same batch, whose measurements would be summed as those of several."""
        if self._checked_batches or not self.controller.measured.together:
            return
        measures = bool(self._paths.meters) or isinstance(self.controller.measured.norms, OutputGradients)
        if measures and (name := tensor_parallel(self.model)) is not None:
            raise ValueError(
                f"{name} is sharded by tensor parallelism, whose processes have the same batch: what each measures of "
                "it would be summed as of several; use observe='parameters' and a signal of gradient norms"
            )
        self._checked_batches = True

    def _begin(self) -> None:
        self._paths.begin(self.t + 1, read=self.controller.reads_next())

    def true_gap(self, backward: Callable[[], object]) -> Tensor:
        """Return the evidence `true_gap`: squared distances of both paths' gradients on one batch (corollary 1), (U,).

        Call it before the step's own passes. `backward` runs them, forward and backward, and is called once a path; of
        several processes each its own, through the model that reduces gradients.
        Paths and generators are afterwards as they were, all gradients are None. Does not wait for the device.
        """
        self._check_attached()
        with self.unmeasured():
            return true_gap(self.converted, self.model, self.units, self.controller.ranks, backward)

    def explain(
        self,
        loss_of_batch: Callable[[], Tensor | Iterable[Tensor]],
        *,
        loss: float | None = None,
        usual: tuple[float, float] | None = None,
        grad_scale: float = 1.0,
    ) -> Verdict:
        """Return what is to blame for the step whose gradients are there now: data, precision (which units) or chance.

        Call it between the step's last backward pass and `step`, for a step that spikes or is not finite.

            if not loss.isfinite() or loss > 2 * usual_loss:
                print(controller.explain(lambda: model(batch).loss, loss=loss.item(), usual=(usual_loss, usual_norm)))

        Args:
            loss_of_batch: runs the step's forward passes and returns what backward started from, the mean loss; or
                gives its parts one after the other (a generator), of which each has its backward pass before the next.
            loss: of the step as it was seen; None: that of a repetition.
            usual: loss and gradient norm of ordinary steps. Raises ValueError if it is missing and both are finite.
            grad_scale: the loss scale that the gradients carry.

        Takes at most four times the step's time, a third of it for a loss that is not finite in 16 bits either.
        Gradients, generators, buffers, paths and history are afterwards as they were. Dropout draws anew, so passes
        that differ by less than a quarter are called equal. Waits for the device. See docs/blame.md.
        """
        self.follow()
        if self.controller.measured.together or is_sharded(*self.model.parameters()):
            raise ValueError("explain: runs in one process, on parameters that are whole; not under DDP or FSDP")
        with self.unmeasured():
            return explain_step(
                self.converted, self.model, self.units, loss_of_batch, self.t + 1, loss, usual, grad_scale
            )

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Inside, passes leave nothing in the probe and in norms of outputs."""
        norms = self.controller.measured.norms
        watching = [*self._paths.meters, *([norms] if isinstance(norms, OutputGradients) else [])]
        with ExitStack() as stack:
            for one in watching:
                stack.callback(setattr, one, "enabled", one.enabled)
                one.enabled = False
            yield

    @property
    def records(self) -> bool:
        """True if this process records (`attach(record=FOLDER)`), so that `log` has somewhere to go."""
        return self.recording is not None

    @property
    def recorded(self) -> bool:
        """True if this process or, of several, another one records."""
        return self.recording is not None or self.recorded_elsewhere

    def log(self, **figures: float) -> None:
        """Put loss, lr, tokens or val_loss beside the last step, if `attach` was given a folder to record to; of
        several processes the first one records. Raises ValueError for other figures."""
        self._check_attached()
        if self.recording is not None:
            self.recording.log(**figures)
        elif not self.recorded_elsewhere:
            raise ValueError("log: nothing is recorded: attach(..., record='runs/mine') names a folder for it")

    def finish(self) -> None:
        """Mark the recorded run as done; `detach` does it too."""
        if self.recording is not None:
            self.recording.finish()
        self.recording, self.recorded_elsewhere = None, False

    def watch_use(self) -> None:
        """Warn, at its end, of a loop that never called `step`, or that ended while it calibrated."""
        amax = self.converted.shared.amax
        routes = any(unit.recoverable for unit in self.units) and not isinstance(self.controller.signal, AlwaysLow)
        if routes or (amax is not None and amax.history is not None):
            self.controller.hints.watch_use(self.model, self.converted.low.name)

    def end_use(self) -> None:
        """Say, once, what was pointless in the training that is over. `detach` does it too."""
        self.controller.hints.end_use()

    def detach(self) -> None:
        """Give the model its plain linears back; the router is of no use afterwards. A recorded run is done."""
        self.finish()
        if self._counting is not None:
            self._counting.disarm()
        self.converted.restore()
        self._detached = True
        close_hooks(self.controller)
        self.end_use()
        self.controller.hints.release()

    def state_dict(self) -> dict[str, Any]:
        """As `Controller.state_dict`, with the generator of stochastic rounding, delayed scales and how far the records
        are (`attach(record=...)`)."""
        self._check_attached()
        more: dict[str, Any] = {} if self.recording is None else {"record": self.recording.state()}
        if self._counts_itself and (work := self.converted.cost.work) is not None:
            more["work"] = [*work.operators, work.rest]
        return {**self.controller.state_dict(), "converted": self.converted.state_dict(), **more}

    def check_state(self, state: Any) -> None:
        """As `Controller.check_state`, and of the paths."""
        self._check_attached()
        if isinstance(state, Mapping):
            self.converted.check_state(state.get("converted"))
        self.controller.check_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Controller.load_state_dict`. Raises ValueError if it belongs to other paths too, UserError if records go
        on (`attach(record=...)`) whose first steps are not there."""
        if isinstance(state, Mapping):
            self.converted.check_state(state.get("converted"))  # before the count, which is of as many operators
        before = self.converted.cost.work
        if self._counts_itself and isinstance(state, Mapping) and state.get("work") is not None:
            self._recount(self._work_of(state["work"]))  # the set in force is to fit the budget of then
        try:
            self.check_state(state)
            if self.recording is not None:
                self.recording.resume(state["t"], state.get("record", {}))
            self.controller.load_state_dict(state)
        except BaseException:
            if self.converted.cost.work is not before:
                self._recount(before)
            raise
        if self._counting is not None and "work" in state:
            self._counting.disarm()
            self._counting = None
        self.converted.load_state_dict(state["converted"])
        self._begin()

    def _work_of(self, counts: Any) -> Work:
        """Raises ValueError for what is no count of these operators."""
        whole = isinstance(counts, list | tuple) and all(type(one) is int and one >= 0 for one in counts)
        if not whole or len(counts) != len(self.converted.operators) + 1 or not sum(counts[:-1]):
            raise ValueError(f"state: work must be {len(self.converted.operators) + 1} whole numbers")
        return Work(tuple(counts[:-1]), counts[-1])
