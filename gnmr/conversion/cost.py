"""Costs of the operators of a converted model: arithmetic and time of GEMMs, and memory that is kept for backward.

GEMM time is relative: rows * inputs * outputs * the time of the GEMM's recipe, which its widest operand decides
(`TIMES`). Extra GEMM time is the GEMM time now minus the time on the low recipe, divided by the latter. Both are sums
over all GEMMs. After `Cost.count`, "all GEMMs" are those of the whole model, with those outside of the operators in 16
bits. Before, they are the operators' own GEMMs, with one token each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from gnmr.conversion.int8 import Int8Linear
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.shared import SharedState
from gnmr.conversion.unit_names import PathUnit
from gnmr.formats.cast import rotated_dtype
from gnmr.formats.number_formats import Format, KeepFormat
from gnmr.formats.recipes import HADAMARD, READS, RECIPES, ExecutionPath, Recipe
from gnmr.formats.scaling import row_bytes, scale_dtype, scales_of
from gnmr.names import GEMMS

TIMES = {"4": 1.0, "8": 2.0, "16": 4.0}
"""Relative time of a GEMM by the bits of its widest operand."""


def gemm_time(
    recipe: Recipe,
    gemm: str,
    times: Mapping[str, float] | None = None,
    recipes: Mapping[str, Recipe] | None = None,
    shape: tuple[int, int] | None = None,
) -> float:
    """Return the relative time of a GEMM under `recipe`.

    Operands of 2 and 3 bits count as 4 bits, and 6 bits as 8. An operand that is not cast counts as 16 bits. The result
    does not count.

    Args:
        recipe: the recipe, or a mixture of several (`Recipe.with_gemms`).
        gemm: fprop, dgrad or wgrad.
        times: replacements for `TIMES`, by width or by recipe. The time of a recipe applies to every GEMM with the same
            casts as the same GEMM of that recipe. A GEMM that the recipe leaves in 16 bits has the time of 16.
        recipes: user-defined recipes that `times` may name.
        shape: (inputs, outputs) of the operator. A time of this recipe, GEMM and shape comes before all others.

    Returns:
        The time per multiplication, in units of a 4-bit GEMM's.
    """
    times = times or {}
    recipes = {**RECIPES, recipe.name: recipe, **(recipes or {})}
    casts = recipe.words()[gemm]
    if shape is not None:
        of_shape = f":{gemm}:{shape[0]}x{shape[1]}"
        for key in (f"{recipe.name}{of_shape}", *times):
            name = key.removesuffix(of_shape)
            if name != key and key in times and name in recipes and recipes[name].words()[gemm] == casts:
                return times[key]
    # A given time of a recipe holds for each GEMM with the same casts, also in a mixture of recipes.
    for name in (recipe.name, *times):
        if name in times and name in recipes:
            same_casts = recipes[name].words()[gemm] == casts
            if same_casts and (casts or not recipes[name].casts):
                return times[name]
    # Hardware multiplies in the format of the wider operand.
    operands = [getattr(getattr(recipe, gemm), operand) for operand in READS[gemm]]
    widest = max(16 if cast is None else cast.format.bits for cast in operands)
    width = "16"
    if widest <= 4:
        width = "4"
    elif widest <= 8:
        width = "8"
    return {**TIMES, **times}[width]


class Work(NamedTuple):
    """Multiplications of a model's forward pass."""

    operators: tuple[int, ...]
    """Multiplications of each operator, in order."""
    outside: int
    """Multiplications of all other GEMMs."""
    notes: tuple[str, ...] = ()
    """Lines for tables that describe the operators' share of all GEMMs."""


class Spent(NamedTuple):
    """Costs of a step; see `Cost.spent`."""

    share: float
    extra_bytes: float
    extra_time: float


_STATE = attrgetter("low", "recovered", "read")
"""The attributes of an operator that its costs depend on."""


@dataclass
class _Snapshot:
    """Costs of all operators, and the state for which they were computed."""

    state: tuple[Any, ...]
    """The path of a warm-up in 16 bits, then `_STATE` of each operator."""
    predicted: int
    spent: Spent
    saved: int | None = None
    """Bytes that were read from the graph; `holding` says which operators held an input then."""
    holding: list[bool] | None = None


@dataclass(eq=False)
class Cost:
    """Costs of a converted model now, in total and by unit; the fields are those of `ConvertedModel`."""

    operators: Sequence[PathLinear]
    units: Sequence[PathUnit]
    low: ExecutionPath
    recovery: ExecutionPath | None
    shared: SharedState
    recovers: tuple[str, ...]
    times: Mapping[str, float]
    recipes: Mapping[str, Recipe]
    work: Work | None = None
    """Counted arithmetic of the whole model; None: not counted yet."""
    _snapshot: _Snapshot | None = None
    _path_times: dict[tuple[int, tuple[int, int] | None], tuple[ExecutionPath, float]] = field(default_factory=dict)

    def count(self, work: Work | None) -> None:
        """Set the arithmetic of one pass of the whole model; costs are shares of it from now on."""
        self.work, self._snapshot = work, None

    def saved_bytes(self) -> int:
        """Return the bytes that the operators' inputs occupy in the autograd graph now, between forward and backward.

        The bytes are read from the graph's nodes. A storage that several operators share counts once, and an operator
        that ran several times counts with its last pass. The previous result is reused if every operator kept as many
        rows of the same tensors on the same path, and the graph holds them again.

        Do not call this under activation checkpointing: the graph holds no inputs at this point, and reading them would
        recompute them. Raises ValueError if the operators are in graphs of `gnmr.conversion.compile`.
        """
        if any(operator.in_graphs is not None for operator in self.operators):
            raise ValueError("saved_bytes: what compiled blocks keep for backward is the compiler's choice")
        snapshot, holding = self._now(), [operator.holds for operator in self.operators]
        if snapshot.saved is None or snapshot.holding != holding:
            # q, k and v hold the same tensor: a storage counts once, with the largest view of it.
            bytes_by_storage: dict[int, int] = {}
            for tensor in (tensor for operator in self.operators for tensor in operator.kept()):
                address = tensor.data_ptr()
                bytes_by_storage[address] = max(bytes_by_storage.get(address, 0), tensor.nbytes)
            snapshot.holding, snapshot.saved = holding, sum(bytes_by_storage.values())
        return snapshot.saved

    def of_pass(self) -> tuple[int, int, Spent]:
        """Return (`saved_bytes`, `predicted_bytes`, `spent`) between forward and backward."""
        saved, snapshot = self.saved_bytes(), self._snapshot
        assert snapshot is not None
        return saved, snapshot.predicted, snapshot.spent

    def predicted_bytes(self) -> int:
        """Return the same number as the memory model predicts it.

        The model counts p/8 bytes per element, the scales, and one copy per tensor and format. Tensors that are kept
        unchanged count once if they are views of one storage. A simulated recipe keeps the input's own width: one
        tensor per tensor that is read and per cast that wgrad reads. On real hardware the copy is codes of one byte and
        their scales.
        """
        return self._now().predicted

    def weight_bytes(self) -> tuple[int, int]:
        """Return (bytes of the operators' weights in their own dtype, bytes of their INT8 codes and scales).

        With O outputs and I inputs in bfloat16 the result is (2 O I, 0), and (0, O (I + 4)) with weights="instead". The
        graph holds these same tensors between forward and backward. A parameter of several operators counts once.
        Biases do not count.
        """
        weights = {id(operator.weight): operator.weight for operator in self.operators}
        dense = sum(weight.nbytes for weight in weights.values() if weight.is_floating_point())
        return dense, sum(operator.code_bytes for operator in self.operators if isinstance(operator, Int8Linear))

    def spent(self) -> Spent:
        """Return the costs of the current paths: recovered share of arithmetic, extra bytes (Eq. 5) and extra time.

        Does not wait for the device.

        Returns:
            share: share of the arithmetic of all GEMMs (see the module) that runs on the recovery path. A GEMM counts
                rows * in_features * out_features. A forward GEMM outside of the operators counts three times, as the
                operators' GEMMs do. Pinned GEMMs always count, and GEMMs of an operator in recovery if `recovers` names
                them. In a 16-bit warm-up all GEMMs of such an operator count. Under formats an operator counts as a
                whole.
            extra_bytes: (p_high - p_low)/8 times the sum of A_b over the operators in recovery, each counted
                separately. Pins count if they keep more of the input. p_high is 16 in a 16-bit warm-up. The result is 0
                under simulated recipes, which always keep the input in its own width.
            extra_time: extra GEMM time that pins and recovery add, as a share of the time with every GEMM on the low
                recipe. The result is 0 under formats, whose GEMMs run in 16 bits.
        """
        return self._now().spent

    def of_units(self, kind: str) -> tuple[list[float], float]:
        """Return what recovery of each unit costs.

        Args:
            kind: gemm for the arithmetic that `spent` counts, or bytes for Eq. 5's extra bytes with the bits of the
                input that wgrad reads.

        Returns:
            (what recovery of each unit adds, what pins take), as shares of what recovery of everything takes.

        Raises:
            ValueError: if `kind` is bytes and recovery adds none.
        """
        if kind == "bytes":
            return self._bytes_of_units()
        shares = []
        for unit in self.units:
            # A pinned GEMM has one recipe on both paths, so recovery of its unit adds nothing for it.
            gemms = self.recovers if unit.gemm is None else (unit.gemm,)
            if isinstance(self.low, Format):
                gemms = GEMMS
            areas = (len({*gemms} - {*operator.pinned}) * self._area(operator) for operator in unit.operators)
            shares.append(sum(areas) / self._arithmetic())
        return shares, self.pinned_share()

    def pinned_share(self) -> float:
        """Return the share of all arithmetic that pinned GEMMs take."""
        pinned = sum(len(operator.pinned) * self._area(operator) for operator in self.operators)
        return pinned / self._arithmetic()

    def _bytes_of_units(self) -> tuple[list[float], float]:
        recovery = self.low if self.recovery is None else self.recovery

        def added(operator: PathLinear, path: ExecutionPath, base: ExecutionPath) -> float:
            # rows * in_features: the elements of the input.
            inputs = self._area(operator) / operator.out_features
            return inputs * max(0, nominal_bits(path) - nominal_bits(base))

        total = sum(added(operator, recovery, self.low) for operator in self.operators)
        if not total:
            raise ValueError("cost=bytes: recovery keeps no more bits of the input than the low path; use gemm")
        shares = [
            sum(added(operator, unit.path_of(operator), operator.low) for operator in unit.operators) / total
            for unit in self.units
        ]
        return shares, sum(added(operator, operator.low, self.low) for operator in self.operators) / total

    def _now(self) -> _Snapshot:
        """Return the costs of the paths in force and of the last forward pass, recomputed if anything changed."""
        state = self.shared.warmup, *map(_STATE, self.operators)
        if self._snapshot is not None and self._snapshot.state == state:
            return self._snapshot
        recovered, extra_bytes, extra_time, copies = 0, 0.0, 0.0, dict[tuple[object, str], int]()
        low_bits, usual_time = _kept_bits(self.low), 0.0
        for operator in self.operators:
            path, read, area = operator.path, operator.read, self._area(operator)
            # Share of arithmetic and extra time count every operator, whether it ran or not.
            recovered += len(self._recovered(operator)) * area
            low_time = self._time(self.low, operator) * area
            extra_time += self._time(path, operator) * area - low_time
            usual_time += low_time
            if read is not None:
                rows, kept_by, dtype = read
                # Eq. 5: operators in recovery count separately. The memory model counts a shared copy once.
                extra_bytes += max(0, _kept_bits(path) - low_bits) / 8 * rows * operator.in_features
                key = kept_by, kept_as(path)
                copies[key] = max(copies.get(key, 0), kept_bytes(operator, path, rows, dtype))
        # The time with every GEMM on the low recipe, and the GEMMs outside of the operators in 16 bits.
        arithmetic = self._arithmetic()
        usual_time += len(GEMMS) * self._outside * {**TIMES, **self.times}["16"]
        spent = Spent(recovered / arithmetic, extra_bytes, extra_time / (usual_time or 1.0))
        self._snapshot = _Snapshot(state, sum(copies.values()), spent)
        return self._snapshot

    def _arithmetic(self) -> int:
        """Return the number of multiplications of all GEMMs."""
        return len(GEMMS) * (sum(map(self._area, self.operators)) + self._outside)

    @property
    def _outside(self) -> int:
        return 0 if self.work is None else self.work.outside

    def _area(self, operator: PathLinear) -> int:
        """Return the multiplications of one of the operator's GEMMs, as counted or for one token."""
        # One token through each operator, until the model's own passes are counted.
        if self.work is None:
            return operator.in_features * operator.out_features
        return self.work.operators[operator.index]

    def _time(self, path: ExecutionPath, operator: PathLinear) -> float:
        """Return the relative time per multiplication of an operator's GEMMs on `path`; 0 for formats."""
        if isinstance(path, Format):
            return 0.0
        shape = (operator.in_features, operator.out_features) if self._by_shape else None
        # By identity: hashing a recipe takes as long as all other work for an operator.
        if (key := (id(path), shape)) not in self._path_times:
            times = (gemm_time(path, gemm, self.times, self.recipes, shape) for gemm in GEMMS)
            self._path_times[key] = path, sum(times)
        return self._path_times[key][1]

    @cached_property
    def _by_shape(self) -> bool:
        """True if some times are of operators of one shape."""
        return any(":" in key for key in self.times)

    def _recovered(self, operator: PathLinear) -> Collection[str]:
        """Return the GEMMs of the operator that are on the recovery path now."""
        if not operator.recovering:
            return operator.pinned
        if self.shared.warmup is not None or isinstance(operator.low, Format):
            return GEMMS
        return {*operator.pinned, *(operator.recovered if operator.gemms else self.recovers)}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy, without the last step's numbers."""
        return {**self.__dict__, "_snapshot": None, "_path_times": {}}


def kept_as(path: ExecutionPath) -> str:
    """Return how an operator on `path` keeps its input: operators with equal answers can share one copy."""
    if isinstance(path, Format):
        return path.name
    return f"{path.wgrad.input} {path.backend}" if path.wgrad.input else "bf16"


def kept_bytes(operator: PathLinear, path: ExecutionPath, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes that are kept of the operator's input, with their scales.

    Args:
        operator: the operator that reads the input (rows, in_features).
        path: the path that keeps it.
        rows: number of tokens.
        dtype: dtype of the input.
    """
    width = operator.in_features
    # The rotation mixes rows, so rows are padded to its size, and the rotated copy has its own dtype.
    if isinstance(path, Recipe) and path.wgrad.input is not None and path.wgrad.input.hadamard:
        rows, dtype = rows + -rows % HADAMARD, rotated_dtype(dtype)
    # Formats pack codes of p bits, and keep one scale for each row or group.
    if isinstance(path, Format) and not isinstance(path, KeepFormat):
        return rows * (row_bytes(width, path.bits) + scales_of(width, path) * scale_dtype(dtype).itemsize)
    if isinstance(path, Recipe) and _kept_bits(path) == 8 and rows:
        cast = path.wgrad.input
        assert cast is not None
        # One byte for an element, and one FP32 scale for a group of (height, columns); None is the whole dimension.
        height, columns = cast.group(0)
        scales = -(-rows // (height or rows)) * -(-width // (columns or width))
        return rows * width + scales * torch.float32.itemsize
    return rows * width * dtype.itemsize


def nominal_bits(path: ExecutionPath) -> int:
    """Return the width of the saved input as wgrad reads it, which Eq. 5 counts even if it is stored wider.

    Returns: bits per element, without scales; 16 if the path does not cast it.
    """
    if isinstance(path, Format):
        return path.bits
    return 16 if path.wgrad.input is None else path.wgrad.input.format.bits


def _kept_bits(path: ExecutionPath) -> int:
    """Return the width of elements kept for backward: 16 for a recipe, unless its GEMMs really run in FP8."""
    if isinstance(path, Format):
        return path.bits
    return 8 if path.backend == "scaled_mm" and path.wgrad.input is not None else 16
