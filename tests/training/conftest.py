from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from everything import everything

from gnmr.data import TrainBlocks
from gnmr.training import run as run_module
from gnmr.training.step import TrainStep


@pytest.fixture(scope="session")
def uninterrupted(train, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """Everything that a tiny run leaves which was never stopped; trained once for each set of words."""
    seen: dict[tuple[str, ...], dict] = {}

    def get(*words: str) -> dict:
        if words not in seen:
            seen[words] = everything(train(tmp_path_factory.mktemp("uninterrupted") / "run", *words))
            assert seen[words]["events"], "a run without promotions shows little"
        return seen[words]

    return get


@pytest.fixture
def assembled(tiny, tmp_path: Path) -> Callable[..., run_module.Parts]:
    """The parts of a tiny run that has not begun: assembled("training.dtype=float32")."""
    return lambda *words: run_module.assemble(tiny(*words), tmp_path / "unused", lambda _: None)


@pytest.fixture
def step_of() -> Callable[[run_module.Parts], TrainStep]:
    return lambda parts: TrainStep(
        parts.model, parts.plan, parts.controller, parts.optimizer, parts.config.optim.clip_norm
    )


@pytest.fixture
def blocks_of() -> Callable[[run_module.Parts, int], torch.Tensor]:
    """The first n training blocks of a run, (n, seq_len + 1)."""

    def get(parts: run_module.Parts, n: int) -> torch.Tensor:
        training = parts.config.training
        return TrainBlocks(parts.corpus.train, training.seq_len, training.seed, None).next(n)

    return get


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[run_module.Parts], None]], None]:
    """Lets a function change the parts of every run from here on, before its first step."""
    plain = run_module.assemble

    def install(change: Callable[[run_module.Parts], None]) -> None:
        def assemble(*args):
            parts = plain(*args)
            change(parts)
            return parts

        monkeypatch.setattr(run_module, "assemble", assemble)

    return install
