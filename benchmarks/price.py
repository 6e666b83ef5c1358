"""Prices against the truth: the KL divergence per token that one operator in low precision makes, measured one by one.

    python benchmarks/price.py OUT.json --models .cache/smollm2 --data wikitext2-test.txt --low nvfp4,fp8_hybrid
    python benchmarks/price.py OUT.json --models runs/a,runs/b --batches 16 --held-out 16 --block 256 --draws 16
    python benchmarks/price.py OUT.json --table

Models are run folders (measured on their own validation data) and checkpoint folders (on `--data`), computed in FP32.
The truth of an operator is the KL divergence per token between the model and the model with the fprop of this operator
in low precision, in nats, and beside it the increase of the loss on the data's labels. Estimates come from other tokens
of the same text: `data` are the text's own labels, `drawn` are drawn from the model, `/ n` with n backward passes a
batch. They are squared token by token, or summed over each sequence before they are squared.

What is claimed, and was written down before anything was measured: on every low path and model, held out, the estimate
with drawn labels by sequence has a Spearman correlation of at least 0.95 with the single KLs, and its sum is within
20% of theirs.

Of more than `--operators` operators a sample is measured: the twelve highest by data labels by token, by drawn ones by
token and by sequence, and as many others as are missing, evenly over kinds and depth. A sum is then over the sample,
and the interaction, the KL of all operators at once less the sum of them, takes the estimate of those outside.

Each pair of a model and a low path is written when it is measured; what OUT.json has already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.lab.data.batch import Batch
from gnmr.lab.evaluation.blocks import blocks_of
from gnmr.lab.evaluation.subjects import Subject, load_subject
from gnmr.lab.train.loss import logits_of
from gnmr.measure.errors import measure_errors
from gnmr.measure.kl import divergence, draw_labels
from gnmr.measure.price import measure_prices
from gnmr.precision import PathSpec, convert
from gnmr.records import output
from timing import header

LOW = "nvfp4,mxfp4,mxfp8,fp8_hybrid,sim_e2m1,sim_e3m2,sim_int4,sim_int8"
SUMS = {"by token": "fprop", "by sequence": "fprop_sequence", "by element": "fprop_elements"}
SETTINGS = {"batches": 4, "held_out": 3, "size": 4, "block": 128, "draws": 8, "operators": 48}
SEEDS = {"blocks": 0, "labels": "the number of the batch"}
TOP, SPEARMAN, SUM = 12, 0.95, 0.2


class Measurement:
    """One model with its operators converted to one low path."""

    def __init__(self, model: nn.Module, low: str) -> None:
        self.model = model
        spec = PathSpec.of(low, "bf16", targets=["*_proj"], backend="simulated")  # bf16: exact, in an FP32 model
        self.plan = convert(model, spec)
        self.names = [operator.operator_name for operator in self.plan.operators]
        layers = next(module for name, module in model.named_modules() if name.split(".")[-1] == "layers")
        self.blocks = list(layers.children())
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
            generator = torch.Generator().manual_seed(place)
            meter.begin_step(place)
            meter.loss_tokens = batch.num_targets
            for draw in range(1 + draws):  # the first labels are the data's
                if draw < 2:
                    for weight in weights:
                        weight.requires_grad_(not draw)  # later passes are made for the prices alone
                    logits = logits_of(self.model, batch).float()
                labels = draw_labels(logits, generator) if draw else batch.targets
                meter.reset()
                torch.autograd.backward(_losses(logits, labels).mean(), retain_graph=0 < draw < draws)
                own = meter.by_operator()
                found[:, draw] += torch.stack([own[name] for name in SUMS.values()]).numpy() / len(batches)
                if not draw:
                    norms += [float(weight.grad.norm()) for weight in weights]  # type: ignore[union-attr]
                self.model.zero_grad(set_to_none=True)
            self.plan.end_step()
        for weight in weights:
            weight.requires_grad_()
        rows = {"gradient norm": norms / len(batches), "mse": probe.read()["mse"].numpy().copy()}
        for name, values in zip(SUMS, found, strict=True):
            rows[f"data, {name}"] = values[0]
            some = [n for n in (1, 2, 4, 8, 16, 32) if n < draws] + [draws]
            rows |= {f"drawn, {name} / {n}": values[1 : 1 + n].mean(axis=0) for n in some}
        self.plan.shared.prices = self.plan.shared.probe = None
        return rows

    @torch.no_grad()
    def truth(self, batches: Sequence[Batch], chosen: Sequence[int]) -> np.ndarray:
        """Return KL and loss increase of each chosen operator alone, and last of all operators at once,
        (2, chosen + 1, sequences)."""
        found = []
        for batch in batches:
            kept: list[Tensor] = []
            hooks = [b.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0])) for b in self.blocks]
            log_p = F.log_softmax(logits_of(self.model, batch).float(), dim=-1)
            for hook in hooks:
                hook.remove()
            high, row = _losses(log_p, batch.targets), []
            for low in [*([i] for i in chosen), range(len(self.names))]:
                self.put(low)
                with _resumed(self.blocks, _depth(self.names[low[0]]), kept):
                    logits = logits_of(self.model, batch).float()
                self.plan.end_step()
                row.append(torch.stack([divergence(log_p, logits), _losses(logits, batch.targets) - high]))
            self.put([])
            found.append(torch.stack(row, dim=1))
        return torch.cat(found, dim=2).numpy()


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each sequence, (B,) float64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).double().mean(1)


@contextmanager
def _resumed(blocks: Sequence[nn.Module], depth: int, kept: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the blocks before `depth` are not computed: what they give is the input of that block, which is known."""
    for block in blocks[:depth]:
        block.forward = lambda *_, **__: kept[depth]
    try:
        yield
    finally:
        for block in blocks[:depth]:
            del block.forward


def _depth(name: str) -> int:
    return int(name.partition("layers.")[2].partition(".")[0])


def _in_nats(draws: int) -> list[str]:
    return ["data, by token", f"drawn, by token / {draws}", f"drawn, by sequence / {draws}"]


def sample(names: Sequence[str], estimates: dict[str, np.ndarray], number: int, draws: int) -> list[int]:
    """Return the places of the operators that are measured, in order."""
    if number >= len(names):
        return list(range(len(names)))
    highest = {int(i) for name in _in_nats(draws) for i in np.argsort(-estimates[name])[:TOP]}
    others = sorted(set(range(len(names))) - highest, key=lambda i: (names[i].rpartition(".")[2], _depth(names[i])))
    places = np.linspace(0, len(others) - 1, max(number - len(highest), 0)).round().astype(int)
    return sorted(highest | {others[i] for i in places})


def compared(estimate: np.ndarray, kl: np.ndarray, loss: np.ndarray) -> dict[str, float]:
    """Return how an estimate agrees with the truth of the same operators."""
    ranks = {"spearman": spearmanr(estimate, kl)[0], "spearman_loss": spearmanr(estimate, loss)[0]}
    return ranks | {"sum": estimate.sum() / kl.sum(), "spread": np.log(estimate / kl).std(ddof=1)}


def measure(subject: Subject, low: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one model and low path."""
    began, length = time.perf_counter(), min(asked.block, subject.max_length)
    numbers = {"batches": asked.batches, "held_out": asked.held_out, "size": asked.size, "length": length}
    blocks = blocks_of(subject, asked.data, **numbers)
    cell = Measurement(subject.model, low)
    estimates = cell.estimates(blocks.batches, asked.draws)
    print(f"  estimates after {time.perf_counter() - began:.0f} s", flush=True)
    chosen = sample(cell.names, estimates, asked.operators, asked.draws)
    found = cell.truth(blocks.held_out, chosen)
    cell.plan.restore()
    (kl, loss), errors = found.mean(axis=2), found.std(axis=2, ddof=1) / found.shape[2] ** 0.5
    outside = np.delete(estimates[f"drawn, by sequence / {asked.draws}"], chosen).sum()
    own = {name: values[chosen] for name, values in estimates.items()}
    columns = {"kl": kl[:-1], "kl_error": errors[0, :-1], "loss": loss[:-1], "loss_error": errors[1, :-1], **own}
    return {
        "operators": len(cell.names),
        "measured": len(chosen),
        "all_low": {"kl": kl[-1], "kl_error": errors[0, -1], "loss": loss[-1], "loss_error": errors[1, -1]},
        "single_kls": kl[:-1].sum(),
        "interaction": kl[-1] - kl[:-1].sum() - outside,
        "truths": spearmanr(kl[:-1], loss[:-1])[0],
        "estimates": {name: compared(values, kl[:-1], loss[:-1]) for name, values in own.items()},
        "of_operators": {"name": [cell.names[i] for i in chosen], **{k: v.tolist() for k, v in columns.items()}},
        "seconds": time.perf_counter() - began,
    }


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Return three tables in Markdown, of a row for each model and low path, and what became of the claims.

    The second has Spearman's correlation with the single KLs (with the loss increases); the third the sum of estimates
    over the sum of single KLs (the standard deviation of the logarithm of each ratio).
    """
    nats = _in_nats(cells[0]["settings"]["draws"])
    tables: tuple[list[dict[str, str]], ...] = [], [], []
    for cell in cells:
        low, own = cell["all_low"], cell["estimates"]
        facts = {"measured": f"{cell['measured']} of {cell['operators']}", "single KLs": f"{cell['single_kls']:.3g}"}
        facts |= {"KL of all": f"{low['kl']:.3g} ± {low['kl_error']:.1g}", "interaction": f"{cell['interaction']:.2g}"}
        facts |= {"loss increase": f"{low['loss']:.3g}", "seconds": f"{cell['seconds']:.0f}"}
        scores = [*nats, "data, by element", "gradient norm", "mse"]
        ranks = {name: f"{own[name]['spearman']:.2f} ({own[name]['spearman_loss']:.2f})" for name in scores}
        ranks |= {"loss increase": f"{cell['truths']:.2f}"}
        sums = {name: f"{own[name]['sum']:.2f} ({own[name]['spread']:.2f})" for name in nats}
        for rows, more in zip(tables, (facts, ranks, sums), strict=True):
            rows.append({"model": cell["model"], "low path": cell["low"], **more})
    claimed = [cell["estimates"][nats[-1]] for cell in cells]
    held = sum(one["spearman"] >= SPEARMAN for one in claimed), sum(abs(one["sum"] - 1) <= SUM for one in claimed)
    said = f"{nats[-1]}: Spearman >= {SPEARMAN} in {held[0]} of {len(cells)}, sum within {SUM:.0%} in {held[1]}."
    lines = [[rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows), []] for rows in tables]
    return "\n".join([*(f"| {' | '.join(line)} |" if line else "" for line in chain(*lines)), said])


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
    for place in filter(None, asked.models.split(",")):
        subject = None
        for low in asked.low.split(","):
            if (pair := (Path(place).name, low)) in done:
                if done[pair] != settings:
                    parser.error(f"{asked.out} has {pair} with other settings, {done[pair]}: name another file")
                continue
            print(*pair, flush=True)
            if subject is None:
                subject = load_subject(place, "cpu")
                subject.model.float().eval()
            told = {"model": pair[0], "low": low, "settings": settings, "seeds": SEEDS, "subject": subject.facts}
            cells.append(header() | told | measure(subject, low, asked))
            output.write_json(asked.out, {"claims": {"spearman": SPEARMAN, "sum": SUM}, "cells": cells})
            print(f"  written after {cells[-1]['seconds']:.0f} s", flush=True)
    if asked.table:
        print(table(cells))


if __name__ == "__main__":
    main()
