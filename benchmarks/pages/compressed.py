"""Compressed gradients: docs/results/compressed.md."""

from __future__ import annotations

from typing import Any

from gnmr.lab.bench.compressed import CONTRASTS
from gnmr.lab.bench.rise import LATER, SCORES
from pages.forks import tested
from pages.layout import Results, by_name, origin, table_head, table_row

COMPRESSED = ("compressed.json", "compressed-hook.json", "compressed-rise.json")


def compressed(results: Results) -> str:
    """docs/results/compressed.md"""
    records = results.records(COMPRESSED)
    text = [
        "# Compressed gradients: gap closed",
        "",
        "Forks of two trained bases (0.9 M LLaMA in 16 bits, 24 steps, two virtual workers): the share of the gap",
        "from never recovering (one row of each matrix is sent) to dense gradients that an arm closes, validation",
        "loss, mean over bases and orders of the data; a block is one of each. *Sends* is of dense gradients, the",
        "difference of perplexity. Routed arms have a tenth of what recovery of everything would send more,",
        "`more rows` and PowerSGD the largest rank that sends no more; gnmr/lab/bench/compressed.py has the arms.",
        "",
        tested("Arms", results.beside(records[0]), CONTRASTS, "dense", "sent")[1].markdown(),
        *_hook(results.read("compressed-hook.json")),
        *_rise(results.read("compressed-rise.json")),
    ]
    return "\n".join([*text, *origin(records)])


def _hook(record: dict[str, Any]) -> list[str]:
    """What compressing costs a step."""
    figures = by_name(record)

    def ratio(where: str, arm: str, told: str) -> str:
        one = figures.get(f"{where}: {arm}, {told} over dense")
        if one is None:
            return "-"
        between = "" if one["low"] is None else f" ({one['low']:.2f} to {one['high']:.2f})"
        return f"{one['value']:.2f}x{between}"

    machine, steps = record["machine"], figures["two processes: GreedyLore, CPU time over dense"]["note"].split()[-2]
    load = f"{machine['cores']} cores with a load of {machine['load_average'][0]:.0f}"
    text = [
        "## What compressing costs a step",
        "",
        "`gnmr bench hook`: steps over dense ones that take turns with them (0.9 M LLaMA, four rows of each matrix),",
        "two workers, medians with their 95 % intervals. Processes are gloo's, on one machine: the wall clock has",
        f"waiting in it, on {load} beside it, CPU time has not. No network is spared",
        "anything here, so what compressing wins is not in it.",
        "",
        *table_head(["arm", "sends", "two processes", "their CPU time", "virtual workers", "their CPU time"]),
    ]
    for arm in ("low", "recovery", "refresh", "PowerSGD", "GreedyLore"):
        sends = figures.get(f"two processes: {arm}, step over dense", {"note": "sends -"})["note"].split()[1]
        cells = [
            ratio(where, arm, told) for where in ("two processes", "virtual workers") for told in ("step", "CPU time")
        ]
        text.append(table_row([f"all, a basis every {steps} steps" if arm == "GreedyLore" else arm, sends, *cells]))
    return [*text, ""]


def _rise(record: dict[str, Any]) -> list[str]:
    """What compressing one matrix does to the loss of a step."""
    figures = by_name(record)
    bases = list(dict.fromkeys(name.partition(": ")[0] for name in figures))
    text = [
        "## What compressing one matrix does to the loss of a step",
        "",
        "`gnmr bench rise`: in four steps of each base that never recovers, the rise of the held-out loss when one",
        "matrix at a time takes the low path, against a dense step; what could tell it, by rank, and its sum over that",
        "of the rises, of what is in nats. gnmr/lab/bench/rise.py has the definitions, docs/compressed.md the derivation.",
        "",
        *table_head(["estimate", *(f"{base}: Spearman" for base in bases), *(f"{base}: over rises" for base in bases)]),
    ]
    for score in SCORES:
        ranks = [f"{figures[f'{base}: Spearman, {score}']['value']:.2f}" for base in bases]
        sums = [figures.get(f"{base}: {score} over rises") for base in bases]
        text.append(table_row([score, *ranks, *("-" if one is None else f"{one['value']:.2f}x" for one in sums)]))
    text += ["", "All matrices in one step, and what is left of that rise after as many dense steps:", ""]
    text += table_head(
        ["base", "rise, nats", *(f"{what}, {steps}" for what in ("held back", "lost") for steps in LATER[1:])]
    )
    for base in bases:
        whole = figures[f"{base}: rise of all matrices in one step, nats"]
        names = (f"{steps} dense steps, {what}" for what in ("held back", "lost") for steps in LATER[1:])
        left = [f"{figures[f'{base}: left of the rise after {name}']['value']:.0%}" for name in names]
        text.append(table_row([base, f"{whole['value']:.4f}", *left]))
    notes = (figures[f"{base}: rise of all matrices in one step, nats"]["note"] for base in bases)
    return [*text, "", *(f"- {base}: {note}." for base, note in zip(bases, notes, strict=True)), ""]
