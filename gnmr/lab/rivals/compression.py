"""Gradient compression in a run: the compressor and its controller."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gnmr.attachment import Router
from gnmr.attachment.ranks.world import World
from gnmr.control import Controller
from gnmr.control.evidence import PATH_EVIDENCE, PRICE_EVIDENCE
from gnmr.control.ranks import Ranks
from gnmr.conversion import ConvertedModel
from gnmr.errors import UserError, as_user_error
from gnmr.lab.config import Config
from gnmr.lab.rivals.greedylore import GreedyLore, GreedyLoreSpec, VirtualWorkers


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
    of_paths = {*PATH_EVIDENCE, *PRICE_EVIDENCE, "true_gap", "micro_square"} - {*compressed.names}
    if wrong := sorted(of_paths & set(controller.needs)):
        recorded = wrong[0] in config.records.evidence
        key = "records.evidence" if recorded else f"controller.signal={config.controller.signal}"
        raise UserError(
            f"{key}: {wrong[0]} is measured of operators, and under compression.name={config.compression.name} "
            "units are gradients; use one of gradient norms, or gap_low and gap_recovery"
        )
    compressed.measuring = bool(set(compressed.names) & set(controller.needs))
    if compressed.measuring:
        controller.measured.sources.append(compressed)
    return Router(converted, controller, model)
