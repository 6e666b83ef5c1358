"""Corpora: where their documents are read from, and which documents are for validation.

Opening a corpus reads no text (but for the standard library, which is identified by its contents), so a warm token
cache costs a few `stat` calls. `datasets` is imported when rows must be read, not before.

The split never depends on the order in which anything runs:
- stdlib: the hash of a file's relative path decides (5 % are for validation).
- files with "validation" (or valid, val) in their name or folder are the validation split. Beside files named train,
  all other files (test, dev) are left out.
- without such files every 20th document is for validation. Fewer than 20 documents give the last 5 % of their text;
  it is cut before tokenization, so that the tokenizer never sees it either.

Files with "test" in their name belong to neither split of the corpora that are scored by their test split
(gsm8k, wikitext2).
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from gnmr.config import DataConfig
from gnmr.data.rows import LARGEST_WHOLE, Row, named, read_rows
from gnmr.errors import UserError

TRAIN, VALIDATION = "train", "validation"
HUB_TIMEOUT = 10.0  # seconds to wait for the hub
ONE_IN = 20  # one document in 20 is for validation
COLUMN_WITHIN = 1000  # the text's column must appear within so many rows

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SUPPORTED = (".txt", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_SCORED_BY_TEST = ("gsm8k", "wikitext2")
_IS_VALIDATION = re.compile(r"validation|(?<![a-z])val(id)?(?![a-z])", re.IGNORECASE)
_IS_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_IS_TEST = re.compile(r"(?<![a-z])test(?![a-z])", re.IGNORECASE)
_IS_TITLE = re.compile(r" ?= [^=\s].* = ?")  # of an article; its sections have two and more signs


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


_T = TypeVar("_T")


@dataclass(frozen=True)
class Corpus(Generic[_T]):
    """Documents (or examples) that can be read any number of times, a split at a time."""

    where: str
    """The key and value that chose it, as messages name it."""
    summary: str
    """What is read, for the progress line."""
    identity: str
    """Changes with anything that changes the documents."""
    read: Callable[[str], Iterator[_T]]
    """Split ("train" or "validation") -> its documents, none blank. Raises `UserError` for what cannot be read."""
    streamed: bool = False
    """From the hub: of unknown length, so a limit is needed."""


def open_corpus(config: DataConfig) -> Corpus[str]:
    """The corpus that `config` names; raises `UserError` if there is none."""
    if config.name == "stdlib":
        return _stdlib()
    if config.name in ("gsm8k", "instructions"):
        raise UserError(f"data.name={config.name}: prompts and answers fine-tune a checkpoint; use text for plain text")
    return _hub(config) if config.path is None else _local(config)


def _documents_of(config: DataConfig, texts: Iterator[str]) -> Iterator[str]:
    """The documents among the rows or files of a corpus."""
    return _not_blank(articles(texts) if config.name == "wikitext2" else texts)


def articles(texts: Iterable[str]) -> Iterator[str]:
    """The articles of WikiText, whose rows are single lines and whose files are all lines of a split.

    An article begins at its title, a line ` = Title = ` after a blank one (a formula may look like a title). What comes
    before the first title is an article too. Every line ends with a newline, a blank one is nothing but that.
    """
    article: list[str] = []
    for line in chain.from_iterable(text.removesuffix("\n").split("\n") for text in texts):
        line = "" if line.isspace() else line
        if _IS_TITLE.fullmatch(line) and (not article or article[-1] == "\n"):
            yield "".join(article)
            article = []
        article.append(line + "\n")
    yield "".join(article)


# ---- the standard library ----


def _stdlib() -> Corpus[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_library_files(root))
    if not names:
        raise UserError(f"data.name=stdlib: {root} holds no .py files; use data.name=text data.path=FOLDER")
    seen = hashlib.sha256()
    for name in names:
        seen.update(f"{name}\0".encode())
        seen.update(hashlib.sha256((root / name).read_bytes()).digest())

    def documents(split: str) -> Iterator[str]:
        return _not_blank(_read_text(root / name) for name in names if _library_split(name) == split)

    return Corpus("data.name=stdlib", f"{len(names)} files of {root}", seen.hexdigest(), documents)


def _library_files(root: Path) -> Iterator[str]:
    """Relative posix paths. A walk with pruning: site-packages may be larger than the library by far."""
    for folder, children, files in os.walk(root):
        children[:] = [child for child in children if child not in _NOT_LIBRARY]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py" and path.is_file():
                yield path.relative_to(root).as_posix()


def _library_split(name: str) -> str:
    return VALIDATION if int(hashlib.sha256(name.encode()).hexdigest(), 16) % ONE_IN == 0 else TRAIN


# ---- the hub ----


def _hub(config: DataConfig) -> Corpus[str]:
    hub, column = HUBS[config.name], config.text_column

    def documents(split: str) -> Iterator[str]:
        return _documents_of(config, _column(hub_rows(config.name, split), column, f"{hub.name} on the hub"))

    return Corpus(
        f"data.name={config.name}",
        f"{hub.name} {hub.config}, streamed",
        f"{hub.name}/{hub.config}/{column}",
        documents,
        streamed=config.name == "c4",  # the others are small
    )


def hub_rows(name: str, split: str) -> Iterator[Row]:
    """The rows of a split of the data set that data.name=`name` reads from the hub; `UserError` if that fails."""
    hub = HUBS[name]
    try:
        # One request without retries: the library itself tries for half a minute, a line of noise each time.
        from huggingface_hub import HfApi

        HfApi().dataset_info(hub.name, timeout=HUB_TIMEOUT, expand=["sha"])
        rows = _datasets().load_dataset(hub.name, hub.config, split=split, streaming=True)
        for number, cells in enumerate(rows, start=1):
            yield Row(f"{hub.name} on the hub: row {number}", cells)
    except Exception as error:  # network, gzip, JSON, Arrow: many libraries, no common base
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"data.name={name}: {hub.name} cannot be read from the hub ({type(error).__name__}: {reason}); check the "
            f"network, HF_ENDPOINT and the proxy, or download its {hub.config}/{hub.files} and pass data.path=FOLDER"
        ) from error
    finally:  # Arrow's threads of a stream that outlives its reader may abort Python at exit (apache/arrow#45214)
        gc.collect()


def _datasets() -> Any:
    """The library, imported late (1.5 s), without its progress bars and log lines."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


# ---- local files ----


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
    """Changes with name, size or time of a file."""


def local_files(config: DataConfig) -> LocalFiles:
    """The files below data.path and their splits; raises `UserError` if there are none to train on."""
    assert config.path is not None
    where, path = f"data.path={config.path}", user_path("data.path", config.path)
    if config.name in HUBS and (path / HUBS[config.name].config).is_dir():
        path = path / HUBS[config.name].config  # a clone of the hub's repository also holds other configurations
    try:
        files = _local_files(path, where)
        states = {name: file.stat() for name, file in files.items()}
    except OSError as error:
        raise UserError(f"{where}: {error.filename or ''}: cannot be read ({error.strerror or error})") from error
    usable = [name for name in files if config.name not in _SCORED_BY_TEST or not _IS_TEST.search(name)]
    if not usable:
        raise UserError(f"{where}: holds the test split alone, which {config.name} keeps for scores; add train*")
    splits = _split_files(usable, where)
    train, validation = splits[TRAIN], splits[VALIDATION]
    left_out = sorted(name for name in files if name not in train and name not in validation)

    identity = "".join(f"\0{name}\0{state.st_size}\0{state.st_mtime_ns}" for name, state in states.items())
    summary = f"training files: {len(train)}, " + (
        f"validation files: {len(validation)}" if validation else f"validation: every {ONE_IN}th document"
    )
    if left_out:
        summary += f"; left out beside files named train: {named(left_out)}"
    return LocalFiles(where, files, splits, summary, identity)


def user_path(key: str, text: str) -> Path:
    """The path that the user gave as `key`; raises `UserError` for one that no file or folder can have."""
    try:
        if "\0" in text:
            raise OSError("a path has no NUL")
        path = Path(text).expanduser()
        path.exists()
        return path
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise UserError(f"{key}={text}: {getattr(error, 'strerror', None) or error}") from error


def _local(config: DataConfig) -> Corpus[str]:
    local = local_files(config)

    def read(names: list[str]) -> Iterator[str]:
        return _documents_of(
            config, chain.from_iterable(_file_texts(local.files[name], config.text_column) for name in names)
        )

    def documents(split: str) -> Iterator[str]:
        if local.splits[VALIDATION]:
            return read(local.splits[split])
        return (text for place, text in every_twentieth(read(local.splits[TRAIN])) if place == split)

    identity = hashlib.sha256(os.fsencode(f"{config.text_column}{local.identity}")).hexdigest()
    return Corpus(local.where, local.summary, identity, documents)


def _local_files(path: Path, where: str) -> dict[str, Path]:
    """Relative posix path -> file, sorted; hidden files and what has another format are passed over in a folder."""
    if path.is_file():
        if _extension(path) is None:
            raise UserError(f"{where}: cannot read this kind of file; supported are {', '.join(_SUPPORTED)}")
        return {path.name: path}
    if not path.is_dir():
        raise UserError(f"{where}: no such file or folder")
    found = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file() and _extension(file)}
    visible = {name: found[name] for name in sorted(found) if not name.startswith(".") and "/." not in name}
    if not visible:
        raise UserError(f"{where}: the folder holds none of the supported files ({', '.join(_SUPPORTED)})")
    return visible


def _extension(file: Path) -> str | None:
    return next((extension for extension in _SUPPORTED if file.name.lower().endswith(extension)), None)


def _split_files(names: Iterable[str], where: str) -> dict[str, list[str]]:
    """{"train": names, "validation": names}; no validation names: the documents are split instead of the files."""
    names = list(names)
    if len(names) == 1:
        return {TRAIN: names, VALIDATION: []}  # a file alone is the corpus, whatever its name says
    validation = [name for name in names if _IS_VALIDATION.search(name)]
    rest = [name for name in names if name not in validation]
    train = [name for name in rest if _IS_TRAIN.search(name)] or rest
    if not train:
        raise UserError(f"{where}: every file is named as validation; name the training files train*")
    return {TRAIN: train, VALIDATION: validation}


def every_twentieth(documents: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(split, document): every 20th for validation; of fewer than 20 documents the last 5 % of their characters."""
    documents = iter(documents)
    head = list(islice(documents, ONE_IN))
    if len(head) == ONE_IN:
        for number, text in enumerate(chain(head, documents), start=1):
            yield (VALIDATION if number % ONE_IN == 0 else TRAIN), text
        return
    left = sum(map(len, head)) * (ONE_IN - 1) // ONE_IN
    for text in head:
        cut = min(left, len(text))
        left -= cut
        if cut > 0:
            yield TRAIN, text[:cut]
        if cut < len(text):
            yield VALIDATION, text[cut:]


def _file_texts(file: Path, column: str) -> Iterator[str]:
    if _extension(file) == ".txt":
        return iter([_read_text(file)])
    return _column(read_rows(file, least=0), column, str(file))


# ---- rows and text ----


def _column(rows: Iterable[Row], column: str, where: str) -> Iterator[str]:
    """The text of one column, nulls left out; a row without it counts as null where others have it."""
    row, seen = None, False
    for number, row in enumerate(rows, start=1):
        seen = seen or column in row.cells
        if not seen and number == COLUMN_WITHIN:
            break
        if row.cells.get(column) is not None:
            yield row.text(column)
    if row is not None and not seen:
        raise UserError(f"{where}: no column {column!r}; data.text_column must be one of {named(row.cells)}")


def _read_text(file: Path) -> str:
    try:
        if (size := file.stat().st_size) > LARGEST_WHOLE:
            raise UserError(f"{file}: a document of {size} bytes; split it into files of at most {LARGEST_WHOLE}")
        return file.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def _not_blank(documents: Iterator[str]) -> Iterator[str]:
    return (text for text in documents if text and not text.isspace())
