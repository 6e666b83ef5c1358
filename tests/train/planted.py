"""Tiny runs in which a cause is planted: broken operators, a corrupt batch, a buffer that is read too early.

Each arm (formats of saved inputs, of forward passes, a recipe, mixtures of experts, fine-tuning) is trained until its
loss moves slowly; each cause is then planted in a step of the run as it stood there. Broken operators are one, or two
at once. A verdict must name those that make a spike alone, and none that was not broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gnmr.attachment.blame import Levels
from gnmr.lab.config.compose import compose
from gnmr.lab.faults.faults import Fault
from gnmr.lab.faults.schedule import FaultSchedule
from gnmr.lab.train.build import Parts, assemble, train_step, training_blocks
from gnmr.lab.train.step import StepResult, TrainStep

SIZES = ["training.steps=100000", "training.seq_len=64", "training.batch_size=4", "training.threads=1"]
SIZES += ["training.eval_sequences=2", "optim.lr=0.003", "optim.clip_norm=1", "optim.warmup_frac=0.0002"]
SIZES += ["controller.warmup_frac=0", "controller.alpha=99", "controller.beta=null", "controller.max_o=4"]
TEXT = ["data.name=text", "data.vocab_size=300", "data.path=babble.txt"]
SMALL = ["model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=2"]
MOE = ["experiment=moe_stress", "model.num_layers=2", "model.hidden_size=64", "model.num_heads=2"]
ARMS = {
    "saved": ["experiment=act_quant_stress", "precision.low=int4", "precision.recovery=int8", *SMALL],
    "recipe": ["experiment=pretrain", "precision.low=fp8_hybrid", "precision.recovery=bf16", *SMALL],
    "moe": [*MOE, "precision.low=int8", "precision.recovery=bf16", "precision.site=forward"],
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
    learn: int
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
        what = p.model.state_dict(), p.optimizer.state_dict(), p.router.state_dict(), torch.get_rng_state()
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
        self.parts.router.load_state_dict(controller)
        self.levels.seen = seen
        self.blocks.load_state_dict(blocks)
        for operator in self.parts.converted.operators:
            operator.fault = None


def bed(words: list[str], learn: int) -> Bed:
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
    names = made.parts.router.names
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
    """A planted cause and the step in which it was at work."""

    what: str
    cause: str
    """The right one."""
    result: StepResult
    units: Sequence[str] = ()
    """Whose low path was broken."""
    alone: Sequence[str] = ()
    """Those of them that make a spike by themselves."""

    @property
    def right(self) -> bool:
        """Whether all were named that make a spike alone, and none that was not broken."""
        named = set(self.result.verdict.units)
        return bool(named) and set(self.alone) <= named <= set(self.units)


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
            yield Plant(f"{kind} {name}", "precision", result, [name], [name])
        both = [(names[i], names[(i + len(names) // 2) % len(names)]) for i in range(min(pairs, len(names) // 2))]
        both += [pair for pair in pairwise(spike) if pair not in both][:pairs]
        for pair in map(list, both):
            result = broken(kind, magnitude, pair)
            alone = [name for name in pair if name in spike]
            yield Plant(f"{kind} {' + '.join(pair)}", "precision", result, pair, alone)
    for shift in range(3):
        made.steady(shift)
        undo = corrupt(made)
        result = made()
        undo()
        yield Plant(f"corrupt batch {shift}", "data", result)
    for unit in targets(made, 3):
        made.steady()
        undo = race(made, unit)
        result = made()
        undo()
        yield Plant(f"race {unit}", "not_reproducible", result)


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
