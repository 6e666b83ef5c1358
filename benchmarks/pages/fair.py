"""What in the evidence is the optimizer's, the rounding's, the length's or the evaluation's: docs/results/fair.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gnmr.lab.bench.fair import FAMILIES, MORE, WHOLE, arms_of
from gnmr.lab.bench.scenes import EACH
from pages.layout import Results, by_name, origin, table_head, table_row


def fair(results: Results) -> str:
    """docs/results/fair.md"""
    rows, families = results.lines("fair.jsonl"), results.read("fair.json")
    recorded = results.read("fair-lengths.json")
    figures = by_name(recorded)
    apart = figures["recorded: gap after 500 steps less that after 250"]
    low, high = apart["low"], apart["high"]
    own, pins, each = _ranks(results)
    moved = [r["second_moments_fell"] for r in rows if r["cell"]["optimizer"] == "beta2 0.95"]
    stuck = [r["second_moments_fell"] for r in rows if r["cell"]["optimizer"] == "beta2 0.999"]
    text = [
        "# Fair baselines, fair stress",
        "",
        "What in the evidence is the optimizer's, the rounding's, the length's or the evaluation's. Losses are",
        "validation losses on the 16-bit path, nats. 2-bit saved activations, 8 bits on the recovery path.",
        "",
        "## Optimizer, switching and rounding",
        "",
        f"In the last steps of {len(stuck)} forks and runs with beta2 0.999 at most {max(stuck):.0%} of Adam's second",
        f"moments fell, of {len(moved)} with 0.95 {min(moved):.0%} to {max(moved):.0%}: they are bfloat16,",
        "which rounds a thousandth away.",
        "",
        *_from_scratch(by_name(families)),
    ]
    text += [
        "",
        "## A trained base",
        "",
        "Forks of seed0_600, beta2 0.999, never minus always by order of the data.",
        "",
    ]
    text += table_head(["steps", *(f"order {n}" for n in range(3))])
    forks = {(r["cell"]["arm"], r["cell"]["order"]): r["after"] for r in rows if r["cell"]["base"] == "seed0_600"}
    for step in ("20", "40"):
        gaps = (forks["never", n][step] - forks["always", n][step] for n in range(3))
        text.append(table_row([step, *(f"{gap:+.4f}" for gap in gaps)]))
    text += [
        "",
        "## Length and annealing, from the packed records",
        "",
        "Rate 1.5e-3, five seeds of schedules of 500 steps, three of 1,000. The gap grows by",
        f"{apart['value']:.3f} nats ({low:.3f} to {high:.3f}, {apart['note']}) from step 250 to 500.",
        "",
        *table_head(["run", *(f"{n} steps" for n in (200, 250, 300, 500, 1000))]),
    ]
    for arm in ("never", "always", "1,000 steps, 8 bits", "1,000 steps, 16 bits"):
        found = (figures.get(f"schedules: {arm} after {n} steps") for n in (200, 250, 300, 500, 1000))
        name = f"500 steps, {arm}" if arm in ("never", "always") else arm
        text.append(table_row([name, *("-" if one is None else f"{one['value']:.3f}" for one in found)]))
    text += [
        "",
        "## Evaluation on the low path",
        "",
        "E2M1 operands, forks of docs/results/spend.md at 10 % of the GEMMs: share of the gap that is closed, mean",
        "over all blocks. On the low path what is pinned stays in 16 bits; what a controller chose in every step does",
        "not.",
        f"Spearman of the two columns over all budgets: {pins:.2f} for pins, {each:.2f} for controllers.",
        "",
        *table_head(["arm", "in 16 bits", "on the low path"]),
        *(table_row([arm, f"{loss:.0%}", f"{low:.0%}"]) for arm, (loss, low) in own.items()),
    ]
    commits = ",".join(dict.fromkeys(r["commit"] for r in rows))
    whence = [*origin([families, recorded])]
    whence[-1:] = [
        f"- benchmarks/results/fair.jsonl: rows of commits {commits}.",
        "- benchmarks/results/spend-sim_e2m1.jsonl: as docs/results/spend.md.",
        "",
    ]
    return "\n".join([*text, "", *whence])


def _from_scratch(figures: dict[str, Any]) -> Iterator[str]:
    """Families of `gnmr bench fair only=scratch,more`: arms, what is tested, and what could have been seen."""
    last, names = f", {WHOLE[-1]} steps", FAMILIES | MORE
    arms = [f"after {step}" for step in WHOLE]
    yield f"Runs of {WHOLE[-1]} steps of a schedule of 1,000, from scratch; blocks are seeds. The gap is never's loss"
    yield "less always's, a share of it is what an arm closes, and each family is one model of all its arms."
    yield ""
    yield from table_head(["family", "arm", *arms, "gap closed \\[95 %\\]", "second moments that fall"])
    for family, (_, contrasts) in names.items():
        for arm in arms_of(contrasts):
            losses = (f"{figures[f'{family}, {step} steps: loss, {arm}']['value']:.3f}" for step in WHOLE)
            fell = figures[f"{family}{last}: second moments that fell, {arm}"]["value"]
            yield table_row([family, arm, *losses, _share_of(figures.get(f"{family}{last}: {arm}")), f"{fell:.0%}"])
    yield ""
    yield from table_head(["family", "arm", "against", "share of the gap \\[95 %\\]", "n", "test (p by Holm)"])
    for family, (_, contrasts) in names.items():
        for arm, control in contrasts:
            if (one := figures.get(f"{family}{last}: {arm} - {control}")) is not None:
                yield table_row([family, arm, control, _share_of(one), str(one["n"]), one["note"]])
    yield ""
    for family in names:
        if (gap := figures.get(f"{family}{last}: gap")) is None:
            continue
        between = f"{gap['low']:.3f} to {gap['high']:.3f}, {gap['note']}"
        told = f"- {family}: always is better by {gap['value']:.3f} nats ({between})"
        least = figures.get(f"{family}{last}: smallest effect at 80 % power")
        yield told + (
            "." if least is None else f"; smallest effect {least['value']:.0%} of it at the most; {least['note']}."
        )
    if (cost := figures.get("cost of switching: beta2 0.999 less 0.95")) is not None:
        yield f"- Random less random held, nats, under beta2 0.999 less under 0.95: {cost['value']:+.3f}"
        yield f"  ({cost['low']:+.3f} to {cost['high']:+.3f}, {cost['note']})."


def _share_of(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    return f"{one['value']:.0%}" + (
        "" if one["low"] is None else f" ({100 * one['low']:.0f} to {100 * one['high']:.0f})"
    )


def _ranks(results: Results) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Of forks on E2M1 the shares closed in 16 bits and on the low path at 10 %, by arm; Spearman of the two over all
    budgets, of pins and of controllers."""
    from scipy.stats import spearmanr

    losses: dict[tuple[str, float], dict[str, list[float]]] = {}
    for row in results.lines("spend-sim_e2m1.jsonl"):
        of = losses.setdefault((row["fork"]["arm"], row["fork"]["budget"]), {"loss": [], "own_loss": []})
        for key, found in of.items():
            found.append(row[key])
    mean = {arm: {key: sum(found) / len(found) for key, found in of.items()} for arm, of in losses.items()}
    never, always = mean["never", 0.0], mean["always", 1.0]
    shares = {
        arm: tuple((never[key] - of[key]) / (never[key] - always[key]) for key in ("loss", "own_loss"))
        for arm, of in mean.items()
        if arm[1] in (0.025, 0.05, 0.075, 0.1, 0.15, 0.25)
    }
    told = [
        float(
            spearmanr(*zip(*(share for arm, share in shares.items() if arm[0].endswith(EACH) == each), strict=True))[0]
        )
        for each in (False, True)
    ]
    return {arm[0]: (share[0], share[1]) for arm, share in shares.items() if arm[1] == 0.1}, told[0], told[1]
