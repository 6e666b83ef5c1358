"""The controller that knows the plan it routes, and the model: the protocol of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from gnmr.attachment.blame import Verdict
from gnmr.attachment.ending import Ending
from gnmr.attachment.evidence import PathEvidence
from gnmr.attachment.linked import Linked
from gnmr.attachment.passes import Passes
from gnmr.attachment.record import Recording
from gnmr.attachment.units import units_of
from gnmr.control import Controller, Decision, OutputGradients
from gnmr.control.observed import watched
from gnmr.control.signals.always import AlwaysLow
from gnmr.distributed import world
from gnmr.names import GEMMS
from gnmr.precision import ConvertedModel
from gnmr.precision.conversion import tensor_parallel
from gnmr.precision.converted import DETACHED
from gnmr.precision.reads import is_sharded
from gnmr.precision.units import module_of


class AttachedController(Controller):
    """A controller that knows the plan it routes, and the model: the protocol of one step.

        micro_step()         after each micro-batch's backward pass
        measure()            after the last of them: norms, what the paths measured; the paths' step is over
        observe(evidence)    signal and policy, as a packet for the host
        apply(host)          units are switched, the paths' next step begins

    `step` is the last three in one; `discard` ends a step that is not to count. `gnmr train` calls them one by one,
    because its optimizer steps, and other numbers join the packet, before the one transfer to the host.

    A parameter of a unit that was exchanged for another one is followed from the next step on, and so is an adapter
    that was added or switched to; a module that was exchanged, and parameters that were sharded, are refused there
    (`ValueError`).
    """

    plan: ConvertedModel
    plan_of: str | None = None
    """What the plan that was attached is of, as it says itself."""
    _detached = False
    _recording: Recording | None = None
    _recorded_elsewhere = False
    """By another process."""
    _ending: Ending | None = None
    """None where nothing is routed, and in `gnmr train`."""
    _checked_batches = False
    _measured = False
    """The step's passes are over for the paths, its decision is not applied yet."""

    def attach_converted(
        self, plan: ConvertedModel, model: nn.Module, probe_tokens: int = 1, price_tokens: int = 16
    ) -> None:
        """Takes the plan of `model` and has its operators measure what the signal needs of them."""
        self.plan, self._model = plan, model
        observe = self.spec.observe
        outside = [] if observe == "parameters" else [module_of(name) for name in self.names]
        around: list[nn.Module] = [watched(model, name) for name in dict.fromkeys(outside)]
        read = around if observe == "adapter" else plan.operators
        self._linked = Linked(model, [*plan.operators, *around], read, trained=observe == "adapter")
        self._evidence = PathEvidence(plan, self._path_needs(), probe_tokens, price_tokens)
        self._begin()

    def __repr__(self) -> str:
        """As `Controller.__repr__`; after `detach` it says that it was."""
        if self._detached:
            return f"<{type(self).__name__} of {len(self.units)} units, detached; step {self.t}>"
        return super().__repr__()

    def watch_use(self) -> None:
        """From now on a loop that never calls `step`, or that ends while it calibrates, is told so at its end."""
        delayed = self.plan.shared.amax is not None and self.plan.shared.amax.history is not None
        routes = any(unit.recoverable for unit in self.units) and not isinstance(self.signal, AlwaysLow)
        if routes or delayed:
            self._hints.watch(self._model.named_parameters())
            self._ending = Ending(self._model, self._hints, self.plan.low.name)

    def end_use(self) -> None:
        """The training is over: says, once, what was pointless in it. `detach` does it too."""
        if self._ending is not None:
            self._ending()

    def _told(self) -> str:
        """With the GEMMs that are pinned, and whose plan says so."""
        pinned = sum(len(operator.pinned) for operator in self.plan.operators)
        of = "" if self.plan_of is None else f" by the plan of {self.plan_of}"
        gemms = f"{pinned} of {len(GEMMS) * len(self.plan.operators)} GEMMs pinned{of}"
        return super()._told() + (f", {gemms}" if pinned or of else "")

    def _path_needs(self) -> tuple[str, ...]:
        """Evidence that may be the paths' to measure."""
        return self.needs

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of pickle and deepcopy: a copy of the model alone has no probe."""
        self.__dict__.update(state)
        self.plan.shared.probe, self.plan.shared.prices = self._evidence.probe, self._evidence.prices

    def _check_attached(self) -> None:
        """RuntimeError after `detach`."""
        if self._detached:
            raise RuntimeError(DETACHED)

    def _check_alone(self, what: str) -> None:
        """ValueError where several processes train the model, or its parameters are sharded."""
        if self.together() or is_sharded(*self._model.parameters()):
            raise ValueError(f"{what}: runs in one process, on parameters that are whole; not under DDP or FSDP")

    def follow(self) -> None:
        """Takes note of what was exchanged in the model since the last step."""
        self._check_attached()
        if not self._linked.changed():
            return
        self._linked.refuse_missing()
        costs = [unit.cost for unit in self.units]
        self._exchange(units_of(self.plan, self._model, self.spec.observe, costs, self.units))
        self._linked.look()

    def _begin(self) -> None:
        """A step of the paths: measured only if somebody reads it, and in 16 bits in a warm-up there."""
        self._measured = False
        self._scale_histories()
        self._share_draws()
        self.plan.begin_step(self.t + 1)
        self._began = self.plan.mark()
        self._evidence.begin_step(self.t + 1, read=self.reads_next())

    def _share_draws(self) -> None:
        """Has rounding draw for this process's own micro-batches; under tensor parallelism all have the same."""
        rounding = self.plan.shared.rounding
        new = rounding is not None and self.together() and rounding.ranks != world.size()
        if rounding is not None and new and tensor_parallel(self._model) is None:
            rounding.rank, rounding.ranks = world.rank(), world.size()

    def _scale_histories(self) -> None:
        """Delayed scales of gradients know how many times as large they come here."""
        if self.ranks is not None and self.plan.shared.amax is not None:
            self.plan.shared.amax.come(1 / self.ranks.share)

    def _end(self) -> None:
        """The step's passes are over for the paths."""
        if not self._measured:
            self._scale_histories()  # the processes may have joined since the step began
            amax = self.plan.shared.amax
            if self.ranks is not None and amax is not None and amax.history is not None:
                self.ranks.take_largest(amax.history[:, :, 0])  # delayed scales are those of the whole step
            self.plan.end_step()
            self._measured = True

    def calibrate(self, fraction: float = 0.01, steps: int = 100) -> None:
        """As `Controller.calibrate`."""
        self._check_attached()
        super().calibrate(fraction, steps)

    def promote(self, names: Iterable[str]) -> bool:
        """As `Controller.promote`."""
        self._check_attached()
        return super().promote(names)

    def micro_step(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """As `Controller.micro_step`."""
        self.follow()
        super().micro_step(fraction, gradients)

    def _own_evidence(self) -> set[str]:
        return super()._own_evidence() | self._evidence.names

    def parts(self, plain: Tensor | None = None) -> dict[str, Tensor]:
        """As `Controller.parts`, with what the paths measured."""
        self.follow()
        self._check_batches()
        found = super().parts(plain)
        return found if self.ranks is None else found | self._evidence.parts(self.ranks, self._device)

    def _check_batches(self) -> None:
        """ValueError where ranks have the same batch, and what each measures of its own would be summed as of many."""
        if self._checked_batches:
            return
        measures = bool(self._evidence.meters) or isinstance(self.norms, OutputGradients)
        if measures and self.together() and (name := tensor_parallel(self._model)) is not None:
            raise ValueError(
                f"{name} is sharded by tensor parallelism, whose processes have the same batch: what each measures of "
                "it would be summed as of several; use observe='parameters' and a signal of gradient norms"
            )
        self._checked_batches = True

    def measure(
        self,
        grad_scale: float = 1.0,
        norms: tuple[Tensor, Tensor] | None = None,
        sums: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """As `Controller.measure`, with what the paths measured; their step ends. RuntimeError after `detach`."""
        self.follow()
        sums = self.summed(sums)
        found = super().measure(grad_scale, norms, sums) | self._evidence.read(grad_scale, sums)
        self._end()
        return found

    def true_gap(self, backward: Callable[[], object]) -> Tensor:
        """The evidence `true_gap`: the gradients of both paths on one batch (corollary 1), (U,).

        Call it before the step's own passes. `backward` runs them, forward and backward, and is called once a path; of
        several processes each its own, through the model that reduces gradients.
        Paths and generators are afterwards as they were, all gradients are None. Does not wait for the device.
        """
        self._check_attached()
        with self.unmeasured():
            return self._passes().gap(backward)

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
        with self.unmeasured():
            return self._passes().explain(loss_of_batch, self.t + 1, loss=loss, usual=usual, grad_scale=grad_scale)

    def _passes(self) -> Passes:
        return Passes(self.plan, self._model, self.units, self._device, self.ranks)

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Inside, passes leave nothing in the probe and in norms of outputs."""
        norms = [self.norms] if isinstance(self.norms, OutputGradients) else []
        watching = [*self._evidence.meters, *norms]
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
        spent = None if self._recording is None else self.plan.cost.spent()
        self._end()
        self._begin()
        decision = super().apply(host)
        if self._ending is not None:
            self._ending.stepped, self._ending.calibration = True, self.calibrating
        if self._recording is not None and spent is not None:
            self._recording.step(decision, spent, self.calibrated)
        return decision

    @property
    def records(self) -> bool:
        """Whether this process records (`attach(record=FOLDER)`), so that `log` has somewhere to go."""
        return self._recording is not None

    @property
    def recorded(self) -> bool:
        """Whether this process or, of several, another one does."""
        return self._recording is not None or self._recorded_elsewhere

    def finish(self) -> None:
        """The recorded run is done; `detach` ends it so too."""
        if self._recording is not None:
            self._recording.finish()
        self._recording, self._recorded_elsewhere = None, False

    def log(self, **figures: float) -> None:
        """Puts loss, lr, tokens or val_loss beside the step that was taken last, where `attach` was given a folder to
        record to (gnmr/attachment/record.py); of several processes the first one records. ValueError for other figures."""
        self._check_attached()
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
        self._evidence.reset()
        self.plan.begin_again(self._began)
        self._begin()

    def _advice(self, decision: Decision) -> str:
        if advice := super()._advice(decision):
            return advice
        for unit, observed in zip(self.plan.units, decision.observed, strict=True):
            for operator in unit.operators if observed else ():
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
        self.finish()
        self.plan.restore()
        self._detached = True
        if isinstance(self.norms, OutputGradients):
            self.norms.close()
        self.end_use()
        self._hints.release()

    def state_dict(self) -> dict[str, Any]:
        """As `Controller.state_dict`, with the generator of stochastic rounding, delayed scales and how far the records
        are (`attach(record=...)`)."""
        self._check_attached()
        recorded = {} if self._recording is None else {"record": self._recording.state()}
        return {**super().state_dict(), "plan": self.plan.state_dict(), **recorded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Controller.load_state_dict`; ValueError if it belongs to other paths too, UserError if records go on
        (`attach(record=...)`) whose first steps are not there."""
        if self._recording is not None:
            self.check_state(state)
            self._recording.resume(state["t"], state.get("record", {}))
        super().load_state_dict(state)
        self.plan.load_state_dict(state["plan"])
        self._begin()

    def check_state(self, state: Any) -> None:
        """As `Controller.check_state`, and of the paths."""
        self._check_attached()
        if isinstance(state, Mapping):
            self.plan.check_state(state.get("plan"))
        super().check_state(state)
