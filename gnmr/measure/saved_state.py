"""What a long measurement keeps on disk, so that one that was interrupted goes on.

    model run block by block    the hidden states after a block, in a file of safetensors
    model run whole             the KLs of variants, one row after the other, in a file of JSON lines

A state is used only for the recipes, variants and weights that it is of, and if the exact model gives the same numbers
again, to the last bit. A long measurement is worth more than its state: it goes on without one if the disk is full.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gnmr import __version__
from gnmr.conversion import ConvertedModel
from gnmr.errors import warn
from gnmr.formats import Recipe
from gnmr.measure.absent_weights import bytes_of
from gnmr.records.append import JsonLines
from gnmr.records.disk import truncate
from gnmr.records.reader import iter_sound

if TYPE_CHECKING:
    from gnmr.measure.blocks import Variant


class SavedHiddenStates(NamedTuple):
    """Hidden states after some blocks, and what they are of."""

    paths: str
    """See `paths_digest`."""
    blocks: int
    """The number of these blocks."""
    weights: str
    """A digest of the blocks' parameters and buffers."""
    tensors: dict[str, Tensor]
    """By batch of the exact model, and by batch and number of the variant of those that were born."""


def paths_digest(converted: ConvertedModel, recipes: Mapping[str, Recipe], variants: Mapping[str, Variant]) -> str:
    """Return a digest of the versions and the paths of a measurement, whose state is for these alone.

    Args:
        converted: the operators, with their low and recovery recipes.
        recipes: recipes that pins name.
        variants: by name, the operators that are low, and their pins.
    """
    operators = [(operator.operator_name, operator.low, operator.recovery) for operator in converted.operators]
    low_and_pins = [(name, sorted(variant.low), variant.pins) for name, variant in variants.items()]
    versions = __version__, torch.__version__
    return hashlib.sha256(repr((versions, operators, dict(recipes), low_and_pins)).encode()).hexdigest()


def add_tensors(digest: Any, tensors: Iterable[Tensor]) -> None:
    """Add the numbers of plain tensors in memory to a digest of hashlib; of others dtype and shape alone."""
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if plain and not tensor.is_meta and not tensor.is_quantized:
            digest.update(bytes_of(tensor).cpu().numpy().data)


def restored(
    saved: SavedHiddenStates, exact: list[Tensor], weights: str, born: list[tuple[int, str]]
) -> list[dict[str, Tensor]] | None:
    """Return the copies of a state by batch, laid out as the exact hidden states are; None if it is of other numbers.

    Args:
        saved: the state.
        exact: what the exact model gives after its blocks, by batch.
        weights: the digest of their weights.
        born: number and name of each variant that is low in one of these blocks.
    """
    batches = range(len(exact))
    keys = {f"{at}" for at in batches} | {f"{at} {number}" for at in batches for number, _ in born}
    if saved.weights != weights or saved.tensors.keys() != keys:
        return None
    if not all(torch.equal(bytes_of(saved.tensors[f"{at}"]), bytes_of(exact[at]).cpu()) for at in batches):
        return None
    # Kernels may add up in another order at another alignment or stride.
    return [
        {name: torch.empty_like(exact[at]).copy_(saved.tensors[f"{at} {number}"]) for number, name in born}
        for at in batches
    ]


def save_state(file: Path, state: SavedHiddenStates) -> bool:
    """Write hidden states, beside the file and renamed; warn if there is no room.

    Returns whether they were written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    beside = file.with_name(f".{file.name}.writing")
    try:
        # A block that returns its input shares a tensor with the one before, which the format does not allow.
        tensors = {key: tensor.contiguous() for key, tensor in state.tensors.items()}
        places = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        tensors = {
            key: tensor.clone() if places[tensor.untyped_storage().data_ptr()] > 1 else tensor
            for key, tensor in tensors.items()
        }
        save_file(tensors, beside, {"paths": state.paths, "blocks": f"{state.blocks}", "weights": state.weights})
        with beside.open("rb") as written:  # not `disk.replacing`, because safetensors replaces the file it is given
            os.fsync(written.fileno())
        beside.replace(file)
    # The last three are of tensors that the format does not have, such as complex numbers of 128 bits.
    except (OSError, SafetensorError, KeyError, RuntimeError, ValueError) as error:
        with suppress(OSError):
            beside.unlink()
        warn_of_lost_state(file, error)
        return False
    return True


def warn_of_lost_state(file: Path, error: Exception) -> None:
    """Warn that a measurement goes on without this file for its state."""
    warn(f"{file}: cannot be written ({error}); what is measured from here on is lost if interrupted")


def load_state(file: Path, paths: str) -> SavedHiddenStates | None:
    """Return the state in a file, on the CPU; None if there is none, it cannot be read, or is of other paths."""
    from safetensors import SafetensorError, safe_open

    try:
        if not file.is_file():
            return None
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("paths") != paths:
                return None
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            return SavedHiddenStates(paths, int(metadata["blocks"]), metadata["weights"], tensors)
    except (OSError, SafetensorError, KeyError, ValueError):  # cut off or damaged
        return None


class MeasuredRows:
    """What passes of the whole model measured, in a file that a later measurement goes on from."""

    def __init__(self, file: Path | None) -> None:
        """Read the rows that are there, up to one that was cut off or is damaged, and remove what follows them."""
        self.measured: dict[tuple[str, str], tuple[np.ndarray, float]] = {}
        """By (key of the batch, variant): (KL, tokens that count) of each sequence, (S, 2), and the loss."""
        self.file: JsonLines | None = None
        self._number_of_rows = 0
        if file is None:
            return
        end = 0
        for row, after in iter_sound(file):
            try:
                kl, loss = np.array(row["kl"], dtype=float).reshape(-1, 2), float(row["loss"])
                self.measured[row["batch"], row["variant"]] = kl, loss
            except (KeyError, TypeError, ValueError):
                break
            end = after
            self._number_of_rows = row["step"] + 1
        try:
            if file.exists():
                truncate(file, end)
            self.file = JsonLines(file, ("step", "batch", "variant", "kl", "loss"))
        except OSError as error:
            warn_of_lost_state(file, error)

    def write_row(self, batch: str, variant: str, kl: np.ndarray, loss: float) -> None:
        """Add a row to `measured`, and write it to the file at once."""
        row = {"step": self._number_of_rows, "batch": batch, "variant": variant, "kl": kl.tolist(), "loss": loss}
        self.measured[batch, variant] = kl, loss
        self._number_of_rows += 1
        if self.file is None:
            return
        try:
            self.file.write([row])
        except OSError as error:
            warn_of_lost_state(self.file.path, error)
            self.close()

    def close(self) -> None:
        """Close the file, if there is one."""
        if self.file is not None:
            with suppress(OSError):  # a row that did not fit is written again
                self.file.close()
            self.file = None
