"""Corpora: where their documents are read from, and which documents are for validation.

A corpus on this machine is identified by what its files hold, so opening it reads them once (one to two seconds per
GB); a data set on the hub is identified by its name. `datasets` is imported when rows must be read, not before.

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
import gzip
import hashlib
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Generic, TypeVar

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data.rows import LARGEST_WHOLE, Row, named, read_rows, utf8

TRAIN, VALIDATION = "train", "validation"
HUB_TIMEOUT = 10.0  # seconds to wait for the hub
ONE_IN = 20  # one document in 20 is for validation
COLUMN_WITHIN = 1000  # the text's column must appear within so many rows

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SUPPORTED = (".txt", ".txt.gz", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # of the library datasets
_CHUNK = 2**20  # bytes of a file that are hashed together
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


class Skipped:
    """Counts what a corpus leaves out while it is read."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, what: str, place: str, number: int) -> None:
        """`number` of `what` ("row{s} without text") in a file or split, which may be read again, or in part."""
        self._counts[what, place] = max(number, self._counts.get((what, place), 0))

    def kept(self, items: Iterable[_T], keep: Callable[[_T], object], what: str, place: str) -> Iterator[_T]:
        """Yield the items that `keep` is true of, and count the others."""
        number = 0
        for item in items:
            if keep(item):
                yield item
            else:
                number += 1
                self.note(what, place, number)

    def __str__(self) -> str:
        """As the end of a line: "; 270 rows without text"."""
        found = Counter[str]()
        for (what, _), number in self._counts.items():
            found[what] += number
        return "".join(f"; {number:,} {what.format(s='s' * (number > 1))}" for what, number in found.items())


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
    skipped: Skipped = field(default_factory=Skipped)
    """What `read` has left out so far."""


def open_corpus(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> Corpus[str]:
    """The corpus that `config` names; raises `UserError` if there is none. `tell` hears of the progress."""
    if config.name == "stdlib":
        return _stdlib()
    if config.name in ("gsm8k", "instructions"):
        raise UserError(f"data.name={config.name}: prompts and answers fine-tune a checkpoint; use text for plain text")
    return _hub(config) if config.path is None else _local(config, tell)


def _documents_of(config: DataConfig, texts: Iterator[str]) -> Iterator[str]:
    """The documents among the rows or files of a corpus."""
    return _not_blank(articles(texts)) if config.name == "wikitext2" else texts


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
    names = []
    for folder, children, files in os.walk(root):  # with pruning: site-packages may be larger than the library by far
        children[:] = [child for child in children if child not in _NOT_LIBRARY]
        paths = (Path(folder, file) for file in files)
        names += [path.relative_to(root).as_posix() for path in paths if path.suffix == ".py" and path.is_file()]
    if not names:
        raise UserError(f"data.name=stdlib: {root} holds no .py files; use data.name=text data.path=FOLDER")
    names.sort()
    held_out = [name for name in names if int(hashlib.sha256(name.encode()).hexdigest(), 16) % ONE_IN == 0]
    splits = {TRAIN: [name for name in names if name not in held_out], VALIDATION: held_out}

    def documents(split: str) -> Iterator[str]:
        return _not_blank(_content(root / name).decode("utf-8-sig", errors="replace") for name in splits[split])

    identity = _identity({TRAIN: [(name, root / name) for name in names]}, "data.name=stdlib")
    return Corpus("data.name=stdlib", f"{len(names)} files of {root}", identity, documents)


# ---- the hub ----


def _hub(config: DataConfig) -> Corpus[str]:
    hub, column, skipped = HUBS[config.name], config.text_column, Skipped()

    def documents(split: str) -> Iterator[str]:
        where = f"{hub.name} on the hub"
        kept = skipped.kept(_having(hub_rows(config.name, split), column, where), _text_in(config), _NO_TEXT, split)
        return _documents_of(config, (row.text(column) for row in kept))

    return Corpus(
        f"data.name={config.name}",
        f"{hub.name} {hub.config}, streamed",
        f"{hub.name}/{hub.config}/{column}",
        documents,
        streamed=config.name == "c4",  # the others are small
        skipped=skipped,
    )


def hub_rows(name: str, split: str) -> Iterator[Row]:
    """The rows of a split of the data set that data.name=`name` reads from the hub; `UserError` if that fails."""
    hub = HUBS[name]
    try:
        # One request without retries: the library itself tries for half a minute, a line of noise each time.
        import datasets
        from huggingface_hub import HfApi

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        HfApi().dataset_info(hub.name, timeout=HUB_TIMEOUT, expand=["sha"])
        rows = datasets.load_dataset(hub.name, hub.config, split=split, streaming=True)
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
        read = {split: [(name, files[name]) for name in names] for split, names in splits.items()}
        identity = _identity(read, where, tell)
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


def _identity(
    splits: dict[str, list[tuple[str, Path]]], where: str, tell: Callable[[str], None] = lambda _: None
) -> str:
    """Return a sha256 over splits, names and contents of files."""
    seen, size = hashlib.sha256(), 0
    for split, name, file in ((split, *file) for split, files in splits.items() for file in files):
        own = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                own.update(chunk)
                size += len(chunk)
                tell(f"comparing {where} with the token cache: {size / 1e9:.1f} GB read")
        seen.update(os.fsencode(f"{split}\0{name}\0{own.hexdigest()}\0"))
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


def _local(config: DataConfig, tell: Callable[[str], None]) -> Corpus[str]:
    local, column, skipped = local_files(config, tell), config.text_column, Skipped()

    def texts(file: Path) -> Iterator[str]:
        where = str(file)
        if _extension(file) in (".txt", ".txt.gz"):
            texts = (utf8(_content(each), f"{where}:") for each in [file])
            return skipped.kept(texts, str.strip, "file{s} without text", where)
        rows = skipped.kept(_having(read_rows(file, least=0), column, where), _text_in(config), _NO_TEXT, where)
        return (row.text(column) for row in rows)

    def documents(split: str) -> Iterator[str]:
        found = _documents_of(config, chain.from_iterable(map(texts, local.of(split))))
        return found if local.by_name else (text for place, text in every_twentieth(found) if place == split)

    identity = hashlib.sha256(os.fsencode(f"{config.text_column}{local.identity}")).hexdigest()
    return Corpus(local.where, local.summary, identity, documents, skipped=skipped)


def _local_files(path: Path, where: str, cache: Path) -> tuple[dict[str, Path], list[str]]:
    """(relative posix path -> file, sorted; what else a folder holds). Hidden files are passed over unsaid."""
    if path.is_file():
        if _extension(path) is None:
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
            if _extension(file) is None or name in _METADATA or (name == "state.json" and _METADATA[0] in names):
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


def _extension(file: Path) -> str | None:
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


# ---- rows and text ----


_NO_TEXT = "row{s} without text"


def _text_in(config: DataConfig) -> Callable[[Row], bool]:
    """Whether a row has a text: its column is there, not null, and not blank, unless rows are the lines of articles."""

    def has(row: Row) -> bool:
        value = row.cells.get(config.text_column)
        blank = isinstance(value, str) and (not value or value.isspace())
        return value is not None and not (blank and config.name != "wikitext2")

    return has


def _having(rows: Iterable[Row], column: str, where: str) -> Iterator[Row]:
    """The rows; `UserError` unless one of the first has the column."""
    row, seen = None, False
    for number, row in enumerate(rows, start=1):
        seen = seen or column in row.cells
        if not seen and number == COLUMN_WITHIN:
            break
        yield row
    if row is not None and not seen:
        raise UserError(f"{where}: no column {column!r}; data.text_column must be one of {named(row.cells)}")


def _content(file: Path) -> bytes:
    try:
        with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as stream:
            raw = stream.read(LARGEST_WHOLE + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: cannot be read ({reason})") from error
    if len(raw) > LARGEST_WHOLE:
        size = file.stat().st_size
        raise UserError(f"{file}: a document of {size} bytes; split it into files of at most {LARGEST_WHOLE}")
    return raw


def _not_blank(documents: Iterator[str]) -> Iterator[str]:
    return (text for text in documents if text and not text.isspace())
