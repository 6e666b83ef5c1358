"""LLaMA and GPT: their layers, and the decoder that combines them.

Every linear is an `nn.Linear` that is called as a module. Linears that read the same activation get the same tensor
object, so that converted linears can share one saved copy of it.

Shape suffixes
    B batch             T sequence          D hidden width      V vocabulary
    H query heads       G key/value heads   K width of a head   F MLP width
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnmr.lab.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension. As in Hugging Face, the statistics are FP32 for every dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map x_BTD to (B, T, D) of the same dtype."""
        # The gain is applied outside: it rounds like Hugging Face, and its backward pass is a third faster on a CPU.
        return F.rms_norm(x_BTD, self.weight.shape, None, self.eps) * self.weight


class Rotary(nn.Module):
    """Rotary position embedding in the convention of Hugging Face: channel i of a head rotates with channel i + K/2.

    The tables are not buffers. They are computed in FP32 at the first use and then rounded to the activations' dtype.
    So `model.to(bfloat16)` cannot round the angles, and a model that was built on the meta device needs no repair.
    """

    def __init__(self, head_width: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_width, self.max_seq_len, self.theta = head_width, max_seq_len, theta
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos_T1K and sin_T1K for the positions of x, in x's dtype and on its device.

        sin is negative in its first half, so that `rotate` needs no negation.
        """
        if self._tables is None or self._tables[0].dtype != x_BTD.dtype or self._tables[0].device != x_BTD.device:
            with torch.inference_mode(False), torch.no_grad():  # the first call may be in an evaluation
                self._tables = self._compute(x_BTD.dtype, x_BTD.device)
        cos_S1K, sin_S1K = self._tables
        return cos_S1K[: x_BTD.shape[1]], sin_S1K[: x_BTD.shape[1]]

    def _compute(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        # Angle of position t and channel pair i: t theta^(-2i/K).
        exponent = torch.arange(0, self.head_width, 2, dtype=torch.float32, device="cpu") / self.head_width
        # The CPU computes the angles for every device, so the tables do not depend on a device's cos and sin.
        position = torch.arange(self.max_seq_len, dtype=torch.float32, device="cpu")
        angle = torch.outer(position, 1.0 / self.theta**exponent).unsqueeze(1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1).to(device, dtype), torch.cat((-sin, sin), -1).to(device, dtype)


def rotate(x_BTHK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    """Rotate the pairs (i, i + K/2) by their position's angle. The roll exchanges the two halves."""
    return x_BTHK * cos_T1K + x_BTHK.roll(x_BTHK.shape[-1] // 2, -1) * sin_T1K


def causal_attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    """Return the attention output y_BTHK in the dtype of q_BTHK. G key/value heads serve H query heads.

    CPUs compute in FP32 for every dtype, because PyTorch's 16-bit kernels are slower there, especially in backward.
    """
    dtype = q_BTHK.dtype
    if q_BTHK.device.type == "cpu":
        q_BTHK, k_BTGK, v_BTGK = q_BTHK.float(), k_BTGK.float(), v_BTGK.float()
    y_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
    )
    return y_BHTK.transpose(1, 2).to(dtype)


class Attention(nn.Module):
    """Causal self-attention, with grouped queries if `num_kv_heads` is smaller than `num_heads`."""

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_width = config.hidden_size // config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_width, bias=bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map x_BTD to (B, T, D). If `rotary` (the tables of `Rotary`) is None, queries and keys are not rotated."""
        B, T, _ = x_BTD.shape
        q_BTHK = self.q_proj(x_BTD).view(B, T, self.num_heads, self.head_width)
        k_BTGK = self.k_proj(x_BTD).view(B, T, self.num_kv_heads, self.head_width)
        v_BTGK = self.v_proj(x_BTD).view(B, T, self.num_kv_heads, self.head_width)
        if rotary is not None:  # positions enter through the angles between queries and keys
            q_BTHK, k_BTGK = rotate(q_BTHK, *rotary), rotate(k_BTGK, *rotary)
        y_BTHK = causal_attention(q_BTHK, k_BTGK, v_BTGK)
        return self.o_proj(y_BTHK.reshape(B, T, -1))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map x_BTD to (B, T, D) of the same dtype."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class GELUMLP(nn.Module):
    """down(gelu(up(x))) with biases. GELU is the tanh form of GPT-2 (`gelu_new` in Hugging Face), not the exact one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map x_BTD to (B, T, D) of the same dtype."""
        return self.down_proj(F.gelu(self.up_proj(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, input_layernorm: nn.Module, attn: Attention, post_layernorm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = attn
        self.post_attention_layernorm = post_layernorm
        self.mlp = mlp

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Map x_BTD to (B, T, D) of the same dtype. See `Attention` for `rotary`."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Decoder(nn.Module):
    """Base class of all models: embedding, blocks, norm, head, initialization.

    `layers` is an `nn.ModuleList` of blocks. Set `activation_checkpointing` to recompute each block's forward pass
    during backward. The parameters have the constructors' defaults until `init_weights` or `load_state_dict`.
    """

    layers: nn.ModuleList
    norm: nn.Module
    init_std = 0.02
    """Standard deviation of the normal initialization."""
    auxiliary_loss: Tensor | None = None
    """Scalar that training adds to the loss of the last forward pass, or None. It is never part of a perplexity."""

    def __init__(self, config: ModelConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.config, self.max_seq_len = config, max_seq_len
        self.activation_checkpointing = False
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)

    def embed(self, tokens_BT: Tensor) -> tuple[Tensor, Any]:
        """Return x_BTD and the second argument of the blocks: the tables of a rotary model, else None."""
        raise NotImplementedError

    def head(self, x_BTD: Tensor) -> Tensor:
        """Return logits_BTV."""
        raise NotImplementedError

    def residual_std(self) -> float:
        """Return the initial standard deviation of the projections that write to the residual stream."""
        return self.init_std

    def statistics(self) -> dict[str, Tensor]:
        """Return values of the last forward pass to record: scalars on the device, with the same names each time."""
        return {}

    def experts(self) -> list[nn.Module]:
        """Return the modules that a forward pass may give no token, and so no gradient."""
        return []

    def reached(self) -> Tensor:
        """Return (E,) bool: the `experts` that received a token in the last forward pass."""
        raise NotImplementedError

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map tokens_BT (int64) to logits_BTV in the weights' dtype. Raises ValueError if T exceeds `max_seq_len`."""
        if tokens_BT.shape[1] > self.max_seq_len:
            raise ValueError(f"sequence of {tokens_BT.shape[1]} tokens: the model was built for {self.max_seq_len}")
        x_BTD, beside = self.embed(tokens_BT)
        for block in self.layers:
            x_BTD = self.through(block, x_BTD, beside)
        return self.head(self.norm(x_BTD))

    def through(self, block: nn.Module, x_BTD: Tensor, beside: Any) -> Any:
        """Run the block. With `activation_checkpointing`, backward recomputes it."""
        if self.activation_checkpointing:
            return checkpoint(block, x_BTD, beside, use_reentrant=False)
        return block(x_BTD, beside)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw linears and embeddings from normal(0, init_std), or with `residual_std` for o_proj and down_proj.

        Gains are set to one and biases to zero. Draws are FP32, in module order, on the generator's device (None: the
        CPU's default generator). They are then rounded to the weights' dtype, so one seed gives one model for all
        dtypes and devices. On the meta device nothing happens.
        """
        device = "cpu" if generator is None else generator.device
        for name, parameter in self.named_parameters():
            owner, kind = name.split(".")[-2:]
            if kind == "bias":
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            elif not parameter.is_meta:
                std = self.residual_std() if owner in ("o_proj", "down_proj") else self.init_std
                # Drawn in FP32 on the generator's device, so that one seed gives one model everywhere.
                draw = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                parameter.copy_(draw.normal_(0.0, std, generator=generator))


class Llama(Decoder):
    """LLaMA: RMSNorm, rotary positions, SwiGLU, a separate head (or the embedding with `tied_head`), no biases.

    Parameters have the names of Hugging Face's LlamaForCausalLM without its leading "model.", and the logits are equal.
    tokens_BT int64 -> logits_BTV in the weights' dtype. Does not wait for the device.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__(config, vocab_size, max_seq_len)
        width, eps = config.hidden_size, config.norm_eps
        self.rotary = Rotary(width // config.num_heads, max_seq_len, config.rope_theta)
        self.layers = nn.ModuleList(
            Block(RMSNorm(width, eps), Attention(config, bias=False), RMSNorm(width, eps), SwiGLU(config))
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(width, eps)
        if not config.tied_head:
            self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def embed(self, tokens_BT: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x_BTD = self.embed_tokens(tokens_BT)
        return x_BTD, self.rotary(x_BTD)

    def head(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.embed_tokens.weight) if self.config.tied_head else self.lm_head(x_BTD)


class GPT(Decoder):
    """GPT: LayerNorm, learned positions, GELU (the tanh form of GPT-2), biases, and a head tied to the embedding.

    This is the architecture of GPT-2 with the module names of LLaMA. Queries, keys and values are three linears, so
    that one list of name patterns serves both models. tokens_BT int64 -> logits_BTV in the weights' dtype, for T up to
    `max_seq_len`. Does not wait for the device.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__(config, vocab_size, max_seq_len)
        width, eps = config.hidden_size, config.norm_eps
        self.embed_positions = nn.Embedding(max_seq_len, width)
        self.layers = nn.ModuleList(self.block(index) for index in range(config.num_layers))
        self.norm = nn.LayerNorm(width, eps)

    def block(self, index: int) -> Block:
        """Return the block of layer `index`."""
        width, eps = self.config.hidden_size, self.config.norm_eps
        attn, mlp = Attention(self.config, bias=True), GELUMLP(self.config)
        return Block(nn.LayerNorm(width, eps), attn, nn.LayerNorm(width, eps), mlp)

    def embed(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.embed_tokens(tokens_BT) + self.embed_positions.weight[: tokens_BT.shape[1]], None

    def head(self, x_BTD: Tensor) -> Tensor:
        # The head is not a module: a model built on the meta device would lose the tie when it is materialized.
        return F.linear(x_BTD, self.embed_tokens.weight)

    def residual_std(self) -> float:
        return self.init_std / math.sqrt(2 * self.config.num_layers)
