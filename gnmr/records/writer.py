"""Write the records of a run: files that any kill leaves readable. The live view and W&B only show them."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from gnmr.errors import RunFailed, UserError
from gnmr.records.append import AppendFile, JsonLines, cut_jsonl, replace_json, replace_text
from gnmr.records.disk import sync_folder
from gnmr.records.lock import FolderLock, lock_folder
from gnmr.records.reader import UNITS, iter_sound
from gnmr.records.schema import (
    EVAL_FIELDS,
    EVENT_FIELDS,
    FAULT_FIELDS,
    SCORE_FIELDS,
    STEP_FIELDS,
    VERDICT_FIELDS,
    UnitRows,
)
from gnmr.records.summary import summarize
from gnmr.records.unit_stream import UnitStream, cut_units

_JSONL = {"steps.jsonl": STEP_FIELDS, "eval.jsonl": EVAL_FIELDS, "events.jsonl": EVENT_FIELDS}
_FURTHER = {"events.jsonl": VERDICT_FIELDS}
_SCORES = "scores.jsonl"
_ENDS = ("DONE", "FAILED", "summary.json")


class RunWriter:
    """Own the record files of a run folder. Rows are flushed as they are made and synced before each checkpoint.

    A failed write raises `RunFailed`. The earlier records stay readable.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """Open the files of `folder`, which is made if it is missing.

        Args:
            folder: the run folder.
            resume_step: None for a new run. Otherwise the step of the checkpoint that the run continues from: rows
                after it are dropped, and the marks of an earlier end are removed. 0 stands for a run that was killed
                before its first checkpoint: all its rows are dropped.

        Raises:
            UserError: if a new run's folder already holds records, if another process writes the folder, or if rows up
                to the checkpoint are missing or damaged.
        """
        self.folder = folder
        if resume_step is None and (file := next((name for name in (*_JSONL, UNITS) if (folder / name).exists()), "")):
            raise UserError(f"{folder} already holds the records of a run ({file}): resume it or choose another")
        self.last_step = 0
        with self._guard("its files"):
            folder.mkdir(parents=True, exist_ok=True)
            # Nothing in the folder is changed before it belongs to this process.
            self._lock: FolderLock | None = lock_folder(folder)
            if resume_step is not None:
                self._cut(resume_step if resume_step > 0 else -1)
            self._lines = {
                name: JsonLines(folder / name, fields, _FURTHER.get(name, ())) for name, fields in _JSONL.items()
            }
            if (folder / _SCORES).exists():
                self._lines[_SCORES] = JsonLines(folder / _SCORES, SCORE_FIELDS)
            self._units = UnitStream(folder)

    def write_header(self, config_yaml: str, header: dict[str, Any]) -> None:
        """Write config.yaml and header.json.

        Args:
            config_yaml: the resolved config.
            header: the entries that the schema lists; non-finite numbers are written as strings.
        """
        with self._guard("header.json"):
            replace_text(self.folder / "config.yaml", config_yaml)
            replace_json(self.folder / "header.json", header)

    def sync(self) -> None:
        """Bring all rows to the disk."""
        with self._guard("its records"):
            for file in self._files():
                file.sync()
            sync_folder(self.folder)

    def step(self, row: dict[str, Any]) -> None:
        """Append a row to steps.jsonl.

        Args:
            row: exactly the keys of `STEP_FIELDS`, of a later step than the row before.
        """
        self._append("steps.jsonl", [row])
        self.last_step = row["step"]

    def eval(self, row: dict[str, Any]) -> None:
        """Append a row to eval.jsonl.

        Args:
            row: exactly the keys of `EVAL_FIELDS`.
        """
        self._append("eval.jsonl", [row])

    def scores(self, row: dict[str, Any]) -> None:
        """Append a row to scores.jsonl, which the first row makes.

        Args:
            row: exactly the keys of `SCORE_FIELDS`.
        """
        with self._guard(_SCORES):
            if _SCORES not in self._lines:
                self._lines[_SCORES] = JsonLines(self.folder / _SCORES, SCORE_FIELDS)
        self._append(_SCORES, [row])

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to events.jsonl.

        Args:
            rows: exactly the keys of `EVENT_FIELDS` each, in order of their step; there may be none.
        """
        if rows:
            self._append("events.jsonl", rows)

    def faults(self, rows: list[dict[str, Any]]) -> None:
        """Write faults.jsonl, in place of what an earlier start wrote.

        Args:
            rows: all windows of injected faults, with exactly the keys of `FAULT_FIELDS` each.
        """
        with self._guard("faults.jsonl"):
            assert all(row.keys() == FAULT_FIELDS.keys() for row in rows)
            replace_text(self.folder / "faults.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def units(self, rows: UnitRows) -> None:
        """Append the observed units of one step to units.arrows.

        Args:
            rows: the step's rows over all units, of which those without a gradient are left out.
        """
        with self._guard(UNITS):
            self._units.write(rows)

    def finish(
        self, status: str, reason: str | None, num_recoverable: int, max_o: int, peak_memory_bytes: int | None = None
    ) -> dict[str, Any]:
        """Close the records and return the summary; the marker (DONE or FAILED) is written last.

        Args:
            status: done, failed or interrupted, which gets no marker.
            reason: why the run failed or stopped.
            num_recoverable: the number of units that the controller watches.
            max_o: the most units on the recovery path.
            peak_memory_bytes: as in `SUMMARY_FIELDS`.

        Raises:
            RunFailed: if a file cannot be written. It may then be called again with failed, which raises nothing for a
                full disk.
        """
        assert status in ("done", "failed", "interrupted"), status
        if status == "done":
            self.sync()
        self._close_files()
        summary = summarize(self.folder, num_recoverable, max_o, status, reason, peak_memory_bytes)
        self._end(status, reason, summary)
        self.close()
        return summary

    def _end(self, status: str, reason: str | None, summary: dict[str, Any]) -> None:
        def guarded(name: str) -> AbstractContextManager[None]:
            return suppress(OSError) if status == "failed" else self._guard(name)

        if status == "failed":  # first, for a full disk may have room for this file alone
            with guarded("FAILED"):
                replace_text(self.folder / "FAILED", " ".join((reason or "unknown reason").split()) + "\n")
        with guarded("summary.json"):
            replace_json(self.folder / "summary.json", summary)
        if status == "done":
            with guarded("DONE"):
                replace_text(self.folder / "DONE", "")

    def close(self) -> None:
        """Close the files without an end of the run, and let other processes write the folder."""
        self._close_files()
        self._lock = None

    def _close_files(self) -> None:
        for file in self._files():
            with suppress(OSError):  # a full disk was reported when the row was written
                file.close()

    def _files(self) -> list[AppendFile]:
        return [*self._lines.values(), *([] if self._units.file is None else [self._units.file])]

    def _cut(self, last_step: int) -> None:
        """Drop the rows after `last_step`."""
        path = self.folder / "steps.jsonl"
        reached = 0
        for row, _ in iter_sound(path):
            if row["step"] > last_step:
                break
            reached = row["step"]
        # A user's own loop saves its checkpoint before the row of that step is complete.
        if reached < last_step - 1:
            raise UserError(
                f"{path}: rows were lost or damaged since the checkpoint of step {last_step}; put the file back as it "
                "was, or choose another folder"
            )
        # A kill during these lines leaves rows after the checkpoint, which the next start drops.
        self.last_step = cut_jsonl(path, last_step)
        for name in ("eval.jsonl", "events.jsonl", _SCORES):
            cut_jsonl(self.folder / name, last_step)
        cut_units(self.folder, last_step)
        for name in _ENDS:
            (self.folder / name).unlink(missing_ok=True)

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with self._guard(name):
            self._lines[name].write(rows)

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """Turn a failed write into `RunFailed`."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunFailed(f"disk full while writing {name} in {self.folder}") from error
            which = f" ({Path(error.filename).name})" if isinstance(error.filename, str | Path) else ""
            raise RunFailed(f"cannot write {name} in {self.folder}: {error.strerror or error}{which}") from error
