"""A linear and a region. Casts are plain roundings; delayed scales move as Transformer Engine moves them: those of
all linears that ever ran, when the outermost region ends with gradients on, and in the backward pass of the region's
first linear. `ran` records (recipe, depth of regions, rows) of every forward pass."""

from __future__ import annotations

import pickle
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from transformer_engine.common.recipe import DelayedScaling

ran = []
_regions = []
_delayed = []
_first = False


@contextmanager
def autocast(enabled=True, recipe=None):
    global _first
    assert enabled
    before = _first
    if not _regions:
        _first = True
    _regions.append(recipe)
    try:
        yield
    finally:
        _regions.pop()
        _first = before
        if not _regions and torch.is_grad_enabled():
            _move("forward")


def _move(which):
    for linear in _delayed:
        history, scale = linear.state[which]
        if history.amax() > 0:
            scale.copy_(64 / history.amax())
        history.copy_(history.roll(1))
        history[0] = 0


def _cast(x, scaling):
    if scaling is None:
        return (x * 64).round() / 64
    history, scale = scaling
    history[0] = torch.maximum(history[0], x.abs().amax())
    return (x * scale).round() / scale


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, linear, recipe, first):
        x = _cast(x, linear.state.get("forward"))
        ctx.save_for_backward(x, weight)
        ctx.linear, ctx.first = linear, first
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        cast = _cast(grad, ctx.linear.state.get("backward"))
        if ctx.first:
            _move("backward")
        needed = ctx.needs_input_grad
        bias = grad.sum(0) if needed[2] else None
        return (cast @ weight if needed[0] else None, cast.t() @ x if needed[1] else None, bias, None, None, None)


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        assert device == "meta", "would allocate and draw weights"
        self.register_parameter("weight", nn.Parameter(torch.empty(out_features, in_features, device=device)))
        self.use_bias, self.state = bias, {}
        if bias:
            self.register_parameter("bias", nn.Parameter(torch.empty(out_features, device=device)))
        else:
            self.bias = torch.Tensor()

    def _prepare(self, recipe):
        if isinstance(recipe, DelayedScaling) and not self.state:
            length = recipe.amax_history_len
            self.state = {which: (torch.zeros(length), torch.tensor(16.0)) for which in ("forward", "backward")}
            _delayed.append(self)

    def forward(self, x):
        global _first
        recipe = _regions[-1]
        assert x.dtype == self.weight.dtype and len(x) % 8 == 0
        self._prepare(recipe)
        ran.append((recipe, len(_regions), len(x)))
        first, _first = _first, False
        return _Linear.apply(x, self.weight, self.bias if self.use_bias else None, self, recipe, first)

    def get_extra_state(self):
        if not self.state:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.state)), dtype=torch.uint8)

    def set_extra_state(self, state):
        if state.numel() == 0:
            return
        found = pickle.loads(state.numpy().tobytes())
        self._prepare(DelayedScaling(amax_history_len=len(found["forward"][0])))
        for which, pair in found.items():
            for mine, theirs in zip(self.state[which], pair, strict=True):
                mine.copy_(theirs)
