"""A diagnosis as one page of HTML (`page.html.j2`) that loads nothing and runs no script.

`View` and the functions below it are what the terminal shows too (terminal.py): where operators stand in the heat map,
the KL that the plan, the usual rules and plans of other budgets leave, and the totals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.errors import first_few, plural, printable
from gnmr.measure.gemm_costs import GemmCost, PathCost, format_nats
from gnmr.pages import render
from gnmr.plan.diagnosis import CURVE, Diagnosis, label, left_out, limit_origin, plan_label, token_line
from gnmr.plan.gemm_times import without_times

_TOP = 10
"""GEMMs that are named."""
_MOST_BESIDE = 4
"""Parts outside the plan that are named."""
_STEPS = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of the largest value from which a cell has the next color."""
_RESCUES = 3
"""Largest number of rescues that have a column in the table of budgets."""


class View:
    """A diagnosis as a heat map of layers by kinds of operators, such as `q_proj`, and what the plan keeps of it."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self.pins = diagnosis.pins or diagnosis.choice().pins
        self.unit = "nats of loss" if diagnosis.measured.kl is None else "nats of KL"
        self.top = diagnosis.worst()[:_TOP]
        self.end = max((row.interval[1] for row in self.top if math.isfinite(row.interval[1])), default=0.0) or 1.0
        """The end of the longest bar."""
        self._prefix = "model." if all(name.startswith("model.") for name in diagnosis.operators) else ""
        self.outside: list[GemmCost] = []
        """fprop of operators whose names have no layer: a head, those of an `nn.Sequential`."""
        by_kind: dict[tuple[str, str], dict[int, list[GemmCost]]] = {}
        for row in (row for row in (*diagnosis.rows, *diagnosis.unplanned) if row.gemm == "fprop"):
            # The first number in a name is the layer. The tower is before it, and the kind after it.
            names = row.operator.split(".")
            at = next((i for i, name in enumerate(names[:-1]) if name.isdecimal()), None)
            if at is None:
                self.outside.append(row)
                continue
            inner = ["*" if name.isdecimal() else name for name in names[at + 1 : -1]]
            kind = ".".join(names[:at]), ".".join([*inner, names[-1]])
            by_kind.setdefault(kind, {}).setdefault(int(names[at]), []).append(row)
        # Kinds are called by their last words, or by their whole names if two would be called the same.
        labels = [kind.rpartition(".")[2] for _, kind in by_kind]
        if len(set(labels)) < len(labels):
            towers = len({tower for tower, _ in by_kind}) > 1
            labels = [f"{tower}.{kind}" if towers else kind for tower, kind in by_kind]
        self.kinds = dict(zip(map(printable, labels), by_kind.values(), strict=True))
        """fprop by kind, in the model's order, and layer. Experts of one layer share a cell."""
        self.layers = sorted({layer for by_layer in self.kinds.values() for layer in by_layer})
        cells = [rows for by_layer in self.kinds.values() for rows in by_layer.values()]
        cells += [[row] for row in self.outside]
        # Colors are relative to the plan's cells, since a part outside the plan may be far larger.
        planned = (self.sum(rows) for rows in cells if rows[0].operator in diagnosis.operators)
        self.largest = max(planned, default=0.0)

    @staticmethod
    def sum(rows: Iterable[GemmCost]) -> float:
        """Return the sum of the values."""
        return math.fsum(row.value for row in rows)

    def pinned(self, rows: Iterable[GemmCost]) -> int:
        """Return how many of these GEMMs are kept on another recipe."""
        return sum(row.gemm in self.pins.get(row.operator, {}) for row in rows)

    def on(self, row: GemmCost) -> str:
        """Return the recipe that the plan keeps the GEMM on; empty for none."""
        return self.pins.get(row.operator, {}).get(row.gemm, "")

    def name(self, row: GemmCost) -> str:
        """Return the operator's name without the `model.` that all of them share."""
        return printable(row.operator.removeprefix(self._prefix))

    def color(self, rows: Iterable[GemmCost]) -> int:
        """Return the number of the cell's color."""
        return shade(self.sum(rows), self.largest, _STEPS)


def shade(value: float, largest: float, steps: Sequence[float]) -> int:
    """Return 0 for nothing, up to one more than there are steps for the largest."""
    return 1 + sum(value >= step * largest for step in steps) if value > 0 else 0


@dataclass(frozen=True)
class ChoiceRow:
    """What remains when fprop of some operators is on other recipes than the low one."""

    label: str
    extra: float
    """Extra GEMM time, as a share."""
    estimated: float
    """Sum of the values, nats."""
    measured: PathCost | None
    """On the held-out batches."""
    excess: tuple[float, float] | None
    """Nats more than under the plan, and half the width of the 95% interval."""
    rescue: str | None = None
    """The only recipe of pins, of a plan on one of several rescues."""


def choice_rows(diagnosis: Diagnosis) -> list[ChoiceRow]:
    """Return what remains without pins, under the plan, and under the usual rules; [] under a plan's pins."""
    if diagnosis.pins or (diagnosis.against and not diagnosis.choice().pins):
        return []
    rows = [ChoiceRow("nothing kept", 0.0, diagnosis.total, diagnosis.held_out, None)]
    rescue_of = {f"{rescue} alone": rescue for rescue in diagnosis.singles}
    for name, draws in {"plan": [diagnosis.choice()], **diagnosis.alternatives}.items():
        extra, after = (float(np.mean([getattr(choice, key) for choice in draws])) for key in ("extra", "after"))
        cost, excess = diagnosis.remaining.get(name), diagnosis.excess.get(name)
        name_shown = plan_label(diagnosis) if name == "plan" else label(name)
        rows.append(ChoiceRow(name_shown, extra, after, cost, excess, rescue_of.get(name)))
    return rows


def budget_rows(
    diagnosis: Diagnosis, choices: Sequence[ChoiceRow]
) -> tuple[list[str], list[tuple[float, list[PathCost | float]]]]:
    """Return what remains under plans of several budgets, and under those on each of several rescues alone.

    Returns:
        The headings, and for each extra GEMM time the costs below them, or their estimates in nats.
    """
    plan = choices[1]
    alone = [row for row in choices[2:] if row.rescue is not None][:_RESCUES]
    # Without held-out batches, every cell is an estimate.
    points: list[tuple[float, PathCost | None]] = [(extra, None) for extra in CURVE]
    if diagnosis.remaining:
        points = sorted([*diagnosis.curve, (plan.extra, diagnosis.remaining["plan"])], key=lambda point: point[0])
    rows = []
    for extra, measured in points:
        cells: list[PathCost | float] = [measured or diagnosis.choice(extra).after]
        for row in alone:
            at_plan = row.measured if extra == plan.extra else None
            cells.append(at_plan or diagnosis.choice(extra, row.rescue).after)
        rows.append((extra, cells))
    return [plan.label, *(row.label for row in alone)], rows


def time_name(diagnosis: Diagnosis) -> str:
    """Return what extra time is called; of two sides it is a share."""
    return "share of the GEMM time" if diagnosis.against or diagnosis.sides else "extra GEMM time"


def recipes_line(diagnosis: Diagnosis) -> str:
    """Return how many GEMMs are on which recipe, how long it takes, and what groups of operators cost."""
    counts = ", ".join(f"{number} on {name} (time {time:g})" for name, time, number in diagnosis.recipes_in_use())
    line = f"GEMMs: {counts}; extra time {diagnosis.extra_of_all(diagnosis.choice()):+.1%} of all GEMMs"
    if diagnosis.groups:
        more = diagnosis.choice().after - diagnosis.choice(free=True).after
        line += f"; one recipe for each {' and each '.join(diagnosis.fused)} leaves {short(max(0.0, more))} nats more"
    return line


def times_line(diagnosis: Diagnosis) -> str:
    """Return the shapes that a file of measured times lacks; empty if it lacks none, or if there is no such file."""
    recipes = [diagnosis.recipe, *diagnosis.rescues]
    shapes = without_times(diagnosis.operators.values(), recipes, diagnosis.times)
    if not shapes:
        return ""
    return f"not in the file of times on {', '.join(recipes)}, so 1 : 2 : 4 by bits: {first_few(shapes)}"


def totals(diagnosis: Diagnosis) -> list[str]:
    """Return lines about the diagnosis as a whole.

    Returns:
        The two most important lines first: what everything in low precision costs, and the sum of single values.
    """

    def line_of(cost: PathCost) -> str:
        rise = f"; loss {cost.high:.4f} to {cost.low:.4f}, {loss(cost)}" if cost.high is not None else ""
        value = f"{with_half(cost)} nats of KL" if cost.kl is not None else "no KL, as there are no logits"
        return f"{value}{rise}; {plural(cost.batches, 'batch')}"

    summed = f"single values add up to {format_nats(diagnosis.total)} nats"
    if diagnosis.interaction is not None:
        summed += f", interaction {diagnosis.interaction:+.2g}"
        if diagnosis.interacts:
            summed += " (large: errors of several GEMMs work together, so only what was measured of a plan is sure)"
    if diagnosis.limit is not None:
        summed += f"; detection limit {short(diagnosis.limit)} ({limit_origin(diagnosis)})"
    if diagnosis.gate is not None:
        summed += f"; gate {short(diagnosis.gate)}"
    paths = paths_name(diagnosis)
    lines = [f"{paths}: {line_of(diagnosis.measured)}", summed]
    if diagnosis.chooses:
        lines += filter(None, [recipes_line(diagnosis), times_line(diagnosis)])
    if diagnosis.held_out is not None:
        lines.append(f"{paths}, held-out batches: {line_of(diagnosis.held_out)}")
        if tokens := token_line(diagnosis):
            lines.append(tokens)
    lines += beside(diagnosis)
    for gemm in ("dgrad", "wgrad") if diagnosis.estimate != "measured" else ():
        worst = [row for row in diagnosis.worst(gemm)[:3] if row.value > 0]
        errors = ", ".join(f"{row.operator} {short(row.value)} (bias {row.bias or 0.0:+.1g})" for row in worst)
        lines.append(f"largest relative squared errors of {gemm}: {errors or 'none'}")
    return [*lines, *left_out(diagnosis)]


def beside(diagnosis: Diagnosis) -> list[str]:
    """Return a line on the parts outside the plan, the highest ones first.

    Returns:
        A list of this line; empty if no such part was measured.
    """
    rows = sorted(diagnosis.unplanned, key=lambda row: -row.value)
    if not rows:
        return []
    words = [f"{row.operator} {'≈ ' if row.measured is None else ''}{short(row.value)}" for row in rows[:_MOST_BESIDE]]
    more = [f"and {len(rows) - _MOST_BESIDE} more"] if len(rows) > _MOST_BESIDE else []
    return [f"outside the plan and the sum, each measured alone: {', '.join([*words, *more])}"]


def paths_name(diagnosis: Diagnosis) -> str:
    """Return what is compared with what."""
    if diagnosis.against:
        return "the rollout against the trainer"
    return f"{diagnosis.recipe} under the plan" if diagnosis.pins else f"everything on {diagnosis.recipe}"


def page(diagnosis: Diagnosis, title: str, origin: Mapping[str, Any], plan: str | None = None) -> str:
    """Return the page.

    Args:
        diagnosis: what it shows.
        title: its title.
        origin: where its numbers come from, as in diagnosis.json.
        plan: the text of plan.json, if it should be on the page.
    """
    choices = choice_rows(diagnosis)
    return render(
        "page.html.j2",
        Path(__file__).parent,
        (format_nats, short, half_width, with_half, cell_text, loss, tokens),
        command="diagnose",
        diagnosis=diagnosis,
        view=View(diagnosis),
        paths=paths_name(diagnosis),
        title=title,
        choices=choices,
        budgets=budget_rows(diagnosis, choices) if choices else None,
        time_name=time_name(diagnosis),
        fprop=[row for row in (*diagnosis.rows, *diagnosis.unplanned) if row.gemm == "fprop"],
        rows={(row.operator, row.gemm): row for row in diagnosis.rows},
        coherent={row.operator for row in diagnosis.coherent},
        totals=totals(diagnosis),
        plan_text=plan,
        card=_card(diagnosis, origin),
        origin=origin.get("command") or "gnmr.diagnose",
    )


def _card(diagnosis: Diagnosis, origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the model, data and machine of the diagnosis, as names and texts."""
    subject, machine = (origin.get(key) or {} for key in ("subject", "machine"))
    batches = plural(diagnosis.measured.batches, "batch")
    if diagnosis.held_out is not None:
        batches += f" + {diagnosis.held_out.batches} held out"
    if {"batch_size", "block"} <= origin.keys():
        batches += f" of {origin['batch_size']} x {origin['block']} tokens"
    parameters, cores = subject.get("parameters"), machine.get("cores")
    card: dict[str, list[Any]] = {
        "subject": [subject.get("name")],
        "model": [subject.get("model"), parameters and f"{parameters:,} parameters", subject.get("dtype")],
        "recipe": [f"{diagnosis.recipe}, {'trainer' if diagnosis.against else 'against'} {diagnosis.recovery}"],
        "data": [origin.get("data"), batches],
        "machine": [machine.get("device"), machine.get("cpu"), cores and plural(cores, "core")],
        "run": [f"{key} {subject[key]}" for key in ("arm", "config", "seed", "step") if subject.get(key) is not None],
        "made with": [f"{key} {origin[key]}" for key in ("commit", "gnmr", "torch") if origin.get(key)],
        "took": [f"{origin['seconds']:.0f} s" if origin.get("seconds") else None],
    }
    texts = {name: ", ".join(f"{text}" for text in values if text) for name, values in card.items()}
    return [(name, text) for name, text in texts.items() if text]


def short(value: float | None) -> str:
    """Return the number with two significant digits."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.2g}"


def half_width(noise: float) -> str:
    """Return half the width of a 95% interval, where there is one."""
    return f" ± {short(noise)}" if math.isfinite(noise) else ""


def with_half(cost: PathCost) -> str:
    """Return what a path costs."""
    return format_nats(cost.nats) + half_width(cost.noise)


def cell_text(cost: PathCost | float) -> str:
    """Return what a path costs, or its estimate in nats."""
    return with_half(cost) if isinstance(cost, PathCost) else f"≈ {format_nats(cost)}"


def tokens(cost: PathCost | None) -> str:
    """Return what a path does to single tokens, as a further clause; empty if it was not measured."""
    if cost is None or cost.same_top is None or cost.kl_99 is None:
        return ""
    return f"; top prediction unchanged for {cost.same_top:.1%} of tokens, 99th percentile {format_nats(cost.kl_99)}"


def loss(cost: PathCost | None) -> str:
    """Return by how much the loss rises."""
    return "-" if cost is None or cost.cost is None else f"{cost.cost:+.3g}{half_width(cost.loss_noise)}"
