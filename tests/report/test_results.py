"""Claims on a table of runs: the committed page is what the table gives, and a changed number is found."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from gnmr.cli.report import main
from gnmr.errors import UserError
from gnmr.lab.report.claims import judged_claims, read, results

ROOT = Path(__file__).parents[2]
PERPLEXITY = {"int4": (80.0, 84.0, 79.0), "int4_int8": (60.0, 64.0, 59.0), "int8": (40.0, 41.0, 40.0)}
CLAIMS = """\
records: table.parquet
texts: [text.md]
claims:
  one:
    title: A first claim
    asks: Does it help?
    arms: {never: 'study/int4-*', gnmr: 'study/int4_int8-*', always: 'study/int8-*'}
    low: never
    high: always
"""


def row(arm: str, seed: int, loss: float | None, **more: Any) -> dict[str, Any]:
    keys = ("config", "order", "base", "scale", "data", "tokens_per_step", "steps", "sent", "spent", "promoted")
    known = {"study": "study", "run": f"{arm}-s{seed}", "arm": arm, "seed": seed, "loss": loss, "experiment": "x"}
    known |= {"state": "done" if loss else "diverged", "recovery": "int8", "commit": "abc", "machine": "cpu"}
    return dict.fromkeys(keys) | known | {"config": arm} | more


def rows() -> list[dict[str, Any]]:
    return [row(arm, s, math.log(p)) for arm, of_arm in PERPLEXITY.items() for s, p in enumerate(of_arm)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with a table of three arms over three seeds, claims and a text; return the file of claims."""
    pq.write_table(pa.Table.from_pylist(rows()), tmp_path / "table.parquet")
    (tmp_path / "claims.yaml").write_text(CLAIMS)
    (tmp_path / "text.md").write_text("It ends <!--=one/gnmr/difference-->?<!--/--> lower.\n")
    return tmp_path / "claims.yaml"


def quiet(file: Path, check: bool = False) -> list[str]:
    return results(file, file.parent / "page.md", lambda _: None, check=check)


def rewrite(file: Path, table: list[dict[str, Any]], claims: str = CLAIMS) -> None:
    pq.write_table(pa.Table.from_pylist(table), file.parent / "table.parquet")
    file.write_text(claims)


def test_the_page_and_marked_numbers_are_written(written: Path) -> None:
    assert quiet(written) == []
    page = (written.parent / "page.md").read_text()
    pairs = zip(PERPLEXITY["int4_int8"], PERPLEXITY["int4"], strict=True)
    difference = (math.prod(mine / theirs for mine, theirs in pairs) ** (1 / 3) - 1) * 100
    assert re.search(rf"\|gnmr\|\d+\|{re.escape(f'{difference:+.1f}')} \(", page) and "n = 3" in page
    assert "|arm|recovered, %|against never|p|" in page
    assert f"Loss: never {math.log(80 * 84 * 79) / 3:.4f}, always {math.log(40 * 41 * 40) / 3:.4f} (p" in page
    assert "Of 2 tests, 2 better." in page
    assert (written.parent / "text.md").read_text() == (
        f"It ends <!--=one/gnmr/difference-->{difference:+.1f}%<!--/--> lower.\n"
    )


def test_no_verdict_is_said_if_the_positive_control_fails(written: Path) -> None:
    rewrite(written, [one | ({"loss": math.log(80.0)} if one["arm"] == "int8" else {}) for one in rows()])
    quiet(written)
    page = (written.parent / "page.md").read_text()
    assert "so no arm gets a verdict." in page and "|one|A first claim|" in page and "## one" not in page


def test_a_changed_number_is_found(written: Path) -> None:
    """On the page and in a text; the command ends with exit code 1, or 0 if nothing has changed."""
    page, text = written.parent / "page.md", written.parent / "text.md"
    quiet(written)
    words = [f"claims={written}", f"out={page}", "--check"]
    assert main(words) == 0
    for path in (page, text):
        path.write_text(path.read_text().replace("-24.7", "-34.7", 1))
    lines = quiet(written, check=True)
    assert [str(page) in lines[0], str(text) in lines[1], len(lines)] == [True, True, 2]
    assert all("-34.7" in line and "-24.7" in line for line in lines) and main(words) == 1
    page.unlink()
    assert quiet(written, check=True)[0].endswith("is not there")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("low: never", "low: nevr", "claims.one: 'nevr' is not one of its arms: did you mean never"),
        ("title:", "titel:", "claims.one: unknown key 'titel': did you mean title"),
        ("study/int4-*", "study/int5-*", "claims.one: study/int5-*: no such run"),
        ("study/int4-*", "study/int4*", "claims.one.arms.never: runs of several configs"),
        ("asks: Does it help?", "asks: [a]", "claims.one.asks: must be a text"),
        ("'study/int4-*'", "['study/int4-*', 'study/int4-*']", "every arm needs as many cells"),
        ("low: never", "contrasts: {gmr: always}\n    low: never", "claims.one: 'gmr' is not one of its arms"),
        ("claims:", "claims: 3\nother:", "unknown key 'other'"),
    ],
)
def test_mistakes_in_claims_are_one_line(written: Path, old: str, new: str, told: str) -> None:
    written.write_text(CLAIMS.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        quiet(written)
    assert told in str(caught.value) and not (written.parent / "page.md").exists()


def test_a_mark_that_names_no_number(written: Path) -> None:
    (written.parent / "text.md").write_text("<!--=one/gnmr/diference--><!--/-->")
    with pytest.raises(
        UserError, match=r"text\.md: 'one/gnmr/diference' is not a result: did you mean one/gnmr/differ"
    ):
        quiet(written)


def test_a_marked_column_is_filled_by_row(written: Path) -> None:
    """The row is named by its first cell or by a mark in it; empty cells and cells with a mark of their own stay."""
    text = written.parent / "text.md"
    text.write_text(
        "| arm | n<!--:one/*/n--> | recovered<!--:recovered--> | other |\n|---|---|---|---|\n"
        "| `gnmr` | ? | ? | 7 |\n| all<!--:always--> | ? | | 8 |\n| gnmr | <!--=one/n-->?<!--/--> n | ? | |\n"
    )
    quiet(written)
    (one,) = judged_claims(read(written))
    recovered = one.numbers()["one/gnmr/recovered"]
    assert re.fullmatch(r"\d+% \(\d+ to \d+\)", recovered)
    assert text.read_text().splitlines()[2:] == [
        f"| `gnmr` | 3 | {recovered} | 7 |",
        "| all<!--:always--> | 3 | | 8 |",
        f"| gnmr | <!--=one/n-->3<!--/--> n | {recovered} | |",
    ]
    text.write_text(text.read_text().replace("| 3 |", "| 4 |", 1))
    assert "'| `gnmr` | 4 |" in quiet(written, check=True)[0]
    text.write_text("| arm | n<!--:one/*/n--> |\n|---|---|\n| gnrm | 3 |\n")
    with pytest.raises(UserError, match=r"'one/gnrm/n' is not a result: did you mean one/gnmr/n"):
        quiet(written)


def test_arms_at_budgets_are_one_row_with_a_column_for_each(written: Path) -> None:
    """Each cell has what is recovered, the interval against the control at this budget, and p."""
    arms = [
        row(f"{name} at {at}%", seed, math.log(perplexity - 10 * at + worse), spent=at / 100)
        for name, worse in (("price", 0), ("mse", 5))
        for at in (1, 2)
        for seed, perplexity in enumerate((70.0, 74.0, 69.0))
    ]
    named = CLAIMS.replace("{never: 'study/int4-*', gnmr: 'study/int4_int8-*', always: 'study/int8-*'}", "study/*")
    named = named.replace("low: never", "low: int4").replace("high: always", "high: int8")
    contrasts = "    contrasts: {'* at 1%': price at 1%, '* at 2%': price at 2%}\n"
    (written.parent / "text.md").write_text("")
    rewrite(written, [*(one for one in rows() if one["arm"] != "int4_int8"), *arms], named + contrasts)
    quiet(written)
    page = (written.parent / "page.md").read_text()
    (one,) = judged_claims(read(written))
    assert "Against price at the same budget" in page and "|arm|1% (spent: 1.0)|2% (spent: 2.0)|" in page
    cells = re.search(r"\|mse\|(.*)\|(.*)\|", page)
    assert cells is not None and len(one.family.results) == 2
    for cell, result in zip(cells.groups(), one.family.results, strict=True):
        assert result.difference is not None and result.difference.interval is not None
        low, high = (100 * math.expm1(end) for end in result.difference.interval)
        share = one.of_arm(result.arm)["closed"].removesuffix("%")
        digits = 1 if max(abs(low), abs(high)) < 10 else 0
        assert cell.startswith(f"{share} ({low:.{digits}f} to {high:.{digits}f}) ")
    written.write_text((named + contrasts).replace("price at 1%", "[price at 1%, int4]"))
    quiet(written)
    assert "|against int4|p|against price at 1%|p|against price at 2%|p|" in (written.parent / "page.md").read_text()


def test_runs_that_cannot_be_compared_or_repeat_a_seed_are_refused(written: Path) -> None:
    rewrite(written, [one | ({"data": "other"} if one["arm"] == "int8" else {}) for one in rows()])
    with pytest.raises(UserError, match=r"claims\.one: these runs cannot be compared, they differ in data"):
        quiet(written)
    rewrite(written, [*rows(), row("int8", 2, 4.0)])
    with pytest.raises(UserError, match=r"claims\.one\.arms\.always: several runs of one seed"):
        quiet(written)


def test_cells_are_pooled_and_arms_named_by_the_table(written: Path) -> None:
    again = [one | {"study": "again", "experiment": "y", "config": "z"} for one in rows()]
    pooled = CLAIMS.replace("'study/int4-*'", "['study/int4-*', 'again/int4-*']")
    pooled = pooled.replace("'study/int4_int8-*'", "['study/int4_int8-*', 'again/int4_int8-*']")
    rewrite(written, [*rows(), *again], pooled.replace("'study/int8-*'", "['study/int8-*', 'again/int8-*']"))
    (one,) = judged_claims(read(written))
    assert [found.n for found in one.family.results] == [6, 6]
    named = CLAIMS.replace("{never: 'study/int4-*', gnmr: 'study/int4_int8-*', always: 'study/int8-*'}", "study/*")
    named = named.replace("low: never", "low: int4\n    contrasts: {'*': [int4, int8]}").replace("always", "int8")
    (written.parent / "text.md").write_text("")
    rewrite(written, rows(), named)
    (one,) = judged_claims(read(written))
    assert [(found.arm, found.control) for found in one.family.results] == [
        ("int4_int8", "int4"),
        ("int4_int8", "int8"),
    ]


def test_a_diverged_run_counts_and_an_unfinished_one_does_not(written: Path) -> None:
    rewrite(written, [*rows(), row("int4", 3, None), row("int8", 3, 4.0), row("int8", 4, 4.0, state="failed")])
    (one,) = judged_claims(read(written))
    assert one.family.results[-1].n == 4 and one.family.results[-1].diverged == (0, 1)
    assert one.of_arm("never")["loss"] == "diverged"


@pytest.mark.filterwarnings("error")
def test_losses_of_hundreds_of_nats(written: Path) -> None:
    """Their perplexity, or its square, overflows."""
    rewrite(written, [one | {"loss": 200.0 * one["loss"]} for one in rows()])
    assert quiet(written) == []
    assert (written.parent / "text.md").read_text().startswith("It ends <!--=one/gnmr/difference-->-100.0%")


def test_words_that_do_not_go_with_claims(written: Path) -> None:
    with pytest.raises(UserError, match="names its records itself"):
        main([f"claims={written}", "runs"])
    with pytest.raises(UserError, match="--check: only with claims=FILE"):
        main([str(written.parent), "--check"])


@pytest.mark.slow
def test_committed_results_are_what_the_table_gives() -> None:
    """`gnmr report claims=docs/claims.yaml` writes the page and the numbers in texts anew."""
    assert results(ROOT / "docs" / "claims.yaml", ROOT / "docs" / "results.md", print, check=True) == []


@pytest.mark.slow
def test_verdicts_are_those_of_other_code_on_the_whole_records() -> None:
    """The verdicts that the code and the records of commit 901556c5 gave for the claims that are still here."""
    known = json.loads((Path(__file__).parent / "frozen_verdicts.json").read_text())
    found: dict[str, dict[str, list[str]]] = {}
    for one in judged_claims(read(ROOT / "docs" / "claims.yaml")):
        model = one.family.model
        for test in one.family.results:
            of_claim = found.setdefault(one.claim.name, {})
            of_claim.setdefault(test.verdict, []).append(f"{test.arm} - {test.control}")
            if model is not None and model.own_differences and test.difference is not None:
                of_arm, of_control = (model.values[arm] for arm in (test.arm, test.control))
                both = [key for key in of_arm if key in of_control]
                theirs = stats.ttest_rel([of_arm[key] for key in both], [of_control[key] for key in both])
                assert test.difference.p == pytest.approx(theirs.pvalue)
    for name, verdicts in known.items():
        assert {told: sorted(of) for told, of in found[name].items()} == {
            told: sorted(of) for told, of in verdicts.items()
        }
