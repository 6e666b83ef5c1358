"""Records of a user's own loop, as `gnmr train` writes them: `gnmr.attach(..., record="runs/mine")`.

    controller = gnmr.attach(model, low="int4", recovery="int8", record="runs/mine/gnmr-s0")
    ...
    controller.step()
    controller.log(loss=loss.item())          # for the last step; val_loss=... makes it an evaluation
    ...
    controller.detach()                       # the run is done; gnmr report runs/mine

A loop that resumes from its own checkpoint attaches to the same folder and loads the controller's state. This drops the
records after that step; nothing in the folder changes before. The folder's name is the run's, and its parent is the
experiment, so `gnmr report` compares the folders of one parent. config.yaml describes the attached settings; `gnmr
train` cannot run it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gnmr.control import Decision
from gnmr.control.threshold import TwoStage
from gnmr.conversion.cost import Spent
from gnmr.errors import UserError
from gnmr.records.disk import of_a_file_browser
from gnmr.records.lock import LOCK
from gnmr.records.reader import calibrated_trigger, calibration_steps, read_json
from gnmr.records.schema import EVAL_FIELDS, OWN, STEP_FIELDS, event_rows, step_row, unit_rows, versions
from gnmr.records.writer import RunWriter

FIGURES = ("loss", "lr", "tokens", "val_loss")
"""Numbers that `Recording.log` accepts."""
_SEED = re.compile(r"(?P<arm>.+)-s(?P<seed>\d+)")


class Recording:
    """The records of one loop.

    Raises:
        RunFailed: if a write fails.
    """

    _writer: RunWriter | None = None
    """None if the folder holds records of this loop, until a checkpoint's state says where it resumes."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], header: Mapping[str, Any], *, seed: int, max_o: int
    ) -> None:
        """Begin the records.

        Args:
            folder: a new folder, or the folder of the run that is resumed.
            config: known sections of the run's config.
            header: contents of header.json for `gnmr report`.
            seed: the run's seed, unless the folder's name ends in one.
            max_o: the most units on the recovery path.

        Raises:
            UserError: if the folder holds another run.
        """
        self._folder = folder = folder.expanduser()
        # What the lock and a file browser leave in a folder makes no run of it.
        names = {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
        inside = any(not of_a_file_browser(name) for name in names)
        begun = folder.exists() and (inside or not folder.is_dir())
        if begun and (why := _no_part_of(folder, header["units"])) is not None:
            raise UserError(f"record={folder}: {why}; choose another folder")
        named = _SEED.fullmatch(folder.name)
        arm, seed = (named["arm"], int(named["seed"])) if named else (folder.name, seed)
        about = {"arm": arm, "experiment": folder.absolute().parent.name or "own", "scale": OWN, "seed": seed}
        tree = {"own_loop": True, "experiment_name": about["experiment"], "scale_name": OWN, "training": {"seed": seed}}
        self._units = int(header["recoverable"]) * len(header["units"])
        self._max_o = max_o
        self._config, self._header = (
            yaml.safe_dump(tree | dict(config), sort_keys=False),
            {**versions(), **about, **header},
        )
        # A folder with records stays unchanged until `resume` knows the step to go on from.
        if not begun:
            self._writer = RunWriter(folder, None)
            self._writer.write_header(self._config, self._header)
        self._step = 0
        self._row: dict[str, Any] | None = None
        self._seen = time.perf_counter()
        self._tokens = self._nonfinite = self._streak = 0

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Make a copy of the controller record nothing."""
        return type(None), ()

    def step(
        self,
        decision: Decision,
        spent: Spent,
        calibrating: tuple[int, int] | None = None,
        calibrated: float | None = None,
    ) -> None:
        """Record a step; `spent` is `ConvertedModel.cost.spent`, see `Controller` for the calibration."""
        if self._writer is None:
            raise UserError(
                f"record={self._folder}: holds the records of a run; choose another folder, or load the controller's "
                "state_dict of a checkpoint before the first step to continue after it, even if that run is finished"
            )
        self._flush()
        self._step = decision.step
        # The header tells when a calibration began and what it found.
        if calibrating is not None and calibrating[0] == 1:
            self._header["calibration"] = {"first": decision.step, "steps": calibrating[1]}
            self._writer.write_header(self._config, self._header)
        if calibrated is not None and (calibrated_trigger(self._header) or (0, 0.0))[1] != calibrated:
            self._header["calibrated"] = {"after_step": decision.step, "trigger": calibrated}
            self._writer.write_header(self._config, self._header)
        seconds = time.perf_counter()
        norm = decision.grad_norm
        self._streak = 0 if math.isfinite(norm) else self._streak + 1
        self._nonfinite += not math.isfinite(norm)
        self._row = step_row(  # its loss is None until `log` sets it: NaN means that the loss was not finite
            decision,
            grad_norm_pre_clip=norm,
            spent_gemm_frac=spent.share,
            spent_extra_bytes=spent.extra_bytes,
            spent_extra_time=spent.extra_time,
            nonfinite_total=self._nonfinite,
            nonfinite_streak=self._streak,
            step_time_s=seconds - self._seen,
        )
        self._seen = seconds
        self._writer.units(unit_rows(decision))
        self._writer.events(event_rows(decision))

    def recost(self, spend: Sequence[float], pinned: float) -> None:
        """Write the units' recovery costs, which are known once a step was counted."""
        self._header |= {"spend": list(spend), "spend_pinned": pinned}
        if self._writer is not None:
            self._writer.write_header(self._config, self._header)

    def log(self, **figures: float) -> None:
        """Add figures to the last step.

        Raises:
            ValueError: before the first step, or if a figure is unknown.
        """
        if self._row is None or self._writer is None:
            raise ValueError("log(): call it after step(), which has not run yet")
        for name, value in figures.items():
            if name not in FIGURES:
                raise ValueError(f"log: {name} is not known: use one of {', '.join(FIGURES)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"log: {name}={value!r:.40}: must be a number; of a tensor {name}.item()")
        self._row |= {name: value for name, value in figures.items() if name in STEP_FIELDS}
        if (loss := figures.get("val_loss")) is not None:
            # exp overflows float64 from about 709 on.
            ppl = math.inf if loss > 700 else math.exp(loss)
            row = {"step": self._row["step"], "tokens": self._row["tokens"] or 0, "val_loss": loss, "val_ppl": ppl}
            self._writer.eval(dict.fromkeys(EVAL_FIELDS) | row)

    def state(self) -> dict[str, Any]:
        """Flush the rows to disk and return the state for `resume`; empty before the first step."""
        if self._writer is None or self._row is None:
            return {}
        row = {name: dict(value) if isinstance(value, Mapping) else value for name, value in self._row.items()}
        counters = [self._tokens, self._nonfinite, self._streak]
        # The rows reach the disk before a checkpoint refers to them.
        self._writer.sync()
        return {"row": row, "counters": counters}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Resume after `step` with `state`'s result.

        Raises:
            UserError: if earlier steps are missing.
        """
        # The records end with this very step, so there is nothing to drop.
        if step == self._step and self._writer is not None:
            return
        if step and self._writer is not None and not self._step:
            raise UserError(
                f"record={self._folder}: has no records of the {step} steps before this checkpoint; name the folder "
                "that has them, or record nothing"
            )
        # Everything is checked before the folder changes.
        row, counters = _of_checkpoint(state) if step else (None, (0, 0, 0))
        if counters is None:
            raise UserError(
                f"record={self._folder}: the checkpoint was not saved while recording; choose another folder"
            )
        if self._writer is not None:
            self._writer.close()
        self._writer = RunWriter(self._folder, step)
        # The run's first header stays, and says where the run was resumed.
        header = read_json(self._folder / "header.json") or self._header
        resumption = {"after_step": step, "torch": self._header["torch"], "machine": self._header["machine"]}
        header["resumed"] = [*header.get("resumed", []), resumption]
        if (calibrated := calibrated_trigger(header)) is not None and calibrated[0] > step:
            del header["calibrated"]  # of a step that was dropped
        if (calibration := calibration_steps(header)) is not None and calibration[0] > step:
            del header["calibration"]
        self._header = header
        self._writer.write_header(self._config, header)
        is_written = self._writer.last_step == step  # with everything that was logged
        self._row, self._step, self._seen = None if is_written else row, step, time.perf_counter()
        self._tokens, self._nonfinite, self._streak = counters

    def finish(self) -> None:
        """Mark the run as done."""
        if self._writer is None:
            return
        self._flush()
        self._writer.finish("done", None, self._units, self._max_o)

    def _flush(self) -> None:
        if self._row is None or self._writer is None:
            return
        # A step whose tokens nobody logged keeps the count of the one before.
        self._tokens = self._row["tokens"] = self._row["tokens"] or self._tokens
        self._writer.step(self._row)
        self._row = None


def _no_part_of(folder: Path, units: Sequence[str]) -> str | None:
    """Return why a loop with these units cannot resume the records in the folder, or None if it can."""
    if not (folder / "steps.jsonl").is_file():
        return "is not empty"
    begun = read_json(folder / "header.json") or {}
    if begun.get("scale") != OWN:
        return "holds the records of a run"
    return None if begun.get("units") == list(units) else "holds the records of a run with other units"


def _of_checkpoint(state: Mapping[str, Any]) -> tuple[dict[str, Any] | None, tuple[int, int, int] | None]:
    """Return the last row and the counters of `Recording.state`, or None if `state` is something else."""
    try:
        row, (tokens, nonfinite, streak) = dict(state["row"]), state["counters"]
        return (row, (tokens, nonfinite, streak)) if row.keys() == STEP_FIELDS.keys() else (None, None)
    except (KeyError, TypeError, ValueError):
        return None, None


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in a form that YAML can hold; an object is replaced by its name."""

    def as_plain(value: Any) -> Any:
        if isinstance(value, TwoStage):
            return vars(value)
        if isinstance(value, Mapping):
            return {str(key): item for key, item in value.items()}
        if isinstance(value, Sequence):
            return list(value)
        return str(getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__)

    # JSON writes what is derived from numbers and strings, such as NumPy's float64, which YAML refuses.
    tree: dict[str, Any] = json.loads(json.dumps(dict(values), default=as_plain))
    return tree
