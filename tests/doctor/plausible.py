"""A diagnosis of any size with random but plausible numbers, for what shows it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gnmr.formats.recipes import RECIPES
from gnmr.measure.gemm_costs import GemmCost, PathCost
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.knapsack import times_of

PROJECTIONS = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}


CURVE_LEFT = ((0.03, 0.3), (0.05, 0.2), (0.2, 0.08), (0.3, 0.04))
"""(extra time, nats left)."""


def diagnosis(layers: int = 30, names: list[str] | None = None, **given: Any) -> Diagnosis:
    """`layers` blocks of seven projections, or operators of these `names`; 0.55 nats in all and 0.68 measured, with
    mxfp8 and bf16 to keep them on.

    Most of it is in `down_proj` and `v_proj`; the twenty most expensive are measured.
    """
    rng = np.random.default_rng(layers)
    shapes = {f"model.layers.{layer}.{kind}": shape for layer in range(layers) for kind, shape in PROJECTIONS.items()}
    if names is not None:
        shapes = dict.fromkeys(names, (64, 64))
    weight = np.array([8.0 if "down" in name else 4.0 if "v_proj" in name else 1.0 for name in shapes])
    values = weight * rng.lognormal(0, 1.1, len(shapes))
    values *= given.pop("total", 0.55) / values.sum()
    top = set(np.argsort(-values)[:20].tolist())
    rows: list[GemmCost] = []
    for i, (name, value) in enumerate(zip(shapes, values.tolist(), strict=True)):
        token, sequence = (value * float(rng.lognormal(0, 0.5)) for _ in range(2))
        one, share = value if i in top else None, float(rng.uniform(0.2, 0.8))
        near = (value * 0.85, value * 1.2)
        both = {"input": value * share, "weight": value * (1 - share)}
        rescued = {"mxfp8": value * float(rng.uniform(0.03, 0.1)), "bf16": 0.0}
        rows.append(GemmCost(name, "fprop", value, near, token, sequence, one, **both, rescued=rescued))
        for gemm in ("dgrad", "wgrad"):
            error = float(rng.lognormal(-4, 1))
            rows.append(GemmCost(name, gemm, error, (error * 0.9, error * 1.1), bias=float(rng.normal(0, 0.01))))

    def measured(nats: float, batches: int = 12) -> PathCost:
        return PathCost(batches, nats, nats / 60, 48, 3.0, 3.0 + 0.9 * nats, nats / 30)

    scale = float(values.sum()) / 0.55
    rules = {"last": 0.454, "first": 0.43, "first_last": 0.35, "random": 0.45, "mse": 0.22, "gradient norm": 0.18}
    rescues = ("bf16",) if given.get("against") else ("mxfp8", "bf16")
    rules |= {f"{name} alone": left for name, left in (("mxfp8", 0.18), ("bf16", 0.32)) if len(rescues) > 1}
    left = {"plan": measured(0.173 * scale)} | {name: measured(value * scale) for name, value in rules.items()}
    options: dict[str, Any] = {
        "recipe": "nvfp4",
        "recovery": "bf16",
        "operators": shapes,
        "rows": tuple(rows),
        "measured": measured(0.68 * scale),
        "scores": {"mse": dict.fromkeys(shapes, 1.0), "gradient norm": dict(zip(shapes, values.tolist(), strict=True))},
        "budget": 0.1,
        "pins": {},
        "rescues": rescues,
        "costs": times_of(shapes, [RECIPES[name] for name in ("nvfp4", "mxfp8", "bf16")]),
        "targets": None,
        "exclude": [],
        "held_out": measured(0.66 * scale),
        "remaining": left,
        "excess": {name: ((value - 0.173) * scale, 0.01 * scale) for name, value in rules.items()},
        "curve": tuple((at, measured(nats * scale)) for at, nats in CURVE_LEFT),
        "limit": 2e-5,
    }
    return Diagnosis(**options | given)
