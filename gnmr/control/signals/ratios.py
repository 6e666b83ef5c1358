"""Signals that compare a value of a unit with the unit's own past: R = ratio / threshold.

# gsnr: the inverse gradient signal-to-noise ratio

It is high if noise between micro-batches dominates a unit's gradient. With g_d the gradient of micro-batch d of the
step's D:

    GSNR[t]  = ||mean_d g_d||^2 / (mean_d ||g_d||^2 - ||mean_d g_d||^2)
    ratio[t] = H[t-1] / (GSNR[t] + eps)          R = ratio / threshold          H: moving mean of the GSNR

The unit form has two scalars per unit instead of the source's per-coordinate variances. With D micro-batches ||mean
g||^2 contains 1/D of the noise itself, the same in every step. The ratio is therefore less sensitive the fewer
micro-batches there are.

Source: arXiv 2309.13681 defines the per-coordinate ratio; the unit form and the decay are ours, and arXiv 2606.00539
ranks it without a threshold (table 11). The signal needs micro_square: two or more micro-batches per step, and one pass
over a copy of the gradients for each (its table 11: 28% more step time, 7% more memory).

# jacobian: the spread of the weights over the spread of their inputs

It is a cheap proxy for the size of a block's Jacobian. The upper bounds of a Transformer sub-layer's Jacobian are, up
to factors that depend only on the widths,

    MLP         std(W_up) std(W_down) / std(x')        x': input of up_proj       factor (sqrt(d) + sqrt(d_ff))^2
    attention   std(W_o) / std(x)                      x: input of q_proj         factor 2 sqrt(d) c

Every unit has the value of its sub-layer and is compared with its own past. The factors cancel in this ratio, so they
are omitted.

    ratio[t] = value[t] / (H[t-1] + eps)          R = ratio / threshold          H: moving mean of the value

Units are grouped by their names up to the last dot. A group with a q_proj and an o_proj is an attention, one with an
up_proj and a down_proj an MLP. Any other unit uses std(W) / std(x) of its own weights and inputs. If it has several
operators (a block, a layer, an expert), the deviations cover all their weights and all their inputs.

Source: the bounds are from arXiv 2312.16903; the proxy and the decay are ours, and arXiv 2606.00539 ranks such a proxy
without a threshold (table 11). Needs weight_std (a pass over the weights) and input_std (a pass over the inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.history import Ema
from gnmr.control.signals.signal import TINY, Context, Evidence, RatioSignal, ratio, seen
from gnmr.control.threshold import Threshold, check_threshold


class Gsnr(RatioSignal):
    """Mean of the past GSNR over this step's. If the micro-batches agree entirely, GSNR is 1 / eps.

    A step in which fewer than two micro-batches contribute (a micro_square of 0) has none, and its ratio is 1.
    """

    columns = ("inverse_gsnr",)
    needs = ("micro_square",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.5, decay: float = 0.99, eps: float = 1e-8) -> None:
        super().__init__(context, Ema(len(context.names), context.device, decay), eps)
        self.threshold = check_threshold(threshold, "threshold")

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        micro, square = evidence["micro_square"], evidence["norm"].square()
        noise = torch.maximum(micro - square, self.eps * micro)  # rounding may make it negative for equal gradients
        # Signal over noise; of gradients that agree entirely it is 1 / eps.
        gsnr = square / noise.clamp(min=TINY)
        # Against the mean of the past: low signal gives a ratio above 1.
        mean, entered = self.history.mean, seen(evidence) & (micro > 0)
        column = torch.where(gsnr.isfinite() | (micro == 0), ratio(mean, gsnr, (mean != 0) & entered, self.eps), gsnr)
        self.history.update(gsnr, entered)
        return self.verdict(evidence, step, column)


class Jacobian(RatioSignal):
    """The value above over its own past; weights change slowly, so most of the ratio is the input's spread."""

    columns = ("jacobian_ratio",)
    needs = ("weight_std", "input_std")

    def __init__(
        self, context: Context, *, threshold: Threshold = 1.05, decay: float = 0.99, eps: float = 1e-8
    ) -> None:
        super().__init__(context, Ema(len(context.names), context.device, decay), eps)
        self.threshold = check_threshold(threshold, "threshold")
        indices = torch.tensor(_sources(context.names), device=context.device)
        self._first, self._second, self._input = indices.unbind(1)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, spread = evidence["weight_std"], evidence["input_std"][self._input]
        weights = torch.cat([weight, weight.new_ones(1)])  # a unit with one weight multiplies it by the 1 at the end
        # std(W_up) std(W_down) / std(x) of an MLP, std(W_o) / std(x) of an attention
        value = weights[self._first] * weights[self._second] / (spread + self.eps)
        mean, entered = self.history.mean, seen(evidence) & (spread != 0)  # 0: a group that nothing ran through
        column = ratio(value, mean, (mean != 0) & entered, self.eps)
        self.history.update(value, entered)
        return self.verdict(evidence, step, column)


def _sources(names: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Return the indices of each unit's two weights (the second may be the 1 after the last) and of its input."""
    index_of, no_second = {name: i for i, name in enumerate(names)}, len(names)
    sources = []
    for i, name in enumerate(names):
        parent = name[: name.rfind(".") + 1]
        q, o, up, down = (index_of.get(parent + linear) for linear in ("q_proj", "o_proj", "up_proj", "down_proj"))
        if q is not None and o is not None:
            sources.append((o, no_second, q))
        elif up is not None and down is not None:
            sources.append((up, down, up))
        else:
            sources.append((i, no_second, i))
    return sources
