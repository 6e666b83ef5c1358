"""MoE: the GPT of `decoders.py` with a mixture of experts instead of every MLP.

A router gives each token a probability for every expert. The k experts with the largest probabilities process the
token:

    p = softmax(W_r x)                          FP32 for every dtype
    y = sum over the chosen e of w_e expert_e(x)
    w_e = p_e / sum of the chosen p             for k > 1 (GShard, arXiv 2006.16668, Mixtral)
    w_e = p_e                                   for k = 1 (Switch Transformer, arXiv 2101.03961)

**Capacity is unlimited, and no token is dropped.** The N k assignments are sorted by expert. The rows of an expert are
then one slice, and each of its linears is one GEMM. Experts are modules with plain linears
(`layers.N.mlp.experts.E.up_proj`), so each expert can be a separate unit. The router (`layers.N.mlp.router`) is a
linear of a separate type that no `*_proj` matches. It is stored in the run's dtype and computed in FP32.

**An expert without tokens** gets no gradient in that pass. The `.grad` of its parameters stays None (after
`zero_grad(set_to_none=True)`), so its units are not observed in that step.

**Load balancing** (Switch Transformer, Eqs. 4 to 6, for k choices as in Megatron) adds, per layer and forward pass,

    L = E sum_e f_e P_e         f_e: share of the N k assignments that went to e;  P_e: mean of p_e over the N tokens

L is 1 for an even load, and E if one expert receives all tokens. The gradient flows only through P. Training adds
`balance_coef` times the sum over the layers (`auxiliary_loss`), which reported losses exclude.

**Synchronization:** the host needs the slices' lengths, so on a GPU it waits once per layer. A grouped GEMM on stacked
weights would avoid the wait, but experts could not be switched individually. Under torch.compile, the mixture runs
between the graphs.

Shape suffixes, in addition to those of `decoders.py`
    N tokens of the batch, B T      E experts       k experts per token             R rows after dispatch, N k
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnmr.compiler import between_graphs, compiler_loaded
from gnmr.lab.config import ModelConfig
from gnmr.lab.models.decoders import GELUMLP, GPT, Attention, Block


class ExpertShares(NamedTuple):
    """The assignments of one forward pass in one layer."""

    share_E: Tensor
    """Share of the assignments of each expert, FP32, without gradient."""
    balance_loss: Tensor
    """L of the module docstring, a scalar in FP32, with its graph."""


class ExpertRouter(nn.Linear):
    """x_ND -> logits_NE without bias, computed in FP32 for every dtype of x and the weight, even under autocast."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__(width, num_experts, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map x_ND to logits_NE float32."""
        kind = input.device.type
        with torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext():
            return F.linear(input.float(), self.weight.float())


class MoEMLP(nn.Module):
    """The mixture of a layer: x_BTD -> (y_BTD, ExpertShares)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        options = config.experts
        self.top_k = options.top_k
        # With one choice each normalized weight would be 1, and the gate could not learn.
        self.normalized = options.top_k > 1
        self.router = ExpertRouter(config.hidden_size, options.number)
        self.experts = nn.ModuleList(GELUMLP(config) for _ in range(options.number))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, ExpertShares]:
        """Map x_BTD to (y_BTD, ExpertShares). On a GPU, wait once for the number of tokens of each expert."""
        return self._between_graphs(x_BTD) if compiler_loaded() else self._mix(x_BTD)

    def _mix(self, x_BTD: Tensor) -> tuple[Tensor, ExpertShares]:
        x_ND = x_BTD.flatten(0, 1)
        weight_Nk, expert_Nk, count_E, balance_loss = self.route(x_ND)
        order_R = expert_Nk.flatten().argsort(stable=True)
        token_R = order_R // self.top_k
        row_R = torch.arange(len(order_R), device=order_R.device)
        place_Nk = torch.empty_like(order_R).scatter_(0, order_R, row_R).view_as(expert_Nk)

        rows_RD = _Dispatch.apply(x_ND, token_R, place_Nk)
        slices = rows_RD.split(_lengths(count_E, len(order_R)))
        # An expert without rows is called too, so that its linears record an empty pass. Its output stays outside of
        # the graph, so no gradient reaches it.
        outputs = [expert(rows) for expert, rows in zip(self.experts, slices, strict=True)]
        y_ND = _Combine.apply(torch.cat([y for y in outputs if len(y) > 0]), weight_Nk, order_R, token_R, place_Nk)
        return y_ND.view_as(x_BTD), ExpertShares(count_E / len(order_R), balance_loss)

    _between_graphs = between_graphs(_mix)

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (weight_Nk in FP32, expert_Nk int64, assignments count_E int64, balancing loss)."""
        logits_NE = self.router(x_ND)
        num_experts = logits_NE.shape[-1]
        expert_Nk = logits_NE.detach().topk(self.top_k, dim=-1).indices
        p_NE = _softmax(logits_NE)
        if self.normalized:  # p_e / sum of the chosen p, without a sum that can underflow
            weight_Nk = _softmax(logits_NE.gather(-1, expert_Nk))
        else:
            weight_Nk = p_NE.gather(-1, expert_Nk)
        count_E = torch.zeros(num_experts, dtype=torch.int64, device=x_ND.device)
        count_E.index_add_(0, expert_Nk.flatten(), torch.ones_like(expert_Nk).flatten())
        balance_loss = num_experts * (count_E / expert_Nk.numel() * p_NE.mean(dim=0)).sum()
        return weight_Nk, expert_Nk, count_E, balance_loss

    def readers(self) -> list[nn.Linear]:
        """Return the linears that read the mixture's input."""
        return [self.router, *(cast(nn.Linear, expert.up_proj) for expert in self.experts)]


class MoEBlock(Block):
    """A block whose MLP is a mixture: x_BTD -> (x_BTD, ExpertShares)."""

    def forward(self, x_BTD: Tensor, beside: Any = None) -> tuple[Tensor, ExpertShares]:  # type: ignore[override]
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), None)
        y_BTD, routing = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + y_BTD, routing


class MoE(GPT):
    """GPT with mixtures of experts. `routings` holds the assignments of the last forward pass, layer by layer."""

    balance_coef = 0.01
    """Weight of the load-balancing loss in training."""

    def __init__(self, config: ModelConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__(config, vocab_size, max_seq_len)
        self.routings: list[ExpertShares] = []

    def block(self, index: int) -> Block:
        width, eps = self.config.hidden_size, self.config.norm_eps
        attn, mlp = Attention(self.config, bias=True), MoEMLP(self.config)
        return MoEBlock(nn.LayerNorm(width, eps), attn, nn.LayerNorm(width, eps), mlp)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.routings = []
        return super().forward(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor, beside: Any) -> Tensor:
        x_BTD, routing = super().through(block, x_BTD, beside)
        self.routings.append(routing)
        return x_BTD

    @property
    def auxiliary_loss(self) -> Tensor | None:  # type: ignore[override]
        if not self.routings:
            return None
        return self.balance_coef * torch.stack([routing.balance_loss for routing in self.routings]).sum()

    @torch.no_grad()
    def statistics(self) -> dict[str, Tensor]:
        """Return load statistics of each layer.

        They are the largest and smallest share of the assignments of an expert, the entropy of the shares (nats; log E
        for an even load), and the unweighted balancing loss.
        """
        return {
            f"layers.{index}.mlp.{name}": value
            for index, (share_E, balance_loss) in enumerate(self.routings)
            for name, value in (
                ("max_share", share_E.max()),
                ("min_share", share_E.min()),
                ("entropy", torch.special.entr(share_E).sum()),
                ("balance_loss", balance_loss.detach()),
            )
        }

    def experts(self) -> list[nn.Module]:
        return [expert for block in self.layers for expert in cast(MoEMLP, block.mlp).experts]

    @torch.no_grad()
    def reached(self) -> Tensor:
        return torch.cat([routing.share_E for routing in self.routings]) > 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy, without the graph of the last step."""
        return {**self.__dict__, "routings": []}


def _lengths(count_E: Tensor, total: int) -> list[int]:
    """Return the rows of every expert on the host, waiting for the device. On the meta device they are even."""
    if count_E.is_meta:
        number = len(count_E)
        return [total // number + (expert < total % number) for expert in range(number)]
    return count_E.tolist()


def _softmax(x_NE: Tensor) -> Tensor:
    """Return the softmax of each row, computed on the columns of the transpose: ten times faster on a CPU."""
    return x_NE.t().softmax(dim=0).t()


def _refuse_twice() -> None:
    """Raise RuntimeError in a backward pass that is itself differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError("the mixture of experts has no second derivatives (create_graph=True)")


class _Dispatch(torch.autograd.Function):
    """x_ND -> rows_RD, each token once for each of its experts, grouped by expert.

    Row r is assignment order_R[r] of token token_R[r], and assignment (n, j) is row place_Nk[n, j]. Backward sums each
    token's bag of k rows. Autograd would add rows by index, which is slow on a CPU and has no fixed order with several
    threads.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, place_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(place_Nk)
        return x_ND.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_twice()
        (place_Nk,) = ctx.saved_tensors
        return F.embedding_bag(place_Nk, grads[0].contiguous(), mode="sum"), None, None


class _Combine(torch.autograd.Function):
    """rows_RD -> y_ND, the sum of each token's k rows by weight_Nk; reverses `_Dispatch`."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weight_Nk: Tensor, order_R: Tensor, token_R: Tensor, place_Nk: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RD, weight_Nk, order_R, token_R, place_Nk)
        return F.embedding_bag(place_Nk, rows_RD, mode="sum", per_sample_weights=weight_Nk.to(rows_RD.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_twice()
        rows_RD, weight_Nk, order_R, token_R, place_Nk = ctx.saved_tensors
        grad_ND = grads[0].contiguous()
        weight_R1 = weight_Nk.flatten().index_select(0, order_R).to(rows_RD.dtype).unsqueeze(1)
        # Bags of size one multiply each row by its weight while it is read.
        grad_RD = F.embedding_bag(token_R.unsqueeze(1), grad_ND, mode="sum", per_sample_weights=weight_R1)
        # This is the function that autograd would call: each token's gradient times each of its rows. torch has no
        # public name for it; (grad_ND.index_select(...) * rows_RD).sum(-1) replaces it at the cost of one more (R, D).
        k, row_R = place_Nk.shape[1], place_Nk.flatten()
        assignment_R = torch.arange(len(row_R), device=row_R.device)
        grad_weight_R = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            grad_ND, rows_RD, row_R, assignment_R[::k].contiguous(), assignment_R // k, 0
        )
        grad_weight_Nk = grad_weight_R.view_as(place_Nk).to(weight_Nk.dtype)
        return grad_RD, grad_weight_Nk, None, None, None
