"""From the config to the controller: shares of the run's steps become steps."""

from __future__ import annotations

from gnmr.config import ControllerConfig
from gnmr.controller import Controller, GnmrSignal, Threshold, TwoStage, Unit


def build_controller(settings: ControllerConfig, units: list[Unit], steps: int) -> Controller:
    """The controller of conf/controller over `units`, for a run of `steps` steps."""

    def threshold(main: float | None, init: float | None) -> Threshold | None:
        return main if main is None or init is None else TwoStage(init, main, round(settings.init_frac * steps))

    signal = GnmrSignal(
        len(units),
        threshold(settings.alpha, settings.alpha_init),
        threshold(settings.beta, settings.beta_init),
        settings.delta,
        settings.eps,
        units[0].parameters[0].device,
    )
    return Controller(units, signal, settings.max_o, settings.t_lock, round(settings.warmup_frac * steps))
