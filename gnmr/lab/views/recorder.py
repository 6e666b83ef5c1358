"""One object for the training loop: rows go to the files first, then to the live view and W&B."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gnmr.console import next_lines, shown_command
from gnmr.errors import RunFailed, plural
from gnmr.lab.views.live import LiveView, RunInfo
from gnmr.lab.views.wandb_sink import WandbSink
from gnmr.records.reader import iter_sound, read_json, read_jsonl
from gnmr.records.schema import UnitRows
from gnmr.records.writer import RunWriter

if TYPE_CHECKING:
    from gnmr.lab.config import RecordsConfig

_BEGAN = ("gnmr", "python", "torch", "commit", "command", "machine")
"""What header.json says of the process that began a run."""


def _other_machine(began: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return in words how the machine that continues a run differs from the one that began it, or None.

    Only what decides the last bits is compared. The threads and the type of the CPU do not decide them on a GPU.
    """
    on_cpu = now.get("device") == began.get("device") == "cpu"
    changes = []
    for key in ("threads", "cpu", "kernels", "products") if on_cpu else ("device",):
        if began.get(key) != now.get(key) and None not in (began.get(key), now.get(key)):
            sides = (began, now)
            old, new = (plural(side[key], "thread") if key == "threads" else f"{key} {side[key]}" for side in sides)
            changes.append(f"began with {old}, continues with {new}")
    return "; ".join(changes) or None


class Recorder:
    """Files, live view and W&B of one run. Any write may raise `RunFailed`; then call `finish("failed", ...)`.

    As a context manager it closes all three, even if `finish` is not called because of a bug.
    """

    def __init__(self, info: RunInfo, settings: RecordsConfig, resume_step: int | None) -> None:
        """Open the files; `resume_step` and the errors are those of `RunWriter`."""
        self._info = info
        self._settings = settings
        self._header = {} if resume_step is None else read_json(info.folder / "header.json") or {}
        self._writer = RunWriter(info.folder, resume_step)
        self._view = LiveView(settings.live, folder=info.folder)
        self._wandb = WandbSink(self._view.say)
        self._summary: dict[str, Any] | None = None

    def start(self, config_yaml: str, config: dict[str, Any], header: dict[str, Any]) -> None:
        """Write the header and open the views.

        Args:
            config_yaml: the resolved config as text.
            config: the resolved config as a tree.
            header: see `schema`; `run_id`, under which W&B knows the run, is added and kept over resumptions.
        """
        info, settings, before = self._info, self._settings, self._header
        header = header | {"run_id": str(before.get("run_id") or secrets.token_hex(4))}
        if before:  # what began the run stays, and what continued it is added
            again = {key: header.get(key) for key in ("commit", "command", "torch", "machine")}
            header |= {key: before[key] for key in _BEGAN if key in before}
            header["resumed"] = [*before.get("resumed", []), again | {"after_step": info.start_step}]
            if info.start_step and (change := _other_machine(before.get("machine") or {}, again["machine"] or {})):
                self.say(f"{change}: the result is not equal to the last bit to that of an undisturbed run")
        self._writer.write_header(config_yaml, header)
        self._wandb.start(info, config, header, settings.wandb)
        if before:
            self._wandb.resume(info.folder, info.start_step)
        # The view counts the promotions of the whole run, also those before a resumption.
        self._view.events(read_jsonl(info.folder / "events.jsonl"))
        self._view.start(info)

    def step(self, row: dict[str, Any], units: UnitRows | None) -> None:
        """Record a row of `STEP_FIELDS`; `units` is None for a run without units."""
        # The file comes first, so that no view shows a row that is not recorded.
        self._writer.step(row)
        if units is not None and row["step"] % self._settings.units_every == 0:
            self._writer.units(units)
        self._wandb.step(row, units)
        self._view.step(row, units)

    def eval(self, row: dict[str, Any]) -> None:
        """Record a row of `EVAL_FIELDS`."""
        self._writer.eval(row)
        self._wandb.eval(row)
        self._view.eval(row)

    def scores(self, row: dict[str, Any]) -> None:
        """Record a row of `SCORE_FIELDS` and print its main figures."""
        self._writer.scores(row)
        for name, task in row["tasks"].items():
            figures = ", ".join(f"{metric} {figure['value']:.4g}" for metric, figure in task["metrics"].items())
            self._view.say(f"step {row['step']}  {name} ({row['path']}, {task['items']} items): {figures}")

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Record rows of `EVENT_FIELDS`."""
        self._writer.events(rows)
        self._wandb.events(rows)
        self._view.events(rows)

    def verdict(self, row: dict[str, Any], line: str) -> None:
        """Record a row of `EVENT_FIELDS` with the cause of a step's spike, and print `line`."""
        self._writer.events([row])
        self._view.say(line)

    def faults(self, rows: list[dict[str, Any]]) -> None:
        """Record rows of `FAULT_FIELDS`, all windows of the run."""
        self._writer.faults(rows)

    def sync(self) -> None:
        """Bring the rows to the disk."""
        self._writer.sync()

    def say(self, text: str, narrow: str | None = None) -> None:
        """Print lines; see `LiveView.say`."""
        self._view.say(text, narrow)

    def finish(self, status: str, reason: str | None = None, peak_memory_bytes: int | None = None) -> dict[str, Any]:
        """End the run and return its summary; see `RunWriter.finish` for the arguments. A second call does nothing.

        If the end of the run cannot be written, the run is marked FAILED and `RunFailed` is raised.
        """
        if self._summary is not None:  # what closing the views raised changes nothing about the end
            return self._summary
        info = self._info
        try:
            self._summary = summary = self._writer.finish(status, reason, info.num_units, info.max_o, peak_memory_bytes)
        # A run whose end was not recorded has not ended well; the second attempt writes that it failed.
        except RunFailed as error:
            if status != "failed":
                self.finish("failed", str(error))
            raise
        where = self._wandb.where()
        self._wandb.finish(summary, [row for row, _ in iter_sound(info.folder / "events.jsonl")], info.folder)
        following = next_lines(shown_command("report", info.folder))
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
    """A recorder that does nothing, for processes other than the first."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None
