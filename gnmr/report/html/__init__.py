"""The report as one page: opens from disk, loads nothing, drawn by plotly in the browser.

`write_html` gathers plain numbers (sections.py, unit_map.py), packs them (pack.py) and puts them with plotly.js into
page.html, which holds all that the browser runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from gnmr.errors import UserError
from gnmr.report import faults
from gnmr.report.arms import Comparison
from gnmr.report.html import sections
from gnmr.report.html.pack import script_json
from gnmr.report.html.sections import Tree
from gnmr.report.html.unit_map import unit_map
from gnmr.report.layout import Table
from gnmr.report.regimes import Cell, regime_map
from gnmr.report.runs import Run
from gnmr.report.style import COLOURS
from gnmr.report.tables import comparison_tables, run_table

__all__ = ["write_html"]

MAP_CHARACTERS = 9_000_000
"""Room for the risk maps, so that a page with plotly's 4.8 million characters stays under 15 MB."""


def write_html(
    comparisons: Sequence[Comparison],
    runs: Sequence[Run],
    path: Path,
    *,
    tables_of: Callable[[Comparison], Sequence[Table]] = comparison_tables,
    tables: Sequence[Table] = (),
    regime: Sequence[Cell] | None = None,
    title: str = "gnmr report",
) -> None:
    """Writes the page, folders above it included.

    Args:
        comparisons: `compare(runs)`; the page shows one at a time.
        runs: all runs, for the table of provenance.
        path: the file, replaced if it is there.
        tables_of: the tables above a comparison's figures; their first column is the arm.
        tables: further tables over all comparisons, such as the paper's.
        regime: cells as of `regimes.regime_map`; None: those of the comparisons. The section is left out without any.
        title: of the page.

    Raises `UserError` where the file cannot be written.
    """
    budget = MAP_CHARACTERS
    trees = []
    for comparison in comparisons:
        tree, used = _comparison(comparison, tables_of(comparison), budget)
        budget -= used
        trees.append(tree)
    data = {
        "title": title,
        "colours": COLOURS,
        "comparisons": trees,
        "tables": [sections.table(made) for made in tables if made.rows],
        "regime": sections.regime(regime_map(comparisons) if regime is None else regime, comparisons),
        "runs": sections.table(run_table(list(runs), path.parent)),
    }
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8").replace("<!-- title -->", escape(title))
    before, rest = page.split("<!-- plotly -->")
    between, after = rest.split("<!-- data -->")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines([before, get_plotlyjs(), between, script_json(data), after])
    except OSError as error:
        raise UserError(f"{path}: cannot write the page ({error.strerror or error})") from error


def _comparison(comparison: Comparison, made: Sequence[Table], room: int) -> tuple[Tree, int]:
    """The comparison's tree and the characters that its maps take."""
    maps: list[tuple[int, int, Tree]] = []
    left_out: list[str] = []
    found: dict[Path, faults.Detection] = {}
    leads: dict[tuple[str, int], dict[str, tuple[int, float]]] = {}
    used = 0
    for place, run in _runs_in_order(comparison):
        arm = comparison.arms[place]
        windows = faults.read_windows(run.folder)
        if left_out and not windows:
            left_out.append(f"{arm.label}, seed {run.seed}")
            continue
        ratios = run.ratios()  # one run's at a time: a long run's matrices are large
        if len(ratios.steps) == 0:
            continue
        if (detection := faults.run_detection(run, ratios)) is not None:
            found[run.folder] = detection
            leads[arm.label, run.seed] = faults.run_lead_lags(run, ratios)
        tree = sections.run_map(arm, run, unit_map(run, ratios), windows)
        size = len(script_json(tree))
        if used + size > room:
            left_out.append(tree["label"])
            continue
        used += size
        maps.append((place, run.seed, tree))
    fault_tables = [
        faults.detection_table(comparison, found),
        faults.windows_table(comparison, found),
        sections.lead_lag_table(comparison, leads),
    ]
    return {
        "name": _name(comparison),
        "arms": sections.arms(comparison),
        "tables": [sections.table(one) for one in made if one.rows],
        "losses": sections.losses(comparison),
        "promotion": sections.promotion(comparison),
        "maps": [tree for _, _, tree in sorted(maps, key=lambda entry: entry[:2])],
        "left_out": left_out,
        "faults": [sections.table(one) for one in fault_tables if one.rows],
        "origin": sections.origin(comparison.runs),
    }, used


def _name(comparison: Comparison) -> str:
    """With what keeps it apart from others of its name."""
    apart = ", ".join(f"{what} {here}" for what, (here, _) in comparison.apart().items())
    return f"{comparison.name} ({apart})" if apart else comparison.name


def _runs_in_order(comparison: Comparison) -> list[tuple[int, Run]]:
    """Runs by the number of their arm: each arm's first one, then the others, so that no arm is without a map."""
    firsts = [(place, arm.first) for place, arm in enumerate(comparison.arms)]
    return firsts + [
        (place, run) for place, arm in enumerate(comparison.arms) for run in arm.runs if run is not arm.first
    ]
