"""Weights & Biases as a view of a run. Whatever fails there is said once and never stops or changes the run."""

from __future__ import annotations

import math
import netrc
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from gnmr.errors import printable
from gnmr.lab.records.risk_image import RiskMap
from gnmr.records.reader import calibrated_trigger, iter_jsonl, read_jsonl
from gnmr.records.schema import EVENT_FIELDS, RatioRows
from gnmr.records.units import recorded_units

STEP_METRICS = {
    "tokens": "train/tokens",
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm_pre_clip": "train/grad_norm_pre_clip",
    "skipped": "train/skipped",
    "nonfinite_total": "train/nonfinite_total",
    "nonfinite_streak": "train/nonfinite_streak",
    "step_time_s": "train/step_time_s",
    "num_candidates": "recovery/num_candidates",
    "num_active": "recovery/num_active",
    "spent_gemm_frac": "recovery/spent_gemm_frac",
    "spent_extra_bytes": "recovery/spent_extra_bytes",
    "saved_bytes": "memory/saved_bytes",
    "saved_bytes_predicted": "memory/saved_bytes_predicted",
}
MINUS_16BIT = {"loss": "compare/loss_minus_16bit", "val_loss": "compare/val_loss_minus_16bit"}
"""What `gnmr sync` adds, which knows the other arms."""
PANELS = (
    "train/loss",
    "val/loss",
    *MINUS_16BIT.values(),
    "recovery/num_active",
    "recovery/promotions",
    "recovery/spent_gemm_frac",
    "risk/highest",
    "risk/mean_gnmr",
    "price/total_nats",
)
"""What W&B draws by itself, besides the traces of units, the risk map and the tables; the rest is recorded and can be
drawn. W&B makes a section of panels for each prefix."""
_HIDDEN = ("over/*", "model/*", "monitored/*", "casts/*")
EVAL_METRICS = {"val_loss": "val/loss", "val_ppl": "val/ppl"}

_MOST_TRACES = 40_000
"""Rows that are kept of units; W&B's table has 10,000."""
_PRICES = ("price", "price_fprop")
_MAX_TAG = 64
"""Characters; W&B's own limit."""
MOST_LINES = 64
"""Units that have lines unless told otherwise."""

_ENVIRONMENT = ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_TAGS")

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


@dataclass(frozen=True)
class Labels:
    """What W&B files a run under."""

    run_id: str
    name: str
    arm: str
    """Its job_type, a tag, and config.arm."""
    group: str
    """The runs that differ in the seed alone: W&B draws their mean."""
    tags: tuple[str, ...] = ()


def group_of(name: str, arm: str) -> str:
    """The name of a run, EXPERIMENT/ARM-HASH-s0, without its seed; of a run of another name EXPERIMENT/ARM."""
    without = re.sub(r"-s\d+$", "", name)
    return (without if without != name else f"{name.partition('/')[0]}/{arm}")[:128]


Recorded = tuple[str, Any, RatioRows | None]
"""("step", its row, its ratios or None), ("events", rows that end with this step, None) or ("eval", its row, None)."""


def recorded_rows(folder: Path) -> Iterator[Recorded]:
    """Yield what a run folder holds in the order in which training recorded it."""
    evals, events = read_jsonl(folder / "eval.jsonl"), read_jsonl(folder / "events.jsonl")
    ratios = recorded_units(folder)
    held = next(ratios, None)
    for row, _ in iter_jsonl(folder / "steps.jsonl"):
        while evals and evals[0]["step"] < row["step"]:
            yield "eval", evals.pop(0), None
        while held is not None and held.step < row["step"]:
            held = next(ratios, None)
        yield "step", row, held if held is not None and held.step == row["step"] else None
        these = list(takewhile(lambda event, step=row["step"]: event["step"] <= step, events))  # type: ignore[misc]
        del events[: len(these)]
        yield "events", these, None
    for row in evals:
        yield "eval", row, None


class WandbSink:
    """Sends a run to W&B: losses every step, the ratios of units as lines, the risk map at every evaluation, tables of
    units and events at the end.

    A resumed run goes on under its id, and first sends the recorded steps that W&B lacks. Offline these are all steps
    since the first: `wandb sync` replaces the history of a run by that of the part which is uploaded last, and a killed
    process leaves a part without its last steps. So each part holds the whole run up to its own end.

    Rows are sent by a thread of their own: W&B hands each to another process and waits (0.3 ms, some ms on a busy
    machine), while the training thread only queues them. What is handed over must not be changed afterwards.
    """

    def __init__(self, say: Callable[[str], None], wandb_every: int = 10, wandb_units: int | None = MOST_LINES) -> None:
        """say: gets the one line when W&B fails. wandb_every: steps between the points of a unit's lines and its rows
        in the table. wandb_units: how many units have lines, the most promoted ones; None: all."""
        self._say = say
        self._every, self._most = wandb_every, wandb_units
        self._promotions: Counter[str] = Counter()
        self._sections: set[str] = set()
        self._last_step = 0
        self._run: Any = None
        self._thread = ThreadPoolExecutor(1, "wandb-sink")  # starts with the first row
        self._map = RiskMap()
        self._traces = UnitTraces(wandb_every)
        self._trigger = 1.0

    def start(
        self,
        labels: Labels,
        *,
        project: str | None,
        folder: Path,
        config: dict[str, Any],
        header: dict[str, Any],
        mode: str,
    ) -> None:
        """Opens the W&B run; its files go to folder/wandb.

        project: NAME, or ENTITY/NAME; None: WANDB_PROJECT, else gnmr. WANDB_NAME and WANDB_RUN_GROUP replace name and
        group of `labels`, WANDB_TAGS are added to its tags, WANDB_ENTITY owns a project that names no entity.
        config, header: of the run; W&B gets both, without what the header says unit by unit, as its config.
        mode: online, offline, off, or auto: what WANDB_MODE says, else online where an API key is configured and W&B
        can be reached, else offline. Never asks for a key.
        """
        if mode == "off":
            return
        self._trigger = _trigger(config, header)
        told = {key: value for key, value in header.items() if not isinstance(value, list)}
        entity, _, name = (project or "").rpartition("/")
        tags = (labels.arm, *labels.tags, *map(str.strip, os.environ.get("WANDB_TAGS", "").split(",")))
        arguments = {
            "id": labels.run_id,
            "name": os.environ.get("WANDB_NAME") or labels.name,
            "group": os.environ.get("WANDB_RUN_GROUP") or labels.group,
            "job_type": labels.arm[:_MAX_TAG],
            "tags": list(dict.fromkeys(tag[:_MAX_TAG] for tag in tags if tag)),
            "project": name or os.environ.get("WANDB_PROJECT") or "gnmr",
            "entity": entity or None,
            "dir": folder,
            "config": config | {"arm": labels.arm, "header": told},
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
            _define(self._run)
            if wanted != "disabled" and (line := _environment(entity, name)):
                self._say(line)

    def resume(self, rows: Callable[[], Iterable[Recorded]], last_step: int) -> None:
        """Send what W&B lacks of the steps up to `last_step` of a run that goes on.

        `rows`: of `recorded_rows`. The sink's own thread reads them, so that what is wrong with them stops W&B and not
        the run.
        """
        if self._run is not None:
            self._thread.submit(self._resume, rows, last_step)

    def _resume(self, rows: Callable[[], Iterable[Recorded]], last_step: int) -> None:
        with self._tolerant("resume"):
            there = self._run.step  # W&B has the steps before it; 0 offline
            for kind, row, ratios in rows():
                if self._run is None or (kind != "events" and row["step"] > last_step):
                    return
                if kind == "events":
                    self._promoted(row, there)
                else:
                    found = self._step_metrics(row, ratios) if kind == "step" else self._eval_metrics(row)
                    if row["step"] >= there:
                        self._run.log(found, step=row["step"])

    def step(
        self, row: dict[str, Any], ratios: RatioRows | None = None, more: Mapping[str, float] | None = None
    ) -> None:
        """A row of `STEP_FIELDS`, of every step; ratios: None for a run without units; more: further metrics."""
        if self._run is not None:
            self._thread.submit(self._log, row["step"], lambda: self._step_metrics(row, ratios) | dict(more or {}))

    def eval(self, row: dict[str, Any], more: Mapping[str, float] | None = None) -> None:
        """A row of `EVAL_FIELDS`; more: further metrics of it."""
        if self._run is not None:
            self._thread.submit(self._log, row["step"], lambda: self._eval_metrics(row) | dict(more or {}))

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Rows of `EVENT_FIELDS`, of the step that was given last."""
        if self._run is not None and rows:
            self._thread.submit(self._promoted, rows)

    def finish(self, summary: dict[str, Any], events: list[dict[str, Any]]) -> None:
        """Waits for what is queued and ends the W&B run.

        summary: `SUMMARY_FIELDS`; events: rows of `EVENT_FIELDS`, logged as a table (the newest, if there are more
        than W&B takes; events.jsonl has them all).
        """
        self._thread.shutdown()
        if self._run is None:
            return
        with self._tolerant("finish"):
            wandb = _wandb()
            last: dict[str, Any] = self._picture()
            if rows := [[row.get(key) for key in EVENT_FIELDS] for row in events[-wandb.Table.MAX_ROWS :]]:
                last["events"] = wandb.Table(columns=list(EVENT_FIELDS), data=rows)
            if traces := self._traces.rows(wandb.Table.MAX_ROWS):
                last["units"] = wandb.Table(columns=self._traces.columns, data=traces)
            if last:
                self._run.log(last, step=self._run.step)
            self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
            self._run.finish(exit_code=0 if summary.get("status") == "done" else 1)
            self._run = None

    def close(self) -> None:
        """Lets the run go without an end of ours (W&B calls it failed); harmless after `finish`."""
        self._thread.shutdown()
        if self._run is not None:
            with self._tolerant("finish"):
                self._run.finish(exit_code=1)
            self._run = None

    def where(self) -> str | None:
        """Where the run is to be seen: its address, or the command that uploads it; None without W&B."""
        if self._run is None:
            return None
        if self._run.offline:
            return f"W&B: wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        return f"W&B: {self._run.url}" if self._run.url else None  # WANDB_MODE=disabled has none

    def _log(self, step: int, metrics: Callable[[], dict[str, Any]]) -> None:
        if self._run is not None:  # else an earlier row failed
            with self._tolerant("log"):
                self._run.log(metrics(), step=step)

    def _promoted(self, rows: list[dict[str, Any]], there: int = 0) -> None:
        """Counts promotions; `there`: W&B has the steps before it."""
        units = [str(row["unit"]) for row in rows if row.get("event") == "promote"]
        self._promotions.update(units)
        if units and self._last_step >= there:  # W&B puts it into the row of this step
            self._log(self._last_step, lambda: {"recovery/promotions": self._promotions.total()})

    def _step_metrics(self, row: dict[str, Any], ratios: RatioRows | None) -> dict[str, Any]:
        self._last_step = row["step"]
        metrics = {"step": row["step"], "recovery/promotions": self._promotions.total()}
        metrics |= {name: row[key] for key, name in STEP_METRICS.items() if key in row}
        metrics |= {f"over/{column}": number for column, number in row.get("over", {}).items()}
        metrics |= {f"model/{name}": number for name, number in row.get("statistics", {}).items()}
        metrics |= {f"monitored/{name}": norm for name, norm in row.get("monitored", {}).items()}
        for operand, (saturated, nonfinite) in row.get("saturation", {}).items():
            metrics |= {f"casts/{operand}_saturated": saturated, f"casts/{operand}_nonfinite": nonfinite}
        if ratios is not None:
            self._keep(ratios)
            metrics |= _unit_metrics(ratios)
            if row["step"] % self._every == 0:
                metrics |= self._lines(ratios, [name for name in row.get("over", ()) if name in ratios.columns])
        return metrics

    def _lines(self, ratios: RatioRows, columns: list[str]) -> dict[str, float]:
        """{COLUMN/UNIT: value} of the signal's columns, of the risk where it has none, for the most promoted units."""
        units = list(range(len(ratios.units)))
        if self._most is not None:  # of as many promotions the first in the model
            units = sorted(units, key=lambda place: -self._promotions[ratios.units[place]])[: self._most]
        metrics: dict[str, float] = {}
        for column in columns or ["risk"]:
            if column not in self._sections:
                self._sections.add(column)
                self._run.define_metric(f"{column}/*", step_metric="step")
            values = ratios.columns[column] if columns else ratios.risk
            known = ratios.observed & ~np.isnan(values)
            metrics |= {f"{column}/{ratios.units[place]}": float(values[place]) for place in units if known[place]}
        return metrics

    def _eval_metrics(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"step": row["step"]} | {name: row[key] for key, name in EVAL_METRICS.items()} | self._picture()

    def _keep(self, ratios: RatioRows) -> None:
        risk = np.where(ratios.observed, ratios.risk, np.nan)
        self._map.add(ratios.step, ratios.units, risk, ratios.active)
        self._traces.add(ratios)

    def _picture(self) -> dict[str, Any]:
        """The risk map so far."""
        picture = self._map.picture(self._trigger)
        return {} if picture is None else {"risk_map": _wandb().Image(picture, caption=self._map.caption())}

    @contextmanager
    def _tolerant(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            self._say(f"W&B is off from here, its {doing} failed ({_one_line(error)}); the run goes on")


class UnitTraces:
    """What units measured, a row a unit in one of so many steps: twice as many whenever W&B's table would overflow."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._kept: list[RatioRows] = []
        self.columns = ["step", "unit", "norm", "risk", "active"]

    def add(self, ratios: RatioRows) -> None:
        """Rows of a step that is not kept are dropped."""
        if ratios.step % self._every == 0:
            self._kept.append(ratios)
            if len(self._kept) * len(ratios.units) > _MOST_TRACES and len(self._kept) > 1:
                self._every *= 2
                self._kept = [one for one in self._kept if one.step % self._every == 0]
            self.columns = ["step", "unit", "norm", *ratios.columns, "risk", "active"]

    def rows(self, most: int) -> list[list[Any]]:
        """At most so many, in the order of `columns`, of observed units; None for what is not finite."""
        units = max((len(one.units) for one in self._kept), default=1)
        apart = -(-len(self._kept) * units // most) or 1
        return [row for ratios in self._kept[:: max(1, apart)] for row in _trace(ratios, self.columns)][:most]


def _trace(ratios: RatioRows, columns: list[str]) -> Iterator[list[Any]]:
    known = ratios.columns
    for i in np.flatnonzero(ratios.observed):
        numbers = [
            ratios.norm[i],
            *(known[name][i] if name in known else np.nan for name in columns[3:-2]),
            ratios.risk[i],
        ]
        finite = [float(one) if math.isfinite(one) else None for one in numbers]
        yield [ratios.step, ratios.units[i], *finite, bool(ratios.active[i])]


def _unit_metrics(ratios: RatioRows) -> dict[str, float]:
    """Of all observed units together: the highest risk, the mean GNMR, the sum of the prices where any was measured."""
    metrics: dict[str, float] = {}
    risk = ratios.risk[ratios.observed]
    if not np.isnan(risk).all():
        metrics["risk/highest"] = float(np.nanmax(risk))
    gnmr = ratios.columns.get("gnmr", np.zeros(0))[: len(ratios.units)]
    if np.isfinite(gnmr).any():
        metrics["risk/mean_gnmr"] = float(gnmr[np.isfinite(gnmr)].mean())
    price = next((ratios.columns[name] for name in _PRICES if name in ratios.columns), np.zeros(0))
    if np.isfinite(price).any():
        metrics["price/total_nats"] = float(price[np.isfinite(price)].sum())
    return metrics


def _trigger(config: dict[str, Any], header: dict[str, Any]) -> float:
    if (found := calibrated_trigger(header)) is not None:
        return found[1]
    controller = config.get("controller")
    value = controller.get("trigger") if isinstance(controller, dict) else None
    return float(value) if isinstance(value, int | float) and value > 0 else 1.0


def _environment(entity: str, project: str) -> str | None:
    """Say which of W&B's variables are in force and which a given project overrides; None where none is set."""
    over = {"WANDB_PROJECT": project, "WANDB_ENTITY": entity}
    told: dict[bool, list[str]] = {True: [], False: []}
    for name in _ENVIRONMENT:
        if value := os.environ.get(name):
            told[bool(over.get(name))].append(f"{name}={value}")
    parts = [f"uses {', '.join(told[False])}"] if told[False] else []
    parts += [f"the given project overrides {', '.join(told[True])}"] if told[True] else []
    return printable(f"W&B: {'; '.join(parts)}") if parts else None


def _define(run: Any) -> None:
    """Everything over steps; what is no panel is hidden from the ones that W&B makes by itself."""
    run.define_metric("step", hidden=True)
    for name in dict.fromkeys([*PANELS, *STEP_METRICS.values(), *EVAL_METRICS.values(), *_HIDDEN]):
        run.define_metric(name, step_metric="step", hidden=name not in PANELS)


def _wandb() -> Any:
    """The module, imported when it is needed (0.8 s)."""
    import wandb

    return wandb


def _open(wandb: Any, mode: str, arguments: dict[str, Any]) -> Any:
    known = wandb.Settings.model_fields  # the x_ names come and go with versions
    return wandb.init(
        **arguments,
        mode=mode,
        resume="allow" if mode == "online" else None,  # offline it has no effect: the id joins the parts of a run
        reinit="create_new",
        settings=wandb.Settings(**{key: value for key, value in _SETTINGS.items() if key in known}),
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _has_key(wandb: Any) -> bool:
    """Whether credentials are configured: environment, W&B's settings files or netrc. Asks and prints nothing."""
    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    places = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    path = next(filter(os.path.exists, map(os.path.expanduser, places)), None)
    try:
        login = netrc.netrc(path).authenticators(urlsplit(settings.base_url).netloc) if path else None
    except (OSError, netrc.NetrcParseError):
        return False
    return login is not None and bool(login[2])
