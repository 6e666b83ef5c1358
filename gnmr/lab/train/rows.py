"""Records of a run in the format of `gnmr.records.schema`: step rows, fault rows, and the header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from gnmr.attachment.blame import Verdict
from gnmr.formats.recipes import described
from gnmr.lab import models
from gnmr.lab.train.build import Parts, tokens_of
from gnmr.lab.train.folder import signal_sha256
from gnmr.lab.train.provenance import commit, machine, portable_command
from gnmr.lab.train.step import StepResult
from gnmr.lab.views.live import RunInfo
from gnmr.records import schema as records
from gnmr.records.disk import sha256
from gnmr.records.reader import FaultWindow


@dataclass
class Counters:
    """Host state of a run besides the controller; every checkpoint contains it."""

    step: int = 0
    tokens: int = 0
    nonfinite_total: int = 0
    nonfinite_streak: int = 0


def run_info(parts: Parts, name: str, start_step: int = 0) -> RunInfo:
    """Return what the views show of this run, which continues after `start_step`."""
    config = parts.config
    return RunInfo(
        name=name,
        folder=parts.folder,
        arm=config.arm_name,
        device=str(parts.device),
        total_steps=config.total_steps,
        num_units=len(parts.router.units),
        max_o=config.controller.cap,
        num_parameters=sum(p.numel() for p in parts.model.parameters()),
        tokens_per_step=config.training.tokens_per_step,
        start_step=start_step,
    )


def step_row(
    result: StepResult,
    counters: Counters,
    seconds: float,
    healing: bool = False,
    weights_digest: str | None = None,
    throughput: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Return a row of `records.schema.STEP_FIELDS`, with every field that `result` has under the same name.

    Args:
        result: the results of the step.
        counters: the counts after it.
        seconds: its wall time.
        healing: True for a step without routing.
        weights_digest: see `STEP_FIELDS`.
        throughput: see `gnmr.lab.train.throughput`.
    """
    # Records say null, not 0, where nothing was measured.
    spent, sent = result.spent or (None, None, None), result.sent or (None, None)
    return records.step_row(
        result.decision,
        routed=not healing,
        **vars(counters),
        **{name: value for name, value in vars(result).items() if name in records.STEP_FIELDS},
        spent_gemm_frac=spent[0],
        spent_extra_bytes=spent[1],
        spent_extra_time=spent[2],
        step_time_s=seconds,
        **(throughput or {}),
        weights_digest=weights_digest,
        numbers_sent=sent[0],
        numbers_sent_frac=sent[1],
    )


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """Return a row of `records.schema.EVENT_FIELDS` and `VERDICT_FIELDS`."""
    return {
        "step": verdict.step,
        "unit": " ".join(verdict.units) or None,
        "event": "verdict",
        "cause": verdict.cause,
        "risk": None,
        "complete": verdict.complete,
    }


def fault_rows(parts: Parts) -> list[dict[str, Any]]:
    """Return rows of `records.schema.FAULT_FIELDS` by first step, for outlier channels one row per affected unit."""
    # Injected faults, then outlier channels as one window per unit that they touch
    windows = [] if parts.faults is None else list(parts.faults.windows)
    gain = parts.config.model.outlier_channels.gain
    for stress in parts.stress:
        if isinstance(stress, models.OutlierWindow):
            touched = set(stress.touched())
            hit = [group for group in parts.converted.units if any(o.operator_name in touched for o in group.operators)]
            windows += [FaultWindow(group.name, stress.start, stress.stop, "outliers", gain) for group in hit]
    rows = [asdict(window) for window in sorted(windows, key=lambda window: window.start)]
    return [{"step": row.pop("start"), **row} for row in rows]


def _shape(model: nn.Module) -> dict[str, int]:
    """Return layers and width of the trained model, which a checkpoint determines. Unknown values are omitted."""
    config: Any = getattr(model, "config", None)
    # A multimodal checkpoint nests the sizes of its language model.
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    keys = {"num_hidden_layers": "layers", "num_layers": "layers", "hidden_size": "width"}
    return {key: number for name, key in keys.items() if isinstance(number := getattr(config, name, None), int)}


def header(parts: Parts, command: str) -> dict[str, Any]:
    """Return header.json: versions, machine, command, data and units of the run."""
    config, corpus = parts.config, parts.corpus
    return {
        **records.versions(),
        "commit": commit(),
        "command": portable_command(command),
        "machine": machine(parts.device),
        "world": {"processes": parts.world.size, "parallel": config.parallel if parts.world.size > 1 else "none"},
        "data": {
            "name": config.data.name,
            "fingerprint": corpus.fingerprint,
            "source": corpus.source,
            "tokenizer": sha256(corpus.tokenizer_path),
            "train_tokens": len(tokens_of(corpus.train)),
            "val_tokens": len(tokens_of(corpus.val)),
            "vocab_size": corpus.vocab_size,
        },
        **parts.router.header(),
        # Without a recovery path or a compression that routes, the chosen set changes nothing.
        "recoverable": parts.converted.recovery is not None or config.compression.routes,
        "paths": [described(path) for path in (parts.converted.low, parts.converted.recovery) if path is not None],
        "signal_sha256": signal_sha256(config),
        "checkpoint": parts.checkpoint,
        "base": None if parts.base is None else {"step": parts.base.step, "sha256": parts.base.stored.sha256},
        "shape": _shape(parts.model),
        "arm": config.arm_name,
        "experiment": config.experiment_name,
        "scale": config.scale_name,
        "seed": config.training.seed,
    }
