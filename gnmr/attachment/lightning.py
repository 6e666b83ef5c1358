"""Run the controller in a Lightning `Trainer`.

    trainer = L.Trainer(callbacks=[GnmrLightningCallback(low="sim_int8", recovery="bf16", max_o=4)])
    trainer.fit(module, blocks)

`on_before_optimizer_step` is called once per optimizer step, after the last micro-batch's backward pass. Gradients are
then unscaled, reduced over processes, and not yet clipped.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from gnmr.attachment import Router, attach
from gnmr.attachment.callback_tally import Tally, check_options, resuming
from gnmr.control import Decision
from gnmr.errors import UserError, install

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(f"gnmr.attachment.lightning needs lightning: {install('lightning')}") from error


class GnmrLightningCallback(Callback):
    """Route the units of a LightningModule while it is fitted; one callback for one Trainer.

    - The model is attached when fitting begins, on its device and in its processes, and detached when it ends. After an
      error midway it is not detached: call `callback.detach()`.
    - Norms are those of the accumulated gradient, unscaled, before clipping. The callback waits for the device once a
      step, and twice under FP16's loss scale.
    - The Trainer's log has `Tally.figures` every `log_every_n_steps`, over the steps since the last entry.
    - Validation is on the 16-bit path.
    - Checkpoints hold the controller's state, and `fit(ckpt_path=...)` restores it. Raises UserError if a checkpoint
      has no state or one that does not fit.
    - A batch for which `training_step` returns None leads to no decision.

    Raises UserError for manual optimization and LBFGS, whose hook comes after clipping or more than once a step.
    Supported strategies are one device, DDP and `ModelParallelStrategy` (FSDP2; not tried); others raise UserError.
    """

    def __init__(self, **options: Any) -> None:
        """Take the `options` of `gnmr.attach`.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If a value is invalid.
        """
        check_options(options)
        self.controller: Router | None = None
        """None before fitting begins."""
        self.decision: Decision | None = None
        """Decision of the last step, for callbacks that come after this one."""
        self._options = options
        self._saved: dict[str, Any] | None = None
        """State of the checkpoint that is resumed."""
        self._attached = False
        self._last: dict[str, Any] = {}
        """The controller's state when it was detached."""
        self._in_16_bits = ExitStack()
        self._passes = 0
        self._stepped = False
        self._tally = Tally()

    # ---- a fit ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the checkpoint of an earlier fit."""
        self._saved = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the model, and restore the state of a checkpoint that was loaded before."""
        _check(trainer, pl_module)
        self.detach()  # after a fit that did not end
        self.controller, self._attached = attach(pl_module, **self._options), True
        self._tally, self._passes = Tally(), 0
        if self._saved is not None:
            self._load(self._saved)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise UserError if a restored checkpoint had no state of this callback."""
        if trainer.ckpt_path is not None and self._saved is None:
            self.detach()
            raise UserError(
                f"{trainer.ckpt_path}: has no state of GnmrLightningCallback, it was saved without; resume it without"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach the model."""
        self.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the 16-bit path if validation failed."""
        self._in_16_bits.close()

    def detach(self) -> None:
        """Restore the module's plain linears; the state stays for checkpoints."""
        self._in_16_bits.close()
        if self.controller is not None and self._attached:
            self._last = self.controller.state_dict()
            self.controller.detach()
        self._attached = False

    # ---- a step ----

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a micro-batch."""
        if self.controller is not None:
            self.controller.micro_step()
            self._passes += 1

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Read norms, decide and switch; waits for the device."""
        if self.controller is None:
            return
        if not self._passes:  # training_step returned None
            self.controller.discard()
            return
        self._passes, self._stepped = 0, True
        scale = 1.0 if trainer.scaler is None else trainer.scaler.get_scale()
        # A fused optimizer unscales inside its step, later. torch marks these optimizers by a private attribute alone,
        # which its GradScaler and Lightning's MixedPrecision read too.
        still_scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.decision = self.controller.step(grad_scale=scale if still_scaled else 1.0, loss_scale=scale)
        self._tally.add(self.decision, self.controller.spec.max_o)
        # The Trainer counts this step only after the optimizer's.
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._tally.figures(len(self.controller.units)), on_step=True, on_epoch=False)
            self._tally = Tally()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of a step's last micro-batch and the learning rate, if records are kept."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._stepped and self.controller is not None and self.controller.records and loss is not None:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.controller.log(loss=float(loss), lr=float(rate))
        self._stepped = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch to the 16-bit path."""
        if self.controller is not None and trainer.state.fn == TrainerFn.FITTING:
            self._in_16_bits.enter_context(self.controller.converted.high_precision())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return to the paths in force."""
        self._in_16_bits.close()

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state; after `detach`, its last one."""
        if self.controller is None:
            return {}
        return {"controller": self.controller.state_dict() if self._attached else self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint. Raises UserError if it does not fit.

        Lightning restores before a fit begins or, under some strategies, after it.
        """
        self._saved = state_dict
        if self._attached:
            self._load(state_dict)

    def _load(self, saved: dict[str, Any]) -> None:
        assert self.controller is not None
        try:
            with resuming("the checkpoint"):
                self.controller.load_state_dict(saved["controller"])
        except UserError:
            self.detach()
            raise


def _check(trainer: Trainer, module: LightningModule) -> None:
    """Raise UserError if norms or sets would be wrong under this Trainer."""
    strategy = trainer.strategy
    supported = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
    if not supported or isinstance(strategy, DeepSpeedStrategy):
        raise UserError(
            f"GnmrLightningCallback: strategy {type(strategy).__name__} is not supported, because its "
            "gradients are sharded in another way; use one device, 'ddp' or ModelParallelStrategy"
        )
    if not module.automatic_optimization:
        raise UserError(
            "GnmrLightningCallback: manual optimization clips where the callback does not see it; use "
            "gnmr.attach in the module and call controller.step() before you clip"
        )
    optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in trainer.optimizers]  # LightningOptimizer
    if len(optimizers) != 1 or isinstance(optimizers[0], torch.optim.LBFGS):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise UserError(f"GnmrLightningCallback: needs one optimizer that steps once a batch, not {names}")
