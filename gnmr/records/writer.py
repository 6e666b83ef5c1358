"""The files of a run folder: the truth of which the live view and W&B are views."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gnmr.errors import RunFailed, UserError
from gnmr.records.files import JsonLines, cut_jsonl, replace_json, replace_text
from gnmr.records.ratios import RatioStream, cut_stream, parquet_to_stream, stream_to_parquet
from gnmr.records.reader import stored
from gnmr.records.schema import EVAL_FIELDS, EVENT_FIELDS, FAULT_FIELDS, SCORE_FIELDS, STEP_FIELDS, RatioRows
from gnmr.records.summary import summarize

_JSONL = {"steps.jsonl": STEP_FIELDS, "eval.jsonl": EVAL_FIELDS, "events.jsonl": EVENT_FIELDS}
_SCORES = "scores.jsonl"
_RATIOS = ("ratios.rows", "ratios.parquet")
_ENDS = ("DONE", "FAILED", "summary.json")
_RESERVE_BYTES = 256 * 1024


class RunWriter:
    """Owns the record files of a run folder. Rows are flushed as they are made, never synchronised to the disk.

    A write that fails raises `RunFailed`; the records up to there stay readable. On a full disk a reserve file is
    given up, so that summary.json and FAILED can still be written.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """Opens the files of `folder`, which is made if it is missing.

        resume_step: None for a new run; raises `UserError` if the folder already holds records. Else the step of the
        checkpoint that the run continues from: rows after it are dropped, what marked the earlier end is removed.
        0 stands for a run that was killed before its first checkpoint: all its rows are dropped, those of step 0 too.
        """
        self.folder = folder
        self._reserve = folder / ".reserve"
        self._disk_full = False
        if resume_step is None:
            found = next((name for name in (*_JSONL, *_RATIOS) if stored(folder / name)), None)
            if found is not None:
                raise UserError(f"{folder} already holds the records of a run ({found}): resume it or choose another")
        with self._guard("its files"):
            folder.mkdir(parents=True, exist_ok=True)
            for name in _ENDS:
                (folder / name).unlink(missing_ok=True)
            if resume_step is not None:
                self._cut(resume_step if resume_step > 0 else -1)
            # Random bytes, so that a file system that compresses allocates all of them.
            self._reserve.write_bytes(os.urandom(_RESERVE_BYTES))
            self._lines = {name: JsonLines(folder / name, fields) for name, fields in _JSONL.items()}
            self._ratios = RatioStream(folder / "ratios.rows")

    def write_header(self, config_yaml: str, header: dict[str, Any]) -> None:
        """config.yaml (the resolved config) and header.json (any JSON tree; non-finite numbers as strings)."""
        with self._guard("header.json"):
            replace_text(self.folder / "config.yaml", config_yaml)
            replace_json(self.folder / "header.json", header)

    def step(self, row: dict[str, Any]) -> None:
        """A row of `STEP_FIELDS`."""
        self._append("steps.jsonl", [row])

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
            replace_text(self.folder / "faults.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def ratios(self, rows: RatioRows) -> None:
        """The observed units of one step."""
        with self._guard("ratios.rows"):
            self._ratios.write(rows)

    def finish(
        self, status: str, reason: str | None, num_recoverable: int, max_o: int, peak_memory_bytes: int | None = None
    ) -> dict[str, Any]:
        """Closes the records and returns the summary; the marker (DONE or FAILED) comes last.

        status: done, failed or interrupted (which gets no marker). The ratio stream is deleted only for done. May be
        called again with failed after done raised `RunFailed`; failed itself raises nothing for a full disk.
        """
        assert status in ("done", "failed", "interrupted"), status
        self.close()
        stream, parquet = self.folder / "ratios.rows", self.folder / "ratios.parquet"
        if status == "done":
            with self._guard("ratios.parquet"):
                if stream.exists():
                    stream_to_parquet(stream, parquet)
                    stream.unlink()
        elif stream.exists() and not self._disk_full:
            with suppress(OSError):  # the stream is kept, so nothing is lost
                stream_to_parquet(stream, parquet)
        self._reserve.unlink(missing_ok=True)
        summary = summarize(self.folder, num_recoverable, max_o, status, reason, peak_memory_bytes)
        with suppress(OSError) if status == "failed" else self._guard("summary.json"):
            replace_json(self.folder / "summary.json", summary)
        if status == "done":
            with self._guard("DONE"):
                replace_text(self.folder / "DONE", "")
        if status == "failed":
            with suppress(OSError):
                replace_text(self.folder / "FAILED", " ".join((reason or "unknown reason").split()) + "\n")
        return summary

    def close(self) -> None:
        """Closes the files without an end of the run; harmless when they are closed already."""
        for close in (*(lines.close for lines in self._lines.values()), self._ratios.close):
            with suppress(OSError):  # a full disk was reported when the row was written
                close()

    def _cut(self, last_step: int) -> None:
        lasts = {name: cut_jsonl(self.folder / name, last_step) for name in (*_JSONL, _SCORES)}
        if (last := lasts["steps.jsonl"]) < last_step:
            warnings.warn(
                f"{self.folder / 'steps.jsonl'} ends with step {last}, the checkpoint is of step {last_step}: rows "
                "were lost, and the summary will be of those that are left",
                stacklevel=4,
            )
        stream, parquet = (self.folder / name for name in _RATIOS)
        if parquet.exists() and not stream.exists():
            parquet_to_stream(parquet, stream)
        cut_stream(stream, last_step)
        parquet.unlink(missing_ok=True)

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
            raise RunFailed(f"cannot write {what} in {self.folder}: {error.strerror or error}") from error
