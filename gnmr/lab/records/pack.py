"""Packs: the records of many runs in one Parquet file, which `gnmr report` and `gnmr replay` read as they read folders.

A pack has a row a file: the run (its folder below the one that was packed), the file's name, the sha256 of its content
and the content. Content is null where a file was left out on purpose; its sha256 stays. X.jsonl.gz is packed as the
X.jsonl that it holds. Rows are sorted by file, then run, because like files compress well together. The schema's
metadata say what was packed, under `ABOUT`. The same folders give the same bytes.

A pack is read by writing it into a private temporary folder. It is not trusted (`gnmr.records.untrusted`): its names
of runs lead nowhere else, its files are records, its sizes are bounded and each content must have its sha256.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from gnmr.errors import UserError
from gnmr.records.untrusted import MAX_EXPANSION, MAX_NAME, SMALL, Damaged, opened, reading

SCHEMA = pa.schema(
    [
        pa.field("run", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("file", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),
        pa.field("content", pa.binary()),
    ]
)
ABOUT = b"gnmr.pack"
"""The key of the schema's metadata that makes a file a pack: version, runs, files, left_out and about, as JSON."""
NAME, LEFT_OUT = "records.sha256", "left_out.sha256"
_FILES = frozenset(
    [
        "config.yaml",
        "header.json",
        "faults.jsonl",
        "steps.jsonl",
        "eval.jsonl",
        "events.jsonl",
        "scores.jsonl",
        "units.arrows",
        "ratios.parquet",
        "summary.json",
        "FAILED",
        "DONE",
        "records.sha256",
    ]
)
_SCORES = re.compile(r"scores[\w-]{0,50}\.json", re.ASCII)
_MAX_FILES = 1 << 20
_MAX_CONTENT = 1 << 29
"""Bytes of a file in a pack."""
_MAX_BYTES = 1 << 34
"""Bytes of all files of a pack that is read."""
_GROUP = 1 << 26
"""Bytes of a row group."""


def known(name: str) -> bool:
    """Whether a file of this name is a record that a pack may hold."""
    return name in _FILES or _SCORES.fullmatch(name) is not None


def write_pack(file: BinaryIO, folders: dict[str, Path], without: Iterable[str] = (), about: Any = None) -> int:
    """Packs runs, by the names that they have in the pack; returns how many files were left out.

    `without` are the files to leave out, as FILE or RUN/FILE, in which `*` and `?` stand for any characters. `about`
    stands in the pack. UserError for a run whose records are damaged, or that cannot be packed.
    """
    found, without = [], sorted(set(without))
    with reading("pack"):
        for run in folders:
            _check_run(run)
    for run, folder in folders.items():
        found += [(name, run, path) for name, path in _records(folder).items()]
    omitted = {(name, run) for name, run, _ in found for one in without if _named(name, run, one)}
    if idle := [one for one in without if not any(_named(name, run, one) for name, run in omitted)]:
        raise UserError(f"without {idle[0]}: fits no file of these runs")
    if any(name in ("config.yaml", "header.json", NAME) for name, _ in omitted):
        raise UserError(f"without {' '.join(without)}: config.yaml, header.json and {NAME} cannot be left out")
    number = len({run for _, run, _ in found})
    told = {"version": 1, "runs": number, "files": len(found), "left_out": without, "about": about}
    schema = SCHEMA.with_metadata({ABOUT: json.dumps(told, sort_keys=True).encode()})
    how: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 19,
        "use_dictionary": ["run", "file"],
        "write_page_checksum": True,
        "data_page_size": _GROUP,
        "write_batch_size": _MAX_FILES,
    }
    with pq.ParquetWriter(file, schema, **how) as writer:
        for rows in _groups(sorted(found), omitted):
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return len(omitted)


def _named(name: str, run: str, pattern: str) -> bool:
    return fnmatchcase(f"{run}/{name}" if "/" in pattern else name, pattern)


def _records(folder: Path) -> dict[str, Path]:
    """Where the content of each record is, by the record's name."""
    names = {*_FILES, *(path.name for path in folder.glob("scores*.json"))}
    return {name: folder / name for name in names if known(name) and (folder / name).exists()}


def _groups(found: list[tuple[str, str, Path]], omitted: set[tuple[str, str]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each row group."""
    rows, size = list[dict[str, Any]](), 0
    for name, run, path in found:
        packed = path.name != name
        content = None if (name, run) in omitted else _content(path, packed)
        digest = hashlib.sha256(path.read_bytes()).digest() if content is None else hashlib.sha256(content).digest()
        rows.append({"run": run, "file": name, "sha256": digest, "content": content})
        size += len(content or b"")
        if size >= _GROUP:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _content(path: Path, packed: bool) -> bytes:
    with opened(path, _MAX_CONTENT) as raw, reading(path), gzip.open(raw) if packed else raw as file:
        content = file.read(_MAX_CONTENT + 1)
    if len(content) > _MAX_CONTENT:
        raise UserError(f"{path}: too large for a pack (more than {_MAX_CONTENT:,} bytes): leave it out of the pack")
    return content


def _check_run(run: str) -> str:
    """The name of a run; ValueError where it could lead out of the folder that a pack is unpacked into."""
    parts = run.split("/")
    if not run.isprintable() or len(run) > MAX_NAME or any(part.startswith(".") or not part for part in parts):
        raise ValueError(f"{run!r:.60} is not the name of a run in a pack")
    return run


def is_pack(path: Path) -> bool:
    """Whether a file is a Parquet file that says that it is a pack; what it holds is not looked at."""
    if path.suffix != ".parquet" or not path.is_file():
        return False
    with suppress(OSError, pa.ArrowException, Damaged), opened(Path(os.path.realpath(path))) as file:
        return ABOUT in (pq.read_schema(file).metadata or {})
    return False


def _checked(file: BinaryIO) -> tuple[pq.ParquetFile, dict[str, Any]]:
    """The pack and what it says of itself; ValueError for what `write_pack` does not write."""
    footer, size = pq.read_metadata(file), os.fstat(file.fileno()).st_size
    schema = footer.schema.to_arrow_schema()
    columns = {"run": "string", "file": "string", "sha256": "fixed_size_binary[32]", "content": "binary"}
    types = {one.name: str(getattr(one.type, "value_type", one.type)) for one in schema}
    told = json.loads((schema.metadata or {}).get(ABOUT, b"null"))
    if types != columns or len(schema) != len(columns) or not isinstance(told, dict) or told.get("version") != 1:
        raise ValueError("not a pack that this version of gnmr reads")
    groups = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
    if footer.num_rows > _MAX_FILES or groups > min(_MAX_BYTES, SMALL + MAX_EXPANSION * size):
        raise ValueError(f"{footer.num_rows:,} files of {groups:,} bytes in {size:,}")
    names = ["run", "file", "content"]  # a value that is repeated stands in memory once
    return pq.ParquetFile(file, read_dictionary=names, page_checksum_verification=True), told


def unpack(path: Path, folder: Path) -> list[str]:
    """Writes the runs of a pack below a new, empty folder; their names, in order. `Damaged` for what is wrong."""
    runs, number, total = set[str](), 0, 0
    with opened(Path(os.path.realpath(path))) as file, reading(path):
        size = os.fstat(file.fileno()).st_size
        found, told = _checked(file)
        for batch in found.iter_batches(256):
            number += batch.num_rows
            for run, name, digest, content in _rows(batch):
                total += len(content or b"")
                if total > min(_MAX_BYTES, SMALL + MAX_EXPANSION * size):
                    raise ValueError("its files expand without end")
                if run not in runs:
                    (folder / _check_run(run)).mkdir(parents=True, exist_ok=True)
                    runs.add(run)
                _put(folder / run, name, digest, content)
    if (number, len(runs)) != (told.get("files"), told.get("runs")):
        raise Damaged(f"{path}: cannot be read ({number} files of {len(runs)} runs are not those that it names)")
    return sorted(runs)


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[str, str, bytes, bytes | None]]:
    """A row at a time: a content that is repeated stands in memory once."""
    for row in range(batch.num_rows):
        values = [column[row].as_py() for column in batch.select(["run", "file", "sha256", "content"]).columns]
        if None in values[:3]:
            raise ValueError("a row without a run, file or sha256")
        yield values[0], values[1], values[2], values[3]


def _put(folder: Path, name: str, digest: bytes, content: bytes | None) -> None:
    """One file of a run; of one that was left out its sha256."""
    if not known(name):
        raise ValueError(f"{name!r:.60} is not a record")
    if content is None:
        with (folder / LEFT_OUT).open("a", encoding="ascii") as file:
            file.write(f"{digest.hex()}  {name}\n")
        return
    if len(content) > _MAX_CONTENT or hashlib.sha256(content).digest() != digest:
        raise ValueError(f"{name} of {folder.name} is not what its sha256 says")
    if name == "ratios.parquet":
        table = pq.read_table(pa.BufferReader(content)).unify_dictionaries()
        with pa.OSFile(str(folder / "units.arrows"), "wb") as units, pa.ipc.new_stream(units, table.schema) as stream:
            stream.write_table(table)
        return
    with (folder / name).open("xb") as file:
        file.write(content)


@dataclass(frozen=True)
class Unpacked:
    """Paths that the user named, with the run folders of each pack in its place."""

    paths: list[Path] = field(default_factory=list)
    packs: dict[Path, Path] = field(default_factory=dict)
    """The pack by the folder that holds its runs for now."""

    def told(self, text: object) -> str:
        """The text as it is shown: PACK/RUN instead of the temporary folder."""
        line = str(text)
        for folder in sorted(self.packs, key=lambda one: len(str(one)), reverse=True):  # .../1 begins .../10 too
            line = line.replace(str(folder), str(self.packs[folder]))
        return line


@contextmanager
def unpacked(paths: Iterable[Path]) -> Iterator[Unpacked]:
    """The paths, packs and parts of them (PACK/RUN, `*` and `?` allowed) as run folders while the block runs.

    UserError for a part that is not there and for a damaged pack. Errors that leave the block name the pack.
    """
    found, runs = Unpacked(), dict[Path, tuple[Path, list[str]]]()
    with TemporaryDirectory(prefix="gnmr-") as place:
        try:
            for path in paths:
                pack = next((one for one in (path, *path.parents) if is_pack(one)), None)
                if pack is None:
                    found.paths.append(path)
                    continue
                real = pack.resolve()
                if real not in runs:
                    folder = Path(place, str(len(runs)))
                    folder.mkdir()
                    found.packs[folder] = pack
                    runs[real] = folder, unpack(pack, folder)
                folder, names = runs[real]
                found.paths.extend(folder / name for name in _part(path, pack, names))
            yield found
        except UserError as error:
            raise type(error)(found.told(error)) from error


def _part(path: Path, pack: Path, runs: list[str]) -> list[str]:
    """The runs of a pack at or below the path, in which `*` and `?` stand for any characters; all for the pack."""
    if path == pack:
        return runs
    parts = path.relative_to(pack).parts
    found = [run for run in runs if all(map(fnmatchcase, run.split("/"), parts)) and run.count("/") + 1 >= len(parts)]
    if not found:
        raise UserError(f"{path}: no such run in {pack}")
    return found
