"""Names, types and meaning of everything a run writes, once.

A run folder holds

    config.yaml     the resolved config, but for run_dir and runs_dir
    header.json     versions, commit, machine (no host, no user), command (no path that it
                    writes to in full), data fingerprint, units,
                    paths (and what runs a recipe), world (processes, parallel), run_id (W&B's name of the run),
                    shape (layers, width) and parameters of the model that was trained,
                    of a loop of one's own: signal_seed (with which its signal draws); calibration (first, steps)
                    and calibrated (after_step, trigger) if it found its trigger itself
    steps.jsonl     one `STEP_FIELDS` row a step
    eval.jsonl      one `EVAL_FIELDS` row an evaluation
    scores.jsonl    one `SCORE_FIELDS` row a scoring; only where scores.tasks asks for some
    events.jsonl    one `EVENT_FIELDS` row a promotion, release or verdict, which also has `VERDICT_FIELDS`
    faults.jsonl    one `FAULT_FIELDS` row a window of injected faults, written at the start; only with stress
    units.arrows    `unit_schema` rows: an Arrow IPC stream, one record batch a step (gnmr.records.unit_stream)
    summary.json    `SUMMARY_FIELDS`
    checkpoints/    step-<number>/
    log.txt         lines for people, of a cell of a sweep or under records.live=log; nothing reads it
    adapter/        what peft loads; where model.adapter.rank > 0
    hf/             the model in Hugging Face's layout; with training.export_hf
    wandb/          W&B's own files
    DONE or FAILED  FAILED holds the reason in one line; DONE is empty and comes last

Steps count from 1. Files are the truth; the live view and W&B are views of them. JSON has no NaN or Inf: a non-finite
number is written as the string "nan", "inf" or "-inf" (`gnmr.records.reader` turns it back).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gnmr import __version__

if TYPE_CHECKING:
    from gnmr.control import Decision

OWN = "own"  # the scale of a user's own loop (gnmr/attachment/record.py)

STEP_FIELDS: dict[str, str] = {
    "step": "number of the step, from 1",
    "tokens": "training tokens seen, this step included",
    "loss": "mean cross-entropy of the step's tokens, nats, FP32",
    "bits_per_byte": "the loss in bits per byte of the text, comparable between tokenizers: loss * targets / (ln 2 * "
    "bytes of UTF-8 of the targets); an end token is a target of 0 bytes; null where the tokenizer does not spell its "
    "text (WordPiece, WordLevel), and in a loop of one's own",
    "lr": "learning rate of this step",
    "grad_norm_pre_clip": "global gradient norm before clipping; in a loop of one's own, that of all units together",
    "num_candidates": "units that this step's norms made candidates (Algorithm 2, C_t); null while a fork heals",
    "num_active": "units on the recovery path during this step; in a warm-up all of them, on controller.warmup_path; "
    "null while a fork heals: all operators compute in 16 bits, no unit is routed, and units.arrows has no row",
    "over": "units over the threshold of each of the signal's columns: {column: number}",
    "statistics": "what the model tells of its forward passes, mean of the micro-batches: {name: number}; of moe, "
    "layer by layer, max_share and min_share of the assignments that an expert got, their entropy (nats) and the "
    "balancing loss; empty for llama and gpt",
    "monitored": "gradient norms of the modules that records.monitor names, before clipping: {module: norm}; 0 where "
    "one had no gradient",
    "saturation": "what the casts of the recipes met in this step, all units together: {operand: [elements that "
    "saturated, elements that were Inf or NaN before the cast]} for input, weight, grad_output and result, each cast "
    "counted once; empty where the paths are formats",
    "saved_bytes": "bytes that the converted linears kept for backward, read from the autograd graph; largest "
    "micro-batch of the step; null under activation checkpointing, where the graph holds none, and while a fork heals",
    "saved_bytes_predicted": "the same by the memory model (paper, Eqs. 5, 67, 68, sharing and scales counted)",
    "spent_gemm_frac": "share of the arithmetic of all GEMMs of the model that ran on the recovery path in this "
    "step, pins included, by the rows that each linear had in one batch; null while a fork heals",
    "spent_extra_bytes": "bytes that backward kept more than with all on the low path (Eq. 5), of the step's last "
    "micro-batch; 0 under simulated recipes, which keep the input's own width; null while a fork heals",
    "spent_extra_time": "time of all GEMMs of the model in this step over that with its linears on the low recipe, "
    "less 1, pins included, by relative times (gnmr/conversion/cost.py); 0 under formats; null while a fork heals",
    "skipped": "true where a non-finite loss or gradient, or a gradient transform, kept the optimizer from stepping",
    "nonfinite_total": "steps with a non-finite loss or gradient so far (never resets)",
    "nonfinite_streak": "such steps in a row (resets)",
    "nonfinite_unit": "where the first non-finite number was found, null in a finite step",
    "step_time_s": "wall time of the step, s",
    "tokens_per_s": "training tokens of the step, of all processes, over step_time_s; null in a loop of one's own",
    "mfu": "model FLOPs utilization, 0 to 1: FLOPs of the model's GEMMs and attention, forward and backward, over "
    "step_time_s times the dense BF16 peak of the devices (gnmr/lab/train/throughput.py); null where the peak is "
    "unknown, as on a CPU",
    "slowest_rank": "of a run of several processes the one that the others waited for; null in one process",
    "weights_digest": "of a run of several processes before each checkpoint: 64 bits of all weights after the "
    "step, the same under any number of processes (gnmr/attachment/ranks/reduce.py); else null",
    "numbers_sent": "numbers that each worker sent of its gradients in this step; null where they are not compressed",
    "numbers_sent_frac": "of that the share of what it would send dense",
}

EVAL_FIELDS: dict[str, str] = {
    "step": "evaluated after this step; 0: before the first, of a fork",
    "tokens": "training tokens seen",
    "val_loss": "mean cross-entropy over the fixed validation blocks on the 16-bit path, nats",
    "val_ppl": "exp(val_loss)",
    "val_bits_per_byte": "val_loss in bits per byte, as bits_per_byte of a step",
    "val_loss_low": "of a fork the same with every operator on the low path; val_loss where that casts nothing in the "
    "forward pass; else null",
    "phase": "of a fork: base (before its first step), low (after training.steps), healed (after fork.heal more); else "
    "null",
}

SCORE_FIELDS: dict[str, str] = {
    "step": "scored after this step",
    "path": "path in force while scoring: 16bit, w8a16 (precision.weights=instead) or low",
    "tasks": "what lm-eval found: {task: {metrics: {name: {value, stderr}}, items, shots}}",
}

EVENT_FIELDS: dict[str, str] = {
    "step": "step whose norms led to it; in force from the next step on (0: in force from the start; cause retry: in "
    "force in this very step)",
    "unit": "the unit's id; of a verdict those to blame with spaces between them, null if there is none",
    "event": "promote, release or verdict",
    "cause": "promote: the signal's column that was highest over its threshold (risk, if it has none), rank (a ranked "
    "signal took it under its threshold), nonfinite, retry (the loss was not finite by its low path, and the step was "
    "tried again with it on the recovery path) or warmup; release: lock (it ran out), max_o (riskier units took the "
    "places), budget (they took what may be spent) or warmup (it ended); verdict: what is to blame for a spike or a "
    "loss that is not finite: data_or_model, precision or not_reproducible (docs/blame.md)",
    "risk": "R of the unit at that step; null where it has none",
}

VERDICT_FIELDS: dict[str, str] = {
    "complete": "in rows of verdicts alone: false if the search ended before each unit was tested, so that perhaps "
    "fewer units suffice",
}

FAULT_FIELDS: dict[str, str] = {
    "step": "first step of the window",
    "end": "its last step",
    "unit": "the unit whose low-cost path fails; of outliers each that writes or reads one of the channels",
    "kind": "what fails, as faults.kind; outliers: a window of model.outlier_channels",
    "magnitude": "how much, see gnmr/lab/fault_injection.py; of outliers the gain",
}


def unit_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of one row per observed unit and recorded step.

    norm, columns and risk belong to this step's gradient. active is True if the unit was on the recovery path during
    this step (in a warm-up: on controller.warmup_path). lock is its lock after the step's decision.

    Args:
        columns: names of the signal's statistics and of the recorded evidence, float64 each.
    """
    return pa.schema(
        [
            pa.field("step", pa.int32()),
            pa.field("unit", pa.dictionary(pa.int32(), pa.string())),
            *(pa.field(name, pa.float64()) for name in ("norm", *columns, "risk")),
            pa.field("active", pa.bool_()),
            pa.field("lock", pa.int32()),
        ]
    )


SUMMARY_FIELDS: dict[str, str] = {
    "status": "done, failed or interrupted",
    "reason": "why it failed or stopped, else null",
    "steps": "steps trained",
    "tokens": "tokens trained on",
    "final_val_loss": "val_loss of the last evaluation, null if none",
    "final_val_ppl": "val_ppl of the last evaluation, null if none",
    "final_val_bits_per_byte": "val_bits_per_byte of the last evaluation, null if none",
    "spike_score": "share of the steps, 0 to 1, whose loss lies at least 7 standard deviations from the mean of the "
    "last 1,000 losses before it (OLMo 2, arXiv 2501.00656); steps with fewer than 50 losses before them and losses "
    "that are not finite do not count; null if no step does",
    "promotion_frac": "active unit-steps over recoverable unit-steps; 0 in a static run, which has none; the steps of "
    "a high-fidelity warm-up (controller.warmup_frac), in which every unit is active, count as any other; steps in "
    "which a fork heals count nowhere in the shares of units and steps",
    "hit_max_o_frac": "steps with max_o or more units on the recovery path over all steps, those of a high-fidelity "
    "warm-up too",
    "over_frac": "unit-steps over the threshold of each of the signal's columns over all unit-steps: {column: share}",
    "saved_bytes_mean": "mean of saved_bytes over the steps that have it",
    "spent_gemm_frac": "mean of the steps' spent_gemm_frac: what the arm spent",
    "spent_extra_bytes": "mean of the steps' spent_extra_bytes",
    "spent_extra_time": "mean of the steps' spent_extra_time",
    "numbers_sent_total": "numbers_sent, summed over the run; null where gradients are not compressed",
    "numbers_sent_frac": "mean of the steps' numbers_sent_frac; null where they are not compressed",
    "peak_memory_bytes": "largest resident size of the process (CPU) or allocated by PyTorch (CUDA); null for a run "
    "that is not done",
    "saturation_total": "saturation, summed over the run",
    "nonfinite_total": "steps skipped for a non-finite loss or gradient",
    "wall_time_s": "sum of step_time_s, s",
    "step_time_median_s": "median of step_time_s, s; null without steps",
    "tokens_per_s": "tokens of a step over step_time_median_s; null without steps",
    "mfu": "median of the steps' mfu; null without a known peak",
}
"""A share or mean over nothing (no steps, no units) is null."""


@dataclass(frozen=True)
class UnitRows:
    """What the controller saw and did in one step, on the host; arrays over the U units, in unit order.

    Rows with `observed` false are left out of the files: the unit had no gradient in this step.
    """

    step: int
    units: list[str]
    observed: np.ndarray  # (U,) bool
    norm: np.ndarray  # (U,) float64, gradient norm before clipping
    columns: dict[str, np.ndarray]  # (U,) float64 each: the signal's statistics, then recorded evidence
    risk: np.ndarray  # (U,) float64, inf for a non-finite norm
    active: np.ndarray  # (U,) bool, in force during this step
    lock: np.ndarray  # (U,) int64, after this step's decision


def step_row(decision: Decision, *, routed: bool = True, **fields: Any) -> dict[str, Any]:
    """Return a row of `STEP_FIELDS`; a field that is not in `fields` is None.

    Args:
        decision: what the controller saw and did in the step.
        routed: False for a step in which no unit was routed.
        **fields: further fields.
    """
    return {
        **dict.fromkeys(STEP_FIELDS),
        "statistics": {},
        "monitored": {},
        "saturation": {},
        "step": decision.step,
        "skipped": False,
        "num_candidates": sum(decision.candidate.tolist()) if routed else None,
        "num_active": sum(decision.in_force.tolist()) if routed else None,
        "over": {column: decision.over(column) for column in decision.columns},
        **fields,
    }


def unit_rows(decision: Decision) -> UnitRows:
    """Return the decision as rows of `unit_schema`.

    Args:
        decision: the step's decision, whose arrays (U,) are taken without a copy.
    """
    return UnitRows(
        step=decision.step,
        units=decision.units,
        observed=decision.observed,
        norm=decision.norm,
        columns=decision.columns | decision.evidence,
        risk=decision.risk,
        active=decision.in_force,
        lock=decision.lock,
    )


def event_rows(decision: Decision) -> list[dict[str, Any]]:
    """Return the decision's events.

    Returns:
        Rows of `EVENT_FIELDS`, in the order in which they happened; none in most steps.
    """
    return [dict(vars(event)) for event in decision.events]


def versions() -> dict[str, Any]:
    """Return the entries of header.json that name the software and the processor of a run."""
    import torch

    replaced_products = sys.modules.get("gnmr.lab.models.cpu_products")
    machine = {
        "cpu": cpu_name(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "products": "16-bit" if replaced_products is None else replaced_products.kind(),
    }
    return {
        "gnmr": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": machine,
    }


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
