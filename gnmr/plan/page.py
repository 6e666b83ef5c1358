"""A diagnosis as one page of HTML (`page.html.j2`) that loads nothing and runs no script.

`View` and the functions beside it say what the terminal shows too (terminal.py): where operators stand in the heat map,
the KL that the plan and the usual rules leave, and the totals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gnmr.errors import plural, printable
from gnmr.measure.gemm_costs import GemmCost, PathCost, format_nats
from gnmr.plan.diagnosis import CURVE, Diagnosis, label, left_out

TOP = 10
"""GEMMs that are named."""
_STEPS = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of the largest value from which a cell has the next colour."""


@dataclass(frozen=True)
class Left:
    """What is left when fprop of some operators is on other recipes than the low one."""

    label: str
    extra: float
    """GEMM time that this takes more, as a share."""
    estimated: float
    """Sum of the values, nats."""
    measured: PathCost | None
    """On the held-out batches."""
    apart: tuple[float, float] | None
    """Nats more than under the plan, and half the width of the 95% interval."""
    rescue: str | None = None
    """The only one, of a plan on one of several."""


class View:
    """A diagnosis as a heat map of layers by kinds of operators, such as `q_proj`, and what the plan keeps of it."""

    def __init__(self, found: Diagnosis) -> None:
        self.found = found
        self.kept = found.pins or found.choice().pins
        low = f"{found.recipe} under the plan" if found.pins else f"everything on {found.recipe}"
        self.whole = "the rollout against the trainer" if found.against else low
        self.unit = "nats of loss" if found.measured.kl is None else "nats of KL"
        self.top = found.worst()[:TOP]
        self.reach = max((row.interval[1] for row in self.top if math.isfinite(row.interval[1])), default=0.0) or 1.0
        """The end of the longest bar."""
        self._start = "model." if all(name.startswith("model.") for name in found.operators) else ""
        self.others: list[GemmCost] = []
        """fprop of operators whose names have no layer: a head, those of an `nn.Sequential`."""
        by_kind: dict[tuple[str, str], dict[int, list[GemmCost]]] = {}
        for row in (row for row in (*found.rows, *found.unplanned) if row.gemm == "fprop"):
            parts = row.operator.split(".")
            at = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), None)
            if at is None:
                self.others.append(row)
                continue
            inner = ["*" if part.isdecimal() else part for part in parts[at + 1 : -1]]
            kind = ".".join(parts[:at]), ".".join([*inner, parts[-1]])
            by_kind.setdefault(kind, {}).setdefault(int(parts[at]), []).append(row)
        labels = [kind.rpartition(".")[2] for _, kind in by_kind]
        if len(set(labels)) < len(labels):
            several = len({start for start, _ in by_kind}) > 1
            labels = [f"{start}.{kind}" if several else kind for start, kind in by_kind]
        self.kinds = dict(zip(map(printable, labels), by_kind.values(), strict=True))
        """fprop by kind, in the model's order, and layer. Experts of one layer share a cell."""
        self.layers = sorted({layer for by_layer in self.kinds.values() for layer in by_layer})
        cells = [rows for by_layer in self.kinds.values() for rows in by_layer.values()] + [
            [row] for row in self.others
        ]
        planned = (self.sum(rows) for rows in cells if rows[0].operator in found.operators)
        self.largest = max(planned, default=0.0)

    @staticmethod
    def sum(rows: Iterable[GemmCost]) -> float:
        """Return the sum of the values."""
        return math.fsum(row.value for row in rows)

    def pins(self, rows: Iterable[GemmCost]) -> int:
        """Return how many of these GEMMs are kept on another recipe."""
        return sum(row.gemm in self.kept.get(row.operator, {}) for row in rows)

    def on(self, row: GemmCost) -> str:
        """Return the recipe that the plan keeps the GEMM on; empty for none."""
        return self.kept.get(row.operator, {}).get(row.gemm, "")

    def name(self, row: GemmCost) -> str:
        """Return the operator's name without the `model.` that all of them share."""
        return printable(row.operator.removeprefix(self._start))

    def colour(self, rows: Iterable[GemmCost]) -> int:
        """Return the number of the cell's colour."""
        return shade(self.sum(rows), self.largest, _STEPS)


def shade(value: float, largest: float, steps: Sequence[float]) -> int:
    """Return 0 for nothing, up to one more than there are steps for the largest."""
    return 1 + sum(value >= step * largest for step in steps) if value > 0 else 0


def choices(found: Diagnosis) -> list[Left]:
    """Return the KL left without pins, under the plan, and under the usual rules; [] under a plan's pins."""
    if found.pins or (found.against and not found.choice().pins):
        return []
    made = [Left("nothing kept", 0.0, found.total, found.held_out, None)]
    alone = {f"{rescue} alone": rescue for rescue in found.singles}
    for name, own in {"plan": [found.choice()], **found.alternatives}.items():
        extra, after = (float(np.mean([getattr(one, what) for one in own])) for what in ("extra", "after"))
        made.append(Left(label(name), extra, after, found.remaining.get(name), found.excess.get(name), alone.get(name)))
    return made


def budgets(found: Diagnosis) -> list[tuple[float, PathCost | None]]:
    """Return the extra time of the plan and of plans of other budgets, and the measurement of each."""
    if not found.remaining:
        return [(extra, None) for extra in CURVE]
    return sorted([*found.curve, (found.choice().extra, found.remaining["plan"])], key=lambda point: point[0])


def spent(found: Diagnosis) -> str:
    """Return what extra time is called; of two sides it is a share."""
    return "share of the GEMM time" if found.against or found.sides else "extra GEMM time"


def recipes_line(found: Diagnosis) -> str:
    """Return how many GEMMs are on which recipe, how long it takes, and what groups of operators cost."""
    counts = ", ".join(f"{number} on {name} (time {time:g})" for name, time, number in found.recipes_in_use())
    line = f"GEMMs: {counts}"
    if found.groups:
        more = found.choice().after - found.choice(free=True).after
        line += f"; one recipe for each {' and each '.join(found.fused)} leaves {short(max(0.0, more))} nats more"
    return line


def totals(found: Diagnosis) -> list[str]:
    """Return lines about the diagnosis as a whole, the two most important ones first."""

    def left_text(one: PathCost) -> str:
        rise = f"; loss {one.high:.4f} to {one.low:.4f}, {loss(one)}" if one.high is not None else ""
        value = f"{with_half(one)} nats of KL" if one.kl is not None else "no KL, as there are no logits"
        return f"{value}{rise}; {plural(one.batches, 'batch')}"

    summed = f"single values add up to {format_nats(found.total)} nats"
    if found.interaction is not None:
        summed += f", interaction {found.interaction:+.2g}"
        if found.interacts:
            summed += " (large: errors of several GEMMs work together, so only what was measured of a plan is sure)"
    whole = View(found).whole
    limits = (("detection limit", found.limit), ("gate", found.gate))
    lines = [
        f"{whole}: {left_text(found.measured)}",
        summed + "".join(f"; {word} {short(value)}" for word, value in limits if value is not None),
    ]
    if found.chooses:
        lines.append(recipes_line(found))
    if found.held_out is not None:
        lines.append(f"{whole}, held-out batches: {left_text(found.held_out)}")
    if found.unplanned:
        highest = max(found.unplanned, key=lambda row: row.value)
        lines.append(
            f"outside the plan and the sum, each measured alone: at most {short(highest.value)}, of {highest.operator}"
        )
    stable = found.stability()
    halves = f"rank correlation of one half of the batches with the other: {stable.halves:.2f}"
    if not found.pins:
        same = "the same operator is" if stable.top == 1 else f"the same {stable.top} operators are"
        halves += f"; {same} on top in {stable.same:.0%} of bootstrap draws"
    lines.append(halves)
    for gemm in ("dgrad", "wgrad"):
        worst = [row for row in found.worst(gemm)[:3] if row.value > 0]
        words = ", ".join(f"{row.operator} {short(row.value)} (bias {row.bias or 0.0:+.1g})" for row in worst)
        lines.append(f"largest relative squared errors of {gemm}: {words or 'none'}")
    return [*lines, *left_out(found)]


def page(found: Diagnosis, title: str, origin: Mapping[str, Any], plan: str | None = None) -> str:
    """Return the page; `origin` says where its numbers come from, `plan` is the text of plan.json."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    for function in (format_nats, short, half_width, with_half, loss, printable):
        environment.filters[function.__name__] = function
    left = choices(found)
    return environment.get_template("page.html.j2").render(
        found=found,
        view=View(found),
        title=printable(title),
        left=left,
        curve=_curve(found, left) if left else None,
        spent=spent(found),
        fprop=[row for row in (*found.rows, *found.unplanned) if row.gemm == "fprop"],
        rows={(row.operator, row.gemm): row for row in found.rows},
        coherent={row.operator for row in found.coherent},
        totals=totals(found),
        plan_text=plan,
        card=_card(found, origin),
        origin=_origin(origin),
        command=origin.get("command") or "gnmr.diagnose",
    )


def _card(found: Diagnosis, origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the model, data and machine of the diagnosis, as names and texts."""
    subject, machine = (origin.get(key) or {} for key in ("subject", "machine"))
    number, measured = subject.get("parameters"), plural(found.measured.batches, "batch")
    parameters = None if number is None else f"{number:,} parameters"
    held_out = "" if found.held_out is None else f" + {found.held_out.batches} held out"
    cores = machine.get("cores") and plural(machine["cores"], "core")
    of = f" of {origin['batch_size']} x {origin['block']} tokens" if {"batch_size", "block"} <= origin.keys() else ""
    sides = "trainer" if found.against else "against"
    card: dict[str, list[Any]] = {
        "subject": [subject.get("name")],
        "model": [subject.get("model"), parameters, subject.get("dtype")],
        "recipe": [f"{found.recipe}, {sides} {found.recovery}"],
        "data": [origin.get("data"), f"{measured}{held_out}{of}"],
        "machine": [machine.get("device"), machine.get("cpu"), cores],
    }
    return [(what, ", ".join(map(str, known))) for what, parts in card.items() if (known := [p for p in parts if p])]


def _origin(origin: Mapping[str, Any]) -> list[str]:
    """Return the rest of what repeating it takes, the command aside."""
    subject = origin.get("subject") or {}
    known = {key: subject.get(key) for key in ("arm", "config", "seed", "step")}
    known |= {key: origin.get(key) for key in ("commit", "gnmr", "torch")} | {"computed in": origin.get("computes_in")}
    seconds = origin.get("seconds")
    known["took"] = None if seconds is None else f"{seconds:.0f} s"
    return [f"{what} {value}" for what, value in known.items() if value is not None]


def _curve(found: Diagnosis, left: Sequence[Left]) -> dict[str, object]:
    """Return what the template draws: nats left by extra time, in a picture of 600 x 400.

    The rules take the same time, so their points stand side by side from it on.
    """
    plan = left[1]
    plans = [(left[0].extra, left[0].measured), *found.curve, (plan.extra, plan.measured)]
    own = sorted(((extra, one) for extra, one in plans if one and math.isfinite(one.nats)), key=lambda pair: pair[0])
    kept = [(one, one.measured) for one in left[1:] if one.measured and math.isfinite(one.measured.nats)]
    kept.sort(key=lambda pair: -pair[1].nats)
    ends = [end for one in [*(one for _, one in own), *(one for _, one in kept)] for end in _ends(one)]
    values = [value for value in (0.0, *ends, found.total, found.gate or 0.0) if math.isfinite(value)]
    low, high = min(values), max(values) * 1.08 or 1.0
    lines = [("gate", found.gate or 0.0), ("detection limit", found.limit or 0.0)]
    lines = [(word, at) for word, at in lines if high / 50 < at < high]
    right = max(2.5 * plan.extra, *(1.1 * extra for extra, _ in own), 0.05)
    estimated = {"the plan": found.left_by_time()} | {name: found.left_by_time(name) for name in found.singles}

    def x(extra: float) -> float:
        return round(76 + 514 * extra / right, 1)

    def y(value: float) -> float:
        return round(340 - 328 * (value - low) / (high - low), 1)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x(extra)},{y(value)}" for extra, value in points if value < high and extra < right)

    def point(kind: str, across: float, one: PathCost) -> tuple[object, ...]:
        return kind, across, y(one.nats), *map(y, _ends(one)), with_half(one)

    points, labels = [], []
    beside = x(plan.extra) + 8 * (len(kept) + 2)
    for at, (choice, one) in enumerate(kept, 1):
        kind, across = ("plan", x(plan.extra)) if choice is plan else ("rule", x(choice.extra) + 8 * at)
        points.append(point(kind, across, one))
        labels.append((kind, across, y(one.nats), beside, 21 * at - 9, f"{choice.label} {short(one.nats)}"))
    return {
        "across": [(x(extra), f"{extra * 100:.4g}%") for extra in ticks(0.0, right)],
        "up": [(y(value), f"{value:.6g}") for value in ticks(low, high)],
        "lines": [(word, y(at), short(at)) for word, at in lines],
        "estimated": {name: path(points) for name, points in estimated.items()},
        "measured": path((extra, one.nats) for extra, one in own),
        "points": [*points, *(point("plan", x(extra), one) for extra, one in own)],
        "labels": labels,
    }


def _ends(one: PathCost) -> tuple[float, float]:
    half = one.noise if math.isfinite(one.noise) else 0.0
    return one.nats - half, one.nats + half


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = power * next(one for one in (1, 2, 5, 10) if one * power * 5.001 >= high - low)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float | None) -> str:
    """Return the number with two significant digits."""
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def half_width(noise: float) -> str:
    """Return half the width of a 95% interval, where there is one."""
    return f" ± {short(noise)}" if math.isfinite(noise) else ""


def with_half(one: PathCost) -> str:
    """Return what a path costs."""
    return format_nats(one.nats) + half_width(one.noise)


def loss(one: PathCost | None) -> str:
    """Return by how much the loss rises."""
    return "-" if one is None or one.cost is None else f"{one.cost:+.3g}{half_width(one.loss_noise)}"
