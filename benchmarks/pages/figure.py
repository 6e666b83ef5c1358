"""docs/img/spend.svg: gap closed against spend."""

from __future__ import annotations

from typing import Any

from gnmr.lab.bench.scenes import EACH
from pages.layout import Results, by_name, listed, spends
from pages.spend import SPEND, prices_bought, scene_of

MARKS = {"price": "o", "gap": "s", "gradient norm": "^", "MSE": "D", "GNMR": "<", "first_last": "v", "random": "x"}
"""What the figure shows, and its mark; a scene's controllers are dotted where it has pins of the same name."""
LASTING = ("price", "gap", "gradient norm", "MSE", "GNMR, each step", "first_last", "random")
PASSING = (*(f"{name}{EACH}" for name in ("price", "gap", "MSE", "GNMR", "random")), "price", "random")
ARMS = {"broken": PASSING}
"""Of the figure, by scene; others are lasting."""
TITLES = {
    "sim_e2m1": "the error lasts: E2M1 operands",
    "nvfp4_curve": "the error lasts: NVFP4",
    "int4": "the error lasts: 4-bit inputs",
    "broken": "one FP8 operator breaks for 20 of 40 steps",
}


def spend_figure(results: Results) -> bytes:
    """docs/img/spend.svg: gap closed against spend, a panel a scene of several budgets."""
    import io

    import matplotlib as mpl
    import numpy as np
    from matplotlib.ticker import PercentFormatter

    from gnmr.lab.report.style import COLOURS, FAINT, INK, STYLE, foot, new_figure

    records = [one for one in results.records(SPEND) if _num_budgets(one) > 1]
    with mpl.rc_context(STYLE | {"svg.hashsalt": "gnmr", "svg.fonttype": "path"}):
        columns = len(records) if len(records) < 4 else 2
        rows = len(records) // columns
        figure, panels = new_figure(4.2 * columns, 4.4 * rows, rows, columns, share=True)
        for axes, record in zip(panels, records, strict=True):
            figures = by_name(record)
            scene = scene_of(record)
            for arm in ARMS.get(scene, LASTING):
                points = [found for name, found in figures.items() if name.startswith(f"{scene}: {arm} at ")]
                if not points:
                    continue
                spent = [spends(found) for found in points]
                closed = [found["value"] for found in points]
                bars = np.transpose([(max(f["value"] - f["low"], 0), max(f["high"] - f["value"], 0)) for f in points])
                place = list(MARKS).index(arm.removesuffix(EACH))
                look: dict[str, Any] = {"color": COLOURS[place], "marker": MARKS[arm.removesuffix(EACH)], "ms": 5}
                look |= {"lw": 2.2 if arm.startswith("price") else 1.1, "ls": "-"}
                if scene in ARMS and not arm.endswith(EACH):
                    look |= {"ls": ":", "mfc": "none"}
                axes.errorbar(spent, closed, bars, **look, elinewidth=0.8, capsize=2, label=arm)
            if bought := prices_bought(results, scene):
                axes.plot(*zip(*bought.values(), strict=True), color=INK, lw=1.2, ls="--", label="prices in the pins")
            axes.axhline(1, color=FAINT, lw=1)
            axes.axhline(0, color=INK, lw=1)
            axes.set_title(TITLES.get(scene, scene))
            if scene in ARMS or axes is panels[0]:  # panels of lasting errors have the same arms
                axes.legend(loc="center right" if scene in ARMS else "lower right")
            if axes in panels[-columns:]:
                axes.set_xlabel("share of the GEMMs' arithmetic in 16 bits")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(PercentFormatter(1, decimals=0))
        for axes in panels[::columns]:
            axes.set_ylabel("gap closed, validation in 16 bits")
        blocks = [str(found["n"]) for one in records for found in one["figures"] if "smallest effect" in found["name"]]
        foot(figure, f"forks of 40 steps, {listed(blocks)} blocks, 95 % intervals")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _num_budgets(record: dict[str, Any]) -> int:
    """How many budgets pins by price were given."""
    return sum(": price at " in found["name"] for found in record["figures"])
