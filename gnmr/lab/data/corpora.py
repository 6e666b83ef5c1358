"""Corpora: which files and rows they have, which documents are held out, and what identifies them.

An example is a prompt, which is read, and an answer, which is learned. A document of plain text is an answer without a
prompt. Examples of gsm8k have the format of the task in lm-evaluation-harness, so that a model is scored on the format
that it was trained on. Documents and answers without text are skipped and counted.

The library `datasets` reads JSON, Parquet and the hub; it is imported only when rows are read. Text files are read
here, because a file in another encoding must not become tokens.

**Files below data.path.** Files with "validation" (or valid, val) in their name or folder are the validation split. If
a file is named train, all other files (test, dev) are skipped. Files of gsm8k with "test" in their name belong to
neither split, because they are used for scoring. Without validation files, the documents are split instead of the
files. For the standard library, the hash of a file's relative path determines the split.

**The split never depends on the order of execution.** If file names do not determine it, every 20th document is for
validation. With fewer than 20 documents, validation is the last 5% of their text. It is split off before tokenization,
so that the tokenizer never sees it. With fewer than 20 rows of prompts and answers, validation is the last row.

**Identity.** A local corpus is identified by the contents of its files, so opening it reads them once (one to two
seconds per GB). A data set on the hub is identified by its name.
"""

from __future__ import annotations

import codecs
import gc
import gzip
import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from glob import escape
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.records.disk import of_a_file_browser, sha256
from gnmr.records.untrusted import first_line

TRAIN, VALIDATION = "train", "validation"
ONE_IN = 20  # one document in 20 is for validation
PROMPTED = ("gsm8k", "instructions")  # values of data.name with prompts and answers
BLOCK = 2**16  # bytes in which control characters are counted
HUB_TIMEOUT = 10.0  # seconds to wait for the hub

_TEXT = (".txt", ".txt.gz", ".py")
_SUPPORTED = (".txt", ".txt.gz", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # written by datasets
_RECORDS = {
    "header.json": "a run",
    "train.bin": "token cache",
    "diagnosis.json": "a diagnosis",
    "model.safetensors": "a checkpoint",
    "model.safetensors.index.json": "a checkpoint in parts",
    "adapter_config.json": "an adapter",
}
"""Files that tell a folder of records or weights, which is not part of a corpus."""
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_IS_VALIDATION = re.compile(r"validation|(?<![a-z])val(id)?(?![a-z])", re.IGNORECASE)
_IS_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_IS_TEST = re.compile(r"(?<![a-z])test(?![a-z])", re.IGNORECASE)
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\b\x1b"})


class Hub(NamedTuple):
    """A data set on the hub; `config` is also the folder of its `files`."""

    name: str
    config: str
    files: str


HUBS = {"c4": Hub("allenai/c4", "en", "*.json.gz"), "gsm8k": Hub("openai/gsm8k", "main", "*.parquet")}


Rows: TypeAlias = Generator[tuple[str, dict[str, Any]], None, None]
"""Rows of a data set: each one's file and number for messages, and its cells by column."""


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, as text."""

    prompt: str
    """Read but not learned. Empty for plain text."""
    answer: str
    """Learned. It is appended to the prompt without additional white space."""


class Skipped:
    """Counts the items that a corpus skips while it is read."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, items: str, place: str, number: int) -> None:
        """Record `number` items ("row{s} without text") of a file or split, which may be read again or in part."""
        self._counts[items, place] = max(number, self._counts.get((items, place), 0))

    def __str__(self) -> str:
        """Return the end of a line: "; 270 rows without text"."""
        totals = Counter[str]()
        for (items, _), number in self._counts.items():
            totals[items] += number
        return "".join(f"; {number:,} {items.format(s='s' * (number > 1))}" for items, number in totals.items())


@dataclass(frozen=True)
class Corpus:
    """Examples that can be read any number of times, one split at a time."""

    where: str
    """The key and value that select the corpus, for messages."""
    summary: str
    """What is read, for the progress line."""
    identity: str
    """Changes whenever the examples change."""
    read: Callable[[str], Iterator[Example]]
    """Split ("train" or "validation") -> its examples with non-blank answers. Raises UserError for unreadable data."""
    streamed: bool = False
    """Read from the hub: the length is unknown, so a limit is needed."""
    skipped: Skipped = field(default_factory=Skipped)
    """The items that `read` has skipped so far."""


def open_corpus(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> Corpus:
    """Return the corpus that `config` names.

    Args:
        config: Selects the corpus and its columns.
        tell: Receives progress lines while local files are hashed.

    Raises:
        UserError: With one line, if there is no such corpus.
    """
    skipped, prompted, hub = Skipped(), config.name in PROMPTED, HUBS.get(config.name)
    where = f"data.name={config.name}"
    if hub is not None and config.path is None:
        summary, source, streamed = f"{hub.name} {hub.config}", f"{hub.name}/{hub.config}", config.name == "c4"
        # The other split of gsm8k is the test split, so its rows are split here.
        by_name = not prompted
        rows_of: Callable[[str], Iterator[Rows]] = lambda split: iter([hub_rows(config.name, split)])
    else:
        if config.name != "stdlib":
            where = f"data.path={config.path}"
        folder, splits, summary = library_files() if config.name == "stdlib" else local_files(config)
        source, streamed = _identity(folder, splits, where, tell), False
        by_name = bool(splits[VALIDATION])  # without validation files, the rows are split
        rows_of = lambda split: (file_rows(folder / name, config) for name in splits[split])

    def read(split: str) -> Iterator[Example]:
        of_rows = _prompted if prompted else _plain
        of_files = rows_of(split if by_name else TRAIN)
        examples: Iterator[Example] = chain.from_iterable(of_rows(rows, config, skipped) for rows in of_files)
        if not by_name:
            placed = every_twentieth(examples, by_text=not prompted)
            examples = (example for place, example in placed if place == split)
        blank = 0
        for example in examples:
            if example.answer.strip():
                yield example
            else:  # a row of prompts and answers: it was counted for the split, because the split is by row
                blank += 1
                skipped.note("row{s} without an answer", split, blank)

    columns = [config.prompt_column, config.input_column, config.response_column] if prompted else [config.text_column]
    identity = hashlib.sha256(json.dumps([config.name, columns, source]).encode()).hexdigest()
    return Corpus(where, summary, identity, read, streamed, skipped)


# ---- rows ----


def _read(before: str, after: str, where: str, *source: str, **options: Any) -> Rows:
    """Yield the rows of `datasets.load_dataset(*source, **options)`.

    Raises UserError for every failure: `before`, the library's first line in parentheses, and `after`.
    """
    try:
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        stream = datasets.load_dataset(*source, split=options.pop("split", TRAIN), streaming=True, **options)
        for number, cells in enumerate(stream, start=1):
            yield f"{where}: row {number}", cells
    except Exception as error:  # network, gzip, JSON, Arrow: many libraries without a common base class
        raise UserError(f"{before} ({first_line(error)}){after}") from error
    finally:  # Arrow threads of a stream that outlives its reader may abort Python at exit (apache/arrow#45214)
        gc.collect()


def hub_rows(name: str, split: str) -> Rows:
    """Yield the rows of a split of the data set that data.name=`name` reads from the hub.

    Raises UserError if the hub cannot be reached.
    """
    hub = HUBS[name]
    before = f"data.name={name}: {hub.name} cannot be read from the hub"
    after = (
        f"; check the network, HF_ENDPOINT and the proxy, or download its {hub.config}/{hub.files} and pass "
        "data.path=FOLDER"
    )
    try:  # one request without retries, because the library retries for half a minute and logs each attempt
        from huggingface_hub import HfApi

        HfApi().dataset_info(hub.name, timeout=HUB_TIMEOUT, expand=["sha"])
    except Exception as error:
        raise UserError(f"{before} ({first_line(error)}){after}") from error
    yield from _read(before, after, f"{hub.name} on the hub", hub.name, hub.config, split=split)


def file_rows(file: Path, config: DataConfig) -> Rows:
    """Yield the rows of a .jsonl, .json or .parquet file, or the text of another one as a row with the text column.

    Raises UserError, which names the file, if it cannot be read.
    """
    name = file.name.lower()
    try:
        empty = file.stat().st_size == 0
        if name.endswith(_TEXT):
            with gzip.open(file) if name.endswith(".gz") else file.open("rb") as stream:
                raw = stream.read()
    except Exception as error:  # OSError, EOFError, zlib.error
        raise UserError(f"{file}: cannot be read ({first_line(error)})") from error
    if empty:
        if config.name in PROMPTED:
            raise UserError(f"{file}: holds no rows")
        return
    if name.endswith(_TEXT):
        # Some sources of the standard library are in other encodings.
        text = raw.decode("utf-8-sig", "replace") if config.name == "stdlib" else utf8(raw, f"{file}:")
        yield str(file), {config.text_column: text}
        return
    kind = "parquet" if name.endswith(".parquet") else "json"
    yield from _read(f"{file}: cannot be read", "", str(file), kind, data_files=escape(str(file.absolute())))


def utf8(raw: bytes, where: str, *, plain: bool = False) -> str:
    """Return the text of a file without its byte order mark.

    Args:
        raw: The content of the file.
        where: The beginning of the message.
        plain: True if the caller reads plain files alone, whatever they are called; others read .gz and .parquet too.

    Raises:
        UserError: For another encoding, compressed data, and binary data. UTF-16 and UTF-32 text of some languages is
            valid UTF-8 by chance, with a control character at every second position.
    """
    body = raw.removeprefix(codecs.BOM_UTF8)
    try:
        text = body.decode()
        blocks = [body[at : at + BLOCK] for at in range(0, len(body), BLOCK)] if b"\0" in body else []
        if all(len(block.translate(None, _CONTROLS)) >= 0.75 * len(block) for block in blocks):
            return text
        problem = "many control characters, as in UTF-16 and in binary files"
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start + len(raw) - len(body)}"
    remedy = "if it is compressed or a Parquet file, let its name end in .gz or .parquet, else convert it"
    remedy = "decompress it, or convert it" if plain else remedy
    raise UserError(f"{where} is not UTF-8 text ({problem}); {remedy}: iconv -f LATIN1 (or UTF-16) -t UTF-8 OLD > NEW")


# ---- documents and examples ----


def _plain(rows: Rows, config: DataConfig, skipped: Skipped) -> Iterator[Example]:
    """Yield the documents of one file or data set, and count the rows without text."""
    blank = 0
    for number, (where, cells) in enumerate(rows):
        if number == 0:
            _check_column(where, cells, config.text_column)
        if (text := _text(where, cells, config.text_column, optional=True)).strip():
            yield Example("", text)
        else:
            blank += 1
            skipped.note("document{s} without text", where.partition(": row ")[0], blank)


def _prompted(rows: Rows, config: DataConfig, skipped: Skipped) -> Iterator[Example]:
    """Yield the prompts and answers of one file or data set."""
    for where, cells in rows:
        if config.name == "gsm8k":
            question, answer = (_text(where, cells, column) for column in ("question", "answer"))
            yield Example(f"Question: {question}\nAnswer:", f" {answer}")
            continue
        for column in (config.prompt_column, config.response_column, config.input_column):
            if column is not None:
                _check_column(where, cells, column)
        prompt = _text(where, cells, config.prompt_column)
        if config.input_column is not None:
            prompt += _spaced(prompt, _text(where, cells, config.input_column, optional=True))
        yield Example(prompt, _spaced(prompt, _text(where, cells, config.response_column)))


def _check_column(where: str, cells: dict[str, Any], column: str) -> None:
    if column not in cells:
        raise UserError(f"{where}: no column {column!r}; data.columns must be of {named(cells)}")


def _text(where: str, cells: dict[str, Any], column: str, optional: bool = False) -> str:
    """Return the text in `column`, or "" for an `optional` one that is empty. Raises UserError if there is no text."""
    if column not in cells and not optional:
        raise UserError(f"{where}: no column {column!r}; it has {named(cells)}")
    value = cells.get(column)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise UserError(f"{where}: column {column!r} holds {kind}; it needs text")
    return value


def _spaced(before: str, text: str) -> str:
    """Put a blank line before `text`, unless it is blank or white space already separates the texts."""
    if not before or not text.strip() or before[-1].isspace() or text[0].isspace():
        return text
    return f"\n\n{text}"


def every_twentieth(examples: Iterator[Example], by_text: bool) -> Iterator[tuple[str, Example]]:
    """Yield (split, example), where every 20th example is for validation.

    If there are fewer than 20, the last one is for validation, or with `by_text` the last 5% of all characters.
    """
    head = list(islice(examples, ONE_IN))
    if len(head) < ONE_IN and by_text:
        room = sum(len(example.answer) for example in head) * (ONE_IN - 1) // ONE_IN
        for example in head:
            begin, end = example.answer[:room], example.answer[room:]
            room = max(room - len(example.answer), 0)
            if begin:
                yield TRAIN, Example("", begin)
            if end:
                yield VALIDATION, Example("", end)
        return
    for number, example in enumerate(chain(head, examples), start=1):
        yield (VALIDATION if number % ONE_IN == 0 or number == len(head) else TRAIN), example


# ---- files ----


Splits: TypeAlias = dict[str, list[str]]
"""{"train": names, "validation": names} of files below a folder, sorted. Without validation files, rows are split."""


def local_files(config: DataConfig) -> tuple[Path, Splits, str]:
    """Return the folder of data.path, the files below it by split, and what is read, for the progress line.

    Raises UserError if there are no training files.
    """
    assert config.path is not None
    where, path = f"data.path={config.path}", Path(config.path).expanduser()
    try:
        of_clone = config.name in HUBS and (path / HUBS[config.name].config).is_dir()
        if of_clone:
            path = path / HUBS[config.name].config  # a clone of the hub's repository also holds other configurations
        names, not_read = _below(path, where)
    except OSError as error:
        raise UserError(f"{where}: {error.filename or ''}: cannot be read ({error.strerror or error})") from error
    usable = [name for name in names if config.name != "gsm8k" or not _IS_TEST.search(name)]
    if not usable:
        raise UserError(f"{where}: holds the test split alone, which gsm8k keeps for scores; add train*")
    splits = _split_by_name(usable, where)
    train, validation = splits[TRAIN], splits[VALIDATION]
    summary = f"training files: {len(train)}, "
    summary += f"validation files: {len(validation)}" if validation else _validation_by_content(config, train)
    if left_out := sorted({*names} - {*train, *validation}):
        summary += f"; left out because there are files named train: {named(left_out)}"
    if of_clone:
        summary += f"; of the folder {path.name} alone"
    return path if path.is_dir() else path.parent, splits, summary + _not_read(not_read)


def _validation_by_content(config: DataConfig, names: list[str]) -> str:
    """Return what `every_twentieth` takes for validation, in words."""
    if config.name in PROMPTED:
        return f"validation: every {ONE_IN}th row (of fewer than {ONE_IN}, the last one)"
    share = f"the last {100 // ONE_IN}% of the text"
    if len(names) < ONE_IN and all(name.lower().endswith(_TEXT) for name in names):
        return f"validation: {share}"
    return f"validation: every {ONE_IN}th document (of fewer than {ONE_IN}, {share})"


def library_files() -> tuple[Path, Splits, str]:
    """Return the folder of this Python's standard library, its source files by split, and a summary."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, children, files in os.walk(root):  # pruned, because site-packages may be far larger than the library
        children[:] = [child for child in children if child not in _NOT_LIBRARY]
        sources = (Path(folder, file) for file in files if file.endswith(".py"))
        names += [file.relative_to(root).as_posix() for file in sources if file.is_file()]
    if not names:
        raise UserError(f"data.name=stdlib: {root} holds no .py files; use data.name=text data.path=FOLDER")
    splits: Splits = {TRAIN: [], VALIDATION: []}
    for name in sorted(names):
        # A hash of the name keeps a file's split when other files come or go.
        held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % ONE_IN == 0
        splits[VALIDATION if held_out else TRAIN].append(name)
    return root, splits, f"{len(names)} files of {root}"


def _identity(folder: Path, splits: Splits, where: str, tell: Callable[[str], None]) -> str:
    """Return a digest that changes with the name, content or split of any file; reports progress to `tell`."""
    digests = hashlib.sha256()
    for split, names in splits.items():
        for name in names:
            tell(f"comparing {where} with the token cache: {named([name])}")
            path = folder / name
            try:
                digest = sha256(path.resolve() if path.is_symlink() else path)
            except OSError as error:
                raise UserError(f"{where}: {path}: cannot be read ({error.strerror or error})") from error
            digests.update(os.fsencode(f"{split}\0{name}\0{digest}\0"))
    return digests.hexdigest()


def _below(path: Path, where: str) -> tuple[list[str], list[str]]:
    """Return the sorted relative names of the readable files, and the names of the other entries."""
    if path.is_file():
        if not path.name.lower().endswith(_SUPPORTED):
            raise UserError(f"{where}: cannot read this kind of file; supported are {', '.join(_SUPPORTED)}")
        return [path.name], []
    if not path.is_dir():
        raise UserError(f"{where}: no such file or folder")

    # By itself, os.walk passes over a folder that it cannot read, and the corpus would lack it silently.
    def refuse(error: OSError) -> None:
        raise error

    readable, not_read = list[str](), list[str]()
    for folder, children, names in os.walk(path, onerror=refuse):
        below = Path(folder)
        # os.walk descends into the folders that are left in this list.
        children[:] = [child for child in children if not child.startswith(".") and not of_a_file_browser(child)]
        for child in children[:]:
            if kind := _kind_of_records(below / child):
                children.remove(child)
                not_read.append(f"{(below / child).relative_to(path).as_posix()}/ ({kind})")
        for file in (below / name for name in names if not name.startswith(".") and not of_a_file_browser(name)):
            usable = file.name.lower().endswith(_SUPPORTED) and file.name not in _METADATA and file.is_file()
            (readable if usable else not_read).append(file.relative_to(path).as_posix())
    if not readable:
        remedy = ""
        if any(name.endswith(".arrow") for name in not_read):
            remedy = "; datasets.load_from_disk(FOLDER) has to_parquet(FILE), for each split"
        problem = f"the folder holds none of the supported files ({', '.join(_SUPPORTED)})"
        raise UserError(f"{where}: {problem}{_not_read(not_read)}{remedy}")
    return sorted(readable), not_read


def _not_read(names: list[str]) -> str:
    """Return the end of a line about the files that are not read."""
    return f"; not read: {named(sorted(names))} ({len(names)})" if names else ""


def _kind_of_records(folder: Path) -> str | None:
    """Return the kind of a folder in which a program keeps records or weights, or None if it may hold a corpus."""
    if folder.is_symlink():
        return "a link to a folder"
    if folder.name == "wandb":
        return "W&B"
    names = {*os.listdir(folder)}
    return next((kind for marker, kind in _RECORDS.items() if marker in names), None)


def _split_by_name(names: list[str], where: str) -> Splits:
    """Return the names by split. Without validation names, the documents are split instead of the files."""
    if len(names) == 1:
        return {TRAIN: names, VALIDATION: []}  # a single file is the corpus, whatever its name
    validation = [name for name in names if _IS_VALIDATION.search(name)]
    not_validation = [name for name in names if not _IS_VALIDATION.search(name)]
    train = [name for name in not_validation if _IS_TRAIN.search(name)] or not_validation
    if not train:
        raise UserError(f"{where}: every file is named as validation; name the training files train*")
    return {TRAIN: train, VALIDATION: validation}


def named(names: Iterable[str]) -> str:
    """Return at most ten names of columns or files for a message. Long names are cut, unprintable ones quoted."""
    shown = [name if name.isprintable() else repr(name) for name in (f"{name:.60}" for name in names)]
    return ", ".join(shown[:10]) + ", ..." * (len(shown) > 10)
