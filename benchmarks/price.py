"""Prices against the truth: the KL divergence per token of each operator in low precision, measured one by one.

    python benchmarks/price.py OUT.json --models .cache/smollm2 --data wikitext2-test.txt --low nvfp4,fp8_hybrid
    python benchmarks/price.py OUT.json --models runs/a,runs/b --batches 16 --held-out 16 --block 256 --draws 16
    python benchmarks/price.py OUT.json --models A,B --operators 0 --batches 0 --held-out 12 --size 1 --block 512
    python benchmarks/price.py OUT.json --table

Models are run folders (measured on their own validation data) and checkpoint folders (on `--data`), computed in FP32,
on a GPU if there is one. Labels drawn on a GPU differ from a CPU's.
The truth of an operator is the KL divergence per token, in nats, between the model and the model with this operator's
fprop in low precision. The increase of the loss on the data's labels is measured too. Estimates come from other tokens
of the same text. `data` are the text's own labels, and `drawn` are drawn from the model (`--draws` backward passes per
batch). Estimates are squared token by token, or summed over each sequence before they are squared.

This claim was written down before any measurement. On every low path and model, held out, the estimate with drawn
labels by sequence has a Spearman correlation of at least 0.95 with the single KLs, and its sum is within 20% of theirs.

If there are more than `--operators` operators, a sample is measured. So many are spread evenly over kinds and depth.
Beside them are the twelve highest by data labels by token, by drawn labels by token and by drawn labels by sequence.
Sums are then over the sample. The interaction is the KL of all operators at once minus the sum of single KLs; it uses
the estimates of operators outside the sample. Rank correlations are over those operators alone that no score chose,
because the highest of a score agree with it by choice. Their 95% intervals are percentiles of bootstrap samples of
operators. `halves` is the rank correlation of the single KLs on one half of the held-out
sequences with those on the other half: the noise of the truth, which no score can exceed by much.

With `--operators 0` only the KL of all operators at once is measured: the cost of a format. This expectation was
written down before the run: of each pair of `EXPECTED` the first has the smaller KL, paired over sequences. Scales
rounded up (mxfp8, mxfp4) saturate nothing. Four Over Six has the smaller error in every block, but with a tensor scale
of 256 instead of 448. A scale for each token keeps small tokens from the bottom of E4M3.

Each pair of a model and a low path is written when it is measured; pairs that OUT.json has already are not measured
again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata, sem, spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.conversion import PathSpec, convert
from gnmr.lab.data.batch import Batch
from gnmr.lab.evaluation.blocks import blocks_of
from gnmr.lab.evaluation.subjects import Subject, load_subject
from gnmr.lab.train.loss import logits_of
from gnmr.measure.kl import divergence, draw_labels
from gnmr.measure.operand_errors import measure_errors
from gnmr.measure.price import measure_prices
from gnmr.records import output
from timing import header

LOW = "nvfp4,mxfp4,mxfp8,fp8_hybrid,sim_e2m1,sim_e3m2,sim_int4,sim_int8"
NATS = ("data, by token", "drawn, by token", "drawn, by sequence")
"""Estimates of the KL, which also choose a sample; the claims are about the last one."""
SUMS = {"by token": "fprop", "by sequence": "fprop_sequence", "by element": "fprop_elements"}
SETTINGS = {"batches": 4, "held_out": 3, "size": 4, "block": 128, "draws": 8, "operators": 48}
TOP, SPEARMAN, SUM = 12, 0.95, 0.2
SAMPLES = 2000
"""Bootstrap samples of operators."""
EXPECTED = {
    "mxfp8": "mxfp8_floor",
    "mxfp4": "mxfp4_floor",
    "nvfp4_4over6": "nvfp4",
    "nvfp4_row_scaled": "nvfp4",
}


class Measurement:
    """One model with its operators converted to one low path."""

    def __init__(self, model: nn.Module, low: str) -> None:
        self.model = model
        spec = PathSpec.of(low, "bf16", targets=["*_proj"], backend="simulated")  # bf16: exact, in an FP32 model
        self.plan = convert(model, spec)
        self.names = [operator.operator_name for operator in self.plan.operators]
        self.put([])

    def put(self, low: Collection[int]) -> None:
        """Put these operators, and no others, on the low path."""
        for i, operator in enumerate(self.plan.operators):
            operator.switch(i not in low)

    def estimates(self, batches: Sequence[Batch], draws: int) -> dict[str, np.ndarray]:
        """Return each estimate of all operators by name, (operators,) each."""
        meter = measure_prices(self.plan, ["price_fprop"], tokens=1)
        probe = measure_errors(self.plan, ["mse"])
        found, norms = np.zeros((len(SUMS), 1 + draws, len(self.names))), np.zeros(len(self.names))
        weights = [operator.weight for operator in self.plan.operators]
        for place, batch in enumerate(batches):
            generator = torch.Generator(weights[0].device).manual_seed(place)
            meter.begin_step(place)
            meter.loss_tokens = batch.num_targets
            for draw in range(1 + draws):  # the first labels are the data's
                if draw < 2:
                    for weight in weights:
                        weight.requires_grad_(not draw)  # later passes only measure prices
                    logits = logits_of(self.model, batch).float()
                labels = draw_labels(logits, generator) if draw else batch.targets
                meter.reset()
                torch.autograd.backward(_losses(logits, labels).mean(), retain_graph=0 < draw < draws)
                own = meter.by_operator()
                found[:, draw] += torch.stack([own[name] for name in SUMS.values()]).cpu().numpy() / len(batches)
                if not draw:
                    norms += [float(weight.grad.norm()) for weight in weights]  # type: ignore[union-attr]
                self.model.zero_grad(set_to_none=True)
            self.plan.end_step()
        for weight in weights:
            weight.requires_grad_()
        rows = {"gradient norm": norms / len(batches), "mse": probe.read()["mse"].cpu().numpy().copy()}
        for name, values in zip(SUMS, found, strict=True):
            rows |= {f"data, {name}": values[0], f"drawn, {name}": values[1:].mean(axis=0)}
        self.plan.shared.prices = self.plan.shared.probe = None
        return rows

    @torch.no_grad()
    def truth(self, batches: Sequence[Batch], chosen: Sequence[int]) -> np.ndarray:
        """Return KL and loss increase, (2, chosen + 1, sequences).

        They are those of each chosen operator alone, and last those of all operators at once.
        """
        found = []
        for batch in batches:
            log_p = F.log_softmax(logits_of(self.model, batch).float(), dim=-1)
            high, row = _losses(log_p, batch.targets), []
            for low in [*([i] for i in chosen), range(len(self.names))]:
                self.put(low)
                logits = logits_of(self.model, batch).float()
                self.plan.end_step()
                row.append(torch.stack([divergence(log_p, logits), _losses(logits, batch.targets) - high]))
            self.put([])
            found.append(torch.stack(row, dim=1))
        return torch.cat(found, dim=2).cpu().numpy()


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each sequence, (B,) float64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).double().mean(1)


def _depth(name: str) -> int:
    return int(name.partition("layers.")[2].partition(".")[0])


def sample(names: Sequence[str], estimates: dict[str, np.ndarray], number: int) -> tuple[list[int], list[int]]:
    """Return the indices of the operators that are measured, in order, and those of them that no score chose."""
    number = min(number, len(names))
    by_kind = sorted(range(len(names)), key=lambda i: (names[i].rpartition(".")[2], _depth(names[i])))
    places = np.linspace(0, len(names) - 1, number).round().astype(int)
    spread = sorted(by_kind[place] for place in places)
    highest = {int(i) for name in NATS for i in np.argsort(-estimates[name])[:TOP]}
    return sorted({*spread} | highest), spread


def rank_interval(score: np.ndarray, kl: np.ndarray) -> dict[str, float]:
    """Return the rank correlation of two scores (operators,) with its 95% interval over operators."""
    drawn = np.random.default_rng(0).integers(0, len(kl), (SAMPLES, len(kl)))
    ranks = [rankdata(values[drawn], axis=1) for values in (score, kl)]
    centered = [rank - rank.mean(axis=1, keepdims=True) for rank in ranks]
    products = [(x * y).sum(axis=1) for x, y in (centered, (centered[0],) * 2, (centered[1],) * 2)]
    correlations = products[0] / np.sqrt(products[1] * products[2])
    low, high = np.nanpercentile(correlations, (2.5, 97.5))
    return {"spearman": float(spearmanr(score, kl)[0]), "low": float(low), "high": float(high)}


def measure(subject: Subject, low: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one model and low path; without operators only the cost of all of them at once."""
    began, length = time.perf_counter(), min(asked.block, subject.max_length)
    numbers = {"batches": asked.batches, "held_out": asked.held_out, "size": asked.size, "length": length}
    blocks = blocks_of(subject, asked.data, **numbers)
    cell = Measurement(subject.model, low)
    estimates = cell.estimates(blocks.batches, asked.draws) if asked.operators else {}
    print(f"  estimates after {time.perf_counter() - began:.0f} s", flush=True)
    chosen, spread = sample(cell.names, estimates, asked.operators) if asked.operators else ([], [])
    found = cell.truth(blocks.held_out, chosen)
    cell.plan.restore()
    (kl, loss), errors = found.mean(axis=2), sem(found, axis=2)
    record = {
        "seeds": {"blocks": 0, "labels": "the number of the batch"},
        "operators": len(cell.names),
        "all_low": {"kl": kl[-1], "kl_error": errors[0, -1], "loss": loss[-1], "loss_error": errors[1, -1]},
    }
    if not chosen:
        sequences = dict(zip(("kl", "loss"), found[:, -1].tolist(), strict=True))
        return record | {"of_sequences": sequences, "seconds": time.perf_counter() - began}
    outside = np.delete(estimates["drawn, by sequence"], chosen).sum()
    own = pd.DataFrame({"kl": kl[:-1], **{name: values[chosen] for name, values in estimates.items()}})
    unchosen = own.assign(loss=loss[:-1])[[i in spread for i in chosen]]
    ranks = {name: rank_interval(values.to_numpy(), unchosen.kl.to_numpy()) for name, values in unchosen.items()}
    of_loss = unchosen.corr("spearman").loss
    halves = [found[0, :-1, at::2].mean(axis=1)[[i in spread for i in chosen]] for at in (0, 1)]
    columns = own.assign(loss=loss[:-1], kl_error=errors[0, :-1], loss_error=errors[1, :-1]).to_dict("list")
    return record | {
        "measured": len(chosen),
        "single_kls": kl[:-1].sum(),
        "interaction": kl[-1] - kl[:-1].sum() - outside,
        "unchosen": len(unchosen),
        "spearman": {name: rank["spearman"] for name, rank in ranks.items()},
        "spearman_interval": {name: (rank["low"], rank["high"]) for name, rank in ranks.items()},
        "spearman_loss": of_loss.to_dict(),
        "halves": rank_interval(*halves),
        "sum": (own.sum() / own.kl.sum()).to_dict(),
        "spread": np.log(own.div(own.kl, axis=0)).std().to_dict(),
        "of_operators": {"name": [cell.names[i] for i in chosen], **columns},
        "seconds": time.perf_counter() - began,
    }


def whole_table(cells: Sequence[dict[str, Any]]) -> str:
    """Return the KL of each low path by model as a table in Markdown, and the results of the expectations."""
    kls = pd.Series({(cell["low"], cell["model"]): np.array(cell["of_sequences"]["kl"]) for cell in cells})
    shown = kls.map(lambda kl: f"{kl.mean():.3g} ± {sem(kl):.1g}").unstack(sort=False).rename_axis("low path")
    said = [as_markdown(shown.reset_index().to_dict("records"))]
    for low, other in EXPECTED.items():
        for model in shown.columns if {low, other} <= set(shown.index) else ():
            more, mean = kls[low, model] - kls[other, model], kls[other, model].mean()
            change = f"{more.mean() / mean:+.1%} ± {sem(more) / mean:.1%}"
            said.append(f"{model}: {low} {change} against {other}, smaller in {(more < 0).mean():.0%} of the sequences")
    return "\n".join(said)


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Return the measurements as tables in Markdown, and how often the claims hold.

    The tables have rank correlations with single KLs (their interval; with loss increases), and sums over the sum of
    single KLs (standard deviation of the log ratio).
    """
    tables: tuple[list[dict[str, str]], ...] = [], [], []
    for cell in cells:
        low, ranks, of_loss = cell["all_low"], cell["spearman"], cell["spearman_loss"]
        unchosen = f"{cell['unchosen']} of them unchosen" if "unchosen" in cell else "some chosen by scores"
        facts = {"measured": f"{cell['measured']} of {cell['operators']}, {unchosen}"}
        facts |= {"single KLs": f"{cell['single_kls']:.3g}"}
        facts |= {"KL of all": f"{low['kl']:.3g} ± {low['kl_error']:.1g}", "interaction": f"{cell['interaction']:.2g}"}
        facts |= {"loss increase": f"{low['loss']:.3g}", "seconds": f"{cell['seconds']:.0f}"}
        scores = [*NATS, "data, by element", "gradient norm", "mse", "loss"]
        intervals = cell.get("spearman_interval", {})  # records of earlier commits have none
        told = {name: " to ".join(f"{end:.2f}" for end in ends) for name, ends in intervals.items()}
        ranked = {name: f"{ranks[name]:.2f} ({told.get(name, '?')}; {of_loss[name]:.2f})" for name in scores}
        ranked["halves"] = f"{cell['halves']['spearman']:.2f}" if "halves" in cell else "?"
        sums = {name: f"{cell['sum'][name]:.2f} ({cell['spread'][name]:.2f})" for name in NATS}
        for rows, more in zip(tables, (facts, ranked, sums), strict=True):
            rows.append({"model": cell["model"], "low path": cell["low"], **more})
    held = np.sum([(c["spearman"][NATS[-1]] >= SPEARMAN, abs(c["sum"][NATS[-1]] - 1) <= SUM) for c in cells], axis=0)
    said = f"{NATS[-1]}: Spearman >= {SPEARMAN} in {held[0]} of {len(cells)}, sum within {SUM:.0%} in {held[1]}."
    return "\n\n".join([*map(as_markdown, tables), said])


def as_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows with the same keys as a table."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="", help="run and checkpoint folders, with commas")
    parser.add_argument("--low", default=LOW)
    parser.add_argument("--data", type=Path, help="a text, for checkpoints")
    for name, default in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--table", action="store_true", help="print OUT.json as Markdown and measure nothing")
    asked = parser.parse_args()
    cells = json.loads(asked.out.read_text())["cells"] if asked.out.exists() else []
    settings = {key: getattr(asked, key) for key in SETTINGS}
    done = {(cell["model"], cell["low"]): cell["settings"] for cell in cells}
    claims = {"spearman": SPEARMAN, "sum": SUM} if asked.operators else {"smaller": EXPECTED}
    for place in filter(None, asked.models.split(",")):
        name, lows = Path(place).name, asked.low.split(",")
        if other := [done[name, low] for low in lows if done.get((name, low), settings) != settings]:
            parser.error(f"{asked.out} has {name} with other settings, {other[0]}: name another file")
        if not (lows := [low for low in lows if (name, low) not in done]):
            continue
        subject = load_subject(place)
        subject.model.float().eval()
        for low in lows:
            told = {"model": name, "low": low, "settings": settings, "subject": subject.facts}
            record = measure(subject, low, asked)
            cells.append(header() | told | record)
            output.write_json(asked.out, {"claims": claims, "cells": cells})
            print(f"{name} {low}: written after {record['seconds']:.0f} s", flush=True)
    if asked.table:
        print((table if "spearman" in cells[0] else whole_table)(cells))


if __name__ == "__main__":
    main()
