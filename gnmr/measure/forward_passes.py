"""Run forward passes of a converted model, whole or block by block, and measure the KL of every operator alone."""

from __future__ import annotations

import ctypes
import hashlib
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.conversion import ConvertedModel
from gnmr.errors import warn
from gnmr.formats import Recipe
from gnmr.measure.blocks import BlockByBlock, NotFollowed, Variant, pinned
from gnmr.measure.coverage import Counting, Coverage
from gnmr.measure.model_output import Output, output_of
from gnmr.measure.saved_state import MeasuredRows, add_tensors, paths_digest
from gnmr.names import Pins
from gnmr.options import require

Progress = Callable[[int, int | None], None]
"""Called with the numbers of finished and of all forward passes (None: unknown)."""


@dataclass(frozen=True)
class BatchCosts:
    """The measurements of one batch of S sequences, for U operators and R rescue recipes."""

    terms: int
    """Tokens that count in the batch, over which its numbers are means."""
    high: float
    """Loss on the recovery path, NaN if there is none."""
    low: float
    """Loss with everything low."""
    kl: np.ndarray | None
    """(KL, tokens that count) of each sequence with everything low, (S, 2); None without logits."""
    numbers: dict[str, np.ndarray]
    """Prices (`PriceMeter.by_operator`), `mse` of the input and `norm` of the weight's gradient, (U,) each.

    The price by sequence is NaN if the rows of an operator have no known sequences. If every operator is measured
    alone, `fprop` is its KL, and there is no other number.
    """
    rescued: dict[str, np.ndarray]
    """Nats of fprop on each rescue by estimate (`ESTIMATES`), (R, U)."""
    rows: list[int]
    """Rows of each operator."""
    unplanned: dict[str, tuple[float, float]]
    """Nats by token and by sequence of the parts outside the plan."""
    labels: str
    """Labels of the backward pass: `model` (drawn from its predictions), `data`, or `none` without such a pass."""
    estimate: str
    """The estimate of fprop in use, one of `ESTIMATES`, or `measured`."""
    coverage: Coverage
    """Products of a forward pass."""


class ForwardPasses:
    """The forward passes of a converted model."""

    def __init__(
        self,
        converted: ConvertedModel,
        model: nn.Module,
        run: Callable[[Any], Any],
        progress: Progress,
        *,
        rescues: Mapping[str, Recipe],
    ) -> None:
        """Prepare.

        Args:
            converted: the operators on their two paths.
            model: the model.
            run: as that of `gnmr.diagnose`.
            progress: see `Progress`.
            rescues: the recipes, by name, on which a plan may keep a GEMM.
        """
        self.converted, self.model, self.rescues, self._run = converted, model, rescues, run
        self.blocks: BlockByBlock | None = None
        """Runs the model block by block; None: every pass is one of the whole model."""
        weights = [operator.weight for operator in converted.operators]
        # Weights that are read block by block get the dtype of the others.
        here = [weight for weight in (*weights, *model.parameters()) if not weight.is_meta]
        self.in_floats = all(weight.dtype in (torch.float32, torch.float64) for weight in here or weights)
        """Whether the operators compute in float32."""
        self.called: set[str] = set()
        """Operators that were called in any batch."""
        self.without_gradient: set[str] = set()
        """Operators that ran in any batch, and whose output had a gradient in none.

        They have no price. They stay on the recovery path in all passes except those that measure them alone.
        """
        self.graphs: set[str] = set()
        """Operators whose output had a graph in any batch, whether or not a gradient reached it."""
        self.read: set[str] = set()
        """Operators whose weight had a gradient in any batch."""
        self._done = 0.0
        self._total: int | None = None
        self._progress = progress

    def follow_blocks(self, weights: Callable[[str], Tensor] | None, batch: Any) -> None:
        """Run the model block by block from now on, if it has blocks that can be followed; else warn.

        If the blocks have their weights and `run` gives no KL, passes stay those of the whole model.

        Args:
            weights: reads the tensors of the blocks by name; None: the blocks have their weights.
            batch: the first batch, which shows how the model calls its blocks.

        Raises:
            NotFollowed: the model cannot be followed, and its blocks have no weights otherwise.
            ValueError: `run` gives no logits.
        """
        try:
            blocks = BlockByBlock(self.converted, self.model, self._run, recipes=self.rescues, weights=weights)
            # A variant begins at the block of its operator, so every operator has to be in one.
            for operator in self.converted.operators:
                if operator.operator_name not in blocks.blocks.place_of:
                    raise NotFollowed(f"{operator.operator_name} is outside of {blocks.blocks.name}")
            # Without their weights, blocks cannot be compared with the whole model; only the kind of result is checked.
            if weights is not None:
                with torch.no_grad():
                    result = blocks.without_blocks(batch)
                _refuse_without_kl(output_of(result, "run of batch 1", trained=False), "run of batch 1")
            else:
                (_, _, result), *_ = blocks.outputs([batch], {})
                output = output_of(result, "run of batch 1", trained=False)
                if not _has_kl(output):
                    return
                # Calling the blocks one by one has to give the same output exactly; this refuses NaN too.
                if not self.forward(batch, 0).apart(output) == 0:
                    raise NotFollowed("the model computes something else if its blocks are called one by one")
        except NotFollowed as error:
            why = f"{type(self.model).__name__} cannot be run block by block: {error}"
            if weights is not None:
                raise NotFollowed(f"{why}; its weights have to be in memory") from error
            warn(f"{why}; every operator is measured by passes of the whole model")
        else:
            blocks.advance = lambda calls: self.advance(calls / len(blocks.blocks.modules))
            self.blocks = blocks

    # ---- progress ----

    def expect(self, passes: int | None) -> None:
        """Set how many forward passes are still to come.

        Args:
            passes: their number, without those that are done; None: unknown.
        """
        self._total = None if passes is None else int(self._done) + passes

    def expect_more(self, passes: int) -> None:
        """Add to the number of forward passes that are still to come.

        Args:
            passes: their number, which changes nothing while the whole number is unknown.
        """
        if self._total is not None:
            self._total += passes

    def passes_of(self, batches: int, variants: Mapping[str, Variant]) -> int:
        """Return the number of forward passes that `outputs` takes; a block is a part of one.

        Args:
            batches: the number of batches.
            variants: as in `outputs`. If the model runs block by block, a variant begins at the block of its operator.
        """
        if self.blocks is None:
            return batches * (1 + len(variants))
        return math.ceil(self.blocks.calls(batches, variants) / len(self.blocks.blocks.modules))

    def advance(self, passes: float) -> None:
        """Count finished passes, and report them to `progress`.

        Args:
            passes: their number; a block is a part of one.
        """
        self._done += passes
        self._progress(int(self._done), self._total)

    # ---- passes ----

    @property
    def all_low(self) -> list[str]:
        """Return the names of all operators but those without a gradient."""
        names = [operator.operator_name for operator in self.converted.operators]
        return [name for name in names if name not in self.without_gradient]

    @torch.no_grad()
    def forward(
        self,
        batch: Any,
        place: int,
        *,
        low: Collection[str] = (),
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Output:
        """Run a forward pass without a graph.

        Args:
            batch: what `run` takes.
            place: number of the batch from 0, which seeds PyTorch's random numbers.
            low: names of the operators in low precision; all others are on the recovery path.
            around: returns a context for the pass, or for each part of it.
        """
        if self.blocks is not None:
            return self._output_of(self.blocks.forward(batch, place, low, around), place, trained=False)
        for operator in self.converted.operators:
            operator.switch(operator.operator_name not in low)
        torch.manual_seed(place)
        with around():
            output = self._output(batch, place, trained=False)
        self.converted.end_step()
        self.advance(1)
        return output

    def _output(self, batch: Any, place: int, trained: bool = True) -> Output:
        """Run the model on batch number `place`."""
        return self._output_of(self._run(batch), place, trained)

    def _output_of(self, result: Any, place: int, trained: bool = True) -> Output:
        """Return what `run` gave for batch number `place`, as every pass reads it."""
        return output_of(result, f"run of batch {place + 1}", trained)

    def outputs(
        self,
        batches: Sequence[Any],
        variants: Mapping[str, Variant],
        before: int = 0,
        state: Path | None = None,
        around_exact: Callable[[], AbstractContextManager[None]] = nullcontext,
        done: Collection[tuple[int, str]] = (),
    ) -> Iterator[tuple[int, str | None, Output]]:
        """Yield (batch number, variant, output) batch by batch, on the recovery path (None) and then each variant.

        Args:
            batches: the batches.
            variants: by name, the operators that are low, and their pins.
            before: number of batches that were run before these.
            state: a file for the state of a long measurement block by block, see `BlockByBlock.outputs`.
            around_exact: returns a context for the passes with every operator on the recovery path.
            done: numbers of batches and variants that need no pass of the whole model. The caller may add to it when a
                batch's recovery path is yielded.
        """
        if self.blocks is not None:
            assert not done, "blocks go on from hidden states"
            for number, name, result in self.blocks.outputs(
                batches, variants, before, state=state, around_exact=around_exact
            ):
                yield number, name, self._output_of(result, before + number, trained=False)
            return
        for number, batch in enumerate(batches):
            with around_exact():
                reference = self.reference(batch, before + number)
            yield number, None, reference
            for name, variant in variants.items():
                if (number, name) in done:
                    self.advance(1)
                    continue
                with self.pinned(variant.pins):
                    yield number, name, self.forward(batch, before + number, low=variant.low)

    def reference(self, batch: Any, place: int) -> Output:
        """Run a forward pass with every operator on the recovery path.

        Args:
            batch: what `run` takes.
            place: number of the batch, see `forward`.
        """
        return self.forward(batch, place)

    def pinned(self, pins: Pins) -> AbstractContextManager[None]:
        """Return a context in which some GEMMs of the low path are on other recipes.

        Args:
            pins: the recipe of each of these GEMMs: a rescue, or the recovery recipe.
        """
        return pinned(self.converted.operators, pins, self.rescues)

    # ---- every operator alone ----

    def measure_alone(
        self, batches: Sequence[Any], state: Path | None = None
    ) -> tuple[list[BatchCosts], dict[str, list[np.ndarray]]]:
        """Measure the KL of everything low, and of every operator alone on the low recipe and on each rescue.

        Args:
            batches: the batches.
            state: a file for the state of the measurement, which goes on from there. Beside it, passes of the whole
                model have a .jsonl file of what they measured.

        Returns:
            The costs of each batch, and {operator: KLs (S, 2) by batch} on the low recipe.

        Raises:
            ValueError: `run` gives no logits, or a loss whose positions nobody knows.
        """
        names = [operator.operator_name for operator in self.converted.operators]
        assert isinstance(self.converted.recovery, Recipe)
        exact = self.converted.recovery.fprop
        rescues = [name for name, recipe in self.rescues.items() if recipe.fprop != exact]
        # A variant's name is "all", or a rescue (none: the low recipe), a space and the operator.
        variants = {"all": Variant(names)} | {f" {name}": Variant([name]) for name in names}
        variants |= {
            f"{rescue} {name}": Variant([name], {name: {"fprop": rescue}}) for rescue in rescues for name in names
        }
        counting = Counting(self.model, self.converted.operators)
        self.expect(self.passes_of(len(batches), variants) + len(batches))
        file = None if state is None or self.blocks is not None else state.with_suffix(".jsonl")
        with closing(MeasuredRows(file)) as results:
            high, keys = self._measure_variants(batches, variants, state, results)
        kls = {variant: [results.measured[key, variant][0] for key in keys] for variant in variants}
        # In passes of their own, because a measurement that goes on does not see the blocks before.
        for _ in self.outputs(batches, {}, around_exact=counting.all):
            pass
        products = counting.coverage.called()
        # Multiplications of all batches over inputs times outputs are the rows.
        rows = np.array(
            [products.get(o.operator_name, 0) // (o.in_features * o.out_features) for o in self.converted.operators]
        )
        costs = []
        for number, output in enumerate(high):
            # (KL, tokens) of the sequences, added up, give the nats per token of the batch.
            means = {variant: kls[variant][number].sum(axis=0) for variant in variants}
            nats = {variant: float(kl / tokens) for variant, (kl, tokens) in means.items()}
            rescued = np.array([[nats.get(f"{rescue} {name}", 0.0) for name in names] for rescue in self.rescues])
            costs.append(
                BatchCosts(
                    terms=output.terms,
                    high=output.loss_value,
                    low=results.measured[keys[number], "all"][1],
                    kl=kls["all"][number],
                    numbers={"fprop": np.array([nats[f" {name}"] for name in names])},
                    rescued={"measured": rescued.reshape(len(self.rescues), len(names))},
                    rows=((rows + number) // len(batches)).tolist(),  # adds up to `rows`
                    unplanned={},
                    labels="none",
                    estimate="measured",
                    coverage=counting.coverage if number == 0 else Coverage(),
                )
            )
        return costs, {name: kls[f" {name}"] for name in names}

    def _measure_variants(
        self, batches: Sequence[Any], variants: Mapping[str, Variant], state: Path | None, results: MeasuredRows
    ) -> tuple[list[Output], list[str]]:
        """Measure the KL and the loss of every variant.

        Returns the exact outputs without their logits, and the keys of the batches in `results`.
        """
        high: list[Output] = []
        keys: list[str] = []
        done: set[tuple[int, str]] = set()
        digest, to_measure = hashlib.sha256(), len(variants)
        if results.file is not None:
            digest.update(paths_digest(self.converted, self.rescues, variants).encode())
            add_tensors(digest, (*self.model.parameters(), *self.model.buffers()))
        for number, variant, output in self.outputs(batches, variants, state=state, done=done):
            if variant is None:
                where = f"run of batch {number + 1}"
                _refuse_without_kl(output, where)
                output.refuse_not_finite(where, self.model)
                high.append(output)
                # An earlier measurement counts if its batch has the same exact output, to the last bit.
                keys.append(f"{number}" if results.file is None else _output_digest(output, digest))
                measured_before = {(number, name) for name in variants if (keys[number], name) in results.measured}
                done |= measured_before
                to_measure = len(variants) - len(measured_before)
            else:
                kl = high[number].kl_to(output)
                assert kl is not None
                results.write_row(keys[number], variant, kl, output.loss_value)
                to_measure -= 1
                if len(results.measured) % 32 == 0:
                    _release_memory()
            if to_measure == 0:  # one pair of logits is held at a time
                high[number] = replace(high[number], logits=None, targets=None)
        return high, keys


def _output_digest(output: Output, before: Any) -> str:
    """Return a digest of an exact output and the positions that count in it, after what a digest has `before`."""
    digest = before.copy()
    digest.update(f"{output.loss_value!r} {output.sequence_dim} {output.targets is None}".encode())
    add_tensors(digest, (tensor for tensor in (output.logits, output.targets) if tensor is not None))
    return digest.hexdigest()[:16]


def _release_memory() -> None:
    """Give free memory back to the system, if the C library is glibc.

    It has tensors below 32 MB on its heap, such as the temporary ones of a KL. A small tensor that is kept between them
    leaves a hole that the next one does not fit into (glibc bug 14581). With a large vocabulary each of thousands of
    passes took 5 to 20 MB more.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _has_kl(output: Output) -> bool:
    """Return whether the output has logits, and it is known which positions count."""
    return output.logits is not None and (output.loss is None) == (output.targets is None)


def _refuse_without_kl(output: Output, where: str) -> None:
    """Raise ValueError if the output has no KL, or only one over positions that a backward pass would have to find."""
    right = "must give logits, or these and targets, if every operator is measured alone"
    require(_has_kl(output), where, "a loss", right)
