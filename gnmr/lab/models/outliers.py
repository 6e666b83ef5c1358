"""Outlier channels that leave the model's function as it is.

Large trained models have a few activation channels many times larger than the rest, which is what makes 4-bit
activations hard; a model of a few million parameters trained for minutes has none. They can be put in by hand: where
an activation enters a linear, multiply a channel by `gain` at its source and divide the column that reads it.

    source                              read by
    input_layernorm                     q_proj, k_proj, v_proj
    post_attention_layernorm            gate_proj (llama), up_proj; in moe every expert's, and the router
    final norm (llama, head not tied)   lm_head
    v_proj                              o_proj: attention mixes positions, never channels
    up_proj (llama)                     down_proj: SwiGLU is linear in up

Left out: the final norm where the head is tied (gpt, moe), which cannot be divided without changing the embedding; and
the up/down pair of gpt and moe, because GELU(gain * x) is not gain * GELU(x). In moe the logits of the router are equal
to rounding, so a token whose choice of experts hangs on the last bit may go elsewhere.

At initialisation the logits stay the same (to rounding; to the last bit where `gain` is a power of two);
activations and gradients change, so training takes another course from the first step on.

`OutlierWindow` does this to a model in training for some steps and then undoes it: a temporary stress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.distributed.shards import local, part
from gnmr.errors import UserError
from gnmr.lab.models.layers import GELUMLP, Block, Decoder, SwiGLU
from gnmr.lab.models.llama import Llama
from gnmr.lab.models.moe import MoEMLP


def add_outlier_channels(model: Decoder, number: int, gain: float, generator: torch.Generator | None = None) -> None:
    """Scales `number` channels of every source above by `gain` > 0, in place; call it once, after `init_weights`.

    The channels of each source are drawn by `generator` (None: the CPU's default one) in module order, so they depend
    on its seed and the architecture alone. In FP32 the weights are exact to rounding; do it before a cast to BF16.
    Raises `UserError`, with nothing changed, where `number` exceeds the narrowest source.
    """
    _scale(model, _draw(model, number, generator), gain)


class OutlierWindow:
    """Outlier channels in the live weights during the steps `start` to `stop`, both included; steps count from 1.

    Call `begin_step` before each step, in every process. The model's function stays as it is at both switches: to
    rounding, and to the last bit, BF16 included, where `gain` is a power of two, which is what to use. The optimizer's
    moments are left alone: what it adds to a divided column during the window is multiplied by `gain` at its end.
    """

    def __init__(
        self,
        model: Decoder,
        number: int,
        gain: float,
        start: int,
        stop: int,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draws the channels as `add_outlier_channels` does and leaves the weights alone.

        Raises `UserError` for too many channels and a window that ends before it begins.
        """
        if not 1 <= start <= stop:
            raise UserError(f"outlier channels from step {start} to {stop}: needs 1 <= start <= stop")
        self._model, self._gain, self.start, self.stop = model, gain, start, stop
        self._channels = _draw(model, number, generator)
        self.on = False
        """The weights hold the outlier channels now."""

    def begin_step(self, step: int) -> None:
        """Switches them on or off at the borders of the window; only these two steps may wait for the device."""
        wanted = self.start <= step <= self.stop
        if wanted != self.on:
            _scale(self._model, self._channels, self._gain if wanted else 1 / self._gain)
            self.on = wanted

    def touched(self) -> list[str]:
        """Names of the linears that write or read one of the channels, in module order."""
        linears = {module: name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        of_pairs = {module for source, readers, _ in _pairs(self._model) for module in (source, *readers)}
        return [name for module, name in linears.items() if module in of_pairs]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers (JSON will do): whether it is on, and which channels of each source."""
        return {"on": self.on, "channels": [channels.tolist() for channels in self._channels]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leaves the weights alone: they must be those of the time of `state_dict`."""
        self.on = state["on"]
        self._channels = [torch.tensor(channels, dtype=torch.int64) for channels in state["channels"]]


def _draw(model: Decoder, number: int, generator: torch.Generator | None) -> list[Tensor]:
    """`number` channels of each source, in module order, (number,) int64 on the CPU."""
    widths = [_width(source) for source, _, _ in _pairs(model)]
    if number > min(widths):
        raise UserError(f"model.outlier_channels.number={number}: the narrowest activation has {min(widths)} channels")
    device = "cpu" if generator is None else generator.device
    return [torch.randperm(width, generator=generator, device=device)[:number].cpu() for width in widths]


@torch.no_grad()
def _scale(model: Decoder, channels: list[Tensor], gain: float) -> None:
    for (source, readers, columns), chosen in zip(_pairs(model), channels, strict=True):
        scale = torch.ones(_width(source), device="cpu")
        scale[chosen] = gain
        for parameter in source.parameters():  # a norm's gain and bias, a linear's rows and bias
            rows = scale.to(parameter.device).view(-1, *[1] * (parameter.dim() - 1)).expand(parameter.shape)
            local(parameter).mul_(part(rows, parameter))
        for reader in readers:
            of_columns = columns(scale).to(reader.weight.device).expand(reader.weight.shape)
            local(reader.weight).div_(part(of_columns, reader.weight))


def _pairs(model: Decoder) -> Iterator[tuple[nn.Module, list[nn.Linear], Callable[[Tensor], Tensor]]]:
    """(source, linears that read it, map from a scale per channel to one per column of the readers)."""
    for block in model.layers:
        assert isinstance(block, Block)
        attn, mlp = block.self_attn, block.mlp
        yield block.input_layernorm, [attn.q_proj, attn.k_proj, attn.v_proj], _same
        yield attn.v_proj, [attn.o_proj], partial(_per_query_head, heads=attn.num_heads, kv_heads=attn.num_kv_heads)
        if isinstance(mlp, SwiGLU):
            yield block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], _same
            yield mlp.up_proj, [mlp.down_proj], _same
        elif isinstance(mlp, MoEMLP):
            yield block.post_attention_layernorm, mlp.readers(), _same
        else:
            assert isinstance(mlp, GELUMLP)
            yield block.post_attention_layernorm, [mlp.up_proj], _same
    if isinstance(model, Llama) and not model.config.tied_head:
        yield model.norm, [model.lm_head], _same


def _width(source: nn.Module) -> int:
    weight = source.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _same(scale: Tensor) -> Tensor:
    return scale


def _per_query_head(scale: Tensor, heads: int, kv_heads: int) -> Tensor:
    """With grouped queries one channel of v feeds the same column of every query head of its group."""
    return scale.view(kv_heads, -1).repeat_interleave(heads // kv_heads, dim=0).flatten()
