"""What a signal's evidence costs: whole steps under each signal against steps under GNMR, which needs norms alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.steps import compare
from gnmr.config import Config

REFERENCE = "gnmr_delta"
# Arm: (signal, its options, paths.probe_tokens). The last of them never measures again after its first step, so it
# tells what the steps between two measurements cost; with every=k the mean is that plus a k-th of the difference.
ARMS: dict[str, tuple[str, dict[str, Any], int]] = {
    REFERENCE: (REFERENCE, {}, 1),
    "gap": ("gap", {}, 1),
    "gap, every 8th token": ("gap", {}, 8),
    "gap, every 64th token": ("gap", {}, 64),
    "gap, steps between measurements": ("gap", {"every": 1_000_000}, 1),
    "gap_exact": ("gap_exact", {}, 1),
    "mse": ("mse", {}, 1),
    "grad_to_noise": ("grad_to_noise", {}, 1),
    "update_norm": ("update_norm", {}, 1),
    "oracle": ("oracle", {}, 1),
}


def signals(setting: Setting) -> list[Figure]:
    """Whole steps of runs that differ in the signal alone."""
    arms = {name: _config(setting.config, *arm) for name, arm in ARMS.items()}
    found = compare(setting, "signals: steps under", arms)
    return [
        *(median(f"step under {name}", ratio, "x", interval=True) for name, ratio in found.ratios.items()),
        median(f"step under {REFERENCE}", found.seconds, "s"),
    ]


def _config(config: Config, name: str, options: dict[str, Any], probe_tokens: int) -> Config:
    controller = replace(config.controller, signal=name, options=options)
    return replace(config, controller=controller, paths=replace(config.paths, probe_tokens=probe_tokens))
