"""The value of a plan: the fraction of the BF16 loss gap that its pins recover, against their extra GEMM time.

    python benchmarks/plans.py forks OUT.jsonl data.path=FOLDER --base RUN,RUN --low sim_e2m1,nvfp4 --orders 5
    python benchmarks/plans.py kl OUT.jsonl --base .cache/smollm2 --data wikitext2-test.txt --low nvfp4
    python benchmarks/plans.py table OUT.json ROWS.jsonl ...
    python benchmarks/plans.py figure OUT.svg RECORD [--low nvfp4]
    python benchmarks/plans.py figure OUT.svg FORKS.json PRICES.json
    python benchmarks/plans.py solver OUT.json

`forks`: a fork continues a base for 40 steps in low precision with the pins of its arm. Its loss is the validation loss
in BF16 afterwards. Forks of one base and data order share their data. They form a replicate.
Words without a dash are overrides of the config; bases of your own text need their data.path. A plan is made once on a
base, so a test over bases needs several, at least four:

    for seed in 0 1 2 3 4 5; do gnmr train experiment=fork_base training.seed=$seed run_dir=runs/base-$seed; done

    never, always           no pin, and every GEMM in BF16
    plan                    the plan of `gnmr.diagnose` on this base, of MXFP8 and BF16 pins. `forks` measures the KL of
                            the 99 highest operators by either estimate (all of a small model), `kl` of the 20 highest
    price, estimated        the plan by the estimates alone, to MXFP8. It runs only if --arms names it, because claims
                            (5) and (6) were written without it
    mxfp8, bf16             its plans with a single recipe: pins by price
    MSE, random             operators in the order of the input's squared error, or at random; to MXFP8, the cheaper
                            recipe. `random` has ten draws, which are spread over the data orders
    by element              the knapsack of the plan over the sum of squares by element (the score of AutoQuantize),
    gradient norm           or over the squared gradient norm; to MXFP8
    first and last, last    whole blocks from both ends, or from the end; to MXFP8
    last, bf16              the last blocks to BF16, as in published recipes
    GNMR, price, any        a controller moves operators to MXFP8 step by step: by dGNMR, by price, or at random

All pins and moves are of fprop and fill the same budget: extra time of fprop of all operators, as in `gnmr diagnose`,
where 4 : 8 : 16 bits take 1 : 2 : 4. `never` and `always` come first. If the 95% interval of the gap between them is
not above 0, no other arm runs.

`kl`: the remaining KL divergence per token of a checkpoint under the same arms, without training. It is measured on
`--held-out` blocks of another part of the text, in FP32.

These claims were written down before any measurement. Their +10% was a share of all three GEMMs of the operators, which
is +30% of fprop alone:

(1) at +30% the plan recovers at least 90% of the gap of E2M1;
(2) at +30% it is better than BF16 pins by price, p < 0.01, on either low path;
(3) it is not worse than either recipe alone at any budget;
(4) on SmolLM2 it leaves less KL than BF16 pins of the same extra time at every budget.

These were written down before the rerun on six checkpoints (seeds 0 to 5, one order each, +30%), and on six more with
`model.outlier_channels={number: 2, gain: 20}`, which the two checkpoints of the first runs had. A test is a paired
t-test over the checkpoints, two-sided and Holm-adjusted over the arms of a low path (`p_adjusted` of the table):

(5) the plan saves more nats than random, last, and first and last, p < 0.05, on either low path;
(6) no arm saves more than the plan, p < 0.05, on either low path.

They were written down again before forks of four English models of 1.2 M parameters (english.yaml, seeds 0 to 3,
training.steps=1200), with one order each, +30%, and the same tests. There the gap of a low path must differ from 0;
otherwise nothing is compared on it. The interval of the gap is two-sided for this; before, `forks` went on if a
one-sided test had p < 0.05, as it had for these models in NVFP4.

Every row is written when it is done, and rows that OUT.jsonl has already are not run again.

`table`: from rows of `forks`, the fraction of the gap that each arm recovers, and its paired difference from the plan.
The unit is the checkpoint that a plan was made on; `--each-base` makes a table of every checkpoint, over its orders. A
low path has no rows if the interval of its gap, over all replicates, is not above 0.

`figure`: one low path of a record as a curve with 95% intervals. It shows the remaining KL from rows of `kl`, or the
fraction of the gap recovered from the JSON of `table`. With the JSON of `table --each-base` and of price.py, it shows
what low precision costs by model size.

`solver`: time and memory to choose among 630, 10,000 and 30,000 GEMMs with random prices and two recipes each.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import nn

import curve
from forks import ForkResult, Forks
from gnmr.conversion import PathSpec, convert
from gnmr.conversion.converted import ConvertedModel
from gnmr.conversion.cost import gemm_time
from gnmr.formats import Recipe
from gnmr.lab.config import Config
from gnmr.lab.data.batch import Batch
from gnmr.lab.evaluation.blocks import blocks_of
from gnmr.lab.evaluation.subjects import load_subject
from gnmr.lab.train.build import validation
from gnmr.lab.train.loss import logits_of
from gnmr.lab.train.provenance import commit
from gnmr.measure.kl import divergence
from gnmr.names import GEMMS
from gnmr.plan.diagnose import diagnose
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.knapsack import Choice, as_choice, by_score, choose, front, guessed, pin_in_order
from gnmr.records import output
from rival_scores import estimate_of
from rival_table import holm
from rows import Rows
from timing import header, write

BOUNDS = ("never", "always")
RESCUES = ("mxfp8", "bf16")
ESTIMATED = "price, estimated"
ARMS = (
    "plan",
    ESTIMATED,
    *RESCUES,
    "MSE",
    "by element",
    "gradient norm",
    "random",
    "first and last",
    "last",
    "last, bf16",
)
DEFAULT_ARMS = tuple(arm for arm in ARMS if arm != ESTIMATED)
GUESSED = {"random": "random", "first and last": "first_last", "last": "last"}
DRAWS = 10
"""Draws of `random` on a base."""
SIGNALS = {"GNMR": "gnmr_delta", "price": "price", "any": "random"}
BUDGETS = (0.09, 0.15, 0.3, 0.6, 0.9)
DRAWN = {
    "plan": "plan: MXFP8 and BF16",
    "bf16": "plan: BF16 alone",
    "random": "random to MXFP8",
    "last, bf16": "last blocks to BF16",
}
"""Arms of the figure."""
MEASURED = 16
"""Validation sequences that a diagnosis reads; forks are validated on other ones."""


@dataclass(frozen=True)
class Cell:
    """A fork without its outcome."""

    base: str
    low: str
    arm: str
    budget: float
    order: int
    draw: int = 0


def pins_of(cell: Cell, diagnosis: Diagnosis) -> Choice:
    """Return the pins of an arm."""
    priced = diagnosis.prices, diagnosis.costs, cell.low
    # A norm squared estimates the Fisher information, to which the KL is proportional if all relative errors are equal.
    powers = {"by element": ("elements", 1), "gradient norm": ("gradient norm", 2)}
    values = None
    if cell.arm in powers:
        name, power = powers[cell.arm]
        values = {(o, "fprop"): {cell.low: score**power, "mxfp8": 0.0} for o, score in diagnosis.scores[name].items()}
    elif cell.arm == ESTIMATED:
        values = {
            (row.operator, row.gemm): {cell.low: estimate_of(row), "mxfp8": row.rescued["mxfp8"]}
            for row in diagnosis.rows
            if row.gemm == "fprop"
        }
    if values is not None:
        pins = choose(values, diagnosis.costs, cell.low, cell.budget).pins
        return as_choice({(name, "fprop"): "mxfp8" for name in pins}, *priced)  # in nats
    if cell.arm == "plan":
        return diagnosis.choice(cell.budget)
    if cell.arm in RESCUES:
        return diagnosis.choice(cell.budget, cell.arm)
    if cell.arm == "MSE":
        return pin_in_order(by_score(diagnosis.scores["mse"], diagnosis.operators), *priced, "mxfp8", cell.budget)
    rule, _, rescue = cell.arm.partition(", ")
    order = guessed(GUESSED[rule], diagnosis.operators, seed=cell.draw)
    return pin_in_order(order, *priced, rescue or "mxfp8", cell.budget)


def unseen(both: Batch, validated: int) -> Batch:
    """Return `MEASURED` sequences of `both`, 2 `validated` of them, that lie between the ones that forks validate."""
    if len(both) < 2 * validated:
        raise SystemExit(f"the validation text has {len(both)} sequences of this length, not {2 * validated}")
    step = 2 * max(1, validated // MEASURED)
    between = slice(1, MEASURED * step, step)
    positions = None if both.positions is None else both.positions[between]
    return Batch(both.tokens[between], both.targets[between], positions)


class Base:
    """A base of forks: its data, its diagnosis under each low path, and the forks that were run."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.forks = Forks(name, print)
        self._words = words
        self._diagnosis_of: dict[str, Diagnosis] = {}
        self._times: dict[tuple[str, bool], tuple[float, float, float]] = {}
        self._run: dict[str, ForkResult] = {}

    def config(self, low: str, *words: str) -> Config:
        """Return the config of a fork; by default without a controller and with BF16 for pins."""
        usual = ("precision.recovery=bf16", "controller.signal=always_low")
        return self.forks.config(f"precision.low={low}", *usual, *words, *self._words)

    def diagnosis(self, low: str) -> Diagnosis:
        """Return the diagnosis of the base under a low path."""
        if low in self._diagnosis_of:
            return self._diagnosis_of[low]
        parts = self.forks.parts(config := self.config(low))
        parts.converted.restore()
        training, model = config.training, parts.model.float()
        both = validation(config, parts.corpus, 2 * training.eval_sequences)
        batches = unseen(both, training.eval_sequences).to(parts.device).split(training.batch_size // 2)
        self._diagnosis_of[low] = diagnose(model, forward_of(model), batches, recipe=low, rescue=RESCUES, confirm=99)
        return self._diagnosis_of[low]

    def row(self, cell: Cell) -> dict[str, Any]:
        """Return the row of a fork. Forks with the same pins share one run."""
        words, moves = [f"training.seed={cell.order}", "fork.heal=0"], cell.arm in SIGNALS
        if moves:
            words += ["precision.recovery=mxfp8", "precision.recovers=[fprop]", "controller.routing=ranked"]
            words += [f"controller.signal={SIGNALS[cell.arm]}", "controller.max_o=null", "controller.budget=1"]
        config = self.config(cell.low, *words)
        if (cell.low, moves) not in self._times:
            self._times[cell.low, moves] = times_to_move(self.forks.parts(config).converted)
        to_move, whole, share = self._times[cell.low, moves]
        if moves:
            budget = cell.budget * to_move / whole * share
            config = replace(config, controller=replace(config.controller, budget=budget))
        pins: dict[str, Any] = {"*": list(GEMMS)} if cell.arm == "always" else {}
        if cell.arm in ARMS:
            pins = pins_of(cell, self.diagnosis(cell.low)).pins
        config = replace(config, precision=replace(config.precision, pins=pins))
        key = json.dumps([cell.low, cell.order, pins, moves and repr(config)], sort_keys=True)
        if key not in self._run:
            self._run[key] = self.forks(config, phases=("low",))
        result = self._run[key]
        return {
            "loss": result.validation["low"].high,
            "extra": result.extra_time / to_move,
            "pins": sum(map(len, pins.values())),
            "steps": len(result.losses),
            "checkpoint": self.forks.base.stored.sha256[:12],
        }


def forward_of(model: nn.Module) -> Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]:
    """Return the function of a batch that `diagnose` calls: logits and targets."""
    return lambda batch: (logits_of(model, batch), batch.targets)


def times_to_move(model: ConvertedModel) -> tuple[float, float, float]:
    """Return shares of the whole model, and leave all operators recovered.

    They are the time of fprop of all operators on the low path, the extra time to recover every operator, both relative
    to the time of all GEMMs, and the share of all GEMM FLOPs that is then recovered.
    """
    for operator in model.operators:
        operator.switch(True)
    whole, low, high = model.cost.spent(), model.low, model.recovery
    assert isinstance(low, Recipe) and isinstance(high, Recipe)
    more = sum(gemm_time(high, gemm) - gemm_time(low, gemm) for gemm in model.recovers)
    return whole.extra_time * gemm_time(low, "fprop") / more, whole.extra_time, whole.share


def recorded(files: Iterable[Rows]) -> dict[Cell, dict[str, Any]]:
    """Return the rows of these files by cell."""
    rows = [row for file in files for row in file.rows]
    # Rows of earlier commits have no draw, and the seed of their random arm is the order.
    rows = [{"draw": row["order"] if row["arm"] == "random" else 0} | row for row in rows]
    return {Cell(*(row[key] for key in Cell.__dataclass_fields__)): row for row in rows}


def keep(out: Rows, known: dict[Cell, dict[str, Any]], cell: Cell, row: dict[str, Any]) -> None:
    """Append the row of a cell to `out`."""
    known[cell] = asdict(cell) | row | {"commit": commit()}
    out.append(known[cell])
    print(f"{cell}: {row.get('loss', row.get('kl')):.4f} for +{row['extra']:.1%}", flush=True)


def cells_of(bases: Sequence[str], asked: argparse.Namespace) -> Iterator[list[Cell]]:
    """Yield the bounds of a low path, then its other arms, replicate by replicate."""
    budgets, arms = [float(word) for word in asked.budgets.split(",")], asked.arms.split(";")
    for low in asked.low.split(","):
        blocks = [(base, order) for order in range(asked.orders) for base in bases]
        yield [Cell(base, low, arm, 0.0, order) for base, order in blocks for arm in BOUNDS]
        yield [
            Cell(base, low, arm, budget, order, draw)
            for base, order in blocks
            for budget in budgets
            for arm in arms
            for draw in (range(order, DRAWS, asked.orders) if arm == "random" else (0,))
        ]


def make_forks(asked: argparse.Namespace) -> None:
    """Run the cells that OUT.jsonl lacks."""
    out = Rows(asked.out)
    known = recorded([out])
    bases = {base.forks.base.name: base for base in (Base(n, asked.more) for n in (asked.base or "shipped").split(","))}
    without_gap = set[str]()
    for cells in cells_of([*bases], asked):
        low = cells[0].low
        if low in without_gap:
            continue
        for cell in (cell for cell in cells if cell not in known):
            keep(out, known, cell, bases[cell.base].row(cell))
        gaps = bounds_of(pd.DataFrame(known.values())).gap.get(low, pd.Series()).dropna()
        if lacks_gap(gaps):
            print(f"no gap (mean {gaps.mean():.4f} nats): no other arm of {low} is run")
            without_gap.add(low)


def measure_kl(asked: argparse.Namespace) -> None:
    """Measure the arms that OUT.jsonl lacks, on one checkpoint."""
    out, subject = Rows(asked.out), load_subject(asked.base)
    known = recorded([out])
    model = subject.model.float().eval()
    blocks = blocks_of(subject, asked.data, batches=8, held_out=asked.held_out)
    made: dict[str, np.ndarray] = {}
    for low in asked.low.split(","):
        cells = [Cell(asked.base, low, "never", 0.0, 0), Cell(asked.base, low, "mxfp8", 1.001, 0)]
        cells += [
            Cell(asked.base, low, arm, float(word), 0, draw)
            for word in asked.budgets.split(",")
            for arm in asked.arms.split(";")
            for draw in range(DRAWS if arm == "random" else 1)
        ]
        if all(cell in known for cell in cells):
            continue
        diagnosis = diagnose(model, forward_of(model), blocks.batches, recipe=low, rescue=RESCUES)
        print(diagnosis.verdict(), flush=True)
        for cell in (cell for cell in cells if cell not in known):
            choice = Choice({}, 0.0, 0.0, 0.0) if cell.arm == "never" else pins_of(cell, diagnosis)
            key = json.dumps([low, choice.pins], sort_keys=True)
            if key not in made:
                spec = PathSpec(
                    low=low, recovery="bf16", targets=diagnosis.targets, backend="simulated", pins=choice.pins
                )
                made[key] = kl_left(model, blocks.held_out, spec)
            kl = made[key]
            row = {"kl": float(kl.mean()), "error": float(kl.std(ddof=1) / len(kl) ** 0.5), "kls": kl.tolist()}
            row |= {"extra": choice.extra, "price": choice.after, "pins": sum(map(len, choice.pins.values()))}
            keep(out, known, cell, row)


@torch.no_grad()
def kl_left(model: nn.Module, batches: Sequence[Batch], spec: PathSpec) -> np.ndarray:
    """Return KL(model || model under `spec`) per token of each sequence."""
    high = [torch.log_softmax(logits_of(model, batch), dim=-1) for batch in batches]
    converted = convert(model, spec)
    try:
        kls = [divergence(log_p, logits_of(model, batch)) for log_p, batch in zip(high, batches, strict=True)]
    finally:
        converted.restore()
    return torch.cat(kls).cpu().numpy()


def bounds_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the losses of `never` and `always` and their difference `gap`, in nats, by low path, base and order."""
    losses = frame[frame.arm.isin(BOUNDS)].set_index(["low", "base", "order", "arm"]).loss
    bounds = losses.unstack(sort=False).reindex(columns=BOUNDS)
    return bounds.assign(gap=bounds.never - bounds.always)


def lacks_gap(gaps: pd.Series) -> bool:
    """Return whether several replicates do not show a gap: the 95% interval of its mean is not above 0."""
    return len(gaps) > 1 and not gaps.mean() - _half(gaps.sem(), len(gaps)) > 0


def table(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return, by low path, budget and arm, what forks save of the loss of `never`, and the fraction of the gap that is.

    There are no rows of a low path that `lacks_gap` over all replicates that have both bounds.

    The unit of a test is what a plan was made on: a checkpoint, whose forks are averaged over data orders. If there is
    one checkpoint alone, it is a data order of it, and nothing is said of other checkpoints. Replicates (checkpoint and
    order) with fewer arms than most are left out, because not all of their arms were run, and then arms that not every
    replicate has.

    Every row has the nats `saved`, and `closed`, the fraction of the gap, with its interval (`fraction`). Where the gap
    of a checkpoint is within its noise, `closed` is None. The paired difference from the plan is `plan_more` as a
    fraction, and `plan_more_nats` with a t-test, Holm-adjusted over the arms of a low path and budget in `p_adjusted`.
    A difference that is not shown has the smallest one that would be found with 80% probability, `detectable` nats. A
    single unit is not tested.
    """
    rows, bounds = [], bounds_of(frame)
    for (low, budget), forks in frame[~frame.arm.isin(BOUNDS)].groupby(["low", "budget"]):
        ends = bounds.loc[low]
        if lacks_gap(ends.gap.dropna()):
            continue
        ran, extra = (
            forks.pivot_table(index=["base", "order"], columns="arm", values=key) for key in ("loss", "extra")
        )
        if "plan" in ran:
            ran = ran[ran["plan"].notna()]
            arms = ran.notna().sum(axis=1)
            ran = ran[arms >= arms.mode().max()].dropna(axis=1)
        ends = ends.loc[ran.index]
        saved, bases = ran.rsub(ends.never, axis=0), ran.index.unique("base")
        unit = "base" if len(bases) > 1 else "order"
        gaps = ends.gap.groupby(unit).mean()
        about = {"low": low, "budget": budget, "n": len(ran), "checkpoints": len(bases)}
        about |= {"orders": len(ran) / len(bases), "gap": gaps.mean(), "gap_half_width": _half(gaps.sem(), len(gaps))}
        for arm in (arm for arm in (*ARMS, *SIGNALS) if arm in saved):
            values = saved[arm].groupby(unit).mean()
            row = about | {"arm": arm, "extra": extra.loc[ran.index, arm].mean()}
            row |= {"saved": values.mean(), "saved_half_width": _half(values.sem(), len(values))}
            row |= dict(zip(("closed", "closed_low", "closed_high"), fraction(saved[arm], ends.gap), strict=True))
            if arm != "plan" and "plan" in saved:
                more = (saved["plan"] - saved[arm]).groupby(unit).mean()
                row |= {"plan_more_nats": more.mean(), "plan_more_nats_half_width": _half(more.sem(), len(more))}
                names = ("plan_more", "plan_more_low", "plan_more_high")
                row |= dict(zip(names, fraction(saved["plan"] - saved[arm], ends.gap), strict=True))
                if len(more) > 1:
                    # Equal pins have no difference, and a t-test of zeros has no p-value.
                    row["p"] = float(stats.ttest_1samp(more, 0.0).pvalue) if more.any() else 1.0
                    if more.any() and not row["p"] < 0.05:
                        power = float(stats.t.ppf(0.975, len(more) - 1) + stats.t.ppf(0.8, len(more) - 1))
                        row["detectable"] = power * more.sem()
            rows.append({key: float(v) if isinstance(v, np.floating) else v for key, v in row.items()})
        tested = {str(row["arm"]): row for row in rows if (row["low"], row["budget"]) == (low, budget) and "p" in row}
        for arm, p in holm({arm: row["p"] for arm, row in tested.items()}).items():
            tested[arm]["p_adjusted"] = p
    return rows


def _half(error: float, n: int) -> float:
    """Return half the width of the 95% interval of a mean of `n` values with this standard error (Student's t)."""
    return float(stats.t.ppf(0.975, n - 1) * error)


Fraction = tuple[float | None, float | None, float | None]
"""A fraction and the ends of its 95% interval."""


def fraction(saved: pd.Series, gaps: pd.Series) -> Fraction:
    """Return the fraction of the gap that is saved; both by checkpoint (`base`) and order.

    It is the mean over checkpoints of their fractions, with Student's interval; of a checkpoint alone it is `fieller`
    over its orders, and of checkpoints with one order each `fieller` over them. None if a gap is within its noise.
    """
    if len(saved) == saved.index.unique("base").size:
        return fieller(saved, gaps)
    ratios = [fieller(of_base, gaps[of_base.index]) for _, of_base in saved.groupby("base")]
    values = [ratio for ratio, _, _ in ratios if ratio is not None]
    if len(values) < len(ratios) or len(values) == 1:
        return ratios[0] if len(ratios) == 1 else (None, None, None)
    mean, half = float(np.mean(values)), _half(float(stats.sem(values)), len(values))
    return mean, mean - half, mean + half


def fieller(above: pd.Series, below: pd.Series) -> Fraction:
    """Return the ratio of the means of pairs, and its 95% interval by Fieller's theorem (1954).

    The interval has all ratios r for which a paired t-test does not tell the mean of above - r below from 0. It is
    bounded only if the mean of `below` differs from 0; otherwise all three are None.

    >>> fieller(pd.Series([1.0, 1.0, 1.0]), pd.Series([2.0, 2.0, 2.0]))
    (0.5, 0.5, 0.5)
    """
    number = len(above)
    if number < 2:
        return None, None, None
    square = float(stats.t.ppf(0.975, number - 1)) ** 2 / number
    (of_above, both), (_, of_below) = np.cov(above, below)
    # The limits solve (mean below^2 - square of_below) r^2 - 2 (mean above mean below - square both) r + ... = 0.
    a = below.mean() ** 2 - square * of_below
    b = above.mean() * below.mean() - square * both
    c = above.mean() ** 2 - square * of_above
    if a <= 0:
        return None, None, None
    half = math.sqrt(max(b * b - a * c, 0.0)) / a
    return float(above.mean() / below.mean()), float(b / a - half), float(b / a + half)


def figure(record: Path, lows: Sequence[str]) -> str:
    """Return the curve of a record of one low path; SystemExit if it has several of `lows`, or none."""
    of_forks = record.suffix == ".json"
    all_rows = json.loads(record.read_text())["rows"] if of_forks else recorded([Rows(record)]).values()
    if (number := len({row["low"] for row in all_rows} & {*lows})) != 1:
        raise SystemExit(f"{record}: has {number} of these low paths; name one of it with --low")
    rows = pd.DataFrame([row for row in all_rows if row["low"] in lows]).sort_values("extra")
    if of_forks:
        rows = rows[rows.closed.notna()]
        rows = rows.assign(half_width=(rows.closed_high - rows.closed_low) / 2)
    else:
        means = {"extra": "mean", "kls": lambda draws: np.mean([*draws], axis=0)}  # over the draws of an arm
        rows = rows.groupby(["low", "arm", "budget"], as_index=False).agg(means).sort_values("extra")
        rows = rows.assign(kl=[kls.mean() for kls in rows.kls])
        rows = rows.assign(half_width=[_half(stats.sem(kls), len(kls)) for kls in rows.kls])
    value, low = "closed" if of_forks else "kl", rows.low.iloc[0].removeprefix("sim_").upper()
    points = {arm: of_arm[["extra", value, "half_width"]].to_numpy() for arm, of_arm in rows.groupby("arm")}
    start = np.zeros((1, 3)) if of_forks else points["never"]
    return curve.svg(
        {label: np.concatenate([start, points[arm]]) for arm, label in DRAWN.items()},
        (1.0, "everything in BF16", True) if of_forks else (float(start[0, 1]), f"everything in {low}", False),
        across="extra GEMM time",
        up="Fraction of the loss gap recovered" if of_forks else "KL divergence from the BF16 model, nats per token",
        percent=of_forks,
    )


def by_size(forks: Path, prices: Path) -> str:
    """Return the curve of what low precision costs by model size: the KL of everything, and the loss gap of forks."""
    gaps = json.loads(forks.read_text())["gaps"]
    points: dict[str, list[tuple[float, float, float]]] = {}
    places = {}
    for cell in json.loads(prices.read_text())["cells"]:
        low, size = cell["low"].removeprefix("sim_").upper(), cell["subject"]["parameters"] / 1e6
        places[f"{size:.3g} M"] = at = float(np.log10(size))
        kl, gap = cell["all_low"], gaps[f"{cell['model']} {cell['low']}"]
        sequences = cell["settings"]["held_out"] * cell["settings"]["size"]
        points.setdefault(f"{low}: KL", []).append((at, kl["kl"], _half(kl["kl_error"], sequences)))
        points.setdefault(f"{low}: loss gap", []).append((at, gap["mean"], _half(gap["sem"], gap["size"])))
    arms = {label: np.array(sorted(of_label)) for label, of_label in points.items()}
    across, up = "parameters (logarithmic)", "Cost of low precision, nats per token"
    return curve.svg(arms, (0.0, "", True), across=across, up=up, places=places)


def solver() -> list[dict[str, Any]]:
    """Return seconds and peak memory of `choose`, and what is left at the next step of the greedy front."""
    choose({}, {("a", "fprop"): {"low": 1.0}}, "low", 0.1)  # imports SciPy
    rows = []
    for number in (630, 10_000, 30_000):
        draw = np.random.default_rng(0)
        area = draw.choice([576 * 576, 576 * 192, 576 * 1536], number)
        low, mid = draw.lognormal(-7, 2, number), draw.uniform(0.02, 0.3, number)
        items = [(f"layers.{i // 21}.{i % 7}", GEMMS[i // 7 % 3]) for i in range(number)]
        times = {item: {"low": a, "mid": 2 * a, "high": 4 * a} for item, a in zip(items, area.tolist(), strict=True)}
        each = zip(items, low.tolist(), (low * mid).tolist(), strict=True)
        prices = {item: {"low": one, "mid": less, "high": 0.0} for item, one, less in each}
        for budget in BUDGETS:
            begin = time.perf_counter()
            choice = choose(prices, times, "low", budget)
            row = {"gemms": number, "budget": budget, "seconds": time.perf_counter() - begin, "extra": choice.extra}
            least = next(after for extra, after in front(prices, times, "low") if extra >= budget)
            row |= {"left": choice.after / choice.before, "next_step": least / choice.before}
            rows.append(row | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024})
    return rows


def write_table(asked: argparse.Namespace) -> None:
    """Write the gaps and the table of the rows to `OUT.json`, and print them."""
    all_rows = recorded(Rows(Path(file)) for file in asked.more).values()
    frame = pd.DataFrame([row for row in all_rows if not asked.base or row["base"] in asked.base.split(",")])
    if frame.empty:
        raise SystemExit(f"no row of {asked.base or 'any base'} in {', '.join(asked.more)}")
    kinds, rows = ["low"], table(frame)
    if asked.each_base:
        kinds = ["base", "low"]
        rows = [{"base": base} | row for base, of_base in frame.groupby("base") for row in table(of_base)]
    gaps = bounds_of(frame).gap.dropna().groupby(kinds).agg(["mean", "sem", "size"])
    said = {" ".join(np.atleast_1d(key)): row for key, row in gaps.to_dict("index").items()}
    output.write_json(asked.out, header() | {"gaps": said, "rows": rows}, str(asked.out))
    print(gaps.round(4).to_string(), pd.DataFrame(rows).round(4).to_string(), sep="\n\n")


def draw(asked: argparse.Namespace) -> None:
    """Write the figure of one record, or of the records of forks and prices."""
    drawn = (
        by_size(*map(Path, asked.more)) if len(asked.more) == 2 else figure(Path(asked.more[0]), asked.low.split(","))
    )
    output.write_text(asked.out, drawn, str(asked.out))


PARTS = {
    "forks": make_forks,
    "kl": measure_kl,
    "table": write_table,
    "figure": draw,
    "solver": lambda asked: write(asked.out, solver()),
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("out", type=Path)
    parser.add_argument("more", nargs="*", help="for forks, overrides of the config; for table and figure, records")
    parser.add_argument("--base", help="run folders, with commas; for forks shipped without it, for a table all")
    parser.add_argument("--low", default="sim_e2m1,nvfp4")
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--data", type=Path, help="the text of kl")
    parser.add_argument("--held-out", type=int, default=8, help="batches of 4 blocks of 128 tokens")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--each-base", action="store_true", help="a table of each base in place of one of all")
    parser.add_argument("--arms", default=";".join(DEFAULT_ARMS), help="with semicolons between them")
    asked = parser.parse_intermixed_args()
    if asked.what == "kl" and not asked.base:
        parser.error("kl: name a run or a checkpoint folder with --base")
    if asked.what in ("table", "figure") and not asked.more:
        parser.error(f"{asked.what}: name the record to read")
    torch.set_num_threads(1)
    PARTS[asked.what](asked)


if __name__ == "__main__":
    main()
