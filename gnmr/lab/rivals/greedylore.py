"""GreedyLore (arXiv 2507.08784): low-rank gradients with error feedback as a low path, their dense mean as recovery.

Data parallel workers send the mean of their gradients through a network. A weight's gradient has m rows and n columns
with m <= n (a tall one is read transposed), and worker i sends r rows instead of m. In step t, from 0:

| step | what worker i does |
|---|---|
| t < S | sends G_i: dense start |
| (t - S) mod tau = 0 | sends G_i; U (m x m) becomes the left singular vectors of the mean, E_i = 0: refresh |
| else, low path | H_i = G_i + E_i; P (m x r): columns of U; sends R_i = P' H_i; E_i = H_i - P R_i; gets P mean(R) |
| else, recovery | sends H_i; E_i = 0 |

The columns are the r with the largest (mean_i U' H_i xi)^2. All workers draw the same normal vector xi, so a worker
sends m more numbers to choose the columns. Recovery sends H_i and not G_i, so no held-back part is lost. (The refresh
drops E_i, as in the paper.)

Every matrix is a unit of a `Controller`. Workers decide from sums that are the same everywhere. Each computes U itself,
so all of them need processors of one kind. The workers are the ranks of a run, or virtual workers that one process
plays.

Shapes: K is the number of workers that this process has (1 for a rank, all of the virtual ones).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gnmr.attachment.ranks import world
from gnmr.attachment.ranks.reduce import is_sharded, reaching
from gnmr.control.device import to_device
from gnmr.control.ranks import Ranks
from gnmr.control.unit import Unit
from gnmr.errors import RunFailed
from gnmr.options import whole_number
from gnmr.patterns import listed, select

DENSE, REFRESH, LOW = "dense", "refresh", "low"


@dataclass(frozen=True, kw_only=True)
class GreedyLoreSpec:
    """Rank and lengths. Raises ValueError, naming the field, if a value is invalid."""

    rank: int = 32
    """r: rows that are sent of a matrix."""
    refresh_every: int = 200
    """tau: optimizer steps between two bases."""
    dense_steps: int = 1000
    """S: optimizer steps of the dense start."""
    seed: int = 0
    """Seed of xi."""

    def __post_init__(self) -> None:
        whole_number(rank=self.rank, refresh_every=self.refresh_every)
        whole_number(0, dense_steps=self.dense_steps, seed=self.seed)

    def phase(self, step: int) -> str:
        """Return DENSE, REFRESH or LOW for a step, from 0."""
        if step < self.dense_steps:
            return DENSE
        return LOW if (step - self.dense_steps) % self.refresh_every else REFRESH


@dataclass(frozen=True)
class _Matrix:
    """A weight that is compressed: (rows, columns) as it is read, the shorter side first."""

    unit: str
    weight: nn.Parameter
    rows: int
    columns: int

    def wide(self, x: Tensor) -> Tensor:
        """Return a view (..., rows, columns) of (..., *shape of the weight), or the reverse."""
        return x if self.weight.shape[0] <= self.weight.shape[1] else x.mT

    def saved(self, rank: int) -> int:
        """Return how many numbers a LOW step saves on the low path; it sends its rows, their scores and a flag."""
        return self.rows * self.columns - rank * self.columns - self.rows - 1


def _matrices(model: nn.Module, spec: GreedyLoreSpec, targets: Sequence[str]) -> dict[str, _Matrix]:
    """Return the trained weights of the modules that `targets` select, by parameter name.

    Raises ValueError if a weight cannot be compressed, or if the rank saves nothing.
    """
    modules = dict(model.named_modules())
    chosen, unmatched = select(modules, listed("targets", targets))
    if unmatched:
        raise ValueError(f"targets: no module matches {unmatched[0]!r}; patterns of modules to compress, as '*_proj'")
    # A tied head is the embedding's parameter itself, so identity finds it under either name.
    embeddings = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    matrices: dict[str, _Matrix] = {}
    for name in chosen:
        weight = getattr(modules[name], "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            raise ValueError(f"targets: {name} has no weight of 2 dimensions: leave it out")
        if id(weight) in embeddings or name.rpartition(".")[2] == "lm_head":
            raise ValueError(f"targets: {name} is an embedding or the head, which are always sent dense: leave it out")
        if is_sharded(weight):
            raise ValueError(f"{name} is sharded (FSDP2): gradients are compressed whole, wrap the model by DDP")
        if weight.requires_grad:
            rows, columns = sorted(weight.shape)
            matrices[f"{name}.weight"] = matrix = _Matrix(name, weight, rows, columns)
            if matrix.saved(spec.rank) <= 0:
                raise ValueError(f"rank={spec.rank}: {name} is {rows} wide, and would send as much as a dense one")
    if not matrices:
        raise ValueError("targets: none of the weights is trained, so there is nothing to compress")
    return matrices


class VirtualWorkers:
    """Workers that one process plays; it holds all their gradients. `here`: the workers of this process."""

    def __init__(self, number: int) -> None:
        whole_number(2, workers=number)
        self.size = number
        self.here = slice(0, number)

    def mean(self, x_KN: Tensor) -> Tensor:
        """Return the mean over all workers, (K, N) -> (N,), without a collective."""
        return x_KN.mean(0)


class RankWorkers:
    """The ranks of the default process group, one worker each. Raises ValueError if there is only one."""

    def __init__(self) -> None:
        self.size = world.size()
        self.here = slice(world.rank(), world.rank() + 1)
        if self.size < 2:
            raise ValueError("compressed gradients need data parallelism, here is one process: start several of them")

    def mean(self, x_KN: Tensor) -> Tensor:
        """Return the mean by one all-reduce, without waiting for the device. Raises RunFailed if a rank is gone."""
        total = x_KN[0].clone()
        with reaching():
            torch.distributed.all_reduce(total)
        return total.div_(self.size)


Workers: TypeAlias = VirtualWorkers | RankWorkers


class GreedyLore:
    """The mean of gradients over data parallel workers, compressed matrix by matrix.

        compressed = GreedyLore(model, GreedyLoreSpec(rank=8), workers=VirtualWorkers(4))
        controller = Controller(compressed.units(), ControlSpec(max_o=2))
        means = compressed.reduce(gradients)       # (4, *shape) each, by parameter name; before controller.step()

    Sums are in float32, or float64 if gradients are. `t` counts steps; `sent` is how many numbers a worker sent in the
    last one, `sent_total` in all, `dense` the size of all gradients. A step with a mean that is not finite changes
    neither the bases nor the sums that are held back.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: GreedyLoreSpec | None = None,
        *,
        workers: Workers | None = None,
        targets: Sequence[str] = ("*_proj",),
    ) -> None:
        """`targets`: patterns of modules whose weights are compressed. `workers`: None for the ranks of the run."""
        self.spec = GreedyLoreSpec() if spec is None else spec
        self.workers = RankWorkers() if workers is None else workers
        self.matrices = _matrices(model, self.spec, targets)
        number = self.workers.here.stop - self.workers.here.start
        weights = {name: self._wide(name, matrix.weight.detach()) for name, matrix in self.matrices.items()}
        self._bases = {name: weight.new_zeros(len(weight), len(weight)) for name, weight in weights.items()}
        """U, (rows, rows); zeros before the first refresh."""
        self._has_bases = False
        self._held_back = {name: weight.new_zeros(number, *weight.shape) for name, weight in weights.items()}
        """E of the workers here, (K, rows, columns)."""
        # E, bases and finiteness of the step that is under way; `_end_step` takes them over.
        self._new_held_back: dict[str, Tensor] = {}
        self._new_bases: dict[str, Tensor] = {}
        self._finite: list[Tensor] = []
        self._sending = 0
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._recovered: set[str] = set()
        self._changed = False
        self.measuring = False
        """Whether steps measure the evidence."""
        self._squares: dict[str, Tensor] = {}
        """||E||^2 over the workers here, of matrices on the low path."""
        self.t = self.sent = self.sent_total = 0
        self.dense = sum(parameter.numel() for parameter in self._names if parameter.requires_grad)

    def __str__(self) -> str:
        rank, number = self.spec.rank, len(self.matrices)
        saved = sum(matrix.saved(rank) for matrix in self.matrices.values())
        return (
            f"compressed gradients: rank {rank} of {number} matrices, {self.workers.size} workers; "
            f"each sends {self.dense - saved:,} numbers a step on the low path, of {self.dense:,}"
        )

    def units(self) -> list[Unit]:
        """Return one unit per matrix, named as its module; its cost is how many more numbers recovery sends."""

        def switch(name: str, recovered: bool) -> None:
            (self._recovered.add if recovered else self._recovered.discard)(name)
            self._changed = True

        return [
            Unit(
                matrix.unit,
                (matrix.weight,),
                partial(switch, name),
                cost=(matrix.rows - self.spec.rank) * matrix.columns,
            )
            for name, matrix in self.matrices.items()
        ]

    def reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of all gradients of a step over the workers.

        Takes at most two collectives. Waits for the device in a refresh and after a change of the set.

        Args:
            gradients: Gradients (K, *shape) of the K workers here, by parameter name.

        Returns:
            Means (*shape), by parameter name.

        Raises:
            RunFailed: If workers have different units on the recovery path.
        """
        means = self._reduce(gradients)
        self._end_step()
        return means

    def register(self, ddp: Any) -> None:
        """Make this the communication hook of a `DistributedDataParallel`; `reduce` is not called then.

        The backward pass leaves the means in the gradients, bucket by bucket, with two collectives each. Raises
        ValueError if `ddp` wraps another model, or if workers are virtual.
        """
        if self.workers.here != slice(world.rank(), world.rank() + 1) or self.workers.size != world.size():
            raise ValueError("virtual workers have no DistributedDataParallel: hand their gradients to reduce()")
        if {*map(id, ddp.parameters())} != {*map(id, self._names)}:
            raise ValueError("DistributedDataParallel wraps another model than the one whose gradients are compressed")
        ddp.register_comm_hook(None, lambda _, bucket: self.hook(bucket))

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Leave the means in a bucket of DDP's; return a completed future of its buffer."""
        names = [self._names[parameter] for parameter in bucket.parameters()]
        views = dict(zip(names, bucket.gradients(), strict=True))
        for name, mean in self._reduce({name: view[None] for name, view in views.items()}).items():
            views[name].copy_(mean)
        if bucket.is_last():
            self._end_step()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _end_step(self) -> None:
        """Take over E and the bases of the step, unless a mean of it is not finite."""
        # The hook runs once per bucket; one bucket that is not finite discards the state of the whole step.
        finite = torch.stack(self._finite).all()
        for name, held_back in self._new_held_back.items():
            self._held_back[name] = torch.where(finite, held_back, self._held_back[name])
        for name, basis in self._new_bases.items():
            # A first basis is taken in any case: it is finite (`nan_to_num` in `_reduce`), and low steps need one.
            self._bases[name] = torch.where(finite, basis, self._bases[name]) if self._has_bases else basis
        self._has_bases |= bool(self._new_bases)
        self._new_held_back.clear()
        self._new_bases.clear()
        self._finite.clear()
        self.sent, self._sending = self._sending, 0
        self.sent_total += self.sent
        self._changed = False
        self.t += 1

    @torch.no_grad()
    def _reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of some gradients of the step."""
        phase = self.spec.phase(self.t)
        if phase == LOW and not self._has_bases:
            phase = REFRESH  # a state of other lengths was loaded

        # H = G + E, (K, rows, columns), and P of the matrices on the low path.
        sums = {}
        if phase == LOW:
            names = [name for name in gradients if name in self.matrices]
            sums = {name: self._wide(name, gradients[name]) + self._held_back[name] for name in names}
        bases = self._chosen_columns(sums) if sums else {}

        # One collective: R = P' H on the low path, H on recovery, G of all others.
        messages = []
        for name, gradient in gradients.items():
            message = gradient
            if name in bases:
                message = bases[name].mT @ sums[name]
            elif name in sums:
                message = self.matrices[name].wide(sums[name])
            messages.append(message.flatten(1).to(gradient.dtype))
        mean = self._mean(torch.cat(messages, 1))
        self._finite.append(mean.isfinite().all())

        means: dict[str, Tensor] = {}
        split = mean.split([message.shape[1] for message in messages])
        for (name, gradient), message_KN, mean_N in zip(gradients.items(), messages, split, strict=True):
            if name in bases:
                # E = H - P R with R as it was sent, in the gradient's dtype; the mean is P mean(R).
                basis, shape = bases[name], (self.spec.rank, self.matrices[name].columns)
                held_back = sums[name] - basis @ message_KN.to(basis.dtype).unflatten(1, shape)
                self._new_held_back[name] = held_back
                if self.measuring:
                    self._squares[name] = held_back.double().square().sum()
                means[name] = self.matrices[name].wide(basis @ mean_N.to(basis.dtype).view(shape))
            else:
                means[name] = mean_N.view(gradient.shape[1:])
                self._squares.pop(name, None)
                if name in sums or (name in self.matrices and phase == REFRESH):
                    self._new_held_back[name] = torch.zeros_like(self._held_back[name])
                if name in self.matrices and phase == REFRESH:
                    wide = self._wide(name, means[name]).nan_to_num(0, 0, 0)
                    self._new_bases[name] = torch.linalg.svd(wide, full_matrices=False).U
            means[name] = means[name].to(gradient.dtype).contiguous()  # fused optimizers read no strides of a gradient
        return means

    def _mean(self, x_KN: Tensor) -> Tensor:
        self._sending += x_KN.shape[1]
        return self.workers.mean(x_KN)

    def _wide(self, name: str, gradient: Tensor) -> Tensor:
        """Return (..., rows, columns) in the dtype of the arithmetic."""
        wide = self.matrices[name].wide(gradient)
        return wide.to(torch.promote_types(wide.dtype, torch.float32))

    def _chosen_columns(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return P (rows, rank) of each matrix on the low path. The one collective has the same size for any set."""
        names, first = list(sums), next(iter(sums.values()))
        flags = torch.tensor([name in self._recovered for name in names], dtype=first.dtype)
        messages = [to_device(flags, first.device).expand(len(first), -1)]
        for name, sums_KRC in sums.items():
            if name in self._recovered:
                messages.append(sums_KRC.new_zeros(sums_KRC.shape[:2]))
            else:
                messages.append((sums_KRC @ self._xi(name, sums_KRC)) @ self._bases[name])  # U' H xi, (K, rows)
        mean = self._mean(torch.cat(messages, 1))

        # A mean flag between 0 and 1 shows that sets differ. Reading it waits for the device, so only after a change.
        if self._changed or mean.device.type == "cpu":
            differ = [name for name, flag in zip(names, mean[: len(names)].tolist(), strict=True) if 0 < flag < 1]
            if differ:
                unit = self.matrices[differ[0]].unit
                raise RunFailed(
                    f"ranks disagree before step {self.t + 1}: {unit} is on the recovery path of some of them alone; "
                    "start all of them from the same words, seed and checkpoint"
                )
        columns = {}
        scores = mean[len(names) :].split([self.matrices[name].rows for name in names])
        for name, score in zip(names, scores, strict=True):
            if name not in self._recovered:
                # A stable sort resolves ties alike on all workers, so that all use the same P.
                largest = score.square().sort(descending=True, stable=True).indices[: self.spec.rank]
                columns[name] = self._bases[name][:, largest]
        return columns

    def _xi(self, name: str, like: Tensor) -> Tensor:
        # All workers draw the same xi without communication; crc32 is equal in all processes, unlike hash().
        seed = zlib.crc32(f"{self.spec.seed} {self.t} {name}".encode())
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.randn(self.matrices[name].columns, generator=generator, device=like.device).to(like.dtype)

    # ---- the evidence of the units, a `gnmr.control.measurements.Source` ----

    names = ("gap_low", "gap_recovery")

    def parts(self, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Return this rank's terms of the sums over ranks."""
        return {"gap": self._gap()}

    def read(self, grad_scale: float, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the step's evidence, (U,) each. On recovery the gap is 0, because a dense mean is exact."""
        gap = self._gap() if sums is None else sums["gap"]
        # The gap is a square of scaled gradients.
        return {"gap_low": gap / grad_scale**2, "gap_recovery": torch.zeros_like(gap)}

    def _gap(self) -> Tensor:
        """Return this process's part of mean_i ||H_i - P R_i||^2 of each unit in the last step, (U,) float64.

        This is what the gradient of a unit on the low path lacks, ||E_i||^2; 0 on recovery. The sum over
        processes is the mean. Needs `measuring`; takes no collective.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=next(iter(self.matrices.values())).weight.device)
        return torch.stack([self._squares.get(name, nothing) for name in self.matrices]) / self.workers.size

    def reset(self) -> None:
        """Keep everything, because the next step's gap replaces this one."""

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return t, the bases, and the E of each worker here, without copies; each rank saves its own."""
        here = self.workers.here
        state = {"t": self.t, "sent_total": self.sent_total, "workers": self.workers.size, "bases": dict(self._bases)}
        for row, worker in enumerate(range(here.start, here.stop)):
            state[f"worker_{worker}"] = {name: held_back[row] for name, held_back in self._held_back.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; of the state of all workers each rank takes its own.

        Raises ValueError, and changes nothing, if `state` belongs to other matrices or another number of workers.
        """
        if state["workers"] != self.workers.size:
            raise ValueError(f"state: is of {state['workers']} workers, here are {self.workers.size}; start as many")
        rows = [state[f"worker_{worker}"] for worker in range(self.workers.here.start, self.workers.here.stop)]
        for tensors, loaded in ((self._bases, state["bases"]), *((self._held_back, row) for row in rows)):
            for name in tensors.keys() | loaded.keys():
                shape = tuple(loaded[name].shape) if name in loaded else "nothing"
                if name not in tensors or shape != tuple(tensors[name].shape[-2:]):
                    raise ValueError(f"state: what it holds of {name}, {shape}, does not fit this model")
        # Ranks may have loaded different sets, so the next low step compares them.
        self.t, self.sent_total, self._changed = state["t"], state["sent_total"], True
        for name, basis in self._bases.items():
            self._bases[name] = state["bases"][name].to(basis.device, copy=True)
            self._held_back[name] = torch.stack([row[name].to(basis.device) for row in rows])
        self._has_bases = all(bool(basis.any()) for basis in self._bases.values())
