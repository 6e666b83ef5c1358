"""The files of a corpus: which files are read, which are for validation, and what identifies them.

Rules for files below data.path:
- Files with "validation" (or valid, val) in their name or folder are the validation split. If a file is named train,
  all other files (test, dev) are skipped.
- Files of gsm8k with "test" in their name belong to neither split, because they are used for scoring.
- Without validation files, the documents are split instead of the files.

For the standard library, the hash of a file's relative path determines the split (5% are for validation).
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data.rows import named
from gnmr.records.disk import of_a_file_browser, sha256

TRAIN, VALIDATION = "train", "validation"
ONE_IN = 20  # one document in 20 is for validation

_SUPPORTED = (".txt", ".txt.gz", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # written by datasets
_RECORDS = {
    "a run": {"config.yaml", "header.json"},
    "token cache": {"meta.json", "train.bin"},
    "a diagnosis": {"plan.json", "diagnosis.json"},
    "a checkpoint": {"config.json", "model.safetensors"},
    "a checkpoint in parts": {"config.json", "model.safetensors.index.json"},
    "an adapter": {"adapter_config.json"},
}
"""Kinds of folders, recognized by these files, that are not part of a corpus."""
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_IS_VALIDATION = re.compile(r"validation|(?<![a-z])val(id)?(?![a-z])", re.IGNORECASE)
_IS_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_IS_TEST = re.compile(r"(?<![a-z])test(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Hub:
    """A data set on the hub."""

    name: str
    config: str
    """Also the folder of its files."""
    files: str


HUBS = {
    "c4": Hub("allenai/c4", "en", "*.json.gz"),
    "gsm8k": Hub("openai/gsm8k", "main", "*.parquet"),
}


@dataclass(frozen=True)
class LocalFiles:
    """Files of a corpus and their splits."""

    where: str
    """The key and value that select the files, for messages."""
    splits: dict[str, list[Path]]
    """{"train": files, "validation": files}, sorted. Without validation files, the contents of the files are split."""
    summary: str
    identity: str
    """Changes with the name, content or split of any file."""

    @property
    def by_name(self) -> bool:
        """Return True if the file names determine the split."""
        return bool(self.splits[VALIDATION])

    def of(self, split: str) -> list[Path]:
        """Return the files of a split, or all files if names do not determine it."""
        return self.splits[split if self.by_name else TRAIN]


def local_files(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> LocalFiles:
    """Return the files below data.path and their splits, and report progress to `tell`. All files are read and hashed.

    Raises UserError if there are no training files.
    """
    assert config.path is not None
    where, path = f"data.path={config.path}", user_path("data.path", config.path)
    of_clone = config.name in HUBS and (path / HUBS[config.name].config).is_dir()
    if of_clone:
        path = path / HUBS[config.name].config  # a clone of the hub's repository also holds other configurations
    try:
        names, not_read = _below(path, where)
        usable = [name for name in names if config.name != "gsm8k" or not _IS_TEST.search(name)]
        if not usable:
            raise UserError(f"{where}: holds the test split alone, which gsm8k keeps for scores; add train*")
        splits = _split_files(usable, where)
        folder = path if path.is_dir() else path.parent
        identity = _identity(folder, splits, where, tell)
    except OSError as error:
        raise UserError(f"{where}: {error.filename or ''}: cannot be read ({error.strerror or error})") from error
    train, validation = splits[TRAIN], splits[VALIDATION]
    left_out = [name for name in names if name not in {*train, *validation}]
    summary = f"training files: {len(train)}, " + (
        f"validation files: {len(validation)}" if validation else _validation_by_content(config, train)
    )
    if left_out:
        summary += f"; left out because there are files named train: {named(left_out)}"
    if of_clone:
        summary += f"; of the folder {path.name} alone"
    files = {split: [folder / name for name in names] for split, names in splits.items()}
    return LocalFiles(where, files, summary + _not_read(not_read), identity)


def _validation_by_content(config: DataConfig, names: list[str]) -> str:
    """Return what `corpora.every_twentieth` takes for validation, in words."""
    if config.name in ("gsm8k", "instructions"):
        return f"validation: every {ONE_IN}th row (of fewer than {ONE_IN}, the last one)"
    share = f"the last {100 // ONE_IN}% of the text"
    if len(names) < ONE_IN and all(name.lower().endswith((".txt", ".txt.gz")) for name in names):
        return f"validation: {share}"
    return f"validation: every {ONE_IN}th document (of fewer than {ONE_IN}, {share})"


def library_files(tell: Callable[[str], None] = lambda _: None) -> LocalFiles:
    """Return the source files of this Python's standard library and their splits."""
    where, root = "data.name=stdlib", Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, children, files in os.walk(root):  # pruned, because site-packages may be far larger than the library
        children[:] = [child for child in children if child not in _NOT_LIBRARY]
        below, sources = Path(folder).relative_to(root), (file for file in files if os.path.splitext(file)[1] == ".py")
        names += [(below / file).as_posix() for file in sources if os.path.isfile(os.path.join(folder, file))]
    if not names:
        raise UserError(f"{where}: {root} holds no .py files; use data.name=text data.path=FOLDER")
    splits: dict[str, list[str]] = {TRAIN: [], VALIDATION: []}
    for name in sorted(names):
        held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % ONE_IN == 0
        splits[VALIDATION if held_out else TRAIN].append(name)
    paths_of = {split: [root / name for name in names] for split, names in splits.items()}
    return LocalFiles(where, paths_of, f"{len(names)} files of {root}", _identity(root, splits, where, tell))


def _identity(folder: Path, splits: dict[str, list[str]], where: str, tell: Callable[[str], None]) -> str:
    seen = hashlib.sha256()
    for split, names in splits.items():
        for name in names:
            tell(f"comparing {where} with the token cache: {named([name])}")
            path = folder / name
            digest = sha256(path.resolve() if path.is_symlink() else path)
            seen.update(os.fsencode(f"{split}\0{name}\0{digest}\0"))
    return seen.hexdigest()


def user_path(key: str, text: str) -> Path:
    """Return the path that the user gave as `key`. Raises UserError for an invalid path."""
    try:
        path = Path(text).expanduser()
        path.exists()
        return path
    except RuntimeError as error:  # ~ without HOME, or for an unknown user
        raise UserError(f"{key}={text}: {error} Give a whole path") from error
    except OSError as error:
        raise UserError(f"{key}={text}: {error.strerror or error}") from error


def _below(path: Path, where: str) -> tuple[list[str], list[str]]:
    """Return the sorted relative names of the readable files, and the names of the other entries."""
    if path.is_file():
        if not is_supported(path):
            raise UserError(f"{where}: cannot read this kind of file; supported are {', '.join(_SUPPORTED)}")
        return [path.name], []
    if not path.is_dir():
        raise UserError(f"{where}: no such file or folder")
    found, not_read = list[str](), list[str]()

    def refuse(error: OSError) -> None:
        raise error

    for folder, children, names in os.walk(path, onerror=refuse):
        below = Path(folder)
        children[:] = [child for child in children if not child.startswith(".") and not of_a_file_browser(child)]
        names = [name for name in names if not name.startswith(".") and not of_a_file_browser(name)]
        for child in children[:]:
            if kind := _records(below / child):
                children.remove(child)
                not_read.append(f"{(below / child).relative_to(path).as_posix()}/ ({kind})")
        for file in (below / name for name in names):
            usable = is_supported(file) and file.name not in _METADATA and file.is_file()
            (found if usable else not_read).append(file.relative_to(path).as_posix())
    if not found:
        arrow = any(name.endswith(".arrow") for name in not_read)
        raise UserError(
            f"{where}: the folder holds none of the supported files ({', '.join(_SUPPORTED)})"
            + _not_read(not_read)
            + "; datasets.load_from_disk(FOLDER) has to_parquet(FILE), for each split" * arrow
        )
    return sorted(found), not_read


def _not_read(names: list[str]) -> str:
    """Return the end of a line about the files that are not read."""
    return f"; not read: {named(sorted(names))} ({len(names)})" if names else ""


def _records(folder: Path) -> str | None:
    """Return the kind of a folder in which a program keeps records or weights, or None if it may hold a corpus."""
    if folder.is_symlink():
        return "a link to a folder"
    names = {*os.listdir(folder)}
    return "W&B" if folder.name == "wandb" else next((kind for kind, own in _RECORDS.items() if own <= names), None)


def is_supported(file: Path) -> bool:
    """Return True if the file name has a supported extension."""
    return file.name.lower().endswith(_SUPPORTED)


def _split_files(names: list[str], where: str) -> dict[str, list[str]]:
    """Return the names by split. Without validation names, the documents are split instead of the files."""
    if len(names) == 1:
        return {TRAIN: names, VALIDATION: []}  # a single file is the corpus, whatever its name
    validation = [name for name in names if _IS_VALIDATION.search(name)]
    rest = [name for name in names if name not in validation]
    train = [name for name in rest if _IS_TRAIN.search(name)] or rest
    if not train:
        raise UserError(f"{where}: every file is named as validation; name the training files train*")
    return {TRAIN: train, VALIDATION: validation}
