"""Two or four gloo processes on the CPU, started once, that run functions of `in_ranks` together."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from in_ranks import serve

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))  # everything.py


@contextmanager
def started(size: int, folder: Path) -> Iterator[Callable[..., list[Any]]]:
    context = multiprocessing.get_context("forkserver")  # which imports once for all of them
    context.set_forkserver_preload(["gnmr.lab.evaluation.scores", "gnmr.lab.train.run"])
    pipes, workers = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        workers.append(context.Process(target=serve, args=(rank, size, str(folder / "store"), theirs), daemon=True))
        workers[-1].start()
        pipes.append(ours)

    def call(name: str, **options: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send((name, options))
        for _ in range(360):  # half an hour: beside other work it takes long, and a process that ended says so at once
            if all(pipe.poll(5 / size) for pipe in pipes):
                return [pipe.recv()[1] for pipe in pipes]  # an error as its line
            assert all(worker.is_alive() for worker in workers), f"{name}: a process ended without an answer"
        raise AssertionError(f"{name}: no answer")

    yield call
    for pipe in pipes:
        pipe.send(None)
    for worker in workers:
        worker.join(10)
        worker.kill()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """pair(name, **options): what `in_ranks.name` returned in rank 0 and in rank 1, or the errors they raised."""
    with started(2, tmp_path_factory.mktemp("pair")) as call:
        yield call


@pytest.fixture
def told(pair, tiny, tmp_path) -> Callable[..., list[Any]]:
    """told(words, parallel, name, **options): what each of two processes says of the run of these words."""

    def run(words: Any, parallel: str, name: str = "run", **options: Any) -> list[Any]:
        return pair("train", config=tiny(f"run_dir={tmp_path / name}", *words), parallel=parallel, **options)

    return run


@pytest.fixture
def ranks(told, tmp_path) -> Callable[..., Path]:
    """The folder of a run that two processes have ended, see `told`."""

    def run(words: Any, parallel: str, name: str = "run", **options: Any) -> Path:
        answers = told(words, parallel, name, **options)
        assert all(isinstance(answer, list) for answer in answers), answers
        return tmp_path / name

    return run


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a run of one process, as under torchrun, whose micro-batches draw as those of several processes do."""
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return ["parallel=ddp"]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """As `pair`, of four."""
    with started(4, tmp_path_factory.mktemp("four")) as call:
        yield call
