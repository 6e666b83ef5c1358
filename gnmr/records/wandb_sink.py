"""Weights & Biases as a view of a run. Whatever fails there is said once and never stops or changes the run."""

from __future__ import annotations

import math
import netrc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

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
EVAL_METRICS = {"val_loss": "val/loss", "val_ppl": "val/ppl"}

# W&B slows down beyond some thousands of metrics a run; with more units than this only the totals are sent.
MAX_UNITS = 1000

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
    """Sends a run to W&B: losses every step, per-unit ratios every `wandb_every` steps, the events at the end.

    A resumed run goes on under its id. W&B ignores steps that it has already seen, so the steps between the checkpoint
    and the kill keep the numbers that they were sent with first; they are the same.

    Rows are sent by a thread of their own: W&B hands each to another process and waits (0.3 ms, some ms on a busy
    machine), while the training thread only queues them. What is handed over must not be changed afterwards.
    """

    def __init__(self, say: Callable[[str], None], wandb_every: int = 10) -> None:
        """say: gets the one line when W&B fails. wandb_every: steps between the per-unit ratios."""
        self._say = say
        self._wandb_every = wandb_every
        self._run: Any = None
        self._thread = ThreadPoolExecutor(1, "wandb-sink")  # starts with the first row
        self._recovered: Counter[str] = Counter()
        self._units: list[str] = []
        self._active_total = np.zeros(0, np.int64)

    def start(
        self,
        run_id: str,
        name: str,
        group: str,
        project: str,
        folder: Path,
        config: dict[str, Any],
        mode: str,
        recovered: Counter[str] | None = None,
    ) -> None:
        """Opens the W&B run; its files go to folder/wandb.

        mode: online, offline, off, or auto: what WANDB_MODE says, else online where an API key is configured and W&B
        can be reached, else offline. Never asks for a key.
        recovered: steps that each unit spent on the recovery path so far (a resumed run).
        """
        if mode == "off":
            return
        self._recovered = recovered or Counter()
        arguments = {"id": run_id, "name": name, "group": group, "project": project, "dir": folder, "config": config}
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

    def step(self, row: dict[str, Any], ratios: RatioRows | None = None) -> None:
        """A row of `STEP_FIELDS`; ratios: None for a run without units. To be called for every step."""
        if self._run is not None:
            self._thread.submit(self._log, row["step"], lambda: self._step_metrics(row, ratios))

    def eval(self, row: dict[str, Any]) -> None:
        """A row of `EVAL_FIELDS`."""
        if self._run is not None:
            self._thread.submit(self._log, row["step"], lambda: {name: row[key] for key, name in EVAL_METRICS.items()})

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
            rows = [[row[key] for key in EVENT_FIELDS] for row in events[-wandb.Table.MAX_ROWS :]]
            if rows:
                self._run.log({"events": wandb.Table(columns=list(EVENT_FIELDS), data=rows)}, step=self._run.step)
            self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
            self._run.finish(exit_code=0 if summary["status"] == "done" else 1)
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
        metrics = {name: row[key] for key, name in STEP_METRICS.items()}
        metrics |= {f"recovery/{column}_over": number for column, number in row["over"].items()}
        metrics |= {f"model/{name}": number for name, number in row["statistics"].items()}
        metrics |= {f"monitored/{name}": norm for name, norm in row["monitored"].items()}
        for operand, (saturated, nonfinite) in row["saturation"].items():
            metrics |= {f"casts/{operand}_saturated": saturated, f"casts/{operand}_nonfinite": nonfinite}
        if ratios is not None:
            self._count(ratios)
            if row["step"] % self._wandb_every == 0 and len(ratios.units) <= MAX_UNITS:
                metrics |= self._unit_metrics(ratios)
        return metrics

    def _count(self, ratios: RatioRows) -> None:
        if ratios.units != self._units:
            self._units = list(ratios.units)
            self._active_total = np.array([self._recovered[unit] for unit in self._units], np.int64)
        self._active_total += ratios.active

    def _unit_metrics(self, ratios: RatioRows) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for i, unit in enumerate(ratios.units):
            metrics[f"recovery_total/{unit}"] = int(self._active_total[i])
            if ratios.observed[i]:
                metrics |= {f"{name}/{unit}": float(column[i]) for name, column in ratios.columns.items()}
                metrics[f"risk/{unit}"] = float(ratios.risk[i])
        return {name: value for name, value in metrics.items() if not math.isnan(value)}

    @contextmanager
    def _tolerant(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            self._say(f"W&B is off from here, its {doing} failed ({_one_line(error)}); the run goes on")


def recovery_totals(events: list[dict[str, Any]], last_step: int) -> Counter[str]:
    """Steps that each unit spent on the recovery path up to and with `last_step`, by the `EVENT_FIELDS` rows so far."""
    totals: Counter[str] = Counter()
    for row in events:
        if row["event"] == "verdict":
            continue
        sign = 1 if row["event"] == "promote" else -1
        # In force, or no longer, from the next step on; in a step that was tried again at once.
        totals[row["unit"]] += sign * (last_step - row["step"]) + (row["cause"] == "retry")
    return totals


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
