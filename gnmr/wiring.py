"""From the config to paths and controller: shares of the run's steps become steps, names become signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from gnmr.config import THRESHOLDS, ControllerConfig, PathsConfig
from gnmr.controller import Context, Controller, OutputGradients, Signal, Threshold, TwoStage, Unit, build_signal
from gnmr.errors import UserError
from gnmr.paths import Plan, convert


def build_plan(model: nn.Module, paths: PathsConfig, seed: int, device: torch.device | None = None) -> Plan:
    """Gives the model's linears the paths of conf/paths. UserError: see `gnmr.paths.convert`."""
    try:
        return convert(model, paths, seed=seed, device=device)
    except ValueError as error:
        raise UserError(f"paths: {error}") from error


AnyController = TypeVar("AnyController", bound=Controller)


def build_controller(
    settings: ControllerConfig,
    units: list[Unit],
    steps: int,
    seed: int = 0,
    record: Sequence[str] = (),
    norms: OutputGradients | None = None,
    kind: type[AnyController] = Controller,  # type: ignore[assignment]
) -> AnyController:
    """The controller of conf/controller over `units`, for a run of `steps` steps. ValueError for senseless options.

    `norms`: where they are not those of the units' parameters (`gnmr.attachment.norms_of`).
    """
    return kind(
        units,
        signal_of(settings, units, steps, seed),
        settings.max_o,
        settings.t_lock,
        settings.warmup_steps(steps),
        ranked=settings.routing == "ranked",
        trigger=settings.trigger,
        record=record,
        hold=settings.hold,
        norms=norms,
    )


def signal_of(settings: ControllerConfig, units: list[Unit], steps: int, seed: int = 0) -> Signal:
    """The signal of conf/controller for these units."""

    def threshold(name: str) -> Threshold | None:
        main, init = getattr(settings, name), getattr(settings, f"{name}_init")
        return main if main is None or init is None else TwoStage(init, main, round(settings.init_frac * steps))

    options: dict[str, Any] = dict(settings.options)
    if (name := settings.signal) in THRESHOLDS:
        options = {"delta": settings.delta, "eps": settings.eps} | options
        options |= {key: threshold(key) for key in THRESHOLDS[name]}
    return build_signal(name, options, Context.of(units, settings.max_o, steps, seed, settings.hold))
