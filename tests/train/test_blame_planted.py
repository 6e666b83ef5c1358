"""Verdicts on causes that are planted in tiny trained runs: broken operators, a corrupt batch, a buffer that is read
too early.

Each arm is trained until its loss moves slowly; each cause is then planted in a step of the run as it stood there. A
verdict must name the broken operators that make a spike alone, and none that was not broken.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from gnmr.attachment.blame import Levels
from gnmr.lab.config.compose import compose
from gnmr.lab.data.batch import Batch
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.lab.train.build import assemble, train_step, training_blocks
from gnmr.lab.train.step import StepResult

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow

LEARN = 60
"""Steps before the rate falls to a tenth, so that the loss moves slowly."""
SIZES = ["training.steps=100000", "training.seq_len=64", "training.batch_size=4", "training.threads=1"]
SIZES += ["training.eval_sequences=2", "optim.lr=0.003", "optim.clip_norm=1", "optim.warmup_frac=0.0002"]
SIZES += ["controller.warmup_frac=0", "controller.alpha=99", "controller.beta=null", "controller.max_o=4"]
TEXT = ["data.name=text", "data.path=babble.txt"]
SMALL = ["model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=2"]
MOE = ["experiment=moe_stress", "model.num_layers=2", "model.hidden_size=64", "model.num_heads=2"]
OURS = ["data.vocab_size=300"]
ARMS = {
    "saved": ["experiment=act_quant_stress", "precision.low=int4", "precision.recovery=int8", *SMALL, *OURS],
    "recipe": ["experiment=pretrain", "precision.low=fp8_hybrid", "precision.recovery=bf16", *SMALL, *OURS],
    "moe": [*MOE, "precision.low=int8", "precision.recovery=bf16", "precision.site=forward", *OURS],
    "finetune": ["experiment=finetune", "model.checkpoint=tiny", "model.adapter.rank=4", "precision.unit=operator"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Text and a tiny checkpoint in the working folder, as benchmarks/golden.py makes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
        folder = tmp_path_factory.mktemp("planted")
        importlib.import_module("golden").make_inputs(folder)
        patch.chdir(folder)
        patch.setenv("GNMR_CACHE", "cache")
        yield
        sys.modules.pop("golden")


class Bed:
    """A run after its warm steps, to which it can be taken back."""

    def __init__(self, words: list[str]) -> None:
        self.parts = assemble(compose([*words, *SIZES, *TEXT]), Path("unused"), lambda _: None)
        self.blocks: Any = training_blocks(self.parts.config, self.parts.corpus, None)
        self.levels, self.step = Levels(), 0
        self._take = train_step(self.parts, levels=self.levels)
        for _ in range(LEARN + 8 + self.levels.least):
            self()
        p = self.parts
        what = p.model.state_dict(), p.optimizer.state_dict(), p.router.state_dict(), torch.get_rng_state()
        self._kept = deepcopy([*what, self.blocks.state_dict(), self.step])

    def __call__(self) -> StepResult:
        self.step += 1
        rate = self.parts.config.optim.lr * (1.0 if self.step <= LEARN else 0.1)
        return self._take([self.blocks.next(self.parts.config.training.batch_size)], rate)

    def back(self, ahead: int = 0) -> None:
        """The run is as it was kept, `ahead` steps on."""
        model, optimizer, controller, rng, blocks, self.step = deepcopy(self._kept)
        torch.set_rng_state(rng)
        self.parts.model.load_state_dict(model)
        self.parts.optimizer.load_state_dict(optimizer)
        self.parts.router.load_state_dict(controller)
        self.blocks.load_state_dict(blocks)
        self.levels.seen.clear()
        for operator in self.parts.converted.operators:
            operator.fault = None
        for _ in range(ahead):
            self()

    def steady(self, ahead: int = 0) -> None:
        """`back`, with levels of steps that hardly differ from the next one: what is planted there in place of a sound
        step is a spike, and the batch itself is none, on neither path."""
        found = []
        for recovered in (False, True):
            self.back(ahead)
            for operator in self.parts.converted.operators:
                if recovered and operator.recovery is not None:
                    operator.switch(True)
            result = self()
            found.append((result.loss, result.grad_norm_pre_clip))
        self.back(ahead)
        self.levels.seen.clear()
        # Spreads below what the paths of a sound step differ by would call the better one a spike too.
        sound, better = found
        loss, norm = (max(abs(b / a - 1), least) for a, b, least in zip(sound, better, (1e-4, 1e-3), strict=True))
        for i in range(self.levels.least):
            self.levels.add(sound[0] * (1 + loss * (-1) ** i), sound[1] * (1 + norm * (-1) ** i))

    def targets(self, number: int) -> list[str]:
        """Units at even distances, all where there are fewer."""
        names = self.parts.router.names
        number = min(number, len(names))
        return [names[(2 * i + 1) * len(names) // (2 * number)] for i in range(number)]

    def broken(self, kind: str, magnitude: float, units: list[str]) -> StepResult:
        """The next step, in which the low path of these units fails."""
        at = self.step + 1
        schedule = FaultSchedule(self.parts.converted, Fault(kind, magnitude), units, at, windows=[[at, 1]])
        schedule.begin_step(at)
        return self()


def corrupt(made: Bed) -> Callable[[], Any]:
    """The next batch is of random tokens; call the result afterwards."""
    original, draw = made.blocks.next, torch.Generator().manual_seed(made.step)

    def next_blocks(count: int) -> Any:
        batch = original(count)
        packed = batch.positions is not None
        shape = (len(batch), batch.tokens.shape[1] + (not packed))
        drawn = torch.randint(0, 20, shape, generator=draw).sort(descending=True).values
        return replace(batch, tokens=drawn) if packed else Batch.of_sequences(drawn)

    made.blocks.next = next_blocks
    return lambda: made.blocks.__dict__.pop("next")


def race(made: Bed, unit: str) -> Callable[[], Any]:
    """A buffer that is read too early, once: the output of `unit` is another tensor's in its next forward pass."""
    calls: list[int] = []

    def early(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output.flip(0).flip(-1) * 30 if len(calls) == 1 else output

    return made.parts.model.get_submodule(unit).register_forward_hook(early).remove


class Plant(NamedTuple):
    """A step, the right cause, the units that were broken, and those of them that make a spike by themselves."""

    result: StepResult
    cause: str
    units: Sequence[str] = ()
    alone: Sequence[str] = ()


def planted(made: Bed) -> Iterator[Plant]:
    """Each cause in a step that hardly differs from a sound one: of each kind of fault four units, and two pairs."""
    floats = "int" not in made.parts.converted.low.name
    for kind in ("scale_down", "noise") if floats else ("scale_down", "scale_up", "noise"):
        names, spike = made.targets(4), list[str]()
        for name in names:
            made.steady()
            result = made.broken(kind, 300.0, [name])
            spike += [name] * (result.verdict is not None)
            yield Plant(result, "precision", [name], [name])
        for pair in {(names[0], names[len(names) // 2]), tuple(spike[:2])}:
            if len(pair) == 2:
                made.steady()
                result = made.broken(kind, 300.0, list(pair))
                yield Plant(result, "precision", pair, [name for name in pair if name in spike])
    for shift in range(3):
        made.steady(shift)
        undo = corrupt(made)
        yield Plant(made(), "data_or_model")
        undo()
    for unit in made.targets(3):
        made.steady()
        undo = race(made, unit)
        yield Plant(made(), "not_reproducible")
        undo()


@pytest.mark.parametrize("name", ARMS)
def test_planted_causes(name, inputs):
    """Of what spikes each has its own verdict within four step times, which names the broken operators that make the
    spike and no others; of six faults of the forward pass not one costs a step."""
    made = Bed(ARMS[name])
    found = [plant for plant in planted(made) if plant.result.verdict is not None]
    assert {plant.cause for plant in found} == {"data_or_model", "precision", "not_reproducible"}
    wrong, precision = [], [plant for plant in found if plant.cause == "precision"]
    for plant in found:
        verdict = plant.result.verdict
        assert verdict.cause == plant.cause and verdict.passes <= 4 + 1e-9 and not plant.result.skipped, plant
    for plant in precision:
        named = set(plant.result.verdict.units)
        if not (named and set(plant.alone) <= named <= set(plant.units)):
            wrong.append((plant.units, named))
    assert any(len(plant.units) > 1 for plant in precision) and len(wrong) <= len(precision) // 10, wrong
    if name == "saved":
        return  # its low path leaves the forward pass as it is
    told = []
    for kind in ("nan", "inf", "bit_flip"):
        for unit in made.targets(2):
            made.back()
            result = made.broken(kind, 1.0, [unit])
            assert not result.skipped
            told.append(result.verdict is not None)
    assert any(told)
