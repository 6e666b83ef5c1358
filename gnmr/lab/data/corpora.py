"""Corpora: where their documents are read from, and which documents are for validation.

A corpus on this machine is identified by what its files hold, so opening it reads them once (one to two seconds per
GB); a data set on the hub is identified by its name. `datasets` is imported when rows must be read, not before.

The split never depends on the order in which anything runs:
- stdlib: the hash of a file's relative path decides (5 % are for validation).
- local files: their names decide, see `gnmr/lab/data/files.py`; else every 20th document is for validation. Fewer than
  20 documents give the last 5 % of their text; it is cut before tokenization, so that the tokenizer never sees it.
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
from gnmr.lab.data.files import HUBS, ONE_IN, TRAIN, VALIDATION, extension, identity_of, local_files
from gnmr.lab.data.rows import LARGEST_WHOLE, Row, named, read_rows, utf8

HUB_TIMEOUT = 10.0  # seconds to wait for the hub
COLUMN_WITHIN = 1000  # the text's column must appear within so many rows

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_IS_TITLE = re.compile(r" ?= [^=\s].* = ?")  # of an article; its sections have two and more signs


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

    identity = identity_of({TRAIN: [(name, root / name) for name in names]}, "data.name=stdlib")
    return Corpus("data.name=stdlib", f"{len(names)} files of {root}", identity, documents)


# ---- the hub ----


def _hub(config: DataConfig) -> Corpus[str]:
    hub, skipped = HUBS[config.name], Skipped()

    def documents(split: str) -> Iterator[str]:
        return _documents_of(
            config, _texts(config, hub_rows(config.name, split), f"{hub.name} on the hub", skipped, split)
        )

    return Corpus(
        f"data.name={config.name}",
        f"{hub.name} {hub.config}, streamed",
        f"{hub.name}/{hub.config}/{config.text_column}",
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


def _local(config: DataConfig, tell: Callable[[str], None]) -> Corpus[str]:
    local, skipped = local_files(config, tell), Skipped()

    def texts(file: Path) -> Iterator[str]:
        where = str(file)
        if extension(file) in (".txt", ".txt.gz"):
            texts = (utf8(_content(each), f"{where}:") for each in [file])
            return skipped.kept(texts, str.strip, "file{s} without text", where)
        return _texts(config, read_rows(file, least=0), where, skipped, where)

    def documents(split: str) -> Iterator[str]:
        found = _documents_of(config, chain.from_iterable(map(texts, local.of(split))))
        return found if local.by_name else (text for place, text in every_twentieth(found) if place == split)

    identity = hashlib.sha256(os.fsencode(f"{config.text_column}{local.identity}")).hexdigest()
    return Corpus(local.where, local.summary, identity, documents, skipped=skipped)


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


def _texts(config: DataConfig, rows: Iterable[Row], where: str, skipped: Skipped, place: str) -> Iterator[str]:
    """Yield the text of each row and count the rows without one; blank lines of articles are text.

    Raises UserError unless one of the first rows has the text's column.
    """
    column, seen, lacking, row = config.text_column, False, 0, None
    for number, row in enumerate(rows, start=1):
        seen = seen or column in row.cells
        if not seen and number == COLUMN_WITHIN:
            break
        value = row.cells.get(column)
        blank = isinstance(value, str) and (not value or value.isspace())
        if value is None or (blank and config.name != "wikitext2"):
            lacking += 1
            skipped.note("row{s} without text", place, lacking)
        else:
            yield row.text(column)
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
