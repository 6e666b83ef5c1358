"""What a signal's evidence costs: whole steps under each signal against steps under GNMR, which needs norms alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.steps import same_step
from gnmr.bench.timing import alternate, clock_of
from gnmr.config import Config, SignalConfig
from gnmr.training.parts import assemble

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
    """Steps of `gnmr train` without records, one model an arm, taking turns on the same batch."""
    arms = {name: assemble(_config(setting.config, *arm), Path(), setting.say) for name, arm in ARMS.items()}
    clock = clock_of(arms[REFERENCE].device, setting.clock)
    rounds = setting.rounds(f"signals: steps under {', '.join(ARMS)}", 15, warm_up=2)
    seconds = alternate({name: same_step(parts) for name, parts in arms.items()}, rounds, clock)
    reference = seconds.pop(REFERENCE)
    return [
        *(median(f"step under {name}", own / reference, "x", interval=True) for name, own in seconds.items()),
        median(f"step under {REFERENCE}", reference, "s"),
    ]


def _config(config: Config, name: str, options: dict[str, Any], probe_tokens: int) -> Config:
    controller = replace(config.controller, signal=SignalConfig(name, options))
    return replace(config, controller=controller, paths=replace(config.paths, probe_tokens=probe_tokens))
