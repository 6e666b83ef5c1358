"""Outlier channels that do not change the model's function.

Large trained models have a few activation channels that are many times larger than the rest, which makes 4-bit
activations hard. A model of a few million parameters that is trained for minutes has none. This module adds them to
activations that linears read. It multiplies a channel by `gain` at its source and divides the column that reads it.

    source                              read by
    input_layernorm                     q_proj, k_proj, v_proj
    post_attention_layernorm            gate_proj (llama), up_proj; in moe every expert's, and the router
    final norm (llama, head not tied)   lm_head
    v_proj                              o_proj: attention mixes positions, never channels
    up_proj (llama)                     down_proj: SwiGLU is linear in up

The final norm of a tied head (gpt, moe) is excluded, because dividing the head would change the embedding. The up/down
pair of gpt and moe is excluded, because GELU(gain * x) is not gain * GELU(x). In moe, the router's logits are equal up
to rounding. If the choice of a token's experts depends on the last bit, the token may go to others.

At initialization the logits stay the same up to rounding, and bit-identical if `gain` is a power of two. Activations
and gradients change, so training differs from the first step on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from gnmr.attachment.ranks.reduce import local, shard_like
from gnmr.errors import UserError
from gnmr.lab.models.decoders import Block, Decoder, Llama, SwiGLU
from gnmr.lab.models.moe import MoEMLP


def add_outlier_channels(model: Decoder, number: int, gain: float, generator: torch.Generator | None = None) -> None:
    """Scale `number` channels of every source above by `gain` > 0, in place. Call it once, after `init_weights`.

    `generator` (None: the CPU's default generator) draws the channels of each source in module order, so they depend
    only on its seed and the architecture. In FP32 the weights are exact up to rounding; call this before a cast to
    BF16. Raises UserError, with nothing changed, if `number` exceeds the narrowest source.
    """
    OutlierWindow(model, number, gain, 1, 1, generator).begin_step(1)


class OutlierWindow:
    """Outlier channels in the live weights during the steps `start` to `stop`, inclusive. Steps count from 1.

    Call `begin_step` before each step, in every process. Both switches preserve the model's function up to rounding. If
    `gain` is a power of two, as recommended, they preserve it bit for bit, even in BF16. The optimizer's moments are
    not changed. Its updates to a divided column during the window are multiplied by `gain` at the end of the window.
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
        """Draw the channels without changing the weights. Raises UserError for too many channels."""
        widths = [_weight(source).shape[0] for source, _, _ in _pairs(model)]
        if number > min(widths):
            raise UserError(
                f"model.outlier_channels.number={number}: the narrowest activation has {min(widths)} channels"
            )
        device = "cpu" if generator is None else generator.device
        self._channels = [torch.randperm(w, generator=generator, device=device)[:number].cpu() for w in widths]
        self._model, self._gain, self.start, self.stop = model, gain, start, stop
        self.on = False
        """True while the weights contain the outlier channels."""

    def begin_step(self, step: int) -> None:
        """Switch the channels on or off at the borders of the window. Only these two steps may wait for the device."""
        # Multiplying by the gain and by its reciprocal is exact for powers of two.
        wanted = self.start <= step <= self.stop
        if wanted != self.on:
            self._scale(self._gain if wanted else 1 / self._gain)
            self.on = wanted

    @torch.no_grad()
    def _scale(self, gain: float) -> None:
        if next(self._model.parameters()).is_meta:  # shapes without numbers, whose products load much of torch
            return
        for (source, readers, heads), chosen in zip(_pairs(self._model), self._channels, strict=True):
            scale = torch.ones(_weight(source).shape[0], device="cpu")
            scale[chosen] = gain
            for parameter in source.parameters():  # a norm's gain and bias, or a linear's rows and bias
                rows = scale.to(parameter.device).view(-1, *[1] * (parameter.dim() - 1)).expand(parameter.shape)
                local(parameter).mul_(shard_like(rows, parameter))
            # With grouped queries, one channel of v feeds the same column of every query head of its group.
            columns = scale.view(heads[0], -1).repeat_interleave(heads[1], dim=0).flatten()
            # Dividing the columns that read a channel undoes its gain.
            for reader in readers:
                of_columns = columns.to(reader.weight.device).expand(reader.weight.shape)
                local(reader.weight).div_(shard_like(of_columns, reader.weight))

    def touched(self) -> list[str]:
        """Return the names of the linears that write or read one of the channels, in module order."""
        of_pairs = {module for source, readers, _ in _pairs(self._model) for module in (source, *readers)}
        modules = self._model.named_modules()
        return [name for name, module in modules if module in of_pairs and isinstance(module, nn.Linear)]

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, which JSON can store: whether the channels are on, and the channels of each source."""
        return {"on": self.on, "channels": [channels.tolist() for channels in self._channels]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state without changing the weights, which must be the weights at the time of `state_dict`."""
        self.on = state["on"]
        self._channels = [torch.tensor(channels, dtype=torch.int64) for channels in state["channels"]]


def _pairs(model: Decoder) -> Iterator[tuple[nn.Module, list[nn.Linear], tuple[int, int]]]:
    """Yield (source, linears that read it, (heads of the source, number of reads of each head))."""
    for block in cast("list[Block]", model.layers):
        attn, mlp = block.self_attn, block.mlp
        yield block.input_layernorm, [attn.q_proj, attn.k_proj, attn.v_proj], (1, 1)
        yield attn.v_proj, [attn.o_proj], (attn.num_kv_heads, attn.num_heads // attn.num_kv_heads)
        # SwiGLU is linear in up, and GELU is not linear, so only SwiGLU has a pair of up and down.
        if isinstance(mlp, SwiGLU):
            yield block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], (1, 1)
            yield mlp.up_proj, [mlp.down_proj], (1, 1)
        else:
            readers = mlp.readers() if isinstance(mlp, MoEMLP) else [cast(nn.Linear, mlp.up_proj)]
            yield block.post_attention_layernorm, readers, (1, 1)
    if isinstance(model, Llama) and not model.config.tied_head:
        yield model.norm, [model.lm_head], (1, 1)


def _weight(source: nn.Module) -> Tensor:
    return cast(Tensor, source.weight)
