"""The files of a run folder: the truth of which the live view and W&B are views."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from gnmr.errors import RunFailed, UserError
from gnmr.lab.records.summary import summarize
from gnmr.records import ledger
from gnmr.records.appending import NOTHING, AppendFile, holds
from gnmr.records.disk import replacing, sha256, sync_folder, truncate
from gnmr.records.files import JsonLines, cut_jsonl, replace_json, replace_text, unpack
from gnmr.records.ratios import RatioStream, cut_stream, parquet_to_stream, stream_to_parquet
from gnmr.records.reader import stored
from gnmr.records.schema import EVAL_FIELDS, EVENT_FIELDS, FAULT_FIELDS, SCORE_FIELDS, STEP_FIELDS, RatioRows

_JSONL = {"steps.jsonl": STEP_FIELDS, "eval.jsonl": EVAL_FIELDS, "events.jsonl": EVENT_FIELDS}
_SCORES = "scores.jsonl"
_FIELDS = _JSONL | {_SCORES: SCORE_FIELDS}
_RATIOS = ("ratios.rows", "ratios.parquet")
_ENDS = ("DONE", "FAILED", ledger.NAME, "summary.json")
_RESERVE_BYTES = 256 * 1024


class RunWriter:
    """Owns the record files of a run folder. Rows are flushed as they are made and synced before each checkpoint.

    A write that fails raises `RunFailed`, as does a file that is no longer at its place; the records up to there stay
    readable. On a full disk a reserve file is given up, so that summary.json and FAILED can still be written.
    """

    incomplete: str | None = None
    """What is missing from the records or was altered, in one line. Such a run goes on, and ends FAILED."""

    def __init__(self, folder: Path, resume_step: int | None, counted: dict[str, Any] | None = None) -> None:
        """Opens the files of `folder`, which is made if it is missing.

        resume_step: None for a new run; raises `UserError` if the folder already holds records. Else the step of the
        checkpoint that the run continues from: rows after it are dropped, what marked the earlier end is removed.
        0 stands for a run that was killed before its first checkpoint: all its rows are dropped, those of step 0 too.
        counted: what `sync` gave for that checkpoint.
        """
        self.folder = folder
        self._reserve = folder / ".reserve"
        self._disk_full = False
        self._texts: dict[str, str] = {}  # sha256 of what was written whole
        if resume_step is None:
            found = next((name for name in (*_JSONL, *_RATIOS) if stored(folder / name)), None)
            if found is not None:
                raise UserError(f"{folder} already holds the records of a run ({found}): resume it or choose another")
        with self._guard("its files"):
            folder.mkdir(parents=True, exist_ok=True)
            self._place = os.stat(folder)
            if resume_step is not None:
                self._cut(resume_step if resume_step > 0 else -1, _checked(counted))
            # Random bytes, so that a file system that compresses allocates all of them.
            with replacing(self._reserve) as reserve:
                reserve.write(os.urandom(_RESERVE_BYTES))
            names = [*_JSONL, *([_SCORES] if (folder / _SCORES).exists() else [])]
            self._lines = {name: JsonLines(folder / name, _FIELDS[name]) for name in names}
            self._ratios = RatioStream(folder / "ratios.rows")
        self._last_step = resume_step or 0

    def write_header(self, config_yaml: str, header: dict[str, Any]) -> None:
        """config.yaml (the resolved config) and header.json (any JSON tree; non-finite numbers as strings)."""
        with self._guard("header.json"):
            replace_text(self.folder / "config.yaml", config_yaml)
            replace_json(self.folder / "header.json", header)
            self._texts |= {name: sha256(self.folder / name) for name in ("config.yaml", "header.json")}

    def sync(self) -> dict[str, Any]:
        """Brings all rows to the disk and returns what a resumed run compares: rows, bytes and sha256 of each file."""
        with self._guard("its records"):
            self._check_place()
            for file in self._files():
                file.sync()
            sync_folder(self.folder)
        counts = {name: lines.count() for name, lines in self._lines.items()} | {"ratios.rows": self._ratios.count()}
        files = {name: count for name, count in counts.items() if count is not None}
        return {"incomplete": self.incomplete, "files": files}

    @property
    def num_steps(self) -> int:
        """Rows of steps.jsonl so far."""
        return int(self._lines["steps.jsonl"].count()["rows"])

    def step(self, row: dict[str, Any]) -> None:
        """A row of `STEP_FIELDS`."""
        self._append("steps.jsonl", [row])
        self._last_step = row["step"]

    def eval(self, row: dict[str, Any]) -> None:
        """A row of `EVAL_FIELDS`."""
        self._append("eval.jsonl", [row])

    def scores(self, row: dict[str, Any]) -> None:
        """A row of `SCORE_FIELDS`."""
        with self._guard(_SCORES):
            if _SCORES not in self._lines:
                self._lines[_SCORES] = JsonLines(self.folder / _SCORES, SCORE_FIELDS)
            self._lines[_SCORES].write([row])

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Rows of `EVENT_FIELDS`, in order of their step."""
        if rows:
            self._append("events.jsonl", rows)

    def faults(self, rows: list[dict[str, Any]]) -> None:
        """All windows of injected faults, rows of `FAULT_FIELDS`; replaces what a start before wrote."""
        with self._guard("faults.jsonl"):
            assert all(row.keys() == FAULT_FIELDS.keys() for row in rows)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            replace_text(self.folder / "faults.jsonl", text)
            self._texts["faults.jsonl"] = hashlib.sha256(text.encode()).hexdigest()

    def ratios(self, rows: RatioRows) -> None:
        """The observed units of one step."""
        with self._guard("ratios.rows"):
            self._ratios.write(rows)

    def finish(
        self, status: str, reason: str | None, num_recoverable: int, max_o: int, peak_memory_bytes: int | None = None
    ) -> dict[str, Any]:
        """Closes the records and returns the summary; the marker (DONE or FAILED) comes last.

        status: done, failed or interrupted (which gets no marker). Done raises `RunFailed` for records that are not
        what was written. The ratio stream is deleted only for done. May be called again with failed after done raised
        `RunFailed`; failed itself raises nothing for a full disk, and leaves a folder alone that is not the run's.
        """
        assert status in ("done", "failed", "interrupted"), status
        stream, parquet = self.folder / "ratios.rows", self.folder / "ratios.parquet"
        if status == "done":
            self.sync()
            self._check_content()
        self.close()
        if status == "done":
            with self._guard("ratios.parquet"):
                if stream.exists():
                    stream_to_parquet(stream, parquet)
                    stream.unlink()
        elif self._ours() and stream.exists() and not self._disk_full:
            with suppress(OSError, UserError):  # the stream is kept, so nothing is lost
                stream_to_parquet(stream, parquet)
        if self.incomplete and status == "interrupted":
            reason = f"{reason}; the records are incomplete: {self.incomplete}"
        what = num_recoverable, max_o, status, reason, peak_memory_bytes, self.incomplete
        try:
            summary = summarize(self.folder, *what)
        except (OSError, UserError):  # something else stands in the place of a file
            summary = summarize(self._reserve, *what)
        if self._ours():
            self._end(status, reason, summary)
        return summary

    def _end(self, status: str, reason: str | None, summary: dict[str, Any]) -> None:
        def guarded(what: str) -> AbstractContextManager[None]:
            return suppress(OSError) if status == "failed" else self._guard(what)

        with guarded("summary.json"):
            self._reserve.unlink(missing_ok=True)
            replace_json(self.folder / "summary.json", summary)
        if status == "failed":
            with guarded("FAILED"):
                replace_text(self.folder / "FAILED", " ".join((reason or "unknown reason").split()) + "\n")
        with guarded(ledger.NAME):
            ledger.write(self.folder)
        if status == "done":
            with guarded("DONE"):
                replace_text(self.folder / "DONE", "")

    def _files(self) -> list[AppendFile]:
        return [*self._lines.values(), *([] if self._ratios.file is None else [self._ratios.file])]

    def _ours(self) -> bool:
        """Whether the folder at the path is still that in which the run began."""
        try:
            return os.path.samestat(os.stat(self.folder), self._place)
        except OSError:
            return False

    def _check_place(self) -> None:
        """RunFailed where the folder or a file in it is no longer the one that was written."""
        when = "was removed, moved or replaced while the run was going"
        if not self._ours():
            raise RunFailed(f"the run folder {self.folder} {when}")
        for file in self._files():
            if not file.in_place():
                raise RunFailed(f"{file.path} {when}")
        for name, digest in self._texts.items():
            path = self.folder / name
            if not path.exists() or sha256(path) != digest:
                raise RunFailed(f"{path} {when}")

    def _check_content(self) -> None:
        """RunFailed for records that DONE must not stand beside."""
        if self.incomplete:
            raise RunFailed(f"the records are incomplete, the weights are not: {self.incomplete}")
        for file in self._files():
            if not holds(file.path, file.count()):
                raise RunFailed(f"{file.path} was altered while the run was going")
        if self.num_steps != self._last_step:
            raise RunFailed(f"{self.folder / 'steps.jsonl'} has {self.num_steps} rows after {self._last_step} steps")

    def close(self) -> None:
        """Closes the files without an end of the run; harmless when they are closed already."""
        for close in (*(lines.close for lines in self._lines.values()), self._ratios.close):
            with suppress(OSError):  # a full disk was reported when the row was written
                close()

    def _cut(self, last_step: int, counted: dict[str, Any] | None) -> None:
        """Drops the rows after `last_step`, and notes in `incomplete` what is missing of those before."""
        stream, parquet = (self.folder / name for name in _RATIOS)
        lost: list[str] = [counted["incomplete"]] if counted and counted["incomplete"] else []
        for name in _FIELDS:
            unpack(self.folder / name)
        with suppress(UserError):  # a damaged ledger is replaced at the end
            ended = ledger.read(self.folder) or {}
            scores = self.folder / _SCORES
            if _SCORES in ended and (not scores.exists() or sha256(scores) != ended[_SCORES]):
                lost.append(f"{_SCORES} is not what it was when the run ended")
        for name in _ENDS:
            (self.folder / name).unlink(missing_ok=True)
        if parquet.exists() and not stream.exists():
            try:
                parquet_to_stream(parquet, stream)
            except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                lost.append(f"ratios.parquet cannot be read ({str(error).splitlines()[0]})")
        for name, fields in _FIELDS.items():
            path, count = self.folder / name, _count(counted, name)
            sound = count is None or holds(path, count)
            last = cut_jsonl(path, last_step, () if sound else fields)
            if not sound:
                lost.append(_missing(path, last_step, count))
            elif count is None and name == "steps.jsonl" and last < last_step:
                lost.append(f"{name} ends with step {last}, the checkpoint is of step {last_step}: rows were lost")
        count = _count(counted, "ratios.rows")
        sound = count is None or holds(stream, count)
        cut_stream(stream, last_step)
        if not sound:
            lost.append(_missing(stream, last_step, count))
        elif count is not None and stream.exists():
            truncate(stream, count["bytes"])
        parquet.unlink(missing_ok=True)
        if last_step > 0 and lost:
            self.incomplete = "; ".join(dict.fromkeys(lost))
            warnings.warn(f"{self.folder}: {self.incomplete}; the run goes on and will end FAILED", stacklevel=4)

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with self._guard(name):
            self._lines[name].write(rows)

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Turns a failed write into one line."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._disk_full = True
                self._reserve.unlink(missing_ok=True)
                raise RunFailed(f"disk full while writing {what} in {self.folder}") from error
            which = f" ({Path(error.filename).name})" if isinstance(error.filename, str | Path) else ""
            raise RunFailed(f"cannot write {what} in {self.folder}: {error.strerror or error}{which}") from error


def _checked(counted: Any) -> dict[str, Any] | None:
    """`RunWriter.sync`'s tree as a checkpoint gave it back; UserError for anything else."""
    if counted is None:
        return None
    try:
        kinds = {"rows": int, "bytes": int, "sha256": str}
        counts = [isinstance(count[key], kind) for count in counted["files"].values() for key, kind in kinds.items()]
        sound = all(counts) and isinstance(counted["incomplete"], str | None)
    except (AttributeError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError("the checkpoint's count of the records makes no sense: choose another run_dir")
    return dict(counted)


def _count(counted: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """What a checkpoint counted of a file; None where it counted nothing at all."""
    return None if counted is None else counted["files"].get(name, NOTHING)


def _missing(path: Path, step: int, count: dict[str, Any] | None) -> str:
    assert count is not None
    return f"{path.name} lost or changed some of the {count['rows']} rows that the checkpoint of step {step} counted"
