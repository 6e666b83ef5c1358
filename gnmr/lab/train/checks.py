"""Checks that refuse combinations of settings, model and processes, and name the setting."""

from __future__ import annotations

from torch import nn

from gnmr.attachment.ranks.world import is_torchrun, processes_started
from gnmr.control.evidence import PATH_EVIDENCE
from gnmr.conversion import ConvertedModel
from gnmr.errors import UserError
from gnmr.lab.config import Config
from gnmr.lab.models import pretrained
from gnmr.lab.train.wrap import shards_of

_ORACLE_PARAMETERS = 200_000_000


def refuse_processes(config: Config) -> None:
    """Raise UserError if the number of processes does not fit `parallel` or this run."""
    kind, size = config.parallel, processes_started()
    if kind == "none" and size > 1:
        raise UserError(f"parallel=none: here are {size} processes; use parallel=ddp, fsdp or hsdp")
    if kind != "none" and not is_torchrun():
        raise UserError(f"parallel={kind}: needs several processes: torchrun --nproc-per-node N -m gnmr train ...")
    refuse_compression(config, size)
    if size > 1:
        _refuse_batches(config, size)


def _refuse_batches(config: Config, size: int) -> None:
    accumulation, kind = config.training.accumulation, config.parallel
    if accumulation < size:
        raise UserError(
            f"training.accumulation={accumulation}: {size} processes need a micro-batch of a step each; "
            f"use training.accumulation={size} with a smaller training.batch_size, or fewer processes"
        )
    if kind != "ddp" and accumulation % size:
        raise UserError(
            f"training.accumulation={accumulation}: under parallel={kind} it must be a multiple of the {size} processes"
        )
    if kind == "hsdp" and (size % shards_of(size) or shards_of(size) < 2):
        raise UserError(f"parallel=hsdp: needs an even number of processes, 4 or more, here are {size}; use fsdp")


def refuse_compression(config: Config, size: int) -> None:
    """Raise UserError if `size` processes of this run cannot compress gradients as configured."""
    asked, kind, accumulation = config.compression, config.parallel, config.training.accumulation
    key = f"compression.name={asked.name}"
    if asked.name == "none":
        return
    if kind in ("fsdp", "hsdp"):
        raise UserError(f"{key}: gradients are compressed whole, which parallel={kind} shards; use parallel=ddp")
    if size == 1 and asked.workers is None:
        raise UserError(
            f"{key}: needs data parallelism: parallel=ddp under torchrun, or in one process virtual workers, "
            "compression.workers=2"
        )
    if size > 1 and asked.workers not in (None, size):
        raise UserError(f"compression.workers={asked.workers}: here are {size} processes, each a worker; leave it out")
    if size == 1 and asked.workers is not None and accumulation < asked.workers:
        raise UserError(
            f"training.accumulation={accumulation}: {asked.workers} workers need a micro-batch of a step each; use "
            f"training.accumulation={asked.workers} with a smaller training.batch_size, or fewer workers"
        )


def check_watched(config: Config, converted: ConvertedModel) -> None:
    """Raise UserError if all converted weights are frozen and the controller or low path needs their gradients."""
    if not converted.frozen:
        return
    if config.controller.observe == "parameters":
        raise UserError(
            "controller.observe=parameters: all converted weights are frozen, and no unit has a gradient of its own; "
            "use adapter (the trained parameters of each unit) or input_grad"
        )
    if converted.without_effect:
        raise UserError(
            f"precision.low={config.precision.low}: compresses what the weight gradient reads, and all converted "
            "weights are frozen; use a recipe (llm_int8) or precision.site=forward"
        )


def check_sizes(config: Config, model: nn.Module, vocab_size: int) -> None:
    """Raise UserError if a checkpoint's model cannot read this block length or vocabulary."""
    longest, length = pretrained.max_length(model), config.training.seq_len
    if length > longest:
        raise UserError(f"training.seq_len={length}: the checkpoint was made for at most {longest} tokens")
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if rows < vocab_size:
        raise UserError(
            f"model.checkpoint={config.model.checkpoint}: has embeddings for {rows} tokens, its tokenizer has "
            f"{vocab_size}; they do not belong together"
        )


def check_evidence(config: Config, needs: tuple[str, ...], converted: ConvertedModel, model: nn.Module) -> None:
    """Raise UserError if this run cannot measure the required evidence."""
    accumulation = config.training.accumulation

    def key(*names: str) -> str:
        asked = set(names) <= set(config.records.evidence)
        return "records.evidence" if asked else f"controller.signal={config.controller.signal}"

    if converted.recovery is None and (gaps := sorted({"gap_recovery", "true_gap"} & set(needs))):
        raise UserError(f"{key(*gaps)}: {', '.join(gaps)} needs both paths, and precision.recovery is null")
    if converted.frozen and (measured := [name for name in needs if name in PATH_EVIDENCE]):
        raise UserError(
            f"{key(*measured)}: {', '.join(measured)} is measured where a weight gradient is made, and the converted "
            "weights are frozen"
        )
    if "micro_square" in needs and accumulation < 2:
        raise UserError(
            f"{key('micro_square')}: needs micro-batches, training.accumulation={accumulation}; use 2 or more"
        )
    if "true_gap" in needs and config.compression.name != "none" and config.parallel != "none":
        raise UserError(
            f"{key('true_gap')}: its passes would send gradients too, and change what "
            f"compression.name={config.compression.name} remembers of them; use another signal"
        )
    if "true_gap" in needs:
        number = sum(p.numel() for p in model.parameters())
        if number > _ORACLE_PARAMETERS:
            raise UserError(
                f"{key('true_gap')}: runs both paths in every step, for small models: this one has {number:,} "
                f"parameters; use at most {_ORACLE_PARAMETERS:,}"
            )
