"""Files below data.path: which are read, which are for validation, and what identifies them.

- Files with "validation" (or valid, val) in their name or folder are the validation split. If a file is named train,
  all other files (test, dev) are left out.
- Files with "test" in their name belong to neither split of the corpora that are scored by their test split.
- Without validation files the documents are split instead of the files.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data.rows import named

TRAIN, VALIDATION = "train", "validation"
ONE_IN = 20  # one document in 20 is for validation

_SUPPORTED = (".txt", ".txt.gz", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # of the library datasets
_CHUNK = 2**20  # bytes of a file that are hashed together
_SCORED_BY_TEST = ("gsm8k", "wikitext2")
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
    "wikitext2": Hub("Salesforce/wikitext", "wikitext-2-raw-v1", "*.parquet"),
}


@dataclass(frozen=True)
class LocalFiles:
    """The files below data.path."""

    where: str
    files: dict[str, Path]
    """Relative posix path -> file, sorted."""
    splits: dict[str, list[str]]
    """{"train": names, "validation": names}; no validation names: what the files hold is split."""
    summary: str
    identity: str
    """Changes with the name or the content of a file that is read, and with its split."""

    @property
    def by_name(self) -> bool:
        """Whether the names of the files decide the split."""
        return bool(self.splits[VALIDATION])

    def of(self, split: str) -> list[Path]:
        """Return the files of a split; all that are read if names do not decide."""
        return [self.files[name] for name in self.splits[split if self.by_name else TRAIN]]


def local_files(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> LocalFiles:
    """Return the files below data.path and their splits; raises UserError if there are none to train on.

    `tell` hears of the progress: all that the files hold is read, and hashed.
    """
    assert config.path is not None
    where, path = f"data.path={config.path}", user_path("data.path", config.path)
    of_clone = config.name in HUBS and (path / HUBS[config.name].config).is_dir()
    if of_clone:
        path = path / HUBS[config.name].config  # a clone of the hub's repository also holds other configurations
    try:
        files, not_read = _local_files(path, where, cache_of(config))
        usable = [name for name in files if config.name not in _SCORED_BY_TEST or not _IS_TEST.search(name)]
        if not usable:
            raise UserError(f"{where}: holds the test split alone, which {config.name} keeps for scores; add train*")
        splits = _split_files(usable, where)
        read = ((f"{split}\0{name}", files[name]) for split, names in splits.items() for name in names)
        identity = identity_of(read, where, tell)
    except OSError as error:
        raise UserError(f"{where}: {error.filename or ''}: cannot be read ({error.strerror or error})") from error
    train, validation = splits[TRAIN], splits[VALIDATION]
    left_out = sorted(files.keys() - {*train, *validation})

    summary = f"training files: {len(train)}, " + (
        f"validation files: {len(validation)}" if validation else f"validation: every {ONE_IN}th document"
    )
    if left_out:
        summary += f"; left out beside files named train: {named(left_out)}"
    if of_clone:
        summary += f"; of the folder {path.name} alone"
    return LocalFiles(where, files, splits, summary + _not_read(not_read), identity)


def identity_of(files: Iterable[tuple[str, Path]], where: str, tell: Callable[[str], None] = lambda _: None) -> str:
    """Return a sha256 over names and contents of files."""
    seen, size = hashlib.sha256(), 0
    for name, file in files:
        own = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                own.update(chunk)
                size += len(chunk)
                tell(f"comparing {where} with the token cache: {size / 1e9:.1f} GB read")
        seen.update(os.fsencode(f"{name}\0{own.hexdigest()}\0"))
    return seen.hexdigest()


def cache_of(config: DataConfig) -> Path:
    """The folder of the token caches."""
    return user_path("data.cache_dir", config.cache_dir)


def user_path(key: str, text: str) -> Path:
    """The path that the user gave as `key`; raises `UserError` for one that no file or folder can have."""
    try:
        if "\0" in text:
            raise OSError("a path has no NUL")
        path = Path(text).expanduser()
        path.exists()
        return path
    except RuntimeError as error:  # ~ without HOME, or of an unknown user
        raise UserError(f"{key}={text}: {error} Give a whole path") from error
    except OSError as error:
        raise UserError(f"{key}={text}: {error.strerror or error}") from error


def _local_files(path: Path, where: str, cache: Path) -> tuple[dict[str, Path], list[str]]:
    """(relative posix path -> file, sorted; what else a folder holds). Hidden files are passed over unsaid."""
    if path.is_file():
        if extension(path) is None:
            raise UserError(f"{where}: cannot read this kind of file; supported are {', '.join(_SUPPORTED)}")
        return {path.name: path}, []
    if not path.is_dir():
        raise UserError(f"{where}: no such file or folder")
    found, not_read = dict[str, Path](), list[str]()

    def refuse(error: OSError) -> None:
        raise error

    for folder, children, names in os.walk(path, onerror=refuse):
        below = Path(folder)
        children[:] = [name for name in children if not name.startswith(".")]
        for child in list(children):
            inside = below / child
            kind = "a link to a folder" if inside.is_symlink() else _records(inside, cache)
            if kind is not None:
                children.remove(child)
                not_read.append(f"{inside.relative_to(path).as_posix()}/ ({kind})")
        for name in (name for name in names if not name.startswith(".")):
            file = below / name
            place = file.relative_to(path).as_posix()
            if extension(file) is None or name in _METADATA or (name == "state.json" and _METADATA[0] in names):
                not_read.append(place)
            elif not file.is_file():
                not_read.append(f"{place} ({'a link to nothing' if file.is_symlink() else 'no regular file'})")
            else:
                found[place] = file
    not_read.sort()
    if not found:
        arrow = any(name.endswith(".arrow") for name in not_read)
        raise UserError(
            f"{where}: the folder holds none of the supported files ({', '.join(_SUPPORTED)})"
            + _not_read(not_read)
            + "; datasets.load_from_disk(FOLDER) has to_parquet(FILE), for each split" * arrow
        )
    return dict(sorted(found.items())), not_read


def _not_read(names: list[str]) -> str:
    """Return the end of a line about the files that are not read."""
    return f"; not read: {named(names)} ({len(names)})" if names else ""


def _records(folder: Path, cache: Path) -> str | None:
    """What a folder is if a program keeps its own records or weights there; None if it may hold a corpus."""
    names = set(os.listdir(folder))
    if ".lock" in names or names >= {"config.yaml", "header.json"}:
        return "a run"
    if names >= {"meta.json", "train.bin"} or (cache.is_dir() and folder.samefile(cache)):
        return "token cache"
    if names >= {"plan.json", "diagnosis.json"}:
        return "a diagnosis"
    if "adapter_config.json" in names or ("config.json" in names and any(n.endswith(".safetensors") for n in names)):
        return "a checkpoint"
    return "W&B" if folder.name == "wandb" else None


def extension(file: Path) -> str | None:
    return next((extension for extension in _SUPPORTED if file.name.lower().endswith(extension)), None)


def _split_files(names: list[str], where: str) -> dict[str, list[str]]:
    """Return the names by split; no validation names: the documents are split instead of the files."""
    if len(names) == 1:
        return {TRAIN: names, VALIDATION: []}  # a file alone is the corpus, whatever its name says
    validation = [name for name in names if _IS_VALIDATION.search(name)]
    rest = [name for name in names if name not in validation]
    train = [name for name in rest if _IS_TRAIN.search(name)] or rest
    if not train:
        raise UserError(f"{where}: every file is named as validation; name the training files train*")
    return {TRAIN: train, VALIDATION: validation}
