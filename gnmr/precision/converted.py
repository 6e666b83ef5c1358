"""What `convert` makes of a model: the converted operators, their units, and what they hold in memory."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pickle import UnpicklingError
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gnmr.errors import users_level
from gnmr.measure.errors import Probe
from gnmr.measure.price import PRICES, PriceMeter
from gnmr.names import GEMMS, OPERANDS
from gnmr.precision.cast import rotated_dtype
from gnmr.precision.compile import graph_linear, missing, new_tally
from gnmr.precision.formats import FORMATS, Format, KeepFormat
from gnmr.precision.int8_linear import Int8Linear
from gnmr.precision.kernels.te import UNREADABLE
from gnmr.precision.linear import PathLinear
from gnmr.precision.memory import Place
from gnmr.precision.recipes import HADAMARD, RECIPES, ExecutionPath, Recipe
from gnmr.precision.rounding import Mark, Rounding
from gnmr.precision.scaling import row_bytes, scale_dtype, scales_of
from gnmr.precision.shared import SharedState
from gnmr.precision.units import PathUnit, unit_of

DETACHED = "this controller was detached: its model has plain linears again; attach another"
"""What is raised by everything that needs converted operators after `ConvertedModel.restore`."""


class _OfOperator(NamedTuple):
    """What one operator spends and keeps."""

    recovered: int
    """Arithmetic of its GEMMs that are on the recovery path, a token."""
    extra: float
    """See `ConvertedModel.extra_bytes`."""
    kept: int
    """Bytes that it keeps, be they others' too."""
    kept_as: str


@dataclass
class _Numbers:
    """What all operators spend and keep, and of what that was worked out."""

    warmup: ExecutionPath | None
    state: list[tuple[ExecutionPath, frozenset[str], tuple[int, str | Place, torch.dtype] | None]]
    """(`low`, `recovered`, `read`) of each operator."""
    of_each: list[_OfOperator]
    predicted: int
    spent: tuple[float, float]
    saved: int | None = None
    """What was read from the graph, and of which operators it held an input then."""
    held: list[bool] | None = None


StepMark: TypeAlias = tuple[Mark | None, tuple[Tensor | None, Tensor] | None, int]
"""The place of stochastic rounding, the delayed scales, the step."""


@dataclass(eq=False)
class ConvertedModel:
    """The converted operators of a model, in module order, the units that they make up, and what they share."""

    operators: list[PathLinear]
    units: list[PathUnit]
    low: ExecutionPath
    recovery: ExecutionPath | None
    shared: SharedState
    recovers: tuple[str, ...] = GEMMS
    """GEMMs that recovery takes over."""
    warmup_steps: int = 0
    """Steps from the first on in which operators in recovery compute in 16 bits; see `begin_step`."""
    restored: bool = False
    """The operators are plain linears again, and all that needs converted ones raises RuntimeError (`DETACHED`)."""
    _numbers: _Numbers | None = None

    @property
    def frozen(self) -> bool:
        """Whether no operator's weight is trained: then there is no weight gradient."""
        return not any(operator.weight.requires_grad for operator in self.operators)

    @property
    def without_effect(self) -> bool:
        """Whether the paths change nothing: formats that compress for a weight gradient that no operator has."""
        low = self.low
        saved = isinstance(low, Format) and not isinstance(low, KeepFormat) and not self.shared.quantize_forward
        return self.frozen and saved

    def store(self, weights: str) -> None:
        """Makes the INT8 codes of the weights that are kept `beside` or `instead` of them; others have none."""
        for operator in self.operators:
            if isinstance(operator, Int8Linear):
                operator.store(weights)

    def high_precision(self) -> AbstractContextManager[None]:
        """Inside, every operator is a plain 16-bit linear, whatever its path (evaluation).

        A copy of the model (an average of its weights) is not the plan's: it stays on the paths that it was copied on.
        """
        return self.shared.in_high_precision()

    @property
    def casts_forward(self) -> bool:
        """Whether a forward pass on the low path differs from the 16-bit one."""
        if isinstance(self.low, Recipe):
            return bool(self.low.fprop.casts)
        return self.shared.quantize_forward and not isinstance(self.low, KeepFormat)

    @contextmanager
    def on_low_path(self) -> Iterator[None]:
        """Inside, every operator is on its low path without an injected fault, and leaves no trace (evaluation)."""
        with self.no_side_effects():
            for operator in self.operators:
                operator.switch(False)
                operator.fault = None  # it belongs to the run, not to the model
            yield

    def compile(self, blocks: Iterable[nn.Module], **options: Any) -> str | None:
        """`block.compile(**options)` of each, the operators in them taken into the graphs where that makes few.

        Returns why operators stay between the graphs; None: they are in them. Where all operators of a block are
        switched together (unit=block, or a static plan) and the paths are recipes, a block type has one graph for each
        path, one for evaluation, and these again for other lengths. `fullgraph=True` makes sure, except where nothing
        before an operator is trained nor its own weight (the first block of a frozen base), and in a mixture of
        experts. Otherwise, and in steps that a probe or a fault looks into, operators run between the graphs: more and
        smaller ones, without paths. Either way a switch compiles nothing that was not compiled before.
        Give models of Hugging Face's `use_cache=False`, or every layer is a type of its own.

        In graphs what backward keeps is the compiler's choice: `saved_bytes` cannot be read. `saturation` is counted in
        `backward()` alone, not in `torch.autograd.grad`. Inductor leaves out roundings to 16 bits between operations
        that it fuses, as in any model.
        """
        blocks = list(blocks)
        why = self.into_graphs(blocks)
        for block in blocks:
            block.compile(**options)
        return why

    def into_graphs(self, blocks: Iterable[nn.Module]) -> str | None:
        """What `compile` does before it compiles: for a library that compiles the blocks itself, before their first
        pass."""
        self._check_converted()
        why = missing(self.low, self.recovery)
        together = {unit_of(operator.operator_name, "block") for operator in self.operators}
        if self.recovery is not None and len(together) != len(self.units):
            why = "units are smaller than blocks, and each combination of their paths would be a graph"
        if any(operator.pinned for operator in self.operators):
            why = "pinned operators have paths of their own, and each block would be graphs by itself"
        if why is None:
            recipes = [path for path in (self.low, self.recovery) if isinstance(path, Recipe)]
            graphs = tuple((repr(recipe), graph_linear(recipe)) for recipe in recipes)
            inside = {module for block in blocks for module in block.modules()}
            for operator in self.operators:
                if operator in inside:
                    operator.in_graphs, operator.tally = graphs, new_tally(operator.weight.device)
        return why

    @property
    def in_graphs(self) -> bool:
        """Whether `compile` took the operators into its graphs."""
        self._check_converted()
        return any(operator.in_graphs is not None for operator in self.operators)

    def _collect(self, into_counts: bool = True) -> None:
        """Adds the counts of casts in graphs to the others, or drops them."""
        self._check_converted()
        tallies = [operator.tally for operator in self.operators]
        found = [None if tally is None else tally.grad for tally in tallies]
        if into_counts and (first := next((one for one in found if one is not None), None)) is not None:
            assert self.shared.amax is not None
            zero = torch.zeros_like(first)
            self.shared.amax.add(torch.stack([zero if one is None else one for one in found]))
        for tally in tallies:
            if tally is not None:
                tally.grad = None

    @contextmanager
    def no_side_effects(self) -> Iterator[None]:
        """Inside, passes leave no trace in what faults and casts remember.

        The operators' paths and faults, which may be changed inside, and the generator of stochastic rounding are
        afterwards as they were, and no compressed copy is kept. Recovery is the recovery path inside, in a warm-up in
        16 bits too. Gradients and a probe are the caller's to see to.
        """
        self._collect()
        shared, state = self.shared, self.state_dict()
        in_force = [(operator.recovered, operator.fault) for operator in self.operators]
        mark = self.mark()
        before, shared.no_side_effects = shared.no_side_effects, True
        warmup, shared.warmup = shared.warmup, None
        try:
            yield
        finally:
            self._collect(into_counts=False)
            shared.no_side_effects, shared.warmup = before, warmup
            shared.forget()
            self._load(state)  # unlooked at: that waits for the device
            self.back_to(mark)
            for operator, (recovered, fault) in zip(self.operators, in_force, strict=True):
                operator.put(recovered)
                operator.fault = fault

    def mark(self) -> StepMark:
        """What a step changes of the paths' state, as it is now, for `back_to`. Does not wait for the device."""
        rounding, amax = self.shared.rounding, self.shared.amax
        return (
            None if rounding is None else rounding.mark(),
            None if amax is None else (amax.history, amax.replaced),
            self.shared.step,
        )

    def back_to(self, mark: StepMark) -> None:
        """Rounding draws what it drew, delayed scales are those of the steps before. For a pass within
        `no_side_effects`."""
        drawn, scales, self.shared.step = mark
        self.shared.forget()
        if self.shared.rounding is not None and drawn is not None:
            self.shared.rounding.back_to(drawn)
        if self.shared.amax is not None and scales is not None:
            history, self.shared.amax.replaced = scales
            self.shared.amax.history = None if history is None else history.clone()

    def begin_again(self, mark: StepMark) -> None:
        """The step that began at `mark` begins again; what it wrote is forgotten."""
        self.back_to(mark)
        self._collect(into_counts=False)
        if self.shared.amax is not None:
            self.shared.amax.begin_again()

    def begin_step(self, step: int) -> None:
        """Call before step `step` (from 1) where there are `warmup_steps`, and where steps are not taken one by one.

        Until the warm-up is over operators in recovery run in 16 bits, whatever the recovery path is. Stochastic
        rounding draws the numbers of this step.
        """
        self._enter(step)
        sixteen: ExecutionPath = FORMATS["bf16"] if isinstance(self.low, Format) else RECIPES["bf16"]
        self.shared.warmup = sixteen if step <= self.warmup_steps else None

    def _enter(self, step: int) -> None:
        self.shared.step = step
        if self.shared.rounding is not None:
            self.shared.rounding.begin_step(step)

    def end_step(self) -> None:
        """Call once per optimizer step, after its last backward pass: drops compressed copies, advances the history of
        delayed scales, resets `saturation`."""
        self.shared.forget()
        self._collect(into_counts=False)
        if self.shared.amax is not None:
            self.shared.amax.end_step()
        self._enter(self.shared.step + 1)

    def saturation(self) -> dict[str, Tensor]:
        """{operand: (num_operators, 2) int64} on the device: elements of this step that saturated, and that were Inf
        or NaN, in casts of the operators' `input`, `weight`, `grad_output` and `result`. Since the last `end_step`; so
        read it before the controller's `step`. Empty where the paths are formats, and under backend=te. Counts every
        cast once: of a tensor that several operators read, for the first that cast it. Does not wait for the device.
        """
        self._collect()
        amax = self.shared.amax
        return {} if amax is None else {name: amax.counts[:, i].clone() for i, name in enumerate(OPERANDS)}

    def restore(self) -> None:
        """Turns every operator back into the linear that it was; nothing is left to do the second time.

        Weights that are kept as INT8 codes alone come back as codes times scale, in the dtype that they had.
        ValueError, before anything is done, for an operator that has become something else since (parametrized).
        """
        if self.restored:
            return
        for operator in self.operators:
            if isinstance(operator, PathLinear) and "plain_class" not in vars(type(operator)):
                raise ValueError(
                    f"{operator.operator_name} has become a {type(operator).__name__} since: undo that first (of a "
                    "parametrization torch.nn.utils.parametrize.remove_parametrizations)"
                )
        if self.shared.engine is not None:
            self.shared.engine.close()
        for operator in self.operators:
            if not (isinstance(operator, PathLinear) and operator.converted):
                continue
            if isinstance(operator, Int8Linear):
                operator.unstore()
            for name in PathLinear.__annotations__:
                delattr(operator, name)
            operator.__class__ = type(operator).plain_class  # type: ignore[assignment]
        self.restored = True

    def _check_converted(self) -> None:
        """RuntimeError after `restore`."""
        if self.restored:
            raise RuntimeError(DETACHED)

    def probe(self, names: Collection[str], tokens: int = 1) -> Probe:
        """Starts measuring the statistics `names` of every `tokens`-th row (see `Probe`), in place of an earlier probe.

        ValueError for an unknown name, a stride below 1, a gap to the recovery path of a static plan, under backend=te,
        and where every weight is frozen: it is measured in the weight gradient's backward pass. Warns of such a gap
        where both recipes have the same wgrad: it is 0.
        """
        self._check_converted()
        if self.shared.engine is not None:
            raise ValueError(f"{', '.join(names)}: {UNREADABLE}")
        if self.frozen:
            raise ValueError(
                f"{', '.join(names)}: measured where a weight gradient is made, and all weights are frozen"
            )
        gaps = ", ".join(name for name in ("gap_recovery", "gap_exact") if name in names)
        if gaps and self.recovery is None:
            raise ValueError(f"{gaps}: this plan has no recovery path")
        if gaps and _same_wgrad(self.low, self.recovery):
            warnings.warn(f"{gaps}: both paths have the same wgrad, so no unit has a gap", stacklevel=users_level())
        self.shared.forget()  # and what an earlier probe measured of the last tensor
        self.shared.probe = Probe(self.operators, self.units, names, tokens)
        return self.shared.probe

    def price(self, names: Collection[str] = PRICES[:3], tokens: int = 16) -> PriceMeter:
        """Starts measuring the prices `names` of every `tokens`-th token (see `PriceMeter`), in place of an earlier
        meter. ValueError for an unknown name, a stride below 1, and the recovery path of a static plan."""
        self._check_converted()
        of_recovery = [name for name in names if name == "price" or name.endswith("recovery")]
        if of_recovery and self.recovery is None:
            raise ValueError(f"{', '.join(of_recovery)}: this plan has no recovery path")
        self.shared.prices = meter = PriceMeter(self.operators, self.units, names, tokens)
        return meter

    def unprice(self) -> None:
        """Ends it."""
        self.shared.prices = None

    def unprobe(self) -> None:
        """Ends it; operators are as if there had never been a probe."""
        self.shared.probe = None

    def saved_bytes(self) -> int:
        """Bytes that the operators' inputs occupy in the autograd graph now, between forward and backward.

        Read from the graph's own nodes; a storage that several operators share counts once, an operator that ran
        several times with its last pass. Where every operator kept as many rows on the same path as at the last look,
        of the same tensors, and the graph holds them again, that look's number stands. Under activation checkpointing
        the graph holds no inputs at this point and reading them would recompute them: do not call it.
        ValueError under backend=te, and where `compile` took the operators into graphs.
        """
        if self.shared.engine is not None:
            raise ValueError(f"saved_bytes: {UNREADABLE}")
        if self.in_graphs:
            raise ValueError("saved_bytes: what compiled blocks keep for backward is the compiler's choice")
        numbers, holds = self._now(), [operator.holds for operator in self.operators]
        if numbers.saved is None or numbers.held != holds:
            storages: dict[int, int] = {}
            for operator in self.operators:
                for tensor in operator.kept():
                    at = tensor.data_ptr()
                    storages[at] = max(storages.get(at, 0), tensor.nbytes)
            numbers.held, numbers.saved = holds, sum(storages.values())
        return numbers.saved

    def predicted_bytes(self) -> int:
        """The same from the memory model: p/8 bytes per element, the scales, and one copy per tensor and format.

        Tensors that are kept as they are count once where they are views of one storage. A simulated recipe keeps the
        input's own width: one tensor for each that is read, in each cast that wgrad reads. On real hardware it is codes
        of one byte and their scales.
        """
        return self._now().predicted

    def _now(self) -> _Numbers:
        """What is in force and what the last forward pass kept, in numbers: made anew of the operators that changed."""
        self._check_converted()
        warmup, last = self.shared.warmup, self._numbers
        state = [(operator.low, operator.recovered, operator.read) for operator in self.operators]
        if last is not None and last.warmup is warmup and last.state == state:
            return last
        if last is None or last.warmup is not warmup:
            of_each = [self._of(operator) for operator in self.operators]
        else:
            known = zip(self.operators, state, last.state, last.of_each, strict=True)
            of_each = [own if now == before else self._of(operator) for operator, now, before, own in known]
        copies: dict[tuple[object, str], int] = {}
        for (_, _, read), own in zip(state, of_each, strict=True):
            if read is not None:
                key = read[1], own.kept_as
                copies[key] = max(copies.get(key, 0), own.kept)
        everything = len(GEMMS) * sum(_area(operator) for operator in self.operators)
        spent = sum(own.recovered for own in of_each) / everything, sum(own.extra for own in of_each)
        self._numbers = _Numbers(warmup, state, of_each, sum(copies.values()), spent)
        return self._numbers

    def _of(self, operator: PathLinear) -> _OfOperator:
        """The numbers of one operator."""
        path, read = operator.path, operator.read
        kept = 0 if read is None else kept_bytes(operator, path, read[0], read[2])
        recovered = len(self._recovered(operator)) * _area(operator)
        return _OfOperator(recovered, self._extra(operator, path), kept, kept_as(path))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without the last step's numbers."""
        return {**self.__dict__, "_numbers": None}

    def extra_bytes(self) -> float:
        """Eq. 5: (p_high - p_low)/8 * sum of A_b over the operators in recovery, each counted by itself; pins count
        where they keep more of the input.

        p_high is 16 in a warm-up in 16 bits. 0 under simulated recipes: whatever the path, the input is kept in its
        own width.
        """
        return self.spent()[1]

    def extra_bytes_bound(self, max_o: int) -> float:
        """Eq. 67: (p_high - p_low)/8 * (sum of the max_o largest A_b), and what pins keep; `extra_bytes` exceeds it in
        a warm-up alone."""
        self._check_converted()
        pinned = [sum(self._extra(o, o.low) for o in unit.operators) for unit in self.units]
        whole = [sum(self._extra(o, unit.path_of(o)) for o in unit.operators) for unit in self.units]
        more = (a - b for a, b in zip(whole, pinned, strict=True))
        return sum(sorted(more, reverse=True)[:max_o]) + sum(pinned)

    def spent(self) -> tuple[float, float]:
        """(share of the GEMMs' arithmetic that is on the recovery path now, `extra_bytes`).

        A GEMM counts in_features * out_features a token, and all operators as many tokens. Pinned GEMMs are always on
        that path, those of an operator in recovery as far as `recovers` goes (in a warm-up in 16 bits all); under
        formats an operator counts as a whole. Does not wait for the device.
        """
        return self._now().spent

    def costs(self, kind: str) -> tuple[list[float], float]:
        """(what recovery of each unit adds, what pins take), as shares of what recovery of everything takes.

        kind: gemm, of all arithmetic as `spent` counts it; or bytes, of Eq. 5's extra bytes, with the bits of the input
        that wgrad reads. ValueError for bytes where recovery adds none.
        """
        self._check_converted()
        if kind == "bytes":
            return self._byte_costs()
        whole = len(GEMMS) * sum(o.in_features * o.out_features for o in self.operators)
        costs = []
        for unit in self.units:
            named = self.recovers if unit.gemm is None else (unit.gemm,)
            moved = GEMMS if isinstance(self.low, Format) else named
            more = (len({*moved} - {*o.pinned}) * o.in_features * o.out_features for o in unit.operators)
            costs.append(sum(more) / whole)
        return costs, self._share(lambda operator: operator.pinned)

    def _byte_costs(self) -> tuple[list[float], float]:
        low, recovery = self.low, self.low if self.recovery is None else self.recovery

        def more(operator: PathLinear, path: ExecutionPath, than: ExecutionPath) -> int:
            return operator.in_features * max(0, nominal_bits(path) - nominal_bits(than))

        whole = sum(more(o, recovery, low) for o in self.operators)
        if not whole:
            raise ValueError("cost=bytes: recovery keeps no more bits of the input than the low path; use gemm")
        costs = [sum(more(o, unit.path_of(o), o.low) for o in unit.operators) / whole for unit in self.units]
        return costs, sum(more(o, o.low, low) for o in self.operators) / whole

    def _share(self, gemms: Callable[[PathLinear], Collection[str]]) -> float:
        """The share of all arithmetic of these GEMMs of each operator."""
        self._check_converted()
        everything = len(GEMMS) * sum(map(_area, self.operators))
        return sum(len(gemms(operator)) * _area(operator) for operator in self.operators) / everything

    def _recovered(self, operator: PathLinear) -> Collection[str]:
        """The GEMMs of the operator that are on the recovery path now."""
        if not operator.recovering:
            return operator.pinned
        everything = self.shared.warmup is not None or isinstance(operator.low, Format)
        return GEMMS if everything else {*operator.pinned, *(operator.recovered if operator.gemms else self.recovers)}

    def _extra(self, operator: PathLinear, path: ExecutionPath | None) -> float:
        if path is None or operator.read is None:
            return 0.0
        more_bits = max(0, _kept_bits(path) - _kept_bits(self.low))
        return more_bits / 8 * operator.read[0] * operator.in_features

    def weight_bytes(self) -> tuple[int, int]:
        """(bytes of the operators' weights in their own dtype, bytes of INT8 codes and scales that are kept of them).

        With O outputs and I inputs in bfloat16: (2 O I, 0); with weights kept `beside` (2 O I, O (I + 4)); with
        `instead` (0, O (I + 4)). What the graph holds of them between forward and backward are these very tensors.
        A parameter of several operators counts once, and biases do not.
        """
        self._check_converted()
        own = {id(o.weight): o.weight.nbytes for o in self.operators if o.weight.is_floating_point()}
        return sum(own.values()), sum(o.code_bytes for o in self.operators if isinstance(o, Int8Linear))

    def table(self) -> list[tuple[str, str, str, str]]:
        """Rows (unit, operator, low path, recovery path); layers that differ by their number alone stand together.

        Pinned ones stand under their numbers.
        """
        self._check_converted()
        groups: dict[tuple[str, ...], list[PathLinear]] = {}
        for operator in self.operators:
            shape = f"Linear {operator.in_features} -> {operator.out_features}"
            row = re.sub(r"\b\d+\b", "*", operator.operator_name), shape, *self._paths_of(operator)
            groups.setdefault(row, []).append(operator)
        kind = "units" if len(self.units) == len(self.operators) else "operators"
        rows = []
        for (pattern, shape, low, recovery), own in groups.items():
            names = [operator.operator_name for operator in own]
            several = f"{_numbered(pattern, names) if own[0].pinned else pattern}  ({len(names)} {kind})"
            rows.append((names[0] if len(names) == 1 else several, shape, low, recovery))
        return rows

    def _paths_of(self, operator: PathLinear) -> tuple[str, str]:
        """Its low and its recovery path as the table shows them."""
        low, recovery = described(self.low), operator.recovery
        if operator.pinned == GEMMS:
            low = f"{described(operator.low)} (pinned)"
        elif operator.pinned:
            low += f"; {operator.low.name} (pinned)"
        if recovery is None:
            return low, "none (static)"
        return low, "none (pinned)" if operator.pinned and not operator.routable else described(recovery)

    def __str__(self) -> str:
        rows = [("unit", "operator", "low path", "recovery path"), *self.table()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip() for r in rows]
        return "\n".join([*lines, *self._notes()])

    def brief(self) -> str:
        """The plan for a narrow terminal: operators below the paths that they have."""
        told: dict[str, list[str]] = {}
        for name, _, low, recovery in self.table():
            told.setdefault(f"low path {low}, recovery path {recovery}:", []).append(f"  {name}")
        lines = [line for paths, names in told.items() for line in (paths, *names)]
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        """What is to be said of the plan as a whole."""
        lines = []
        if self.units and len(self.units) != len(self.operators):
            first, last = self.units[0].name, self.units[-1].name
            lines.append(f"{len(self.units)} units of {len(self.operators)} operators: {first} ... {last}")
        if pinned := sum(len(operator.pinned) for operator in self.operators):
            share = self._share(lambda operator: operator.pinned)
            lines.append(f"pinned: {pinned} of {3 * len(self.operators)} GEMMs, {share:.1%} of their arithmetic")
        if self.shared.engine is not None:
            lines.append("Transformer Engine casts: saturation, the paths' errors and saved bytes are not measured")
        if isinstance(self.operators[0], Int8Linear):
            own, codes = self.weight_bytes()
            weights = self.operators[0].weights
            lines.append(f"weights {weights}: {own:,} bytes in their own dtype, {codes:,} of INT8 codes and scales")
            if weights == "instead":
                lines.append("the recovery path and evaluation read codes times scale: W8A16, not the 16-bit weights")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Whose it is (`paths`), the seed and step of stochastic rounding and delayed scales, where there are any.

        Waits for the device under backend=te with delayed scales.
        """
        state: dict[str, Any] = {"paths": self._owner()}
        if self.shared.rounding is not None:
            state["rounding"] = self.shared.rounding.state()
        if self.shared.engine is not None and self.shared.engine.delayed:
            state["te"] = self.shared.engine.state()
        history = None if self.shared.amax is None else self.shared.amax.history
        return state if history is None else state | {"largest": history.clone()}

    def check_state(self, state: Any) -> None:
        """ValueError if it belongs to other paths, another rounding or another number of operators, or is damaged."""
        owner = state.get("paths") if isinstance(state, Mapping) else None
        if owner != self._owner():
            raise ValueError(f"the paths' state belongs to {owner or 'unknown paths'}; this plan has {self._owner()}")
        shared = self.shared
        try:
            if shared.rounding is not None:
                Rounding(0, torch.device("cpu")).load(state["rounding"])
            if "te" in state:
                torch.load(BytesIO(state["te"]), weights_only=True)
            if shared.amax is not None and (history := shared.amax.history) is not None:
                largest = state["largest"]
                if largest.shape != history.shape or not bool((largest.isfinite() & (largest >= 0)).all()):
                    raise ValueError(f"must be {tuple(history.shape)} magnitudes")
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError, OSError, UnpicklingError) as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(f"the paths' state is damaged ({what})") from error

    def _owner(self) -> str:
        self._check_converted()
        # Recipes name the GEMMs that are recovered where it is not all of them.
        low, recovery = described(self.low), "none" if self.recovery is None else described(self.recovery)
        rounding = "nearest" if self.shared.rounding is None else "stochastic"
        # Of a recipe of the user's the name alone says nothing.
        own = "".join(
            f", {path.name}: {path.words()}"
            for path in (self.low, self.recovery)
            if isinstance(path, Recipe) and path.name.partition(" ")[0] not in RECIPES
        )
        site = ", site=forward" if self.shared.quantize_forward else ""
        by_name = {o.operator_name: described(o.low) for o in self.operators if o.pinned}
        pins = f", pins: {by_name}" if by_name else ""
        return f"low={low}, recovery={recovery}, rounding={rounding}{site}, {len(self.operators)} operators{own}{pins}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError, before anything is loaded: see `check_state`."""
        self.check_state(state)
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        if "te" in state and self.shared.engine is not None:
            runs = [
                (operator.index, operator, path)
                for operator in self.operators
                for path in (operator.low, operator.recovery)
                if isinstance(path, Recipe)
            ]
            self.shared.engine.load(state["te"], runs)
        if self.shared.rounding is not None:
            self.shared.rounding.load(state["rounding"])
            self.shared.step = self.shared.rounding.step
        if self.shared.amax is not None and self.shared.amax.history is not None:
            self.shared.amax.load(state["largest"])


def _numbered(pattern: str, names: Sequence[str]) -> str:
    """The pattern with numbers for its stars, layers.{0,3}.mlp.down_proj; as it is where that would name others too."""
    numbers = [list(dict.fromkeys(at)) for at in zip(*(re.findall(r"\b\d+\b", name) for name in names), strict=True)]
    if math.prod(map(len, numbers)) != len(names):
        return pattern
    for own in numbers:
        pattern = pattern.replace("*", own[0] if len(own) == 1 else f"{{{','.join(own)}}}", 1)
    return pattern


def _same_wgrad(low: ExecutionPath, recovery: ExecutionPath | None) -> bool:
    return isinstance(low, Recipe) and isinstance(recovery, Recipe) and low.wgrad == recovery.wgrad


def described(path: ExecutionPath) -> str:
    """Its name, and of a recipe that casts something what runs it and what it leaves in 16 bits."""
    if not isinstance(path, Recipe) or not path.casts:
        return path.name
    outliers = None if path.fprop.input is None else path.fprop.input.outliers
    return f"{path.name}, {path.backend}{'' if outliers is None else f', columns from {outliers:g} in 16 bits'}"


def _area(operator: PathLinear) -> int:
    """Multiplications of one of its GEMMs, a token."""
    return operator.in_features * operator.out_features


def kept_as(path: ExecutionPath) -> str:
    """In what an operator on `path` keeps its input: operators that agree in it can share one copy."""
    if isinstance(path, Format):
        return path.name
    return f"{path.wgrad.input} {path.backend}" if path.wgrad.input else "bf16"


def kept_bytes(operator: PathLinear, path: ExecutionPath, rows: int, dtype: torch.dtype) -> int:
    """Bytes that `rows` rows (tokens) in `dtype` of the operator's input occupy on `path`, their scales counted."""
    width = operator.in_features
    if isinstance(path, Recipe) and path.wgrad.input is not None and path.wgrad.input.hadamard:
        rows, dtype = rows + -rows % HADAMARD, rotated_dtype(dtype)
    if isinstance(path, Format) and not isinstance(path, KeepFormat):
        return rows * (row_bytes(width, path.bits) + scales_of(width, path) * scale_dtype(dtype).itemsize)
    if isinstance(path, Recipe) and _kept_bits(path) == 8 and rows:
        cast = path.wgrad.input
        assert cast is not None
        height, columns = cast.group(0)
        scales = -(-rows // (height or rows)) * -(-width // (columns or width))
        return rows * width + scales * (1 if cast.power_of_two else torch.float32.itemsize)
    return rows * width * dtype.itemsize


def nominal_bits(path: ExecutionPath) -> int:
    """Width of the saved input as wgrad reads it, by which Eq. 5 counts, whether or not it is really stored so."""
    if isinstance(path, Format):
        return path.bits
    return 16 if path.wgrad.input is None else path.wgrad.input.format.bits


def _kept_bits(path: ExecutionPath) -> int:
    """Width of the elements that are kept for backward: of a recipe 16, unless its GEMMs really run in FP8."""
    if isinstance(path, Format):
        return path.bits
    return 8 if path.backend in ("scaled_mm", "te") and path.wgrad.input is not None else 16
