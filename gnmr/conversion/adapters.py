"""Find the linear operators of a model: `nn.Linear` modules, and the weights that adapters declare in other modules.

An adapter names the parameters of a module class that are weights of linear operators, and their layouts:

    oi, io      one matrix: outputs x inputs, as `nn.Linear`, or inputs x outputs
    eoi, eio    one such matrix for each of several experts

    from gnmr.conversion.adapters import register
    register(MyExperts, w1="eoi", w2="eoi")

The module's own `forward` runs unchanged. Its products with these weights become passes of the operators;
`gnmr.conversion.contained` lists the supported ways to write a product. There are adapters for `Conv1D`, the experts
and Falcon's linear of transformers, the grouped experts of torchtitan, and `nn.MultiheadAttention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gnmr.conversion.contained import (
    Contained,
    ContainedInt8,
    Forward,
    Owner,
    own_forward,
    owner_class,
    parameter_of,
)
from gnmr.conversion.linear import exchange_class
from gnmr.conversion.unit_names import operator_names
from gnmr.options import one_of

LAYOUTS = ("oi", "io", "eoi", "eio")
Layouts: TypeAlias = Mapping[str, str]
"""Layout by parameter name."""


@dataclass(frozen=True)
class _Adapter:
    kind: type[nn.Module] | str | Callable[[type], bool]
    """The class, its full name (so that its library need not be imported), or a predicate on classes."""
    layouts: Layouts | Callable[[Any], Layouts]
    forward: Forward

    def fits(self, cls: type) -> bool:
        if isinstance(self.kind, type | str):
            return any(self.kind in (one, f"{one.__module__}.{one.__qualname__}") for one in cls.__mro__)
        return self.kind(cls)


_ADAPTERS: list[_Adapter] = []
"""The registered adapters; the last one that fits is used."""


def register(
    kind: type[nn.Module] | str,
    layouts: Layouts | Callable[[Any], Layouts] | None = None,
    *,
    forward: Forward | None = None,
    **named: str,
) -> None:
    """Declare the linear operators in modules of the class `kind` and its subclasses.

    An operator is named after its module and its parameter: `self_attn.in_proj` for `in_proj_weight`. If the parameter
    is called `weight`, the operator has the module's name. The fourth expert's part of `w1` is
    `layers.0.mlp.experts.3.w1`, whether the module is `layers.0.mlp` or `layers.0.mlp.experts`. The bias of `w1` is
    `w1_bias` and the bias of `in_proj_weight` is `in_proj_bias`, if the module has them.

    Args:
        kind: the class, or its full name ("mylib.layers.MyExperts").
        layouts: {parameter: layout}, or a function of the module that returns it. Parameters of submodules have dotted
            names. Parameters that are None are skipped.
        forward: a function (module, *args, **kwargs) that replaces the module's forward. It is needed if that forward
            hides its products from Python, for example in a custom kernel.
        named: as `layouts`.

    Raises:
        ValueError: if a layout is unknown, no parameter is named, or `kind` is `nn.Linear` itself.
    """
    given = layouts if callable(layouts) else {**(layouts or {}), **named}
    if not callable(given):
        if not given:
            raise ValueError("layouts: name at least one parameter, as w1='eoi'")
        for key, layout in given.items():
            one_of(LAYOUTS, **{key: layout})
    if kind is nn.Linear or not (isinstance(kind, str) or (inspect.isclass(kind) and issubclass(kind, nn.Module))):
        raise ValueError(f"kind={kind!r}: must be a class of modules other than nn.Linear, or its full name")
    _ADAPTERS.append(_Adapter(kind, given, forward or own_forward))


@dataclass(frozen=True, eq=False)
class Found:
    """A linear operator of a model, converted or not."""

    path: str
    """The name of the module in the model."""
    module: nn.Module
    """The linear itself, or the module that contains it."""
    key: str
    layout: str
    place: int | None
    in_features: int
    out_features: int
    forward: Forward | None
    """The forward to run in the containing module; None if the module is an `nn.Linear`."""

    @property
    def kind(self) -> str:
        """Class name of the module, for display."""
        return type(self.module).__name__

    @property
    def name(self) -> str:
        label = self.key.removesuffix("weight").rstrip("._")
        named = operator_names([self.path])[0].endswith("experts")  # peft appends base_layer to the name
        stack = "experts" if self.place is not None and not named else ""
        return ".".join(str(part) for part in (self.path, stack, self.place, label) if part not in ("", None))

    @property
    def weight(self) -> Tensor:
        """The parameter that holds the operator's weight."""
        return parameter_of(self.module, self.key)


def operators_in(model: nn.Module) -> dict[str, Found]:
    """Return all linear operators by name, in module order. Raises ValueError if a module and its adapter disagree."""
    found: dict[str, Found] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        adapter = next((one for one in reversed(_ADAPTERS) if one.fits(type(module))), None)
        if adapter is not None:
            own = list(_contained(path, module, adapter))
            inside |= {module.get_submodule(one.key.rpartition(".")[0]) for one in own}
        elif isinstance(module, nn.Linear):
            own = [Found(path, module, "weight", "oi", None, module.in_features, module.out_features, None)]
        else:
            continue
        found |= {one.name: one for one in own}
    return found


def _contained(path: str, module: nn.Module, adapter: _Adapter) -> Iterator[Found]:
    layouts = adapter.layouts(module) if callable(adapter.layouts) else adapter.layouts
    shapes: list[tuple[str, str, torch.Size]] = []
    for key, layout in layouts.items():
        try:
            weight = parameter_of(module, key)
        except AttributeError as error:
            raise ValueError(f"{path}: its adapter declares {key}, and {type(module).__name__} has none") from error
        if weight is None:
            continue
        if not isinstance(weight, Tensor) or weight.dim() != len(layout):
            what = f"has {weight.dim()} dimensions" if isinstance(weight, Tensor) else "is not a tensor"
            raise ValueError(f"{path}.{key}: its adapter says {layout}, and it {what}")
        shapes.append((key, layout, weight.shape))
    experts = max((shape[0] for _, layout, shape in shapes if layout[0] == "e"), default=0)
    for place in (None, *range(experts)):
        for key, layout, shape in shapes:
            if (layout[0] == "e") is (place is not None) and (place is None or place < shape[0]):
                sizes = dict(zip(layout, shape, strict=True))
                yield Found(path, module, key, layout, place, sizes["i"], sizes["o"], adapter.forward)


def contain(found: Found, integer: bool) -> Contained:
    """Replace the class of the module of `found` by an `Owner` class, and return an operator without paths."""
    module, forward = found.module, found.forward
    assert forward is not None
    if not isinstance(module, Owner):
        exchange_class(module, owner_class(type(module), forward))
        module.__dict__["path_operators"] = ()
    assert isinstance(module, Owner)
    operator = (ContainedInt8 if integer else Contained)(module, found.key, found.layout, found.place)
    module.path_operators += (operator,)
    return operator


def release(owner: Owner) -> None:
    """Give an owner its original class back."""
    del owner.path_operators
    exchange_class(owner, type(owner).plain_class)


# ---- the known ones ----


def _is_experts_of_transformers(cls: type) -> bool:
    """Return whether `use_experts_implementation` of transformers 5 made the class."""
    found = (one for one in cls.__mro__ if "_apply_gate" in vars(one))
    return any(one.__module__.startswith("transformers.") for one in found)


def _layouts_of_experts(module: nn.Module) -> Layouts:
    layout = "eio" if getattr(module, "is_transposed", False) else "eoi"
    kinds = ("gate_up_proj", "up_proj", "down_proj")
    return {name: layout for name in kinds if isinstance(own := getattr(module, name, None), Tensor) and own.dim() == 3}


def _is_experts_of_torchtitan(cls: type) -> bool:
    return any(one.__module__.startswith("torchtitan.") and one.__name__ == "GroupedExperts" for one in cls.__mro__)


def _three_dimensional(module: nn.Module) -> Layouts:
    return {name: "eoi" for name, own in module.named_parameters(recurse=False) if own.dim() == 3}


def _eager_or_grouped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the implementation that the config names if its products are visible from Python, else the eager one."""
    made: Any = type(module)
    forward = made.plain_class.forward
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) not in (None, "eager", "grouped_mm"):
        forward = inspect.unwrap(forward)
    return forward(module, *args, **kwargs)


_ADAPTERS.append(_Adapter(_is_experts_of_transformers, _layouts_of_experts, _eager_or_grouped))
register("transformers.pytorch_utils.Conv1D", weight="io")
register("transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts", weight="eoi")
register("transformers.models.falcon.modeling_falcon.FalconLinear", weight="oi")
register("transformers.models.llama4.modeling_llama4.Llama4TextExperts", gate_up_proj="eio", down_proj="eio")
_ADAPTERS.append(_Adapter(_is_experts_of_torchtitan, _three_dimensional, own_forward))
register(
    nn.MultiheadAttention,
    {f"{_name}_proj_weight": "oi" for _name in ("in", "q", "k", "v")} | {"out_proj.weight": "oi"},
)
