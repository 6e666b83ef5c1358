"""Corpora: where their documents and examples are read from, and which are for validation.

An example is a prompt, which is read, and an answer, which is learned. A document of plain text is an answer without a
prompt. gsm8k has the form of lm-evaluation-harness' task, so that a model is scored as it was trained; the answer is
the whole solution. instructions are the user's rows. Rows with a blank answer are skipped and counted.

A corpus on this machine is identified by what its files hold, so opening it reads them once (one to two seconds per
GB); a data set on the hub is identified by its name. `datasets` is imported when rows must be read, not before.

The split never depends on the order in which anything runs:
- stdlib: the hash of a file's relative path decides (5% are for validation).
- local files: their names decide, see `gnmr/lab/data/files.py`; else every 20th document is for validation. Fewer than
  20 documents give the last 5% of their text; it is cut before tokenization, so that the tokenizer never sees it. Fewer
  than 20 rows of prompts and answers give the last one.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data.files import HUBS, ONE_IN, TRAIN, VALIDATION, extension, identity_of, local_files
from gnmr.lab.data.rows import LARGEST_WHOLE, Row, named, read_rows, utf8

PROMPTED = ("gsm8k", "instructions")  # data.name of prompts and answers
HUB_TIMEOUT = 10.0  # seconds to wait for the hub
COLUMN_WITHIN = 1000  # the text's column must appear within so many rows

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_IS_TITLE = re.compile(r" ?= [^=\s].* = ?")  # of an article; its sections have two and more signs


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, as text."""

    prompt: str
    """Read, not learned; empty for plain text."""
    answer: str
    """Learned; appended to the prompt without white space of ours."""


class Skipped:
    """Counts what a corpus leaves out while it is read."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, what: str, place: str, number: int) -> None:
        """Note `number` of `what` ("row{s} without text") in a file or split, which may be read again, or in part."""
        self._counts[what, place] = max(number, self._counts.get((what, place), 0))

    def __str__(self) -> str:
        """As the end of a line: "; 270 rows without text"."""
        found = Counter[str]()
        for (what, _), number in self._counts.items():
            found[what] += number
        return "".join(f"; {number:,} {what.format(s='s' * (number > 1))}" for what, number in found.items())


@dataclass(frozen=True)
class Corpus:
    """Examples that can be read any number of times, a split at a time."""

    where: str
    """The key and value that chose it, as messages name it."""
    summary: str
    """What is read, for the progress line."""
    identity: str
    """Changes with anything that changes the examples."""
    read: Callable[[str], Iterator[Example]]
    """Split ("train" or "validation") -> its examples, no answer blank. Raises UserError for what cannot be read."""
    streamed: bool = False
    """From the hub: of unknown length, so a limit is needed."""
    skipped: Skipped = field(default_factory=Skipped)
    """What `read` has left out so far."""


def open_corpus(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> Corpus:
    """Return the corpus that `config` names; raises UserError if there is none. `tell` hears of the progress."""
    if config.name == "stdlib":
        return _stdlib()
    skipped, prompted = Skipped(), config.name in PROMPTED
    rows: Callable[[str], Iterator[Row]]
    texts: Callable[[str], Iterator[str]]
    if config.path is None:
        hub = HUBS[config.name]
        where, summary, source = f"data.name={config.name}", f"{hub.name} {hub.config}", f"{hub.name}/{hub.config}"
        by_name, streamed = not prompted, config.name == "c4"  # the others are small
        rows = lambda split: hub_rows(
            config.name, TRAIN if prompted else split
        )  # gsm8k's other split is the test split
        texts = lambda split: _texts(config, rows(split), f"{hub.name} on the hub: {split}", skipped)
    else:
        local = local_files(config, tell)
        where, summary, source, by_name, streamed = local.where, local.summary, local.identity, local.by_name, False
        rows = lambda split: chain.from_iterable(map(read_rows, local.of(split)))
        texts = lambda split: chain.from_iterable(_texts_of(config, file, skipped) for file in local.of(split))

    def read(split: str) -> Iterator[Example]:
        if prompted:
            make, lacking = _gsm8k if config.name == "gsm8k" else _instruction, 0
            examples: Iterator[Example] = (make(row, config) for row in rows(split))
            for example in examples if by_name else _of_split(examples, split):
                if example.answer.strip():
                    yield example
                else:
                    lacking += 1
                    skipped.note("row{s} without an answer", split, lacking)
            return
        found = articles(texts(split)) if config.name == "wikitext2" else texts(split)
        parts = ((split, text) for text in found) if by_name else every_twentieth(found)
        yield from (Example("", text) for place, text in parts if place == split)

    columns = [config.prompt_column, config.input_column, config.response_column] if prompted else [config.text_column]
    identity = hashlib.sha256(json.dumps([config.name, columns, source]).encode()).hexdigest()
    return Corpus(where, summary, identity, read, streamed, skipped)


def articles(texts: Iterable[str]) -> Iterator[str]:
    """The articles of WikiText, whose rows are single lines and whose files are all lines of a split.

    An article begins at its title, a line ` = Title = ` after a blank one (a formula may look like a title). What comes
    before the first title is an article too. Every line ends with a newline, a blank one is nothing but that.
    """
    article: list[str] = []
    for line in chain.from_iterable(text.removesuffix("\n").split("\n") for text in texts):
        line = "" if line.isspace() else line
        if _IS_TITLE.fullmatch(line) and (not article or article[-1] == "\n"):
            if (text := "".join(article)).strip():
                yield text
            article = []
        article.append(line + "\n")
    if (text := "".join(article)).strip():
        yield text


def _stdlib() -> Corpus:
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

    def read(split: str) -> Iterator[Example]:
        for name in splits[split]:
            text = _content(root / name).decode("utf-8-sig", errors="replace")
            if text.strip():
                yield Example("", text)

    identity = identity_of(((name, root / name) for name in names), "data.name=stdlib")
    return Corpus("data.name=stdlib", f"{len(names)} files of {root}", identity, read)


def hub_rows(name: str, split: str) -> Iterator[Row]:
    """Yield the rows of a split of the data set that data.name=`name` reads from the hub."""
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


def _texts_of(config: DataConfig, file: Path, skipped: Skipped) -> Iterator[str]:
    if extension(file) not in (".txt", ".txt.gz"):
        yield from _texts(config, read_rows(file, least=0), str(file), skipped)
    elif (text := utf8(_content(file), f"{file}:")).strip():
        yield text
    else:
        skipped.note("file{s} without text", str(file), 1)


def _texts(config: DataConfig, rows: Iterable[Row], where: str, skipped: Skipped) -> Iterator[str]:
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
            skipped.note("row{s} without text", where, lacking)
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


def every_twentieth(documents: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (split, document): every 20th for validation; of fewer than 20 the last 5% of their characters."""
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


# ---- prompts and answers ----


def _of_split(examples: Iterator[Example], split: str) -> Iterator[Example]:
    """Every 20th for validation; of fewer than 20 the last."""
    head = list(islice(examples, ONE_IN))
    for number, example in enumerate(chain(head, examples), start=1):
        if (VALIDATION if number % ONE_IN == 0 or number == len(head) else TRAIN) == split:
            yield example


def _gsm8k(row: Row, config: DataConfig) -> Example:
    return Example(f"Question: {row.text('question')}\nAnswer:", f" {row.text('answer')}")


def _instruction(row: Row, config: DataConfig) -> Example:
    prompt = row.text(config.prompt_column, "data.prompt_column")
    if config.input_column is not None:
        prompt += _spaced(prompt, row.text(config.input_column, "data.input_column", optional=True))
    return Example(prompt, _spaced(prompt, row.text(config.response_column, "data.response_column")))


def _spaced(before: str, text: str) -> str:
    """`text` with a blank line in front, unless it is blank or there is white space between the two already."""
    if not before or not text.strip() or before[-1].isspace() or text[0].isspace():
        return text
    return f"\n\n{text}"
