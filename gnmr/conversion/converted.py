"""The result of `convert`: the converted operators, their units, and the state that they share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gnmr.conversion.adapters import Contained, WeightOwner, release
from gnmr.conversion.compile import into_graphs
from gnmr.conversion.cost import Cost
from gnmr.conversion.int8 import Int8Linear
from gnmr.conversion.linear import PathLinear, exchange_class
from gnmr.conversion.shared import SharedState, Switches
from gnmr.conversion.unit_names import PathUnit
from gnmr.formats.number_formats import FORMATS, Format, KeepFormat
from gnmr.formats.recipes import RECIPES, ExecutionPath, Recipe, described
from gnmr.formats.rounding import Mark
from gnmr.names import GEMMS, OPERANDS

DETACHED = "this controller was detached: its model has plain linears again; attach another"
"""Message of every call that needs converted operators after `ConvertedModel.restore`."""

_OURS = {*RECIPES, *GEMMS, "in", "and"}
"""Words in the names of our recipes and of the mixtures that `Recipe.with_gemms` makes of them."""

StepMark: TypeAlias = tuple[Mark | None, tuple[Tensor | None, Tensor] | None, int]
"""State at the start of a step: place of stochastic rounding, delayed scales, step."""


@dataclass(eq=False)
class ConvertedModel:
    """The converted operators of a model, in module order, the units that they form, and their shared state."""

    operators: list[PathLinear]
    units: list[PathUnit]
    low: ExecutionPath
    recovery: ExecutionPath | None
    """None: units are monitored but never routed. Pinned operators have other paths than `low` and this one."""
    shared: SharedState
    recovers: tuple[str, ...] = GEMMS
    """GEMMs that recovery takes over."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Relative GEMM times (`PathSpec.times`)."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """User-defined recipes that `times` may name."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Linears that match the targets but stay unchanged, with the reason (`gnmr.conversion.converting`)."""
    warmup_steps: int = 0
    """Number of first steps in which operators in recovery compute in 16 bits; see `begin_step`."""
    around: Sequence[tuple[nn.Module, str, Any]] = ()
    """Attributes of other modules that the conversion changed, with their former values: (module, name, value)."""
    restored: bool = False
    """Whether the operators are plain linears again; calls that need converted ones then raise RuntimeError."""

    def __post_init__(self) -> None:
        fields = self.operators, self.units, self.low, self.recovery, self.shared
        self._cost = Cost(*fields, self.recovers, self.times, self.recipes)

    @property
    def device(self) -> torch.device:
        """The device on which the operators run, also if their weights are on the meta device until they do."""
        weight_device = self.operators[0].weight.device
        return self.shared.device or weight_device if weight_device.type == "meta" else weight_device

    @property
    def cost(self) -> Cost:
        """The costs of the paths in force. Raises RuntimeError after `restore`."""
        self.check_converted()
        return self._cost

    def __str__(self) -> str:
        """Return a table of the units, with notes."""
        table = [("unit", "operator", "low path", "recovery path"), *self._rows()]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join([*(line.rstrip() for line in lines), *self._notes()])

    def brief(self) -> str:
        """Return the table for a narrow terminal: operators listed below their paths."""
        names_by_paths: dict[str, list[str]] = {}
        for name, _, low, recovery in self._rows():
            names_by_paths.setdefault(f"low path {low}, recovery path {recovery}:", []).append(f"  {name}")
        lines = [line for paths, names in names_by_paths.items() for line in (paths, *names)]
        return "\n".join([*lines, *self._notes()])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Return rows (unit, operator, low path, recovery path); layers that differ only by their number share a row.

        Pinned layers are listed under their numbers.
        """
        self.check_converted()
        alike: dict[tuple[str, str, str, str], list[PathLinear]] = {}
        for operator in self.operators:
            shape = f"{operator.kind} {operator.in_features} -> {operator.out_features}"
            pattern = re.sub(r"\b\d+\b", "*", operator.operator_name)
            alike.setdefault((pattern, shape, *self._paths_of(operator)), []).append(operator)
        noun = "units" if len(self.units) == len(self.operators) else "operators"
        rows = []
        for (pattern, shape, low, recovery), operators in alike.items():
            names = [operator.operator_name for operator in operators]
            label = names[0]
            if len(names) > 1:
                label = f"{_numbered(pattern, names) if operators[0].pinned else pattern}  ({len(names)} {noun})"
            rows.append((label, shape, low, recovery))
        return rows

    def _paths_of(self, operator: PathLinear) -> tuple[str, str]:
        low, recovery = described(self.low), operator.recovery
        if operator.pinned == GEMMS:
            low = f"{described(operator.low)} (pinned)"
        elif operator.pinned:
            low += f"; {operator.low.name} (pinned)"
        if recovery is None:
            return low, "none (static)"
        return low, "none (pinned)" if operator.pinned and not operator.routable else described(recovery)

    def _notes(self) -> list[str]:
        operators, units, cost = self.operators, self.units, self.cost
        notes = [] if cost.work is None else [*cost.work.notes]
        if units and len(units) != len(operators):
            notes.append(f"{len(units)} units of {len(operators)} operators: {units[0].name} ... {units[-1].name}")
        if pinned := sum(len(operator.pinned) for operator in operators):
            share = cost.pinned_share()
            notes.append(f"pinned: {pinned} of {len(GEMMS) * len(operators)} GEMMs, {share:.1%} of their arithmetic")
        if isinstance(operators[0], Int8Linear):
            (dense, codes), weights = cost.weight_bytes(), operators[0].weights
            notes.append(f"weights {weights}: {dense:,} bytes in their own dtype, {codes:,} of INT8 codes and scales")
            if weights == "instead":
                notes.append("the recovery path and evaluation read codes times scale: W8A16, not the 16-bit weights")
        return notes

    @property
    def frozen(self) -> bool:
        """Whether no operator's weight is trained, so that there is no weight gradient."""
        return not any(operator.weight.requires_grad for operator in self.operators)

    @property
    def without_effect(self) -> bool:
        """Whether the paths change nothing: the formats compress for a weight gradient that no operator has."""
        low = self.low
        saved = isinstance(low, Format) and not isinstance(low, KeepFormat) and not self.shared.quantize_forward
        return self.frozen and saved

    def store(self, weights: str) -> None:
        """Replace the weights by their INT8 codes if asked to.

        Args:
            weights: instead, or online, which changes nothing (`gnmr.conversion.int8`).
        """
        for operator in self.operators:
            if isinstance(operator, Int8Linear):
                operator.store(weights)

    @contextmanager
    def high_precision(self) -> Iterator[None]:
        """Run every operator as a plain 16-bit linear inside this context, whatever its path (evaluation).

        Contexts nest. They also cover copies of the model (an average of its weights), which otherwise stay on the
        paths that they were copied on.
        """
        switches, before = self.shared.switches, self.shared.high_precision
        switches.high_precision = True
        try:
            yield
        finally:
            switches.high_precision = before or self.restored

    @property
    def casts_forward(self) -> bool:
        """Whether a forward pass on the low path differs from the 16-bit one."""
        if isinstance(self.low, Recipe):
            return bool(self.low.fprop.casts)
        return self.shared.quantize_forward and not isinstance(self.low, KeepFormat)

    @contextmanager
    def on_low_path(self) -> Iterator[None]:
        """Run every operator on its low path, without faults and side effects, inside this context (evaluation)."""
        with self.no_side_effects():
            for operator in self.operators:
                operator.switch(False)
                operator.fault = None  # a fault belongs to the run, not to the model
            yield

    def compile(self, blocks: Iterable[nn.Module], **options: Any) -> str | None:
        """Call `block.compile(**options)` on each block, and take the operators into the graphs if few graphs result.

        Operators are taken in if the paths are recipes and all operators of a block switch together (unit=block, or no
        recovery path). A block type then has one graph for each path, one for evaluation, and these again for other
        lengths. Otherwise operators run between the graphs, as they do in steps with a probe or a fault. In both cases
        a switch compiles nothing new.

        `fullgraph=True` enforces full graphs. It fails in a mixture of experts, and if neither the operator's weight
        nor anything before it is trained (the first block of a frozen base). Models of Hugging Face need
        `use_cache=False`, or every layer counts as its own type.

        In graphs `saved_bytes` is not available, because the compiler chooses what backward keeps. `saturation` counts
        in `backward()` only, not in `torch.autograd.grad`. Inductor omits roundings to 16 bits between fused
        operations, as in any model.

        Returns:
            The reason why operators stay between the graphs, or None if they are in the graphs.
        """
        blocks = list(blocks)
        reason = self.enter_graphs(blocks)
        for block in blocks:
            block.compile(**options)
        return reason

    def enter_graphs(self, blocks: Iterable[nn.Module]) -> str | None:
        """Prepare the operators for `blocks`, which are compiled next.

        Returns: the reason why operators stay between the graphs, or None, as `compile` does.
        """
        self.check_converted()
        return into_graphs(self.operators, len(self.units), self.low, self.recovery, blocks)

    @property
    def in_graphs(self) -> bool:
        """Whether `compile` took the operators into its graphs."""
        self.check_converted()
        return any(operator.in_graphs is not None for operator in self.operators)

    def _collect(self, into_counts: bool = True) -> None:
        """Add the counts of casts in graphs to the other counts, or drop them."""
        self.check_converted()
        tallies = [operator.tally for operator in self.operators]
        counts = [None if tally is None else tally.grad for tally in tallies]
        if into_counts and (first := next((count for count in counts if count is not None), None)) is not None:
            assert self.shared.amax is not None
            # An operator that did not run in a graph has no gradient of its tally.
            zero = torch.zeros_like(first)
            self.shared.amax.add(torch.stack([zero if count is None else count for count in counts]))
        for tally in tallies:
            if tally is not None:
                tally.grad = None

    @contextmanager
    def no_side_effects(self) -> Iterator[None]:
        """Undo, after this context, every change to the state of faults and casts.

        Paths and faults of the operators may change inside; they are restored too, as is the generator of stochastic
        rounding. No compressed copy is kept. Recovery means the recovery path inside, even in a 16-bit warm-up. The
        caller takes care of gradients and a probe.
        """
        # Counts of earlier passes belong to the step, so they are taken before the context begins.
        self._collect()
        shared, state = self.shared, self.state_dict()
        in_force = [(operator.recovered, operator.fault) for operator in self.operators]
        mark = self.mark()
        before, shared.no_side_effects = shared.no_side_effects, True
        warmup, shared.warmup = shared.warmup, None
        try:
            yield
        finally:
            # Passes inside may have counted casts in graphs, and kept copies.
            self._collect(into_counts=False)
            shared.no_side_effects, shared.warmup = before, warmup
            shared.forget()
            self._load(state)  # unchecked: a check waits for the device
            self.back_to(mark)
            # By `put`, because `switch` maps a whole operator to all of its GEMMs.
            for operator, (recovered, fault) in zip(self.operators, in_force, strict=True):
                operator.put(recovered)
                operator.fault = fault

    def mark(self) -> StepMark:
        """Return the part of the paths' state that a step changes, for `back_to`. Does not wait for the device."""
        rounding, amax = self.shared.rounding, self.shared.amax
        return (
            None if rounding is None else rounding.mark(),
            None if amax is None else (amax.history, amax.replaced),
            self.shared.step,
        )

    def back_to(self, mark: StepMark) -> None:
        """Return to the start of a step, for a pass within `no_side_effects`.

        Rounding draws the same numbers again, and delayed scales come from the steps before the mark.

        Args:
            mark: the result of `mark`, which may be used several times.
        """
        drawn, scales, self.shared.step = mark
        self.shared.forget()
        if self.shared.rounding is not None and drawn is not None:
            self.shared.rounding.back_to(drawn)
        if self.shared.amax is not None and scales is not None:
            # A clone, because the pass that follows writes into the history, and the mark may be used again.
            history, self.shared.amax.replaced = scales
            self.shared.amax.history = None if history is None else history.clone()

    def begin_again(self, mark: StepMark) -> None:
        """Restart the step that began at `mark` (the result of the method), and forget everything that it wrote.

        Raises:
            RuntimeError: after `restore`.
        """
        self.back_to(mark)
        self._collect(into_counts=False)
        if self.shared.amax is not None:
            self.shared.amax.begin_again()

    def begin_step(self, step: int) -> None:
        """Begin a step: needed with `warmup_steps`, or if steps are not taken in order.

        Until the warm-up is over, operators in recovery run in 16 bits, whatever the recovery path is. Stochastic
        rounding draws the numbers of this step.

        Args:
            step: number of the optimizer step, from 1.
        """
        self._enter(step)
        # bf16 is a format and a recipe; operators cannot mix the two kinds.
        sixteen: ExecutionPath = FORMATS["bf16"] if isinstance(self.low, Format) else RECIPES["bf16"]
        self.shared.warmup = sixteen if step <= self.warmup_steps else None

    def _enter(self, step: int) -> None:
        self.shared.step = step
        if self.shared.rounding is not None:
            self.shared.rounding.begin_step(step)

    def end_step(self) -> None:
        """End an optimizer step; call this once, after the step's last backward pass.

        Drops compressed copies, advances the history of delayed scales, and resets `saturation`.
        """
        self.shared.forget()
        self._collect(into_counts=False)
        if self.shared.amax is not None:
            self.shared.amax.end_step()
        self._enter(self.shared.step + 1)

    def saturation(self) -> dict[str, Tensor]:
        """Return the numbers of saturated and of non-finite elements since the last `end_step`, by operand.

        Read it before the controller's `step`. Does not wait for the device.

        Returns:
            {operand: (num_operators, 2) int64} on the device, for casts of the operators' `input`, `weight`,
            `grad_output` and `result`. Column 0 counts elements that saturated, column 1 elements that were Inf or NaN.
            Every cast counts once: a cast that several operators share counts for the first. Empty if the paths are
            formats.
        """
        self._collect()
        amax = self.shared.amax
        return {} if amax is None else {name: amax.counts[:, i].clone() for i, name in enumerate(OPERANDS)}

    def restore(self) -> None:
        """Turn every operator back into its original module; a second call does nothing.

        Operators in copies of the model compute as plain linears from now on. Weights that are kept only as INT8 codes
        become codes times scale, in their original dtype. Raises ValueError, before anything is changed, if an operator
        has been changed since (for example parametrized).
        """
        if self.restored:
            return
        # First check all operators, so that an error leaves the model as it was.
        for operator in self.operators:
            module = operator.module
            if isinstance(module, PathLinear | WeightOwner) and "plain_class" not in vars(type(module)):
                raise ValueError(
                    f"{operator.operator_name} has become a {type(module).__name__} since: undo that first (of a "
                    "parametrization torch.nn.utils.parametrize.remove_parametrizations)"
                )
        for operator in self.operators:
            if isinstance(operator, Contained):
                if isinstance(operator.owner, WeightOwner):
                    release(operator.owner)
                continue
            # Another library may have exchanged the class, or restored the operator already.
            if not (isinstance(operator, PathLinear) and operator.converted):
                continue
            if isinstance(operator, Int8Linear):
                operator.unstore()
            for name in PathLinear.__annotations__:
                delattr(operator, name)
            exchange_class(operator, type(operator).plain_class)
        # Fast paths of encoders go around the linears again.
        for module, name, value in self.around:
            setattr(module, name, value)
        self.restored = self.shared.switches.high_precision = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy of model and paths together; the copy has switches of its own."""
        self.__dict__.update(state)
        # A copy of the model alone keeps the switches of its original (an average of weights evaluates with it).
        before, self.shared.switches = self.shared.high_precision, Switches()
        self.shared.switches.high_precision = before

    def check_converted(self) -> None:
        """Raise RuntimeError after `restore`."""
        if self.restored:
            raise RuntimeError(DETACHED)

    def state_dict(self) -> dict[str, Any]:
        """Return the owner of the state (`paths`), and the state of stochastic rounding and delayed scales, if any."""
        state: dict[str, Any] = {"paths": self._owner()}
        if self.shared.rounding is not None:
            state["rounding"] = self.shared.rounding.state()
        history = None if self.shared.amax is None else self.shared.amax.history
        return state if history is None else state | {"largest": history.clone()}

    def check_state(self, state: Any) -> None:
        """Check that a state is of this model, before it is loaded.

        Args:
            state: anything; right is the result of `state_dict` of a model with the same operators.

        Raises:
            ValueError: `state` belongs to other paths, rounding or operators.
        """
        owner = state.get("paths") if isinstance(state, Mapping) else None
        if owner != self._owner():
            raise ValueError(f"the paths' state belongs to {owner or 'unknown paths'}; this model has {self._owner()}")

    def _owner(self) -> str:
        """Return a line that names paths, rounding and operators, by which `check_state` knows its own state."""
        self.check_converted()
        # Recipes name the recovered GEMMs, unless all are recovered.
        low, recovery = described(self.low), "none" if self.recovery is None else described(self.recovery)
        rounding = "nearest" if self.shared.rounding is None else "stochastic"
        line = f"low={low}, recovery={recovery}, rounding={rounding}"
        if self.shared.quantize_forward:
            line += ", site=forward"
        line += f", {len(self.operators)} operators"
        # The name of a user's recipe does not define it, so its casts are added.
        pinned = [operator for operator in self.operators if operator.pinned]
        pinned_paths = {operator.low.name: operator.low for operator in pinned}
        for path in (self.low, self.recovery, *pinned_paths.values()):
            if isinstance(path, Recipe) and not {*path.name.replace(",", "").split()} <= _OURS:
                line += f", {path.name}: {path.words()}"
        if pinned:
            path_by_name = {operator.operator_name: described(operator.low) for operator in pinned}
            line += f", pins: {path_by_name}"
        return line

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the stochastic rounding and the delayed scales of a checkpoint.

        Args:
            state: the result of `state_dict` of a model with the same paths and operators.

        Raises:
            ValueError: before anything is loaded, as in `check_state`.
        """
        self.check_state(state)
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        if self.shared.rounding is not None:
            self.shared.rounding.load(state["rounding"])
            self.shared.step = self.shared.rounding.step
        if self.shared.amax is not None and self.shared.amax.history is not None:
            self.shared.amax.load(state["largest"])


def _numbered(pattern: str, names: Sequence[str]) -> str:
    """Return the pattern with numbers for stars, layers.{0,3}.mlp.down_proj, unless other names would match."""
    numbers = [list(dict.fromkeys(column)) for column in zip(*(re.findall(r"\b\d+\b", n) for n in names), strict=True)]
    # The braces stand for all combinations of their numbers, so these have to be exactly the names.
    if math.prod(map(len, numbers)) != len(names):
        return pattern
    for choices in numbers:
        pattern = pattern.replace("*", choices[0] if len(choices) == 1 else f"{{{','.join(choices)}}}", 1)
    return pattern
