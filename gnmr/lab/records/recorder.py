"""One object for the training loop: what it is given goes to the files first, then to the views."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gnmr.console import activation, shown_command
from gnmr.errors import RunFailed, UserError
from gnmr.lab.records.view import RunInfo, View
from gnmr.lab.records.wandb_sink import Labels, WandbSink, group_of, recorded_rows
from gnmr.records.reader import read_json, read_jsonl
from gnmr.records.schema import RatioRows
from gnmr.records.writer import RunWriter

if TYPE_CHECKING:
    from gnmr.lab.config import RecordsConfig


_BEGAN = ("gnmr", "python", "torch", "commit", "command", "machine")
"""What header.json says of the process that began a run."""


class Recorder:
    """Files, live view and W&B of one run. Any write may raise `RunFailed`; then call `finish("failed", ...)`.

    As a context manager it closes files, W&B and view on the way out, should a defect of ours keep `finish` from being
    called.
    """

    def __init__(
        self, info: RunInfo, settings: RecordsConfig, resume_step: int | None, counted: dict[str, Any] | None = None
    ) -> None:
        """resume_step, counted: as in `RunWriter`; raises its `UserError` and `RunFailed`."""
        self._info = info
        self._settings = settings
        self._header = {} if resume_step is None else _header(info.folder / "header.json")
        self._writer = RunWriter(info.folder, resume_step, counted)
        self._view = View(settings.live, settings.plain_every, folder=info.folder)
        self._wandb = WandbSink(self._view.say, settings.wandb_every, settings.wandb_units)
        self._summary: dict[str, Any] | None = None

    def start(self, config_yaml: str, config: dict[str, Any], header: dict[str, Any], group: str) -> None:
        """Writes the header and opens the views.

        config_yaml and config: the resolved config as text and as a tree. header: see `schema`; `run_id`, under which
        W&B knows the run, is added and kept over resumptions. group: the experiment, a tag in W&B.
        """
        info, settings = self._info, self._settings
        run_id = str(self._header.get("run_id") or secrets.token_hex(4))
        if self._header:  # what began the run stays; what continued it is added, and the rest is the same
            again = {key: header.get(key) for key in ("commit", "command", "torch", "machine")}
            again["after_step"] = info.start_step
            began = {key: self._header[key] for key in _BEGAN if key in self._header}
            earlier = self._header.get("resumed")
            header = header | began | {"resumed": [*(earlier if isinstance(earlier, list) else []), again]}
        self._writer.write_header(config_yaml, header | {"run_id": run_id})
        events = read_jsonl(info.folder / "events.jsonl")
        self._wandb.start(
            Labels(run_id, info.name, info.arm, group_of(info.name, info.arm), (group, str(header.get("scale") or ""))),
            project=settings.wandb_project,
            folder=info.folder,
            config=config,
            header=header,
            mode=settings.wandb,
        )
        if self._header:
            self._wandb.resume(lambda: recorded_rows(info.folder), info.start_step)
        self._view.events(events)
        self._view.start(info)

    def step(self, row: dict[str, Any], ratios: RatioRows | None) -> None:
        """A row of `STEP_FIELDS`; ratios: None for a run without units."""
        self._writer.step(row)
        if ratios is not None and row["step"] % self._settings.ratios_every == 0:
            self._writer.ratios(ratios)
        self._wandb.step(row, ratios)
        self._view.step(row, ratios)

    def eval(self, row: dict[str, Any]) -> None:
        """A row of `EVAL_FIELDS`."""
        self._writer.eval(row)
        self._wandb.eval(row)
        self._view.eval(row)

    def scores(self, row: dict[str, Any]) -> None:
        """A row of `SCORE_FIELDS`; its main figures go to whoever watches."""
        self._writer.scores(row)
        for name, task in row["tasks"].items():
            told = ", ".join(f"{metric} {figure['value']:.4g}" for metric, figure in task["metrics"].items())
            self._view.say(f"step {row['step']}  {name} ({row['path']}, {task['items']} items): {told}")

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Rows of `EVENT_FIELDS`."""
        self._writer.events(rows)
        self._wandb.events(rows)
        self._view.events(rows)

    def verdict(self, row: dict[str, Any], told: str) -> None:
        """A row of `EVENT_FIELDS` that says what is to blame for a step, and the line that tells it."""
        self._writer.events([row])
        self._view.say(told)

    def faults(self, rows: list[dict[str, Any]]) -> None:
        """Rows of `FAULT_FIELDS`, all windows of the run."""
        self._writer.faults(rows)

    def sync(self) -> dict[str, Any]:
        """As `RunWriter.sync`: the rows are on the disk, and this is what was counted of them."""
        return self._writer.sync()

    def say(self, text: str, narrow: str | None = None) -> None:
        """As `View.say`, to whoever watches."""
        self._view.say(text, narrow)

    def finish(self, status: str, reason: str | None = None, peak_memory_bytes: int | None = None) -> dict[str, Any]:
        """Ends the run and returns its summary; status as in `RunWriter.finish`. W&B comes after DONE.

        Only the first call counts.

        A run whose end cannot be written is marked FAILED, its views are closed, and `RunFailed` is raised.
        """
        if self._summary is not None:  # it ended already; what closing the views raised changes nothing about it
            return self._summary
        info = self._info
        try:
            self._summary = summary = self._writer.finish(status, reason, info.num_units, info.max_o, peak_memory_bytes)
        except RunFailed as error:
            if status != "failed":
                self.finish("failed", str(error))
            raise
        where = self._wandb.where()
        self._wandb.finish(summary, read_jsonl(info.folder / "events.jsonl"))
        following = [*activation(), f"next: {shown_command('report', info.folder)}"]
        self._view.stop(summary, [*following, *([where] if where else [])])
        return summary

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._wandb.close()
        self._view.stop()


class Silent:
    """In the place of a `Recorder` where another process writes: nothing happens."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _header(path: Path) -> dict[str, Any]:
    """What began the run; nothing where it is unknown, UserError where something else stands there."""
    try:
        return read_json(path) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): remove it or choose another run_dir") from error
