"""Make the plans in plans/ that follow from stored records, without a new measurement.

    python benchmarks/plans_of_records.py plans/

The prices are measured KLs of single operators (models of 0.9 M). The plan is the knapsack of `gnmr diagnose` within
BUDGET. Nothing was measured under these plans.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnmr.formats.recipes import RECIPES
from gnmr.plan.knapsack import choose, time_of_all, time_to_move, times_of
from gnmr.plan.pin_plan import PinPlan

RESULTS = Path(__file__).resolve().parent / "results"
LOW, RESCUES, BUDGET = "nvfp4", ("mxfp8", "bf16"), 0.3
SIZES = {"gate_proj": (128, 352), "up_proj": (128, 352), "down_proj": (352, 128)}
"""(inputs, outputs) of linears of the models of 0.9 M; all others are 128 -> 128."""


def plan(
    shapes: dict[str, tuple[int, int]], nats_on: dict[str, dict[str, float]], rest: int, scale: float, **texts: str
) -> PinPlan:
    """Return the plan within BUDGET.

    Args:
        shapes: (inputs, outputs) of each operator.
        nats_on: nats per token by operator and recipe.
        rest: multiplications for one token of all other GEMMs, such as the output head.
        scale: KL of everything low over the sum of all prices.
        texts: provenance.
    """
    times = times_of(shapes, [RECIPES[name] for name in (LOW, *RESCUES)])
    prices = {(name, "fprop"): nats for name, nats in nats_on.items()}
    choice = choose(prices, times, LOW, BUDGET)
    return PinPlan(
        operators=shapes,
        low=LOW,
        recovery="bf16",
        unconverted=["lm_head"],
        pins=dict(choice.pins),
        rest=rest,
        budget=BUDGET,
        extra=choice.extra,
        extra_of_all=choice.extra * time_to_move(prices, times, LOW) / time_of_all(times, LOW, rest, {}),
        prices={name: {"fprop": {on: float(f"{n:.6g}") for on, n in nats.items()}} for name, nats in nats_on.items()},
        expected=(scale * choice.before, scale * choice.after),
        provenance=texts,
    )


def of_small_models() -> Iterator[tuple[str, PinPlan]]:
    """Yield the names and plans of the models of 0.9 M, seeds 0 and 1."""
    record: Any = json.loads((RESULTS / "price-kl-bases.json").read_text())
    cells = {(cell["model"], cell["low"]): cell for cell in record["cells"]}
    for seed, model in enumerate("ab"):
        low, mxfp8 = cells[model, LOW], cells[model, "mxfp8"]["of_operators"]
        kls = zip(low["of_operators"]["name"], low["of_operators"]["kl"], mxfp8["kl"], strict=True)
        nats_on = {name: {LOW: kl, "mxfp8": kl_mxfp8, "bf16": 0.0} for name, kl, kl_mxfp8 in kls}
        shapes = {name: SIZES.get(name.rpartition(".")[2], (128, 128)) for name in nats_on}
        texts = {"record": "benchmarks/results/price-kl-bases.json", "checkpoint": f"seed{seed}_600, 0.9 M parameters"}
        yield (
            f"llama-0.9m-seed{seed}-{LOW}",
            plan(shapes, nats_on, 0, low["all_low"]["kl"] / low["single_kls"], **texts),
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, made in of_small_models():
        (folder / f"{name}.json").write_text(made.text())
        before, after = made.expected or (0.0, 0.0)
        print(
            f"{name}: {len(made.pins)} of {len(made.operators)} fprops kept, {before:.3g} -> {after:.3g} nats expected"
        )


if __name__ == "__main__":
    main()
