"""Same model, data and options, same sets: in our runner, a plain loop, Trainer, Accelerate and Lightning.

(In torchtitan's, which has a model of its own: test_torchtitan.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import loops
import numpy as np
import pytest
import torch
from loops import LOOPS, Start
from pairs import assert_same, run_pair

from gnmr.control import Decision
from gnmr.lab import config, models
from gnmr.lab.data.sequences import TrainSequences
from gnmr.lab.data.tokens import prepare
from gnmr.records.reader import read_units

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("same_sets")]

NEEDS = {"accelerate": "accelerate", "hf_trainer": "transformers", "lightning": "lightning"}
STEPS, SAVED = 10, 4
WORDS = [
    *(f"training.steps={STEPS}", "training.accumulation=2", "training.dtype=float32", "training.checkpoint_every=100"),
    *("optim.lr=0.01", "optim.warmup_frac=0", "optim.min_lr_frac=1", "optim.clip_norm=0.5", "model.num_layers=2"),
]
OPTIONS = {"low": "int4", "recovery": "int8", "max_o": 2, "alpha": 1.05, "beta": 1.02, "steps": STEPS}


def needs(name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")


@pytest.fixture(scope="module")
def start(tiny: Callable[..., config.Config]) -> Start:
    """What the runner's config says, in a loop's terms."""
    settings = tiny(*WORDS)
    training, optim = settings.training, settings.optim
    corpus = prepare(settings.data, 0, lambda _: None)
    model = models.build(settings.model, corpus.vocab_size, training.seq_len)
    model.init_weights(torch.Generator().manual_seed(training.seed))
    sequences = TrainSequences(corpus.train, training.seq_len, training.seed)
    batch = sequences.next(STEPS * training.accumulation * training.batch_size)
    return Start(
        model=settings.model,
        vocab_size=corpus.vocab_size,
        weights=model.state_dict(),
        blocks=torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1),
        options=OPTIONS,
        size=training.batch_size,
        accumulation=training.accumulation,
        lr=optim.lr,
        clip_norm=optim.clip_norm or 0.0,
        save_at=SAVED,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all loops' checkpoints."""
    return tmp_path_factory.mktemp("loops")


@pytest.fixture(scope="module")
def plain(start: Start, folder: Path) -> list[Decision]:
    decisions = LOOPS["by_hand"](start, folder)
    assert len(decisions) == STEPS and len({tuple(one.active) for one in decisions}) > 3, "sets have to change"
    return decisions


def test_in_our_runner(plain: list[Decision], train: Callable[..., Path], tmp_path: Path) -> None:
    rows = read_units(train(tmp_path / "run", *WORDS)).to_pylist()
    in_force = np.array([row["active"] for row in rows]).reshape(STEPS, -1)
    norm = np.array([row["norm"] for row in rows]).reshape(STEPS, -1)
    np.testing.assert_array_equal(in_force, [one.in_force for one in plain])
    np.testing.assert_allclose(norm, [one.norm for one in plain], rtol=1e-4)  # sums in an order that goes by the CPU


@pytest.fixture(scope="module")
def pair(start: Start, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[list[Decision]]]]:
    """Of either rank of two processes: what each loop decided, from the start and from its checkpoint."""
    folder = tmp_path_factory.mktemp("pair")
    torch.save(start, folder / "start.pt")
    names = [name for name in LOOPS if name not in NEEDS or find_spec(NEEDS[name])]
    # As torchrun has it; without, Lightning drops WORLD_SIZE.
    return run_pair(Path(loops.__file__), folder, *names, TORCHELASTIC_RUN_ID="pair", GROUP_RANK="0")


@pytest.mark.parametrize("name", LOOPS)
def test_in_one_process(name: str, start: Start, plain: list[Decision], folder: Path) -> None:
    """And again from the checkpoint of the fourth step, as each library makes it."""
    needs(name)
    if name != "by_hand":
        assert_same(LOOPS[name](start, folder), plain)
    assert_same(LOOPS[name](replace(start, resume=True), folder), plain[SAVED:])


@pytest.mark.parametrize("name", LOOPS)
def test_in_two_processes(name: str, plain: list[Decision], pair: list[dict[str, list[list[Decision]]]]) -> None:
    """Under DDP, each with every other micro-batch; one's checkpoint is both's."""
    needs(name)
    for rank in pair:
        whole, rest = rank[name]
        assert_same(whole, plain)
        assert_same(rest, plain[SAVED:])
