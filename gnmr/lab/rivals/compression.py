"""Gradient compression in a run: the compressor and its controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from gnmr.attachment import Router
from gnmr.attachment.ranks.world import World
from gnmr.control import Controller
from gnmr.control.evidence import PATH_EVIDENCE, PRICE_EVIDENCE
from gnmr.control.ranks import Ranks
from gnmr.conversion import ConvertedModel
from gnmr.errors import UserError, as_user_error
from gnmr.lab.config import Config
from gnmr.lab.rivals.greedylore import GreedyLore, GreedyLoreSpec, VirtualWorkers

GAPS = ("gap_low", "gap_recovery")
"""Evidence that is measured on compressed matrices."""


def build_compression(config: Config, model: nn.Module, world: World) -> GreedyLore | None:
    """Return the gradient compressor, or None without compression. Raises UserError if it does not fit the model."""
    options = config.compression
    if options.name == "none":
        return None
    with as_user_error("compression."):
        # Several processes are the workers; one process plays all of them.
        workers = None if world.size > 1 else VirtualWorkers(options.workers or 2)
        spec = GreedyLoreSpec(
            rank=options.rank,
            refresh_every=options.refresh_every,
            dense_steps=options.dense_steps,
            seed=config.training.seed,
        )
        return GreedyLore(model, spec, workers=workers)


class HeldBack:
    """The evidence of compressed matrices, a `gnmr.control.measurements.Source`.

    `gap_low` is `GreedyLore.gap`. `gap_recovery` is 0, because a dense mean is exact.
    """

    names = GAPS

    def __init__(self, compressed: GreedyLore) -> None:
        self._compressed = compressed

    def parts(self, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Return this rank's terms of the sums over ranks."""
        return {"gap": self._compressed.gap()}

    def read(self, grad_scale: float, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the step's evidence; each tensor has shape (U,)."""
        gap = self._compressed.gap() if sums is None else sums["gap"]
        # The gap is a square of scaled gradients.
        return {"gap_low": gap / grad_scale**2, "gap_recovery": torch.zeros_like(gap)}

    def reset(self) -> None:
        """Keep everything, because the next step's gap replaces this one."""


def compressed_router(
    compressed: GreedyLore, converted: ConvertedModel, model: nn.Module, config: Config, ranks: Ranks | None
) -> Router:
    """Return a router whose units are the compressed matrices; the operators of the model keep their paths.

    The cost of a unit is its share of the additional numbers that are sent if all units are recovered. Raises UserError
    if the controller does not fit, or if its evidence is measured on operators.
    """
    training, units = config.training, compressed.units()
    total_cost = sum(unit.cost for unit in units)
    with as_user_error("controller: "):
        controller = Controller(
            [replace(unit, cost=unit.cost / total_cost) for unit in units],
            config.controller.spec(training.steps),
            steps=training.steps,
            seed=training.seed,
            record=config.records.evidence,
            whole_cost=1.0,
            ranks=ranks,
        )
    # Operators keep one path here, so nothing that compares two paths of an operator can be measured.
    of_paths = {*PATH_EVIDENCE, *PRICE_EVIDENCE, "true_gap", "micro_square"} - {*GAPS}
    if wrong := sorted(of_paths & set(controller.needs)):
        recorded = wrong[0] in config.records.evidence
        key = "records.evidence" if recorded else f"controller.signal={config.controller.signal}"
        raise UserError(
            f"{key}: {wrong[0]} is measured of operators, and under compression.name={config.compression.name} "
            "units are gradients; use one of gradient norms, or gap_low and gap_recovery"
        )
    compressed.measuring = bool(set(GAPS) & set(controller.needs))
    if compressed.measuring:
        controller.measured.sources.append(HeldBack(compressed))
    return Router(converted, controller, model)
