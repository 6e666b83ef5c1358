"""The callback in Lightning's Trainer; tests/integrations/test_same_sets.py holds its sets against other loops."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gnmr.conversion import PathLinear
from gnmr.errors import UserError
from gnmr.lab.report.recorded_run import load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fits() -> ModuleType:
    """`lightning_fits`, imported when it is needed: the quick tests collect this file too."""
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    import lightning_fits

    return lightning_fits


def test_validation_is_on_the_16_bit_path(fits: ModuleType, tmp_path: Path) -> None:
    """Whatever the path in force: E2M1 would show. Records have the step's loss."""
    records = tmp_path / "records" / "mine-s0"
    module, callback = fits.Module(), fits.Noted(low="sim_e2m1", recovery="bf16", record=records)
    fits.fit(tmp_path, module, callback, limit_train_batches=1, limit_val_batches=1)
    run = load(records).check()
    assert run.status == "done" and len(run.steps["loss"]) == 1 and run.steps["loss"][0] > 0
    with torch.no_grad():
        assert module.told == [
            pytest.approx((module.net(fits.X[:4]) - 2 * fits.X[:4]).square().mean().item(), rel=1e-6)
        ]


@pytest.mark.parametrize("observe", ["parameters", "input_grad"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_is_taken_out(fits: ModuleType, fused: bool, observe: str, tmp_path: Path) -> None:
    """FP16's scaler without FP16, which CPUs do not train in. A fused optimizer takes it out itself, later."""
    plain = fits.fit(tmp_path, fits.Module(fused=fused), fits.Noted(observe=observe)).seen
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    precision.precision = "32-true"
    precision.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
    scaled = fits.fit(tmp_path, fits.Module(fused=fused), fits.Noted(observe=observe), plugins=[precision]).seen
    assert [one.norm.tolist() for one in scaled] == [pytest.approx(one.norm.tolist(), rel=1e-5) for one in plain]


def test_a_batch_without_a_loss_decides_nothing(fits: ModuleType, tmp_path: Path) -> None:
    callback = fits.fit(tmp_path, fits.Module(skip=2))
    assert callback.seen[2] is callback.seen[1] and callback.controller.t == 5


# ---- checkpoints; that resuming gives the same sets is in test_same_sets.py ----


def test_a_checkpoint_that_does_not_fit_is_refused(fits: ModuleType, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = {"enable_checkpointing": True}
    fits.fit(tmp_path, callback=fits.Noted(), **keep | {"callbacks": [fits.Noted(), ModelCheckpoint(tmp_path, "ours")]})
    fits.fit(tmp_path, **keep | {"callbacks": [ModelCheckpoint(tmp_path, "theirs")]})

    def refused(match: str, name: str, **options: Any) -> None:
        module = fits.Module()
        with pytest.raises(UserError, match=match) as error:
            fits.fit(tmp_path, module, fits.Noted(**options), str(tmp_path / f"{name}.ckpt"), max_epochs=2)
        assert "\n" not in str(error.value)
        assert not any(isinstance(one, PathLinear) for one in module.modules())

    refused(r"theirs\.ckpt: has no state of GnmrLightningCallback", "theirs")
    refused(r"cannot be resumed here \(the paths' state belongs to .* 3 operators", "ours", targets=["net.0"])
    refused(r"cannot be resumed here \(the paths' state belongs to low=int4", "ours", low="int2")


def test_a_state_of_another_training_is_not_taken(fits: ModuleType, tmp_path: Path) -> None:
    """`validate(ckpt_path=...)` restores callbacks too; a fit behind it begins anew."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = fits.Noted(), ModelCheckpoint(tmp_path, "ours")
    fits.fit(tmp_path, enable_checkpointing=True, callbacks=[*keep])
    callback = fits.Noted()
    trainer = fits.pl.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[callback], max_epochs=1, limit_train_batches=1,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, enable_checkpointing=False,
    )  # fmt: skip
    trainer.validate(fits.Module(), DataLoader(fits.X[:4], 4), str(tmp_path / "ours.ckpt"), verbose=False)
    trainer.fit(fits.Module(), DataLoader(fits.X, 4))
    assert callback.controller is not None and callback.controller.t == 1


# ---- what is refused ----


def test_what_is_not_supported(fits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Manual(fits.Module):
        automatic_optimization = False

    for match, module in (
        ("manual optimization clips where", Manual()),
        ("needs one optimizer .* not LBFGS", fits.Module(optimizer="LBFGS")),
    ):
        with pytest.raises(UserError, match=match) as error:
            fits.fit(tmp_path, module)
        assert "\n" not in str(error.value)
        assert not any(isinstance(one, PathLinear) for one in module.modules())
    with pytest.raises(TypeError, match="colour"):
        fits.GnmrLightningCallback(colour=1)

    monkeypatch.setattr("gnmr.attachment.lightning.SingleDeviceStrategy", fits.pl.strategies.FSDPStrategy)
    with pytest.raises(UserError, match="strategy SingleDeviceStrategy is not supported"):
        fits.fit(tmp_path)
