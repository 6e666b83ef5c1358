"""Run the controller in a Hugging Face `Trainer`.

    trainer = Trainer(model, args, train_dataset=blocks)
    trainer.add_callback(GnmrTrainerCallback(trainer, low="sim_int8", recovery="bf16", unit="block", observe="adapter"))
    trainer.train()

A Trainer has no event between the last backward pass of a step and clipping: `on_pre_optimizer_step` comes after both.
The callback therefore wraps methods of this one Trainer that its documentation offers for overriding. Subclasses that
override these methods work.

- `training_step`: forward and backward of a micro-batch; norms are read when the step's last one returns.
- `prediction_step`: evaluation is on the 16-bit path.
- `log`: figures are added to the Trainer's own entries.
- `train`: shows which checkpoint is resumed.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gnmr.attachment import Router, attach
from gnmr.attachment.blame import Levels, Verdict
from gnmr.attachment.callback_tally import Tally, check_options, resuming
from gnmr.control import Decision
from gnmr.errors import UserError, install

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise ImportError(f"gnmr.attachment.trainer needs transformers and accelerate: {install('finetune')}") from error

_LOG = logging.getLogger(__name__)
ALONE_OR_DDP = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU")
"""Accelerate's names for one process, and for several that DDP keeps equal."""
STATE_FILE = "gnmr.pt"
"""File of the controller's state in a checkpoint of the Trainer."""


class _MicroBatch(NamedTuple):
    """A pass of the current step: the arguments of `training_step` and its loss, which can be run again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: torch.Tensor


class GnmrTrainerCallback(TrainerCallback):
    """Route the units of the Trainer's model while it trains; one callback for one Trainer.

    - Norms are those of the accumulated gradient, unscaled (FP16), before clipping. The callback waits for the device
      once per optimizer step, and twice under FP16's loss scale.
    - Every entry of the Trainer's log that has a loss gets `Tally.figures` over the steps since the last one.
    - Checkpoints hold the controller's state (`STATE_FILE`, written atomically), and resuming loads it.
    - With `record=FOLDER` the records have the loss, rate and evaluations of the Trainer; the first process writes.
    - A step is run again to find the cause (docs/blame.md) if its loss is not finite, or is 6 standard deviations above
      the mean of the 128 losses before. The cause is a warning of the logger `gnmr.attachment.trainer` and `verdict`.
      If the low path of some units makes the loss non-finite, they are put on the recovery path and the step is tried
      again. `verdicts=False` turns this off; several processes never do it.

    With several processes (torchrun, DDP) all have the same set. Raises UserError for several devices in one process,
    FSDP, DeepSpeed, tensor parallelism, `auto_find_batch_size` and hyperparameter search.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        controller: Router | None = None,
        *,
        verdicts: bool = True,
        **options: Any,
    ) -> None:
        """Check the options and wrap the Trainer's methods. Add the callback to the Trainer afterwards.

        Args:
            trainer: The Trainer, made without this callback.
            controller: A controller that the caller attaches and detaches.
            verdicts: Run steps that spike or are not finite again to find the cause.
            **options: Options of `gnmr.attach`, without `controller`. The model is then attached when training begins
                and detached when it ends. After an error midway it is not detached: call
                `callback.controller.detach()`.

        Raises:
            TypeError: If an option is unknown.
            UserError: If the Trainer is missing or not supported.
        """
        if not isinstance(trainer, Trainer):
            problem = "is missing" if trainer is None else f"must be the Trainer, not a {type(trainer).__name__}"
            raise UserError(
                f"GnmrTrainerCallback: the first argument {problem}; make the Trainer without it, then "
                "trainer.add_callback(GnmrTrainerCallback(trainer, low=..., recovery=...))"
            )
        if controller is not None and options:
            raise UserError(
                f"GnmrTrainerCallback: options ({', '.join(options)}) are for attaching, and controller= is attached"
            )
        check_options(options)
        _check(trainer, attached=controller is not None)
        self.trainer = trainer
        self.controller = controller
        """None before training begins, if the callback attaches it."""
        self.decision: Decision | None = None
        """Decision of the last step, for callbacks that come after this one."""
        self.verdict: Verdict | None = None
        """Verdict on the last step that spiked or was not finite."""
        alone = trainer.accelerator.num_processes == 1  # several processes would each judge their own loss
        self._levels = Levels() if verdicts and alone else None
        self._micro_batches: list[_MicroBatch] = []
        """Passes of the current step; the sum of their losses is the step's loss."""
        self._options = None if controller is not None else options
        self._running = False
        self._resume_from: str | None = None
        self._tally = Tally()
        for name in ("train", "training_step", "prediction_step", "log"):
            # On this object only: other Trainers of the process keep their methods.
            setattr(trainer, name, partial(getattr(self, f"_{name}"), getattr(trainer, name)))

    # ---- around the Trainer's methods ----

    def _train(self, train: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self not in self.trainer.callback_handler.callbacks:
            warnings.warn(
                "GnmrTrainerCallback was not added to its Trainer: use trainer.add_callback(callback)", stacklevel=2
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.trainer.args.output_dir) or True  # the Trainer refuses it
        self._resume_from = resume_from_checkpoint or None
        return train(resume_from_checkpoint, *args, **kwargs)

    def _training_step(self, training_step: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = training_step(*args, **kwargs)
        if not self._running or self.controller is None:
            return loss
        accelerator = self.trainer.accelerator
        self.controller.micro_step()
        self._micro_batches.append(_MicroBatch(args, kwargs, loss))
        if accelerator.sync_gradients:  # the last micro-batch: gradients are complete and not yet clipped
            scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
            if self._levels is not None:
                self._find_cause(training_step, self._levels, scale)
                loss = self._micro_batches[-1].loss  # of the second try, if there was one
            self.decision = self.controller.step(grad_scale=scale)
            self._tally.add(self.decision, self.controller.spec.max_o)
            if self.controller.records:
                scheduler = self.trainer.lr_scheduler
                figures = {} if scheduler is None else {"lr": float(scheduler.get_last_lr()[0])}
                self.controller.log(loss=float(self._loss_of_step()), **figures)
            self._micro_batches.clear()
        return loss

    def _loss_of_step(self) -> torch.Tensor:
        return torch.stack([micro_batch.loss for micro_batch in self._micro_batches]).sum()

    def _find_cause(self, training_step: Callable[..., torch.Tensor], levels: Levels, scale: float) -> None:
        """Find the cause of a spike, and try the step again if recovery makes its loss finite. Waits for the device."""
        controller, loss, usual = self.controller, float(self._loss_of_step()), levels.now()[0]
        assert controller is not None
        if usual.spike(loss):
            self.verdict = controller.explain(
                lambda: self._repeated_losses(training_step),
                loss=loss,
                # No finite norm exceeds an infinite one, so the loss alone is judged.
                usual=(usual.mean, math.inf) if math.isfinite(usual.limit) else None,
                grad_scale=scale,
            )
            _LOG.warning("%s", self.verdict)
            self._tally.verdicts[self.verdict.cause] += 1
            if not math.isfinite(loss) and self.verdict.units and controller.promote(self.verdict.units):
                # The first try must leave nothing behind: no measurements, no draws of the paths, no gradients.
                controller.discard()
                for parameter in self.trainer.model.parameters():
                    parameter.grad = None
                for i, (args, kwargs, _) in enumerate(self._micro_batches):
                    self._micro_batches[i] = _MicroBatch(args, kwargs, training_step(*args, **kwargs))
                    controller.micro_step()
                loss = float(self._loss_of_step())
        # The norm is not judged here, and a constant never spikes.
        levels.add(loss, 1.0)

    def _repeated_losses(self, training_step: Callable[..., torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the loss from which backward starts in each micro-batch, computed again."""
        accelerator = self.trainer.accelerator
        for args, kwargs, _ in self._micro_batches:
            losses: list[torch.Tensor] = []
            backward = accelerator.backward
            # Keep the loss for the caller, whose backward pass this is.
            accelerator.backward = lambda loss, *_, losses=losses, **__: losses.append(loss)
            try:
                training_step(*args, **kwargs)
            finally:
                accelerator.backward = backward
            yield losses[0]

    def _prediction_step(self, prediction_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.controller is None:
            return prediction_step(*args, **kwargs)
        with self.controller.converted.high_precision():
            return prediction_step(*args, **kwargs)

    def _log(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._tally.steps > 0 and self.controller is not None:
            logs |= self._tally.figures(len(self.controller.units))
            self._tally = Tally()
        log(logs, *args, **kwargs)

    # ---- events ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the model if that is the callback's task, and restore the state of a resumed checkpoint."""
        if state.is_hyper_param_search:
            raise UserError("GnmrTrainerCallback: hyperparameter search is not supported; train each setting alone")
        if self._options is not None:
            if self.controller is not None:  # an earlier training that did not end
                self.controller.detach()
            assert self.trainer.model is not None
            self.controller = attach(self.trainer.model, **self._options)
        assert self.controller is not None
        try:
            _check_attached(self.trainer, self.controller)
            if self._resume_from is not None:
                _load(self.controller, Path(self._resume_from), state.global_step)
        except UserError:
            if self._options is not None:
                self.controller.detach()
            raise
        self._running, self._tally, self.decision = True, Tally(), None
        self._micro_batches.clear()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the controller's state in the checkpoint just written, unless it holds only the model."""
        if self.controller is not None and args.should_save and not args.save_only_model:
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            _save(self.controller, folder, state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the evaluation, if records are kept and a step was taken."""
        loss, controller = (kwargs.get("metrics") or {}).get("eval_loss"), self.controller
        if self._running and controller is not None and controller.records and self.decision and loss is not None:
            controller.log(val_loss=float(loss))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach the model if the callback attached it, and warn of settings without effect."""
        self._running = False
        if self._options is not None and self.controller is not None:
            self.controller.detach()
        elif self.controller is not None:
            self.controller.end_use()


def _save(controller: Router, folder: Path, step: int) -> None:
    """Write `STATE_FILE` into the checkpoint `folder` of that step. Waits for the device."""
    # Written aside and then renamed: a crash leaves no half file under the final name.
    temporary = folder / f".{STATE_FILE}.tmp"
    with temporary.open("wb") as file:
        torch.save({"step": step, "controller": controller.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / STATE_FILE)


def _load(controller: Router, folder: Path, step: int) -> None:
    """Load the state that `_save` wrote. Raises UserError if the file is missing or unreadable, or does not fit."""
    file = folder / STATE_FILE
    if not file.exists():
        raise UserError(f"{folder} has no {STATE_FILE}: it was saved without GnmrTrainerCallback; resume it without")
    with resuming(file):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        # A file of another step would resume with a set and a history that do not fit the weights.
        if saved["step"] != step:
            raise ValueError(f"it is of step {saved['step']}, the checkpoint of step {step}")
        controller.load_state_dict(saved["controller"])


def _check(trainer: Trainer, attached: bool) -> None:
    """Raise UserError if norms or sets would be wrong under this Trainer."""
    accelerator, args = trainer.accelerator, trainer.args
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind not in ALONE_OR_DDP or args.n_gpu > 1:
        devices = f"{accelerator.num_processes} processes with {args.n_gpu} GPUs each"
        raise UserError(
            f"GnmrTrainerCallback: {devices} ({kind}) are not supported, gradients may be sharded or not reduced "
            "yet; train in processes of one device each, started by torchrun (DDP), or in one (CUDA_VISIBLE_DEVICES)"
        )
    if args.auto_find_batch_size:
        raise UserError("GnmrTrainerCallback: auto_find_batch_size=True restarts training; set the batch size")
    if attached and trainer.model_init is not None:
        raise UserError("GnmrTrainerCallback: model_init makes another model than the attached one; give options")


def _check_attached(trainer: Trainer, controller: Router) -> None:
    """Raise UserError if the controller is of another model, or if its signal needs more micro-batches."""
    assert trainer.model is not None
    if not set(trainer.model.modules()).issuperset(operator.module for operator in controller.converted.operators):
        raise UserError("GnmrTrainerCallback: the controller is attached to another model than the Trainer's")
    if "micro_square" not in controller.needs:
        return
    accumulation, last_step = trainer.args.gradient_accumulation_steps, 0
    loader: Any = trainer.callback_handler.train_dataloader
    with suppress(TypeError):  # a stream does not know its length
        last_step = len(loader) % accumulation
    if accumulation < 2 or last_step == 1:
        raise UserError(
            f"GnmrTrainerCallback: {type(controller.controller.signal).__name__} compares micro-batches, and with "
            f"gradient_accumulation_steps={accumulation} "
            f"{'the last step of an epoch' if last_step == 1 else 'a step'} has one alone; use another number"
        )
