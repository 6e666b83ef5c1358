"""Operators that are parts of a module: a linear whose weight is one of the module's parameters, or a slice of one.

A mixture of experts keeps the weights of all experts in one tensor, and `nn.MultiheadAttention` keeps the weights of
queries, keys and values in one. A `Contained` operator represents one matrix in such a tensor. It has no parameters and
is not a submodule, so `state_dict()` and `parameters()` of the model are unchanged.

The module that holds the weights is the owner. The owner's class is replaced by one that runs the owner's own `forward`
while `Calls` watches the torch functions that it calls. Products with a declared weight become passes of the operator;
everything else runs unchanged. Views, slices and casts of a declared weight are followed. The slices of a tensor are
taken by one `unbind(0)` per pass, so that the parameter gets one gradient. If a weight is used in any other way, that
use runs in high precision, and the operator then counts as never run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gnmr.conversion.int8 import Int8Linear
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.passes import Pass, begin
from gnmr.names import GEMMS

Forward: TypeAlias = Callable[..., Any]
"""A function (owner, *args, **kwargs) -> the owner's output."""


class Contained(PathLinear):
    """An operator whose weight lies in a parameter of its `owner`."""

    owner: nn.Module
    key: str
    """Name of the parameter in the owner."""
    layout: str
    """Meaning of the parameter's dimensions: o outputs, i inputs, e operators."""
    place: int | None
    """Index in dimension e; None if there is no such dimension."""
    _given: tuple[Tensor, Tensor | None] | None
    """Weight (O, I) and bias of the current pass."""

    def __init__(self, owner: nn.Module, key: str, layout: str, place: int | None) -> None:
        nn.Module.__init__(self)
        self.__dict__["owner"] = owner  # not a submodule of this one
        self.key, self.layout, self.place, self._given = key, layout, place, None
        self.out_features, self.in_features = matrix_of(self.weight, layout, place).shape

    @property
    def module(self) -> nn.Module:
        return self.owner

    @property
    def kind(self) -> str:
        return type(self.owner).__name__

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The owner's whole parameter."""
        return parameter_of(self.owner, self.key)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """Bias of the current pass, (O,), else the owner's parameter or a slice of it."""
        if self._given is not None:
            return self._given[1]
        whole = bias_of(self.owner, self.key)
        return whole if whole is None or self.place is None else whole[self.place]

    @property
    def matrix(self) -> Tensor:
        return matrix_of(self.weight, self.layout, self.place) if self._given is None else self._given[0]

    def part(self, x: Tensor) -> Tensor:
        return x if self.place is None else x[self.place]

    @property
    def given(self) -> tuple[Tensor, Tensor | None] | None:
        return self._given

    def run(self, input: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run a pass with this weight (O, I), which may be some rows of the operator's weight."""
        self._given = matrix, bias
        try:
            output: Tensor = self(input)
        finally:
            self._given = None
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_given": None}


class ContainedInt8(Contained, Int8Linear):
    """`Contained`, for a model with a recipe that multiplies integers."""


def parameter_of(module: nn.Module, key: str) -> Tensor:
    """Return a parameter by its dotted name."""
    path, _, name = key.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), name)
    return found


def bias_of(module: nn.Module, key: str) -> Tensor | None:
    """Return the bias that belongs to the parameter `key`: in_proj_bias to in_proj_weight, w1_bias to w1."""
    path, _, name = key.rpartition(".")
    other = f"{name.removesuffix('weight')}bias" if name.endswith("weight") else f"{name}_bias"
    found = getattr(module.get_submodule(path), other, None)
    return found if isinstance(found, Tensor) else None


def matrix_of(weight: Tensor, layout: str, place: int | None) -> Tensor:
    """Return the (O, I) view of a parameter in this layout, of its slice `place`."""
    if place is not None:
        weight = weight[place]
    return weight.mT if layout.endswith("io") else weight


class Owner(nn.Module):
    """Base of the classes that replace the class of a module that contains operators."""

    plain_class: type[nn.Module]
    run_forward: Forward
    path_operators: tuple[Contained, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Owner):  # as in `PathLinear.forward`
            return type(self).forward(self, *args, **kwargs)
        if torch.compiler.is_compiling() and self.path_operators[0].shared.high_precision:
            return type(self).plain_class.forward(self, *args, **kwargs)
        return self._between_graphs(args, kwargs)

    @torch.compiler.disable
    def _between_graphs(self, args: Any, kwargs: Any) -> Any:
        shared = self.path_operators[0].shared
        path = None if shared.high_precision else self.path_operators[0].low
        now = Pass(path, frozenset(), frozenset(GEMMS), shared.step, None, None, False)
        # A recomputation runs in high precision if the pass that it repeats did.
        begun = begin(self, type(self).__name__, now, side_effects=not shared.no_side_effects)
        if begun.path is None:
            return type(self).plain_class.forward(self, *args, **kwargs)
        with Calls(self.path_operators) as calls:
            found = type(self).run_forward(self, *args, **kwargs)
        calls.end()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = type(self)
        if "plain_class" not in vars(made):
            return super().__reduce_ex__(protocol)
        return _blank, (made.plain_class, made.run_forward), self.__dict__.copy()


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the owner's own class."""
    made: Any = type(module)
    return made.plain_class.forward(module, *args, **kwargs)


_OWNERS: dict[tuple[type[nn.Module], Forward], type[Owner]] = {}


def owner_class(cls: type[nn.Module], forward: Forward = own_forward) -> type[Owner]:
    """Return the class, under the same name, that owners of class `cls` get."""
    if (cls, forward) not in _OWNERS:
        more = {"plain_class": cls, "run_forward": staticmethod(forward), "__module__": cls.__module__}
        _OWNERS[cls, forward] = type(cls.__name__, (Owner, cls), more)
    return _OWNERS[cls, forward]


def _blank(cls: type[nn.Module], forward: Forward) -> Owner:
    """Return an owner without attributes, for pickle and deepcopy."""
    made = owner_class(cls, forward)
    return made.__new__(made)


class _Held(NamedTuple):
    """A tensor that holds the weights of operators."""

    tensor: Tensor
    operators: dict[int | None, Contained]
    """Operators by slice; the key None means that the whole tensor, or some of its outputs, belongs to one operator."""
    transposed: bool
    """Whether the last dimension is the outputs."""

    @property
    def stacked(self) -> bool:
        return self.tensor.dim() == 3

    def fits(self, x: object, transposed: bool) -> bool:
        """Return whether a product with `x` (..., I) contracts the inputs of the single operator."""
        right = not self.stacked and self.transposed is transposed and isinstance(x, Tensor) and x.dim() > 0
        return right and x.shape[-1] == self.operators[None].in_features  # type: ignore[attr-defined]


class Calls(TorchFunctionMode):
    """Inside this mode, products with the operators' weights are passes of these operators."""

    def __init__(self, operators: tuple[Contained, ...]) -> None:
        super().__init__()
        self._operators = operators
        self._known: dict[int, _Held] = {}
        self._slices: dict[int, tuple[Tensor, ...]] = {}
        self._ran: set[Contained] = set()
        of: dict[tuple[str, str], dict[int | None, Contained]] = {}
        for operator in operators:
            of.setdefault((operator.key, operator.layout), {})[operator.place] = operator
        for (key, layout), own in of.items():
            self._hold(_Held(parameter_of(operators[0].owner, key), own, layout.endswith("io")))

    def end(self) -> None:
        """Record that an expert without tokens ran with none, if another expert of its tensor ran."""
        ran = {operator.key for operator in self._ran}
        for operator in self._operators:
            keeps = torch.is_grad_enabled() and operator.weight.requires_grad
            if keeps and operator.key in ran and operator not in self._ran:
                operator.read, operator._node = (0, operator.operator_name, operator.weight.dtype), None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(one) in self._known for one in (*args, *kwargs.values())):
            name = getattr(func, "__name__", "").partition(".")[0]
            if args and (handle := _HANDLES.get(name)) is not None:
                found = handle(self, func, args, kwargs)
                if found is not NotImplemented:
                    return found
        return func(*args, **kwargs)

    def _hold(self, held: _Held) -> Tensor:
        self._known[id(held.tensor)] = held  # keeps the tensor alive, and so its id valid
        return held.tensor

    def _of(self, x: object) -> _Held | None:
        return self._known.get(id(x))

    def _run(self, held: _Held, x: Tensor, bias: Tensor | None = None) -> Tensor:
        operator = held.operators[None]
        self._ran.add(operator)
        return operator.run(x, held.tensor.mT if held.transposed else held.tensor, bias)

    def _slice(self, held: _Held, place: int) -> _Held | None:
        """Return one operator's part of a stacked tensor, or None if it belongs to no operator."""
        own = id(held.tensor)
        if own not in self._slices:
            self._slices[own] = held.tensor.unbind(0)
        operator = held.operators.get(place)
        return None if operator is None else _Held(self._slices[own][place], {None: operator}, held.transposed)

    def _element(self, held: _Held, place: int) -> Tensor:
        part = self._slice(held, place)
        return self._slices[id(held.tensor)][place] if part is None else self._hold(part)

    # ---- views and casts ----

    def _same(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow a cast, or another view of the whole tensor."""
        held, found = self._of(args[0]), func(*args, **kwargs)
        if held is not None and isinstance(found, Tensor) and found.shape == held.tensor.shape:
            self._hold(held._replace(tensor=found))
        return found

    def _turned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow an exchange of the last two dimensions."""
        if func.__name__ == "__get__" and not any(func == one for one in _TURNING):
            return NotImplemented
        held, found = self._of(args[0]), func(*args, **kwargs)
        if held is not None and isinstance(found, Tensor) and found.dim() == held.tensor.dim():
            turned = held.tensor.mT
            if found.shape == turned.shape and found.stride() == turned.stride():
                self._hold(held._replace(tensor=found, transposed=not held.transposed))
        return found

    def _parted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow a selection of one operator of several, or of some outputs of one."""
        held = self._of(args[0])
        if held is None:
            return NotImplemented
        name, at = func.__name__, args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if held.stacked:
            if name == "unbind" and at == 0:
                return tuple(self._element(held, place) for place in range(len(held.tensor)))
            single = isinstance(at, int) or (isinstance(at, Tensor) and at.dim() == 0 and not at.is_floating_point())
            if name in ("__getitem__", "select") and single and not isinstance(at, bool) and len(args) == 2:
                return self._element(held, range(len(held.tensor))[int(at)])
            return NotImplemented
        found = func(*args, **kwargs)
        inputs = held.operators[None].in_features
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, Tensor) and part.dim() == 2 and part.shape[-2 if held.transposed else -1] == inputs:
                self._hold(held._replace(tensor=part))
        return found

    # ---- products ----

    def _linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        held, x = self._of(given["weight"]), given["input"]
        if held is None or not held.fits(x, transposed=False):
            return NotImplemented
        return self._run(held, x, given.get("bias"))

    def _matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return NotImplemented
        x, held = args[0], self._of(args[1])
        if held is not None and held.fits(x, transposed=True):
            return self._run(held, x)
        if held is not None and held.stacked and held.transposed and isinstance(x, Tensor) and x.dim() == 3:
            return torch.stack([self._product(held, i, part) for i, part in enumerate(x.unbind(0))])
        held, x = self._of(args[0]), args[1]  # W x, as in Mamba's projections of time steps
        if held is not None and isinstance(x, Tensor) and x.dim() > 1 and held.fits(x.mT, transposed=False):
            return self._run(held, x.mT).mT
        return NotImplemented

    def _addmm(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 3 or kwargs or (held := self._of(args[2])) is None or not held.fits(args[1], transposed=True):
            return NotImplemented
        return self._run(held, args[1], args[0])

    def _grouped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Multiply rows (T, I), sorted by expert, by (E, I, O), one expert at a time. Waits for the device."""
        given = dict(zip(("mat_a", "mat_b", "offs"), args, strict=False)) | kwargs
        x, held, ends = args[0], self._of(given.get("mat_b", given.get("mat2"))), given.get("offs")
        if held is None or not held.transposed or not held.stacked or x.dim() != 2 or not isinstance(ends, Tensor):
            return NotImplemented
        if given.get("bias") is not None or given.get("out_dtype") not in (None, x.dtype):
            return NotImplemented
        places = [0, *ends.tolist()]
        sizes = [end - start for start, end in pairwise(places)]
        *parts, rest = x.split([*sizes, len(x) - places[-1]])
        with torch.autocast(x.device.type, enabled=False):  # as grouped products do
            found = [self._product(held, i, part) for i, part in enumerate(parts)]
        return torch.cat([*found, rest.new_zeros(len(rest), held.tensor.shape[-1])])

    def _product(self, held: _Held, place: int, x: Tensor) -> Tensor:
        part = self._slice(held, place)
        return x @ self._slices[id(held.tensor)][place] if part is None else self._run(part, x)

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the body of a Python function that is one call for torch's overrides, so that its linears are seen."""
        with self:
            return _attention_body(*args, **kwargs)


_TURNING = [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]
_HANDLES: dict[str, Callable[[Calls, Any, Any, Any], Any]] = {
    **dict.fromkeys(("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous"), Calls._same),
    **dict.fromkeys(("t", "transpose", "swapaxes", "swapdims", "permute", "__get__"), Calls._turned),
    **dict.fromkeys(("__getitem__", "select", "unbind", "chunk", "split"), Calls._parted),
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), Calls._matmul),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), Calls._grouped),
    "linear": Calls._linear,
    "addmm": Calls._addmm,
    "multi_head_attention_forward": Calls._attention,
}
_attention_body = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
