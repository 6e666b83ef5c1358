"""The model of a run: its weights, its two paths, adapters, and outlier channels."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from gnmr.conversion import ConvertedModel, convert
from gnmr.errors import UserError, as_user_error
from gnmr.lab import models
from gnmr.lab.config import Config, PrecisionConfig
from gnmr.lab.models import pretrained
from gnmr.lab.train.checkpoint import HasState
from gnmr.lab.train.checks import check_sizes, check_watched


class Stress(HasState, Protocol):
    """A disturbance at a known place and time."""

    def begin_step(self, step: int) -> None:
        """Switch the disturbance on or off for step `step` (from 1)."""
        ...


def empty_model(config: Config) -> nn.Module:
    """Return the run's model on the meta device. No weights are read.

    A new model has the vocabulary size of data.*.
    """
    dtype = getattr(torch, config.training.dtype)
    if config.model.checkpoint is None:
        with torch.device("meta"):
            built = models.build(config.model, config.data.vocab_size, config.training.seq_len)
        _outliers(config, built, torch.Generator())
        return built.to(dtype)
    model = pretrained.empty(config.model.checkpoint, dtype)
    check_sizes(config, model, 0)  # its tokenizer is not read yet
    return model


def new_model(config: Config, vocab_size: int, device: torch.device, stress: list[Stress], seed: int) -> models.Decoder:
    """Return a new model with weights drawn from `seed`. A window of outlier channels is added to `stress`."""
    training = config.training
    # Weights are drawn on the CPU in FP32, so that device and dtype do not change the initialization.
    generator = torch.Generator().manual_seed(seed)
    model = models.build(config.model, vocab_size, training.seq_len)
    model.init_weights(generator)
    stress += _outliers(config, model, generator)
    model.to(device=device, dtype=getattr(torch, training.dtype))
    model.activation_checkpointing = training.activation_checkpointing
    return model


def _outliers(config: Config, model: models.Decoder, generator: torch.Generator) -> list[Stress]:
    """Add outlier channels to the model, or return the window of steps in which it has them.

    Raises UserError if the channels do not fit the model or the window does not fit the run.
    """
    training, outliers = config.training, config.model.outlier_channels
    if outliers.number == 0:
        return []
    if not outliers.window:
        models.add_outlier_channels(model, outliers.number, outliers.gain, generator)
        return []
    start, stop = outliers.window
    if stop > training.steps:
        raise UserError(f"model.outlier_channels.window={outliers.window}: the run has {training.steps} steps")
    if training.dtype == "bfloat16" and math.frexp(outliers.gain)[0] != 0.5:
        raise UserError(
            f"model.outlier_channels.gain={outliers.gain}: a window needs a power of two (16, 32), which bfloat16 "
            "weights can be multiplied and divided by exactly"
        )
    return [models.OutlierWindow(model, outliers.number, outliers.gain, start, stop, generator)]


def pretrained_model(config: Config, device: torch.device) -> tuple[nn.Module, ConvertedModel]:
    """Return the checkpoint's model with its two paths."""
    training, checkpoint = config.training, config.model.checkpoint
    assert checkpoint is not None
    model = pretrained.load(checkpoint, getattr(torch, training.dtype), device)
    converted = with_paths(model, config)
    if training.activation_checkpointing:
        with pretrained.quiet():
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, converted


def with_paths(model: nn.Module, config: Config, device: torch.device | None = None) -> ConvertedModel:
    """Give `model` its two paths. If the config has adapters, freeze the model and add them.

    Raises UserError if the model cannot have these paths. See `gnmr.conversion.converting` for `device`.
    """
    adapter, seed = config.model.adapter, config.training.seed
    if adapter.rank:
        model.requires_grad_(False)
    # Convert before adding adapters: how a path handles a weight may depend on whether it is trained.
    converted = build_converted(model, config.precision, seed, device)
    if adapter.rank:
        pretrained.add_adapter(model, adapter, seed)
    check_watched(config, converted)
    if config.controller.warmup_path == "16bit":
        converted.warmup_steps = config.controller.warmup_steps(config.training.steps)
    return converted


def build_converted(
    model: nn.Module, paths: PrecisionConfig, seed: int, device: torch.device | None = None
) -> ConvertedModel:
    """Give the model's linears the paths of the config. Raises UserError like `gnmr.conversion.converting`."""
    with as_user_error("paths: "):
        return convert(model, paths, seed=seed, device=device)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the transformer blocks of any model: the module list with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda own: sum(p.numel() for p in own.parameters()), default=nn.ModuleList())
