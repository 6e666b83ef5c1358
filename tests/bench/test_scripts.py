"""benchmarks/ as far as a CPU can run it in seconds: tiny models, few steps."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from gnmr.lab.config.compose import compose
from gnmr.precision.cast import quantize
from gnmr.precision.recipes import Cast

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)

sys.path.insert(0, str(BENCHMARKS))
divergence, price, spend, step, timing = map(import_module, ("divergence", "price", "spend", "step", "timing"))


# ---- arms that take turns ----


def test_the_order_turns_and_rounds_below_0_are_not_kept() -> None:
    now, log = [0.0], []

    def work(name: str, seconds: float) -> None:
        log.append(name)
        now[0] += seconds

    arms = {name: lambda name=name, s=s: work(name, s) for name, s in (("a", 2.0), ("b", 3.0), ("c", 5.0))}
    found = timing.alternate(arms, range(-1, 3), lambda: now[0])
    assert "".join(log) == "cababcbcacab"
    assert {name: values.tolist() for name, values in found.items()} == {"a": [2.0] * 3, "b": [3.0] * 3, "c": [5.0] * 3}


def test_the_interval_of_a_median_narrows_with_n() -> None:
    draws = np.random.default_rng(0).normal(1.0, 0.1, 1000)
    few, many = (timing.spread(draws[:n]) for n in (20, 1000))
    assert few["low"] <= few["median"] <= few["high"] and abs(many["median"] - 1.0) < 0.02
    assert many["high"] - many["low"] < 0.5 * (few["high"] - few["low"])


def test_the_cpu_clock_is_for_the_cpu_alone() -> None:
    with pytest.raises(ValueError, match="clock"):
        timing.clock_of(torch.device("cuda"), "cpu")


@pytest.mark.slow
def test_steps(tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*words: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["step.py", str(tmp_path / "out.json"), *tiny_words, "--rounds", "1", *words])
        step.main()
        found: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["rows"]
        return found

    assert [row["arm"] for row in rows("--only", "controller")] == ["no controller", "monitoring", *step.SIGNALS]
    found = rows("--only", "paths", "--arms", "^(bf16|int4|int8|deepseek_v3)$", "--clock", "cpu")
    saved = {row["arm"]: row for row in found if "saved_bytes" in row}
    assert all(row["saved_bytes"] == row["saved_bytes_predicted"] for row in saved.values())
    assert 0.25 < saved["int4"]["saved_bytes"] / saved["bf16"]["saved_bytes"] < 0.4
    assert [row["arm"] for row in found if "refused" in row] == ["deepseek_v3"]  # tiles of 128
    assert [row["arm"] for row in found if "ratio" in row] == ["bf16", "int4", "int8"]


def test_arms_under_torch_compile_compose() -> None:
    for arm, words in step.PARTS["compiled"].items():
        assert compose([*words]).training.compile == ("compiled" in arm)


# ---- divergence ----


def outcome(errors: list[float]) -> Any:
    kept = list[float]()
    for error in errors:
        kept.append(error)
        if divergence.lost(kept):
            break
    return divergence.outcome(kept, 40)


def test_diverged_is_what_rose_and_did_not_come_back() -> None:
    assert not outcome([40.0 - i for i in range(40)])["diverged"]
    assert outcome([1.0] * 36 + [3.1] * 4)["diverged"]
    assert not outcome([1.0] * 36 + [2.9] * 4)["diverged"]
    assert not outcome([1.0] * 10 + [500.0] * 20 + [2.0] * 10)["diverged"]
    lost = outcome([1.0] * 8 + [math.inf] * 32)
    assert lost["diverged"] and lost["steps"] == 18 and lost["not_finite"] == 9
    back = outcome([1.0] * 8 + [math.inf] * 9 + [1.0] * 23)
    assert not back["diverged"] and back["steps"] == 40


def test_the_norm_is_cast_as_its_reader_reads_and_recovers_with_it() -> None:
    student = divergence.Student(32, 1)
    norm, up = student.layers[0].norm, student.layers[0].up_proj
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.0)
        norm.bias.uniform_(-0.1, 0.1)
    x = torch.randn(4, 32)
    plain = norm(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setting = divergence.Setting("mxint2", 0.1)
        controller = divergence.attached(student, setting, divergence.ranked("random", 0.5), 0)
    cast = Cast.of("int2/mx")
    assert cast is not None
    gain, bias = (quantize(p.detach()[None], cast, 1)[0][0] for p in (norm.weight, norm.bias))
    wanted = torch.nn.functional.layer_norm(x, (32,), gain, bias)
    assert not torch.allclose(plain, wanted, atol=0.05)
    torch.testing.assert_close(norm(x), wanted)
    up.switch(True)
    torch.testing.assert_close(norm(x), plain)
    controller.detach()


def test_every_arm_trains_and_spends_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "BATCH", 8)
    setting = divergence.Setting("mxint2", 0.05, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = {name: divergence.trained(setting, arm, 0) for name, arm in divergence.ARMS.items()}
    spent = {name: run["spent"] for name, run in runs.items()}
    assert all(run["steps"] == 2 and run["not_finite"] is None for run in runs.values())
    assert spent["never"] == spent["layer norm's parameters"] == spent["SkipStep"] == 0
    assert spent["always"] == 1 and spent["fprop"] == pytest.approx(1 / 3, abs=1e-3)
    assert spent["first two blocks"] == 0.5 and spent["fprop from the half on"] == pytest.approx(1 / 6, abs=1e-3)
    for name in ("GNMR", "price", "random"):  # chosen from the second step on
        assert spent[f"{name}, 4 of 8 operators"] == 0.25
        assert spent[f"{name}, fprop of 6"] == 0.125


# ---- prices against single KLs ----


def test_prices_against_single_kls(
    train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "a", "training.steps=20", "training.dtype=float32", "model.num_layers=2")
    words = ["price.py", str(tmp_path / "out.json"), "--models", str(run), "--low", "sim_e2m1,nvfp4", "--table"]
    words += ["--batches", "4", "--held-out", "4", "--size", "4", "--block", "16", "--operators", "13"]
    monkeypatch.setattr(sys, "argv", words)
    price.main()
    said, record = capsys.readouterr().out, (tmp_path / "out.json").read_text()
    assert said.count("| a | nvfp4 |") == 3 and "of 2" in said
    first, _ = json.loads(record)["cells"]
    assert (first["operators"], first["measured"]) == (14, 13)
    ranks, sums = first["spearman"], first["sum"]
    assert ranks["drawn, by token"] > 0.9 and 0.8 < sums["drawn, by token"] < 1.2
    assert ranks["drawn, by sequence"] > 0.8 and 0.6 < sums["drawn, by sequence"] < 1.6
    apart = first["all_low"]["kl"] - first["single_kls"] - first["interaction"]
    assert 0 < apart < first["single_kls"] / 13  # the one that was not measured
    assert len(first["of_operators"]["kl"]) == len(first["of_operators"]["mse"]) == 13

    price.main()  # has all of it already
    assert (tmp_path / "out.json").read_text() == record
    monkeypatch.setattr(sys, "argv", [*words, "--draws", "3"])
    with pytest.raises(SystemExit):
        price.main()

    monkeypatch.setattr(sys, "argv", [words[0], str(tmp_path / "whole.json"), *words[2:-1], "0"])
    price.main()
    found = json.loads((tmp_path / "whole.json").read_text())["cells"][0]
    assert found["all_low"] == pytest.approx(first["all_low"]) and "| sim_e2m1 | 0." in capsys.readouterr().out

    subject = price.load_subject(str(run), "cpu")
    subject.model.eval()
    blocks = price.blocks_of(subject, None, batches=2, held_out=1, length=16, size=2)
    cell = price.Measurement(subject.model, "sim_e2m1")
    resumed = cell.truth(blocks.batches, [3, 9])
    monkeypatch.setattr(price, "_resumed", lambda *_: nullcontext())
    assert np.array_equal(resumed, cell.truth(blocks.batches, [3, 9])) and resumed[0].min() > 0


# ---- forks of the shipped base ----


@pytest.mark.slow
def test_forks_are_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out, made = tmp_path / "forks.jsonl", list[str]()

    def run(cell: Any, scene: Any, base: Any) -> dict[str, Any]:
        made.append(cell.arm)
        spend.config_of(cell, scene, base)
        loss = {"never": 3.0, "always": 2.0}.get(cell.arm, 2.5) + cell.order / 100
        return {**spend.asdict(cell), "loss": loss, "spent": cell.budget}

    monkeypatch.setattr(spend, "run", run)
    monkeypatch.setattr(sys, "argv", ["spend.py", str(out), "quick", "--orders", "2"])
    spend.main()
    assert len(made) == 2 * 7 and made[:4] == ["never", "always"] * 2
    out.write_text(out.read_text()[:-20])  # killed while it wrote
    spend.main()
    assert len(made) == 2 * 7 + 1 and len(out.read_text().splitlines()) == 2 * 7
    assert "recovered" in capsys.readouterr().out


def test_recovered_fractions_by_hand() -> None:
    losses = {"never": (3.0, 3.2), "always": (2.0, 2.2), "price": (2.5, 2.45)}
    rows = [
        {"base": "a", "arm": arm, "budget": 0.1, "order": order, "loss": loss, "spent": 0.1}
        for arm, both in losses.items()
        for order, loss in enumerate(both)
    ]
    found: pd.DataFrame = spend.table(rows)
    assert (
        found.loc[("price", 0.1), "recovered"] == pytest.approx(0.625) and found.loc[("never", 0.1), "recovered"] == 0
    )
