"""The report as one page: opens from disk, loads nothing, drawn by plotly in the browser.

`write_html` gathers plain numbers (sections.py, unit_map.py), packs them (pack.py) and puts them with plotly.js into
page.html, which holds all that the browser runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from gnmr.errors import writing
from gnmr.lab.report.binning import binned
from gnmr.lab.report.comparisons import Comparison, by_experiment
from gnmr.lab.report.curves import Curves, mean_of_units
from gnmr.lab.report.faults import Findings
from gnmr.lab.report.html import sections
from gnmr.lab.report.html.pack import script_json
from gnmr.lab.report.html.sections import Tree
from gnmr.lab.report.html.unit_map import unit_map
from gnmr.lab.report.layout import Table
from gnmr.lab.report.runs import Run
from gnmr.lab.report.style import COLOURS
from gnmr.lab.report.tables import comparison_tables, run_table
from gnmr.records.output import write_text

MAP_CHARACTERS = 9_000_000
"""Room for the risk maps, so that a page with plotly's 4.8 million characters stays under 15 MB."""
TITLE = "gnmr report"


def write_html(
    comparisons: Sequence[Comparison], runs: Sequence[Run], path: Path, *, tables: Sequence[Table] = ()
) -> None:
    """Writes the page (`gnmr.records.output`), folders above it included.

    Args:
        comparisons: `compare(runs)`; the page shows one at a time.
        runs: all runs, for the table of provenance.
        path: the file.
        tables: further tables over all comparisons, such as the paper's.

    Raises `UserError` where the file cannot be written.
    """
    trees: list[Tree] = []
    room = MAP_CHARACTERS
    for comparison in comparisons:
        tree, used = _comparison(comparison, room)
        room -= used
        trees.append(tree)
    experiments = by_experiment(comparisons)
    data = {
        "title": TITLE,
        "colours": COLOURS,
        "comparisons": trees,
        "tables": [made.tree() for made in tables if made.rows],
        "tables_origin": sections.origin(runs),
        "tokens": {name: sections.tokens(mine) for name, mine in experiments.items()},
        "regimes": {},
        "runs": run_table(list(runs), path.parent).tree(),
    }
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8").replace("<!-- title -->", escape(TITLE))
    before, rest = page.split("<!-- plotly -->")
    between, after = rest.split("<!-- data -->")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join([before, get_plotlyjs(), between, script_json(data), after]))


def _comparison(comparison: Comparison, room: int) -> tuple[Tree, int]:
    """The comparison's tree and the characters that its maps take."""
    maps: list[tuple[int, int, Tree]] = []
    left_out: list[str] = []
    found, means = Findings(comparison), Curves()
    width, used = sections.step_width(comparison), 0
    for place, run in _runs_in_order(comparison):
        arm, ratios = comparison.arms[place], run.ratios()  # one run's at a time: a long run's matrices are large
        if len(ratios.steps) == 0:
            continue
        if (mean := mean_of_units(ratios)) is not None:
            means[run.folder] = binned(*mean, width, "mean")
        found.add(run, ratios)
        if not left_out:
            tree = sections.run_map(arm, run, ratios, unit_map(run, ratios), found.windows(run))
            size = len(script_json(tree))
            if used + size <= room:
                used += size
                maps.append((place, run.seed, tree))
                continue
        left_out.append(sections.run_label(arm, run))
    return {
        "name": _name(comparison),
        "experiment": comparison.kind.experiment,
        "overview": sections.overview(comparison),
        "arms": sections.arms(comparison),
        "tables": [one.tree() for one in comparison_tables(comparison)],
        "losses": sections.losses(comparison),
        "gnmr": sections.gnmr(comparison, means),
        "promotion": sections.promotion(comparison),
        "maps": [tree for _, _, tree in sorted(maps, key=lambda entry: entry[:2])],
        "left_out": left_out,
        "faults": [one.tree() for one in found.tables()],
        "origin": sections.origin(comparison.runs),
    }, used


def _name(comparison: Comparison) -> str:
    """With what keeps it apart from others of its name."""
    apart = ", ".join(f"{what} {here}" for what, (here, _) in comparison.apart().items())
    return f"{comparison.name} ({apart})" if apart else comparison.name


def _runs_in_order(comparison: Comparison) -> list[tuple[int, Run]]:
    """Runs by the number of their arm: each arm's first one, then the others, so that no arm is without a map."""
    every = [(place, run, run is arm.first) for place, arm in enumerate(comparison.arms) for run in arm.runs]
    return [(place, run) for first in (True, False) for place, run, is_first in every if is_first == first]
