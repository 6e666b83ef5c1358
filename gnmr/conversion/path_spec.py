"""The settings of a conversion, checked without torch: the config's `precision` and the argument of `convert`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gnmr.names import BACKENDS, FORMATS, GEMMS, RECIPES, ROUNDINGS, SITES, UNITS, WEIGHTS
from gnmr.options import one_of, positive, require, whole_number, within
from gnmr.patterns import listed

if TYPE_CHECKING:
    from gnmr.formats.recipes import Recipe

_SHAPED = re.compile(rf"({'|'.join(GEMMS)}):[1-9][0-9]{{0,9}}x[1-9][0-9]{{0,9}}")
"""GEMM and INPUTSxOUTPUTS of an entry of `times`."""


@dataclass(frozen=True, kw_only=True)
class PathSpec:
    """The two execution paths of a unit. Raises ValueError, naming the field, if a value is invalid."""

    low: str = "int4"
    """The low-cost path: a format of the saved activations, or a recipe (gnmr/formats/recipes.py)."""
    recovery: str | None = "int8"
    """The recovery path, of the same kind (bf16 is both); null: units are monitored but never routed (a static run)."""
    recipes: dict[str, Any] = field(default_factory=dict)
    """User-defined recipes, {name: {gemm: {operand: cast}}}, which low and recovery may name."""
    targets: list[str] | None = None
    """Patterns with * and ? of the linears to convert; null: every linear of the numbered blocks, and other *_proj.

    A pattern matches at the end of the dotted name: down_proj is every layer's, and layers.2.* is not layer 20's. In a
    model without blocks, null means the linears that are called *_proj, or all if there are none. Output heads, routers
    and peft's adapters are not among the defaults. Recipes skip heads and routers, whatever pattern names them
    (gnmr/conversion/targets.py). A linear whose widths or class do not fit is left out with a warning, unless a pattern
    without * and ? names it.
    """
    exclude: list[str] = field(default_factory=list)
    """Patterns of linears that are not converted, although targets name them."""
    unit: str = "operator"
    """What one decision moves: gemm, operator, expert, layer or block (5.2), among the operators that targets choose.

    gemm is fprop, dgrad or wgrad of an operator, of those in recovers, and needs recipes. expert is all operators of an
    expert. layer is an attention, or an MLP with all its experts.
    """
    site: str = "saved"
    """saved: only the copy for backward is quantized; forward: the forward pass reads the quantized input too.

    Recipes define what each GEMM reads.
    """
    rounding: str = "nearest"
    """nearest (ties to even) or, for formats, stochastic; recipes define the rounding of each cast."""
    group: int | None = None
    """For integer formats: elements of a token whose range the codes span, as in ActNN (256).

    null: codes are symmetric about 0, with one scale per token.
    """
    recovers: list[str] = field(default_factory=lambda: list(GEMMS))
    """GEMMs that the recovery recipe takes over; no effect if the paths are formats."""
    pins: dict[str, Any] = field(default_factory=dict)
    """GEMMs that always run on one recipe, {pattern of operators: {fprop: mxfp8}}.

    [fprop, dgrad] pins to the recovery recipe (bf16 if recovery is null). Under formats a pin puts the whole operator,
    all three GEMMs, on recovery.
    """
    times: dict[str, float] = field(default_factory=dict)
    """Relative GEMM times (gnmr/conversion/cost.py), by width (4, 8, 16) or recipe: {8: 1.8, mxfp8: 1.9}.

    They define extra GEMM time. Missing entries have the default 1 : 2 : 4. An entry `mxfp8:fprop:576x1536` is of one
    GEMM of operators with these inputs and outputs; `gnmr.plan.gemm_times` reads them from measured times.
    """
    backend: str = "auto"
    """What runs a recipe (gnmr/conversion/resolve.py): simulated, scaled_mm (FP8 hardware), int_mm (integers), or auto.

    auto uses a hardware backend if device, recipe and widths allow it, else simulated.
    """
    weights: str = "online"
    """Where the weights' INT8 codes are under llm_int8 (gnmr/conversion/int8.py): online or instead.

    online makes them in every forward pass; instead replaces the 16-bit weights, which have to be frozen.
    """
    outlier_threshold: float | None = None
    """Input columns with at least this magnitude stay in 16 bits under llm_int8; published: 6.0; null: off."""
    probe_tokens: int = 1
    """One of this many tokens is measured if a signal needs the paths' errors (evidence gap_low, mse, ...)."""
    price_tokens: int = 16
    """The same for signals that need the paths' prices (evidence price, price_fprop, ...)."""

    _SECTION: ClassVar[str] = ""
    """Prefix of a field's name in messages, as the user types it."""

    @classmethod
    def of(cls, low: str | Recipe, recovery: str | Recipe | None, **fields: Any) -> PathSpec:
        """Return the spec of two paths.

        Args:
            low: name or recipe of the low-cost path.
            recovery: the same of the recovery path; None: a static run.
            fields: the other fields of `PathSpec`.

        Raises:
            ValueError: two different recipes have one name, or a field is invalid.
        """
        recipes: dict[str, Any] = dict(fields.pop("recipes", {}))
        names: list[str | None] = []
        for path in (low, recovery):
            if path is not None and not isinstance(path, str):
                if recipes.setdefault(path.name, path) != path:
                    raise ValueError(f"recipe {path.name}: there are two of this name; name one otherwise")
                path = path.name
            names.append(path)
        return cls(low=names[0] or "", recovery=names[1], recipes=recipes, **fields)

    def __post_init__(self) -> None:
        for name in ("exclude", "recovers") if self.targets is None else ("targets", "exclude", "recovers"):
            object.__setattr__(self, name, listed(name, getattr(self, name)))
        require(self.targets != [], "targets", self.targets, "needs at least one pattern; null is the default")
        whole_number(probe_tokens=self.probe_tokens, price_tokens=self.price_tokens)
        positive(or_null=True, outlier_threshold=self.outlier_threshold)
        one_of(UNITS, unit=self.unit)
        one_of(BACKENDS, backend=self.backend)
        one_of(WEIGHTS, weights=self.weights)
        # Recipes first: paths, pins and times may name them.
        self._check_recipes()
        self._check_paths()
        gemms_only = self.recovers and set(self.recovers) <= set(GEMMS)
        require(gemms_only, "recovers", self.recovers, f"must be some of {', '.join(GEMMS)}")
        self._check_pins()
        self._check_times()
        self._check_options_of_formats()

    @property
    def pinned(self) -> dict[str, dict[str, str]]:
        """The recipe (or format) of each pinned GEMM, by pattern."""
        default = self.recovery or "bf16"
        return {
            pattern: dict(gemms) if isinstance(gemms, Mapping) else dict.fromkeys(gemms, default)
            for pattern, gemms in self.pins.items()
        }

    @property
    def _formats(self) -> bool:
        """Whether the paths are formats; bf16 is both a format and a recipe."""
        return all(path is None or path in FORMATS for path in (self.low, self.recovery))

    def _check_recipes(self) -> None:
        """Check the user's recipes; imports torch only if there are any."""
        require(isinstance(self.recipes, Mapping), "recipes", self.recipes, "must be {name: {gemm: {operand: cast}}}")
        for name, recipe in self.recipes.items():
            from gnmr.formats.recipes import Recipe

            if not isinstance(recipe, Recipe):
                try:
                    Recipe.of(name, recipe)
                except ValueError as error:
                    raise ValueError(f"recipes: {error}") from error
            # A built-in recipe may be given as an object, but not redefined.
            elif name in FORMATS or name in RECIPES:
                words = {gemm: casts for gemm, casts in recipe.words().items() if casts}
                if words != RECIPES.get(name):
                    raise ValueError(f"recipe {name}: is not what has this name already; name it otherwise")

    def _check_paths(self) -> None:
        """Check that both paths are formats, or both are recipes."""
        recipes = (*RECIPES, *self.recipes)
        paths = tuple(dict.fromkeys((*FORMATS, *recipes)))
        one_of(paths, low=self.low)
        if self.recovery is not None:
            one_of(paths, recovery=self.recovery)
            kind = "a format" if self.low in FORMATS else "a recipe"
            # bf16 is in both lists, so it fits every path.
            alike = any(self.low in names and self.recovery in names for names in (FORMATS, recipes))
            right = f"must be {kind}, as low={self.low} is; add {self._SECTION}recovery=bf16, which fits every low path"
            require(alike, "recovery", self.recovery, right)

    def _check_pins(self) -> None:
        """Check the pins, and put their GEMMs in order, each once."""
        right = "must be {pattern of operators: {GEMM: recipe}}, as {down_proj: {fprop: mxfp8}}, or {pattern: [GEMMs]}"
        require(isinstance(self.pins, Mapping), "pins", self.pins, right)
        recipes, pins = (*RECIPES, *self.recipes), dict[str, Any]()
        for pattern, pin in self.pins.items():
            require(isinstance(pattern, str) and pattern, "pins", self.pins, right)
            key, by_recipe = f"pins.{pattern}", isinstance(pin, Mapping)
            gemms = list(pin) if by_recipe else listed(key, pin)
            require(gemms and set(gemms) <= set(GEMMS), key, pin, f"must be some of {', '.join(GEMMS)}")
            # A format changes only what backward reads, so it has no GEMMs to pin one by one.
            all_gemms = f"low={self.low} is a format, and pins the whole operator: [{', '.join(GEMMS)}]"
            require(not self._formats or set(gemms) == set(GEMMS), key, pin, all_gemms)
            # In order, so that equal pins are equal specs.
            ordered = [gemm for gemm in GEMMS if gemm in gemms]
            if by_recipe:
                choices = [self.recovery or "bf16"] if self._formats else recipes
                for gemm in gemms:
                    one_of(choices, **{f"{key}.{gemm}": pin[gemm]})
            pins[pattern] = {gemm: pin[gemm] for gemm in ordered} if by_recipe else ordered
        object.__setattr__(self, "pins", pins)

    def _check_times(self) -> None:
        """Check the relative times, and make their keys words (YAML reads 8 as a number)."""
        require(isinstance(self.times, Mapping), "times", self.times, "must be {bits or recipe: time}")
        times = {str(key): time for key, time in self.times.items()}
        for key, time in times.items():
            recipe, of_shape, gemm_and_shape = key.partition(":")
            valid = recipe in (*RECIPES, *self.recipes) or (not of_shape and recipe in ("4", "8", "16"))
            if of_shape:
                valid = valid and _SHAPED.fullmatch(gemm_and_shape) is not None
            require(valid, f"times.{key}", time, "must be of 4, 8, 16, a recipe, or RECIPE:GEMM:INPUTSxOUTPUTS")
            within(1e-9, 1e9, **{f"times.{key}": time})  # type: ignore[arg-type]
        object.__setattr__(self, "times", times)

    def _check_options_of_formats(self) -> None:
        """Check the options that depend on whether the paths are formats."""
        # Recipes define their own casts and rounding, so these options have no meaning for them.
        right = f"routes the GEMMs of recipes one by one, and low={self.low} is a format; use operator"
        require(self.unit != "gemm" or not self._formats, "unit", self.unit, right)
        for name, choices in (("site", SITES), ("rounding", ROUNDINGS)):
            value = getattr(self, name)
            one_of(choices, **{name: value})
            right = f"belongs to formats; with the recipe {self.low} it must be {choices[0]}"
            require(self._formats or value == choices[0], name, value, right)
        if self.group is not None:
            whole_number(group=self.group)
            # The recovery path may be bf16, which has no codes to group.
            paths = [path for path in (self.low, self.recovery) if path is not None]
            not_integer = [path for path in paths if not (path in FORMATS and path.startswith("int"))]
            right = f"belongs to integer formats (int2 ... int8, and bf16); {(not_integer or paths)[0]} is not one"
            require(self.low not in not_integer and set(not_integer) <= {"bf16"}, "group", self.group, right)
