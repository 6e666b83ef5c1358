"""Recipes as Transformer Engine runs them: its linear, on the operator's own parameters, under its own recipe.

    one scale a tensor              Float8CurrentScaling     compute capability 8.9 (Ada, Hopper)    fp8_hybrid
    delayed                         DelayedScaling, max      8.9                                     fp8_delayed
    tiles, of the weight blocks     Float8BlockScaling       9.0 (Hopper)                            deepseek_v3
    mx                              MXFP8BlockScaling        10.0 (Blackwell)                        mxfp8

with E4M3 everywhere or E5M2 for grad_output (HYBRID), alike in all three GEMMs: `convert(recovers=...)` of some GEMMs
is refused. bf16 is the plain linear. A tensor's last rows are filled up to 32 with zeros, which add nothing.

After github.com/NVIDIA/TransformerEngine, 2.0 and later (common/recipe, pytorch/quantization.py, pytorch/module).
Scales are not always the simulation's: Float8BlockScaling has powers of two unless the environment says
NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, MXFP8 rounds its powers of two up. An operator keeps its own codes of an input,
others that read the same tensor theirs. What its casts meet (`ConvertedModel.saturation`), what they cost (`ConvertedModel.probe`) and what
they keep (`ConvertedModel.saved_bytes`) cannot be read, and nothing can be broken in them (`faults.py`).

Delayed scales are moved by Transformer Engine and not by `ConvertedModel.end_step`: those of input and weight when the forward
pass of the converted model ends, those of grad_output when its backward pass does, so twice a step with two
micro-batches. While an operator is on the 16-bit path its history forgets, and then its last scales stay. They belong
to the state of the plan. A second pass inside of the backward pass (activation checkpointing) is refused, and so is
another recipe beside them: Transformer Engine has one region of delayed scales at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.errors import install
from gnmr.precision.kernels.scaled_mm import capability_missing, width_missing
from gnmr.precision.recipes import ExecutionPath, Gemm, Recipe
from gnmr.precision.shared import SharedState

_SCALINGS = {  # by the scales of input, weight and grad_output
    ("tensor", "tensor", "tensor"): ("Float8CurrentScaling", (8, 9)),
    ("delayed", "delayed", "delayed"): ("DelayedScaling", (8, 9)),
    ("tile", "block", "tile"): ("Float8BlockScaling", (9, 0)),
    ("mx", "mx", "mx"): ("MXFP8BlockScaling", (10, 0)),
}
_FORMATS = {("e4m3", "e4m3", "e5m2"): "HYBRID", ("e4m3", "e4m3", "e4m3"): "E4M3"}
_ROWS = 32
UNREADABLE = "of Transformer Engine's casts nothing can be read; use backend='scaled_mm' or 'simulated'"


def missing(recipe: Recipe, linears: dict[str, nn.Linear], device: torch.device) -> str | None:
    """Why Transformer Engine cannot run the recipe in these linears on `device`; None: it can."""
    if (found := _scaling(recipe)) is None:
        return (
            f"Transformer Engine does not run the recipe {recipe.name}, but fp8_hybrid, fp8_delayed, deepseek_v3 and "
            "mxfp8 (and their like, E4M3 or hybrid, in all three GEMMs)"
        )
    if find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed ({install('te')}, on a machine with CUDA)"
    name, least = found
    lacking = capability_missing(device, least) or width_missing(linears)
    if lacking is not None:
        return f"{recipe.name}: {lacking}"
    try:
        if not hasattr(import_module("transformer_engine.common.recipe"), name):
            return f"this version of Transformer Engine has no {name}, which {recipe.name} needs"
        with torch.no_grad(), _autocast(_engines(recipe)):  # refuses what it cannot run here
            pass
    except (ImportError, OSError, AssertionError, RuntimeError, ValueError) as error:
        return f"Transformer Engine refuses {recipe.name} here ({str(error).strip().partition(chr(10))[0]})"
    return None


def _scaling(recipe: Recipe) -> tuple[str, tuple[int, int]] | None:
    """(Transformer Engine's recipe of the same casts, the compute capability it needs); None: it has none."""
    x, w, dy = casts = recipe.fprop.input, recipe.fprop.weight, recipe.wgrad.grad_output
    if x is None or w is None or dy is None:
        return None
    if any(cast.hadamard or cast.stochastic for cast in recipe.casts):
        return None
    alike = replace(recipe, fprop=Gemm(x, w), dgrad=Gemm(weight=w, grad_output=dy), wgrad=Gemm(x, grad_output=dy))
    formats = tuple(cast.format.name for cast in casts if cast is not None)
    if alike != recipe or formats not in _FORMATS or len({x.history, w.history, dy.history}) > 1:
        return None
    return _SCALINGS.get((x.scale, w.scale, dy.scale))


def _engines(recipe: Recipe) -> Any:
    """Transformer Engine's recipe of the same casts, which it has (`missing`)."""
    found, known = _scaling(recipe), import_module("transformer_engine.common.recipe")
    assert found is not None and recipe.fprop.input is not None and recipe.wgrad.grad_output is not None
    fmt = _FORMATS["e4m3", "e4m3", recipe.wgrad.grad_output.format.name]
    how = {"amax_history_len": recipe.history, "amax_compute_algo": "max"} if recipe.history else {}
    return getattr(known, found[0])(fp8_format=getattr(known.Format, fmt), **how)


def _autocast(recipe: Any) -> AbstractContextManager[Any]:
    """The region in which its linears cast by `recipe`; since version 2.9 under another name."""
    te = import_module("transformer_engine.pytorch")
    made: AbstractContextManager[Any] = (
        te.autocast(enabled=True, recipe=recipe)
        if hasattr(te, "autocast")
        else te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    )
    return made


def engine_for(paths: Iterable[ExecutionPath | None]) -> Engine | None:
    """What a plan of these paths has of Transformer Engine; None: no operator runs on it.

    ValueError for delayed scales beside another recipe.
    """
    run = [path for path in dict.fromkeys(paths) if isinstance(path, Recipe) and path.backend == "te" and path.casts]
    if any(path.history for path in run) and run[1:]:
        raise ValueError(
            f"backend='te': {run[0].name} and {run[1].name}: beside delayed scales Transformer Engine runs no other "
            "recipe; use bf16 for one of the paths, or backend='scaled_mm'"
        )
    return Engine(any(path.history for path in run)) if run else None


class Engine:
    """Transformer Engine's linears of a plan's operators, one for each recipe, made when they first run.

    They are no modules of the model: its parameters, state dict and names are as they were, and both have the same
    Parameter objects. A copy (pickle, deepcopy) makes its own, of its own model's parameters.
    """

    def __init__(self, delayed: bool) -> None:
        self.delayed = delayed
        self._linears: dict[str, Any] = {}
        """By the operator's place in the plan and the recipe's name."""
        self._states: dict[str, Tensor] = {}
        """Delayed scales of linears that a copy has yet to make."""
        self._recipes: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._region: AbstractContextManager[Any] | None = None

    def __call__(self, operator: nn.Linear, name: str, index: int, recipe: Recipe, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) by the operator under `recipe`. Does not wait for the
        device.

        RuntimeError for delayed scales outside of the model's forward pass.
        """
        if not recipe.casts:
            return F.linear(input, operator.weight, operator.bias)
        if self.delayed and self._region is None:
            raise RuntimeError(
                f"backend='te': {name} ran outside of its model's forward pass (activation "
                "checkpointing?), where delayed scales cannot be; use a recipe without, or backend='scaled_mm'"
            )
        rows = input.reshape(-1, input.shape[-1])
        filled = F.pad(rows, (0, 0, 0, short)) if (short := -len(rows) % _ROWS) else rows
        linear = self._linear(operator, index, recipe)
        with nullcontext() if self.delayed else _autocast(self._recipe(recipe)):
            output: Tensor = linear(filled)
        return output[: len(rows)].view(*input.shape[:-1], -1)

    def _recipe(self, recipe: Recipe) -> Any:
        if recipe.name not in self._recipes:
            self._recipes[recipe.name] = _engines(recipe)
        return self._recipes[recipe.name]

    def _linear(self, operator: nn.Linear, index: int, recipe: Recipe) -> Any:
        if (key := _key(index, recipe)) not in self._linears:
            kind, weight = import_module("transformer_engine.pytorch").Linear, operator.weight
            made = kind(
                operator.in_features,
                operator.out_features,
                bias=operator.bias is not None,
                params_dtype=weight.dtype,
                device="meta",  # nothing is allocated or drawn
            )
            self._linears[key] = made
            if (state := self._states.pop(key, None)) is not None:
                made.set_extra_state(state)
        linear = self._linears[key]
        for name, own in (("weight", operator.weight), ("bias", operator.bias)):
            if own is not None and getattr(linear, name) is not own:  # the first time, and after load(assign=True)
                linear.register_parameter(name, own)
        return linear

    def around(self, model: nn.Module, shared: SharedState, recipe: Recipe) -> None:
        """Delayed scales move when a region ends: one around every forward pass of `model`."""
        self._hooks = [
            model.register_forward_pre_hook(partial(self._enter, shared, recipe)),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, shared: SharedState, recipe: Recipe, *_: Any) -> None:
        if not shared.high_precision and self._region is None:
            region = _autocast(self._recipe(recipe))
            region.__enter__()
            self._region = region

    def _leave(self, *_: Any) -> None:
        if self._region is not None:
            region, self._region = self._region, None
            region.__exit__(None, None, None)

    def close(self) -> None:
        """Takes the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state(self) -> bytes:
        """The delayed scales and their history, in one piece: a checkpoint looks for no key that it cannot know."""
        packed = BytesIO()
        torch.save(self._packed(), packed)
        return packed.getvalue()

    def _packed(self) -> dict[str, Tensor]:
        """As Transformer Engine packs them (uint8). Waits for the device."""
        if not self.delayed:
            return {}
        made = {key: linear.get_extra_state() for key, linear in self._linears.items()}
        return dict(sorted((self._states | made).items()))

    def load(self, state: bytes, runs: Iterable[tuple[int, nn.Linear, Recipe]]) -> None:
        """What `state` gave, of these operators under these recipes. Waits for the device.

        Transformer Engine unpacks it with pickle."""
        states: dict[str, Tensor] = torch.load(BytesIO(state), weights_only=True)
        self._states = {}
        for key in self._linears.keys() - states.keys():
            del self._linears[key]  # it had not run yet
        for index, operator, recipe in runs:
            if (key := _key(index, recipe)) not in states:
                continue
            ran, linear = key in self._linears, self._linear(operator, index, recipe)
            if not ran:
                # Transformer Engine moves the scales of linears that have run, and this one had.
                with torch.no_grad(), _autocast(self._recipe(recipe)):
                    linear(operator.weight.new_zeros(_ROWS, operator.in_features))
            linear.set_extra_state(states[key])

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy."""
        return {**self.__dict__, "_states": self._packed(), "_linears": {}, "_recipes": {}, "_region": None}


def _key(index: int, recipe: Recipe) -> str:
    return f"{index} {recipe.name}"
