"""A head-to-head of plans: the KL that each way to choose recipes leaves, within one budget of counted time.

    python benchmarks/rivals.py run smollm2 .cache/smollm2 wikitext2-test.txt
    python benchmarks/rivals.py run whisper .cache/whisper .cache/whisper/speech    # see whisper.py
    python benchmarks/rivals.py report benchmarks/results/rivals-smollm2
    python benchmarks/rivals.py check benchmarks/results/rivals-smollm2

`run` appends rows to benchmarks/results/rivals-NAME.jsonl, of each plan and its KL. It goes on from there when it is
started again, also with more arms. Half-finished measurements are in runs/rivals-NAME. `report` writes the record
(.json), the rows (.parquet) and a figure (.svg). `check` fails if the record does not follow from the rows. The claims
and their tests are in rivals_claims.md, and were written before the runs.

A budget is extra time of the GEMMs that a plan may move, relative to their time on the low path: fprop of every linear
in the blocks, without the output head. 4, 8 and 16 bits take 1 : 2 : 4. Every arm is given the same budget. It uses all
of it but the time of an operator; AutoQuantize, whose constraint is bits of weights, may use less. All scores read the
same 16 sequences; the KL is measured in FP32 on 32 others.

    plan                    what `gnmr diagnose` chooses: solved by several scores of the 16 sequences, and selected
                            on 16 more
    price                   our knapsack over the prices; to MXFP8 and BF16 under NVFP4
    price, one recipe       the same to the one recipe that the rivals below have
    AutoQuantize, gradient  ModelOpt's own library with our casts; it also chooses among all recipes
    AutoQuantize, kl_div
    AutoScheme, PrismaQuant, by element, gradient norm, gradient norm squared, MSE of the input, MSE of the output
                            scores of `rival_scores.py` in our knapsack, to one recipe: MXFP8, or BF16 under FP8
    first and last, last    whole blocks from both ends or from the end, to this recipe
    last 15% in BF16        all GEMMs of the last blocks, as torchtitan and Megatron do. The rule has its own extra
                            time, at which a plan and the price are measured as well
    random                  operators in ten random orders, to this recipe
    oracle                  our knapsack over the KL of every operator alone on the held-out sequences themselves: no
                            sum of scores over operators can do better, but for their interaction. The record has the
                            rank correlation of every score with these KLs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import sem
from torch import Tensor, nn
from torch.nn.functional import nll_loss

import rival_scores
import rival_table
from gnmr.conversion import PathSpec, convert
from gnmr.conversion.unit_names import unit_of
from gnmr.errors import UserError
from gnmr.lab.data.batch import Batch
from gnmr.lab.evaluation.blocks import blocks_of
from gnmr.lab.evaluation.subjects import load_subject
from gnmr.lab.train.loss import logits_of
from gnmr.measure.kl import IGNORED, divergence
from gnmr.plan.diagnose import diagnose
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.knapsack import Choice, Prices, choose, guessed, pin_in_order
from gnmr.records import output
from rows import Rows
from timing import header

ROOT = Path(__file__).resolve().parents[1]
RESCUES = {"nvfp4": ("mxfp8", "bf16"), "fp8_hybrid": ("bf16",)}
"""Recipes that a plan may use, by low path; rivals have the first."""
BUDGETS = (0.03, 0.05, 0.1, 0.2, 0.3)
RULES = {"first and last": "first_last", "last": "last", "random": "random"}
LIBRARY = {"AutoQuantize, gradient": "gradient", "AutoQuantize, kl_div": "kl_div"}
ARMS = ("plan", "price", "price, one recipe", *rival_scores.SCORES, *RULES, rival_table.TAIL, *LIBRARY, "oracle")
"""In the order in which they are made: the quick ones first."""
DRAWS = 10
TAIL_SHARE = 0.15
SIZE = 4
"""Sequences of a batch, which share the scales of a whole tensor."""

Pins = dict[str, str]
"""Recipe of fprop, by operator."""


@dataclass(frozen=True)
class Measured:
    """A model and the sequences that it is measured on."""

    model: nn.Module
    run: rival_scores.Run
    batches: Sequence[Batch]
    """Batches of the scores."""
    selection: Sequence[Batch]
    held_out: Sequence[Batch]
    facts: Mapping[str, Any]


class Cell(NamedTuple):
    """A plan that is wanted."""

    low: str
    arm: str
    budget: float
    draw: int


def load(checkpoint: str, text: Path, sequences: int, length: int) -> Measured:
    """Load a model and its sequences.

    Args:
        checkpoint: a run or a checkpoint folder.
        text: a text file, or a folder of recordings with their texts for a speech model.
        sequences: held-out sequences; half as many are read by the scores, and half as many by the selection.
        length: tokens of a sequence.

    Raises:
        UserError: the model or the text cannot be read, or the text is too short.
    """
    held_out, others = sequences // SIZE, sequences // SIZE // 2
    subject = load_subject(checkpoint)
    blocks = blocks_of(subject, text, batches=2 * others, held_out=held_out, size=SIZE, length=length)
    model = subject.model.float().eval()
    return Measured(model, _run, blocks.batches[:others], blocks.batches[others:], blocks.held_out, subject.facts)


def _run(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return logits_of(model, batch), batch.targets


class LowPath:
    """The plans of every arm on one low path; what they need is measured when it is first asked for."""

    def __init__(self, measured: Measured, low: str, state: Path) -> None:
        """Prepare; half-finished measurements are kept in the folder `state`."""
        self.measured, self.low, self.rescues, self.state = measured, low, RESCUES[low], state / low

    def _diagnosis(self, batches: Sequence[Any], **more: Any) -> Diagnosis:
        measured = self.measured
        run: Callable[[Any], Any] = lambda batch: measured.run(measured.model, batch)
        return diagnose(measured.model, run, batches, recipe=self.low, rescue=self.rescues, **more)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        return self._diagnosis(self.measured.batches)

    @cached_property
    def times(self) -> dict[tuple[str, str], Mapping[str, float]]:
        """Return the time of every GEMM that a plan may move, by recipe."""
        return {item: time for item, time in self.diagnosis.costs.items() if item in self.diagnosis.prices}

    @cached_property
    def operators(self) -> dict[str, nn.Linear]:
        converted = convert(self.measured.model, PathSpec(low=self.low, recovery="bf16", backend="simulated"))
        try:
            linears = rival_scores.linears_of_operators(converted.operators)
        finally:
            converted.restore()
        return {name: linears[name] for name, _ in self.times}

    @cached_property
    def scores(self) -> dict[str, Prices]:
        measured = self.measured
        recipes = (self.low, *self.rescues)
        return rival_scores.measure_scores(measured.model, measured.run, measured.batches, self.operators, recipes)

    @cached_property
    def oracle(self) -> Prices:
        self.state.mkdir(parents=True, exist_ok=True)
        return self._diagnosis(self.measured.held_out, measure="all", state=self.state).prices

    def of_operators(self) -> dict[str, list[Any]]:
        """Return the operators' names, their KL alone on the held-out sequences, and their scores of the others.

        `estimate` is the price without measured KLs, which `price` has for the highest operators.
        """
        prices = {rival_table.SINGLE_KL: self.oracle, "price": self.diagnosis.prices, **self.scores}
        items, rows = [*self.times], {(row.operator, row.gemm): row for row in self.diagnosis.rows}
        values: dict[str, list[Any]] = {"name": [name for name, _ in items]}
        values |= {score: [of_score[item][self.low] for item in items] for score, of_score in prices.items()}
        return values | {"estimate": [rival_scores.estimate_of(rows[item]) for item in items]}

    @cached_property
    def _libraries(self) -> dict[str, rival_scores.AutoQuantize]:
        return {}

    def library(self, method: str) -> rival_scores.AutoQuantize:
        """Return ModelOpt's AutoQuantize in one of its modes."""
        if method not in self._libraries:
            measured, recipes = self.measured, (self.low, *self.rescues)
            self._libraries[method] = rival_scores.AutoQuantize(
                measured.model,
                measured.run,
                measured.batches,
                self.operators,
                recipes,
                method,
                self.state / f"{method}.pt",
            )
        return self._libraries[method]

    @cached_property
    def tail(self) -> Pins:
        """Return the pins of the last 15% of the blocks, rounded up to whole blocks."""
        names = [name for name, _ in self.times]
        blocks = [*dict.fromkeys(unit_of(name, "block") for name in names)]
        last = blocks[-math.ceil(TAIL_SHARE * len(blocks)) :]
        return {name: "bf16" for name in names if unit_of(name, "block") in last}

    def extra(self, pins: Mapping[str, str]) -> float:
        """Return the extra time of pins, as a share of the time of all GEMMs that a plan may move."""
        more = math.fsum(self.times[name, "fprop"][r] - self.times[name, "fprop"][self.low] for name, r in pins.items())
        return more / math.fsum(time[self.low] for time in self.times.values())

    @cached_property
    def _selection(self) -> SequenceKls:
        return SequenceKls(self.measured, self.measured.selection)

    def selected(self, budget: float) -> Pins:
        """Return the plan that `gnmr diagnose budget=...` selects.

        Like there, the plan of each score is measured on the sequences of the selection, and another score replaces the
        price only if its plan leaves less by more than the paired standard error. The prices are measured once for all
        budgets here.
        """
        diagnosis = replace(self.diagnosis, budget=budget)
        pins_of = {score: _fprop(choice) for score, choice in diagnosis.candidates().items()}
        kls = {key: self._selection.of(self.low, pins)["kls"] for key, pins in _by_key(pins_of.values()).items()}
        by_price = np.array(kls[key_of(pins_of["price"])])
        best, least = "price", by_price.mean()
        for score, pins in pins_of.items():
            left = np.array(kls[key_of(pins)])
            if (left - by_price).mean() < -sem(left - by_price) and left.mean() < least:
                best, least = score, left.mean()
        return pins_of[best]

    def cells(self, arms: Sequence[str], budgets: Sequence[float]) -> Iterator[Cell]:
        """Yield the plans that are wanted, arm by arm."""
        yield Cell(self.low, rival_table.NOTHING, 0.0, 0)
        for arm in arms:
            if arm == rival_table.TAIL or (arm == "price, one recipe" and len(self.rescues) == 1):
                continue
            for budget in budgets:
                yield from (Cell(self.low, arm, budget, draw) for draw in range(DRAWS if arm == "random" else 1))
        if rival_table.TAIL in arms:
            extra_of_tail = self.extra(self.tail)
            yield from (Cell(self.low, arm, extra_of_tail, 0) for arm in ("plan", "price", rival_table.TAIL))

    def pins(self, cell: Cell) -> Pins:
        """Return the plan of an arm."""
        if cell.arm == rival_table.NOTHING:
            return {}
        if cell.arm == rival_table.TAIL:
            return self.tail
        if cell.arm in LIBRARY:
            return self.library(LIBRARY[cell.arm]).within(cell.budget, self.extra)
        if cell.arm in RULES:
            order = guessed(RULES[cell.arm], self.operators, seed=cell.draw)
            priced = self.diagnosis.prices, self.times, self.low
            return _fprop(pin_in_order(order, *priced, self.rescues[0], cell.budget))
        if cell.arm == "plan":
            return self.selected(cell.budget)
        if cell.arm == "oracle":
            prices = self.oracle
        elif cell.arm in rival_scores.SCORES:
            prices = _on_recipes(self.scores[cell.arm], (self.low, self.rescues[0]))
        else:
            prices = self.diagnosis.prices  # by price
            if cell.arm == "price, one recipe":
                prices = _on_recipes(prices, (self.low, self.rescues[0]))
        return _fprop(choose(prices, self.times, self.low, cell.budget))


def _fprop(choice: Choice) -> Pins:
    return {name: recipes["fprop"] for name, recipes in choice.pins.items() if "fprop" in recipes}


def _on_recipes(prices: Prices, recipes: Sequence[str]) -> Prices:
    return {item: {recipe: values[recipe] for recipe in recipes} for item, values in prices.items()}


class SequenceKls:
    """The KL of plans on some sequences."""

    def __init__(self, measured: Measured, batches: Sequence[Batch]) -> None:
        """Run the model without low precision."""
        self._measured, self._batches = measured, batches
        with torch.no_grad():
            outputs = [measured.run(measured.model, batch) for batch in batches]
        self._exact = [(torch.log_softmax(logits.float(), dim=-1), targets) for logits, targets in outputs]

    @property
    def exact_loss(self) -> float:
        """The mean loss of the model without low precision, in nats per token."""
        losses = [
            nll_loss(log_p.flatten(0, 1), targets.flatten(), ignore_index=IGNORED) for log_p, targets in self._exact
        ]
        return float(torch.stack(losses).mean())

    @torch.no_grad()
    def of(self, low: str, pins: Pins) -> dict[str, list[float]]:
        """Return by sequence the KL per token, and the share of tokens whose top prediction is unchanged."""
        measured = self._measured
        of_gemms = {name: {"fprop": recipe} for name, recipe in pins.items()}
        converted = convert(measured.model, PathSpec(low=low, recovery="bf16", backend="simulated", pins=of_gemms))
        kls: list[Tensor] = []
        same: list[Tensor] = []
        try:
            for batch, (log_p, targets) in zip(self._batches, self._exact, strict=True):
                logits, _ = measured.run(measured.model, batch)
                converted.end_step()
                kls.append(divergence(log_p, logits, targets))
                counts = targets != IGNORED
                agree = (log_p.argmax(-1) == logits.argmax(-1)) & counts
                same.append(agree.sum(1) / counts.sum(1))
        finally:
            converted.restore()
        return {"kls": torch.cat(kls).tolist(), "same_top": torch.cat(same).tolist()}


# ---- rows ----


def key_of(pins: Mapping[str, str]) -> str:
    """Return a name for these pins."""
    return hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()[:16]


def _by_key(plans: Iterable[Pins]) -> dict[str, Pins]:
    """Return the plans that differ, by their names."""
    return {key_of(pins): pins for pins in plans}


def _values(rows: Rows, kind: str, *keys: str) -> set[tuple[Any, ...]]:
    """Return the values of these keys in all rows of a kind."""
    return {tuple(row[key] for key in keys) for row in rows.rows if row["kind"] == kind}


def other_than(first: Mapping[str, Any], origin: Mapping[str, Any]) -> str:
    """Return in words how a run's origin differs from that in its first row; empty if it does not."""
    for group in ("settings", "subject"):
        for key, value in json.loads(json.dumps(origin[group])).items():
            if first[group].get(key) != value:
                return f"{key} {first[group].get(key)}, not {value}"
    # It tells apart models of one shape, and texts. Rows of earlier commits lack it; threads change its last digits.
    loss = first.get("exact_loss", origin["exact_loss"])
    same = math.isclose(loss, origin["exact_loss"], rel_tol=1e-4)
    return "" if same else f"another model or text: a loss of {loss:.5g}, not {origin['exact_loss']:.5g}"


def run(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Make the plans that the file lacks, and measure each one's KL."""
    missing = {*asked.arms} & {*LIBRARY} and not (rival_scores.LIBRARIES / "modelopt").is_dir()
    if missing:
        parser.error("ModelOpt is not in .libraries: run make test-libraries, or leave its arms out of --arms")
    if asked.sequences < 4 * SIZE or asked.sequences % SIZE:
        parser.error(f"--sequences {asked.sequences}: must be a multiple of {SIZE} from {4 * SIZE} on")
    asked.results.mkdir(parents=True, exist_ok=True)
    rows = Rows(asked.results / f"rivals-{asked.name}.jsonl")
    if unknown := [*({*asked.arms} - {*ARMS}), *({*asked.low} - {*RESCUES})]:
        parser.error(f"{unknown[0]}: is none of {', '.join((*ARMS, *RESCUES))}")
    measured = load(asked.checkpoint, asked.text, asked.sequences, asked.length)
    settings = {key: getattr(asked, key) for key in ("sequences", "length", "budgets", "low")}
    held_out = SequenceKls(measured, measured.held_out)
    origin = {"settings": settings, "subject": dict(measured.facts), "exact_loss": held_out.exact_loss}
    if not rows.rows:
        rows.append({"kind": "settings", **origin} | header())
    if difference := other_than(rows.rows[0], origin):
        parser.error(f"{rows.file} was begun with {difference}; use another NAME")
    for low in asked.low:
        path = LowPath(measured, low, asked.state / f"rivals-{asked.name}")
        plans = {tuple(row[key] for key in Cell._fields): row for row in rows.rows if row["kind"] == "plan"}
        for cell in path.cells(asked.arms, asked.budgets):
            if (plan := plans.get(cell)) is None:
                pins = path.pins(cell)
                plan = {"kind": "plan", **cell._asdict(), "extra": path.extra(pins), "key": key_of(pins), "pins": pins}
                rows.append(plan)
            what = f"{low} {cell.arm} {cell.budget:.1%}: +{plan['extra']:.2%}, {len(plan['pins'])} operators"
            if (low, plan["key"]) not in _values(rows, "kl", "low", "key"):
                kls = held_out.of(low, plan["pins"])
                rows.append({"kind": "kl", "low": low, "key": plan["key"], **kls})
                what += f", {sum(kls['kls']) / len(kls['kls']):.4g} nats"
            print(what, flush=True)
        if "oracle" in asked.arms and (low,) not in _values(rows, "operators", "low"):
            rows.append({"kind": "operators", "low": low, "of_operators": path.of_operators()})
    rows.append({"kind": "complete", "arms": asked.arms})


# ---- the record ----


def record_of(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the table and the claims of rows, and the KLs by arm. Raises ValueError if the run is incomplete."""
    kls, missing = rival_table.kls_of(rows)
    if missing or rows[-1]["kind"] != "complete":
        raise ValueError("the run is incomplete; the same command as before continues it")
    table = rival_table.table(kls)
    nothing = {row.low: float(row.kls.mean()) for row in kls[kls.arm == rival_table.NOTHING].itertuples()}
    record = {"nothing": nothing, "claims": rival_table.claims(kls, table), "rows": table}
    ranks = {row["low"]: rival_table.ranks(row["of_operators"]) for row in rows if row["kind"] == "operators"}
    return record | ({"ranks": ranks} if ranks else {}), kls


def report(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Write the record, the rows and the figure."""
    rows = Rows(asked.record.with_name(f"{asked.record.name}.jsonl")).rows
    if not rows:
        parser.error(f"{asked.record}.jsonl: there are no rows; `run` writes them")
    try:
        record, _ = record_of(rows)
    except ValueError as error:
        parser.error(f"{asked.record}.jsonl: {error}")
    origin = {key: value for key, value in rows[0].items() if key != "kind"}
    file = asked.record.with_name(f"{asked.record.name}.json")
    output.write_json(file, origin | record, str(file))
    texts = [
        {key: json.dumps(value) if isinstance(value, dict) else value for key, value in row.items()} for row in rows[1:]
    ]
    pd.DataFrame(texts).to_parquet(file.with_suffix(".parquet"), index=False)
    picture = file.with_suffix(".svg")
    if any(row["arm"] in rival_table.DRAWN for row in record["rows"]):
        output.write_text(picture, rival_table.figure(record["rows"], record["nothing"]), str(picture))
    print(pd.DataFrame(record["rows"]).round(4).to_string(), json.dumps(record["claims"], indent=1), sep="\n\n")


def differing(record: Path) -> list[str]:
    """Return how the record `record`.json differs from what its rows, `record`.parquet, give."""
    frame = pd.read_parquet(record.with_name(f"{record.name}.parquet"))
    rows = [{key: value for key, value in row.items() if value is not None} for row in frame.to_dict("records")]
    for row in rows:
        for key in ("pins", "of_operators"):
            if isinstance(row.get(key), str):
                row[key] = json.loads(row[key])
    recorded = json.loads(record.with_name(f"{record.name}.json").read_text())
    recomputed = json.loads(json.dumps(record_of(rows)[0]))
    return rival_table.apart({key: recorded[key] for key in recomputed}, recomputed)


def check(asked: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Exit with code 1 if the record does not follow from its rows."""
    if lines := differing(asked.record):
        raise SystemExit("\n".join(lines))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("name")
    running.add_argument("checkpoint")
    running.add_argument("text", type=Path)
    running.add_argument("--sequences", type=int, default=32, help="held-out sequences; each half again for the plans")
    running.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    running.add_argument("--low", type=lambda words: words.split(","), default=[*RESCUES])
    running.add_argument("--budgets", type=lambda words: [float(w) for w in words.split(",")], default=[*BUDGETS])
    running.add_argument("--arms", type=lambda words: words.split(";"), default=[*ARMS], help="with semicolons")
    running.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    running.add_argument("--state", type=Path, default=ROOT / "runs")
    running.set_defaults(command=run)
    for command in (report, check):
        of_record = commands.add_parser(command.__name__)
        of_record.add_argument("record", type=Path, help="without an ending")
        of_record.set_defaults(command=command)
    asked = parser.parse_args()
    try:
        asked.command(asked, parser)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
