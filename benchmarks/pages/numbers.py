"""Numbers of texts that come from records: <!--:NAME--> and, behind the number, <!--/-->."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from statistics import median

from gnmr.lab.bench.scenes import EACH, HELD
from gnmr.lab.report.family import EQUAL, Row
from gnmr.lab.report.family_notes import p_text, row_numbers
from gnmr.lab.report.statistics import BETTER, WORSE
from gnmr.names import GEMMS
from pages.blame import BLAME, causes_of, judged_of
from pages.forks import family_of
from pages.layout import ROOT, Results, listed, percent
from pages.spend import TABLE11, low_paths, prices_bought, smallest_by

TEXTS = tuple(
    ROOT / name for name in ("README.md", "docs/evidence.md", "docs/cost.md", "docs/diagnose.md", "docs/price.md")
)
"""In which they stand."""
_MARK = re.compile(r"(<!--:([^>\n]+?)-->)(.*?)(<!--/-->)")


def numbers(results: Results) -> dict[str, str]:
    """Every number that a text may name, as it stands there."""
    parts = (_spent, _table11, _low_paths, _gains, _planned, _seen, _verdicts, _cost)
    return {name: told for part in parts for name, told in part(results).items()}


_SPENT = {
    "pins": (
        "sim_e2m1",
        "10.0%",
        ("gradient norm", "gap", "MSE", "update norm", "first", "random", "last", f"GNMR{EACH}", f"price{EACH}"),
    ),
    "pins15": ("sim_e2m1", "15.0%", ("gradient norm", f"price{EACH}")),
    "inputs": ("int4", "10.0%", ("MSE", "gap", "random", "gradient norm", "first", f"GNMR{EACH}", f"price{EACH}")),
    "nvfp4": ("nvfp4_curve", "10.0%", ("MSE", "gap", "random", f"GNMR{EACH}")),
}
"""Scene, budget, and the arms that are told beside pins by price, by the first word of their numbers."""


def _spent(results: Results) -> dict[str, str]:
    """What is closed, p against pins by price, and what these hold of all prices."""
    found: dict[str, str] = {}
    for where, (scene, budget, arms) in _SPENT.items():
        figures = {
            arm: results.figures(f"spend-{scene}.json")[f"{scene}: {arm} at {budget}"] for arm in ("price", *arms)
        }
        found |= {f"{where}/{arm}": percent(figure["value"]) for arm, figure in figures.items()}
        if scene == "sim_e2m1":  # its text has the price's intervals, and one p for all arms
            low, high = (100 * figures["price"][end] for end in ("low", "high"))
            found[f"{where}/price/interval"] = f"({low:.0f} to {high:.0f})"
        else:
            found |= {f"{where}/{arm}/p": figures[arm]["note"].rpartition(" ")[2] for arm in arms}
    for where in ("pins", "inputs", "nvfp4"):
        scene, budget, _ = _SPENT[where]
        found[f"{where}/bought"] = percent(prices_bought(results, scene)[budget][1])
    whole = results.figures("spend-sim_e2m1.json")
    found |= {f"pins/{gemm}": percent(whole[f"sim_e2m1: {gemm} at 33.3%"]["value"]) for gemm in GEMMS}
    found["pins/n"] = str(whole["sim_e2m1: price at 10.0%"]["n"])
    found["pins/smallest"] = f"{100 * smallest_by(results, results.read('spend-sim_e2m1.json'))['10.0%']:.1f} %"
    smallest = results.figures("spend-int4.json")["int4: smallest effect at 80 % power"]["value"]
    return found | {"inputs/smallest": f"{100 * smallest:.1f} %"}


def _table11(results: Results) -> dict[str, str]:
    """Of its forks what is closed, and against random of its kind who is told from it and the smallest effect."""
    family, _ = family_of("", results.beside(results.records(TABLE11)[0]))
    found = {"forks11/n": str(family.n), "forks11/tests": str(len(family.rows))}
    for row in family.rows:
        name = row.arm.removesuffix(EACH)
        if name in ("price", "GNMR", "random", "price, 8 %") and row.control == "never":
            closed = row_numbers(row)
            found |= {f"forks11/{name}": closed["closed"], f"forks11/{name}/interval": closed["closed_interval"]}
    drawn = [row for row in family.rows if row.control == f"random{EACH}"]
    for verdict in (BETTER, WORSE):
        found[f"forks11/{verdict}"] = _arms(r for r in drawn if r.verdict == verdict and r.p is not None and r.p < 0.01)
    found[f"forks11/{EQUAL}"] = _arms(row for row in drawn if row.verdict == EQUAL)
    held = [row for row in family.rows if row.control == f"random{HELD}" and row.verdict == BETTER]
    found |= {"forks11/held": _arms(held), "forks11/held/p": ", ".join(p_text(row.p) for row in held)}
    smallest = {row.arm: one for row in drawn if (one := family.smallest_of(row)) is not None}
    told = {"": median(smallest.values()), "/most": max(smallest.values()), "/family": median(family.smallest())}
    told |= {f"/{name}": smallest[name + EACH] for name in ("price", "GNMR")}
    return found | {f"forks11/smallest{which}": f"{100 * one:.1f} %" for which, one in told.items()}


def _arms(rows: Iterable[Row]) -> str:
    """Their arms."""
    names = (row.arm.removesuffix(EACH).removesuffix(HELD) for row in rows)
    return listed([f"`{name}`" if "," in name else name for name in names])


def _low_paths(results: Results) -> dict[str, str]:
    """Of low paths what is closed for a tenth and p against random of its kind; the largest gap where none is shown."""
    known = {scene.removeprefix("regime_"): family for scene, (family, _) in low_paths(results).items()}
    free = [family.gap.interval for family in known.values() if family.gap and not family.gate]
    found = {"free/most": f"{max(abs(end) for interval in free for end in interval):.3f}"}
    for low in ("sim_int4", "mxfp4", "int2"):
        rows = {(row.arm, row.control): row for row in known[low].rows}
        for name in ("price", f"price{EACH}", f"GNMR{EACH}", f"random{EACH}"):
            closed = rows[name, "never"].closed
            assert closed is not None
            found[f"{low}/{name}"] = percent(closed[0])
        for name in ("price", "GNMR"):
            found[f"{low}/{name}/p"] = p_text(rows[name + EACH, "random" + EACH].p)
    return found


def _gains(results: Results) -> dict[str, str]:
    """How scores rank what training gains."""
    gains = results.figures("price-atlas.json")
    found = {"atlas/most": f"{gains['seed0_600, sim_e2m1, fprop: most that a score can have']['value']:.2f}"}
    for name in ("price", "gradient norm", "gap", "MSE"):
        found[f"atlas/{name}"] = f"{gains[f'seed0_600, sim_e2m1, fprop: Spearman, {name}']['value']:.2f}"
    return found


def _planned(results: Results) -> dict[str, str]:
    """What plans of `gnmr diagnose` close, and a verdict of it."""
    found = {"verdict": results.read("diagnosis-nvfp4.json")["verdict"].partition(":")[0]}
    for recipe, shares in plans_close("nvfp4", "sim_e2m1").items():
        closed = [round(100 * share) for share in shares]
        found[f"plan/{recipe}"] = f"{min(closed)} to {max(closed)} %"
        found[f"plan/{recipe}/orders"] = ", ".join(map(str, closed)) + " %"
    return found


def _seen(results: Results) -> dict[str, str]:
    """Faults and outlier channels that signals find."""
    faults = results.read("detection-cpu.json")["signals"]
    found = {"faults": str(sum(kind["windows"] for kind in _finite(faults["gnmr"])))}
    for key, signal in (("GNMR", "gnmr"), ("dGNMR", "gnmr_delta"), ("path", "grad_to_noise")):
        found[f"faults/{key}"] = str(sum(kind["detected"] for kind in _finite(faults[signal])))
    for name, record in (("outliers", "detection-outliers-cpu"), ("outliers/bf16", "detection-outliers-bf16-cpu")):
        windows = results.read(f"{record}.json")["signals"]["gnmr"]["all"]
        found[f"{name}/GNMR"] = f"{windows['detected']}"
        found["outliers"] = f"{windows['windows']}"
    return found


def _verdicts(results: Results) -> dict[str, str]:
    """On planted causes and on ordinary spikes."""
    planted, spikes = (results.read(name) for name in BLAME)
    right, judged = map(sum, zip(*map(judged_of, planted["arms"].values()), strict=True))
    causes = causes_of(spikes)
    return {
        "planted": f"{right} of {judged}",
        "spikes": str(sum(causes.values())),
        "spikes/precision": str(causes["precision"]),
    }


def _cost(results: Results) -> dict[str, str]:
    """What a controller and a low path cost a step."""
    found = {"step/int4": f"{results.figures('all-cpu.json')['step with int4 over bf16']['value']:.2f}x"}
    for name, record in (
        ("two", "controller-cpu"),
        ("one", "controller-one-thread-cpu"),
        ("avx2", "controller-avx2-cpu"),
    ):
        figures = results.figures(f"{record}.json")
        whole = figures["step with over step without"]
        found[f"step/{name}"] = f"{100 * (whole['value'] - 1):.1f} %"
        found[f"step/{name}/interval"] = f"({100 * (whole['low'] - 1):+.1f} to {100 * (whole['high'] - 1):+.1f})"
        found[f"step/{name}/parts"] = f"{100 * figures['controller and records, share of a step']['value']:.2f} %"
    return found


def plans_close(*recipes: str) -> dict[str, list[float]]:
    """By recipe the shares of the gap to 16 bits that the plan of `gnmr diagnose` closed, by order of the data."""
    from gnmr.lab.records.find import find_runs
    from gnmr.lab.records.pack import unpacked
    from gnmr.lab.report.comparisons import compare
    from gnmr.lab.report.forks import losses_after
    from gnmr.lab.report.runs import load

    with unpacked([ROOT / "runs" / "reference" / "diagnosed_plans.parquet"]) as found:
        arms = [arm for comparison in compare(map(load, find_runs(found.paths))) for arm in comparison.arms]
        losses = {arm.name: losses_after(arm, "low", "val_loss") for arm in arms}
    closed = {}
    for recipe in recipes:
        low, plan, high = (losses[f"{recipe}_bf16{arm}"] for arm in ("-always_low", "_pins-always_low", "-always_high"))
        closed[recipe] = [(low[order] - plan[order]) / (low[order] - high[order]) for order in sorted(low)]
    return closed


def _finite(kinds: dict[str, dict[str, int]]) -> Iterator[dict[str, int]]:
    """Of the faults whose numbers are finite."""
    return (found for kind, found in kinds.items() if kind not in ("all", "nan", "inf"))


def filled(text: str, known: dict[str, str]) -> str:
    """The text with its marked `numbers`. KeyError for a name that there is not."""
    return _MARK.sub(lambda found: f"{found[1]}{known[found[2]]}{found[4]}", text)
