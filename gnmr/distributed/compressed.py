"""GreedyLore (arXiv 2507.08784): low-rank gradients with error feedback as a low path, their dense mean as recovery.

Data parallel workers send the mean of their gradients through a network. Of a weight's gradient, m rows by n columns
with m <= n (a tall one is read transposed), worker i sends r rows in place of m. In step t, from 0:

| step | what worker i does |
|---|---|
| t < S | sends G_i: dense start |
| (t - S) mod tau = 0 | sends G_i; U (m x m) becomes the left singular vectors of the mean, E_i = 0: refresh |
| else, low path | H_i = G_i + E_i; P (m x r): columns of U; sends R_i = P' H_i; E_i = H_i - P R_i; gets P mean(R) |
| else, recovery | sends H_i; E_i = 0 |

The columns are the r with the largest (mean_i U' H_i xi)^2, xi a normal vector that all workers draw alike, so a
worker sends m numbers more to choose them. **Choice 69**: recovery sends H_i and not G_i, so nothing that was held back
is lost. (The refresh drops E_i: the paper's.)

Every matrix is a unit of a `Controller`, which knows of none of this. What a worker decides comes from sums that are
the same everywhere; U is computed by each, so workers need processors of one kind.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.control.norms import to_device
from gnmr.control.units import Unit
from gnmr.distributed import world
from gnmr.distributed.shards import is_sharded
from gnmr.distributed.workers import RankWorkers, Workers
from gnmr.errors import RunFailed, one_of, whole
from gnmr.names import listed, select

BASES = ("greedy", "random")
HEADS = ("lm_head",)
DENSE, REFRESH, LOW = "dense", "refresh", "low"


@dataclass(frozen=True, kw_only=True)
class GreedyLoreSpec:
    """Rank, lengths and variants. ValueError, naming the field, for a senseless value."""

    rank: int = 32
    """r: rows that are sent of a matrix."""
    refresh_every: int = 200
    """tau, optimizer steps: how long a basis stays."""
    dense_steps: int = 1000
    """S, optimizer steps: a dense start."""
    basis: str = "greedy"
    """greedy (columns of U, the paper's) or random (**Choice 70**: an orthonormal basis that all workers draw alike,
    anew in each step; steps of the refresh stay dense, so that as many numbers are sent)."""
    feedback: bool = True
    """Whether what was not sent is held back and added to the next gradient; False: it is lost."""
    seed: int = 0
    """Of xi and of random bases."""

    def __post_init__(self) -> None:
        whole(rank=self.rank, refresh_every=self.refresh_every)
        whole(0, dense_steps=self.dense_steps, seed=self.seed)
        one_of(BASES, basis=self.basis)

    def phase(self, step: int) -> str:
        """What happens in a step, from 0: DENSE, REFRESH or LOW."""
        if step < self.dense_steps:
            return DENSE
        return LOW if (step - self.dense_steps) % self.refresh_every else REFRESH

    def overhead(self, rows: int) -> int:
        """Numbers that a matrix costs in each LOW step on either path: its flag, and the scores of its columns."""
        return 1 + (rows if self.basis == "greedy" else 0)


@dataclass(frozen=True)
class _Matrix:
    """A weight that is compressed: (rows, columns) as it is read, the shorter side first."""

    unit: str
    weight: nn.Parameter
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Numbers of its gradient."""
        return self.rows * self.columns

    def wide(self, x: Tensor) -> Tensor:
        """(..., *shape of the weight) -> (..., rows, columns), and back; a view."""
        return x if self.weight.shape[0] <= self.weight.shape[1] else x.mT


def matrices(model: nn.Module, spec: GreedyLoreSpec, targets: Sequence[str]) -> dict[str, _Matrix]:
    """What is compressed of a model, by parameter name: trained weights of the modules that `targets` select.

    ValueError for an embedding, a head, what is no matrix or is sharded, and for a rank that saves nothing of one.
    """
    modules = dict(model.named_modules())
    chosen, empty = select(modules, listed("targets", targets))
    if empty:
        raise ValueError(f"targets: no module matches {empty[0]!r}; patterns of modules to compress, as '*_proj'")
    embedded = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    found: dict[str, _Matrix] = {}
    for name in chosen:
        weight = getattr(modules[name], "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            of = f"{weight.ndim} dimension(s)" if isinstance(weight, Tensor) else "none"
            raise ValueError(f"targets: {name} must have a weight of 2 dimensions, and has {of}: leave it out")
        if id(weight) in embedded or name.rpartition(".")[2] in HEADS:
            raise ValueError(f"targets: {name} is an embedding or the head, which are always sent dense: leave it out")
        if is_sharded(weight):
            raise ValueError(f"{name} is sharded (FSDP2): gradients are compressed whole, wrap the model by DDP")
        if not weight.requires_grad:
            continue
        rows, columns = sorted(weight.shape)
        most = (rows * columns - 1 - spec.overhead(rows)) // columns
        if spec.rank > most:
            raise ValueError(
                f"rank={spec.rank}: {name} is {rows} wide, above {max(most, 0)} it would send as much as a dense one"
            )
        found[f"{name}.weight"] = _Matrix(name, weight, rows, columns)
    if not found:
        raise ValueError("targets: none of the weights is trained, so there is nothing to compress")
    return found


@dataclass(frozen=True)
class Traffic:
    """How many numbers a worker sends of a model's gradient in one step."""

    dense: int
    """All of it."""
    matrices: int
    """Of it what can be compressed."""
    low: int
    """In place of `matrices` in a LOW step, everything on the low path."""
    overhead: int
    """Of `low` what recovery does not save."""

    @classmethod
    def of(cls, model: nn.Module, spec: GreedyLoreSpec, targets: Sequence[str] = ("*_proj",)) -> Traffic:
        """Of this model, which may be on the meta device."""
        found = matrices(model, spec, targets).values()
        overhead = sum(spec.overhead(one.rows) for one in found)
        return cls(
            dense=sum(one.numel() for one in model.parameters() if one.requires_grad),
            matrices=sum(one.size for one in found),
            low=overhead + sum(spec.rank * one.columns for one in found),
            overhead=overhead,
        )

    def mean(self, spec: GreedyLoreSpec, recovery_frac: float = 0.0) -> float:
        """Numbers a step, the mean from one refresh to the next, with this share of the matrices on recovery."""
        low = self.low + recovery_frac * (self.matrices + self.overhead - self.low)
        others = self.dense - self.matrices
        return others + (self.matrices + (spec.refresh_every - 1) * low) / spec.refresh_every


class GreedyLore:
    """The mean of gradients over data parallel workers, compressed matrix by matrix.

        compressed = GreedyLore(model, GreedyLoreSpec(rank=8), workers=VirtualWorkers(4))
        controller = Controller(compressed.units(), ControlSpec(max_o=2))
        means = compressed.reduce(gradients)       # (4, *shape) each, by parameter name; before controller.step()

    Sums are in float32, or float64 where gradients are. `t` counts steps; `sent` is how many numbers a worker sent in
    the last one, `sent_total` in all. A step with a mean that is not finite leaves what is held back and the bases as
    they were: a loop throws it away.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: GreedyLoreSpec | None = None,
        *,
        workers: Workers | None = None,
        targets: Sequence[str] = ("*_proj",),
    ) -> None:
        """`targets`: patterns of modules whose weights are compressed. `workers`: None for the processes of the run.

        ValueError as `matrices` and `RankWorkers`.
        """
        self.spec = GreedyLoreSpec() if spec is None else spec
        self.workers = RankWorkers() if workers is None else workers
        self._matrices = matrices(model, self.spec, targets)
        self._bases: dict[str, Tensor] = {}
        """U, (rows, rows)."""
        self._held: dict[str, Tensor] = {}
        """E of the workers here, (K, rows, columns)."""
        self._rests: dict[str, Tensor] = {}
        self._fresh: dict[str, Tensor] = {}
        self._finite: list[Tensor] = []
        self._sending = 0
        """E, bases, verdicts and numbers of the step that is under way."""
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._recovered: set[str] = set()
        self._changed = False
        self.measuring = False
        """Whether steps measure what `gap` gives."""
        self._squares: dict[str, Tensor] = {}
        self.t = 0
        self.sent = self.sent_total = 0
        self.dense = sum(one.numel() for one in self._names if one.requires_grad)
        """Numbers of all gradients."""

    def __str__(self) -> str:
        rank, all_of = self.spec.rank, self._matrices.values()
        saved = sum(one.size - rank * one.columns - self.spec.overhead(one.rows) for one in all_of)
        return (
            f"compressed gradients: rank {rank} of {len(all_of)} matrices, {self.workers.size} workers; each sends "
            f"{self.dense - saved:,} numbers a step on the low path, of {self.dense:,}"
        )

    def matrices(self) -> dict[str, Tensor]:
        """What is compressed, by parameter name: zeros without memory, in shape and dtype what a worker holds back."""
        return {
            name: torch.zeros(
                (), dtype=torch.promote_types(one.weight.dtype, torch.float32), device=one.weight.device
            ).expand(one.rows, one.columns)
            for name, one in self._matrices.items()
        }

    def units(self) -> list[Unit]:
        """A unit a matrix, named as its module; its cost is how many numbers a step recovery sends more."""

        def switch(name: str, recovered: bool) -> None:
            (self._recovered.add if recovered else self._recovered.discard)(name)
            self._changed = True

        return [
            Unit(
                one.unit,
                (one.weight,),
                lambda recovered, name=name: switch(name, recovered),  # type: ignore[misc]
                cost=one.size - self.spec.rank * one.columns,
            )
            for name, one in self._matrices.items()
        ]

    def reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The means that the optimizer is to have, by parameter name, of all gradients of a step.

        Each (K, *shape): a row for each worker that is here. At most two collectives. Waits for the device in a
        refresh, and after a change of the set. RunFailed where workers have other units on the recovery path.
        """
        found = self._reduce(gradients)
        self._end_step()
        return found

    def register(self, ddp: Any) -> None:
        """Makes this the communication hook of a `DistributedDataParallel`, which `reduce` is not called beside.

        Its backward pass then leaves the means in the gradients, bucket by bucket: two collectives each, of which none
        runs beside the backward pass. ValueError where it wraps another model, or workers are virtual.
        """
        if self.workers.here != slice(world.rank(), world.rank() + 1) or self.workers.size != world.size():
            raise ValueError("virtual workers have no DistributedDataParallel: hand their gradients to reduce()")
        if {id(one) for one in ddp.parameters()} != {id(one) for one in self._names}:
            raise ValueError("DistributedDataParallel wraps another model than the one whose gradients are compressed")
        ddp.register_comm_hook(None, lambda _, bucket: self.hook(bucket))

    def hook(self, bucket: Any) -> Any:
        """What DDP's own hook may call: the means of a bucket's gradients, in their place, as a future that is done."""
        views = {self._names[one]: view for one, view in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        for name, mean in self._reduce({name: view[None] for name, view in views.items()}).items():
            views[name].copy_(mean)
        if bucket.is_last():
            self._end_step()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _end_step(self) -> None:
        """What is held back and the bases of the next step: as they were, where a mean of this one is not finite."""
        finite = torch.stack(self._finite).all()
        for now, new in ((self._held, self._rests), (self._bases, self._fresh)):
            for name, one in new.items():
                before = now.get(name)
                if before is None:  # a first basis may be one of zeros, what is held back may not
                    before = torch.zeros_like(one) if now is self._held else one
                now[name] = torch.where(finite, one, before)
            new.clear()
        self._finite.clear()
        self.sent, self._sending = self._sending, 0
        self.sent_total += self.sent
        self._changed = False
        self.t += 1

    @torch.no_grad()
    def _reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`reduce` of some gradients of the step."""
        phase = self.spec.phase(self.t)
        names = [name for name in gradients if name in self._matrices]
        if phase == LOW and self.spec.basis == "greedy" and not all(name in self._bases for name in names):
            phase = REFRESH  # a state of other lengths was loaded
        sums = {name: self._with_held(name, gradients[name]) for name in names} if phase == LOW else {}
        bases = self._chosen(sums) if sums else {}
        low = {name: basis.mT @ sums[name] for name, basis in bases.items()}
        parts = []
        for name, gradient in gradients.items():
            part = low[name] if name in low else self._matrices[name].wide(sums[name]) if name in sums else gradient
            parts.append(part.flatten(1).to(gradient.dtype))
        mean = self._mean(torch.cat(parts, 1))
        self._finite.append(mean.isfinite().all())
        found: dict[str, Tensor] = {}
        for (name, gradient), sent, one in zip(
            gradients.items(), parts, mean.split([part.shape[1] for part in parts]), strict=True
        ):
            if name in low:
                matrix, basis = self._matrices[name], bases[name]
                rows = sent.to(basis.dtype).unflatten(1, (self.spec.rank, matrix.columns))
                rest = sums[name] - basis @ rows
                self._hold(name, rest)
                if self.measuring:
                    self._squares[name] = rest.double().square().sum()
                found[name] = matrix.wide(basis @ one.to(basis.dtype).view(self.spec.rank, matrix.columns))
            else:
                found[name] = one.view(gradient.shape[1:])
                self._squares.pop(name, None)
                if name in sums:
                    self._hold(name, torch.zeros_like(sums[name]))
                elif name in self._matrices and phase == REFRESH:
                    self._refresh(name, found[name])
            found[name] = found[name].to(gradient.dtype).contiguous()  # fused optimizers read no strides of a gradient
        return found

    def _mean(self, x_KN: Tensor) -> Tensor:
        self._sending += x_KN.shape[1]
        return self.workers.mean(x_KN)

    def _with_held(self, name: str, gradient: Tensor) -> Tensor:
        """H: (K, rows, columns) in the dtype of the arithmetic."""
        wide = self._matrices[name].wide(gradient)
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
        return wide + self._held[name] if name in self._held else wide

    def _hold(self, name: str, rest: Tensor) -> None:
        """E after this step."""
        if self.spec.feedback:
            self._rests[name] = rest

    def _refresh(self, name: str, mean: Tensor) -> None:
        """A new basis of the mean gradient; nothing is held back any more."""
        wide = self._matrices[name].wide(mean)
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
        if name in self._held:
            self._hold(name, torch.zeros_like(self._held[name]))
        if self.spec.basis == "greedy":
            self._fresh[name] = torch.linalg.svd(wide.nan_to_num(0, 0, 0), full_matrices=False).U

    def _chosen(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """P of what is on the low path, (rows, rank): one collective, whose size does not depend on the set."""
        names, greedy = list(sums), self.spec.basis == "greedy"
        first = sums[names[0]]
        flags = torch.tensor([name in self._recovered for name in names], dtype=first.dtype)
        parts = [to_device(flags, first.device).expand(len(first), -1)]
        if greedy:
            parts += [self._scores(name, sums[name]) for name in names]
        mean = self._mean(torch.cat(parts, 1))
        self._check(names, mean[: len(names)])
        low = [name for name in names if name not in self._recovered]
        if not greedy:
            return {name: torch.linalg.qr(self._normal(name, self.spec.rank, sums[name])).Q for name in low}
        scores = dict(zip(names, mean[len(names) :].split([self._matrices[name].rows for name in names]), strict=True))
        return {
            name: self._bases[name][
                :, scores[name].square().sort(descending=True, stable=True).indices[: self.spec.rank]
            ]
            for name in low
        }

    def _scores(self, name: str, sums: Tensor) -> Tensor:
        """U' H xi, (K, rows); 0 of what is on the recovery path."""
        if name in self._recovered:
            return sums.new_zeros(sums.shape[:2])
        return (sums @ self._normal(name, None, sums)) @ self._bases[name]

    def _normal(self, name: str, columns: int | None, like: Tensor) -> Tensor:
        """Normal numbers that all workers draw alike: xi, or (rows, columns)."""
        seed = zlib.crc32(f"{self.spec.seed} {self.t} {name}".encode())
        generator = torch.Generator(like.device).manual_seed(seed)
        matrix = self._matrices[name]
        shape = (matrix.columns,) if columns is None else (matrix.rows, columns)
        return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)

    def _check(self, names: Sequence[str], flags: Tensor) -> None:
        """RunFailed where the mean of the workers' flags says that their sets differ. Waits only where one may."""
        if not self._changed and flags.device.type != "cpu":
            return
        differ = [name for name, flag in zip(names, flags.tolist(), strict=True) if 0 < flag < 1]
        if differ:
            unit = self._matrices[differ[0]].unit
            raise RunFailed(
                f"ranks disagree before step {self.t + 1}: {unit} is on the recovery path of some of them alone; start "
                "all of them from the same words, seed and checkpoint"
            )

    @torch.no_grad()
    def gap(self) -> Tensor:
        """The workers' part here of mean_i ||H_i - P R_i||^2 of each unit in the last step, (U,) float64: of one on the
        low path what its gradient lacks, with feedback ||E_i||^2; 0 on recovery. Sums over processes are the means.

        Of steps with `measuring`. No collective.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=next(iter(self._matrices.values())).weight.device)
        return torch.stack([self._squares.get(name, nothing) for name in self._matrices]) / self.workers.size

    @torch.no_grad()
    def held_back(self) -> Tensor:
        """mean_i ||E_i||^2 of each unit, (U,) float64, the same in every process: one collective, for who asks."""
        one = next(iter(self._matrices.values())).weight
        rows = self.workers.here.stop - self.workers.here.start
        nothing = torch.zeros(rows, dtype=torch.float64, device=one.device)
        squares = [
            self._held[name].double().square().sum((1, 2)) if name in self._held else nothing for name in self._matrices
        ]
        return self.workers.mean(torch.stack(squares, 1))

    def state_dict(self) -> dict[str, Any]:
        """t, bases, and what the workers here hold back: of a rank its own, so each saves one. Copies nothing."""
        return {
            "t": self.t,
            "sent_total": self.sent_total,
            "workers": self.workers.size,
            "matrices": {name: [one.rows, one.columns] for name, one in self._matrices.items()},
            "bases": dict(self._bases),
            "held": dict(self._held),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. ValueError, and nothing changes, for what is no state or one of other matrices.

        **Choice 71**: of another number of workers bases are kept and what was held back is lost, with a warning.
        """
        keys = self.state_dict()
        if not isinstance(state, Mapping) or (lacking := [key for key in keys if key not in state]):
            raise ValueError(
                f"state: has no {lacking[0]}" if isinstance(state, Mapping) else "state: must be a mapping"
            )
        if state["matrices"] != keys["matrices"]:
            raise ValueError("the state of GreedyLore belongs to other matrices than this model has")
        whole(0, t=state["t"], sent_total=state["sent_total"])
        for name, one in [*state["bases"].items(), *state["held"].items()]:
            matrix = self._matrices.get(name)
            sides = None if matrix is None else {2: (matrix.rows, matrix.rows), 3: (matrix.rows, matrix.columns)}
            if sides is None or tuple(one.shape[-2:]) != sides.get(one.ndim):
                raise ValueError(f"state: what it holds of {name}, {tuple(one.shape)}, does not fit this model")
        held = {name: self._mine(one, state["workers"]) for name, one in state["held"].items()}
        if any(one is None for one in held.values()):
            warnings.warn(
                f"the state of GreedyLore is of {state['workers']} workers, here are {self.workers.size}: its bases "
                "are kept, what the workers held back is lost",
                stacklevel=2,
            )
        self.t, self.sent_total = state["t"], state["sent_total"]
        self._held = {name: self._placed(name, one) for name, one in held.items() if one is not None}
        self._bases = {name: self._placed(name, one) for name, one in state["bases"].items()}
        self._changed = True

    def _mine(self, held: Tensor, workers: int) -> Tensor | None:
        """Of a saved E what the workers here have; None where it is of others."""
        here = self.workers.here
        if workers != self.workers.size:
            return None
        return held if len(held) == here.stop - here.start else held[here] if len(held) == workers else None

    def _placed(self, name: str, saved: Tensor) -> Tensor:
        return saved.to(self._matrices[name].weight.device, copy=True)
