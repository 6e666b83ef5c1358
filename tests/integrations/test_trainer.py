"""The callback in a Trainer against a loop by hand: the same norms and the same sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.control import Decision
from gnmr.control.signals import SIGNALS
from gnmr.conversion import PathLinear
from gnmr.errors import UserError
from gnmr.lab.report.recorded_run import load

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from pairs import assert_same
from tiny_lora import BASE, llama, lora_llama, token_blocks
from transformers import Trainer, TrainingArguments

from gnmr.attachment.trainer import STATE_FILE, GnmrTrainerCallback

pytestmark = pytest.mark.slow

ROUTED: dict[str, Any] = {"max_o": 1, "alpha": 1.02, "beta": 1.01}
LORA = {**ROUTED, "low": "sim_int8", "recovery": "bf16", "unit": "block", "observe": "adapter", "targets": BASE}
STEPS, ACCUMULATION, CLIP, LR = 8, 2, 0.05, 3e-3


class Blocks(torch.utils.data.Dataset):
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


TOKENS = token_blocks(2 * ACCUMULATION * STEPS)


class Noted(GnmrTrainerCallback):
    """Keeps what its controller decided."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Decision] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.decision is not None
        self.seen.append(self.decision)


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    words: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "max_grad_norm": CLIP,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**words, **changed})


def made(model: nn.Module, folder: Path, options: dict[str, Any], **changed: Any) -> tuple[Trainer, Noted]:
    trainer = Trainer(
        model, arguments(folder, **changed), train_dataset=Blocks(TOKENS), eval_dataset=Blocks(TOKENS[:2])
    )
    callback = Noted(trainer, **options)
    trainer.add_callback(callback)
    return trainer, callback


def by_hand(model: nn.Module, options: dict[str, Any], autocast: bool = False) -> list[Decision]:
    """A plain loop: nothing of transformers but the model."""
    controller = gnmr.attach(model, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    decisions = []
    model.train()
    for step in TOKENS.split(2 * ACCUMULATION):
        for batch in step.split(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(input_ids=batch).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())
            (loss / ACCUMULATION).backward()
            controller.micro_step()
        decisions.append(controller.step())
        norm = nn.utils.clip_grad_norm_(trained, CLIP)
        assert norm > 2 * CLIP, "the clipping has to bite"
        optimizer.step()
        optimizer.zero_grad()
    controller.detach()
    return decisions


SETTINGS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "lora_bf16": (lora_llama, LORA, {"bf16": True}),
    "lora_input_grad": (lora_llama, {**LORA, "observe": "input_grad", "unit": "operator", "max_o": 3}, {}),
    "gsnr": (lora_llama, {**LORA, "signal": SIGNALS["gsnr"], "routing": "ranked", "unit": "layer"}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_sets_as_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    """Two micro-batches a step; the norms are those before a clipping that bites, or all ratios would be others."""
    model, options, changed = SETTINGS[name]
    trainer, callback = made(model(), tmp_path, options, **changed)
    trainer.train()
    assert not any(isinstance(module, PathLinear) for module in trainer.model.modules())  # detached
    ours = by_hand(model(), options, autocast="bf16" in changed)
    assert len({tuple(decision.active) for decision in ours}) > 2, "sets that never change show little"
    assert_same(callback.seen, ours)


def test_a_loss_scale_is_taken_out(tmp_path: Path) -> None:
    """FP16's scaler without FP16, which CPUs do not train in; clipping off, which would unscale."""
    seen = []
    for scale in (None, 1024.0):
        trainer, callback = made(lora_llama(), tmp_path, LORA, max_grad_norm=0.0)
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.train()
        seen.append(callback.seen)
    assert len(seen[0]) == STEPS
    assert_same(seen[1], seen[0], 1e-6)


def test_what_the_log_shows(tmp_path: Path) -> None:
    """In the Trainer's own entries, and its global norm is that of our units: nothing else is trained."""
    trainer, callback = made(lora_llama(), tmp_path, LORA, logging_steps=3)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [3, 6]
    for entry, window in zip(entries, (callback.seen[:3], callback.seen[3:6]), strict=True):
        on = [int(decision.in_force.sum()) for decision in window]
        assert entry["gnmr/promotion_frac"] == pytest.approx(sum(on) / 9)
        assert entry["gnmr/hit_max_o_frac"] == pytest.approx(sum(on) / 3)  # max_o is 1
        assert entry["gnmr/promotions"] == sum(e.event == "promote" for d in window for e in d.events)
        assert entry["gnmr/max_risk"] == max(d.risk.max() for d in window)
        assert entry["grad_norm"] == pytest.approx(math.sqrt((window[-1].norm ** 2).sum()), rel=1e-5)
    assert sum(entry["gnmr/promotions"] for entry in entries) > 0


def test_evaluation_is_on_the_16_bit_path(tmp_path: Path) -> None:
    """Whatever the path in force: E2M1 would show. Records have it, and the Trainer's loss and rate."""
    model, records = lora_llama(), tmp_path / "records" / "mine-s0"
    options = {**LORA, "low": "sim_e2m1", "record": records}
    trainer, _ = made(model, tmp_path, options, max_steps=1, eval_strategy="steps", eval_steps=1, logging_steps=1)
    trainer.train()
    run, (entry,) = load(records).check(), [one for one in trainer.state.log_history if "loss" in one]
    assert run.status == "done" and run.steps["loss"].tolist() == [pytest.approx(entry["loss"], rel=1e-5)]
    told = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert run.evals["val_loss"].tolist() == [told]
    with torch.no_grad():
        logits = model(input_ids=TOKENS[:2]).logits[:, :-1]
    assert told == pytest.approx(F.cross_entropy(logits.flatten(0, 1), TOKENS[:2, 1:].flatten()).item(), rel=1e-5)


# ---- checkpoints ----


def test_resuming_an_attached_controller_gives_the_same_sets(tmp_path: Path) -> None:
    """The callback's own controller is resumed in test_same_sets.py."""

    def start(folder: Path) -> tuple[Trainer, Noted]:
        model = lora_llama()
        return made(model, folder, {"controller": gnmr.attach(model, **LORA)}, save_strategy="steps", save_steps=4)

    trainer, whole = start(tmp_path / "run")
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert (checkpoint / STATE_FILE).exists() and not list(checkpoint.glob("*.tmp"))
    trainer, rest = start(tmp_path / "other")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert len(rest.seen) == 4
    assert_same(rest.seen, whole.seen[4:], 0)
    assert [one.risk.tolist() for one in rest.seen] == [one.risk.tolist() for one in whole.seen[4:]]
    assert any(decision.in_force.any() for decision in rest.seen)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    trainer, _ = made(lora_llama(), tmp_path, LORA, save_strategy="steps", save_steps=4, max_steps=4)
    trainer.train()
    state = tmp_path / "checkpoint-4" / STATE_FILE

    def refused(options: dict[str, Any], match: str) -> None:
        model = lora_llama()
        with pytest.raises(UserError, match=match) as error:
            made(model, tmp_path, options)[0].train(resume_from_checkpoint=True)
        assert "\n" not in str(error.value)
        assert not any(isinstance(module, PathLinear) for module in model.modules())

    refused({**LORA, "unit": "layer"}, r"gnmr\.pt cannot be resumed here \(.*other units")
    refused({**LORA, "low": "sim_e2m1"}, r"gnmr\.pt cannot be resumed here \(the paths' state belongs to low=sim_int8")
    state.write_bytes(state.read_bytes()[:100])
    refused(LORA, r"gnmr\.pt cannot be resumed here")
    state.unlink()
    refused(LORA, r"checkpoint-4 has no gnmr\.pt: it was saved without GnmrTrainerCallback")


# ---- what is refused ----


def test_what_is_not_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, options: dict[str, Any] = LORA, **changed: Any) -> None:
        with pytest.raises(UserError, match=match) as error:
            made(lora_llama(), tmp_path, options, **changed)[0].train()
        assert "\n" not in str(error.value)

    refused("auto_find_batch_size=True", auto_find_batch_size=True)
    gsnr = {**LORA, "signal": SIGNALS["gsnr"]}
    refused("gradient_accumulation_steps=1 a step has one alone", gsnr, gradient_accumulation_steps=1)
    refused("gradient_accumulation_steps=3 the last step of an epoch", gsnr, gradient_accumulation_steps=3)
    elsewhere = gnmr.attach(lora_llama(), **LORA)
    refused("attached to another model", {"controller": elsewhere})
    refused(r"options \(max_o\) are for attaching", {"controller": elsewhere, "max_o": 3})
    with pytest.raises(TypeError, match="colour"):
        made(lora_llama(), tmp_path, {"colour": 1})
    made(lora_llama(), tmp_path, {"plan": "plan.json"})  # is an option, read when training begins

    for given in ((), (llama(),)):  # as `callbacks=[GnmrTrainerCallback(...)]` has it, before there is a Trainer
        with pytest.raises(UserError, match=r"trainer\.add_callback"):
            GnmrTrainerCallback(*given, **LORA)
    trainer = Trainer(lora_llama(), arguments(tmp_path), train_dataset=Blocks(TOKENS))
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        monkeypatch.setattr("accelerate.Accelerator.distributed_type", property(lambda _, kind=kind: kind))
        with pytest.raises(UserError, match=rf"1 processes with 0 GPUs each \({kind}\) are not supported"):
            GnmrTrainerCallback(trainer, **LORA)


def test_a_recorded_training_is_made_longer(tmp_path: Path) -> None:
    """In the folder of the one that is done; in another one the line says which is needed."""
    keep: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}

    def train(records: str, steps: int, resume: bool) -> None:
        options = {**LORA, "record": tmp_path / "records" / records}
        trainer, _ = made(lora_llama(), tmp_path / "out", options, max_steps=steps, **keep)
        trainer.train(resume_from_checkpoint=resume)

    train("mine-s0", 2, resume=False)
    assert load(tmp_path / "records" / "mine-s0").check().status == "done"
    with pytest.raises(
        UserError, match="has no records of the 2 steps before this checkpoint; name the folder"
    ) as error:
        train("other-s0", 4, resume=True)
    assert "the model and paths" not in str(error.value)
    train("mine-s0", 4, resume=True)
    run = load(tmp_path / "records" / "mine-s0").check()
    assert run.status == "done" and run.steps["step"].tolist() == [1, 2, 3, 4] and (run.steps["loss"] > 0).all()


@pytest.mark.parametrize("kind", ["nan", "spike", "none"])
def test_a_step_that_spikes_or_is_not_finite(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NaN by the low path of one unit: tried again, no loss is lost. A spike by it: named. Else no trace."""
    options = {"low": "sim_int8", "recovery": "bf16", "max_o": 1, "alpha": 99.0, "beta": None}
    trainer, callback = made(llama(), tmp_path / "a", options)
    calls: list[int] = []

    unit = trainer.model.get_submodule("model.layers.0.mlp.up_proj")

    def strike(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        calls.append(1)
        low = isinstance(unit, PathLinear) and not unit.recovering and not unit.shared.high_precision
        if kind == "none" or not low or len(callback.seen) != 2:
            return output
        return output * math.nan if kind == "nan" else output.flip(1) * 1000

    (unit if kind == "nan" else trainer.model.model.norm).register_forward_hook(strike)
    usual = math.log(trainer.model.config.vocab_size)
    assert callback._levels is not None
    callback._levels.seen.extend((usual + 0.01 * (-1) ** i, 1.0) for i in range(64))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS and all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    if kind == "none":
        assert callback.verdict is None and len(calls) == STEPS * ACCUMULATION
        return
    assert callback.verdict is not None and callback.verdict.cause == "precision" and callback.verdict.step == 3
    assert (kind == "nan") == any(event.cause == "retry" for event in callback.seen[2].events)
    assert "step 3  to blame: precision" in caplog.text
    assert [entry.get("gnmr/verdict_precision", 0) for entry in logged] == [0, 0, 1, *[0] * (STEPS - 3)]
