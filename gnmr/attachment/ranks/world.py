"""The processes that train together: torch.distributed's default group, or this process alone."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from gnmr.attachment.ranks import torchrun
from gnmr.attachment.ranks.torchrun import processes_started
from gnmr.errors import RunFailed, UserError

T = TypeVar("T")


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def size() -> int:
    """Return the current number of processes; a controller may be made before its group."""
    return torch.distributed.get_world_size() if _grouped() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return torch.distributed.get_rank() if _grouped() else 0


@dataclass(frozen=True)
class World:
    """The processes of a run; every method waits for all of them."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Return True if this process writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks.

        Args:
            value: a small value on the host that can be pickled.

        Returns:
            The values by rank.
        """
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run a block on every rank or fail on all: the first error of any rank is raised on all ranks.

        The block must not contain a collective.
        """
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        # Ranks without an error take part too, since all wait for the gathering.
        failure = None if error is None else (isinstance(error, UserError), f"{error}" or type(error).__name__)
        failures = [failure_of_rank for failure_of_rank in self.gather(failure) if failure_of_rank is not None]
        if error is not None:
            raise error
        if failures:
            is_users, message = failures[0]
            raise UserError(message) if is_users else RunFailed(message)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the result of `make`, which only rank 0 calls.

        Returns: the result, which is pickled for the other ranks.

        Raises:
            Exception: what `make` raises, on all ranks; ranks other than 0 raise RunFailed in place of errors other
                than UserError, RunFailed and OSError.
        """
        if self.size == 1:
            return make()
        result: list[Any] = [None]  # (value, error) of rank 0
        if self.first:
            try:
                result = [(make(), None)]
            except Exception as error:
                # Only these errors are sure to be pickled and to say something on another rank.
                readable = isinstance(error, (UserError, RunFailed, OSError))
                result = [(None, error if readable else RunFailed(f"{type(error).__name__}: {error}"))]
                torch.distributed.broadcast_object_list(result)
                raise
        torch.distributed.broadcast_object_list(result)
        value, raised = result[0]
        if raised is not None:
            raise raised
        return cast(T, value)

    def same(self, what: str, value: str) -> None:
        """Check that all ranks have one value.

        Args:
            what: what the value is, with which the message begins.
            value: this rank's value.

        Raises:
            UserError: on all ranks, if values differ.
        """
        values = self.gather(value)
        for rank, value in enumerate(values):
            if value != values[0]:
                raise UserError(f"{what} is {values[0]} in rank 0 and {value} in rank {rank}: start all of them alike")


ALONE = World()


@contextmanager
def joined(cuda: bool) -> Iterator[World]:
    """Join the processes that were started together into one world inside this context; `ALONE` if there is one.

    Only rank 0 shows warnings.

    Args:
        cuda: whether they train on GPUs, each on its own.

    Raises:
        UserError: the rendezvous fails.
    """
    if processes_started() == 1:
        yield ALONE
        return
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        store, rank_here, number = next(torch.distributed.rendezvous("env://"))
        # torchrun's store survives a restart, with the addresses of processes that are gone.
        store = torch.distributed.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=rank_here, world_size=number)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{processes_started()} processes do not find each other at {where} ({line}): use a free port"
        ) from error
    atexit.register(_end_at_once)
    try:
        with warnings.catch_warnings():
            if rank() > 0:
                warnings.simplefilter("ignore")
            yield World(rank(), size())
    finally:
        torch.distributed.destroy_process_group()


def _end_at_once() -> None:
    """End the process if its command is done, after what was registered later, such as that of W&B.

    PyTorch's modules keep the group, as a default argument, so gloo's threads outlive it. Where they are destroyed with
    the interpreter, the process may abort (pytorch/pytorch pull request 179291).
    """
    if torchrun.command_done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
