"""Verdicts on steps that spike or are not finite, from planted causes and from ordinary spikes (docs/blame.md).

    python benchmarks/blame.py OUT.json planted               every arm: planted causes, faults that are not finite
    python benchmarks/blame.py OUT.json spikes                200 ordinary spikes over all arms
    python benchmarks/blame.py OUT.json planted --only moe    of the arms whose names match

Of each arm (formats of saved inputs, of forward passes, a recipe, mixtures of experts, fine-tuning) a tiny model is
trained until its loss moves slowly; each cause is then planted in a step of the run as it stood there. Broken operators
are one, or two at once; to be named are those that make a spike alone, and none that was not broken. An ordinary spike
is a step of a run with sound paths above `SIGMAS` standard deviations, lower than the 6 of a run, so that there are
enough; a verdict "precision" on one is a false one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch

from gnmr.attachment.blame import Levels, Verdict
from gnmr.lab.bench.figures import describe_machine
from gnmr.lab.config.compose import compose
from gnmr.lab.faults.faults import Fault
from gnmr.lab.faults.schedule import FaultSchedule
from gnmr.lab.train.build import Parts, assemble, train_step, training_blocks
from gnmr.lab.train.provenance import told_command
from gnmr.lab.train.step import StepResult, TrainStep
from golden import make_inputs

LEARN, SIGMAS = 140, 3.0
SIZES = ["training.steps=100000", "training.seq_len=64", "training.batch_size=4", "training.threads=1"]
SIZES += ["training.eval_sequences=2", "optim.lr=0.003", "optim.clip_norm=1", "optim.warmup_frac=0.0002"]
SIZES += ["controller.warmup_frac=0", "controller.alpha=99", "controller.beta=null", "controller.max_o=4"]
TEXT = ["data.name=text", "data.vocab_size=300", "data.path=babble.txt"]
SMALL = ["model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=2"]
MOE = ["experiment=moe_stress", "model.num_layers=2", "model.hidden_size=64", "model.num_heads=2"]
ARMS = {
    "saved": ["experiment=act_quant_stress", "precision.low=int4", "precision.recovery=int8", *SMALL],
    "forward": [
        "experiment=act_quant_stress",
        "precision.low=int8",
        "precision.recovery=bf16",
        "precision.site=forward",
        *SMALL,
    ],
    "recipe": ["experiment=pretrain", "precision.low=fp8_hybrid", "precision.recovery=bf16", *SMALL],
    "moe": [*MOE, "precision.low=int8", "precision.recovery=bf16", "precision.site=forward"],
    "moe_recipe": [*MOE, "precision.low=fp8_hybrid", "precision.recovery=bf16"],
    "finetune": ["experiment=finetune", "model.checkpoint=tiny", "model.adapter.rank=4", "precision.unit=operator"],
}
PLANTS = (("scale_down", 300.0), ("scale_up", 300.0), ("noise", 300.0))
NOT_FINITE = ("nan", "inf", "bit_flip")


@dataclass
class Bed:
    """A run after its warm steps, to which it can be taken back."""

    parts: Parts
    levels: Levels
    blocks: Any
    take: TrainStep
    learn: int = LEARN
    """Steps before the rate falls."""
    step: int = 0
    _kept: list[Any] = field(default_factory=list)

    def __call__(self) -> StepResult:
        """One step; the rate falls to a tenth where the loss is to move slowly."""
        self.step += 1
        training, device = self.parts.config.training, self.parts.device
        rate = self.parts.config.optim.lr * (1.0 if self.step <= self.learn else 0.1)
        return self.take([self.blocks.next(training.batch_size).to(device)], rate)

    def keep(self) -> None:
        """Remembers the run as it is."""
        p = self.parts
        what = p.model.state_dict(), p.optimizer.state_dict(), p.controller.state_dict(), torch.get_rng_state()
        self._kept = deepcopy([*what, self.levels.seen, self.blocks.state_dict(), self.step])

    def steady(self, ahead: int = 0) -> None:
        """As it was kept, `ahead` steps on, with levels of steps that hardly differ from the next one: what is planted
        there in place of a sound step is a spike, and the batch itself is none, on neither path."""
        sound, better = self._sound(ahead, recovered=False), self._sound(ahead, recovered=True)
        self.back()
        self.levels.seen.clear()
        for _ in range(ahead):
            self()
        self.levels.seen.clear()
        # Spreads below what the paths of a sound step differ by would call the better one a spike too.
        loss, norm = (max(abs(b / a - 1), least) for a, b, least in zip(sound, better, (1e-4, 1e-3), strict=True))
        for i in range(self.levels.least):
            sign = (-1) ** i
            self.levels.add(sound[0] * (1 + loss * sign), sound[1] * (1 + norm * sign))

    def _sound(self, ahead: int, recovered: bool) -> tuple[float, float]:
        """Loss and gradient norm of that step as it is, or with every operator on its recovery path."""
        self.back()
        for _ in range(ahead):
            self()
        for operator in self.parts.converted.operators:
            if recovered and operator.recovery is not None:
                operator.switch(True)
        result = self()
        return result.loss, result.grad_norm_pre_clip

    def back(self) -> None:
        """The run is as it was kept."""
        model, optimizer, controller, rng, seen, blocks, self.step = deepcopy(self._kept)
        torch.set_rng_state(rng)
        self.parts.model.load_state_dict(model)
        self.parts.optimizer.load_state_dict(optimizer)
        self.parts.controller.load_state_dict(controller)
        self.levels.seen = seen
        self.blocks.load_state_dict(blocks)
        for operator in self.parts.converted.operators:
            operator.fault = None


def bed(words: list[str], learn: int = LEARN) -> Bed:
    """A run of an arm after its warm steps."""
    text = TEXT if "experiment=finetune" not in words else TEXT[::2]
    parts = assemble(compose([*words, *SIZES, *text]), Path("unused"), lambda _: None)
    blocks = training_blocks(parts.config, parts.corpus, None)
    levels = Levels()
    made = Bed(parts, levels, blocks, train_step(parts, levels=levels), learn)
    for _ in range(learn + 8):
        made()
    levels.seen.clear()
    for _ in range(levels.least):
        made()
    made.keep()
    return made


def targets(made: Bed, number: int) -> list[str]:
    """Units at even distances, all where there are fewer."""
    names = made.parts.controller.names
    number = min(number, len(names))
    return [names[(2 * i + 1) * len(names) // (2 * number)] for i in range(number)]


def break_paths(made: Bed, kind: str, magnitude: float, units: list[str]) -> None:
    """The low path of these units fails in the next step."""
    at = made.step + 1
    schedule = FaultSchedule(made.parts.converted, Fault(kind, magnitude), units, at, windows=[[at, 1]])
    schedule.begin_step(at)


def corrupt(made: Bed) -> Callable[[], None]:
    """The next batch is of random tokens; call the result afterwards."""
    original, draw = made.blocks.next, torch.Generator().manual_seed(made.step)

    def next_blocks(count: int) -> Any:
        batch = original(count)
        tokens = batch if isinstance(batch, torch.Tensor) else batch.tokens
        tokens.copy_(torch.randint(0, 20, tokens.shape, generator=draw).sort(descending=True).values)
        return batch

    made.blocks.next = next_blocks
    return lambda: made.blocks.__dict__.pop("next")


def race(made: Bed, unit: str) -> Callable[[], None]:
    """A buffer that is read too early, once: the output of `unit` is another tensor's in its next forward pass."""
    calls: list[int] = []

    def early(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output.flip(0).flip(-1) * 30 if len(calls) == 1 else output

    return made.parts.model.get_submodule(unit).register_forward_hook(early).remove


@dataclass
class Plant:
    """A planted cause and what was said of it."""

    planted: str
    cause: str
    """The right one."""
    units: list[str]
    """Whose low path was broken."""
    alone: list[str]
    """Those of them that make a spike by themselves."""
    verdict: str | None
    """None: the step did not spike."""
    named: list[str]
    passes: float
    lost: bool
    told: str

    @property
    def right(self) -> bool:
        """Whether all were named that make a spike alone, and none that was not broken."""
        named = set(self.named)
        return bool(named) and set(self.alone) <= named <= set(self.units)


def plant(what: str, cause: str, result: StepResult, units: Sequence[str] = (), alone: Sequence[str] = ()) -> Plant:
    """Of the step in which it was at work."""
    found = result.verdict
    if found is None:
        return Plant(what, cause, [*units], [*alone], None, [], 0.0, result.skipped, "")
    named, passes = [*found.units], found.passes
    return Plant(what, cause, [*units], [*alone], found.cause, named, passes, result.skipped, str(found))


def planted(made: Bed, singles: int = 99, pairs: int = 7) -> Iterator[Plant]:
    """Each cause in a step that hardly differs from a sound one: so many units alone and in pairs of each kind."""
    floats = "int" not in made.parts.converted.low.name

    def broken(kind: str, magnitude: float, units: list[str]) -> StepResult:
        made.steady()
        break_paths(made, kind, magnitude, units)
        return made()

    for kind, magnitude in PLANTS:
        if kind == "scale_up" and floats:
            continue  # another exponent: no break of a floating-point cast
        names, spike = targets(made, singles), list[str]()
        for name in names:
            result = broken(kind, magnitude, [name])
            spike += [name] * (result.verdict is not None)
            yield plant(f"{kind} {name}", "precision", result, [name], [name])
        both = [(names[i], names[(i + len(names) // 2) % len(names)]) for i in range(min(pairs, len(names) // 2))]
        both += [pair for pair in pairwise(spike) if pair not in both][:pairs]
        for pair in map(list, both):
            result = broken(kind, magnitude, pair)
            alone = [name for name in pair if name in spike]
            yield plant(f"{kind} {' + '.join(pair)}", "precision", result, pair, alone)
    for shift in range(3):
        made.steady(shift)
        undo = corrupt(made)
        result = made()
        undo()
        yield plant(f"corrupt batch {shift}", "data", result)
    for unit in targets(made, 3):
        made.steady()
        undo = race(made, unit)
        result = made()
        undo()
        yield plant(f"race {unit}", "not_reproducible", result)


def not_finite(made: Bed, units: int = 5) -> Iterator[tuple[str, bool, bool]]:
    """(fault, whether its step was lost, whether it had a verdict) of faults that make the loss no number; none where
    the low path leaves the forward pass as it is."""
    if not made.parts.converted.casts_forward:
        return
    for kind in NOT_FINITE:
        for unit in targets(made, units):
            made.back()
            break_paths(made, kind, 1.0, [unit])
            result = made()
            yield f"{kind} {unit}", result.skipped, result.verdict is not None


def ordinary(made: Bed, number: int) -> Iterator[Verdict]:
    """The verdicts on that many spikes of a run with sound paths."""
    made.back()
    made.levels.sigmas = SIGMAS
    found = 0
    while found < number and made.step < 40_000:
        if (verdict := made().verdict) is not None:
            found += 1
            yield verdict


def main() -> int:
    """Measures, prints, writes; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT.json", type=lambda word: Path(word).resolve())
    parser.add_argument("part", choices=["planted", "spikes"])
    parser.add_argument("--only", metavar="REGEX", default="", help="only the arms whose names match (re.search)")
    parser.add_argument("--spikes", type=int, default=200, help="ordinary spikes over all arms")
    asked = parser.parse_args()
    chosen = {name: words for name, words in ARMS.items() if re.search(asked.only, name)}
    if not chosen:
        parser.error(f"--only {asked.only}: no such arm; there are {', '.join(ARMS)}")
    command = told_command(shlex.join(["python", "benchmarks/blame.py", *sys.argv[1:]]))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {"command": command, "date": date, **describe_machine(), "arms": {}}
    with tempfile.TemporaryDirectory(prefix="gnmr-blame-") as scratch:
        make_inputs(Path(scratch))
        os.chdir(scratch)
        os.environ["GNMR_CACHE"] = "cache"
        for name, words in chosen.items():
            made = bed(words)
            if asked.part == "planted":
                found["arms"][name] = of_planted(name, made)
            else:
                found["arms"][name] = of_spikes(name, made, -(-asked.spikes // len(chosen)))
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
        os.chdir("/")
    return 0


def of_planted(name: str, made: Bed) -> dict[str, Any]:
    """The figures of one arm, told as they come."""
    rows = []
    for row in planted(made):
        rows.append(row)
        wrong = row.verdict is not None and (row.verdict != row.cause or (row.cause == "precision" and not row.right))
        print(f"{name}  {'WRONG ' * wrong}{row.planted}: {row.told}", flush=True)
    broken: list[dict[str, Any]] = [
        {"planted": what, "lost": lost, "told": told} for what, lost, told in not_finite(made)
    ]
    spiked = [row for row in rows if row.verdict is not None]
    precision = [row for row in spiked if row.cause == "precision"]
    few, many = ([row for row in precision if (len(row.units) > 1) == more] for more in (False, True))
    figures = {
        "planted": len(rows),
        "spiked": dict(Counter(row.cause for row in spiked)),
        "right cause": dict(Counter(row.cause for row in spiked if row.verdict == row.cause)),
        "single": [sum(row.right for row in few), len(few)],
        "pairs": [sum(row.right for row in many), len(many)],
        "pairs named as pairs": sum(len(row.named) == 2 for row in many if row.right),
        "most step times": max((row.passes for row in spiked), default=0.0),
        "not finite": {key: sum(row[key] for row in broken) for key in ("lost", "told")} | {"n": len(broken)},
    }
    print(f"{name}: {json.dumps(figures)}", flush=True)
    return {"figures": figures, "planted": [asdict(row) for row in rows], "not_finite": broken}


def of_spikes(name: str, made: Bed, number: int) -> dict[str, Any]:
    """The verdicts of one arm, told as they come."""
    rows, first = [], made.step
    for verdict in ordinary(made, number):
        row = {"step": verdict.step, "cause": verdict.cause, "units": verdict.units, "passes": verdict.passes}
        rows.append(row | {"told": verdict.told})
        print(f"{name} {len(rows)}  {verdict}", flush=True)
    causes = dict(Counter(row["cause"] for row in rows))
    print(f"{name}: {json.dumps(causes)}", flush=True)
    return {"figures": {"steps": made.step - first, "causes": causes}, "spikes": rows}


if __name__ == "__main__":
    sys.exit(main())
