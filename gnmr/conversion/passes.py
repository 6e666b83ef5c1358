"""One forward pass of an operator, and how activation checkpointing finds it again.

A recomputation must repeat the original computation, whatever changed since. It uses the path, the delayed scales and
the random numbers of the pass that it repeats. A checkpointed region is an object that lives as long as its graph. In
reentrant checkpointing (also of other libraries) this is the context of the autograd function whose forward pass runs
the region. With `use_reentrant=False` it is PyTorch's frame. The region keeps its passes by operator in their order.
The recomputation runs below the same object and takes them in that order.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnmr.formats.recipes import ExecutionPath
from gnmr.formats.rounding import Key

_KEPT, _RUN = "_gnmr_passes", "_gnmr_run"
_NAMES = frozenset({"forward", "backward", "checkpoint", "unpack_hook"})
_CHECKPOINT = ("torch", "utils", "checkpoint.py")


@dataclass(eq=False)
class Pass:
    """Settings of one forward pass, for its backward pass and for a recomputation."""

    path: ExecutionPath | None
    """The format or recipe; None: the operator is a plain linear (`high_precision`)."""
    recovered: frozenset[str]
    sound: frozenset[str]
    step: int
    history: Tensor | None
    """Magnitudes from which delayed scales are taken."""
    replaced: Tensor | None
    """Whether a weight was replaced before this pass; see `AmaxHistory`."""
    counts: bool
    """Whether the pass belongs to training, not to evaluation."""
    kept: bool = False
    """Whether a checkpointed region keeps the pass."""
    key: Key | None = None
    """Key of the random numbers of its casts, once a cast has drawn."""


def repeated(operator: object) -> tuple[Pass | None, list[Any]]:
    """Return (the pass that is being recomputed or None, the enclosing regions, where a new one may begin)."""
    around, again = _enclosing()
    kept: dict[object, list[Pass]] = getattr(again, _KEPT, {})
    known = kept.get(operator)
    if not known:
        return None, around
    counts: dict[object, int] = {}
    task = torch._C._current_graph_task_id()
    run, so_far = getattr(again, _RUN, (None, counts))
    if run == task:
        counts = so_far
    else:
        setattr(again, _RUN, (task, counts))
    number = counts[operator] = counts.get(operator, -1) + 1
    return known[number % len(known)], around


def keep(operator: object, begun: Pass, around: list[Any]) -> None:
    """Let the regions `around` keep the pass."""
    for region in around:
        if not hasattr(region, _KEPT):
            setattr(region, _KEPT, {})
        getattr(region, _KEPT).setdefault(operator, []).append(begun)
        begun.kept = True


def _enclosing() -> tuple[list[Any], Any]:
    """Return (running regions up to the innermost recomputation, the region of that recomputation or None)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # Outside of checkpointing, gradients are on, there are no hooks for saved tensors, and no backward pass runs.
    if hooks is None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        return [], None
    found: list[Any] = []
    if hooks is not None:  # for the case that no PyTorch function is on the stack (`composable.checkpoint`)
        cells = [cell.cell_contents for cell in getattr(hooks[0], "__closure__", None) or ()]
        found += [one for one in cells if hasattr(one, "weak_holders")]
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _NAMES:
            if code.co_varnames[:1] == ("ctx",):
                region = frame.f_locals["ctx"]
                if code.co_name == "backward":
                    return found, region
                found.append(region)
            elif code.co_filename.replace("\\", "/").split("/")[-3:] == list(_CHECKPOINT):
                if code.co_name == "unpack_hook":
                    return found, frame.f_locals.get("frame")
                gen = getattr(frame.f_locals.get("gen"), "gi_frame", None)
                region = None if gen is None else gen.f_locals.get("new_frame")
                if region is not None and not any(region is one for one in found):
                    found.append(region)
        frame = frame.f_back  # type: ignore[assignment]
    return found, None
