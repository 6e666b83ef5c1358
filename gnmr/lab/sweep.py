"""Arms of a sweep, and the line that each of its cells leaves.

Hydra's own sweeper makes the cells: the product of the values under `hydra.sweeper.params` and on the command line.
An arm is several keys that change together. A sweep names its arms under `arms`, each with its words, and the cells
are `arm=NAME` by seed. A cell whose folder holds DONE is skipped, so the same command continues a sweep.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gnmr.errors import UserError, nearest
from gnmr.lab.config import flatten, from_words, one_line

_TAIL_BYTES = 1 << 16  # holds a row of steps.jsonl many times over


def apply_arm(composed: DictConfig, words: Sequence[str]) -> None:
    """Put the words of the chosen arm into what Hydra composed of these words, which win over the arm's.

    Raises UserError for an arm that the sweep does not have, and for words of an arm that the config does not take.
    """
    arms, arm = composed.arms, composed.arm
    with open_dict(composed):
        del composed["arms"]
    if not arms or arm is None:
        return
    if arm not in arms:
        raise UserError(f"arm={arm}: is not an arm of this sweep{nearest(str(arm), map(str, arms))}")
    typed = tuple(word.lstrip("+~").partition("=")[0] for word in words)
    try:
        given = OmegaConf.to_container(from_words(shlex.split(arms[arm] or "")))
        for key, value in flatten(given).items():  # type: ignore[arg-type]
            if not any(key == one or key.startswith(f"{one}.") for one in typed):
                OmegaConf.update(composed, key, value, force_add=key.startswith("controller.options."))
    except OmegaConfBaseException as error:
        raise UserError(f"arms.{arm}={arms[arm]}: {one_line(error)}") from error
    except (UserError, ValueError) as error:
        raise UserError(f"arms.{arm}={arms[arm]}: {error}") from error
    composed.arm = None


def finished(folder: Path) -> str:
    """Return one line about a run that is done: its folder, perplexity, spend and time."""
    from gnmr.records.reader import read_json  # with pyarrow, which only this needs

    told = [folder.name]
    with suppress(OSError, ValueError, KeyError, TypeError):  # records that cannot be read: the report says which
        summary = read_json(folder / "summary.json") or {}
        if (perplexity := summary["final_val_ppl"]) is not None:
            told.append(f"ppl {perplexity:.2f}")
        if (sent := summary.get("numbers_sent_frac")) is not None:  # the cost of recovery with compressed gradients
            told.append(f"sent {sent:.1%}")
        elif (spent := summary["spent_gemm_frac"]) is not None:
            told.append(f"spent {spent:.1%}")
        told.append(str(timedelta(seconds=round(summary["wall_time_s"]))))
    return "  ".join(told)


def last_step(folder: Path) -> int:
    """Return the step of the last whole row of steps.jsonl, read from its end; 0 if there is none."""
    try:
        with (folder / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, IndexError, ValueError):
        return 0
