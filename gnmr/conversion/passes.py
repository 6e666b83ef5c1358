"""One forward pass of an operator, and how activation checkpointing finds it again.

A recomputation must repeat the original computation, whatever changed since. It uses the path, the delayed scales and
the random numbers of the pass that it repeats.

- `torch.utils.checkpoint` with `use_reentrant=False` (and `composable.checkpoint`): a region has a frame, an object
  that lives as long as the region's graph. The passes of a frame are kept by operator in their order, and a
  recomputation takes them in that order.
- Re-entrant checkpointing, also of other libraries: its forward pass looks like an evaluation. A recomputation repeats
  the last pass without gradients. It is refused if the paths have changed since, or if the step has passes on several
  paths, because nothing tells then which pass is repeated.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gnmr.formats.recipes import ExecutionPath
from gnmr.formats.rounding import Key


@dataclass(eq=False)
class Pass:
    """Settings of one forward pass, for its backward pass and for a recomputation."""

    path: ExecutionPath | None
    """The format or recipe; None: the operator is a plain linear (`high_precision`)."""
    recovered: frozenset[str]
    """GEMMs on the recovery path."""
    sound: frozenset[str]
    """GEMMs that a fault of the low path does not hit."""
    step: int
    """Number of the optimizer step, from 1."""
    history: Tensor | None
    """Magnitudes from which delayed scales are taken."""
    replaced: Tensor | None
    """Whether a weight was replaced before this pass; see `AmaxHistory`."""
    counts: bool
    """Whether the pass belongs to training, not to evaluation."""
    checkpointed: bool = False
    """Whether a checkpointed region keeps the pass."""
    key: Key | None = None
    """Key of the random numbers of its casts, once a cast has drawn."""

    def __eq__(self, other: object) -> bool:
        """Return whether both passes belong to one step and have the same paths."""
        if not isinstance(other, Pass):
            return False
        same = self.path is other.path and self.recovered == other.recovered and self.sound == other.sound
        return same and self.step == other.step


@dataclass
class _Region:
    """The passes of a checkpointed region."""

    passes: dict[object, list[Pass]] = field(default_factory=dict)
    """By operator, in the order of the forward pass."""
    graph_task: int = -1
    """The backward pass that recomputes the region now."""
    repeats: dict[object, int] = field(default_factory=dict)
    """Number of passes by operator that this recomputation has repeated."""


_REGIONS: WeakKeyDictionary[Any, _Region] = WeakKeyDictionary()
"""Regions by the frame of their checkpoint."""


class _PassLog:
    """The passes of one operator without gradients in the current step, any of which may be a re-entrant region's."""

    def __init__(self) -> None:
        self._last: Pass | None = None
        self._on_path: Pass | None = None
        """The last pass that was not plain."""
        self._mixed = False
        """Whether passes of the current step ran on several paths."""

    def add(self, begun: Pass) -> None:
        """Record a pass without gradients."""
        # Plain passes are evaluations, as a rule, and say nothing of the path.
        before, self._last = self._on_path, begun
        if begun.path is not None:
            in_step = before is not None and before.step == begun.step
            self._mixed = in_step and (self._mixed or before != begun)
            self._on_path = begun

    def repeated(self, now: Pass, name: str) -> Pass:
        """Return the pass that a recomputation repeats, given the settings `now` in force.

        Raises:
            RuntimeError: it is not clear which pass is repeated.
        """
        if self._mixed or self._last != now:
            raise RuntimeError(
                f"{name}: re-entrant activation checkpointing cannot repeat a pass whose path has changed since; use "
                "torch.utils.checkpoint with use_reentrant=False"
            )
        assert self._last is not None
        now.history, now.replaced = self._last.history, self._last.replaced
        return now


_LOGS: WeakKeyDictionary[object, _PassLog] = WeakKeyDictionary()
"""Passes without gradients by operator."""


def begin(operator: object, name: str, now: Pass, side_effects: bool = True) -> Pass:
    """Return the pass that begins: `now`, or the pass that activation checkpointing repeats.

    Args:
        operator: the operator that runs, or the owner of operators; its passes are kept under it.
        name: its name, for messages.
        now: the settings in force.
        side_effects: whether the pass may belong to a training step.

    Raises:
        RuntimeError: re-entrant checkpointing repeats a pass of which it is not clear which one it is.
    """
    running, repeated = _regions()
    begun = now
    if repeated is not None:
        begun = _next_pass(repeated, operator, now)
    elif side_effects and torch.is_grad_enabled() == in_backward():
        # No gradients in a forward pass, or gradients in a backward pass: a re-entrant region may be at work.
        log = _LOGS.setdefault(operator, _PassLog())
        if in_backward():
            begun = log.repeated(now, name)
        else:
            log.add(now)
    # An inner region that is run for the first time, or run again, keeps the pass for its own recomputation.
    for frame in running:
        _REGIONS.setdefault(frame, _Region()).passes.setdefault(operator, []).append(begun)
        begun.checkpointed = True
    return begun


def in_backward() -> bool:
    """Return whether a backward pass runs: a forward pass inside one is a recomputation by activation checkpointing."""
    return graph_task() != -1


def graph_task() -> int:
    """Return the number of the backward pass that runs; -1 outside of one."""
    # Private, because torch has no public number of it, which would replace this. Its own checkpointing asks the same.
    return torch._C._current_graph_task_id()


def _next_pass(frame: Any, operator: object, now: Pass) -> Pass:
    """Return the operator's next pass in the recomputation of the region with this frame; `now` if it kept none."""
    region = _REGIONS.get(frame)
    passes = [] if region is None else region.passes.get(operator, [])
    if region is None or not passes:
        return now
    if region.graph_task != graph_task():  # another backward pass over a graph that was retained
        region.graph_task, region.repeats = graph_task(), {}
    number = region.repeats.get(operator, 0)
    region.repeats[operator] = number + 1
    return passes[number % len(passes)]


def _regions() -> tuple[list[Any], Any]:
    """Return (frames of regions that run inside the innermost recomputation, the frame that it repeats or None).

    A running region's hook for saved tensors encloses the region's frame, and a recomputation's hook encloses a weak
    reference to it. Hooks are read from the innermost one, with those above it taken off the stack for a moment.
    """
    # Private, because torch has no public list of the hooks in force, which would replace this.
    innermost = torch._C._autograd._top_saved_tensors_default_hooks
    running: list[Any] = []
    repeated, taken_off = None, []
    while repeated is None and (hooks := innermost(True)) is not None:
        enclosed = [cell.cell_contents for cell in inspect.unwrap(hooks[0]).__closure__ or ()]
        running += [value for value in enclosed if hasattr(value, "weak_holders")]
        referents = [value() for value in enclosed if isinstance(value, ref)]
        repeated = next((value for value in referents if hasattr(value, "weak_holders")), None)
        taken_off.append(saved_tensors_hooks(*hooks))
        taken_off[-1].__exit__()
    for pair in reversed(taken_off):
        pair.__enter__()
    return running, repeated
