"""The protocol of one step: a converted model and the controller that routes it.

    packet = router.measure(...)        norms, evidence and risks, on the device
    decision = router.decide(packet)    to the host; choose, switch and record

A user's loop calls both as `step`. `gnmr train` runs its optimizer's step in between, so that one transfer brings the
numbers of the whole step to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnmr.attachment.blame import Verdict, explain_step
from gnmr.attachment.hints import LoopHints
from gnmr.attachment.model_units import ModelLinks, costs_of, units_of
from gnmr.attachment.path_steps import PathSteps
from gnmr.attachment.repeat import Start, true_gap
from gnmr.control import Controller, ControlSpec, Decision, Evidence, HostPacket, OutputGradients, Unit
from gnmr.control.measurements import Norms
from gnmr.control.output_norms import watched
from gnmr.control.signals.blind import AlwaysLow
from gnmr.conversion import ConvertedModel
from gnmr.conversion.converted import DETACHED
from gnmr.conversion.converting import tensor_parallel
from gnmr.conversion.cost import Work
from gnmr.conversion.reads import is_sharded
from gnmr.conversion.unit_names import module_of
from gnmr.errors import first_few, warn
from gnmr.measure.coverage import READ, Counting, Coverage, percent
from gnmr.names import GEMMS

if TYPE_CHECKING:
    from gnmr.attachment.record import Recording


class Router:
    """Routes the units of a converted model as its controller decides.

        micro_step()    after each micro-batch's backward pass
        step()          after the last of them, before clipping: units are switched for the next step
        discard()       ends a step that should not count

    If a unit's parameter is exchanged, the new one is monitored from the next step on. The same holds if an adapter is
    added or activated. An exchanged module and sharded parameters raise ValueError there. After `detach` every call
    raises RuntimeError.
    """

    plan_of: str | None = None
    """Model that the attached plan was made for, as the plan states."""
    recording: Recording | None = None
    recorded_elsewhere = False
    """Whether another process records."""
    coverage: Coverage | None = None
    """GEMMs that the model ran in the first step, the base of cost shares; None before, and if compiled."""
    _detached = _checked_batches = False
    _counting: Counting | None = None
    _counts_itself = _warned_never_ran = _uncounted = False

    def __init__(
        self,
        converted: ConvertedModel,
        controller: Controller,
        model: nn.Module,
        probe_tokens: int = 1,
        price_tokens: int = 16,
    ) -> None:
        """Route the paths of `converted`, which is `model`, and measure the evidence that the controller cannot."""
        self.converted, self.controller, self.model = converted, controller, model
        observe = self.spec.observe
        outside = dict.fromkeys(module_of(name) for name in self.names if observe != "parameters")
        around: list[nn.Module] = [watched(model, name) for name in outside]
        modules = [operator.module for operator in converted.operators]
        read = around if observe == "adapter" else modules
        # Parameters may be exchanged in the operators, and with adapters anywhere below the units' names.
        self._links = ModelLinks(model, [*modules, *around], read, trained=observe == "adapter")
        self.hints = LoopHints(controller.units)
        # Evidence that the controller does not measure comes from the paths.
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
        """See `Controller.calibrating`."""
        return self.controller.calibrating

    @property
    def calibrated(self) -> float | None:
        """See `Controller.calibrated`."""
        return self.controller.calibrated

    def __repr__(self) -> str:
        """Return the settings and the current state, with the pinned GEMMs and the plan that pins them."""
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
        return 0.0 if work is None else sum(work.operators) / (sum(work.operators) + work.outside)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy (pickle, deepcopy): a copy of the model alone has no probe."""
        self.__dict__.update(state)
        self._counting = None
        self._paths.share_meters()

    def calibrate(self, fraction: float = 0.01, steps: int = 100) -> None:
        """Calibrate the trigger on the next `steps` steps; see `Controller.calibrate`.

        Args:
            fraction: share of all (unit, step) pairs that shall exceed the trigger; "1%" is read as 0.01.
            steps: length of the calibration in optimizer steps.
        """
        self._check_attached()
        self.controller.calibrate(fraction, steps)

    def promote(self, names: Iterable[str]) -> bool:
        """Put units on the recovery path immediately; see `Controller.promote`.

        Args:
            names: ids of the units.

        Returns:
            False, with nothing changed, if there is no room for them.
        """
        self._check_attached()
        return self.controller.promote(names)

    def micro_step(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """Record a micro-batch after its backward pass; needed only for signals that need micro_square.

        Args:
            fraction: see `Controller.micro_step`.
            gradients: see `MicroNorms.add`.
        """
        self._check_attached()
        # Norms of micro-batches read the parameters now; without them, the step looks for exchanged ones.
        if self.controller.measured.micro is not None:
            self.follow()
        if self._counting is not None:
            self._counting.disarm()
        self.controller.micro_step(fraction, gradients)

    def step(
        self, grad_scale: float = 1.0, evidence: Evidence | None = None, *, loss_scale: float | None = None
    ) -> Decision:
        """Observe this step's gradients and route the units for the next one. Waits for the device once.

        Call it once per optimizer step, after the last backward pass and before clipping. Warns once about each use
        that makes the controller pointless (`gnmr.attachment.hints`).

        Args:
            grad_scale: the loss scale that the gradients still carry.
            evidence: evidence that the signal needs and the paths do not measure, (U,) each (docs/signals.md).
            loss_scale: see `Controller.step`.

        Returns:
            What was seen and chosen; its set is in force in the next step.

        Raises:
            ValueError: if evidence is missing, or if a module of the model was replaced.
            RuntimeError: after `detach`.
        """
        self.hints.stepped = True
        packet = self.measure(grad_scale, evidence, loss_scale=loss_scale)
        self.hints.add_norms(packet)
        decision = self.decide(packet)
        for text in self._first_step_texts(decision):
            warn(text)
        self.hints.warn(decision, packet, self.calibrating)
        return decision

    def measure(
        self,
        grad_scale: float = 1.0,
        evidence: Evidence | None = None,
        *,
        norms: Norms | None = None,
        sums: Mapping[str, Tensor] | None = None,
        loss_scale: float | None = None,
    ) -> HostPacket:
        """Return the numbers that `decide` chooses from, on the device: the first half of a step.

        A loop may add its own numbers to the packet and run its optimizer's step before `decide`. Waits for no device.

        Args:
            grad_scale: see `Controller.measure`.
            evidence: see `Controller.measure`.
            norms: see `Controller.measure`.
            sums: see `Controller.measure`.
            loss_scale: see `Controller.step`.
        """
        # Parameters may have been exchanged; of the first step the model's GEMMs were counted.
        self.follow()
        self._check_batches()
        self._end_count()
        self._evidence = self.controller.measure(grad_scale, evidence, norms, sums, loss_scale)
        # Delayed scales and draws of this step are complete; `retry` and `mark` go back to here.
        self._paths.end()
        self._mark = self.controller.mark()
        return self.controller.observe(self._evidence)

    def decide(self, packet: HostPacket, keep: bool = False) -> Decision:
        """Choose from the packet of `measure`, switch the units for the next step, and record the step.

        Args:
            packet: the packet; it is brought to the host unless it is there.
            keep: see `Controller.apply`.
        """
        host = packet.to_host()
        self._check_attached()
        # What was spent belongs to the paths of this step, before the units are switched.
        spent = None if self.recording is None else self.converted.cost.spent()
        self._begin()
        decision = self.controller.apply(host, keep)
        if self.recording is not None and spent is not None:
            self.recording.step(decision, spent, self.calibrating, self.calibrated)
        return decision

    def retry(self, names: Iterable[str], start: Start) -> bool:
        """Restart the measured step, at its `start`, with these units on the recovery path.

        Returns:
            False, with nothing changed, if they cannot be promoted or there are none.
        """
        if not (names := list(names)):
            return False
        # Undo the measurement first: the repeated step and its events have the same number.
        self.controller.undo(self._mark)
        if not self.controller.promote(names):
            self.controller.observe(self._evidence)  # the same numbers again
            return False
        # The second try draws the same numbers and sees the same delayed scales.
        start.restore(self.converted)
        self.converted.begin_again(start.paths)
        self._begin()
        return True

    def _first_step_texts(self, decision: Decision) -> Iterator[str]:
        """Return the first step's warnings: linears left out, and operators whose weight is read but that never run."""
        operators, coverage = self.converted.operators, self.coverage
        names = [operator.operator_name for operator in operators]
        if self._uncounted:
            self._uncounted = False
            yield (
                "attach could not count what a compiled model runs: costs and budgets are shares of its own operators, "
                "with one token through each; run the first step before torch.compile"
            )
        if coverage is not None and self.t == 1:
            never_ran = [name for name, reason in coverage.never_called(names).items() if reason == READ]
            if coverage.leaves_out_much(operators):
                yield f"attach {coverage.line(names)}"
        elif self._warned_never_ran:
            return
        else:
            never_ran = self._paths.never_ran(decision.observed)
        if never_ran:
            self._warned_never_ran = True
            yield (
                f"{first_few(never_ran)}: never ran: something reads the weight without calling the module (a fused "
                "projection, F.linear), so its path is never in force; leave it out of the targets"
            )

    def count_first(self) -> None:
        """Count the GEMMs that the model runs in the first step, until `micro_step` or `step`."""
        self._counts_itself, self._counting = True, Counting(self.model, self.converted.operators)
        self._counting.arm()

    def _end_count(self) -> None:
        """Set the counts of all processes as the base of cost shares. Waits for the device, once.

        Raises ValueError if no unit fits the budget.
        """
        counting, self._counting = self._counting, None
        if counting is None:
            return
        counting.disarm()
        coverage, operators, ranks = counting.coverage, self.converted.operators, self.controller.ranks
        work = coverage.work(operators)
        missed = coverage.never_called(operator.operator_name for operator in operators)
        # An operator without any product may have run unseen within a compiled graph.
        unseen = any(
            not number and missed.get(operator.operator_name) != READ
            for operator, number in zip(operators, work.operators, strict=True)
        )
        # The counts of all processes add up; the last number says whether one of them could not count.
        counts = torch.tensor(
            [*work.operators, work.outside, unseen and counting.compiled], dtype=torch.float64, device="cpu"
        )
        if ranks is not None and self.controller.measured.together:
            counts = ranks.sum({"work": counts.to(self.controller.device)})["work"]
        *of_operators, elsewhere, uncounted = map(int, counts.tolist())
        self._uncounted = uncounted > 0
        if sum(of_operators) and not uncounted:
            self.coverage = coverage
            self._recount(work._replace(operators=tuple(of_operators), outside=elsewhere))
        self.controller.check_budget()

    def _recount(self, work: Work | None) -> None:
        self.converted.cost.count(work)
        costs, pinned = costs_of(self.converted, self.spec)
        self.controller.recost(costs, pinned)
        if self.recording is not None:
            self.recording.recost([unit.cost for unit in self.units], pinned)

    def parts(self, plain: Tensor | None = None) -> dict[str, Tensor]:
        """Return this rank's measurements.

        Args:
            plain: as in `Controller.parts`.
        """
        self.follow()
        self._check_batches()
        return self.controller.parts(plain)

    def discard(self) -> None:
        """Discard the step; see `Controller.discard`. The paths forget it too."""
        self._check_attached()
        # Forget gradients' measurements, then what the paths drew and recorded.
        self.controller.discard()
        self._paths.undo()
        self._begin()

    def follow(self) -> None:
        """Update the router if the model's modules or parameters were exchanged since the last step."""
        self._check_attached()
        if not self._links.changed():
            return
        self._links.refuse_missing()
        # The units stay the same, and so do their costs; only what is monitored changes.
        costs = [unit.cost for unit in self.units]
        self.controller.exchange(units_of(self.converted, self.model, self.spec.observe, costs, self.units))
        self.hints.exchange(self.units)
        self._links.look()

    def _check_attached(self) -> None:
        if self._detached:
            raise RuntimeError(DETACHED)

    def _check_batches(self) -> None:
        """Raise ValueError if ranks have the same batch, because measurements are summed as those of different ones."""
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

        Call it before the step's own passes. Afterwards paths and generators are unchanged and all gradients are None.
        Does not wait for the device.

        Args:
            backward: runs forward and backward passes, and is called once per path. With several processes each calls
                its own, through the model that reduces gradients.
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
        """Return the cause of the current step's gradients: data, precision (with the units) or chance.

        Call it between the step's last backward pass and `step`, for a step that spikes or is not finite.

            if not loss.isfinite() or loss > 2 * usual_loss:
                print(controller.explain(lambda: model(batch).loss, loss=loss.item(), usual=(usual_loss, usual_norm)))

        It takes at most four times the step's time, and a third of it if the loss is not finite in 16 bits either.
        Gradients, generators, buffers, paths and history are restored; outside of the attached model, gradients of
        parameters that reentrant checkpointing hides are not. Dropout draws the step's numbers again if nothing but the
        step has drawn since the step before; passes that differ by less than a quarter count as equal. Waits for the
        device. See docs/blame.md.

        Args:
            loss_of_batch: runs the step's forward passes and returns the mean loss from which backward started. It may
                also yield the parts of the loss (a generator), each of which has its backward pass before the next.
            loss: the step's loss as seen; None: the loss of a repetition.
            usual: loss and gradient norm of ordinary steps; required if both are finite now.
            grad_scale: the loss scale that the gradients carry.

        Raises:
            ValueError: if `usual` is missing and loss and norm are finite, or if several processes train the model.
        """
        self.follow()
        if self.controller.measured.together or is_sharded(*self.model.parameters()):
            raise ValueError("explain: runs in one process, on parameters that are whole; not under DDP or FSDP")
        with self.unmeasured():
            return explain_step(
                self.converted,
                self.model,
                self.units,
                loss_of_batch,
                self.t + 1,
                loss,
                usual,
                grad_scale,
                self._paths.start,
            )

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Keep passes inside this context out of the probe and of norms of outputs."""
        norms = self.controller.measured.norms
        meters = [*self._paths.meters, *([norms] if isinstance(norms, OutputGradients) else [])]
        with ExitStack() as stack:
            for meter in meters:
                stack.callback(setattr, meter, "enabled", meter.enabled)
                meter.enabled = False
            yield

    def header(self) -> dict[str, Any]:
        """Return what header.json says of the units: names, costs and pins, and the number of parameters."""
        recoverable = self.converted.recovery is not None
        parameters = list(self.model.parameters())
        return {
            "units": self.names,
            "cost": [unit.extra_bytes for unit in self.units],
            "spend": [unit.cost for unit in self.units],
            "spend_pinned": self.controller.pinned,
            "recoverable": recoverable,
            "pinned": [unit.name for unit in self.converted.units if recoverable and not unit.routable],
            "parameters": sum(p.numel() for p in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        }

    @property
    def records(self) -> bool:
        """True if this process records (`attach(record=FOLDER)`), so that `log` writes to a folder."""
        return self.recording is not None

    @property
    def recorded(self) -> bool:
        """True if this process, or another one, records."""
        return self.recording is not None or self.recorded_elsewhere

    def log(self, **figures: float) -> None:
        """Add loss, lr, tokens or val_loss to the last step, if `attach` was given a folder for records.

        With several processes the first one records.

        Raises:
            ValueError: if a figure is unknown.
        """
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
        """Warn, at the end of its use, if the loop never called `step` or ended during a calibration."""
        amax = self.converted.shared.amax
        routes = any(unit.recoverable for unit in self.units) and not isinstance(self.controller.signal, AlwaysLow)
        # Delayed scales move on only in `step`, even where nothing is routed.
        if routes or (amax is not None and amax.history is not None):
            self.hints.watch_use(self.model, self.converted.low.name)

    def end_use(self) -> None:
        """Warn once of anything pointless in the training that is over. `detach` calls it too."""
        self.hints.end_use()

    def detach(self) -> None:
        """Turn the operators back into plain linears and end a recorded run; do not use the router afterwards."""
        self.finish()
        if self._counting is not None:
            self._counting.disarm()
        self.converted.restore()
        self._detached = True
        self.controller.measured.close()
        self.end_use()
        self.hints.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state with that of the paths and the records.

        These are the generator of stochastic rounding, delayed scales, and the progress of the records
        (`attach(record=...)`).
        """
        self._check_attached()
        state = {**self.controller.state_dict(), "converted": self.converted.state_dict()}
        if self.recording is not None:
            state["record"] = self.recording.state()
        # A resumed run takes these counts: another first batch could give other costs, and so other choices.
        if self._counts_itself and (work := self.converted.cost.work) is not None:
            state["work"] = [*work.operators, work.outside]
        return state

    def check_state(self, state: Any) -> None:
        """Check a state before it is loaded.

        Raises:
            ValueError: it is not valid for the controller (`Controller.check_state`) or the paths.
        """
        self._check_attached()
        if isinstance(state, Mapping):
            self.converted.check_state(state.get("converted"))
        self.controller.check_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; see `Controller.load_state_dict`.

        Raises:
            ValueError: if it belongs to other paths.
            UserError: if records continue (`attach(record=...)`) whose first steps are missing.
        """
        if isinstance(state, Mapping):
            self.converted.check_state(state.get("converted"))  # before the count, which covers as many operators
        before = self.converted.cost.work
        if self._counts_itself and isinstance(state, Mapping) and state.get("work") is not None:
            *of_operators, outside = state["work"]
            self._recount(Work(tuple(of_operators), outside))  # the active set has to fit the budget of that time
        try:
            if self.converted.cost.work is not None:  # otherwise the first step counts, and checks then
                self.controller.check_budget()
            self.check_state(state)
            if self.recording is not None:
                # Records that do not fit are refused before the controller changes.
                self.recording.resume(state["t"], state.get("record", {}))
            self.controller.load_state_dict(state)
        except BaseException:
            # A refused state leaves the costs as they were.
            if self.converted.cost.work is not before:
                self._recount(before)
            raise
        # The counts of the checkpoint are in force, so the first step counts nothing.
        if self._counting is not None and "work" in state:
            self._counting.disarm()
            self._counting = None
        self.converted.load_state_dict(state["converted"])
        self._begin()
