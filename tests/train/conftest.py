from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from everything import everything

from gnmr.lab.config import ModelConfig
from gnmr.lab.data.batch import Batch
from gnmr.lab.data.sequences import TrainSequences
from gnmr.lab.models import Llama
from gnmr.lab.models.pretrained import save
from gnmr.lab.train import run as run_module
from gnmr.lab.train.step import TrainStep

LETTERS = "abcdefghij"


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
    return lambda parts: TrainStep(parts.model, parts.router, parts.optimizer, clip_norm=parts.config.optim.clip_norm)


@pytest.fixture
def blocks_of() -> Callable[[run_module.Parts, int], Batch]:
    """The first n training blocks of a run."""

    def get(parts: run_module.Parts, n: int) -> Batch:
        training = parts.config.training
        return TrainSequences(parts.corpus.train, training.seq_len, training.seed).next(n)

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


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Has a function called before this step (from 1) of every run from here on."""
    plain = TrainStep.__call__

    def install(number: int, happens: Callable[[], object]) -> None:
        def call(self: TrainStep, *args: object) -> object:
            if self.router.t == number - 1:
                happens()
            return plain(self, *args)

        monkeypatch.setattr(TrainStep, "__call__", call)

    return install


@pytest.fixture(scope="session")
def stopped(train) -> Callable[..., Path]:
    """stopped(folder, *words): a run that has ended with an error after its fourth step, and can be continued."""

    def run(folder: Path, *words: str, at: int = 5) -> Path:
        plain = TrainStep.__call__

        def call(self: TrainStep, *args: object) -> object:
            if self.router.t == at - 1:
                raise KeyboardInterrupt
            return plain(self, *args)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TrainStep, "__call__", call)
            train(folder, *words)
        return folder

    return run


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of three blocks and a tokenizer of letters, in Hugging Face's layout."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("base")
    tokenizer = Tokenizer(
        models.WordLevel({"</s>": 0, "?": 1} | {x: 2 + i for i, x in enumerate(LETTERS)}, unk_token="?")
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4)
    model = Llama(shape, 16, 64)
    model.init_weights(torch.Generator().manual_seed(0))
    save(model, folder / "hf", folder / "tokenizer.json")
    return folder / "hf"


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and answers of some letters each."""
    draw, file = random.Random(1), tmp_path_factory.mktemp("rows") / "rows.jsonl"

    def letters(least: int, most: int) -> str:
        return " ".join(draw.choices(LETTERS, k=draw.randint(least, most)))

    lines = [{"prompt": letters(2, 6), "response": letters(1, 8)} for _ in range(200)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="session")
def lora(base: Path, rows: Path) -> list[str]:
    """A tiny run that fine-tunes adapters on `base`."""
    return [
        *("model.name=pretrained", f"model.checkpoint={base}", "model.adapter.rank=2", "model.adapter.dropout=0.1"),
        *("data.name=instructions", f"data.path={rows}", "precision.unit=block", "training.accumulation=2"),
        *("precision.low=sim_int8", "precision.recovery=bf16", "controller.observe=adapter", "optim.lr=0.01"),
        *("controller.max_o=1", "training.dtype=float32", "optim.clip_norm=1.0"),
    ]
