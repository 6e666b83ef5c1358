"""Find the linear operators of a model: `nn.Linear` modules, and the weights that adapters declare in other modules.

An adapter names the parameters of a module class that are weights of linear operators, and their layouts:

    oi, io      one matrix: outputs x inputs, as `nn.Linear`, or inputs x outputs
    eoi, eio    one such matrix for each of E experts

    from gnmr.conversion.adapters import register
    register(MyExperts, w1="eoi", w2="eoi")

A mixture of experts keeps the weights of all experts in one tensor, and `nn.MultiheadAttention` keeps the weights of
queries, keys and values in one. A `Contained` operator represents one matrix in such a tensor. It has no parameters and
is not a submodule, so `state_dict()` and `parameters()` of the model are unchanged.

The module that holds the weights is the owner. Its class is replaced by one that runs the owner's own `forward` while
`ProductMode` watches the torch functions that it calls. Products with a declared weight become passes of the operator;
everything else runs unchanged. Views, slices and casts of a declared weight are followed. The slices of a tensor are
taken by one `unbind(0)` per pass, so that the parameter gets one gradient. If a weight is used in any other way, that
use runs in high precision, and the operator then counts as never run.

There are adapters for `Conv1D`, the experts and Falcon's linear of transformers, the grouped experts of torchtitan, and
`nn.MultiheadAttention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gnmr.compiler import between_graphs, compiler_loaded
from gnmr.conversion.int8 import Int8Linear
from gnmr.conversion.linear import PathLinear, exchange_class
from gnmr.conversion.passes import Pass, begin
from gnmr.conversion.unit_names import operator_names
from gnmr.names import GEMMS
from gnmr.options import one_of

LAYOUTS = ("oi", "io", "eoi", "eio")
Layouts: TypeAlias = Mapping[str, str]
"""Layout by parameter name."""
Forward: TypeAlias = Callable[..., Any]
"""A function (owner, *args, **kwargs) -> the owner's output."""

# ---- which parameters are weights of linear operators ----


@dataclass(frozen=True)
class _Adapter:
    applies_to: type[nn.Module] | str | Callable[[type], bool]
    """The class, its full name (so that its library need not be imported), or a predicate on classes."""
    layouts: Layouts | Callable[[Any], Layouts]
    forward: Forward

    def fits(self, cls: type) -> bool:
        if isinstance(self.applies_to, type | str):
            return any(self.applies_to in (base, f"{base.__module__}.{base.__qualname__}") for base in cls.__mro__)
        return self.applies_to(cls)


_ADAPTERS: list[_Adapter] = []
"""The registered adapters; the last one that fits is used."""


def register(
    kind: type[nn.Module] | str,
    layouts: Layouts | Callable[[Any], Layouts] | None = None,
    *,
    forward: Forward | None = None,
    **layout_by_parameter: str,
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
        layout_by_parameter: as `layouts`.

    Raises:
        ValueError: if a layout is unknown, no parameter is named, or `kind` is `nn.Linear` itself.
    """
    # A function's layouts are checked when a model is searched.
    if not callable(layouts):
        layouts = {**(layouts or {}), **layout_by_parameter}
        if not layouts:
            raise ValueError("layouts: name at least one parameter, as w1='eoi'")
        one_of(LAYOUTS, **layouts)
    if kind is nn.Linear or not (isinstance(kind, str) or (inspect.isclass(kind) and issubclass(kind, nn.Module))):
        raise ValueError(f"kind={kind!r}: must be a class of modules other than nn.Linear, or its full name")
    _ADAPTERS.append(_Adapter(kind, layouts, forward or run_plain_forward))


@dataclass(frozen=True, eq=False)
class LinearOperator:
    """A linear operator of a model, converted or not."""

    path: str
    """The name of the module in the model."""
    module: nn.Module
    """The linear itself, or the module that contains it."""
    parameter_name: str
    layout: str
    expert: int | None
    """Index in dimension e of the parameter; None if there is no such dimension."""
    in_features: int
    out_features: int
    forward: Forward | None
    """The forward to run in the containing module; None if the module is an `nn.Linear`."""

    @property
    def class_name(self) -> str:
        """Class name of the module, for display."""
        return type(self.module).__name__

    @property
    def name(self) -> str:
        """The name of the operator in the model; see `register`."""
        label = self.parameter_name.removesuffix("weight").rstrip("._")
        words = [self.path]
        if self.expert is not None:
            if not operator_names([self.path])[0].endswith("experts"):  # peft appends base_layer to the name
                words.append("experts")
            words.append(str(self.expert))
        return ".".join(word for word in (*words, label) if word)

    @property
    def weight(self) -> Tensor:
        """The parameter that holds the operator's weight."""
        return parameter_of(self.module, self.parameter_name)


def operators_in(model: nn.Module) -> dict[str, LinearOperator]:
    """Return all linear operators by name, in module order.

    Raises:
        ValueError: if an adapter declares a parameter that its module lacks, or a layout that does not fit it.
    """
    operators: dict[str, LinearOperator] = {}
    declared_submodules: set[nn.Module] = set()
    for path, module in model.named_modules():
        # `out_proj` of an attention is an nn.Linear, but its weight is read without a call.
        if module in declared_submodules:
            continue
        adapter = next((adapter for adapter in reversed(_ADAPTERS) if adapter.fits(type(module))), None)
        if adapter is not None:
            for operator in _declared_operators(path, module, adapter):
                operators[operator.name] = operator
                declared_submodules.add(module.get_submodule(operator.parameter_name.rpartition(".")[0]))
        elif isinstance(module, nn.Linear):
            linear = LinearOperator(path, module, "weight", "oi", None, module.in_features, module.out_features, None)
            operators[linear.name] = linear
    return operators


def _declared_operators(path: str, module: nn.Module, adapter: _Adapter) -> Iterator[LinearOperator]:
    """Yield the operators of a module: those of single matrices, then all of expert 0, all of expert 1, ..."""
    layouts = adapter.layouts(module) if callable(adapter.layouts) else adapter.layouts
    shapes: list[tuple[str, str, torch.Size]] = []
    for name, layout in layouts.items():
        try:
            weight = parameter_of(module, name)
        except AttributeError as error:
            raise ValueError(f"{path}: its adapter declares {name}, and {type(module).__name__} has none") from error
        if weight is None:
            continue
        if not isinstance(weight, Tensor):
            raise ValueError(f"{path}.{name}: its adapter says {layout}, and it is not a tensor")
        if weight.dim() != len(layout):
            raise ValueError(f"{path}.{name}: its adapter says {layout}, and it has {weight.dim()} dimensions")
        shapes.append((name, layout, weight.shape))
    # Experts come one by one, as they would if each were a module.
    num_experts = max((shape[0] for _, layout, shape in shapes if layout[0] == "e"), default=0)
    for expert in (None, *range(num_experts)):
        for name, layout, shape in shapes:
            sizes = dict(zip(layout, shape, strict=True))
            if ("e" not in sizes) if expert is None else (expert < sizes.get("e", 0)):
                yield LinearOperator(path, module, name, layout, expert, sizes["i"], sizes["o"], adapter.forward)


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """Return a parameter by its dotted name."""
    path, _, attribute = name.rpartition(".")
    parameter: Tensor = getattr(module.get_submodule(path), attribute)
    return parameter


def bias_of(module: nn.Module, name: str) -> Tensor | None:
    """Return the bias of the weight `name`: in_proj_bias of in_proj_weight, w1_bias of w1.

    Returns: the parameter, (O,) or with a dimension of experts before; None: there is none.
    """
    path, _, attribute = name.rpartition(".")
    bias_name = f"{attribute.removesuffix('weight')}bias" if attribute.endswith("weight") else f"{attribute}_bias"
    bias = getattr(module.get_submodule(path), bias_name, None)
    return bias if isinstance(bias, Tensor) else None


def matrix_of(weight: Tensor, layout: str, expert: int | None) -> Tensor:
    """Return the matrix (O, I) of an operator, a view of its parameter.

    Args:
        weight: the parameter, with the dimensions of `layout`.
        layout: oi, io, eoi or eio.
        expert: index in dimension e; None if there is no such dimension.
    """
    if expert is not None:
        weight = weight[expert]
    return weight.mT if layout.endswith("io") else weight


# ---- operators and their owner ----


class Contained(PathLinear):
    """An operator whose weight lies in a parameter of its `owner`."""

    owner: nn.Module
    parameter_name: str
    layout: str
    expert: int | None
    _given: tuple[Tensor, Tensor | None] | None
    """Weight (O, I) and bias of the current pass."""

    def __init__(self, owner: nn.Module, parameter_name: str, layout: str, expert: int | None) -> None:
        nn.Module.__init__(self)
        self.__dict__["owner"] = owner  # not a submodule of this one
        self.parameter_name, self.layout, self.expert, self._given = parameter_name, layout, expert, None
        self.out_features, self.in_features = matrix_of(self.weight, layout, expert).shape

    @property
    def module(self) -> nn.Module:
        return self.owner

    @property
    def kind(self) -> str:
        return type(self.owner).__name__

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The owner's whole parameter."""
        return parameter_of(self.owner, self.parameter_name)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """Bias of the current pass, (O,), else the owner's parameter or a slice of it."""
        if self._given is not None:
            return self._given[1]
        bias = bias_of(self.owner, self.parameter_name)
        return bias if bias is None or self.expert is None else bias[self.expert]

    @property
    def matrix(self) -> Tensor:
        return matrix_of(self.weight, self.layout, self.expert) if self._given is None else self._given[0]

    def part(self, x: Tensor) -> Tensor:
        """Return this operator's part of a tensor in the shape of the owner's parameter, such as a gradient.

        Returns: the expert's slice or all of it, in the layout of the parameter.
        """
        return x if self.expert is None else x[self.expert]

    @property
    def given(self) -> tuple[Tensor, Tensor | None] | None:
        return self._given

    def run(self, input: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run a pass.

        Args:
            input: (..., I).
            matrix: the weight (O, I), which may be some rows of the operator's weight.
            bias: (O,) or None.

        Returns:
            (..., O).
        """
        # `PathLinear.forward` reads the weight and bias from `matrix` and `bias`.
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


class WeightOwner(nn.Module):
    """Base of the classes that replace the class of a module that contains operators."""

    plain_class: type[nn.Module]
    run_forward: Forward
    path_operators: tuple[Contained, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward with the operators on their paths, between the graphs of torch.compile.

        Args:
            args: as the replaced class takes them.
            kwargs: as the replaced class takes them.
        """
        if not isinstance(self, WeightOwner):  # as in `PathLinear.forward`
            return type(self).forward(self, *args, **kwargs)
        if torch.compiler.is_compiling() and self.path_operators[0].shared.high_precision:
            return type(self).plain_class.forward(self, *args, **kwargs)
        return self._between_graphs(args, kwargs) if compiler_loaded() else self._on_path(args, kwargs)

    def _on_path(self, args: Any, kwargs: Any) -> Any:
        shared = self.path_operators[0].shared
        path = None if shared.high_precision else self.path_operators[0].low
        now = Pass(path, frozenset(), frozenset(GEMMS), shared.step, None, None, False)
        # A recomputation runs in high precision if the pass that it repeats did.
        begun = begin(self, type(self).__name__, now, side_effects=not shared.no_side_effects)
        if begun.path is None:
            return type(self).plain_class.forward(self, *args, **kwargs)
        with ProductMode(self.path_operators) as products:
            output = type(self).run_forward(self, *args, **kwargs)
        products.end()
        return output

    _between_graphs = between_graphs(_on_path)

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        if "plain_class" not in vars(cls):
            return super().__reduce_ex__(protocol)
        return _blank_owner, (cls.plain_class, cls.run_forward), self.__dict__.copy()


_OWNER_CLASSES: dict[tuple[type[nn.Module], Forward], type[WeightOwner]] = {}


def _owner_class(cls: type[nn.Module], forward: Forward) -> type[WeightOwner]:
    """Return the class, under the same name, that owners of class `cls` get."""
    if (cls, forward) not in _OWNER_CLASSES:
        # The same name and module, so that messages show the user's class.
        attributes = {"plain_class": cls, "run_forward": staticmethod(forward), "__module__": cls.__module__}
        _OWNER_CLASSES[cls, forward] = type(cls.__name__, (WeightOwner, cls), attributes)
    return _OWNER_CLASSES[cls, forward]


def _blank_owner(cls: type[nn.Module], forward: Forward) -> WeightOwner:
    """Return an owner without attributes, for pickle and deepcopy."""
    owner_class = _owner_class(cls, forward)
    return owner_class.__new__(owner_class)


def contain(operator: LinearOperator, integer: bool) -> Contained:
    """Make an owner of the operator's module, and return an operator without paths.

    Args:
        operator: an operator whose module is not a linear itself.
        integer: whether a recipe of the model multiplies integers.
    """
    module, forward = operator.module, operator.forward
    assert forward is not None
    if not isinstance(module, WeightOwner):
        exchange_class(module, _owner_class(type(module), forward))
        module.__dict__["path_operators"] = ()
    assert isinstance(module, WeightOwner)
    operator_class = ContainedInt8 if integer else Contained
    contained = operator_class(module, operator.parameter_name, operator.layout, operator.expert)
    module.path_operators += (contained,)
    return contained


def release(owner: WeightOwner) -> None:
    """Give an owner its original class back."""
    del owner.path_operators
    exchange_class(owner, type(owner).plain_class)


def run_plain_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the owner's original class."""
    owner_class: Any = type(module)
    return owner_class.plain_class.forward(module, *args, **kwargs)


# ---- products with a weight become passes of its operator ----


class _WeightTensor(NamedTuple):
    """A declared parameter, or a view or cast of one."""

    tensor: Tensor
    operators: dict[int | None, Contained]
    """Operators by slice; the key None means that the whole tensor, or some of its outputs, belongs to one operator."""
    transposed: bool
    """Whether the last dimension is the outputs."""

    @property
    def stacked(self) -> bool:
        return self.tensor.dim() == 3

    def contracts(self, x: object, transposed: bool) -> bool:
        """Return whether a product with `x` (..., I) contracts the inputs of the single operator."""
        if self.stacked or self.transposed is not transposed or not isinstance(x, Tensor) or x.dim() == 0:
            return False
        return x.shape[-1] == self.operators[None].in_features


class ProductMode(TorchFunctionMode):
    """Inside this mode, products with the operators' weights are passes of these operators.

    A handler gets (function, args, kwargs) and returns the result, or NotImplemented if the function is to run as it
    is. A tensor is known by its id, which stays valid because its `_WeightTensor` keeps it alive.
    """

    def __init__(self, operators: tuple[Contained, ...]) -> None:
        super().__init__()
        self._operators = operators
        self._weights: dict[int, _WeightTensor] = {}
        self._slices: dict[int, tuple[Tensor, ...]] = {}
        """The slices of each stacked tensor, by its id."""
        self._ran: set[Contained] = set()
        by_parameter: dict[tuple[str, str], dict[int | None, Contained]] = {}
        for operator in operators:
            by_parameter.setdefault((operator.parameter_name, operator.layout), {})[operator.expert] = operator
        for (name, layout), by_expert in by_parameter.items():
            parameter = parameter_of(operators[0].owner, name)
            self._follow(_WeightTensor(parameter, by_expert, layout.endswith("io")))

    def end(self) -> None:
        """Record that an expert without tokens ran with none, if another expert of its tensor ran."""
        # Without this, an expert that no token reached would look as if it had never run.
        ran = {operator.parameter_name for operator in self._ran}
        for operator in self._operators:
            keeps = torch.is_grad_enabled() and operator.weight.requires_grad
            if keeps and operator.parameter_name in ran and operator not in self._ran:
                operator.read, operator._node = (0, operator.operator_name, operator.weight.dtype), None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and any(id(argument) in self._weights for argument in (*args, *kwargs.values())):
            handler = _HANDLERS.get(getattr(func, "__name__", "").partition(".")[0])
            output = NotImplemented if handler is None else handler(self, func, args, kwargs)
            if output is not NotImplemented:
                return output
        return func(*args, **kwargs)

    def _follow(self, weight: _WeightTensor) -> Tensor:
        self._weights[id(weight.tensor)] = weight
        return weight.tensor

    def _weight_of(self, x: object) -> _WeightTensor | None:
        return self._weights.get(id(x))

    def _run(self, weight: _WeightTensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        operator = weight.operators[None]
        self._ran.add(operator)
        return operator.run(x, weight.tensor.mT if weight.transposed else weight.tensor, bias)

    def _slice(self, weight: _WeightTensor, expert: int) -> tuple[Tensor, _WeightTensor | None]:
        """Return a slice of a stacked tensor, and the same as a weight; None: it belongs to no operator."""
        if id(weight.tensor) not in self._slices:
            self._slices[id(weight.tensor)] = weight.tensor.unbind(0)
        tensor, operator = self._slices[id(weight.tensor)][expert], weight.operators.get(expert)
        return tensor, None if operator is None else _WeightTensor(tensor, {None: operator}, weight.transposed)

    def _element(self, weight: _WeightTensor, expert: int) -> Tensor:
        tensor, weight_slice = self._slice(weight, expert)
        return tensor if weight_slice is None else self._follow(weight_slice)

    # views and casts

    def _same_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow a cast, or another view of the whole tensor."""
        weight, output = self._weight_of(args[0]), func(*args, **kwargs)
        if weight is not None and isinstance(output, Tensor) and output.shape == weight.tensor.shape:
            self._follow(weight._replace(tensor=output))
        return output

    def _transpose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow an exchange of the last two dimensions."""
        if func.__name__ == "__get__" and not any(func == getter for getter in _TRANSPOSING_GETTERS):
            return NotImplemented
        weight, output = self._weight_of(args[0]), func(*args, **kwargs)
        if weight is not None and isinstance(output, Tensor) and output.dim() == weight.tensor.dim():
            # A permutation of a square matrix has the same shape, so the strides decide too.
            transposed = weight.tensor.mT
            if output.shape == transposed.shape and output.stride() == transposed.stride():
                self._follow(weight._replace(tensor=output, transposed=not weight.transposed))
        return output

    def _select(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow a selection of one expert, or of some outputs of one operator."""
        weight = self._weight_of(args[0])
        if weight is None:
            return NotImplemented
        name, index = func.__name__, args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if weight.stacked:
            if name == "unbind" and index == 0:
                return tuple(self._element(weight, expert) for expert in range(len(weight.tensor)))
            if isinstance(index, Tensor):
                is_index = index.dim() == 0 and not index.is_floating_point()
            else:
                is_index = isinstance(index, int) and not isinstance(index, bool)
            if name in ("__getitem__", "select") and is_index and len(args) == 2:
                return self._element(weight, range(len(weight.tensor))[int(index)])
            return NotImplemented
        output = func(*args, **kwargs)
        # A part with all inputs and some outputs is still a linear: q, k and v of `in_proj_weight`.
        inputs_dim = -2 if weight.transposed else -1
        for view in output if isinstance(output, tuple) else (output,):
            keeps_inputs = isinstance(view, Tensor) and view.dim() == 2
            if keeps_inputs and view.shape[inputs_dim] == weight.operators[None].in_features:
                self._follow(weight._replace(tensor=view))
        return output

    # products

    def _linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        weight, x = self._weight_of(arguments["weight"]), arguments["input"]
        if weight is None or not weight.contracts(x, transposed=False):
            return NotImplemented
        return self._run(weight, x, arguments.get("bias"))

    def _matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return NotImplemented
        x, weight = args[0], self._weight_of(args[1])
        if weight is not None and weight.contracts(x, transposed=True):
            return self._run(weight, x)
        if weight is not None and weight.stacked and weight.transposed and isinstance(x, Tensor) and x.dim() == 3:
            return torch.stack([self._product(weight, expert, rows) for expert, rows in enumerate(x.unbind(0))])
        weight, x = self._weight_of(args[0]), args[1]  # W x, as in Mamba's projections of time steps
        if weight is not None and isinstance(x, Tensor) and x.dim() > 1 and weight.contracts(x.mT, transposed=False):
            return self._run(weight, x.mT).mT
        return NotImplemented

    def _addmm(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 3 or kwargs:
            return NotImplemented
        bias, x, weight = args[0], args[1], self._weight_of(args[2])
        if weight is None or not weight.contracts(x, transposed=True):
            return NotImplemented
        return self._run(weight, x, bias)

    def _grouped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Multiply rows (T, I), sorted by expert, by (E, I, O), one expert at a time. Waits for the device."""
        # torch names these arguments otherwise in its two functions.
        arguments = dict(zip(("mat_a", "mat_b", "offs"), args, strict=False)) | kwargs
        x, ends = args[0], arguments.get("offs")
        weight = self._weight_of(arguments.get("mat_b", arguments.get("mat2")))
        if weight is None or not weight.transposed or not weight.stacked or x.dim() != 2:
            return NotImplemented
        # Other variants of grouped products run in high precision.
        if not isinstance(ends, Tensor) or arguments.get("bias") is not None:
            return NotImplemented
        if arguments.get("out_dtype") not in (None, x.dtype):
            return NotImplemented
        bounds = [0, *ends.tolist()]
        sizes = [end - start for start, end in pairwise(bounds)]
        *rows_by_expert, padding = x.split([*sizes, len(x) - bounds[-1]])
        with torch.autocast(x.device.type, enabled=False):  # as grouped products do
            outputs = [self._product(weight, expert, rows) for expert, rows in enumerate(rows_by_expert)]
        return torch.cat([*outputs, padding.new_zeros(len(padding), weight.tensor.shape[-1])])

    def _product(self, weight: _WeightTensor, expert: int, rows: Tensor) -> Tensor:
        tensor, weight_slice = self._slice(weight, expert)
        return rows @ tensor if weight_slice is None else self._run(weight_slice, rows)

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the body of a Python function that is one call for torch's overrides, so that its linears are seen."""
        with self:
            return _attention_body(*args, **kwargs)


_TRANSPOSING_GETTERS = [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]
_HANDLERS: dict[str, Callable[[ProductMode, Any, Any, Any], Any]] = {
    **dict.fromkeys(
        ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous"), ProductMode._same_shape
    ),
    **dict.fromkeys(("t", "transpose", "swapaxes", "swapdims", "permute", "__get__"), ProductMode._transpose),
    **dict.fromkeys(("__getitem__", "select", "unbind", "chunk", "split"), ProductMode._select),
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), ProductMode._matmul),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), ProductMode._grouped),
    "linear": ProductMode._linear,
    "addmm": ProductMode._addmm,
    "multi_head_attention_forward": ProductMode._attention,
}
_attention_body = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)

# ---- adapters for modules of PyTorch, transformers and torchtitan ----


def _is_experts_of_transformers(cls: type) -> bool:
    """Return whether `use_experts_implementation` of transformers 5 made the class."""
    return any("_apply_gate" in vars(base) and base.__module__.startswith("transformers.") for base in cls.__mro__)


def _layouts_of_experts(module: nn.Module) -> Layouts:
    layout = "eio" if getattr(module, "is_transposed", False) else "eoi"
    weights = {name: getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj")}
    return {name: layout for name, weight in weights.items() if isinstance(weight, Tensor) and weight.dim() == 3}


def _is_experts_of_torchtitan(cls: type) -> bool:
    return any(base.__module__.startswith("torchtitan.") and base.__name__ == "GroupedExperts" for base in cls.__mro__)


def _three_dimensional(module: nn.Module) -> Layouts:
    return {name: "eoi" for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3}


def _eager_or_grouped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the implementation that the config names if its products are visible from Python, else the eager one."""
    owner_class: Any = type(module)
    forward = owner_class.plain_class.forward
    # Private, until the public `set_experts_implementation` of transformers has a getter.
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) not in (None, "eager", "grouped_mm"):
        forward = inspect.unwrap(forward)
    return forward(module, *args, **kwargs)


_ADAPTERS.append(_Adapter(_is_experts_of_transformers, _layouts_of_experts, _eager_or_grouped))
register("transformers.pytorch_utils.Conv1D", weight="io")
register("transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts", weight="eoi")
register("transformers.models.falcon.modeling_falcon.FalconLinear", weight="oi")
register("transformers.models.llama4.modeling_llama4.Llama4TextExperts", gate_up_proj="eio", down_proj="eio")
_ADAPTERS.append(_Adapter(_is_experts_of_torchtitan, _three_dimensional, run_plain_forward))
register(
    nn.MultiheadAttention, {f"{_name}_proj_weight": "oi" for _name in ("in", "q", "k", "v")} | {"out_proj.weight": "oi"}
)
