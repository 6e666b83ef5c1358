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

Left out: the final norm of a tied head (gpt, moe), which cannot be divided without changing the embedding; and the
up/down pair of gpt and moe, because GELU(gain * x) is not gain * GELU(x). In moe the logits of the router are equal
to rounding, so a token whose choice of experts depends on the last bit may go elsewhere.

At initialisation the logits stay the same (to rounding; to the last bit where `gain` is a power of two);
activations and gradients change, so training takes another course from the first step on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from gnmr.distributed.shards import local, part
from gnmr.errors import UserError
from gnmr.lab.models.layers import Block, Decoder, SwiGLU
from gnmr.lab.models.llama import Llama
from gnmr.lab.models.moe import MoEMLP


def add_outlier_channels(model: Decoder, number: int, gain: float, generator: torch.Generator | None = None) -> None:
    """Scale `number` channels of every source above by `gain` > 0, in place; call it once, after `init_weights`.

    The channels of each source are drawn by `generator` (None: the CPU's default one) in module order, so they depend
    on its seed and the architecture alone. In FP32 the weights are exact to rounding; do it before a cast to BF16.
    Raises UserError, with nothing changed, if `number` exceeds the narrowest source.
    """
    OutlierWindow(model, number, gain, 1, 1, generator).begin_step(1)


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
        """Draw the channels and leave the weights alone.

        Raises UserError for too many channels and a window that ends before it begins.
        """
        if not 1 <= start <= stop:
            raise UserError(f"outlier channels from step {start} to {stop}: needs 1 <= start <= stop")
        widths = [_weight(source).shape[0] for source, _, _ in _pairs(model)]
        if number > min(widths):
            raise UserError(
                f"model.outlier_channels.number={number}: the narrowest activation has {min(widths)} channels"
            )
        device = "cpu" if generator is None else generator.device
        self._channels = [torch.randperm(w, generator=generator, device=device)[:number].cpu() for w in widths]
        self._model, self._gain, self.start, self.stop = model, gain, start, stop
        self.on = False
        """The weights hold the outlier channels now."""

    def begin_step(self, step: int) -> None:
        """Switch them on or off at the borders of the window; only these two steps may wait for the device."""
        wanted = self.start <= step <= self.stop
        if wanted != self.on:
            self._scale(self._gain if wanted else 1 / self._gain)
            self.on = wanted

    @torch.no_grad()
    def _scale(self, gain: float) -> None:
        for (source, readers, heads), chosen in zip(_pairs(self._model), self._channels, strict=True):
            scale = torch.ones(_weight(source).shape[0], device="cpu")
            scale[chosen] = gain
            for parameter in source.parameters():  # a norm's gain and bias, a linear's rows and bias
                rows = scale.to(parameter.device).view(-1, *[1] * (parameter.dim() - 1)).expand(parameter.shape)
                local(parameter).mul_(part(rows, parameter))
            # With grouped queries one channel of v feeds the same column of every query head of its group.
            columns = scale.view(heads[0], -1).repeat_interleave(heads[1], dim=0).flatten()
            for reader in readers:
                of_columns = columns.to(reader.weight.device).expand(reader.weight.shape)
                local(reader.weight).div_(part(of_columns, reader.weight))

    def touched(self) -> list[str]:
        """Return the names of the linears that write or read one of the channels, in module order."""
        of_pairs = {module for source, readers, _ in _pairs(self._model) for module in (source, *readers)}
        found = (name for name, module in self._model.named_modules() if module in of_pairs)
        return [name for name in found if isinstance(self._model.get_submodule(name), nn.Linear)]

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers (JSON will do): whether it is on, and which channels of each source."""
        return {"on": self.on, "channels": [channels.tolist() for channels in self._channels]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave the weights alone: they must be those of the time of `state_dict`."""
        self.on = state["on"]
        self._channels = [torch.tensor(channels, dtype=torch.int64) for channels in state["channels"]]


def _pairs(model: Decoder) -> Iterator[tuple[nn.Module, list[nn.Linear], tuple[int, int]]]:
    """Yield (source, linears that read it, heads of the source and how often each of them is read)."""
    for block in cast("list[Block]", model.layers):
        attn, mlp = block.self_attn, block.mlp
        yield block.input_layernorm, [attn.q_proj, attn.k_proj, attn.v_proj], (1, 1)
        yield attn.v_proj, [attn.o_proj], (attn.num_kv_heads, attn.num_heads // attn.num_kv_heads)
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
