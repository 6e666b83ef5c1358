"""A plan by estimates against a plan by measured KLs, at the same processor time: which leaves less KL?

    python benchmarks/measured.py rows OUT.jsonl CHECKPOINT [TEXT] [--recipes nvfp4,fp8_hybrid,...] [--draws 3]
    python benchmarks/measured.py table OUT.jsonl

`rows`: for each recipe and draw, both arms read sequences of the same pool of TEXT, which no other draw reads:

    measured    `measure="all"`: the KL of each operator alone on the recipe, by forward passes of one sequence
    estimated   one backward pass a batch, of as many sequences as the processor time of `measured` allows

Each arm solves its plan at each budget, with BF16 as the rescue. The KL that the plan leaves is measured on held-out
sequences, the same for all plans. Rows that OUT.jsonl has already are not run again.

`table`: by recipe and budget, the KL left by each arm, and the difference of the two with its interval. The unit is the
draw, because a plan is made once in a draw. The interval is Student's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from gnmr.conversion import PathSpec
from gnmr.lab.data.batch import Batch
from gnmr.lab.evaluation.blocks import blocks_of
from gnmr.lab.evaluation.subjects import load_subject
from gnmr.lab.train.provenance import commit
from gnmr.plan.diagnose import diagnose
from gnmr.plan.diagnosis import Diagnosis
from plans import forward_of, kl_left

RECIPES = "nvfp4,fp8_hybrid,sim_e2m1,sim_int4"
BUDGETS = (0.1, 0.3)
RESCUE = "bf16"
HELD_OUT = 16
"""Sequences on which the KL left is measured."""
POOL = 64
"""Sequences of a draw. The estimate reads as many of them as its time allows."""
CALIBRATION = 4
"""Sequences of the estimate that tells what a sequence costs."""


def timed(model: Any, sequences: Sequence[Batch], recipe: str, measure: str) -> tuple[Diagnosis, float]:
    """Return the diagnosis on these sequences, one a batch, and the seconds of all threads that it took."""
    began = time.process_time()
    diagnosis = diagnose(
        model, forward_of(model), sequences, recipe=recipe, rescue=RESCUE, measure=measure, confirm=0, held_out=[]
    )
    return diagnosis, time.process_time() - began


def estimated(model: Any, pool: Sequence[Batch], recipe: str, seconds: float) -> tuple[Diagnosis, float, int]:
    """Return the estimate that takes about `seconds`, its own seconds, and the number of its sequences."""
    least = pool[:2]
    _, seconds_of_two = timed(model, least, recipe, "estimate")
    _, seconds_of_more = timed(model, pool[:CALIBRATION], recipe, "estimate")
    per_sequence = max((seconds_of_more - seconds_of_two) / (CALIBRATION - len(least)), 1e-9)
    number = len(least) + int((seconds - seconds_of_two) / per_sequence)
    number = min(max(number, len(least)), len(pool))
    return *timed(model, pool[:number], recipe, "estimate"), number


def make_rows(asked: argparse.Namespace) -> None:
    """Append the rows that OUT.jsonl lacks."""
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    known = {(row["recipe"], row["draw"]) for row in map(json.loads, lines)}
    subject = load_subject(str(asked.checkpoint))
    model = subject.model.float().eval()
    blocks = blocks_of(subject, asked.text, batches=POOL * asked.draws, held_out=HELD_OUT, size=1)
    for draw in range(asked.draws):
        pool = blocks.batches[POOL * draw : POOL * (draw + 1)]
        for recipe in asked.recipes.split(","):
            if (recipe, draw) in known:
                continue
            measured, seconds = timed(model, pool[:1], recipe, "all")
            estimate, seconds_of_estimate, number = estimated(model, pool, recipe, seconds)
            arms = {"measured": (measured, seconds, 1), "estimated": (estimate, seconds_of_estimate, number)}
            rows = []
            for arm, (diagnosis, cpu_seconds, sequences) in arms.items():
                for budget in BUDGETS:
                    choice = diagnosis.choice(budget)
                    spec = PathSpec.of(recipe, "bf16", targets=diagnosis.targets, backend="simulated", pins=choice.pins)
                    kl = kl_left(model, blocks.held_out, spec)
                    row: dict[str, Any] = {"recipe": recipe, "draw": draw, "arm": arm, "budget": budget}
                    row |= {"sequences": sequences, "cpu_seconds": round(cpu_seconds, 1), "extra": choice.extra}
                    row |= {"pins": sum(map(len, choice.pins.values())), "kl": float(kl.mean()), "kls": kl.tolist()}
                    rows.append(row | {"commit": commit()})
                    print({key: value for key, value in row.items() if key != "kls"}, flush=True)
            with asked.out.open("a") as file:  # both arms of a draw or neither
                file.write("".join(json.dumps(row) + "\n" for row in rows))


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return, by recipe and budget, the KL left by each arm, their paired difference and its 95% interval."""
    lines = []
    for (recipe, budget), cell in rows.groupby(["recipe", "budget"], sort=False):
        by_draw = cell.pivot(index="draw", columns="arm", values="kl")
        difference = by_draw.measured - by_draw.estimated
        half_width = difference.sem() * stats.t.ppf(0.975, len(difference) - 1)
        seconds, sequences = (cell.groupby("arm")[key].mean() for key in ("cpu_seconds", "sequences"))
        line: dict[str, Any] = {"recipe": recipe, "budget": budget, "draws": len(difference)}
        line |= {arm: by_draw[arm].mean() for arm in ("estimated", "measured")}
        line |= {"measured - estimated": difference.mean(), "±": half_width}
        line |= {f"CPU s {arm}": seconds[arm] for arm in ("estimated", "measured")}
        lines.append(line | {"sequences estimated": sequences["estimated"]})
    return pd.DataFrame(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    maker = modes.add_parser("rows")
    maker.add_argument("out", type=Path)
    maker.add_argument("checkpoint", type=Path)
    maker.add_argument("text", type=Path, nargs="?", help="none for a run: its validation data")
    maker.add_argument("--recipes", default=RECIPES)
    maker.add_argument("--draws", type=int, default=3)
    reader = modes.add_parser("table")
    reader.add_argument("out", type=Path)
    asked = parser.parse_args()
    if asked.mode == "rows":
        make_rows(asked)
    else:
        rows = pd.DataFrame([json.loads(line) for line in asked.out.read_text().splitlines()])
        print(table(rows).to_string(index=False, float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main()
