"""benchmarks/rivals.py, its scores and its table, on models of a few thousand parameters."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gnmr.measure.gemm_costs import GemmCost

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))
rivals, rival_scores, rival_table = map(import_module, ("rivals", "rival_scores", "rival_table"))

Call = Callable[..., None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """call(*words) runs rivals.py with these words."""

    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["rivals.py", *map(str, words)])
        rivals.main()

    return run


# ---- scores ----


class Two(nn.Module):
    """Tokens to logits through two linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.head = nn.Embedding(8, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.up(self.embed(tokens)))


def run_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    return model(batch[:, :-1]), batch[:, 1:]


BATCH = torch.arange(36).view(4, 9) * 5 % 8


def test_scores_by_their_equations() -> None:
    model = Two()
    scores = rival_scores.measure_scores(model, run_of, [BATCH], {"up": model.up}, ["fp8_hybrid", "bf16"])
    assert all(parameter.grad is None for parameter in model.parameters())
    x = model.embed(BATCH[:, :-1]).detach().flatten(0, 1)
    weight = model.up.weight.detach()

    def cast(values: Tensor) -> Tensor:
        scale = values.abs().max() / 448
        return (values / scale).to(torch.float8_e4m3fn).float() * scale

    y = (x @ weight.T).requires_grad_()
    nn.functional.cross_entropy(model.head(y), BATCH[:, 1:].flatten()).backward()
    g_y = y.grad
    assert g_y is not None
    error = cast(x) @ cast(weight).T - x @ weight.T
    wanted = {
        "by element": (g_y * error).square().sum(),
        "AutoScheme": (g_y @ weight * (x - cast(x))).abs().sum() + (g_y.T @ x * (weight - cast(weight))).abs().sum(),
        "gradient norm": (g_y.T @ x).norm(),
        "gradient norm squared": (g_y.T @ x).square().sum(),
        "MSE of the input": (x - cast(x)).square().sum() / 32,
        "MSE of the output": error.square().sum() / 32,
    }
    for name, value in wanted.items():
        values = scores[name]["up", "fprop"]
        # The scale of a cast may round otherwise here, by which few elements move.
        assert values["fp8_hybrid"] == pytest.approx(float(value), rel=0.02), name
        assert values["bf16"] == 0.0


def test_the_probe_has_the_covariance_of_drawn_labels() -> None:
    logits = torch.tensor([[[1.0, 0.0, -1.0]]]).expand(1, 20_000, 3).clone()
    targets = torch.zeros(1, 20_000, dtype=torch.int64)
    targets[0, :100] = -100
    probe = rival_scores.sign_probe(logits, targets, torch.Generator().manual_seed(0))[0]
    assert not probe[:100].any()
    p = logits[0, 0].softmax(0)
    # 20,000 draws: a standard error of about 0.002.
    torch.testing.assert_close(probe[100:].T @ probe[100:] / 19_900, p.diag() - p[:, None] * p, atol=0.01, rtol=0)


class Four(Two):
    """Tokens to logits through four linears."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.k_proj(self.q_proj(self.up(self.embed(tokens)))))


TIMES = {"nvfp4": 1.0, "mxfp8": 2.0, "bf16": 4.0}


def check_autoquantize(folder: Path) -> None:
    """Check the library itself, in both modes and without its groups; a second call needs none of its passes."""
    rival_scores.import_modelopt()
    from modelopt.torch.utils import safe_load

    def extra(pins: Mapping[str, str]) -> float:
        return sum(TIMES[recipe] - 1 for recipe in pins.values()) / 3

    model = Four().eval()
    operators = {"up": model.up, "q": model.q_proj, "k": model.k_proj}
    for method in ("gradient", "kl_div"):
        asked = (model, run_of, [BATCH] * 2, operators, [*TIMES], method, folder / f"{method}.pt")
        chosen = rival_scores.AutoQuantize(*asked)
        plans = {budget: chosen.within(budget, extra) for budget in (0.2, 0.35, 0.7, 3.0)}
        assert plans[0.2] == {} and list(plans[0.35].values()) == ["mxfp8"]
        assert all(extra(pins) <= budget for budget, pins in plans.items())
        assert extra(plans[3.0]) >= 1.0 and {*plans[3.0]} == {*operators}
        empty = folder / f"{method}-empty.pt"  # as a run leaves it that was killed while it measured
        content = safe_load(asked[-1])
        torch.save({**content, "candidate_stats": {}}, empty)
        assert rival_scores.AutoQuantize(*asked[:-1], empty).within(0.35, extra) == plans[0.35]
        again = rival_scores.AutoQuantize(*asked[:2], [], *asked[3:])  # from the file, without a batch
        assert again.within(0.35, extra) == plans[0.35]
    assert type(model.up) is nn.Linear


@pytest.mark.slow
@pytest.mark.skipif(
    not (rival_scores.LIBRARIES / "modelopt").is_dir(), reason="ModelOpt is not in .libraries: make test-libraries"
)
def test_autoquantize_chooses_within_the_time(tmp_path: Path) -> None:
    """In a process of its own: ModelOpt patches torch, and brings modules that other tests must not import."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(check_autoquantize, tmp_path).result()


def test_more_bits_may_take_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits take too much time and 10 to 11 fit, so a bisection from 8 bits would stop at the quick operator."""
    choices = [(11, ["quick", "slow"]), (10, ["quick", "small"]), (5, ["slow"]), (4, ["quick"]), (0, [])]

    def pins(_: Any, bits: float) -> dict[str, str]:
        return next(dict.fromkeys(names, "bf16") for fewest, names in choices if bits >= fewest)

    monkeypatch.setattr(rival_scores.AutoQuantize, "pins", pins)
    extra = {"quick": 0.1, "small": 0.15, "slow": 0.5}
    chooser = object.__new__(rival_scores.AutoQuantize)
    chosen = chooser.within(0.3, lambda pins: sum(extra[name] for name in pins))
    assert [*chosen] == ["quick", "small"]


def test_the_estimate_is_by_token_where_there_is_none_by_sequence() -> None:
    measured = GemmCost("a", "fprop", 0.5, (0.4, 0.6), by_token=0.2, by_sequence=0.3, measured=0.5)
    assert rival_scores.estimate_of(measured) == 0.3
    assert rival_scores.estimate_of(replace(measured, by_sequence=None)) == 0.2
    assert rival_scores.estimate_of(replace(measured, by_sequence=0.0)) == 0.0


# ---- runs ----


def test_an_incomplete_row_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rivals.Rows(file).append({"a": "é"})
    complete = file.read_bytes()
    file.write_bytes(complete + b'{"a": "\xc3')
    rows = rivals.Rows(file)
    assert rows.rows == [{"a": "é"}] and file.read_bytes() != complete, "reading changes nothing"
    rows.append({"b": 2})
    rows.append({"c": 3})
    assert file.read_bytes() == complete + b'{"b": 2}\n{"c": 3}\n'
    assert rivals.Rows(file).rows == rows.rows == [{"a": "é"}, {"b": 2}, {"c": 3}]


class MeasuresError(Exception):
    """Raised where a run begins to measure."""


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"exact_loss": None}, None),  # as the rows of earlier commits
        ({"exact_loss": 2.5}, "was begun with another model or text: a loss of 2.5, not "),
        ({"subject": {"model": "llama", "parameters": 8}}, "was begun with parameters 8, not 9"),
        ({"settings": {"sequences": 16}}, "was begun with sequences 16, not 32"),
    ],
)
def test_a_run_goes_on_from_rows_of_its_own_model_and_text(
    changed: dict[str, Any], says: str | None, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    measured = rivals.Measured(Two(), run_of, [BATCH], [BATCH], [BATCH], {"model": "llama", "parameters": 9})
    monkeypatch.setattr(rivals, "load", lambda *_: measured)
    monkeypatch.setattr(rivals, "LowPath", Mock(side_effect=MeasuresError))
    words = ("run", "a", "checkpoint", "text", "--arms", "price", "--results", tmp_path)
    with pytest.raises(MeasuresError):
        call(*words)
    (row,) = rivals.Rows(file := tmp_path / "rivals-a.jsonl").rows
    logits, targets = run_of(measured.model, BATCH)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert row["exact_loss"] == pytest.approx(float(loss), rel=1e-5)
    file.write_text(json.dumps({key: value for key, value in (row | changed).items() if value is not None}) + "\n")
    with pytest.raises(MeasuresError if says is None else SystemExit):
        call(*words)
    error = capsys.readouterr().err
    assert says is None or (says in error and error.endswith("; use another NAME\n"))


@pytest.fixture(scope="module")
def trained(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("training.steps=20", "training.dtype=float32", "model.num_layers=2", "model.intermediate_size=64")
    return train(tmp_path_factory.mktemp("rivals") / "a", *words)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_killed(
    trained: Path, text_file: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arms = ";".join(arm for arm in rivals.ARMS if arm not in rivals.LIBRARY)
    words = ["run", "a", trained, text_file, "--sequences", 16, "--length", 16, "--budgets", "0.1,0.3", "--arms", arms]
    words += ["--results", tmp_path, "--state", tmp_path / "state"]
    rows = tmp_path / "rivals-a.jsonl"

    plain = rivals.Rows.append
    for kind, number in (("plan", 20), ("kl", 30)):
        left = [number - (rows.read_text().count(f'"kind": "{kind}"') if rows.exists() else 0)]

        def killed(self: Any, row: Any, kind: str = kind, left: list[int] = left) -> None:
            left[0] -= row["kind"] == kind
            if left[0] < 0:
                raise KeyboardInterrupt
            plain(self, row)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(rivals.Rows, "append", killed)
            call(*words)
        assert rows.read_text().count(f'"kind": "{kind}"') == number
    with pytest.raises(SystemExit) as ended:
        call("report", tmp_path / "rivals-a")
    assert ended.value.code == 2 and "is incomplete" in capsys.readouterr().err
    before = rows.read_text()
    rows.write_text(before[:-20])  # and its last row is cut off
    call(*words[:-6], "--arms", arms.replace(";oracle", ""), *words[-4:])
    call(*words)  # with one more arm
    assert rows.read_text().startswith(before[: before.rstrip().rfind("\n")])
    with pytest.raises(SystemExit) as ended:
        call(*words, "--low", "nvfp4")
    assert ended.value.code == 2

    plans = [row for row in map(json.loads, rows.read_text().splitlines()) if row["kind"] == "plan"]
    for plan in plans:
        assert plan["extra"] <= plan["budget"] + 1e-9
        rescues = {"nvfp4": {"mxfp8", "bf16"}, "fp8_hybrid": {"bf16"}}[plan["low"]]
        assert {*plan["pins"].values()} <= rescues
        if plan["low"] == "nvfp4" and plan["arm"] in (*rival_scores.SCORES, *rivals.RULES, "price, one recipe"):
            assert {*plan["pins"].values()} <= {"mxfp8"}
    of_random = {plan["key"] for plan in plans if plan["arm"] == "random" and plan["low"] == "nvfp4"}
    assert len(of_random) > 4
    tails = [plan for plan in plans if plan["arm"] == rival_table.TAIL]
    assert [len(plan["pins"]) for plan in tails] == [7, 7]  # one of two blocks
    assert {plan["arm"] for plan in plans if plan["budget"] == tails[0]["budget"]} == {
        "plan",
        "price",
        rival_table.TAIL,
    }

    call("report", tmp_path / "rivals-a")
    call("check", tmp_path / "rivals-a")
    record = json.loads((tmp_path / "rivals-a.json").read_text())
    kl = {(row["low"], row["arm"], row["budget"]): row["kl"] for row in record["rows"]}
    for low, nothing in record["nothing"].items():
        assert 0 < kl[low, "oracle", 0.3] < kl[low, "random", 0.3] < nothing
        ranks = record["ranks"][low]
        assert ranks["operators"] == 14 and {"price", "estimate", *rival_scores.SCORES} == {*ranks["of_scores"]}
        value, least, most = ranks["of_scores"]["price"]
        assert -1 <= least <= value <= most <= 1
    picture = ElementTree.fromstring((tmp_path / "rivals-a.svg").read_text())
    assert len(picture) == 2
    record["rows"][0]["kl"] *= 1.001
    (tmp_path / "rivals-a.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=r"rows\[0\].kl"):
        call("check", tmp_path / "rivals-a")


@pytest.mark.slow
def test_kl_and_selected_plan_are_those_of_a_diagnosis(trained: Path, text_file: Path) -> None:
    measured = rivals.load(str(trained), text_file, 16, 16)
    path = rivals.LowPath(measured, "nvfp4", Path("unused"))
    everything_low = path._diagnosis(measured.batches[:2], held_out=measured.held_out, confirm=0).held_out
    assert everything_low is not None and everything_low.kl is not None
    kls = rivals.SequenceKls(measured, measured.held_out)
    mine = kls.of("nvfp4", {})
    second_half = mine["kls"][len(mine["kls"]) // 2 :]  # the first one is for a choice among plans
    assert np.mean(second_half) == pytest.approx(everything_low.kl, rel=1e-5)
    budget = 0.2
    asked = path._diagnosis(measured.batches, held_out=[*measured.selection] * 2, budget=budget)
    assert len(asked.selection) > 3, "there was a choice"
    assert path.selected(budget) == rivals._fprop(asked.choice())
    assert kls.of("nvfp4", dict.fromkeys(path.operators, "bf16"))["same_top"] == [1.0] * 16


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sequences", "10"], "multiple of 4"),
        (["--arms", "plan;best"], "best: is none of"),
        (["--low", "nvfp5"], "nvfp5: is none of"),
        ([], "there is no such run"),
        (["--arms", "plan;AutoQuantize, kl_div"], "make test-libraries"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], says: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(rival_scores, "LIBRARIES", tmp_path / "none")
    words = words if "--arms" in words else [*words, "--arms", "plan"]
    with pytest.raises(SystemExit) as ended:
        call("run", "a", tmp_path / "nowhere", tmp_path / "text", "--results", tmp_path, *words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and says in error and "Traceback" not in error


# ---- the table and the claims ----


def rows_of(kls: dict[str, list[list[float]]], low: str = "nvfp4", budget: float = 0.1) -> list[dict[str, Any]]:
    """Rows of plans and KLs: the KLs of each arm by draw."""
    rows: list[dict[str, Any]] = []
    for arm, draws in kls.items():
        for draw, of_draw in enumerate(draws):
            key = f"{low} {arm} {budget} {draw}"
            cell = {"low": low, "arm": arm, "budget": 0.0 if arm == "never" else budget, "draw": draw}
            rows.append({"kind": "plan", **cell, "extra": budget, "key": key, "pins": {"a": "mxfp8"}})
            rows.append({"kind": "kl", "low": low, "key": key, "kls": of_draw, "same_top": [0.9] * len(of_draw)})
    return rows


KLS = {
    "never": [[10.0, 12.0, 11.0, 11.0]],
    "plan": [[2.0, 3.0, 2.5, 2.5]],
    "price": [[2.0, 3.0, 2.5, 2.5]],
    "oracle": [[1.0, 2.0, 1.5, 1.5]],
    "gradient norm": [[2.1, 3.0, 2.6, 2.5]],
    "last": [[5.0, 7.0, 6.0, 6.0]],
    "random": [[8.0, 8.0, 8.0, 8.0], [4.0, 6.0, 5.0, 5.0]],
}


def test_the_table_by_hand() -> None:
    frame, missing = rival_table.kls_of(rows_of(KLS))
    assert not missing
    rows = {row["arm"]: row for row in rival_table.table(frame)}
    assert (rows["plan"]["kl"], rows["plan"]["removed"]) == (2.5, pytest.approx(8.5 / 11))
    assert rows["plan"]["of_oracle"] == pytest.approx(8.5 / 9.5) and rows["plan"]["same_top"] == pytest.approx(0.9)
    # 3, 4, 3.5, 3.5 more: a mean of 3.5 with the standard deviation sqrt(1/6), t = 17.1 with three degrees of freedom.
    half = 3.18245 * math.sqrt(1 / 6) / 2
    assert (rows["last"]["more"], rows["last"]["more_half_width"]) == (3.5, pytest.approx(half, rel=1e-5))
    assert rows["random"]["draws"] == 2 and (rows["random"]["lowest"], rows["random"]["highest"]) == (5.0, 8.0)
    assert rows["random"]["more"] == 4.0  # the mean of 8 and 5, less 2.5
    raw = {
        arm: float(rival_table.one_sided(np.array(more), "greater"))
        for arm, more in {
            "last": [3.0, 4.0, 3.5, 3.5],
            "random": [4.0, 4.0, 4.0, 4.0 + 1e-9],
            "gradient norm": [0.1, 0.0, 0.1, 0.0],
        }.items()
    }
    assert rows["gradient norm"]["p_plan_less"] == pytest.approx(raw["gradient norm"], rel=1e-6)  # the last of three
    assert rows["last"]["p_plan_less"] == pytest.approx(2 * raw["last"], rel=1e-6)
    assert not {"p_plan_less", "p_plan_more"} & {*rows["oracle"], *rows["price"]}
    assert rival_table.kls_of(rows_of(KLS)[:-1])[1] == ["nvfp4 random at 10%"]


def outcome(**changed: list[float]) -> dict[str, bool]:
    """Whether each claim holds, with the KLs of some arms changed on both low paths."""
    rows = [
        row
        for low in ("nvfp4", "fp8_hybrid")
        for row in rows_of(KLS | {arm.replace("_", " "): [kls] for arm, kls in changed.items()}, low)
    ]
    frame, _ = rival_table.kls_of(rows)
    return {name: claim["holds"] for name, claim in rival_table.claims(frame, rival_table.table(frame)).items()}


def test_each_claim_can_fail() -> None:
    far_above = [3.5, 4.6, 4.0, 4.1]
    assert outcome() == {"tie": True, "no more": True, "less": False}  # the gradient norm is within its noise
    assert outcome(gradient_norm=far_above) == {"tie": False, "no more": True, "less": True}
    assert outcome(gradient_norm=[1.0, 2.0, 1.5, 1.6])["no more"] is False
    assert outcome(gradient_norm=KLS["plan"][0]) == {"tie": True, "no more": True, "less": False}  # the same plan
    frame, _ = rival_table.kls_of(rows_of({"never": KLS["never"], "plan": KLS["plan"]}))
    claims = rival_table.claims(frame, rival_table.table(frame))
    assert not any(claim["holds"] for claim in claims.values())  # nothing was tested


def test_holm() -> None:
    assert rival_table.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9}) == pytest.approx(
        {"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.9}
    )
    assert rival_table.holm({"none": math.nan, "a": 0.01, "b": 0.04}) == {"a": 0.02, "b": 0.04}


def test_a_plan_without_a_kl_has_no_test() -> None:
    """A plan whose predictions are NaN takes no part in the tests of the others."""
    frame, _ = rival_table.kls_of(rows_of({**KLS, "broken": [[math.nan] * 4]}))
    without, _ = rival_table.kls_of(rows_of(KLS))
    *rows, broken = rival_table.table(frame)
    assert rows == rival_table.table(without) and not {"p_plan_less", "p_plan_more"} & {*broken}
    assert rival_table.claims(frame, [*rows, broken]) == rival_table.claims(without, rows)


def test_numbers_for_the_pages(tmp_path: Path) -> None:
    frame, _ = rival_table.kls_of(rows_of(KLS))
    table = rival_table.table(frame)
    content = {"nothing": {"nvfp4": 12.345}, "rows": table, "claims": rival_table.claims(frame, table)}
    (tmp_path / "a.json").write_text(json.dumps(content))
    texts = rival_table.numbers("a", tmp_path / "a.json")
    assert texts["a_nvfp4/last at 10%/kl"] == "6 ± 1" and texts["a_nvfp4/last at 10%/more"] == "+3.5 ± 0.6"
    assert texts["a_nvfp4/nothing"] == "12.3" and texts["a_nvfp4/plan at 10%/of oracle"] == "89%"
    assert texts["a/no more/held"] == texts["a/no more/tests"] == "3"
