"""What the controller's decision alone costs, for very many units."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gnmr.control import Controller, Unit
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.timing import clock_of

DECISION_UNITS = 10_000


def decision(setting: Setting) -> list[Figure]:
    """Signal and policy over 10,000 units, from given norms to the chosen set; then what switching adds on the host."""

    def switch(_recovering: bool) -> None:
        """There is no operator to switch."""

    nothing = nn.Parameter(torch.empty(0))
    units = [Unit(f"unit{i}", (nothing,), switch) for i in range(DECISION_UNITS)]
    steps = setting.config.training.steps
    controller = Controller(units, setting.config.controller.spec(steps), steps=steps)
    rng = np.random.default_rng(0)
    observed = torch.ones(DECISION_UNITS, dtype=torch.bool)
    clock = clock_of(torch.device("cpu"), setting.clock)
    choosing, switching = [], []
    for number in setting.rounds(f"decision: {DECISION_UNITS:,} units", 200, warm_up=20):
        norm = torch.from_numpy(rng.lognormal(sigma=0.5, size=DECISION_UNITS))
        began = clock()
        host = controller.observe({"norm": norm, "observed": observed}).to_host()
        chosen = clock()
        controller.apply(host)
        if number >= 0:
            choosing.append(chosen - began)
            switching.append(clock() - chosen)
    return [
        median(f"signal and policy, {DECISION_UNITS:,} units", 1e3 * np.array(choosing), "ms", target=2.0),
        median("  switching and the host's record of it", 1e3 * np.array(switching), "ms"),
    ]


PARTS = {"decision": decision}
