"""Show a run in Weights & Biases. Whatever fails there is reported once and never stops or changes the run."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from gnmr.errors import plural
from gnmr.lab.views.live import RunInfo
from gnmr.records.reader import iter_jsonl, read_jsonl, read_units
from gnmr.records.schema import EVENT_FIELDS, UnitRows
from gnmr.records.unit_stream import recorded_units

_GROUPS = {"num_": "recovery", "spent_": "recovery", "saved_": "memory"}
"""Groups of a step's series by the prefix of the recorded field; every other field is in `train`."""
_PRICES = ("price", "price_fprop")
_CHART_UNITS = 5  # that have a line in a chart, the most promoted ones
_CHART_STEPS = 10  # in a point of a chart, the maximum over them; more if W&B would draw too many points
_MAX_TAG = 64  # characters; W&B's own limit
_LIMIT_S = 30.0  # time for W&B to take the last rows and to end a run
_TEARDOWN_S = 2.0
_SETTINGS = {
    "init_timeout": 30.0,  # s; the run waits for it
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandbSink:
    """Sends a run to W&B: the figures of every step, and at the end charts of units and a table of events.

    A resumed run goes on under its id, and first sends the recorded steps that W&B lacks. Offline these are all steps:
    `wandb sync` replaces the history of a run by that of the part which is uploaded last, and a killed process leaves a
    part without its last steps. So each part holds the whole run up to its own end.

    A thread sends the rows: W&B hands each to another process and waits (0.3 ms, some ms on a busy machine), while the
    training thread only queues them. What is handed over must not be changed afterwards.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Send nothing until `start`; `say` gets the one line when W&B fails."""
        self._say = say
        self._columns: list[str] = []  # of the signal, as the last row of steps.jsonl has them
        self._num_promotions = self._last_step = 0
        self._run: Any = None
        self._gave_up = False
        self._calls: SimpleQueue[tuple[str, Callable[[], Any]] | None] = SimpleQueue()
        # A daemon, unlike the threads of an executor: it does not keep the process alive.
        self._thread = Thread(target=self._make_calls, daemon=True, name="wandb-sink")

    def start(self, info: RunInfo, config: dict[str, Any], header: dict[str, Any], mode: str) -> None:
        """Open the W&B run; its files go to wandb/ in the run's folder.

        WANDB_PROJECT (gnmr), WANDB_ENTITY, WANDB_NAME and WANDB_RUN_GROUP hold, and WANDB_TAGS are added to the tags.

        Args:
            info: the run's name, folder and arm. The arm is W&B's job_type and a tag; runs that differ in the seed
                alone are one group.
            config: the run's config.
            header: header.json, whose `run_id` is the run's id in W&B. Entries that list units are not sent.
            mode: online, offline, off, or auto: WANDB_MODE, else online if an API key is configured and W&B can be
                reached, else offline. Never asks for a key.
        """
        if mode == "off":
            return
        run_tags = (info.arm, header.get("experiment"), header.get("scale"))
        tags = [*map(str, filter(None, run_tags)), *map(str.strip, os.environ.get("WANDB_TAGS", "").split(","))]
        scalars = {key: value for key, value in header.items() if not isinstance(value, list)}
        arguments = {
            "id": header["run_id"],
            "name": os.environ.get("WANDB_NAME") or info.name,
            "group": os.environ.get("WANDB_RUN_GROUP") or group_of(info.name, info.arm),
            "job_type": info.arm[:_MAX_TAG],
            "tags": list(dict.fromkeys(tag[:_MAX_TAG] for tag in tags if tag)),
            "project": os.environ.get("WANDB_PROJECT") or "gnmr",
            "dir": info.folder,
            "config": config | {"arm": info.arm, "header": scalars},
        }
        with self._tolerant("start"):
            wandb = _wandb()
            has_key = _has_key(wandb)
            wanted = mode if mode != "auto" else os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
            if wanted == "online" and not has_key:  # W&B would ask for one
                raise RuntimeError("no API key is configured, see wandb login")
            try:
                self._run = _open(wandb, wanted, arguments)
            except Exception as error:
                if mode != "auto" or wanted != "online":
                    raise
                self._say(f"W&B cannot be reached, its files are kept to be uploaded later ({_one_line(error)})")
                wandb.teardown()  # it still holds the run's id
                self._run = _open(wandb, "offline", arguments)
            self._run.define_metric("*", step_metric="step")
            self._thread.start()

    def resume(self, folder: Path, last_step: int) -> None:
        """Send the recorded steps up to `last_step` that W&B lacks.

        The thread reads the records, so that an error in them stops W&B and not the run.
        """
        self._queue("resume", self._resume, folder, last_step)

    def _resume(self, folder: Path, last_step: int) -> None:
        first_step = self._run.step  # W&B has the steps before it; 0 offline
        evals = {row["step"]: row for row in read_jsonl(folder / "eval.jsonl")}
        promotions = Counter(row["step"] for row in read_jsonl(folder / "events.jsonl") if _is_promotion(row))
        self._num_promotions += promotions[0]
        recorded = recorded_units(folder)
        units = next(recorded, None)
        for row, _ in iter_jsonl(folder / "steps.jsonl"):
            if (step := row["step"]) > last_step:
                return
            while units is not None and units.step < step:
                units = next(recorded, None)
            self._num_promotions += promotions[step]
            metrics = self._step_metrics(row, units if units is not None and units.step == step else None)
            if step >= first_step:
                self._run.log(metrics | (_eval_metrics(evals[step]) if step in evals else {}), step=step)

    def step(self, row: dict[str, Any], units: UnitRows | None = None) -> None:
        """Send a row of `STEP_FIELDS`, of every step; `units` is None for a run without units."""
        self._queue("log", lambda: self._run.log(self._step_metrics(row, units), step=row["step"]))

    def eval(self, row: dict[str, Any]) -> None:
        """Send a row of `EVAL_FIELDS`."""
        self._queue("log", lambda: self._run.log(_eval_metrics(row), step=row["step"]))

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Count the promotions among rows of `EVENT_FIELDS`, of the step that was given last."""
        if number := sum(map(_is_promotion, rows)):
            self._queue("log", self._count, number)

    def _count(self, number: int) -> None:
        self._num_promotions += number  # W&B puts the number into the row of the last step
        self._run.log({"recovery/promotions": self._num_promotions}, step=self._last_step)

    def finish(self, summary: dict[str, Any], events: list[dict[str, Any]], folder: Path) -> None:
        """Wait for queued rows and end the W&B run.

        Args:
            summary: `SUMMARY_FIELDS`.
            events: rows of `EVENT_FIELDS`, sent as a table: the newest, if there are more than W&B takes.
            folder: the run folder, whose units.arrows the charts of units are made of.
        """
        self._end(self._finish, summary, events, folder)

    def _finish(self, summary: dict[str, Any], events: list[dict[str, Any]], folder: Path) -> None:
        wandb = _wandb()
        promotions = Counter(str(row["unit"]) for row in events if _is_promotion(row))
        last_metrics = self._charts(folder, promotions)
        if rows := [[row.get(key) for key in EVENT_FIELDS] for row in events[-wandb.Table.MAX_ROWS :]]:
            last_metrics["events"] = wandb.Table(columns=list(EVENT_FIELDS), data=rows)
        if last_metrics:
            self._run.log(last_metrics, step=self._run.step)
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.finish(exit_code=0 if summary.get("status") == "done" else 1)

    def _charts(self, folder: Path, promotions: Counter[str]) -> dict[str, Any]:
        """Return {traces/COLUMN: chart} with a line for each of the most promoted units; the risk without columns.

        A point is the maximum over an interval and has the name of its last step, so that no spike of one step is lost.
        """
        wandb, table = _wandb(), read_units(folder).to_pandas().replace([np.inf, -np.inf], np.nan)
        most_points = max(1, wandb.Table.MAX_ROWS // _CHART_UNITS)
        interval = max(_CHART_STEPS, -(-self._last_step // most_points))
        table["step"] = np.minimum(-(-table["step"] // interval) * interval, self._last_step)
        columns = [name for name in self._columns if name in table] or ["risk"]
        maxima = table.groupby(["step", "unit"], observed=True)[columns].max()
        charts: dict[str, Any] = {}
        for column in columns:
            by_unit = maxima[column].unstack().dropna(axis=1, how="all")
            units = sorted(by_unit, key=lambda unit: (-promotions[unit], -by_unit[unit].max()))[:_CHART_UNITS]
            lines = [by_unit[unit].dropna() for unit in units]
            if lines:
                charts[f"traces/{column}"] = wandb.plot.line_series(
                    [line.index.tolist() for line in lines],
                    [line.tolist() for line in lines],
                    keys=units,
                    title=f"{column} of the most promoted units, highest in {plural(interval, 'step')}",
                    xname="step",
                )
        return charts

    def close(self) -> None:
        """Close the run without `finish`, so that W&B marks it as failed; does nothing after `finish`."""
        self._end(lambda: self._run.finish(exit_code=1))

    def _end(self, finish: Callable[..., None], *arguments: Any) -> None:
        """Make the queued calls and the last one, with a limit, because W&B's service may never answer."""
        if self._run is None:
            return
        self._queue("finish", finish, *arguments)
        self._calls.put(None)
        self._thread.join(_LIMIT_S)
        if self._thread.is_alive() and self._run is not None:
            self._give_up(f"its service did not answer within {_LIMIT_S:.0f} s")
        self._run = None

    def where(self) -> str | None:
        """Return the run's address, or the command that uploads it; None without W&B."""
        if self._run is None:
            return None
        if self._run.offline:
            return f"W&B: wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        return f"W&B: {self._run.url}" if self._run.url else None  # WANDB_MODE=disabled has none

    def _queue(self, doing: str, call: Callable[..., Any], *arguments: Any) -> None:
        if self._run is not None:
            self._calls.put((doing, partial(call, *arguments)))

    def _make_calls(self) -> None:
        while (queued := self._calls.get()) is not None:
            doing, call = queued
            if self._run is not None:  # else an earlier call failed
                with self._tolerant(doing):
                    call()

    def _step_metrics(self, row: dict[str, Any], units: UnitRows | None) -> dict[str, Any]:
        self._last_step, self._columns = row["step"], list(row["over"])
        metrics = {"step": row["step"], "recovery/promotions": self._num_promotions, **series_of(row)}
        for prefix, key in (("over", "over"), ("model", "statistics"), ("monitored", "monitored")):
            metrics |= {f"{prefix}/{name}": number for name, number in row[key].items()}
        for operand, (saturated, nonfinite) in row["saturation"].items():
            metrics |= {f"casts/{operand}_saturated": saturated, f"casts/{operand}_nonfinite": nonfinite}
        return metrics | ({} if units is None else _unit_metrics(units))

    @contextmanager
    def _tolerant(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._give_up(f"its {doing} failed ({_one_line(error)})")

    def _give_up(self, why: str) -> None:
        self._run = None
        if self._gave_up:  # in the other thread
            return
        self._gave_up = True
        self._say(f"W&B is off from here, {why}; the run goes on")
        ending = Thread(target=_tear_down, daemon=True)
        ending.start()
        ending.join(_TEARDOWN_S)


def series_of(row: dict[str, Any]) -> dict[str, float]:
    """Return every number of a row of `STEP_FIELDS` but `step` as {series: number}."""
    series = {}
    for field, number in row.items():
        if field != "step" and isinstance(number, (int, float)):
            group = next((group for prefix, group in _GROUPS.items() if field.startswith(prefix)), "train")
            series[f"{group}/{field}"] = number
    return series


def group_of(name: str, arm: str) -> str:
    """Return the run's name, EXPERIMENT/ARM-HASH-s0, without its seed; EXPERIMENT/ARM for a run of another name."""
    without_seed = re.sub(r"-s\d+$", "", name)
    return (without_seed if without_seed != name else f"{name.partition('/')[0]}/{arm}")[:128]


def _is_promotion(row: dict[str, Any]) -> bool:
    return bool(row["event"] == "promote")


def _eval_metrics(row: dict[str, Any]) -> dict[str, Any]:
    return {"step": row["step"]} | {
        f"val/{field.removeprefix('val_')}": number
        for field, number in row.items()
        if field.startswith("val_") and number is not None
    }


def _unit_metrics(rows: UnitRows) -> dict[str, float]:
    """Return the highest risk, the mean GNMR and the sum of the prices over all observed units, where measured."""
    risk = rows.risk[rows.observed & ~np.isnan(rows.risk)]
    metrics = {"risk/highest": float(risk.max())} if len(risk) else {}
    finite = {name: values[np.isfinite(values)] for name, values in rows.columns.items() if np.isfinite(values).any()}
    if "gnmr" in finite:
        metrics["risk/mean_gnmr"] = float(finite["gnmr"].mean())
    if price := next((name for name in _PRICES if name in finite), None):
        metrics["price/total_nats"] = float(finite[price].sum())
    return metrics


def _wandb() -> Any:
    """Return the module, which is imported only when it is needed (0.8 s)."""
    import wandb

    return wandb


def _tear_down() -> None:
    """End W&B's service and its hook at the end of this process, which would wait without a limit."""
    with suppress(Exception):
        _wandb().teardown()


def _open(wandb: Any, mode: str, arguments: dict[str, Any]) -> Any:
    settings = wandb.Settings.model_fields  # the x_ names come and go with versions
    return wandb.init(
        **arguments,
        mode=mode,
        resume="allow" if mode == "online" else None,  # offline it has no effect: the id joins the parts of a run
        reinit="create_new",
        settings=wandb.Settings(**{key: value for key, value in _SETTINGS.items() if key in settings}),
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _has_key(wandb: Any) -> bool:
    """Return True if credentials are configured: environment, W&B's settings files or netrc.

    `wandb.login(prompt=False)` would ask the server, and print.
    """
    from requests.utils import get_netrc_auth  # comes with W&B, which reads netrc by it too

    settings = wandb.setup().settings
    return bool(settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url))
