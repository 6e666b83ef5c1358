"""A run's folder: its path, its owner, and its lock. Most calls do not import torch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gnmr.errors import UserError, writing
from gnmr.lab.config import Config, config_hash, identity, read
from gnmr.lab.config.compose import place_of_base
from gnmr.lab.data import tokenizer as bpe
from gnmr.lab.data.corpora import open_corpus
from gnmr.records.disk import check_tree, of_a_file_browser
from gnmr.records.find import last_step
from gnmr.records.lock import lock_folder
from gnmr.records.untrusted import reading


def run_folder(config: Config) -> Path:
    """Return `run_dir` if it is set, else runs_dir/<experiment>/<arm>-<hash>-s<seed>."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser()
    name = f"{config.arm_name}-{config_hash(config)}-s{config.training.seed}"
    return Path(config.runs_dir).expanduser() / config.experiment_name / name


def check_folder(folder: Path, config: Config) -> None:
    """Raise UserError if the folder holds another run or links."""
    if folder.is_dir():
        with writing(folder):
            check_tree(folder, skip=("wandb",))  # W&B creates links to its own files
    saved = folder / "config.yaml"
    if not saved.exists():
        # The lock is a run's first file. It identifies a run that was killed before it wrote its config.
        inside = [p for p in folder.iterdir() if not of_a_file_browser(p.name)] if folder.is_dir() else [folder]
        foreign = inside and not (folder / ".lock").exists()
        if folder.exists() and foreign:
            raise UserError(f"run_dir={folder}: is not a run folder; choose an empty folder or a new one")
        return
    try:
        earlier = read(saved)
    except UserError as error:
        raise UserError(f"{error}; choose another run_dir") from error
    now, then = identity(config), identity(earlier)
    # The seed is no part of a config's identity, but a folder holds a single seed.
    seed = "training.seed"
    now[seed], then[seed] = config.training.seed, earlier.training.seed
    for key in now | then:
        there, here = (tree.get(key, "not set") for tree in (then, now))
        if there != here:
            raise UserError(
                f"{folder} holds a run of another config: {key} is {there} there and {here} here; "
                "choose another run_dir"
            )


def begun_with(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return (header.json, its data, its base) of the run in `folder`, each empty if it is missing."""
    from gnmr.records.reader import read_json

    header = read_json(folder / "header.json") or {}
    with reading(folder / "header.json"):
        return header, dict(header.get("data") or {}), dict(header.get("base") or {})


def check_inputs(folder: Path, config: Config) -> None:
    """Raise UserError if the run in `folder` began with other data, weights or code than the config names now.

    Digests of local files are compared with header.json. No model is built, no text is tokenized, and nothing is
    fetched: data sets and checkpoints on the hub are identified by their names.
    """
    if not (folder / "header.json").is_file():
        return
    header, data, base = begun_with(folder)

    def same(name: str, began: str | None, now: str | None) -> None:
        # None: the header says nothing about it, so nothing can be compared.
        if began not in (None, now):
            raise UserError(
                f"{name} changed since the run in {folder} began, or cannot be found now; put it back as it was, or "
                "choose another run_dir"
            )

    # The code of a user's signal decides which units recover.
    same(f"controller.signal={config.controller.signal}: its file", header.get("signal_sha256"), signal_sha256(config))
    # Text and tokenizer together determine every token.
    corpus = open_corpus(config.data)
    text = "this Python's library" if config.data.name == "stdlib" else "its text"
    same(f"{corpus.where}: {text}", data.get("source"), corpus.identity)
    if (file := config.data.tokenizer) is not None:
        content, _ = bpe.read(Path(file).expanduser(), f"data.tokenizer={file}")
        same(f"data.tokenizer={file}: the file", data.get("tokenizer"), sha256(content).hexdigest())
    if (checkpoint := config.model.checkpoint) is not None and Path(checkpoint).expanduser().is_dir():
        from gnmr.lab.models import pretrained

        where = f"model.checkpoint={checkpoint}"
        content, _ = bpe.read(pretrained.local(checkpoint), where)
        same(f"{where}: its tokenizer", data.get("tokenizer"), sha256(content).hexdigest())
        same(f"{where}: its weights", header.get("checkpoint"), pretrained.fingerprint(checkpoint))
    if config.base is not None:
        metas = place_of_base(config.base)[1].rglob("meta.json")
        # Verifying a checkpoint reads all its files, so the newest by name is compared first.
        newest = max((meta for meta in metas if re.fullmatch(r"step-\d{8}", meta.parent.name)), default=None)
        now = None if newest is None else sha256(newest.read_bytes()).hexdigest()
        if now is not None and base.get("sha256") not in (None, now):  # is the newest one whole?
            from gnmr.lab.train.checkpoint import find

            with warnings.catch_warnings(action="ignore"):
                now = find(place_of_base(config.base)[1]).sha256
        same(f"base={config.base}: its checkpoint", base.get("sha256"), now)


def signal_sha256(config: Config) -> str | None:
    """Return the SHA-256 of the file of a user's signal (module:Class); None for other signals or without a file."""
    module, colon, _ = config.controller.signal.partition(":")
    with suppress(ImportError, OSError, ValueError):
        spec = find_spec(module) if colon else None
        if spec is not None and spec.origin is not None:
            return sha256(Path(spec.origin).read_bytes()).hexdigest()
    return None


def unexported(config: Config, folder: Path) -> bool:
    """Return True if training.export_hf asks for a folder hf/ that does not exist yet."""
    return config.training.export_hf and not (folder / "hf").is_dir()


def done_already(config: Config, say: Callable[[str], None]) -> bool:
    """Return True, and report it, if the run is complete. Raises UserError like `check_folder` and `check_inputs`."""
    folder = run_folder(config)
    check_folder(folder, config)
    check_inputs(folder, config)
    if not (folder / "DONE").exists() or unexported(config, folder):
        return False
    # If rows are missing, the folder was copied or cut in part, and DONE cannot be believed.
    if 0 < (last := last_step(folder)) < config.total_steps:
        raise UserError(
            f"{folder / 'DONE'}: the rows end after step {last:,} of {config.total_steps:,}; remove DONE, and the same "
            "command continues the run"
        )
    say_done(config, folder, say)
    return True


def say_done(config: Config, folder: Path, say: Callable[[str], None]) -> None:
    """Report that a run is DONE, and how to score it if its scores are not the requested ones."""
    say(f"{folder} is done: skipped")
    if config.scores.tasks and (lacking := _unscored(config, folder)):
        say(f"{lacking}; export it (training.export_hf=true) and score hf/ with lm_eval")


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def _unscored(config: Config, folder: Path) -> str | None:
    """Return which of the requested scores a DONE run lacks, or None."""
    from gnmr.records.reader import read_jsonl

    rows, before = read_jsonl(folder / "scores.jsonl"), read(folder / "config.yaml").scores
    scored = {name for row in rows if row["step"] == config.total_steps for name in row.get("tasks", ())}
    if missing := [name for name in config.scores.tasks if name not in scored]:
        return f"scores.tasks=[{','.join(missing)}]: the run is done without these scores"
    for key in ("path", "limit"):
        wanted, taken = getattr(config.scores, key), getattr(before, key)
        if wanted != taken:
            return f"scores.{key}={_word(wanted)}: the scores of the run were taken with {_word(taken)}"
    return None


@contextmanager
def locked(folder: Path, key: str = "run_dir") -> Iterator[None]:
    """Create the folder and lock it until the block ends. A message advises another value of `key`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another {key}") from error
    try:
        yield
    finally:
        del lock
