"""Read which precision is in force in each linear of a model: operator by operator, GEMM by GEMM.

    gnmr                    `PathLinear`: the path in force, a recipe or a format
    torchao float8          `Float8Linear`, and weights under `Float8TrainingOpConfig`
    torchao mx              `MXFP8Linear`, and weights under `MXFP8TrainingOpConfig`
    Transformer Engine      its linears: its autocast decides while it runs, so nothing is declared
    another's               any other subclass of nn.Linear, and weights that are of a tensor subclass or made by a
                            parametrization: nothing is declared
    plain                   nn.Linear with a plain weight: the dtype of its tensors, 16 or 32 bits
    Conv1D, ...             an unconverted operator within a module that an adapter knows: the same as plain

Modules are recognized by class name, so that nothing is imported that the model did not import.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.conversion.adapters import Contained, LinearOperator, WeightOwner, matrix_of, operators_in
from gnmr.conversion.int8 import Int8Linear, Integers
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.reads import is_sharded
from gnmr.conversion.targets import roles_of, tied_to_embeddings
from gnmr.conversion.unit_names import operator_names
from gnmr.formats import Recipe
from gnmr.formats.cast import over_scale, quantize, scale_of_each
from gnmr.formats.number_formats import Format, KeepFormat
from gnmr.formats.recipes import Cast
from gnmr.formats.scaling import TINY
from gnmr.measure.absent_weights import gathered

READS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""The two operands of each GEMM."""
CONTRACTS = {
    ("fprop", "input"): 1,
    ("fprop", "weight"): 1,
    ("dgrad", "grad_output"): 1,
    ("dgrad", "weight"): 0,
    ("wgrad", "grad_output"): 0,
    ("wgrad", "input"): 0,
}
"""The dimension of input (T, I), weight (O, I) or grad_output (T, O) that a GEMM contracts."""
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class Grain:
    """A cast as a library declares it."""

    cast: Cast
    along: bool = False
    """True if all elements that are contracted with each other share a scale (torchao's axiswise), also in a column."""
    powers: bool = False
    """True if scales are rounded up to powers of two: a group's largest element is then no longer exact."""

    def __str__(self) -> str:
        return f"{self.cast.format.name}/axis" if self.along else str(self.cast)

    def ideal(self, x: Tensor, contracted: int, generator: torch.Generator | None = None) -> Tensor:
        """Return `x` cast with scales from its own magnitudes, the best that this format can give.

        Args:
            x: a tensor (N, D), already rotated for a cast with `hadamard`.
            contracted: its dimension that the GEMM contracts.
            generator: draws for stochastic rounding.

        Returns:
            The cast tensor (N, D), in the dtype of `x`.
        """
        if self.along and contracted == 0:
            return replace(self, along=False).ideal(x.t().contiguous(), 1, generator).t()
        if self.powers:
            return self.under(x, contracted, 1.0)
        return quantize(x, self._bare, contracted, None, generator)[0]

    def under(self, x: Tensor, contracted: int, factor: float) -> Tensor:
        """Return the same cast with other scales, rounded to nearest; values beyond the format saturate.

        Args:
            x: a tensor (N, D), as in `ideal`.
            contracted: its dimension that the GEMM contracts.
            factor: multiplies the scales from the tensor's own magnitudes, which 1 leaves.
        """
        if self.along and contracted == 0:
            return replace(self, along=False).under(x.t().contiguous(), 1, factor).t()
        fmt, bare = self.cast.format, self._bare
        scale = scale_of_each(x, bare, contracted, None)[0]
        if self.powers:
            scale = scale.log2().ceil().exp2() * factor
            return fmt.round((x.float() / scale).clamp_(-fmt.max, fmt.max)).mul_(scale).to(x.dtype)
        scale = torch.where(scale == 0, scale, (scale * factor).clamp_(min=TINY))
        scaled = x.float() / scale
        if bare.two_levels:  # a group below the smallest scale becomes 0
            scaled = torch.where(scale == 0, 0, over_scale(x.float(), scale, bare))
        return fmt.round(scaled.clamp_(-fmt.max, fmt.max)).mul_(scale)

    @property
    def _bare(self) -> Cast:
        return replace(self.cast, hadamard=False, codes=False, outliers=None)


Declared: TypeAlias = dict[tuple[str, str], Grain | None]
"""The cast of each (GEMM, operand); None: not cast."""


@dataclass(frozen=True)
class Operator:
    """A linear and the precision in force in it."""

    name: str
    module: nn.Module | LinearOperator
    """`LinearOperator`: a product within another module's forward, which no hook sees."""
    kind: str
    declared: Declared | None
    """None: the module declares nothing."""
    result: Grain | None = None
    """Cast of fprop's result."""
    pinned: tuple[str, ...] = ()
    tied: str = ""
    """The embedding whose tensor is or contains its weight."""
    role: str = ""
    """See `gnmr.conversion.targets`."""
    shared: bool = field(default=True)
    """True if a tied weight is the same parameter as the embedding."""

    @property
    def raw_weight(self) -> Tensor:
        """Return the weight as it is now, of any class; that of an operator within a module is the matrix (O, I)."""
        if isinstance(self.module, LinearOperator):
            return matrix_of(self.module.weight.detach(), self.module.layout, self.module.expert)
        weight: Any = self.module.matrix if isinstance(self.module, Contained) else self.module.weight
        detached: Tensor = weight.detach()
        return detached

    def values(self, weight: Tensor) -> Tensor | None:
        """Return the values of a weight in high precision.

        Args:
            weight: `raw_weight` (O, I), or one of the same kind.

        Returns:
            The values (O, I); None if the weight's class does not give them.
        """
        if isinstance(self.module, Int8Linear) and not weight.is_floating_point():
            return Integers(weight, self.module.weight_scale).values(torch.float32)
        return values_of(weight)

    @property
    def bias(self) -> Tensor | None:
        """Return the bias (O,) in float32, or None."""
        bias = getattr(self.module, "bias", None)
        values = values_of(bias) if isinstance(bias, Tensor) and bias.numel() else None
        return None if values is None else values.float()

    @property
    def stored(self) -> str:
        """Return the dtype in which the elements of the weight are kept if it has fewer than 16 bits, else nothing."""
        return _few_bits(self.module.weight)

    @property
    def low(self) -> bool | None:
        """Return True if any operand is cast or the weight is kept in few bits; None if nothing is declared."""
        if self.declared is None:
            return True if self.stored else None
        return any(self.declared.values())

    def grain(self, gemm: str, operand: str) -> Grain | None:
        """Return the cast of an operand; None if it is not cast or nothing is declared.

        Args:
            gemm: fprop, dgrad or wgrad.
            operand: input, weight or grad_output, one of the GEMM's two in `READS`.
        """
        return (self.declared or {}).get((gemm, operand))

    def multiplies_codes(self, gemm: str) -> bool:
        """Return True if scales apply to sums of this GEMM, so that its operands cannot be compared with tensors.

        Args:
            gemm: fprop, dgrad or wgrad.
        """
        return any(grain.cast.codes for operand in READS[gemm] if (grain := self.grain(gemm, operand)) is not None)

    def words(self, gemm: str) -> str:
        """Describe the operands of a GEMM: `e4m3/tensor x e4m3/tensor`.

        Args:
            gemm: fprop, dgrad or wgrad. If neither operand is cast, the weight's dtype describes both.
        """
        if self.declared is None:
            return f"not said, {self.stored} weight" if self.stored and gemm != "wgrad" else "not said"
        weight: Any = self.module.weight
        dtype = _SHORT.get(weight.dtype, str(weight.dtype).removeprefix("torch."))
        grains = [self.grain(gemm, operand) for operand in READS[gemm]]
        return " x ".join(dtype if grain is None else str(grain) for grain in grains) if any(grains) else dtype


def operators_of(model: nn.Module) -> list[Operator]:
    """Return every linear operator of a model, converted or not, in the order of its modules.

    Args:
        model: a plain model, or one that gnmr or another library converted.

    Returns:
        The operators, by their names without wrapper prefixes.
    """
    modules: dict[str, nn.Module | LinearOperator] = {}
    contained: dict[str, list[LinearOperator]] = {}
    for operator in operators_in(model).values():
        if operator.forward is not None:
            contained.setdefault(operator.path, []).append(operator)
    # A linear within a converted module, such as an expert, is an operator of that module.
    inner_weights = {operator.weight for inside in contained.values() for operator in inside}
    for name, module in model.named_modules():
        path_operators = module.path_operators if isinstance(module, WeightOwner) else ()
        converted = {(inner.parameter_name, inner.expert): inner for inner in path_operators}
        for operator in contained.get(name, ()):
            modules[operator.name] = converted.get((operator.parameter_name, operator.expert), operator)
        if _is_linear(module) and module.weight not in inner_weights:
            modules[name] = module
    embeddings = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tied, roles = tied_to_embeddings(model, modules), roles_of(model, modules)
    operators = []
    for short, (name, linear) in zip(operator_names(list(modules)), modules.items(), strict=True):
        table = tied.get(name, "")
        # A conversion may have copied a tied weight into a parameter of its own.
        shared = not table or embeddings[table] is linear.weight
        operators.append(replace(_declared(short, linear), tied=table, shared=shared, role=roles[name]))
    return operators


def packed_in(model: nn.Module) -> dict[str, str]:
    """Find the modules that are no nn.Linear and keep the matrix of a linear in codes.

    They have `in_features` and `out_features`, and one bit or more per weight in integers or bytes, but no such matrix
    in high precision: the linears of HQQ, GPTQ and AWQ, and PyTorch's quantized ones.

    Returns:
        {operator name: class of the module}.
    """
    classes = {}
    for name, module in model.named_modules():
        widths: list[Any] = [getattr(module, key, None) for key in ("in_features", "out_features")]
        if _is_linear(module) or not all(isinstance(width, int) for width in widths):
            continue
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        # A matrix in 1 bit or more per weight, and none of the same shape in high precision.
        codes = [tensor for tensor in tensors if _few_bits(tensor) and tensor.dtype != torch.bool]
        bits = 8 * sum(tensor.numel() * tensor.element_size() for tensor in codes)
        has_matrix = any(_is_high(tensor) and {*tensor.shape} == {*widths} for tensor in tensors)
        if hasattr(module, "_packed_params") or (bits >= math.prod(widths) and not has_matrix):
            # PyTorch calls its quantized linears Linear too; `_get_name`, which its repr shows, tells them apart.
            classes[name] = module._get_name()
    return dict(zip(operator_names(list(classes)), classes.values(), strict=True))


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor of any class in high precision; None if its class does not give them.

    Args:
        tensor: a tensor of any shape. A class that wraps one tensor in high precision (torchao's training weights) has
            that tensor's values, and a DTensor those of all processes, which call this together. Others are asked for
            their values, and a weight (O, I) that refuses is multiplied with the identity.

    Returns:
        A detached tensor of the same shape, of 16 bits or more.
    """
    if _is_plain(tensor):
        freed = tensor.numel() > 0 and tensor.untyped_storage().size() == 0  # by FSDP2, after a pass that read it
        return tensor.detach().as_subclass(Tensor) if _is_high(tensor) and not freed else None
    if is_sharded(tensor):
        return values_of(gathered(tensor))
    inner = _inner_tensors(tensor)
    if len(inner) == 1 and inner[0].shape == tensor.shape and (values := values_of(inner[0])) is not None:
        return values
    # Methods of torchao's and quanto's classes, and the product that any weight has to give.
    methods = (getattr(tensor, name, None) for name in ("to_original_precision", "dequantize"))
    identity = partial(torch.eye, tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    for convert in (*methods, lambda: F.linear(identity(), tensor).t()):
        with suppress(Exception), torch.no_grad():  # a class of another library may refuse with any exception
            values = convert() if convert is not None else None
            if isinstance(values, Tensor) and values.shape == tensor.shape and _is_plain(values) and _is_high(values):
                return values.detach()
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Return True if no class of another library decides what an operation on the tensor does."""
    return all(
        cls in (Tensor, nn.Parameter) or not {"__torch_function__", "__torch_dispatch__"} & cls.__dict__.keys()
        for cls in type(tensor).__mro__
        if issubclass(cls, Tensor)
    )


def _is_high(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _inner_tensors(tensor: Any) -> list[Tensor]:
    """Return the tensors that a tensor subclass wraps, by PyTorch's protocol or else its attributes."""
    if _is_plain(tensor):
        return []
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else vars(tensor)
    return [inner for name in names if isinstance(inner := getattr(tensor, name), Tensor)]


def _few_bits(weight: Any) -> str:
    """Return the dtype of the largest tensor in a weight if it is of one byte or of integers, else nothing."""
    while inner := _inner_tensors(weight):  # a wrapper may hold another: DTensor of codes
        weight = max(inner, key=lambda tensor: tensor.numel())
    return "" if _is_high(weight) else str(weight.dtype).removeprefix("torch.")


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and (isinstance(module, nn.Linear) or is_te_linear(module))


def is_te_linear(module: nn.Module) -> bool:
    """Return True for the linears of Transformer Engine, which are no `nn.Linear`."""
    return type(module).__module__.startswith("transformer_engine.") and type(module).__name__ == "Linear"


def _declared(name: str, module: nn.Module | LinearOperator) -> Operator:
    """Return the operator with what its class, its weight's class or its configuration declares."""
    weight: Any = module.weight
    kind = module.class_name if isinstance(module, LinearOperator) else type(module).__name__
    config = weight.config if hasattr(weight, "_data") and hasattr(weight, "config") else None
    if isinstance(module, PathLinear) and module.converted:
        return _of_gnmr(name, module)
    if config is not None:  # a weight that torchao wraps
        if hasattr(config, "_float8_linear_config"):
            return Operator(name, module, "torchao float8", _float8(config._float8_linear_config))
        if hasattr(config, "wgrad_with_hp"):
            return Operator(name, module, "torchao mx", _mx(config))
        return Operator(name, module, type(weight.data).__name__, None)
    if kind == "Float8Linear" and hasattr(module, "config"):
        return Operator(name, module, "torchao float8", _float8(module.config))
    if kind == "MXFP8Linear" and hasattr(module, "wgrad_with_hp"):
        return Operator(name, module, "torchao mx", _mx(module))
    if isinstance(module, LinearOperator):
        return Operator(name, module, kind, dict.fromkeys(CONTRACTS))
    if type(module) is nn.Linear or kind == "NonDynamicallyQuantizableLinear":
        # FSDP2 makes a plain tensor of a DTensor's shards. Private, because the
        # public `to_local` makes another tensor.
        local = getattr(weight, "_local_tensor", weight)
        if _is_plain(local) and _is_high(local):
            return Operator(name, module, "plain", dict.fromkeys(CONTRACTS))
        return Operator(name, module, type(weight.data).__name__, None)
    return Operator(name, module, "Transformer Engine" if is_te_linear(module) else kind, None)


def _of_gnmr(name: str, module: PathLinear) -> Operator:
    path = module.path
    declared: Declared = dict.fromkeys(CONTRACTS)
    result = None
    if isinstance(path, Recipe):
        for gemm, operand in CONTRACTS:
            if (cast := getattr(getattr(path, gemm), operand)) is not None:
                declared[gemm, operand] = Grain(cast)
        result = None if path.fprop.result is None else Grain(path.fprop.result)
    elif isinstance(path, Format) and not isinstance(path, KeepFormat):  # a format of the saved input
        declared["wgrad", "input"] = Grain(Cast(path, "row"))
        if module.shared.quantize_forward:
            declared["fprop", "input"] = declared["wgrad", "input"]
    return Operator(name, module, "gnmr", declared, result=result, pinned=module.pinned)


def _float8(config: Any) -> Declared:
    """Read torchao's Float8LinearConfig."""
    casts = {
        ("fprop", "input"): config.cast_config_input,
        ("fprop", "weight"): config.cast_config_weight,
        ("dgrad", "grad_output"): config.cast_config_grad_output,
        ("dgrad", "weight"): config.cast_config_weight_for_grad_input,
        ("wgrad", "grad_output"): config.cast_config_grad_output_for_grad_weight,
        ("wgrad", "input"): config.cast_config_input_for_grad_weight,
    }
    declared: Declared = dict.fromkeys(casts)
    for place, cast_config in casts.items():
        number_format = _FORMATS.get(cast_config.target_dtype)
        if cast_config.scaling_type.name == "DISABLED" or number_format is None:
            continue
        # torchao has one scale for all elements that a GEMM contracts, also where these lie in a column.
        along = cast_config.scaling_granularity.name == "AXISWISE"
        cast = Cast.of(f"{number_format}/{'row' if along else 'tensor'}")
        assert cast is not None
        declared[place] = Grain(cast, along, bool(config.round_scales_to_power_of_2))
    return declared


def _mx(config: Any) -> Declared:
    """Read torchao's MXFP8 config or module, which has 32 elements per scale along the contraction."""
    rule = getattr(config, "scale_calculation_mode", None)
    cast = Cast.of("e4m3/mx_floor" if getattr(rule, "name", None) == "FLOOR" else "e4m3/mx")
    assert cast is not None
    wgrad_in_16_bits = bool(config.wgrad_with_hp)
    return {place: None if wgrad_in_16_bits and place[0] == "wgrad" else Grain(cast) for place in CONTRACTS}
