"""A `PathLinear` whose weight's INT8 codes may be kept beside it or instead of it (`kernels/int8.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.precision.kernels.int8 import IntContext, Integers, integers
from gnmr.precision.kernels.simulated import GemmContext, owned
from gnmr.precision.linear import Given, PathLinear, autocast_dtype
from gnmr.precision.passes import Pass
from gnmr.precision.reads import Place, place_of
from gnmr.precision.recipes import Recipe

_READ_VALUES = ("merge", "unmerge", "dequantize_module_weight")
"""Functions of peft's that take a weight's elements for numbers; others read its dtype and device."""


class _LinearOfCodes(torch.autograd.Function):
    """F.linear with codes times scale as its weight, which the graph holds as codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.x_shape, ctx.holds_copy, ctx.num_weights = x.shape, False, 2
        ctx.save_for_backward(codes, scale)
        return owned(F.linear(x, Integers(codes, scale).values(x.dtype), bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_2d = grads[0].reshape(-1, grads[0].shape[-1])
        need_x, _, _, need_bias = ctx.needs_input_grad
        weight = Integers(*ctx.saved_tensors)
        grad_x = (grad_2d @ weight.values(grad_2d.dtype)).view(ctx.x_shape) if need_x else None
        return grad_x, None, None, grad_2d.sum(dim=0) if need_bias else None


class Int8Linear(PathLinear):
    """A `PathLinear` of a plan with a recipe that multiplies integers, with its weight's codes where it keeps them."""

    plain_class = nn.Linear
    weights: str
    """One of WEIGHTS."""
    weight_scale: Tensor
    """Of `instead`: a buffer, (O, 1) float32."""
    _beside: tuple[object, Integers] | None
    """The codes, and the state of the weight that they are of. No buffer: `.to(dtype)` would round the scales."""
    _own_dtype: torch.dtype

    def store(self, weights: str) -> None:
        """Makes the codes that `weights` asks for; once, when the operator is converted."""
        self.weights, self._beside, self._own_dtype = weights, None, self.weight.dtype
        if weights == "beside":
            self.kept_codes(self.weight)
        if weights == "instead":
            own, _ = integers(self.weight.detach())
            # Another parameter: another module may share this one.
            self.weight = nn.Parameter(own.codes, requires_grad=False)
            self.register_buffer("weight_scale", own.scale)

    def unstore(self) -> None:
        """Undoes `store`, as far as it can: of codes the weight is codes times scale."""
        if self.weights == "instead":
            own = Integers(self.weight, self.weight_scale)
            self.weight = nn.Parameter(own.values(self._own_dtype), requires_grad=False)
            del self.weight_scale
        del self.weights, self._beside, self._own_dtype

    def __getattr__(self, name: str) -> Any:
        """As `nn.Module`. Code outside of this package that reads the weight may write to it through `.data`, which no
        version number shows (peft merges adapters so), so codes beside it are made again for the next pass. ValueError
        where an adapter reads or changes the values of a weight of which codes alone are left."""
        if name == "weight" and self.__dict__.get("weights", "online") != "online":
            reader = sys._getframe(1)
            if not str(reader.f_globals.get("__name__")).startswith("gnmr."):
                if self.weights == "instead" and reader.f_code.co_name in _READ_VALUES:
                    raise ValueError(
                        f"weights='instead': of the weight of {self.operator_name} INT8 codes alone are left, into "
                        "which no adapter can be merged, and which DoRA cannot read; use weights='beside' or 'online', "
                        "or detach the controller before merging"
                    )
                self._beside = None
        return super().__getattr__(name)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes and scales that are kept."""
        return 0 if self.weights == "online" else self.out_features * (self.in_features + torch.float32.itemsize)

    def kept_codes(self, weight: Tensor) -> Integers | None:
        """The codes of `weight`, which is the operator's own after autocast's cast; None: they are not kept.

        ValueError for a weight that has become trainable.
        """
        own = self.weight
        if self.weights == "instead":
            return Integers(own, self.weight_scale)
        if self.weights == "online" or own.is_inference():  # an inference tensor has no version number
            return None
        if own.requires_grad:
            raise ValueError(
                f"weights='beside': {self.operator_name} is trainable by now; convert with weights='online'"
            )
        state = place_of(own), own._version, weight.dtype
        if self._beside is None or self._beside[0] != state:
            self._beside = state, integers(weight.detach())[0]
        return self._beside[1]

    def plain(self, input: Tensor) -> Tensor:
        if self.weights != "instead":
            return super().plain(input)
        bias: Tensor | None = self.bias
        if (dtype := autocast_dtype(input)) is not None:
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        output: Tensor = _LinearOfCodes.apply(input, self.weight, self.weight_scale, bias)
        return output

    def gemm_context(self, recipe: Recipe, *, weight: Tensor | None = None, **options: Any) -> GemmContext:
        context = super().gemm_context(recipe, **options)
        if isinstance(context, IntContext) and weight is not None:
            context.weight_codes = self.kept_codes(weight)
        return context

    def _under_recipe(self, recipe: Recipe, begun: Pass, given: Given) -> tuple[Tensor, str | Place]:
        if recipe.integer or self.weights != "instead":
            return super()._under_recipe(recipe, begun, given)
        # Nothing but the weight is cast (`conversion._check_weights`), and only its codes are left.
        output = _LinearOfCodes.apply(given.x, given.weight, self.weight_scale, given.bias)
        return output, self.operator_name

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scale = self._buffers.get("weight_scale")
        super()._apply(fn, recurse)
        if scale is not None and self.weight_scale.dtype != scale.dtype:  # .to(torch.bfloat16) is for weights
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if self.weights == "instead" and weight is not None and weight.is_floating_point():
            own, _ = integers(weight)
            state_dict = {**state_dict, f"{prefix}weight": own.codes, f"{prefix}weight_scale": own.scale}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        """As `PathLinear`'s; codes beside the weight are made again."""
        return {**super().__getstate__(), "_beside": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.weights}"
