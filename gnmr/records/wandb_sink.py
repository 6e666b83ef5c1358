"""Weights & Biases as a view of a run. Whatever fails there is said once and never stops or changes the run."""

from __future__ import annotations

import math
import netrc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from gnmr.records.reader import calibrated_trigger
from gnmr.records.risk_image import RiskMap
from gnmr.records.schema import EVENT_FIELDS, RatioRows

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
    "recovery/spent_gemm_frac",
    "risk/highest",
    "risk/mean_gnmr",
    "price/total_nats",
)
"""What W&B draws by itself, besides the risk map and the tables; the rest is recorded and can be drawn."""
_HIDDEN = ("over/*", "model/*", "monitored/*", "casts/*")
EVAL_METRICS = {"val_loss": "val/loss", "val_ppl": "val/ppl"}

_MOST_TRACES = 40_000
"""Rows that are kept of units; W&B's table has 10,000."""
_PRICES = ("price", "price_fprop")
_MAX_TAG = 64
"""Characters; W&B's own limit."""

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


class WandbSink:
    """Sends a run to W&B: losses every step, the risk map at every evaluation, tables of units and events at the end.

    A resumed run goes on under its id. W&B ignores steps that it has already seen, so the steps between the checkpoint
    and the kill keep the numbers that they were sent with first; they are the same.

    Rows are sent by a thread of their own: W&B hands each to another process and waits (0.3 ms, some ms on a busy
    machine), while the training thread only queues them. What is handed over must not be changed afterwards.
    """

    def __init__(self, say: Callable[[str], None], wandb_every: int = 10) -> None:
        """say: gets the one line when W&B fails. wandb_every: steps between the rows of a unit in the table."""
        self._say = say
        self._run: Any = None
        self._thread = ThreadPoolExecutor(1, "wandb-sink")  # starts with the first row
        self._map = RiskMap()
        self._traces = UnitTraces(wandb_every)
        self._trigger = 1.0

    def start(
        self, labels: Labels, *, project: str, folder: Path, config: dict[str, Any], header: dict[str, Any], mode: str
    ) -> None:
        """Opens the W&B run; its files go to folder/wandb.

        project: NAME, or ENTITY/NAME.
        config, header: of the run; W&B gets both, without what the header says unit by unit, as its config.
        mode: online, offline, off, or auto: what WANDB_MODE says, else online where an API key is configured and W&B
        can be reached, else offline. Never asks for a key.
        """
        if mode == "off":
            return
        self._trigger = _trigger(config, header)
        told = {key: value for key, value in header.items() if not isinstance(value, list)}
        arguments = {
            "id": labels.run_id,
            "name": labels.name,
            "group": labels.group,
            "job_type": labels.arm[:_MAX_TAG],
            "tags": list(dict.fromkeys(tag[:_MAX_TAG] for tag in (labels.arm, *labels.tags) if tag)),
            "project": project.rpartition("/")[2],
            "entity": project.rpartition("/")[0] or None,
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

    def resume(self, ratios: Callable[[], Iterable[RatioRows]], last_step: int) -> None:
        """The rows up to `last_step` of a run that goes on: the map and the table begin with them. Read by the sink's
        own thread, so that what is wrong with them stops W&B and not the run."""
        if self._run is not None:
            self._thread.submit(self._resume, ratios, last_step)

    def _resume(self, ratios: Callable[[], Iterable[RatioRows]], last_step: int) -> None:
        with self._tolerant("resume"):
            for rows in ratios():
                if rows.step <= last_step:
                    self._keep(rows)

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
            return f"W&B: wandb sync {Path(self._run.dir).parents[1]}/offline-run-*"  # each part of a resumed run
        return f"W&B: {self._run.url}"

    def _log(self, step: int, metrics: Callable[[], dict[str, Any]]) -> None:
        if self._run is not None:  # else an earlier row failed
            with self._tolerant("log"):
                self._run.log(metrics(), step=step)

    def _step_metrics(self, row: dict[str, Any], ratios: RatioRows | None) -> dict[str, Any]:
        metrics = {"step": row["step"]} | {name: row[key] for key, name in STEP_METRICS.items() if key in row}
        metrics |= {f"over/{column}": number for column, number in row.get("over", {}).items()}
        metrics |= {f"model/{name}": number for name, number in row.get("statistics", {}).items()}
        metrics |= {f"monitored/{name}": norm for name, norm in row.get("monitored", {}).items()}
        for operand, (saturated, nonfinite) in row.get("saturation", {}).items():
            metrics |= {f"casts/{operand}_saturated": saturated, f"casts/{operand}_nonfinite": nonfinite}
        if ratios is not None:
            self._keep(ratios)
            metrics |= _unit_metrics(ratios)
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
