"""benchmarks/ as far as a CPU can run it in seconds: tiny models, few steps."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from gnmr.formats.cast import quantize
from gnmr.formats.recipes import Cast
from gnmr.lab.config.compose import compose, composed_tree, load_composed
from gnmr.lab.data.batch import Batch
from gnmr.lab.data.sequences import validation_sequences

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)

sys.path[:0] = [str(BENCHMARKS), str(Path(__file__).parents[1] / "doctor")]
divergence, gpu, growth, plans, price, step, tables, timing = map(
    import_module, ("divergence", "gpu", "growth", "plans", "price", "step", "tables", "timing")
)
Forks = plans.Forks


Call = Callable[..., None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """call(script, *words) runs the script with these words."""

    def run(script: Any, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
        script.main()

    return run


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
def test_steps(tiny_words: list[str], tmp_path: Path, call: Call) -> None:
    def rows(*words: str) -> list[dict[str, Any]]:
        call(step, tmp_path / "out.json", *tiny_words, "--rounds", "1", *words)
        found: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["rows"]
        return found

    shares = {row["arm"]: row["share"]["median"] for row in rows("--only", "share") if "share" in row}
    assert shares.keys() == {"norms", "decision", "records", "all", "all but norms"} and min(shares.values()) > 0
    assert [row["arm"] for row in rows("--only", "controller")] == ["no controller", "monitoring", *step.SIGNALS]
    found = rows("--only", "paths", "--arms", "^(bf16|int4|int8|deepseek_v3)$", "--clock", "cpu")
    saved = {row["arm"]: row for row in found if "saved_bytes" in row}
    assert all(row["saved_bytes"] == row["saved_bytes_predicted"] for row in saved.values())
    assert 0.25 < saved["int4"]["saved_bytes"] / saved["bf16"]["saved_bytes"] < 0.4
    assert [row["arm"] for row in found if "ratio" in row] == ["bf16", "int4", "int8", "deepseek_v3"]
    pytest.importorskip("torchao.float8")
    timed = [row for row in rows("--only", "linear", "--only", "casts", "--size", "64", "32", "32") if "seconds" in row]
    arms = [row["arm"] for row in timed if row["part"] == "linear"]
    theirs = {"fp8_hybrid, torchao", "mxfp8, torchao"}
    assert set(arms) == {"BF16", "FP32", *(f"{recipe}, ours" for recipe in step.PEERED), *theirs}
    assert {row["arm"]: row["equal in BF16"] for row in timed if row["arm"].endswith("/mx, torchao")} == {
        "e4m3/mx, torchao": 1.0,
        "e2m1/mx, torchao": 1.0,
    }


@pytest.mark.slow
def test_parts_of_growth() -> None:
    seconds = {row["part"]: row["seconds"] for row in growth.grown(4)}
    assert min(seconds.values()) >= 0 and {"diagnose, 2 batches", "controller.step(), recording"} < seconds.keys()


@pytest.mark.parametrize("arm", step.PARTS["compiled"])
def test_arms_under_torch_compile_compose(arm: str) -> None:
    assert compose([*step.PARTS["compiled"][arm]]).training.compile == ("compiled" in arm)


# ---- a GPU against the CPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_bits_of_the_cpu() -> None:
    rows = gpu.correctness(torch.device("cuda"))
    assert not [row for row in rows if row.get("below") or "failed" in row]


@pytest.mark.slow
def test_the_check_of_a_gpu_finds_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, cpu = {"quantize": 0, "compress": 0}, torch.device("cpu")
    monkeypatch.setattr(gpu, "RECIPES", {name: gpu.RECIPES[name] for name in ("fp8_hybrid", "mxfp4", "nvfp4")})

    def damaged(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            calls[name] += 1
            first, *others = work(*given)
            if calls[name] % 2 == 0:  # what the device returns
                first[5, 5] += 1
            return first, *others

        return run

    rows = {row["arm"]: row for row in gpu.correctness(cpu) if "compared" in row}
    assert not any(row["below"] for row in rows.values()) and rows["fp8_hybrid GEMMs"]["smallest"] < 100
    for name in calls:
        monkeypatch.setattr(gpu, name, damaged(name, getattr(gpu, name)))
    monkeypatch.setattr(gpu, "sqnr", lambda found, true: -gpu.DECIBELS)
    rows = {row["arm"]: row for row in gpu.correctness(cpu)}
    for arm in ("casts, bfloat16", "casts, float32", "saved formats, float32", "fp8_hybrid GEMMs"):
        assert len(rows[arm]["below"]) == rows[arm]["compared"] > 0 and "DIFFERS" in gpu.figure(rows[arm])
    assert "e4m3/mx" in rows["mxfp8 GEMMs"]["refused"] and rows["llm_int8 GEMMs"]["below"] == {}


def test_a_part_that_hangs_or_crashes_is_a_row(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(limit for limit, _ in gpu.PARTS.values()) <= 600
    quick = "import json, sys; json.dump({'rows': [{'arm': 'a', 'refused': 'no'}]}, open(sys.argv[1], 'w'))"
    parts = {"speed": (60, "-c", quick.replace("{", "{{").replace("}", "}}"), "{out}")}
    parts |= {"compiled": (0.5, "-c", "import time; time.sleep(100)"), "train": (60, "-c", "raise SystemExit('bad')")}
    monkeypatch.setattr(gpu, "PARTS", {name: (limit, words) for name, (limit, *words) in parts.items()})
    with pytest.raises(SystemExit):
        call(gpu, tmp_path / "out.json", "--device", "cpu")
    found = json.loads((tmp_path / "out.json").read_text())
    says = {row["part"]: row.get("failed") for row in found["rows"]}
    assert says == {"speed": None, "compiled": "longer than 0.5 s: ", "train": "1: bad"} and found["commit"]


@pytest.mark.slow
@pytest.mark.fp8
def test_parts_of_gpu(tiny_words: list[str], tmp_path: Path, call: Call) -> None:
    only = [word for part in ("speed", "controller", "train") for word in ("--only", part)]
    call(gpu, tmp_path / "out.json", "--device", "cpu", *only, *tiny_words, "training.steps=3")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    timed = [(row["part"], row["arm"]) for row in rows if "ratio" in row]
    assert timed[-3:] == [("controller", arm) for arm in ("no controller", "monitoring", "gnmr_delta")]
    assert ("speed", "int4") in timed and ("speed", "fp8_hybrid, scaled_mm") in timed
    assert rows[-1]["steps"] == 3 and all(gpu.figure(row) for row in rows)


@pytest.mark.slow
def test_the_ways_to_diagnose_take_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape = gpu.any_size.SHAPES[gpu.DIAGNOSED] | small | {"num_key_value_heads": 2, "vocab_size": 1000}
    monkeypatch.setitem(gpu.any_size.SHAPES, gpu.DIAGNOSED, shape)
    rows = {row["arm"]: row for row in gpu.diagnosed(torch.device("cpu"))}
    counted = {arm: row["operators"] for arm, row in rows.items()}
    assert counted == {"estimate": 14, "measured": 14, "brute force": gpu.BRUTE_FORCE}
    assert all(row["wall_s"] > 0 and "operators in" in gpu.figure(row) for row in rows.values())


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


TRAINED_ALONE = ["dgrad, wgrad", "first block", "last block", "last two blocks", "GNMR, thresholds", "clip 1"]
TRAINED_ALONE += ["fprop from a tenth on", "fprop from a quarter on", "GradientStabilizer"]


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_every_arm_trains_and_spends_what_it_says(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "BATCH", 8)
    setting = divergence.Setting("mxint2", 0.05, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arms = {name: arm for name, arm in divergence.ARMS.items() if (name in TRAINED_ALONE) == alone}
        runs = {name: divergence.trained(setting, arm, 0) for name, arm in arms.items()}
    spent = {name: run["spent"] for name, run in runs.items()}
    assert all(run["steps"] == 2 and run["not_finite"] is None for run in runs.values())
    if alone:
        return
    assert spent["never"] == spent["layer norm's parameters"] == spent["SkipStep"] == 0
    assert spent["always"] == 1 and spent["fprop"] == pytest.approx(1 / 3, abs=1e-3)
    assert spent["first two blocks"] == 0.5 and spent["fprop from the half on"] == pytest.approx(1 / 6, abs=1e-3)
    for name in ("GNMR", "price", "random"):  # chosen from the second step on
        assert spent[f"{name}, 4 of 8 operators"] == 0.25
        assert spent[f"{name}, fprop of 6"] == 0.125


# ---- prices against single KLs ----


@pytest.mark.slow
def test_prices_against_single_kls(
    train: Callable[..., Path],
    tmp_path: Path,
    call: Call,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(price, "TOP", 3)
    run = train(tmp_path / "a", "training.steps=20", "training.dtype=float32", "model.num_layers=2")
    words = ["--models", run, "--batches", "4", "--held-out", "4", "--size", "4", "--block", "16", "--table"]
    singly = [tmp_path / "out.json", *words, "--low", "sim_e2m1,nvfp4", "--operators", "9"]
    call(price, *singly)
    said, record = capsys.readouterr().out, (tmp_path / "out.json").read_text()
    assert said.count("| a | nvfp4 |") == 3 and "of 2" in said
    first, _ = json.loads(record)["cells"]
    assert (first["operators"], first["unchosen"]) == (14, 9) and 9 <= first["measured"] < 14
    ranks, sums = first["spearman"], first["sum"]
    for name, (low, high) in first["spearman_interval"].items():
        assert low <= ranks[name] <= high
    assert first["halves"]["spearman"] > 0.8
    assert ranks["drawn, by token"] > 0.9 and 0.8 < sums["drawn, by token"] < 1.2
    assert ranks["drawn, by sequence"] > 0.8 and 0.6 < sums["drawn, by sequence"] < 1.6
    apart = first["all_low"]["kl"] - first["single_kls"] - first["interaction"]
    assert 0 < apart < first["single_kls"]  # those that were not measured
    assert len(first["of_operators"]["kl"]) == len(first["of_operators"]["mse"]) == first["measured"]

    call(price, *singly)  # has all of it already
    assert (tmp_path / "out.json").read_text() == record
    with pytest.raises(SystemExit):
        call(price, *singly, "--draws", "3")

    call(price, tmp_path / "whole.json", *words, "--low", "sim_e2m1", "--operators", "0")
    found = json.loads((tmp_path / "whole.json").read_text())["cells"][0]
    assert found["all_low"] == pytest.approx(first["all_low"]) and "| sim_e2m1 | 0." in capsys.readouterr().out


def test_operators_of_a_rank_correlation_are_chosen_by_no_score() -> None:
    """The highest of a score agree with it by choice, so they are measured beside the operators that are compared."""
    names = [f"layers.{i // 7}.{'abcdefg'[i % 7]}" for i in range(210)]
    draws = np.random.default_rng(0).random((len(price.NATS), 210))
    estimates = dict(zip(price.NATS, draws, strict=True))
    measured, spread = price.sample(names, estimates, 48)
    assert len(spread) == 48 and {*spread} < {*measured}
    assert all({*np.argsort(-values)[:12].tolist()} <= {*measured} for values in estimates.values())
    other, same = price.sample(names, {name: -values for name, values in estimates.items()}, 48)
    assert same == spread and other != measured
    assert {names[i].rpartition(".")[2] for i in spread} == {*"abcdefg"}
    assert price.sample(names, estimates, 300) == ([*range(210)], [*range(210)])


def test_the_interval_of_a_rank_correlation_covers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of normal numbers with the correlation 0.8, whose rank correlation is 6 / pi asin(0.4)."""
    monkeypatch.setattr(price, "SAMPLES", 200)
    draws, true = np.random.default_rng(0).normal(size=(200, 2, 60)), 6 / math.pi * math.asin(0.4)
    found = [price.rank_interval(x, 0.8 * x + 0.6 * y) for x, y in draws]
    held = np.mean([one["low"] <= true <= one["high"] for one in found])
    assert 0.88 < held < 0.99  # percentiles of a bootstrap hold a little less than they say


# ---- what plans buy ----

SCORED = ("mse", "gradient norm", "elements")


def rows_of(losses: dict[str, list[float]], low: str = "nvfp4", **more: Any) -> list[dict[str, Any]]:
    """Rows of forks: the losses of every arm, by order."""
    return [
        {"base": "a", "low": low, "arm": arm, "budget": 0.1, "order": order, "loss": loss, "extra": 0.1, **more}
        for arm, all_orders in losses.items()
        for order, loss in enumerate(all_orders)
    ]


LOSSES = {"never": [3.0, 3.2, 3.1, 3.3], "always": [2.0, 2.2, 2.1, 2.3], "plan": [2.1, 2.4, 2.1]}
LOSSES |= {"mxfp8": LOSSES["plan"], "bf16": [2.5, 2.6, 2.7, 2.8]}


@pytest.mark.parametrize("arm", plans.ARMS)
def test_every_arm_fills_the_budget_with_its_recipes(arm: str) -> None:
    from plausible import diagnosis

    found = diagnosis(6)
    found = replace(found, scores=found.scores | {"elements": dict.fromkeys(found.operators, 1.0)})
    areas = {name: a * b for name, (a, b) in found.operators.items()}
    time = {"mxfp8": 2, "bf16": 4}
    for budget in (0.15, 0.3):
        choice = plans.pins_of(plans.Cell("a", "nvfp4", arm, budget, 0), found)
        assert {gemm for own in choice.pins.values() for gemm in own} == {"fprop"}
        used = {recipe for own in choice.pins.values() for recipe in own.values()}
        assert used - ({"bf16"} if arm == "plan" else set()) == ({"bf16"} if "bf16" in arm else {"mxfp8"})
        more = sum(areas[name] * (time[own["fprop"]] - 1) for name, own in choice.pins.items())
        assert choice.extra == pytest.approx(more / sum(areas.values())) and choice.extra <= budget
        next_one = min(area for name, area in areas.items() if name not in choice.pins)
        assert budget - choice.extra < (3 if "bf16" in arm else 1) * next_one / sum(areas.values())
        assert plans.pins_of(plans.Cell("a", "nvfp4", "plan", budget, 0), found).after <= choice.after
    draws = [list(plans.pins_of(plans.Cell("a", "nvfp4", arm, 0.3, 0, draw), found).pins) for draw in (0, 1)]
    assert (draws[0] != draws[1]) == (arm == "random")


def test_each_score_chooses_by_its_own_numbers() -> None:
    from plausible import diagnosis

    found = diagnosis(6)
    last = [*found.operators][-1]
    high = {name: 1.0 + 99.0 * (name == last) for name in found.operators}
    for arm, name in (("by element", "elements"), ("gradient norm", "gradient norm"), ("MSE", "mse")):
        other = replace(found, scores={key: dict.fromkeys(high, 1.0) for key in ("mse", "gradient norm", "elements")})
        other = replace(other, scores=other.scores | {name: high})
        area = math.prod(found.operators[last]) / sum(math.prod(shape) for shape in found.operators.values())
        assert [*plans.pins_of(plans.Cell("a", "nvfp4", arm, area * 1.001, 0), other).pins] == [last]


def test_a_plan_by_estimates_takes_those_by_token_where_there_are_none_by_sequence() -> None:
    from plausible import diagnosis

    priced = diagnosis(6)
    last = [*priced.operators][-1]
    rows = [row if row.operator != last else replace(row, by_sequence=None, by_token=1e3) for row in priced.rows]
    cell = plans.Cell("a", "nvfp4", "price, estimated", 0.1, 0)
    assert last in plans.pins_of(cell, replace(priced, rows=tuple(rows))).pins


def test_the_fraction_closed_and_its_test_by_hand() -> None:
    """In orders 0 to 2 the plan closes 90%, 80% and 100%, and BF16 50%, 60% and 40%. Order 3 lacks the plan."""
    frame = pd.DataFrame(rows_of(LOSSES))
    plan, mxfp8, bf16 = plans.table(frame)
    assert (plan["n"], plan["checkpoints"], plan["orders"]) == (3, 1, 3)
    assert (plan["saved"], plan["saved_half_width"]) == (pytest.approx(0.9), pytest.approx(0.24841, abs=1e-5))
    # The gap is 1 in every order, so that Fieller's interval is that of the numerator.
    assert plan["closed"] == pytest.approx(0.9) and plan["closed_high"] - 0.9 == pytest.approx(0.24841, abs=1e-5)
    assert "p" not in plan and bf16["closed"] == pytest.approx(0.5)
    # Differences 0.4, 0.2, 0.6: t = 0.4 / (0.2 / sqrt 3) = 3.464, of which p = 1 - t / sqrt(t^2 + 2) at two degrees.
    assert (bf16["plan_more"], bf16["p"]) == (pytest.approx(0.4), pytest.approx(1 - math.sqrt(12 / 14)))
    assert bf16["plan_more_nats_half_width"] == pytest.approx(4.30265 * 0.2 / math.sqrt(3), rel=1e-5)
    assert bf16["detectable"] == pytest.approx((4.30265 + 1.06066) * 0.2 / math.sqrt(3), rel=1e-5)
    assert (mxfp8["plan_more"], mxfp8["p"]) == (0.0, 1.0) and "detectable" not in mxfp8  # the same pins
    shown = plans.table(pd.DataFrame(rows_of(LOSSES | {"bf16": [2.5, 2.79, 2.5, 2.8]})))[-1]
    assert shown["p"] < 0.05 and "detectable" not in shown
    few = plans.table(frame[(frame.order != 2) | (frame.arm != "bf16")])  # killed in order 2, which is left out
    assert [(row["arm"], row["n"]) for row in few] == [("plan", 2), ("mxfp8", 2), ("bf16", 2)]
    assert few[0]["closed"] == pytest.approx(0.85)
    more = pd.DataFrame(rows_of(LOSSES | {"last": [2.5]}))  # killed in order 0 of a further arm
    assert plans.table(more) == plans.table(frame)
    wider = frame.assign(loss=frame.loss + (frame.order == 2) * (frame.arm == "never"))  # a gap of 2 where BF16 lacks
    few = plans.table(wider[(wider.order != 2) | (wider.arm != "bf16")])
    assert few[0]["closed"] == pytest.approx(0.85)


def test_the_unit_of_a_table_is_the_checkpoint() -> None:
    """Five orders of two checkpoints are two pairs: the plan saves 0.8 of 1 nat on one, and 1.8 of 2 on the other."""
    orders = [0.0, 0.1, 0.2, 0.3, 0.4]
    rows = []
    for base, never, plan, bf16 in (("a", 3.0, 2.2, 2.6), ("b", 4.0, 2.2, 3.0)):
        losses = {"never": never, "always": 2.0, "plan": plan, "bf16": bf16}
        rows += [row | {"base": base} for row in rows_of({arm: [x + at for at in orders] for arm, x in losses.items()})]
    plan, bf16 = plans.table(pd.DataFrame(rows))
    assert (plan["n"], plan["checkpoints"], plan["orders"]) == (10, 2, 5)
    assert plan["closed"] == pytest.approx(0.85) and plan["closed_high"] - 0.85 == pytest.approx(
        12.7062 * 0.05, rel=1e-4
    )
    # 0.4 and 0.8 nats more than BF16: t = 0.6 / 0.2 = 3 with one degree of freedom, where t has Cauchy's distribution.
    assert bf16["plan_more_nats"] == pytest.approx(0.6) and bf16["p"] == pytest.approx(1 - 2 * math.atan(3) / math.pi)
    assert bf16["plan_more_nats_half_width"] == pytest.approx(12.7062 * 0.2, rel=1e-4)
    one_base = [row for row in rows if row["base"] == "a"]
    assert plans.table(pd.DataFrame(one_base))[1]["p"] < 1e-6  # of its orders, which are all alike
    one_fork = [row for row in one_base if row["order"] == 0]
    assert not {"p", "p_adjusted", "detectable"} & {*plans.table(pd.DataFrame(one_fork))[1]}  # nothing to test


def test_a_low_path_whose_gap_is_not_shown_has_no_rows() -> None:
    """Gaps of 1, 0 and 1.1 nats are 0.7 ± 1.51. The other arms ran in order 0 alone, and another low path is there."""
    begun = rows_of({"never": [3.0, 3.0, 3.0], "always": [2.0, 3.0, 1.9], "plan": [2.1], "bf16": [2.5]}, low="mxfp4")
    whole = rows_of(LOSSES)
    assert plans.table(pd.DataFrame([*begun, *whole])) == plans.table(pd.DataFrame(whole)) != []
    assert plans.table(pd.DataFrame(begun)) == []
    shown = [row | {"loss": 2.0} if row["arm"] == "always" else row for row in begun]
    assert [row["n"] for row in plans.table(pd.DataFrame(shown))] == [1, 1]
    one_replicate = [row for row in begun if row["order"] == 0]
    assert len(plans.table(pd.DataFrame(one_replicate))) == 2, "which decides nothing"


def test_numbers_of_a_family_are_those_that_all_rows_share(tmp_path: Path) -> None:
    row = {"low": "nvfp4", "arm": "plan", "budget": 0.1, "gap": 0.5, "checkpoints": 6, "p_adjusted": 0.03}
    row |= {"closed": 0.8, "closed_low": 0.7, "closed_high": 0.9}
    other = row | {"budget": 0.3, "gap": 0.25}
    record = tmp_path / "table.json"
    record.write_text(json.dumps({"rows": [row, other]}))
    texts = tables.numbers_of_plans("a", record)
    assert "a_nvfp4/gap" not in texts and texts["a_nvfp4/checkpoints"] == "6"
    assert (texts["a_nvfp4/plan at 10%/gap"], texts["a_nvfp4/plan at 30%/gap"]) == ("0.5", "0.25")
    assert texts["a_nvfp4/plan at 30%/recovered"] == "80% (70 to 90)"
    record.write_text(json.dumps({"rows": [row, row | {"arm": "last"}]}))
    assert tables.numbers_of_plans("a", record)["a_nvfp4/gap"] == "0.5"


def test_a_ratio_over_noise_has_no_interval() -> None:
    draws = np.random.default_rng(0).normal(size=(2, 2000, 6))
    above, below = pd.DataFrame(1.0 + 0.3 * draws[0].T), pd.DataFrame(2.0 + 0.6 * draws[1].T + 0.3 * draws[0].T)
    limits = [plans.fieller(above[at], below[at])[1:] for at in above]
    held = np.mean([low <= 0.5 <= high for low, high in limits])
    assert abs(held - 0.95) < 0.015  # a standard error of 0.005
    assert plans.fieller(above[0], below[0] - below[0].mean() + 0.1) == (None, None, None)
    noisy = LOSSES | {"always": [2.1, 3.3, 2.3, 3.3]}  # gaps of 0.9, -0.1, 0.8 and 0 nats
    both = [*rows_of(LOSSES), *(row | {"base": "b"} for row in rows_of(noisy))]
    plan, *_ = plans.table(pd.DataFrame(both))
    assert plan["closed"] is None and plan["saved"] == pytest.approx(0.9)


def test_diagnosed_sequences_are_not_validated_on() -> None:
    tokens = np.arange(20_000)
    validated = validation_sequences(tokens, 16, 64).tokens[:, 0].tolist()
    both = validation_sequences(tokens, 16, 128)
    found = plans.unseen(both, 64)
    assert len({*found.tokens[:, 0].tolist()}) == plans.MEASURED and not {*found.tokens[:, 0].tolist()} & {*validated}
    packed = Batch(both.tokens, both.targets, both.tokens % 16)
    documents = plans.unseen(packed, 64)
    assert documents.tokens.equal(found.tokens) and documents.targets.equal(found.targets)
    assert documents.positions is not None and documents.positions.equal(found.tokens % 16)
    with pytest.raises(SystemExit, match="not 128"):
        plans.unseen(both.split(100)[0], 64)


@pytest.mark.slow
def test_forks_are_kept_one_by_one(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from plausible import diagnosis

    out, made = tmp_path / "forks.jsonl", list[str]()

    def fork(_: Forks, config: Any, phases: Any) -> Any:
        pins = config.precision.pins
        kind = "always" if "*" in pins else f"{len(pins)} pins"
        made.append(f"{config.precision.low} {kind} {config.training.seed}")
        assert config.training.eval_sequences == 60, "the words on the command line reach every fork"
        gap = 1.0 if config.precision.low == "nvfp4" else 0.0
        loss = 3.0 - gap * (kind == "always") + config.training.seed / 100
        return SimpleNamespace(validation={"low": SimpleNamespace(high=loss)}, extra_time=0.1, losses=[1.0])

    words = ["experiment=fork", "base=shipped"]
    tree = composed_tree(words, hydra=False)
    config = cache(lambda *own: load_composed(OmegaConf.merge(tree, OmegaConf.from_dotlist([*own])), [*words, *own]))
    monkeypatch.setattr(Forks, "config", lambda _, *words: config(*words))
    monkeypatch.setattr(Forks, "__call__", fork)
    given = diagnosis(4, scores={key: dict.fromkeys(diagnosis(4).operators, 1.0) for key in SCORED})
    monkeypatch.setattr(plans.Base, "diagnosis", lambda *_: given)
    monkeypatch.setattr(plans, "DRAWS", 4)
    asked = ["forks", out, "training.eval_sequences=60", "--orders", "2", "--budgets", "0.1", "--low", "mxfp4,nvfp4"]
    asked += ["--arms", ";".join(chosen := ("plan", "by element", "random", "last"))]
    call(plans, *asked)
    cells = [astuple(cell)[1:3] for cell in plans.recorded([plans.Rows(out)])]
    both = ["never", "always"] * 2
    arms = [arm for arm in chosen for _ in range(2 if arm == "random" else 1)]
    assert cells == [("mxfp4", arm) for arm in both] + [("nvfp4", arm) for arm in (*both, *arms, *arms)]
    drawn = [(cell.order, cell.draw) for cell in plans.recorded([plans.Rows(out)]) if cell.arm == "random"]
    assert drawn == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert "no other arm of mxfp4" in capsys.readouterr().out and made[1] == "mxfp4 always 0"
    before = len(made)
    out.write_text(out.read_text()[:-20])  # killed while it wrote
    call(plans, *asked)
    assert len(made) == before + 1 and len(out.read_text().splitlines()) == len(cells)

    table = tmp_path / "table.json"
    call(plans, "table", table, out, out)
    record = json.loads(table.read_text())
    assert record["gaps"]["nvfp4"]["mean"] == pytest.approx(1.0)
    assert [row["n"] for row in record["rows"]] == [2] * len(chosen)
    call(plans, "table", table, out, "--each-base", "--base", "shipped")
    each = json.loads(table.read_text())
    assert each["gaps"]["shipped nvfp4"] == record["gaps"]["nvfp4"]
    assert each["rows"] == [{"base": "shipped", **row} for row in record["rows"]]


def test_a_figure_has_the_points_of_its_record(tmp_path: Path) -> None:
    record = tmp_path / "table.json"
    losses = {arm: LOSSES.get(arm, [2.5, 2.6, 2.7]) for arm in (*plans.BOUNDS, *plans.ARMS)}
    table = plans.table(pd.DataFrame(rows_of(losses)))
    record.write_text(json.dumps({"rows": [*table, *({**row, "low": "mxfp4"} for row in table)]}))
    with pytest.raises(SystemExit, match="--low"):
        plans.figure(record, ["nvfp4", "mxfp4"])
    picture = ElementTree.fromstring(plans.figure(record, ["nvfp4"]))
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {*plans.DRAWN.values(), "extra GEMM time", "everything in BF16", "+10%", "100%"} <= {*texts}
    told = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(told) == 2 * len(plans.DRAWN) and "0.9 ± 0.25 at +10.0%" in told


def test_the_figure_by_size_has_the_points_of_its_records(tmp_path: Path) -> None:
    forks, prices = tmp_path / "forks.json", tmp_path / "prices.json"
    gap = {"mean": 0.5, "sem": 0.1, "size": 3}
    forks.write_text(json.dumps({"gaps": {f"{size} nvfp4": gap for size in "ab"}}))
    cells = [
        {
            "model": size,
            "low": "nvfp4",
            "all_low": {"kl": 1.0, "kl_error": 0.25},
            "settings": {"held_out": 8, "size": 4},
        }
        for size in "ab"
    ]
    sizes = zip(cells, (1.5e6, 40e6), strict=True)
    prices.write_text(json.dumps({"cells": [cell | {"subject": {"parameters": size}} for cell, size in sizes]}))
    picture = ElementTree.fromstring(plans.by_size(forks, prices))
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"NVFP4: KL", "NVFP4: loss gap", "1.5 M", "40 M"} <= {*texts}
    told = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(told) == ["0.5 ± 0.43"] * 2 + ["1 ± 0.51"] * 2  # 4.303 standard errors at two degrees of freedom


@pytest.mark.slow
def test_the_kl_that_plans_leave_on_a_run(
    train: Callable[..., Path], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ("training.steps=20", "training.dtype=float32", "model.num_layers=2", "model.intermediate_size=64")
    run, out = train(tmp_path / "a", *words), tmp_path / "kl.jsonl"
    asked = ["kl", out, "--base", run, "--low", "nvfp4", "--budgets", "0.1,0.2", "--held-out", "2"]
    call(plans, *asked)
    rows = {(cell.arm, cell.budget): row for cell, row in plans.recorded([plans.Rows(out)]).items()}
    assert {arm for arm, _ in rows} == {"never", *plans.ARMS} - {"price, estimated"}, "which is to be asked for"
    assert len(rows) == 2 + 2 * (len(plans.ARMS) - 1) and "nvfp4 costs" in capsys.readouterr().out
    assert all(0 <= row["extra"] <= row["budget"] and row["error"] < row["kl"] for row in rows.values())
    assert rows["mxfp8", 1.001]["pins"] == 14 and rows["mxfp8", 1.001]["kl"] < rows["never", 0.0]["kl"]
    assert rows["plan", 0.2]["kl"] <= rows["plan", 0.1]["kl"] < rows["never", 0.0]["kl"]
    monkeypatch.setattr(plans, "diagnose", None)
    call(plans, *asked)  # has all of it already
    call(plans, "figure", tmp_path / "kl.svg", out)
    assert "everything in NVFP4" in (tmp_path / "kl.svg").read_text()


@pytest.mark.slow
def test_a_controller_spends_the_time_of_a_plan() -> None:
    """A share of FLOPs on the recovery path takes the same share of the extra GEMM time."""
    forks = Forks("shipped")
    config = forks.config("precision.low=nvfp4", "precision.recovery=bf16", "precision.recovers=[fprop]")
    model = forks.parts(config).converted
    to_move, whole, share = plans.times_to_move(model)
    spent = model.cost.spent()
    assert (to_move, whole, share) == (pytest.approx(spent.extra_time / 3), spent.extra_time, spent.share)
    assert whole < 0.9  # the head takes time
    for operator in model.operators[1:]:
        operator.switch(False)
    one = model.cost.spent()
    assert one.extra_time * spent.share == pytest.approx(one.share * spent.extra_time)
