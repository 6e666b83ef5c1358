"""Tiny runs over a tiny text, in this process; no test reads the user's caches or the network."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: two workers share two cores
os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell has it that starts the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import HealthCheck, settings
from omegaconf import OmegaConf

from gnmr.attachment import hints
from gnmr.conversion import scaled_mm
from gnmr.lab import config
from gnmr.lab.models import cpu_products

# Here, and not when a test builds the first model: products before and after differ in their last bits.
cpu_products.provide()

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no clock decides
settings.load_profile("tests")

TINY = """
model: {hidden_size: 32, intermediate_size: 48, num_layers: 1, num_heads: 2}
data: {name: text, vocab_size: 300}
controller: {alpha: 1.05, beta: 1.02, max_o: 2}
training: {steps: 8, seq_len: 16, batch_size: 2, eval_every: 4, eval_sequences: 2, checkpoint_every: 3, threads: 1}
records: {live: "off", wandb: "off"}
experiment_name: tiny
"""
"""One layer (seven units), and thresholds so low that the controller is busy."""


def pytest_configure(config: pytest.Config) -> None:
    """Hide a GPU from tests that do not ask for one with `-m gpu`: they compare bits with those of the CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.M)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file of slow tests alone where none is asked for: its libraries take seconds to import."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return bool(ALL_SLOW.search(collection_path.read_text())) or None


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage need look at them again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of FP8 products where PyTorch has none on the CPU, as `gnmr` refuses them there."""
    if item.get_closest_marker("fp8") is not None and (missing := scaled_mm.cpu_missing()) is not None:
        pytest.skip(missing)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of tokens for all tests of a worker and for the processes that they start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNMR_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_last_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A controller that a test leaves behind warns of nothing in the test during which its model is collected."""
    ends: list[weakref.finalize[..., Any]] = []

    def finalize(*words: Any) -> weakref.finalize[..., Any]:
        ends.append(weakref.finalize(*words))
        return ends[-1]

    monkeypatch.setattr(hints, "weakref", SimpleNamespace(finalize=finalize))
    yield
    for end in ends:
        end.detach()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 20,000 tokens of babble in 600 lines, one document."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(120)]
    file = tmp_path_factory.mktemp("text") / "babble.txt"
    file.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(600)))
    return file


@pytest.fixture(scope="session")
def tiny(text_file: Path, cache: Path) -> Callable[..., config.Config]:
    """The config of a tiny run with some keys changed: tiny("precision.low=int2", "training.steps=3")."""

    whole = OmegaConf.create(TINY)

    def make(*words: str) -> config.Config:
        return config.load(OmegaConf.merge(whole, OmegaConf.from_dotlist([f"data.path={text_file}", *words])))

    return make


@pytest.fixture(scope="session")
def train(tiny: Callable[..., config.Config]) -> Callable[..., Path]:
    """Trains a tiny run into a folder: train(tmp_path / "a", "training.seed=1") -> that folder."""

    def make(folder: Path, *words: str, say: Callable[[str], None] = lambda _: None) -> Path:
        from gnmr.lab.evaluation.scores import RunScorer
        from gnmr.lab.train.run import run

        return run(tiny(f"run_dir={folder}", *words), say, scorer=RunScorer())

    return make


@pytest.fixture
def tiny_words(text_file: Path, tmp_path: Path) -> list[str]:
    """Words behind `gnmr train` for a run of two tiny steps below `tmp_path / "runs"`."""
    sizes = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=1", "training.seq_len=16"]
    quiet = ["records.live=off", "records.wandb=off", "training.threads=1"]
    data = ["data.name=text", f"data.path={text_file}", "data.vocab_size=300"]
    return ["debug=smoke", *data, *sizes, *quiet, f"runs_dir={tmp_path / 'runs'}"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of the given size; a second call gives it another size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(size: str) -> Path:
        how = "remount," if os.path.ismount(folder) else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{how}size={size}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("mounting a file system is not permitted here")
        return folder

    yield resize
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def mistake(self) -> str:
        """The line of a mistake; fails if the command ended in any other way or said more than that."""
        assert self.code == 2, f"exit code {self.code}, stderr: {self.err}"
        assert self.err.startswith("gnmr: ") and self.err.endswith("\n") and self.err.count("\n") == 1, self.err
        return self.err.removeprefix("gnmr: ").removesuffix("\n")


@pytest.fixture
def gnmr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Outcome]]:
    """Runs a command line in this process, which it leaves as it was: gnmr("train", "--help") -> Outcome."""
    from hydra.core.global_hydra import GlobalHydra

    from gnmr.lab.cli import main

    root = logging.getLogger()
    environment, argv, handlers, level = dict(os.environ), list(sys.argv), list(root.handlers), root.level

    def command(*words: str) -> Outcome:
        capsys.readouterr()
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            GlobalHydra.instance().clear()
            root.handlers, sys.argv = list(handlers), list(argv)
            root.setLevel(level)
            os.environ.pop("HYDRA_FULL_ERROR", None)
        return Outcome(code, *capsys.readouterr())

    yield command
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra does not compose all of a command's config twice, the first time for hydra.mode, which we leave alone."""
    from hydra._internal.hydra import Hydra

    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # then the flags say it


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a network, for pages on disk; skips the test where there is none."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1000", offline):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()
