"""The base of a fork: a run folder with a checkpoint, which may come from an untrusted source.

RUN/config.yaml                      model, data, optimizer and batch, which the fork shares
RUN/header.json                      fingerprints of the data, and of the checkpoint that the run fine-tuned
RUN/checkpoints/step-.../            weights, optimizer moments, position in the data
gnmr/lab/bases/shipped/              the same files, and tokenizer.json
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnmr.errors import UserError
from gnmr.lab.config import Config, DataConfig, flatten, to_dict
from gnmr.lab.config.compose import PATHS, SHIPPED, agreed, place_of_base, read_base
from gnmr.lab.data.sequences import Branch
from gnmr.lab.train.checkpoint import StoredCheckpoint, find, load_training
from gnmr.records.disk import check_tree
from gnmr.records.reader import read_json
from gnmr.records.untrusted import reading, text

SHIPPED_SHA256 = "6b6959e9992e2abf94e11605137fc14c231a924024a51f62288a4ee57420b4f3"
"""The sha256 of the shipped base's meta.json, which contains the sha256 of its other files."""


@dataclass
class Base:
    """A trained run that can be forked."""

    name: str
    """The name in the fork's config."""
    config: Config
    stored: StoredCheckpoint
    fingerprint: str
    """Fingerprint of the data."""
    position: dict[str, int]
    """Epoch of the next block and its place in the epoch."""
    weights: str | None = None
    """Fingerprint of the checkpoint on the hub or on disk that the base began from, if it fine-tuned one."""
    tokenizer: Path | None = None
    """Tokenizer of the shipped base, whose corpus differs under another Python."""
    trainable_state: tuple[dict[str, Any], dict[str, Any]] | None = field(default=None, init=False)
    """State of the model without its frozen weights, and of the optimizer, once `load_into` has kept them."""

    @property
    def step(self) -> int:
        """The step after which the checkpoint was saved."""
        return self.stored.step

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule."""
        return self.config.optim.schedule_steps or self.config.training.steps

    def check(self, config: Config) -> None:
        """Raise UserError naming the first key in which model, data, optimizer or batch of the fork `config` differ.

        Files may lie elsewhere than the base's: `branch` and `build_parts` compare fingerprints of data and weights.
        The fork may split the base's batch into other micro-batches: a step still has the same blocks in the same
        order.
        """
        of_base, of_fork = agreed(flatten(to_dict(self.config))), agreed(flatten(to_dict(config)))
        # The same blocks split into other micro-batches are the same step.
        if self.config.training.tokens_per_step == config.training.tokens_per_step:
            for key in ("training.batch_size", "training.accumulation"):
                of_fork[key] = of_base[key]
        # A fork without a length of its own goes on with the base's schedule.
        if config.optim.schedule_steps is None:
            of_fork["optim.schedule_steps"] = of_base["optim.schedule_steps"]
        # Paths may differ, but a path that only one of the two has means another model or other data.
        for key in PATHS:
            if None not in (of_base[key], of_fork[key]):
                of_fork[key] = of_base[key]
        for key in of_base | of_fork:
            base_value, fork_value = (text(tree.get(key)) for tree in (of_base, of_fork))
            if base_value != fork_value:
                raise UserError(f"{key}={fork_value}: the base {self.name} has {base_value}, which a fork keeps")

    def data(self, data: DataConfig) -> DataConfig:
        """Return the config of the data to open for a fork whose config has `data`."""
        return data if self.tokenizer is None else replace(data, tokenizer=str(self.tokenizer))

    def branch(self, order: int, fingerprint: str, say: Callable[[str], None]) -> Branch:
        """Return the position at which the fork continues in the data. Raises UserError for other data than the base's.

        The shipped base is an exception. It may be forked on the library of another Python version under the same
        tokenizer, from the beginning of that data.
        """
        # With the same tokens, the fork reads on where the base stopped.
        if fingerprint == self.fingerprint:
            return Branch(self.config.training.seed, self.position["epoch"], self.position["position"], order)
        difference = f"its data is {self.fingerprint[:12]}, here it is {fingerprint[:12]}"
        if self.tokenizer is None:
            raise UserError(f"base={self.name}: {difference}: give the base's data.*, or make a base of this data")
        say(f"base={self.name}: {difference} (another Python's library): compare only forks made under this Python")
        return Branch(self.config.training.seed, 0, 0, order)

    def load_into(self, model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = False) -> None:
        """Load weights and moments. With `keep`, later calls copy them from memory.

        Raises UserError if they do not fit.
        """
        if self.trainable_state is None:
            load_training(self.stored, model, optimizer)
            if keep:
                # Frozen weights come with the model and never change, and they may be large.
                frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
                state = {name: value for name, value in model.state_dict().items() if name not in frozen}
                self.trainable_state = deepcopy((state, optimizer.state_dict()))
            return
        weights, moments = self.trainable_state
        model.load_state_dict(weights, strict=False)
        # The optimizer may take the tensors as they are, and its steps would then change the kept ones.
        optimizer.load_state_dict(deepcopy(moments))


def open_base(name: str) -> Base:
    """Open the base `name`, a folder or `shipped`. Raises UserError with one line if it cannot be forked."""
    run, checkpoints = place_of_base(name)
    config = read_base(name)
    try:
        with reading(run):
            check_tree(run, skip=("wandb",))
            stored = find(checkpoints)
            header = read_json(run / "header.json") or {}
            fingerprint = header["data"]["fingerprint"]
            position = {key: stored.host["blocks"][key] for key in ("epoch", "position")}
            # The folder may come from anyone: bool and negative numbers are no positions.
            sound = isinstance(fingerprint, str) and all(type(n) is int and 0 <= n < 2**62 for n in position.values())
            if not sound or stored.step < 1:
                raise ValueError("its numbers make no sense")
            if name == SHIPPED and stored.sha256 != SHIPPED_SHA256:
                raise ValueError(f"is not the base that this version ships ({stored.sha256[:12]})")
    except UserError as error:
        raise UserError(f"base={name}: {error}") from error
    tokenizer = run / "tokenizer.json" if name == SHIPPED else None
    return Base(name, config, stored, fingerprint, position, header.get("checkpoint"), tokenizer)
