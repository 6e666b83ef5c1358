"""A cheap proxy for the size of a block's Jacobian: the spread of the weights over the spread of their inputs.

The upper bounds of a Transformer sub-layer's Jacobian are, up to factors that depend only on the widths,

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
from gnmr.control.signals.signal import Context, Evidence, RatioSignal, ratio, seen
from gnmr.control.spec import Threshold, check


class Jacobian(RatioSignal):
    """The value above over its own past; weights change slowly, so most of the ratio is the input's spread."""

    columns = ("jacobian_ratio",)
    needs = ("weight_std", "input_std")

    def __init__(
        self, context: Context, *, threshold: Threshold = 1.05, decay: float = 0.99, eps: float = 1e-8
    ) -> None:
        super().__init__(context, Ema(len(context.names), context.device, decay), eps)
        self.threshold = check(threshold, "threshold")
        first, second, read = zip(*_sources(context.names), strict=True)
        self._first, self._second, self._read = (torch.tensor(i, device=context.device) for i in (first, second, read))

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, spread = evidence["weight_std"], evidence["input_std"][self._read]
        with_one = torch.cat([weight, weight.new_ones(1)])
        value = with_one[self._first] * with_one[self._second] / (spread + self.eps)
        mean, entered = self.history.mean, seen(evidence) & (spread != 0)  # 0: a group that nothing ran through
        column = ratio(value, mean, (mean != 0) & entered, self.eps)
        self.history.update(value, entered)
        return self.verdict(evidence, step, column)


def _sources(names: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Return the indices of each unit's two weights (the second may be the 1 after the last) and of its input."""
    place, one = {name: i for i, name in enumerate(names)}, len(names)
    sources = []
    for i, name in enumerate(names):
        parent = name[: name.rfind(".") + 1]
        q, o, up, down = (place.get(parent + part) for part in ("q_proj", "o_proj", "up_proj", "down_proj"))
        if q is not None and o is not None:
            sources.append((o, one, q))
        elif up is not None and down is not None:
            sources.append((up, down, up))
        else:
            sources.append((i, one, i))
    return sources
