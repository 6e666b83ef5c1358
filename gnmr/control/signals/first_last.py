"""The first and the last blocks, always recovered: the habit that Megatron-LM's recipes have.

With `last=0` only the first ones, with `first=0` only the last: a set fixed by hand. A unit's block is the N of
`layers.N` in its name. Where max_o cannot hold all units of these blocks, it is filled from all of them alike: their
first units first (R = 1 + 1 / (1 + place in the block)).
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor

from gnmr.control.signals.base import BlindSignal, Context, Evidence, whole

_BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


class FirstLast(BlindSignal):
    """The units of the `first` and the `last` blocks, so many at either end; `share` as in `BlindSignal`."""

    def __init__(self, context: Context, *, first: int = 1, last: int = 1, share: float | None = None) -> None:
        if not whole(first, "first", 0) + whole(last, "last", 0):
            raise ValueError("first=0 and last=0: one of them must be at least 1")
        members: dict[int, list[int]] = defaultdict(list)
        for i, name in enumerate(context.names):
            if found := _BLOCK.search(name):
                members[int(found[1])].append(i)
        if not members:
            raise ValueError(f"first_last: no unit has layers.N in its name (the first is {context.names[0]})")
        numbers = sorted(members)
        risk = torch.zeros(len(context.names), dtype=torch.float64)
        for number in {*numbers[:first], *numbers[max(0, len(numbers) - last) :]}:
            for place, i in enumerate(members[number]):
                risk[i] = 1 + 1 / (1 + place)
        at_once = min(int((risk > 0).sum()), context.max_o)
        what = f"first={first}, last={last} with max_o={context.max_o}"
        super().__init__(context, share, at_once / len(context.names), what)
        self._risk = risk.to(context.device)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; there are no columns. Does not wait for the device."""
        return self._risk * float(self.falls_due(step, self.rate)), ()
