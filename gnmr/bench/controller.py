"""What the controller costs: of a training step, and of its decision alone for very many units."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.timing import Stopwatch, alternate, clock_of
from gnmr.config import to_dict
from gnmr.controller import Controller, Unit
from gnmr.controller.norms import UnitNorms
from gnmr.paths import Plan
from gnmr.records.recorder import Recorder
from gnmr.training import rows, step
from gnmr.training.build import assemble, first_batch, train_step
from gnmr.wiring import build_controller

DECISION_UNITS = 10_000
# (owner, attribute, part) of what a step has because of the controller and the records.
_PARTS = (
    (UnitNorms, "__call__", "norms"),
    (Controller, "observe", "signal and policy"),
    (Controller, "apply", "switching"),
    (Plan, "saved_bytes", "records"),
    (Plan, "predicted_bytes", "records"),
)


def step_cost(setting: Setting) -> list[Figure]:
    """Two arms on one model: a bare step (forward, loss, backward, AdamW) and the step of `gnmr train` with records.

    The parts are timed where they run, inside the second arm; their sum over the median of the bare steps is the
    figure, because a step's noise is larger than what it has to show. The ratio of the arms is the check. W&B is off,
    the live view too.
    """
    settings = replace(setting.config.records, wandb="off", live="off")
    config = replace(setting.config, records=settings)
    with tempfile.TemporaryDirectory(prefix="gnmr-bench-") as folder:
        parts = assemble(config, Path(folder), setting.say)
        clock = clock_of(parts.device, setting.clock)
        watch = Stopwatch(clock)
        counters = rows.Counters()
        take_step, micro_batches = train_step(parts), first_batch(parts)

        def bare() -> None:
            losses = []
            for block in micro_batches:
                loss = step.loss_of(parts.model, block)
                (step.objective_of(parts.model, loss) / len(micro_batches)).backward()
                losses.append(loss.detach())
            parts.optimizer.found_inf = None  # type: ignore[attr-defined]
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=True)
            float(torch.stack(losses).mean())

        def controlled() -> None:
            watch.lap()
            result = take_step(micro_batches, config.optim.lr)
            counters.step += 1
            with watch.part("records"):
                recorder.step(rows.step_row(result, counters, 0.0), rows.ratio_rows(result.decision))
                recorder.events([asdict(event) for event in result.decision.events])

        with Recorder(rows.run_info(parts, "bench"), settings, None) as recorder, watch.inside(*_PARTS):
            tree = to_dict(config)
            header = rows.header(parts, "gnmr bench controller")
            recorder.start(OmegaConf.to_yaml(OmegaConf.create(tree)), tree, header, "bench")
            rounds = setting.rounds("controller: steps with and without", 40, warm_up=2)
            seconds = alternate({"bare": bare, "controlled": controlled}, rounds, clock)

    bare_s = seconds["bare"]
    names = list(dict.fromkeys(part for _, _, part in _PARTS))
    shares = {name: watch.seconds(name, len(bare_s)) / np.median(bare_s) for name in names}
    total: np.ndarray = np.sum(list(shares.values()), axis=0)
    return [
        median("controller and records, share of a step", total, "%", 0.02, "sum of the parts below"),
        *(median(f"  {name}", share, "%") for name, share in shares.items()),
        median("step with over step without", seconds["controlled"] / bare_s, "x", interval=True, note="check"),
        median("step without", bare_s, "s"),
    ]


def decision(setting: Setting) -> list[Figure]:
    """Signal and policy over 10,000 units, from given norms to the chosen set; then what switching adds on the host."""

    def switch(_recovering: bool) -> None:
        """There is no operator to switch."""

    nothing = nn.Parameter(torch.empty(0))
    units = [Unit(f"unit{i}", (nothing,), switch) for i in range(DECISION_UNITS)]
    controller: Controller = build_controller(setting.config.controller, units, setting.config.training.steps)
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
        median(f"signal and policy, {DECISION_UNITS:,} units", 1e3 * np.array(choosing), "ms", 2.0),
        median("  switching and the host's record of it", 1e3 * np.array(switching), "ms"),
    ]
