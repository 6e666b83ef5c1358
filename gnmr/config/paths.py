"""paths.*: the two execution paths, and the names of formats, recipes and GEMMs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gnmr.config.checks import one_of, positive, require
from gnmr.errors import UserError

FORMATS = ("int2", "int3", "int4", "int8", "e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "bf16")
RECIPES = {
    "fp8_hybrid": 8,
    "fp8_delayed": 8,
    "fp8_delayed_1024": 8,
    "deepseek_v3": 8,
    "deepseek_v3_blocks": 8,
    "mxfp8": 8,
    "sim_e2m1": 4,
    "sim_e2m3": 6,
    "sim_e3m2": 6,
    "sim_e4m3": 8,
    "sim_int4": 4,
    "sim_int8": 8,
    "llm_int8": 8,
    "llm_int8_dgrad": 8,
    "bf16": 16,
}
"""And their bits (those of the forward input)."""
GEMMS = ("fprop", "dgrad", "wgrad")
UNITS = ("operator", "expert", "layer", "block")
BACKENDS = ("auto", "simulated", "scaled_mm", "int_mm", "te")
WEIGHTS = ("online", "beside", "instead")


@dataclass(frozen=True)
class PathsConfig:
    """The two execution paths of a unit (gnmr/paths)."""

    name: str = "int4_int8"
    """Name of this choice, part of the arm's name."""
    low: str = "int4"
    """The low-cost path: a format of the saved activations, or a recipe (gnmr/paths/recipes.py)."""
    recovery: str | None = "int8"
    """The recovery path, of the same kind; null: a static run, units are monitored and never routed."""
    recipes: dict[str, Any] = field(default_factory=dict)
    """Recipes of one's own, {name: {gemm: {operand: cast}}}, for low and recovery to name."""
    targets: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of the linears to exchange, matched at the end of the name: down_proj, *_proj, layers.0.*."""
    unit: str = "operator"
    """What one decision moves: operator, expert (all its operators), layer (an attention, or an MLP with all its
    experts) or block (5.2); of the operators that targets chooses."""
    site: str = "saved"
    """saved: only what backward keeps is quantized; forward: the forward pass reads the quantized input too."""
    rounding: str = "nearest"
    """nearest (ties to even) or stochastic."""
    recovers: list[str] = field(default_factory=lambda: list(GEMMS))
    """GEMMs that the recovery recipe takes over; without effect where the paths are formats."""
    backend: str = "auto"
    """What runs a recipe (gnmr/paths/backends.py): simulated, scaled_mm (FP8 hardware), int_mm (integers), te, or auto:
    a real one where device, recipe and widths allow it, else simulated."""
    weights: str = "online"
    """Where the weights' INT8 codes are under llm_int8 (gnmr/paths/kernels/int8.py): online (made in every forward
    pass), beside or instead of the 16-bit weights; the latter two for frozen weights."""
    outlier_threshold: float | None = None
    """Input columns with a magnitude from here on stay in 16 bits under llm_int8; published: 6.0; null: off."""
    probe_tokens: int = 1
    """Of this many tokens one is measured where a signal needs the paths' errors (evidence gap_low, mse, ...)."""

    def __post_init__(self) -> None:
        positive("paths.probe_tokens", self.probe_tokens)
        self._check_recipes()
        recipes = (*RECIPES, *self.recipes)
        choices = tuple(dict.fromkeys((*FORMATS, *recipes)))
        one_of("paths.low", self.low, choices)
        if self.recovery is not None:
            one_of("paths.recovery", self.recovery, choices)
            kind = "a format" if self.low in FORMATS else "a recipe"
            alike = any(self.low in known and self.recovery in known for known in (FORMATS, recipes))
            require(alike, "paths.recovery", self.recovery, f"must be {kind}, as paths.low={self.low} is")
        require(
            len(self.recovers) > 0 and set(self.recovers) <= set(GEMMS),
            "paths.recovers",
            self.recovers,
            f"must be some of {', '.join(GEMMS)}",
        )
        require(len(self.targets) > 0, "paths.targets", self.targets, "needs at least one pattern")
        one_of("paths.unit", self.unit, UNITS)
        one_of("paths.backend", self.backend, BACKENDS)
        one_of("paths.weights", self.weights, WEIGHTS)
        positive("paths.outlier_threshold", self.outlier_threshold, optional=True)
        one_of("paths.site", self.site, ("saved", "forward"))
        one_of("paths.rounding", self.rounding, ("nearest", "stochastic"))

    def _check_recipes(self) -> None:
        """UserError for what no recipe can be. Whoever declares one waits for torch, which knows the formats."""
        if not self.recipes:
            return
        from gnmr.paths.recipes import Recipe

        for name, gemms in self.recipes.items():
            try:
                Recipe.of(name, gemms)
            except ValueError as error:
                raise UserError(f"paths.recipes: {error}") from error
