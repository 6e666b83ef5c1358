"""Read and write plan.json: the recipe of every GEMM of a model, with its cost and its savings.

    {
      "gnmr_plan": 2,
      "operators": {"layers.0.mlp.down_proj": [256, 64]},      the model: every operator that the plan is about, and its
                                                               numbers of inputs and outputs
      "targets": null, "exclude": [],                          what chose them, as precision.targets and .exclude
      "modules": {"layers.0.mlp.experts": "MixtralExperts"},   class of what holds operators and is no nn.Linear, if any
      "unconverted": ["layers.0.mlp.gate", "lm_head"],         every other linear of the model; these stay in 16 bits
      "saved_as": {"layers.0.mlp.gate":                        names in the checkpoint where they differ from those in
                   ["layers.0.block_sparse_moe.gate"]},        memory; experts by the module that holds them
      "unloaded": ["model.layers.32.eh_proj"],                 linears in the checkpoint's file that the model lacks
      "low": "nvfp4", "recovery": "bf16", "recipes": {},       as precision.low, .recovery and .recipes
      "pins": {"layers.0.mlp.down_proj": {"fprop": "mxfp8"}},  recipes by operator and GEMM; all others are on low
      "times": {},                                             relative GEMM times, as precision.times
      "work": {"layers.0.mlp.down_proj": 33554432},            multiplications of each operator in the batches,
      "rest": 4194304,                                         and of all other GEMMs of the model
      "budget": 0.1,                                           extra time that was allowed, as a share of the time of
                                                               the GEMMs that the plan may move, or null
      "extra": 0.097,                                          extra time that the pins take, as the same share, or null
      "extra_of_all": 0.021,                                   the same as a share of the time of all GEMMs, or null
      "fused": ["qkv"],                                        kinds of operators that have one recipe together
      "prices": {"layers.0.mlp.down_proj": {"fprop": {"nvfp4": 0.01, "mxfp8": 0.0004}}},    nats a token by recipe
      "expected": {"before": 0.101, "after": 0.02},            nats a token without and with the pins, or null
      "triggers": {"price": 0.001},                            thresholds for the controller, in nats, or null
      "provenance": {"checkpoint": "..."}                      where it comes from, texts
    }

A file may come from anyone: its size is bounded, unknown keys are refused, and nothing in it is run. Operators have the
names of the model that was diagnosed. A model with the same operators in another layout (`model.layers.0` for
`layers.0`) is the same model.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.conversion.path_spec import PathSpec
from gnmr.errors import UserError, plural
from gnmr.names import GEMMS, RECIPES, Pins
from gnmr.options import nearest, one_of, require, within
from gnmr.patterns import NameIndex, listed
from gnmr.plan.knapsack import (
    FUSED,
    Choice,
    Item,
    Prices,
    Shapes,
    Times,
    as_choice,
    budget_of,
    time_of_all,
    time_to_move,
    times_of,
)
from gnmr.records.untrusted import MAX_NAME, Damaged, bounded, content, first_line

if TYPE_CHECKING:
    from gnmr.formats.recipes import Recipe

VERSION = 2
PLAN_FILE = "plan.json"
"""Name of the file that `gnmr diagnose` writes into the folder of out=."""
MAX_PLAN = 1 << 24
"""Limit in bytes; 10,000 operators take less than two million."""
_MOST_OPERATORS, _MOST_NATS = 100_000, 1e30
_PLAIN = (
    *("targets", "exclude", "modules", "unconverted", "saved_as", "unloaded", "low", "recovery", "recipes", "pins"),
    "times",
    *("work", "rest", "budget", "extra", "extra_of_all", "fused", "prices"),
)
_IF_ANY = ("modules", "unconverted", "saved_as", "unloaded")
"""Keys that are left out if there is nothing to say."""
_BY_LINE = ("operators", "pins", "work", "prices", "saved_as")
"""Keys that are written with one operator per line."""
_KEYS = ("operators", *_PLAIN, "expected", "triggers", "provenance")
_NEEDED = ("operators", "low", "recovery", "pins")
IN_NATS = ("price", "pin_excess")
"""Signals whose threshold is in nats, as `triggers.price` is."""
PATHS = ("low", "recovery", "recipes", "targets", "exclude", "pins", "times")
"""Fields of `PathSpec` that a plan sets."""


@dataclass(frozen=True, kw_only=True)
class PinPlan:
    """The content of plan.json. Raises ValueError, naming the key, if a value is invalid."""

    operators: dict[str, tuple[int, int]]
    """(inputs, outputs) of every operator that the plan is about, by its name."""
    low: str
    recovery: str | None
    pins: Pins = field(default_factory=dict)
    """Recipe by operator and GEMM; all others are on `low`."""
    targets: list[str] | None = None
    exclude: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    """Classes of the modules that hold operators and are not nn.Linear, by module name."""
    unconverted: list[str] | None = None
    """Linears of the model that are not operators (heads, routers, what was left out); None: they are not known."""
    saved_as: dict[str, list[str]] = field(default_factory=dict)
    """Names in the checkpoint where they differ, by the name in memory; experts by the module that holds them."""
    unloaded: list[str] = field(default_factory=list)
    """Linears that are in the checkpoint's file alone, by its names."""
    recipes: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    """Relative GEMM times, as `PathSpec.times`."""
    work: dict[str, int] = field(default_factory=dict)
    """Multiplications by operator, which weight times and shares; if missing, inputs times outputs."""
    rest: int = 0
    """Multiplications of all other GEMMs of the model, which stay in 16 bits."""
    budget: float | None = None
    """Extra time that the pins were allowed, as a share of the time on `low` of the GEMMs that the plan may move."""
    extra: float | None = None
    """Extra time that the pins take, as the same share."""
    extra_of_all: float | None = None
    """The same extra time as a share of the time of all GEMMs of the model, in a forward and a backward pass."""
    fused: list[str] = field(default_factory=list)
    """Kinds of operators that share one recipe (`knapsack.FUSED`)."""
    prices: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Nats per token by operator, GEMM and recipe, `low` among them."""
    expected: tuple[float, float] | None = None
    """Nats per token that low precision costs without and with the pins."""
    triggers: dict[str, float | None] = field(default_factory=dict)
    """Thresholds for the controller: `price`, nats above 0, the price of the cheapest pin."""
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The operators come first, because everything else goes by their names.
        some = isinstance(self.operators, dict) and 0 < len(self.operators) <= _MOST_OPERATORS
        require(some, "operators", "..." if self.operators else self.operators, "must be {operator: [inputs, outputs]}")
        for name, shape in self.operators.items():
            _name("operators", name)
            valid = isinstance(shape, list | tuple) and len(shape) == 2 and all(map(_width, shape))
            require(valid, f"operators.{name}", shape, "must be [inputs, outputs], two whole numbers of at least 1")
        object.__setattr__(self, "operators", {name: tuple(shape) for name, shape in self.operators.items()})
        # PathSpec checks the recipes, targets and pins.
        object.__setattr__(self, "pins", self._spec().pinned)
        for key in ("pins", "prices", "work"):
            require(isinstance(getattr(self, key), dict), key, getattr(self, key), "must be {operator: ...}")
            if strange := [name for name in getattr(self, key) if name not in self.operators]:
                raise ValueError(
                    f"{key}.{strange[0]}: is not an operator of this plan{nearest(strange[0], self.operators)}"
                )
        # Modules, and linears outside of the plan.
        require(isinstance(self.modules, dict), "modules", self.modules, "must be {module: class}")
        for name, kind in self.modules.items():
            _name("modules", name)
            _name(f"modules.{name}", kind)
        for key in ("unconverted", "unloaded"):
            _names(key, getattr(self, key) if key == "unloaded" or self.unconverted is not None else [])
        require(isinstance(self.saved_as, dict), "saved_as", self.saved_as, "must be {name in memory: [names]}")
        for name, saved in self.saved_as.items():
            _name("saved_as", name)
            _names(f"saved_as.{name}", saved)
        # Multiplications, from which times are computed.
        for key, number in {
            **{f"work.{name}": multiplications for name, multiplications in self.work.items()},
            "rest": self.rest,
        }.items():
            valid = type(number) is int and 0 <= number < 1 << 100
            require(valid, key, number, "must be a whole number of multiplications")
        timed = any(self.work.get(name, 1) for name in self.operators)
        require(timed, "work", "...", "is 0 of every operator, so there is no GEMM time; give their multiplications")
        if self.budget is not None:
            object.__setattr__(self, "budget", budget_of(self.budget))
        within(-1, 1e18, or_null=True, extra=self.extra)
        within(-1, 1e18, or_null=True, extra_of_all=self.extra_of_all)
        object.__setattr__(self, "fused", listed("fused", self.fused))
        for kind in self.fused:
            one_of(FUSED, fused=kind)
        self._check_prices()
        # Nats, and the threshold of the controller.
        if self.expected is not None:
            is_pair = isinstance(self.expected, list | tuple) and len(self.expected) == 2
            require(is_pair, "expected", self.expected, "must be {before: nats, after: nats}, or null")
            for key, nats in zip(("before", "after"), self.expected, strict=True):
                within(-1e9, 1e9, **{f"expected.{key}": nats})  # type: ignore[arg-type]
        _known("triggers", self.triggers, ("price",))
        for key, threshold in self.triggers.items():
            within(0, 1e9, or_null=True, **{f"triggers.{key}": threshold})
        texts = isinstance(self.provenance, dict) and all(isinstance(text, str) for text in self.provenance.values())
        require(texts, "provenance", self.provenance, "must be {name: text}")

    def _check_prices(self) -> None:
        for name, by_gemm in self.prices.items():
            require(isinstance(by_gemm, dict), f"prices.{name}", by_gemm, "must be {GEMM: {recipe: nats}}")
            for gemm, by_recipe in by_gemm.items():
                one_of(GEMMS, **{f"prices.{name}": gemm})
                key, right = f"prices.{name}.{gemm}", f"must be {{recipe: nats}}, {self.low} among them"
                require(isinstance(by_recipe, dict) and self.low in by_recipe, key, by_recipe, right)
                for recipe, nats in by_recipe.items():
                    one_of((*RECIPES, *self.recipes), **{key: recipe})
                    within(-_MOST_NATS, _MOST_NATS, **{f"{key}.{recipe}": nats})  # type: ignore[arg-type]

    def _spec(self) -> PathSpec:
        return PathSpec(**{name: getattr(self, name) for name in PATHS})

    def paths(self) -> dict[str, Any]:
        """Return the fields of `PathSpec` that it sets. Pins are by the end of names, so that they fit both layouts."""
        return {name: getattr(self, name) for name in PATHS} | {
            "pins": {name.removeprefix("model."): gemms for name, gemms in self.pins.items()}
        }

    def named_recipes(self) -> list[Recipe]:
        """Return the recipes that it names, `low` first, for a plan of recipes."""
        from gnmr.conversion.resolve import recipes_of

        names = dict.fromkeys([self.low, *(recipe for by_gemm in self.pins.values() for recipe in by_gemm.values())])
        for by_gemm in self.prices.values():
            names |= dict.fromkeys(recipe for nats_on in by_gemm.values() for recipe in nats_on)
        recipe_of = recipes_of(self._spec())
        return [recipe_of[name] for name in names]

    def gemm_times(self) -> Times:
        """Return the time of every GEMM on each recipe that it names, and in 16 bits (`times_of`)."""
        return times_of(self.operators, self._recipes(), self.times, self.work)

    def nats(self) -> dict[Item, dict[str, float]]:
        """Return the nats of every priced GEMM on the same recipes.

        They are 0 on `recovery` and in 16 bits, and infinite on a recipe that was not measured.
        """
        default = {
            recipe.name: 0.0 if recipe.name == self.recovery or not recipe.casts else math.inf
            for recipe in self._recipes()
        }
        return {
            (name, gemm): default | nats_on
            for name, by_gemm in self.prices.items()
            for gemm, nats_on in by_gemm.items()
        }

    def _recipes(self) -> list[Recipe]:
        from gnmr.formats.recipes import RECIPES as RECIPES_OF

        return [*self.named_recipes(), RECIPES_OF["bf16"]]

    def choice(self, gemms: Sequence[str] = GEMMS, pins: Pins | None = None) -> Choice:
        """Return the cost and savings of pins by the rule of `choose`. The file's `extra` and `expected` are not read.

        Args:
            gemms: the GEMMs whose pins count.
            pins: the pins; None: those of the plan.
        """
        chosen = {
            (name, gemm): recipe
            for name, recipe_of in (self.pins if pins is None else pins).items()
            for gemm, recipe in recipe_of.items()
            if gemm in gemms
        }
        return as_choice(chosen, *self._nats_and_times, self.low)

    def share_of_all(self, choice: Choice) -> float:
        """Return the extra time of a choice as a share of the time of all GEMMs of the model.

        Args:
            choice: has its extra time as a share of the time of the GEMMs that a plan may move.
        """
        prices, times = self._nats_and_times
        all_gemms = time_of_all(times, self.low, self.rest, self.times)
        return choice.extra * time_to_move(prices, times, self.low) / all_gemms

    @cached_property
    def _nats_and_times(self) -> tuple[Prices, Times]:
        return self.nats(), self.gemm_times()

    def module_of(self, name: str) -> str | None:
        """Return the one of `modules` that holds an operator.

        Returns:
            The dotted name of the module; None if the operator is an nn.Linear.
        """
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name or None

    def threshold(self, signal: object, options: Mapping[str, Any]) -> dict[str, float]:
        """Return the option `threshold` for a controller beyond the pins.

        Args:
            signal: the controller's signal, by name or as an object.
            options: the controller's other options.

        Returns:
            {"threshold": the plan's trigger in nats} if the signal is one of prices (`IN_NATS`) and the options have
            neither a threshold nor other evidence, else an empty dict.
        """
        trigger = self.triggers.get("price")
        of_price = signal in IN_NATS and options.get("evidence", "price") == "price"
        return {"threshold": trigger} if trigger and of_price and "threshold" not in options else {}

    def text(self) -> str:
        """Return the text of the file."""
        before, after = self.expected or (None, None)
        tree = {
            "gnmr_plan": VERSION,
            "operators": {name: list(shape) for name, shape in self.operators.items()},
            **{name: getattr(self, name) for name in _PLAIN},
            "expected": None if self.expected is None else {"before": before, "after": after},
            "triggers": self.triggers or None,
            "provenance": self.provenance,
        }
        # Empty fields are left out, but an empty list of unconverted linears says that there are none.
        for key in _IF_ANY:
            if tree[key] is None or (not tree[key] and key != "unconverted"):
                del tree[key]
        lines = [
            f"  {json.dumps(key)}: " + (_lines(value) if key in _BY_LINE else json.dumps(value))
            for key, value in tree.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def refuse_other(self, where: object, operators: Shapes) -> None:
        """Refuse a model that is not the plan's.

        Args:
            where: name of the plan in the message.
            operators: {name: (in_features, out_features)} of the model.

        Raises:
            UserError: an operator is missing, new, or of another shape, or a pin names several operators.
        """
        planned, present = _bare(self.operators), _bare(operators)
        for name in (*planned, *present):
            if planned.get(name) == present.get(name):
                continue
            how = f"no {name} here" if name in planned else f"{name} only here"
            if name in planned and name in present:
                (a, b), (c, d) = planned[name], present[name]
                how = f"{name} is {a} -> {b} there, {c} -> {d} here"
            number = ""
            if len(planned) != len(present):
                number = f"{plural(len(planned), 'operator')}, here {len(present)}; "
            raise UserError(f"{where}: was made for another model ({number}{how})")
        # A pin goes by the end of a name, which has to lead to a single operator.
        index = NameIndex(operators)
        for name in _bare(self.pins):
            if len(names := index.matching(name)) > 1:
                raise UserError(f"{where}: pins.{name}: this model has several of this name ({', '.join(names[:3])})")


def read_plan(path: str | PathLike[str]) -> PinPlan:
    """Return the plan in a file, or in `PLAN_FILE` of a folder.

    Raises:
        UserError: it is not a valid plan; the line names file and key.
    """
    try:
        file = Path(path).expanduser().resolve()
        if file.is_dir():  # the out= folder of `gnmr diagnose`
            path, file = Path(path) / PLAN_FILE, file / PLAN_FILE
        raw = content(file, MAX_PLAN)
    except FileNotFoundError as error:
        raise UserError(f"plan={path}: there is no such file") from error
    except Damaged as error:
        raise UserError(str(error).replace(str(file), f"plan={path}", 1)) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"plan={path}: cannot be read ({first_line(error)})") from error
    try:
        return _parsed(json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant))
    except UserError as error:
        raise UserError(f"plan={path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"plan={path}: is not a gnmr plan ({first_line(error).removeprefix('ValueError: ')})"
        ) from error


def _parsed(tree: Any) -> PinPlan:
    if not isinstance(tree, dict) or "gnmr_plan" not in tree:
        raise ValueError("a JSON object with gnmr_plan was expected")
    bounded(tree)
    version = tree.pop("gnmr_plan")
    if version != VERSION:
        raise UserError(f"gnmr_plan={version}: this version reads {VERSION}; have `gnmr diagnose` write it anew")
    _known("", tree, _KEYS)
    if lacking := [key for key in _NEEDED if key not in tree]:
        raise UserError(f"{lacking[0]}: is missing")
    expected = tree.pop("expected", None)
    if expected is not None:
        _known("expected", expected, ("before", "after"))
        expected = expected.get("before"), expected.get("after")
    # In an optional field, null stands for the default.
    fields = {key: value for key, value in tree.items() if value is not None or key in (*_NEEDED, "budget", "extra")}
    for key in ("low", "recovery"):
        is_text = isinstance(fields[key], str) or (key == "recovery" and fields[key] is None)
        require(is_text, key, fields[key], "must be text")
    try:
        return PinPlan(expected=expected, **fields)
    except (TypeError, AttributeError) as error:
        raise ValueError(first_line(error)) from error


def _known(key: str, tree: object, keys: Iterable[str]) -> None:
    """Raise UserError if this is not a mapping with some of these keys."""
    keys = list(keys)
    require(isinstance(tree, dict), key, tree, f"must be {{{', '.join(keys)}}}")
    assert isinstance(tree, dict)
    if unknown := [key for key in tree if key not in keys]:
        raise UserError(f"{key + '.' if key else ''}{unknown[0]}: is not a key of a plan{nearest(unknown[0], keys)}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise ValueError(f"{keys.most_common(1)[0][0]!r:.80} appears twice")
    return tree


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _name(key: str, name: object) -> None:
    sound = isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and not set(name) & set("*?[]")
    require(
        sound, key, repr(name)[:80], f"an operator's name is printable, of at most {MAX_NAME} characters, no pattern"
    )


def _names(key: str, names: object) -> None:
    some = isinstance(names, list) and len(names) <= _MOST_OPERATORS
    require(some, key, "...", f"must be a list of names, {_MOST_OPERATORS:,} at most")
    for name in names:  # type: ignore[attr-defined]
        _name(key, name)


def _width(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _bare(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping under the names of our own models."""
    return {name.removeprefix("model."): value for name, value in by_name.items()}


def _lines(tree: dict[str, Any]) -> str:
    if not tree:
        return "{}"
    return "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items()) + "\n  }"
