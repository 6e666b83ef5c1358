"""The step: what it computes, when it reads the norms, and that it waits for the device once."""

from __future__ import annotations

import itertools

import pytest
import torch
from everything import Waits, same_bits

from gnmr.control import device
from gnmr.lab.config import controller
from gnmr.lab.train.build import train_step
from gnmr.lab.train.loss import evaluate, loss_of
from gnmr.lab.train.step import TrainStep
from gnmr.records.reader import read_json, read_jsonl, read_units

LR = 1e-3


def gradients_at_step(parts) -> list[dict[str, torch.Tensor]]:
    """Fills with the gradients that each optimizer step is given."""
    seen: list[dict[str, torch.Tensor]] = []

    def hook(*_) -> None:
        seen.append({name: p.grad.clone() for name, p in parts.model.named_parameters()})

    parts.optimizer.register_step_pre_hook(hook)
    return seen


def total_norm(gradients) -> float:
    return float(torch.cat([g.double().flatten() for g in gradients]).norm())


def test_accumulated_micro_batches_are_one_batch(assembled, blocks_of, step_of):
    words = ["training.dtype=float32", "precision.low=bf16", "precision.recovery=null"]
    one, many = assembled(*words), assembled(*words)
    block = blocks_of(one, 8)
    whole = step_of(one)([block], LR)
    pieces = step_of(many)(list(block.split(2)), LR)
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)
    assert pieces.grad_norm_pre_clip == pytest.approx(whole.grad_norm_pre_clip, rel=1e-5)
    assert pieces.decision.norm == pytest.approx(whole.decision.norm, rel=1e-4)
    for p, q in zip(one.model.parameters(), many.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=LR / 10)  # Adam's first step is lr times the sign
    assert pieces.saved_bytes * 4 == whole.saved_bytes  # of one micro-batch


def test_norms_are_those_of_the_whole_gradient(assembled, blocks_of, step_of):
    parts = assembled()
    seen = gradients_at_step(parts)
    result = step_of(parts)(list(blocks_of(parts, 4).split(2)), LR)
    (gradients,) = seen
    expected = [float(gradients[f"{name}.weight"].double().norm()) for name in result.decision.units]
    assert result.decision.norm == pytest.approx(expected, rel=1e-5)
    assert result.grad_norm_pre_clip == pytest.approx(total_norm(gradients.values()), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_read_before_clipping(dtype, assembled, blocks_of, step_of):
    words = [f"training.dtype={dtype}"]
    free, loose, tight = (assembled(*words, *clip) for clip in ([], ["optim.clip_norm=1e6"], ["optim.clip_norm=0.01"]))
    grads = [gradients_at_step(parts) for parts in (free, loose, tight)]
    results = [step_of(parts)([blocks_of(parts, 2)], LR) for parts in (free, loose, tight)]
    assert len({result.grad_norm_pre_clip for result in results}) == 1
    assert results[0].grad_norm_pre_clip > 0.01
    for result in results:
        assert (result.decision.norm == results[0].decision.norm).all()
    assert all(same_bits(grads[0][0][name], grads[1][0][name]) for name in grads[0][0])
    assert total_norm(grads[2][0].values()) == pytest.approx(0.01, rel=1e-2)


def test_modules_outside_of_the_units_are_watched(assembled, blocks_of, train, tmp_path):
    """The norm over all parameters of each, and nothing of the run changes by it."""
    words = ["model.name=gpt", "records.monitor=[norm,embed_tokens,input_layernorm]", "training.steps=2"]
    parts = assembled(*words)
    seen = gradients_at_step(parts)
    result = train_step(parts)([blocks_of(parts, 2)], LR)
    (gradients,) = seen
    names = ["embed_tokens", "layers.0.input_layernorm", "norm"]
    expected = {
        name: total_norm(value for key, value in gradients.items() if key.rpartition(".")[0] == name) for name in names
    }
    assert result.monitored == {name: pytest.approx(norm, rel=1e-5) for name, norm in expected.items()}
    watched, plain = (read_jsonl(train(tmp_path / w[1], *w) / "steps.jsonl") for w in (words, words[::2]))
    assert [row["loss"] for row in watched] == [row["loss"] for row in plain]
    assert all(set(row["monitored"]) == set(names) for row in watched) and not any(row["monitored"] for row in plain)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["controller.warmup_frac=0.4", "controller.t_lock=2"],
        [
            "controller.alpha_init=1.3",
            "training.accumulation=2",
        ],
    ],
    ids=["plain", "warm_up", "two_stages"],
)
def test_the_set_of_a_step_is_in_force_in_the_next(words, train, tmp_path, monkeypatch):
    """Recorded sets against the paths that the operators really were on, which a switch alone may change."""
    real: list[set[str]] = []
    chosen: list[set[str]] = [set()]
    plain = TrainStep.__call__

    def call(self, *args):
        real.append({operator.operator_name for operator in self.router.converted.operators if operator.recovering})
        result = plain(self, *args)
        chosen.append(set(result.decision.by_risk(result.decision.active)))
        return result

    monkeypatch.setattr(TrainStep, "__call__", call)
    monkeypatch.setattr(controller, "INIT_FRAC", 0.5)
    folder = train(tmp_path / "run", "training.checkpoint_every=100", *words)
    rows, events = read_jsonl(folder / "steps.jsonl"), read_jsonl(folder / "events.jsonl")
    active = [set() for _ in rows]
    for row in read_units(folder).to_pylist():
        if row["active"]:
            active[row["step"] - 1].add(row["unit"])
    assert active == real
    assert [row["num_active"] for row in rows] == [len(units) for units in real]
    warmup = round(8 * 0.4) if "controller.warmup_frac=0.4" in words else 0
    if warmup:
        assert [len(units) for units in real[:warmup]] == [7] * warmup
        chosen[0] = real[0]
    assert real == chosen[:-1]
    assert any(units for units in real) and all(len(units) <= 2 for units in real[warmup:])

    told: set[str] = set()
    for step, units in enumerate(real, start=1):
        for event in events:
            if event["step"] == step - 1:
                (told.add if event["event"] == "promote" else told.remove)(event["unit"])
        assert told == units, step


@pytest.mark.parametrize(
    "words", [[], ["optim.clip_norm=0.1", "training.accumulation=2", "precision.rounding=stochastic"]]
)
def test_a_step_waits_once(words, assembled, blocks_of, step_of, monkeypatch):
    monkeypatch.setattr(device, "waits_for_nothing", lambda x: False)  # as on a GPU
    parts = assembled(*words)
    step = step_of(parts)
    batches = list(blocks_of(parts, 4).split(2))
    step(batches, LR)
    with Waits() as waits:
        step(batches, LR)
    # What follows the one transfer reads the host's copy.
    assert waits.seen[0] == "cpu" and waits.seen.count("cpu") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_synchronises_once_on_cuda(assembled, blocks_of, step_of, recwarn):
    parts = assembled("training.device=cuda")
    step = step_of(parts)
    batches = [block.to("cuda") for block in blocks_of(parts, 4).split(2)]
    for _ in range(2):
        step(batches, LR)
    recwarn.clear()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        step(batches, LR)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in recwarn if "called a synchronizing" in str(w.message)]) == 1


@pytest.mark.parametrize("site", ["saved", "forward"])
def test_evaluation_is_on_the_16_bit_path_and_leaves_no_trace(site, assembled, blocks_of, step_of):
    words = ["precision.low=int2", f"precision.site={site}", "precision.rounding=stochastic"]
    coarse, plain = assembled(*words), assembled("precision.low=bf16", "precision.recovery=null")
    blocks = blocks_of(coarse, 5)
    generator = coarse.converted.state_dict()["rounding"]
    with torch.no_grad():
        expected = sum(float(loss_of(plain.model, part)) * len(part) for part in blocks.split(2)) / 5
    assert evaluate(coarse.model, coarse.converted, blocks, 2) == pytest.approx(expected, rel=1e-12)
    assert same_bits(generator, coarse.converted.state_dict()["rounding"])
    assert coarse.model.training and not coarse.converted.shared.high_precision
    differs = step_of(coarse)([blocks], LR).loss != step_of(plain)([blocks], LR).loss
    assert differs == (site == "forward")


def test_recorded_bytes_are_those_of_the_graph_in_the_largest_micro_batch(train, tampered, tmp_path):
    """Not the prediction, which is the same number as long as it is right, and not those of one micro-batch."""

    def change(parts) -> None:
        measured, predicted = itertools.cycle([50, 90, 70]), itertools.cycle([3, 1, 2])
        cost = parts.converted.cost
        cost.of_pass = lambda: (next(measured), next(predicted), cost.spent())

    tampered(change)
    folder = train(tmp_path / "run", "training.accumulation=3", "training.steps=2")
    rows = read_jsonl(folder / "steps.jsonl")
    assert [(row["saved_bytes"], row["saved_bytes_predicted"]) for row in rows] == [(90, 3)] * 2
    assert read_json(folder / "summary.json")["saved_bytes_mean"] == 90


@pytest.mark.slow
def test_what_was_spent_is_recorded(train, tmp_path):
    """Everything from step 2 on, by GEMM, and never more than the budget."""
    words = ["precision.low=sim_e2m1", "precision.recovery=bf16", "precision.unit=gemm", "training.steps=4"]
    always = train(tmp_path / "always", *words, "controller.signal=always_high", "controller.max_o=21")
    share = sum(read_json(always / "header.json")["spend"])  # the rest is the output head
    time = (4 - 1) * share / (share + 4 * (1 - share))
    assert 0.3 < share < 1
    rows, summary = read_jsonl(always / "steps.jsonl"), read_json(always / "summary.json")
    for key, each in (("spent_gemm_frac", share), ("spent_extra_time", time)):
        assert [row[key] for row in rows] == pytest.approx([0, each, each, each])
        assert summary[key] == pytest.approx(0.75 * each)
    gap = [
        "controller.signal=recovery_gap",
        "controller.routing=ranked",
        "controller.budget=10%",
        "controller.max_o=null",
    ]
    folder = train(tmp_path / "gap", *words, *gap)
    spent = [row["spent_gemm_frac"] for row in read_jsonl(folder / "steps.jsonl")]
    assert spent[0] == 0 and all(0.05 < share <= 0.1 for share in spent[1:])
    header = read_json(folder / "header.json")
    assert sum(header["spend"]) == pytest.approx(share) and header["spend_pinned"] == 0
