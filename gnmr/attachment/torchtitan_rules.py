"""Define the options and the restrictions of torchtitan's integration without importing torchtitan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gnmr.conversion.targets import role_by_name
from gnmr.errors import UserError, install
from gnmr.patterns import select

SERIES = "0.3."
"""Prefix of the versions that this was written for and tried with."""
_DEGREES = {
    "tensor_parallel_degree": "a path would compute scales and gradients of one shard alone",
    "pipeline_parallel_degree": "a rank sees only the units of its own stages",
    "context_parallel_degree": "it is not tried",
    "expert_parallel_degree": "it is not tried",
}


def check_version() -> None:
    """Raise UserError if torchtitan is not installed or has another version."""
    try:
        installed = version("torchtitan")
    except PackageNotFoundError as error:
        raise UserError(f"gnmr.attachment.torchtitan needs torchtitan {SERIES}x: {install('torchtitan')}") from error
    # The integration overrides methods and replaces configs that other series may have changed.
    if not installed.startswith(SERIES):
        raise UserError(
            f"torchtitan {installed} is installed, and gnmr.attachment.torchtitan is written for {SERIES}x: "
            "pip install 'torchtitan==0.3.0'"
        )


@dataclass(kw_only=True, slots=True)
class ControlSection:
    """The section `gnmr` of a Trainer's config: fields of `gnmr.ControlSpec` under the same names."""

    signal: str = "gnmr_delta"
    """Signal of each unit's risk (docs/signals.md)."""
    max_o: int = 4
    """Maximum number of units on the recovery path at once."""
    budget: float | None = None
    """Their maximum total cost, as a share of the cost of recovery of everything."""
    routing: str = "thresholded"
    """thresholded or ranked."""
    alpha: float | None = 1.5
    """Threshold of GNMR."""
    beta: float | None = 1.3
    """Threshold of dGNMR."""
    warmup_steps: int = 0
    """Number of steps in which every unit is on the recovery path."""
    calibrate: float | None = None
    """Intended share of unit-steps above the threshold, which is learned from the first 100 steps."""
    seed: int = 0
    """Seed of signals that draw, and of stochastic rounding."""
    options: dict[str, float] = field(default_factory=dict)
    """Options of the signal."""
    record: str = ""
    """Folder for the records of the run, which `gnmr report` reads; empty: no records."""

    def named(self) -> dict[str, Any]:
        """Return the options of `gnmr.attach`."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        del options["calibrate"]
        if not self.record:
            del options["record"]
        return options


def refuse(config: Any) -> None:
    """Raise UserError for a config under which norms or sets would be wrong, or a switch would have no effect."""
    parallelism, training = config.parallelism, config.training
    # Norms would be of parts of a gradient, or sets would differ between ranks.
    for name, why in _DEGREES.items():
        if (degree := getattr(parallelism, name)) > 1:
            raise UserError(f"GnmrTrainer: parallelism.{name}={degree} is not supported, {why}; use data parallelism")
    # Paths would not be in force where they seem to be.
    if parallelism.spmd_backend == "full_dtensor":
        raise UserError(
            "GnmrTrainer: parallelism.spmd_backend=full_dtensor keeps parameters as DTensors in the forward pass, and "
            "paths need plain tensors; use spmd_types or partial_dtensor"
        )
    if not training.disable_cuda_graphs:
        raise UserError(
            "GnmrTrainer: a captured CUDA graph replays the paths that it was captured on, so that switching would do "
            "nothing; use training.disable_cuda_graphs=True"
        )
    if training.enable_cpu_offload:
        raise UserError(
            "GnmrTrainer: training.enable_cpu_offload=True is not supported, paths lie where parameters are and "
            "compute where they are not; turn it off"
        )


def chosen(names: Sequence[str], targets: Sequence[str], exclude: Sequence[str], recipes: bool) -> list[str]:
    """Return the names of the linears that get two paths.

    These match `targets` (by default all in numbered layers) and do not match `exclude`. Gates and heads are included
    only if targets name them and the paths are formats: `recipes` skip them.
    """
    selected, _ = select(names, targets or ["layers.*"])
    excluded = {*select(names, exclude)[0]}
    # Recipes describe GEMMs of hidden layers; a gate or head in 8 bits must be the user's explicit wish.
    with_gates = bool(targets) and not recipes
    return [name for name in selected if name not in excluded and (with_gates or not role_by_name(name))]


def modules_of(fqn: str) -> list[str]:
    """Return the modules that the config of this name builds; keys' and values' linears share one config.

    >>> modules_of("layers.0.attention.qkv_linear.wkv"), modules_of("layers.0.attention.wo")
    (['layers.0.attention.qkv_linear.wk', 'layers.0.attention.qkv_linear.wv'], ['layers.0.attention.wo'])
    """
    parent, _, name = fqn.rpartition(".")
    # torchtitan builds wk and wv from copies of one config.
    return [f"{parent}.wk", f"{parent}.wv"] if name == "wkv" else [fqn]


def refuse_compiled(why: str | None, measures: Iterable[str]) -> None:
    """Raise UserError if torchtitan compiles each block as one graph that cannot contain the paths."""
    if why is None and (names := ", ".join(measures)):
        why = f"the signal measures {names} between graphs"
    if why is not None:
        raise UserError(
            f"GnmrTrainer: torchtitan compiles a block as one graph, and {why}; take unit='block' and recipes, or "
            "leave model out of compile.components"
        )
