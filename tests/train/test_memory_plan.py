"""The memory plan, against what a real step of the same run keeps and allocates."""

import json
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from gnmr.errors import UserError
from gnmr.lab.config import Config
from gnmr.lab.config.compose import compose
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.build import Parts, assemble, training_blocks
from gnmr.lab.train.loss import loss_of
from gnmr.lab.train.memory_plan import GB, MemoryPlan, plan_run
from gnmr.precision.int8_linear import Int8Linear


def rows(plan: MemoryPlan) -> dict[str, int]:
    return {what: size for what, size, _ in plan.rows}


def saved_by(parts: Parts, tokens: torch.Tensor | Batch) -> int:
    """Bytes that autograd really saves of a forward pass besides the weights and their codes."""
    known = {t.untyped_storage().data_ptr() for t in (*parts.model.parameters(), *parts.model.buffers())}
    for operator in parts.converted.operators:
        codes = operator.kept_codes(operator.weight) if isinstance(operator, Int8Linear) else None
        known |= set() if codes is None else {codes.codes.data_ptr(), codes.scale.data_ptr()}
    storages, alive = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(parts.model, tokens)
    return sum(storages.values())


def peak_of(step: object) -> int:
    """The most bytes that PyTorch had allocated during `step` beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()  # type: ignore[operator]
    now = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


WORDS = [
    "model.hidden_size=64",
    "model.intermediate_size=160",
    "model.num_layers=3",
    "data.vocab_size=512",
    "training.dtype=float32",
    "training.batch_size=4",
    "training.seq_len=128",
    "training.steps=2",
]


PLAIN = ["precision.low=bf16", "precision.recovery=null"]


@pytest.mark.parametrize(("low", "recovery"), [("int4", "int8"), ("bf16", "null"), ("sim_e3m2", "fp8_hybrid")])
def test_what_is_kept_for_backward_is_what_a_real_step_keeps(tiny, tmp_path: Path, low: str, recovery: str) -> None:
    config: Config = tiny(*WORDS, f"precision.low={low}", f"precision.recovery={recovery}")
    parts = assemble(config, tmp_path / "unused", lambda _: None)
    tokens = torch.randint(0, parts.corpus.vocab_size, (4, 129))
    expected = saved_by(parts, tokens)
    # The tables of rotary positions are made in the first forward pass: they count as kept, and are not.
    assert rows(plan_run(config))["kept for backward"] == pytest.approx(expected, rel=0.02)


def test_a_step_allocates_what_is_planned(tiny, tmp_path: Path) -> None:
    config: Config = tiny(*WORDS, *PLAIN)
    parts = assemble(config, tmp_path / "unused", lambda _: None)
    tokens = torch.randint(0, parts.corpus.vocab_size, (4, 129))
    loss_of(parts.model, tokens).backward()
    parts.optimizer.zero_grad()
    planned = rows(plan_run(config))
    expected = planned["kept for backward"] + planned["loss in backward"]
    assert peak_of(lambda: loss_of(parts.model, tokens).backward()) == pytest.approx(expected, rel=0.15)
    held = planned["trained weights"] + planned["optimizer"]
    numbers = sum(p.numel() for p in parts.model.parameters())
    assert held == pytest.approx(3 * 4 * numbers, rel=0.01)


def test_activation_checkpointing_keeps_the_blocks_inputs_and_one_block(tiny) -> None:
    config = [*WORDS, *PLAIN]
    plain, sparing = (
        rows(plan_run(tiny(*config))),
        rows(plan_run(tiny(*config, "training.activation_checkpointing=true"))),
    )
    assert "recomputed block" not in plain
    per_block = 4 * 128 * 64 * 4
    saved = plain["kept for backward"] - sparing["kept for backward"]
    assert saved == pytest.approx(3 * sparing["recomputed block"] - 3 * per_block, rel=0.05)


@pytest.mark.parametrize("weights", ["online", "beside", "instead"])
@pytest.mark.slow
def test_a_step_of_adapters_keeps_and_allocates_what_is_planned(tiny, lora, tmp_path: Path, weights: str) -> None:
    words = [
        *lora,
        f"precision.weights={weights}",
        "precision.low=llm_int8",
        "training.batch_size=8",
        "training.seq_len=64",
    ]
    config: Config = tiny(*words)
    parts = assemble(config, tmp_path / "unused", lambda _: None)
    planned = rows(plan_run(config))
    weights_of = [p for p in parts.model.parameters() if not p.requires_grad]
    assert planned["frozen weights"] == sum(p.nbytes for p in weights_of)
    copies = planned.get("INT8 copies of weights", 0)
    assert copies == (parts.converted.weight_bytes()[1] if weights == "beside" else 0)
    batch = training_blocks(config, parts.corpus, None).next(8)
    expected = planned["kept for backward"] + planned["loss in backward"] + planned["gradients"]
    for recovering in (False, True):
        for operator in parts.converted.operators:
            operator.switch(recovering)
        assert planned["kept for backward"] == pytest.approx(saved_by(parts, batch), rel=0.02)
        parts.optimizer.zero_grad()
        assert peak_of(lambda: loss_of(parts.model, batch).backward()) == pytest.approx(expected, rel=0.15)
    assert planned["recovery"] == 0  # a frozen weight's input is kept on no path


@pytest.mark.parametrize("gpu", [False, True])
def test_the_backend_is_that_of_the_device_that_is_named(tiny, monkeypatch, gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    where, device = ("cuda (none here)", ["training.device=cuda"]) if gpu else ("cpu", [])
    words = [*WORDS, "training.dtype=bfloat16", "precision.recovery=null", "precision.low=fp8_hybrid", *device]
    simulated, real = plan_run(tiny(*words)), plan_run(tiny(*words, "precision.backend=scaled_mm"))
    assert str(simulated).startswith(f"for {where}, paths: fp8_hybrid, simulated\n")
    assert str(real).startswith(f"for {where}, paths: fp8_hybrid, scaled_mm\n")
    assert ("whether that GPU runs FP8" in str(simulated)) == gpu and "whether that GPU" not in str(real)
    # One byte instead of two: of the four tensors that a block's linears read, and of their weights.
    inputs, weights = 4 * 128 * (3 * 64 + 160), 4 * 64 * 64 + 3 * 64 * 160
    saved = rows(simulated)["kept for backward"] - rows(real)["kept for backward"]
    assert saved == pytest.approx(3 * (inputs + weights), rel=0.01)


def test_integers_are_planned_for_a_gpu_by_their_widths(tiny, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = [
        "precision.low=llm_int8",
        "precision.recovery=bf16",
        "precision.outlier_threshold=6.0",
        "training.device=cuda",
    ]
    told = str(plan_run(tiny(*WORDS, *words)))
    assert told.startswith("for cuda (none here), paths: llm_int8, int_mm, columns from 6 in 16 bits / bf16\n")
    with pytest.raises(UserError, match=r"164 outputs, and torch._int_mm needs a multiple of 8 on GPUs"):
        plan_run(tiny(*WORDS, *words, "precision.backend=int_mm", "model.intermediate_size=164"))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("optim.name=scale", "optim.options.head=None: no matrix of the model lies below a module lm_head"),
        ("training.seq_len=80", "training.seq_len=80: the checkpoint was made for 64 tokens at the most"),
        ("controller.observe=parameters", "controller.observe=parameters: all converted weights are frozen"),
        ("optim.transform.name=nope", "optim.transform.name=nope: must be null or one of"),
    ],
)
def test_a_plan_refuses_what_the_run_refuses(tiny, lora, more: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        plan_run(tiny(*lora, more))


@pytest.fixture
def llama_13b(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.slow
def test_the_paper_s_model_is_planned_without_its_weights(llama_13b: Path) -> None:
    words = [
        "experiment=finetune",
        f"model.checkpoint={llama_13b}",
        "scale=finetune_13b",
        *PLAIN,
    ]
    planned = plan_run(compose(words))
    assert rows(planned)["frozen weights"] == 13_015_864_320 * 2
    # Rank 8 around seven projections: 8 x (inputs + outputs) numbers each, in FP32, and Adam's two moments.
    numbers = 40 * 8 * (4 * (5120 + 5120) + 3 * (5120 + 13824))
    assert rows(planned)["trained weights"] == numbers * 4
    assert rows(planned)["optimizer"] == pytest.approx(2 * numbers * 4, rel=1e-4)
    assert 26 * GB < planned.total < 80 * GB
    assert "one device of 80 GB (A100, H100), or each of several, for nothing is sharded: fits" in str(planned)


def test_a_checkpoint_that_is_not_there_ends_in_one_line() -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        plan_run(compose(["model=pretrained", "model.checkpoint=/nowhere", "scale=finetune_13b", *PLAIN]))
