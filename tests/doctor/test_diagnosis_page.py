"""A diagnosis as a page and on the terminal: everything has a place, for any size, whatever the names."""

from __future__ import annotations

import io
import re
from html import unescape

import pytest
from plausible import PROJECTIONS, diagnosis

from gnmr.console import Terminal
from gnmr.measure.gemm_costs import GemmCost, PathCost, format_nats
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.page import View, choice_rows, page, shade, totals
from gnmr.plan.terminal import story

HOSTILE = "<img src=x onerror='window.owned = 1'>\x1b[31m"
ORIGIN = {"command": f"gnmr diagnose {HOSTILE}", "machine": {"cpu": "Test CPU"}}


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", html.partition("</head>")[2]))


def printed(found: Diagnosis, width: int) -> list[str]:
    console = Terminal(file=io.StringIO(), width=width)
    for part in story(found, width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def bare(name: str) -> str:
    return name.removeprefix("model.")


def without_logits() -> Diagnosis:
    """A diagnosis of losses alone, one of which fell."""
    lost = {"measured": PathCost(12, None, float("nan"), 0, 3.0, 3.5, 0.01)}
    left = dict.fromkeys(diagnosis(2).remaining, PathCost(4, None, float("nan"), 0, 3.0, 2.99, 0.02))
    return diagnosis(2, **lost, remaining=left, held_out=PathCost(4, None, float("nan"), 0, 3.0, 3.4, 0.02), limit=None)


def test_a_page_of_210_operators_loads_nothing_and_holds_all_of_them() -> None:
    found = diagnosis()
    html = page(found, HOSTILE, ORIGIN)
    assert len(html.encode()) < 150_000
    assert not re.search(r"<script|<link|<img|https?:|url\(", html) and "default-src 'none'" in html
    text = text_of(html)
    first = html.index('<p class="verdict">')
    assert unescape(html[first:]).startswith(f'<p class="verdict">{found.verdict()}.</p>')
    assert html.count('<i class="cell') == 210
    pinned = found.choice().pins
    assert len(re.findall(r'<i class="cell s\d kept', html)) == len(pinned) > 0
    assert all(f"{bare(name)} " in text for name in found.operators)
    assert HOSTILE.replace("\x1b", "\\x1b") in text and "Test CPU" in text
    for line in totals(found):
        assert line in text
    names = [bare(row.operator) for row in found.worst()[:10]]
    tops = re.findall(r"<tr><th>(\S+)(?: ● \S+)?</th><td class=\"bar\">", html)
    assert tops == names


def test_a_cell_tells_its_numbers() -> None:
    found = diagnosis(4)
    html = unescape(page(found, "", {}))
    for row in (found.worst()[0], found.worst()[-1]):
        numbers = re.search(rf'aria-label="{re.escape(bare(row.operator))}: ([^"]*)"', html)
        assert numbers is not None
        measured = "measured" if row.measured is not None else "estimate"
        assert measured in numbers[1] and "by sequence" not in numbers[1]


def test_every_name_has_a_place() -> None:
    experts = [f"layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(3) for expert in range(8)]
    towers = [f"{tower}.layers.{layer}.attn.qkv" for tower in ("text", "vision") for layer in (0, 5)]
    view = View(
        diagnosis(names=[*experts, "layers.1.mlp.up_proj", "layers.2.self_attn.k_cache", "lm_head", "0", "enc.3"])
    )
    assert list(view.kinds) == ["mlp.experts.*.up_proj", "mlp.up_proj", "self_attn.k_cache"]
    assert [len(rows) for rows in view.kinds["mlp.experts.*.up_proj"].values()] == [8, 8, 8]
    assert view.layers == [0, 1, 2] and [row.operator for row in view.outside] == ["lm_head", "0", "enc.3"]
    view = View(diagnosis(names=towers))
    assert list(view.kinds) == ["text.layers.attn.qkv", "vision.layers.attn.qkv"] and view.layers == [0, 5]
    for names in (experts, towers, ["0", "3", "5"], [HOSTILE]):
        found = diagnosis(names=names)
        assert HOSTILE not in page(found, "", {}) and "\x1b" not in "".join(printed(found, 60))
    html = unescape(page(diagnosis(names=experts), "", {}))
    assert html.count('<i class="cell') == 3 and "8 operators, " in html


@pytest.mark.parametrize(("width", "total"), [(100, 0.55), (80, 0.0041), (60, 0.55)])
def test_the_terminal_tells_it_too(width: int, total: float) -> None:
    found = diagnosis(total=total)
    lines = printed(found, width)
    assert max(map(len, lines)) <= width
    if width == 100:
        assert len(lines) <= 28, "with a verdict, totals and the next step: 36"
    view = View(found)
    for kind in (kind.rpartition(".")[2] for kind in PROJECTIONS):
        line = next(line for line in lines if line.startswith(f"{kind} "))
        cells = line[max(map(len, view.kinds)) + 1 :][:30]
        values = [view.sum(view.kinds[kind][layer]) for layer in range(30)]
        assert cells == "".join(" ░▒▓█"[shade(value, view.largest, (0.05, 0.2, 0.5))] for value in values)
    joined = "\n".join(lines)
    assert all(bare(row.operator) in joined for row in found.worst()[:10])
    plan = found.remaining["plan"]
    assert format_nats(plan.nats) in joined
    assert all(one.label in joined for one in choice_rows(found))
    assert all(
        any(f"{extra:+.1%}" in line and format_nats(one.nats) in line for line in lines) for extra, one in found.curve
    )
    assert "on nvfp4 (time 1), " in joined.replace("\n", " ")


@pytest.mark.slow
def test_many_layers_share_a_character() -> None:
    assert "2 layers a cell" in printed(diagnosis(80), 80)[1]
    assert all("of the largest" in printed(diagnosis(layers), 60)[0] for layers in (1, 2, 11, 90))


def test_two_sides_have_a_gate() -> None:
    found = diagnosis(against=True, gate=0.003, total=0.004)
    html = page(found, "", {})
    assert found.verdict().startswith("the gate does not hold") and unescape(html).count(found.verdict()) == 1
    assert '<p class="what">gate</p>' in html and "same on both sides" in html
    assert '<p class="what">gate</p>' not in page(diagnosis(), "", {})


def test_without_logits_it_speaks_of_the_loss() -> None:
    found = without_logits()
    html = page(found, "", {})
    assert "nats of loss left" in html and "nats of KL" not in html and "loss increase" not in html
    assert printed(found, 100)[0].startswith("nats of loss by layer") and "no KL" in totals(found)[0]


def test_what_was_not_measured_is_an_estimate() -> None:
    found = diagnosis(2, held_out=None, remaining={}, excess={}, curve=())
    assert "≈ " in text_of(page(found, "", {})) and "≈ " in "\n".join(printed(found, 80))
    under = diagnosis(2, pins=found.choice().pins, remaining={}, excess={}, curve=())
    assert "What a budget buys" not in page(under, "", {}) and len(printed(under, 80)) < len(printed(found, 80))


def test_a_low_path_that_is_not_finite_is_drawn() -> None:
    lost = PathCost(12, float("inf"), float("nan"), 48, 3.0, float("inf"), float("nan"))
    found = diagnosis(
        2, measured=lost, held_out=lost, remaining=dict.fromkeys(diagnosis(2).remaining, lost), curve=((0.1, lost),)
    )
    assert "inf" in page(found, "", {}) and "inf" in "\n".join(printed(found, 80))


def test_a_large_interaction_is_a_warning() -> None:
    found = diagnosis(2, total=0.05, measured=PathCost(12, 0.5, 0.01, 48, 3.0, 3.4, 0.01))
    assert found.interacts and "large" in totals(found)[1] and "⚠" in page(found, "", {})
    assert "large" not in totals(diagnosis(2))[1]


def test_what_was_measured_beside_the_plan_is_shown_but_not_ranked() -> None:
    names = ["model.layers.0.self_attn.k_cache", "model.layers.1.self_attn.k_cache", "lm_head"]
    found = diagnosis(2, unplanned=tuple(GemmCost(name, "fprop", 9.0, (8.0, 10.0), measured=9.0) for name in names))
    lines, html = printed(found, 100), page(found, "", {})
    assert any(line.startswith("k_cache") for line in lines) and any(line.startswith("lm_head 9") for line in lines)
    assert "All 17 operators" in html and html.count('<i class="cell') == 17
    assert View(found).largest == found.worst()[0].value and View(found).top == found.worst()[:10]
    assert any("each measured alone: " in line for line in totals(found))


def test_it_has_the_reports_header_and_says_in_words_where_its_numbers_come_from() -> None:
    """No mapping of Python's, no time with nine decimals; the plan stands on it as a file to copy."""
    found, machine = diagnosis(4), {"device": "cpu", "cpu": "Test CPU", "cores": 1}
    origin = {"subject": {"name": "mine", "parameters": 1_000_000}, "machine": machine, "seconds": 151.798907935}
    plan = found.plan(provenance={"command": "gnmr diagnose <mine>"}).text()
    html = page(found, "", {**origin, "commit": "abc", "command": "gnmr diagnose mine"}, plan)
    text = " ".join(text_of(html).split())
    assert "<h1>gnmr diagnose</h1>" in html and unescape(html).count(plan) == 1
    assert "subject mine model 1,000,000 parameters recipe nvfp4, against bf16" in text
    assert "machine cpu, Test CPU, 1 core made with commit abc took 152 s " in text and "gnmr diagnose mine" in text
    links = set(re.findall(r'href="#(\w+)"', html))
    assert links == {"map", "budget", "gemms", "plan", "totals"} <= set(re.findall(r'id="(\w+)"', html))
    without = page(found, "", origin)
    assert "plan.json" not in without and "#plan" not in without
