"""Exchanging linears by name pattern, and the plan that comes of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.paths.formats import Format, KeepFormat, get_format
from gnmr.paths.probe import Probe
from gnmr.paths.saved import PathLinear, SharedState, exact
from gnmr.paths.scaling import row_bytes, scale_dtype


@dataclass(eq=False)
class Plan:
    """The converted operators of a model, in module order, and what they share."""

    operators: list[PathLinear]
    low: Format
    recovery: Format | None
    shared: SharedState
    _predicted: tuple[object, int] | None = None

    def exact(self) -> AbstractContextManager[None]:
        """Inside, every operator is a plain 16-bit linear, whatever its path (evaluation)."""
        return exact(self.shared)

    def restore(self) -> None:
        """Turns every operator back into the `nn.Linear` that it was; nothing is left to do the second time."""
        for operator in self.operators:
            if type(operator) is not PathLinear:
                continue
            for name in ("unit_name", "low", "recovery", "recovering", "shared", "fault", "read", "_node"):
                delattr(operator, name)
            operator.__class__ = nn.Linear  # type: ignore[assignment]

    def probe(self, names: Collection[str], tokens: int = 1) -> Probe:
        """Starts measuring the statistics `names` of every `tokens`-th row (see `Probe`), in place of an earlier probe.

        ValueError for an unknown name, a stride below 1, and a gap to the recovery path of a static plan.
        """
        if self.recovery is None and (gaps := sorted({"gap_recovery", "gap_exact"} & set(names))):
            raise ValueError(f"{', '.join(gaps)}: this plan has no recovery path")
        self.shared.forget()  # and what an earlier probe measured of the last tensor
        self.shared.probe = Probe(self.operators, names, tokens)
        return self.shared.probe

    def unprobe(self) -> None:
        """Ends it; operators are as if there had never been a probe."""
        self.shared.probe = None

    def saved_bytes(self) -> int:
        """Bytes that the operators' inputs occupy in the autograd graph now, between forward and backward.

        Read from the graph's own nodes; a storage that several operators share counts once. Under activation
        checkpointing the graph holds no inputs at this point and reading them would recompute them: do not call it.
        """
        storages = {}
        for operator in self.operators:
            for tensor in operator.kept():
                storages[tensor.data_ptr()] = tensor.nbytes
        return sum(storages.values())

    def predicted_bytes(self) -> int:
        """The same from the memory model: p/8 bytes per element, the scales, and one copy per tensor and format."""
        now = [(operator.recovering, operator.read) for operator in self.operators]
        if self._predicted is None or self._predicted[0] != now:  # most steps switch nothing
            copies = {}
            for operator in self.operators:
                if operator.read is not None:
                    rows, first_reader = operator.read
                    copies[first_reader, operator.format.name] = rows * bytes_per_row(operator, operator.format)
            self._predicted = now, sum(copies.values())
        return self._predicted[1]

    def extra_bytes(self) -> float:
        """Eq. 5: (p_high - p_low)/8 * sum of A_b over the units in recovery, each unit counted by itself."""
        return sum(self._extra(operator) for operator in self.operators if operator.recovering)

    def extra_bytes_bound(self, max_o: int) -> float:
        """Eq. 67: (p_high - p_low)/8 * (sum of the max_o largest A_b); never exceeded by `extra_bytes`."""
        return sum(sorted((self._extra(operator) for operator in self.operators), reverse=True)[:max_o])

    def _extra(self, operator: PathLinear) -> float:
        if self.recovery is None or operator.read is None:
            return 0.0
        return (self.recovery.bits - self.low.bits) / 8 * operator.read[0] * operator.in_features

    def table(self) -> list[tuple[str, str, str, str]]:
        """Rows (unit, operator, low path, recovery path); layers that differ by their number alone stand together."""
        groups: dict[tuple[str, str], list[str]] = {}
        for operator in self.operators:
            shape = f"Linear {operator.in_features} -> {operator.out_features}"
            groups.setdefault((re.sub(r"\b\d+\b", "*", operator.unit_name), shape), []).append(operator.unit_name)
        recovery = "none (static)" if self.recovery is None else self.recovery.name
        return [
            (names[0] if len(names) == 1 else f"{pattern}  ({len(names)} units)", shape, self.low.name, recovery)
            for (pattern, shape), names in groups.items()
        ]

    def __str__(self) -> str:
        rows = [("unit", "operator", "low path", "recovery path"), *self.table()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip() for r in rows
        )

    def state_dict(self) -> dict[str, Tensor]:
        """State of the stochastic generator; empty with rounding to nearest."""
        generator = self.shared.generator
        return {} if generator is None else {"generator": generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.shared.generator is not None:
            self.shared.generator.set_state(state["generator"].cpu())


def bytes_per_row(operator: PathLinear, fmt: Format) -> int:
    """Bytes that one row (token) of the operator's input occupies in `fmt`, its scale counted."""
    dtype = operator.weight.dtype
    if isinstance(fmt, KeepFormat):
        return operator.in_features * dtype.itemsize
    return row_bytes(operator.in_features, fmt.bits) + scale_dtype(dtype).itemsize


def select(names: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the dotted `names` that match one of `patterns`, in their order; the patterns that match none)."""
    chosen, empty = [], list(patterns)
    for name in names:
        found = [p for p in patterns if fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}")]
        if found:
            chosen.append(name)
            empty = [pattern for pattern in empty if pattern not in found]
    return chosen, empty


def convert(
    model: nn.Module,
    low: str,
    recovery: str | None,
    targets: Sequence[str] = ("*_proj",),
    site: str = "saved",
    rounding: str = "nearest",
    seed: int = 0,
) -> Plan:
    """Turns every `nn.Linear` whose name matches into a `PathLinear` on its low-cost path, in place.

    The modules, their parameters, hooks and names stay the same objects, so an optimizer made before stays valid.

    Args:
        low, recovery: formats (`gnmr.paths.formats.FORMATS`); `recovery=None` makes the run static.
        targets: patterns with `*` and `?`, matched against the end of the dotted name at a component's border:
            `down_proj` is every layer's, `layers.2.*` is not layer 20's.
        site: `saved` quantizes what backward keeps; `forward` lets the forward pass read it too.
        rounding: `nearest` or `stochastic`, the latter from a generator seeded with `seed`.

    ValueError for an unknown format, site or rounding, a pattern that matches no linear, and a linear that is a
    subclass of `nn.Linear` (converted already, or another library's).
    """
    low_format, recovery_format = get_format(low), None if recovery is None else get_format(recovery)
    for name, value, choices in (
        ("site", site, ("saved", "forward")),
        ("rounding", rounding, ("nearest", "stochastic")),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: must be {' or '.join(choices)}")

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names, empty = select(linears, targets)
    chosen = {name: linears[name] for name in names}
    if empty or not targets:
        kinds = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise ValueError(f"targets {empty}: no linear has such a name; this model has {', '.join(kinds) or 'none'}")
    for name, module in chosen.items():
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is a {type(module).__name__}: only a plain nn.Linear can be given two paths")

    device = next(iter(chosen.values())).weight.device
    generator = None
    if rounding == "stochastic":
        generator = torch.Generator(device="cpu" if device.type == "meta" else device)
        generator.manual_seed(seed)
    shared = SharedState(site, generator)
    operators = []
    for name, module in chosen.items():
        module.__class__ = PathLinear
        assert isinstance(module, PathLinear)
        module.unit_name, module.low, module.recovery = name, low_format, recovery_format
        module.recovering, module.shared, module.fault, module.read, module._node = False, shared, None, None, None
        operators.append(module)
    return Plan(operators, low_format, recovery_format, shared)
