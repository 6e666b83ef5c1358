"""A configuration whose caches lie in the test's own folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_corpora import DOCUMENTS, write_rows

from gnmr.lab.config import DataConfig
from gnmr.lab.data import corpora


@pytest.fixture(scope="session", autouse=True)
def streams_are_collected_at_the_end() -> Iterator[None]:
    """To collect garbage after each stream, as a run does, takes as long as the rest of building a tiny cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "gc", SimpleNamespace(collect=lambda: 0))
        yield
    gc.collect()


@pytest.fixture(autouse=True)
def home_of_datasets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's caches; one that wants the hub starts a process of its own."""
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GNMR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(cache_dir: Path) -> Callable[..., DataConfig]:
    """`DataConfig` with a small vocabulary; tokens are cached in `cache_dir`."""

    def make(**changes: Any) -> DataConfig:
        return DataConfig(**({"name": "text", "vocab_size": 300} | changes))

    return make


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "corpus.jsonl", DOCUMENTS)
