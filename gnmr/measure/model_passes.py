"""Run the passes of a diagnosis over a converted model, and measure one batch at a time.

`ModelPasses.measure` is the one place that runs a batch and gives its numbers per GEMM: a backward pass on the recovery
path for the prices, and a forward pass with everything low for the KL. Everything else runs forward passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gnmr.conversion import ConvertedModel, PathLinear
from gnmr.conversion.passes import in_backward
from gnmr.conversion.unit_names import of_any_expert
from gnmr.formats import Recipe
from gnmr.formats.recipes import Gemm
from gnmr.measure.blocks import Variant
from gnmr.measure.coverage import Counting
from gnmr.measure.forward_passes import BatchCosts, ForwardPasses, Progress
from gnmr.measure.guards import (
    leaves_of,
    refuse_constant,
    refuse_hidden,
    refuse_reentrant,
    refuse_transformed,
    scalar,
)
from gnmr.measure.model_output import Output, output_of
from gnmr.measure.price import PRICES, Sequences, measure_prices
from gnmr.measure.unplanned import ALL_CACHES, UnplannedParts
from gnmr.names import Pins
from gnmr.options import require

PASSES_PER_BATCH = 8
"""Forward passes that take as long as a priced batch, most of whose time is its backward pass and casts."""
_NORMED_BATCHES = 2
"""Number of batches on which gradient norms are measured, on the data's labels."""
SAME_NATS = 1e-8
"""Nats up to which two passes count as the same; sums in another order make less."""
ESTIMATES = {"token": "fprop", "sequence": "fprop_sequence"}
"""Name of each estimate of fprop among the numbers of a batch."""
_PRICES = (
    "fprop",
    "fprop_sequence",
    "fprop_elements",
    "fprop_input",
    "fprop_weight",
    "dgrad",
    "wgrad",
    "dgrad_bias",
    "wgrad_bias",
)


class OperatorCalls:
    """The calls of operators in one forward pass of a model whose parameters are frozen.

    Prices need the gradient of each operator's output. So the graph begins at the embeddings, and at the input of an
    operator that reads something else without a gradient; no weight has one.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Operators that were called."""
        self.ran: set[str] = set()
        """Operators that were called with at least one row."""
        self.graphs: set[str] = set()
        """Operators whose output had a graph."""

    def add(self, operator: PathLinear, input: Tensor, output: Tensor) -> None:
        """Record a call."""
        if in_backward():
            return
        self.names.add(operator.operator_name)
        if input.numel():
            self.ran.add(operator.operator_name)
        if output.requires_grad:
            self.graphs.add(operator.operator_name)

    @contextmanager
    def recorded(self, model: nn.Module, operators: Iterable[PathLinear]) -> Iterator[None]:
        """Record the calls of `operators` inside, and begin graphs at their inputs and at embeddings."""
        operators = [*operators]
        watched = dict.fromkeys(operator.shared for operator in operators)
        embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
        with ExitStack() as stack:
            # Each conversion has one shared state for all of its operators.
            for shared in watched:
                shared.watch = self.add
                stack.callback(setattr, shared, "watch", None)
            for operator in operators:
                stack.callback(operator.register_forward_pre_hook(_begin_graph_before).remove)
            for embedding in embeddings:
                stack.callback(embedding.register_forward_hook(_begin_graph_after).remove)
            yield


def _begin_graph_before(operator: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let the graph begin at the input of an operator."""
    assert isinstance(operator, PathLinear)
    refuse_transformed(operator.operator_name)
    if not inputs or not torch.is_grad_enabled() or inputs[0].requires_grad or not inputs[0].is_floating_point():
        return None
    # A new leaf, so that the caller's tensor stays as it is.
    return inputs[0].detach().requires_grad_(), *inputs[1:]


def _begin_graph_after(_embedding: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
    """Let the graph begin at what an embedding gives, which the model may then change in place."""
    if not torch.is_grad_enabled() or output.requires_grad or not output.is_floating_point():
        return None
    # A leaf cannot be changed in place, but its clone can.
    return output.detach().requires_grad_().clone()


class ModelPasses(ForwardPasses):
    """The forward and backward passes of a converted model."""

    def __init__(
        self,
        converted: ConvertedModel,
        model: nn.Module,
        run: Callable[[Any], Any],
        unplanned: UnplannedParts,
        progress: Progress,
        *,
        labels: str,
        terms: Callable[[Any], int] | None,
        rescues: Mapping[str, Recipe],
        with_recipes: Collection[str],
    ) -> None:
        """Prepare the meters.

        `unplanned` holds the parts to measure outside the plan. `rescues` are the recipes, by name, on which a plan may
        keep a GEMM. `with_recipes` names the operators that have recipes of their own. The other arguments are those of
        `gnmr.diagnose`.
        """
        super().__init__(converted, model, run, progress, rescues=rescues)
        self._labels, self._terms, self._unplanned = labels, terms, unplanned
        for parameter in model.parameters():
            parameter.requires_grad_(False)  # prices are of gradients of outputs
        for operator in converted.operators:  # scores come from what forward computes, without pins
            recovery = operator.recovery if operator.operator_name in with_recipes else converted.recovery
            assert isinstance(recovery, Recipe)
            operator.recovery = replace(recovery, dgrad=Gemm(), wgrad=Gemm())
        assert isinstance(converted.recovery, Recipe)
        # A rescue with the recovery recipe's fprop has no error against it, so it is not priced.
        exact = converted.recovery.fprop
        candidates = {f"rescue {name}": recipe for name, recipe in rescues.items() if recipe.fprop != exact}
        self._meter = measure_prices(
            converted, PRICES[:3], 1, against_recovery=True, candidates=candidates, frozen=True
        )
        self._meter.sequences = self._sequences = Sequences()
        unplanned.find_sequences(self._sequences)
        self._sequence_dim = 0
        """Dimension of the logits that numbers sequences."""
        self._lost: list[int] = []
        """Numbers of operators without known sequences, with either dimension of the logits in their place."""
        self._counts_by_gradient = False
        """True if `run` computes a loss itself, so that its gradient alone says what counts."""
        self._without_softmax = False
        """True if this loss takes no softmax over the logits, so that these give no KL."""
        self._meter.enabled = False
        self._draw = torch.Generator(converted.device).manual_seed(0)
        # An expert sees only the tokens that are routed to it, so its rows do not count the terms of a loss.
        experts = {o for o in converted.operators if of_any_expert(o.operator_name) != o.operator_name}
        plain = (m for n, m in model.named_modules() if isinstance(m, nn.Linear) and of_any_expert(n) == n)
        self._shared_linears = [m for m in dict.fromkeys([*plain, *converted.operators]) if m not in experts]
        """Linears that all tokens reach: the last of them on the way to the loss has a row per term."""
        self._reached: set[str] = set()
        """Operators whose output had a gradient in any batch."""
        self._uncalled: list[Tensor] = []
        """Weights that no call read in the first pass: a gradient shows whether the loss reads them otherwise."""
        self._first: Output | None = None
        """Output of batch 1 on the recovery path, before all measurements."""
        self._noise = SAME_NATS
        """Nats by which two such outputs may differ."""
        self.rounded_in = ""
        """Dtype of the outputs that `rounding` moved, such as bfloat16."""

    # ---- forward ----

    def forward(
        self,
        batch: Any,
        place: int,
        *,
        low: Collection[str] = (),
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        low_part: str | None = None,
    ) -> Output:
        """Run a forward pass, as `ForwardPasses.forward` does, with `low_part` outside the plan in low precision too.

        Returns:
            The output; without logits if the loss takes no softmax over them, so that they give no KL.
        """
        with self._unplanned.running(low_part):
            return super().forward(batch, place, low=low, around=around)

    def reference(self, batch: Any, place: int) -> Output:
        """Run a forward pass with every operator on the recovery path, and find the positions that count.

        Args:
            batch: what `run` takes.
            place: number of the batch. The pass has a graph if only the loss's gradient says which positions count.
        """
        # If only the gradient of the loss says which positions count, this pass needs a graph too.
        if not self._counts_by_gradient:
            return self.forward(batch, place)
        self._recover()
        with self._unplanned.running(), self._recording():
            output = self._run_counted(batch, place).detached()
        self._sequences.begin()  # nothing of the graph is kept
        self.converted.end_step()
        self.advance(1)
        return output

    def _output_of(self, result: Any, place: int, trained: bool = True) -> Output:
        """Return what `run` gave, with its sequences; without logits that give no KL."""
        output = replace(super()._output_of(result, place, trained), sequence_dim=self._sequence_dim)
        return replace(output, logits=None) if self._without_softmax and output.loss is not None else output

    def _run_counted(self, batch: Any, place: int) -> Output:
        """Run a forward pass with a graph, and find the positions that count, and the number of terms of the loss."""
        results: list[tuple[nn.Module, int, GradientEdge]] = []

        # Keep the graph edge of each result instead of the tensor; `with_terms` takes the loss's gradient there.
        def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                results.append((module, output.shape[:-1].numel(), get_gradient_edge(output)))

        with ExitStack() as stack:
            for module in self._shared_linears:
                stack.callback(module.register_forward_hook(keep).remove)
            torch.manual_seed(place)
            output = self._output(batch, place)
        self._counts_by_gradient = output.loss is not None and output.targets is None
        if self._counts_by_gradient:
            with self._sequences.passing():
                output = output.with_terms(results)
        # The user's number of terms replaces what was counted.
        if output.logits is None and self._terms is not None:
            terms = self._terms(batch)
            require(terms >= 1, "terms", terms, "must be the number of terms in the loss of a batch, 1 or more")
            output = replace(output, terms=int(terms))
        return output

    def alone(self, chosen: Mapping[str, PathLinear | None], batches: Sequence[Any]) -> dict[str, list[np.ndarray]]:
        """Measure operators and parts outside the plan, each alone in low precision.

        Args:
            chosen: the operators by name, and None for a part outside the plan.
            batches: the first batches, numbered from 0, so that their random numbers are those of the other passes.

        Returns:
            {name: `Output.kl_to` of each batch, (S, 2)}; the lists are empty without logits.
        """
        kls: dict[str, list[np.ndarray]] = {name: [] for name in chosen}
        if not chosen:
            return kls
        variants = {name: Variant([name]) for name, operator in chosen.items() if operator is not None}
        parts = [name for name, operator in chosen.items() if operator is None]
        self.expect_more(self.passes_of(len(batches), variants) + len(batches) * len(parts))
        high: Output | None = None
        for number, variant, output in self.outputs(batches, variants):
            # The exact output of a batch comes first, and the parts outside the plan run right after it.
            if variant is None:
                high = output
                lows = [(part, self.forward(batches[number], number, low_part=part)) for part in parts]
            else:
                lows = [(variant, output)]
            assert high is not None
            for name, low in lows:
                if (kl := high.kl_to(low)) is not None:
                    kls[name].append(kl)
        return kls

    @property
    def kv_cast(self) -> str | None:
        """Return the cast of keys and values; None if they are not measured."""
        return None if self._unplanned.kv is None else self._unplanned.kv.cast_name

    def with_caches(self, batch: Any, place: int, pins: Pins) -> tuple[Output, Output, Output]:
        """Run three forward passes of a batch.

        Args:
            batch: the batch.
            place: its number.
            pins: GEMMs of the low path that a plan keeps.

        Returns:
            The output on the recovery path; with all keys and values cast, and all else on the recovery path; and with
            all of them cast under the plan.
        """
        high, alone = self.reference(batch, place), self.forward(batch, place, low_part=ALL_CACHES)
        with self.pinned(pins):
            return high, alone, self.forward(batch, place, low=self.all_low, low_part=ALL_CACHES)

    @torch.no_grad()
    def rounding(self, batch: Any) -> float | None:
        """Measure the model against itself with each operator's output moved by one unit in the last place.

        Args:
            batch: batch 1.

        Returns:
            The KL in nats per token; None without logits.

        Raises:
            ValueError: two passes that should be the same differ by more than rounding, or the output is not finite.
        """
        draw = torch.Generator(self.converted.device).manual_seed(0)

        def moved_by_a_unit(_operator: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            # Up or down with the same probability, so that the roundings of many elements do not add up to a shift.
            sign = torch.empty_like(output).bernoulli_(0.5, generator=draw) * 2 - 1
            self.rounded_in = str(output.dtype).removeprefix("torch.")
            return torch.nextafter(output, torch.inf * sign)

        with self._recording() as calls:
            first = self.forward(batch, 0)
        self._find_uncalled(calls)
        first.refuse_not_finite("run of batch 1", self.model)
        # A loss without known targets may be no cross-entropy: its gradient shows whether it takes a softmax.
        if first.logits is not None and first.loss is not None and first.targets is None:
            self._recover()
            with torch.enable_grad(), self._unplanned.running(), self._sequences.passing(), self._recording():
                torch.manual_seed(0)
                self._without_softmax = self._output(batch, 0).without_softmax
            self._sequences.begin()
            self.converted.end_step()
            first = replace(first, logits=None) if self._without_softmax else first
        # Two equal passes show whether the model repeats itself; a third one moves every output by a rounding.
        again = self.forward(batch, 0)
        with ExitStack() as stack:
            for operator in self.converted.operators:
                stack.callback(operator.register_forward_hook(moved_by_a_unit).remove)
            kl = again.apart(self.forward(batch, 0))
        self._noise = max(SAME_NATS, 0.0 if first.logits is None else kl / 8)  # a GPU may sum in any order
        self._first = again
        if first.apart(again) > SAME_NATS:  # the first pass may have compiled the model
            self.refuse_state(batch)
        return None if first.logits is None else kl

    def refuse_state(self, batch: Any) -> None:
        """Compare a pass of batch 1 with the one before all measurements.

        Raises:
            ValueError: they differ by more than rounding, so the model keeps state or draws its own random numbers.
        """
        assert self._first is not None
        differ = self._first.apart(self.forward(batch, 0))
        right = (
            "two passes of batch 1 on the recovery path differ by this many nats; does it keep state, such as a cache "
            "of keys and values, or draw random numbers that torch.manual_seed does not set (dropout, masks)? Have it "
            "compute the same in every pass"
        )
        require(not differ > self._noise, "run", f"{differ:.2g}", right)

    # ---- backward ----

    def measure(self, batch: Any, place: int) -> BatchCosts:
        """Measure a batch by a backward pass and a forward pass with everything low.

        Args:
            batch: what `run` takes.
            place: number of the batch from 0, which seeds PyTorch's random numbers and the stochastic casts of prices.
        """
        meter, mark = self._meter, self.converted.mark()
        drawn_before = self._draw.get_state()
        # The backward pass on the recovery path, with the meter on.
        self._recover()
        meter.begin_step(place)
        meter.enabled = True
        try:
            with self._unplanned.priced(place), self._recording() as calls:
                self._sequences.begin()
                price = self._price if self.blocks is None else self._price_by_blocks
                high, has_sequences = price(batch, place, calls)
        finally:
            meter.enabled = False
            self._sequences.begin()
        # The other dimension of the logits may number sequences: forget this pass, and repeat it with the same draw.
        if has_sequences and self._try_other_dim(high):
            meter.reset()
            self._unplanned.take(1)
            self._draw.set_state(drawn_before)
            self.converted.end_step()
            self.converted.back_to(mark)
            return self.measure(batch, place)
        # What the backward pass says: which operators it reached, prices, norms.
        rows, drawn = list(meter.rows), self._labels == "model" and high.logits is not None
        self._reached |= {name for name, number in zip(meter.operators, rows, strict=True) if number}
        self.without_gradient = (self.without_gradient | calls.ran) - self._reached
        terms = round(float(meter.terms))
        unplanned = self._unplanned.take(terms)
        rescued = {name: self._rescued(price) for name, price in ESTIMATES.items()}
        numbers = self._numbers(place)
        # The gradient norms of the usual guess are of the data's labels, if there are any.
        if drawn and place < _NORMED_BATCHES:
            if high.loss is not None:
                numbers["norm"] = self._norms(batch, place, numbers["norm"])
        elif drawn:
            numbers["norm"][:] = np.nan
        self.converted.end_step()
        self.converted.back_to(mark)  # all passes of a batch use the same delayed scales
        # The forward pass with everything low.
        counting = Counting(self.model, self.converted.operators)
        low = self.forward(batch, place, low=self.all_low, around=counting.all)
        if self.blocks is not None:
            self.read |= {product.name for product in counting.coverage.products if not product.called}
        self.advance(PASSES_PER_BATCH - (1 if self.blocks is None else 4))
        return BatchCosts(
            terms=terms,
            high=high.loss_value,
            low=low.loss_value,
            kl=high.kl_to(low),
            numbers=numbers,
            rescued=rescued,
            rows=rows,
            unplanned=unplanned,
            labels="model" if drawn else "data",
            estimate="sequence" if drawn else "token",
            coverage=counting.coverage,
        )

    def _price(self, batch: Any, place: int, calls: OperatorCalls) -> tuple[Output, bool]:
        """Run the backward pass of a batch; return its output, and whether the objective has sequences."""
        where = f"run of batch {place + 1}"
        high = self._run_counted(batch, place)
        objective, by_sequence = self._objective_of(high, where)
        if by_sequence is not None:
            self._sequences.find(by_sequence)
        self._differentiate(objective, calls, where)
        return high.detached(), by_sequence is not None

    def _price_by_blocks(self, batch: Any, place: int, calls: OperatorCalls) -> tuple[Output, bool]:
        """Run `_price` block by block."""
        where, high = f"run of batch {place + 1}", list[Output]()
        value, has_sequences = torch.zeros(()), False

        # Runs while the graph holds the head alone; the blocks follow one by one.
        def objective_of(result: Any) -> tuple[Tensor, Tensor | None]:
            nonlocal value, has_sequences
            output = self._output_of(result, place)
            objective, by_sequence = self._objective_of(output, where)
            high.append(output.detached())
            value, has_sequences = objective.detach(), by_sequence is not None
            return objective, by_sequence

        assert self.blocks is not None
        self.blocks.backward(batch, place, objective_of, self._sequences)
        self._refuse_unreached(value, self._meter.reach(), calls, where)
        return high[0], has_sequences

    def _objective_of(self, output: Output, where: str) -> tuple[Tensor, Tensor | None]:
        """Return the scalar to differentiate, and its part of each sequence, if it is known."""
        output.refuse_not_finite(where, self.model)
        self._meter.loss_tokens = output.terms or None
        return output.objective(self._labels, self._draw, where)

    def _try_other_dim(self, output: Output) -> bool:
        """Try the second dimension of the logits as that of sequences, (T, S, V), if the first is not.

        Returns True if the batch has to be measured again.
        """
        assert output.logits is not None
        # Operators with rows that get a gradient from several sequences, if this dimension numbers them.
        lost = int(self._meter.by_operator()["fprop_sequence"].isnan().sum())
        if len(self._lost) == 2 or output.logits.dim() < 3 or not (lost or self._lost):
            return False
        self._lost.append(lost)
        # First attempt: some were lost with dimension 0, so try dimension 1.
        if len(self._lost) == 1:
            self._sequence_dim = 1
            return True
        # Second attempt: keep dimension 1 only if it loses fewer.
        if lost < self._lost[0]:
            return False
        self._sequence_dim = 0
        return True

    @contextmanager
    def _recording(self) -> Iterator[OperatorCalls]:
        """Record the calls of the operators inside, and begin their graphs."""
        calls = OperatorCalls()
        with calls.recorded(self.model, [*self.converted.operators, *self._unplanned.operators]):
            yield calls

    def _find_uncalled(self, calls: OperatorCalls) -> None:
        """Find the weights that a pass did not read by a call, and have them require a gradient."""
        if self.blocks is not None:
            return
        # By the identity of the weights, because operators may share one.
        called = {id(o.weight) for o in self.converted.operators if o.operator_name in calls.names}
        weights = {id(o.weight): o.weight for o in self.converted.operators if id(o.weight) not in called}
        self._uncalled = [weight.requires_grad_() for weight in weights.values() if weight.is_floating_point()]

    def _differentiate(self, objective: Tensor, calls: OperatorCalls, where: str) -> None:
        """Run the backward pass of the objective. Raises ValueError if it does not depend on the weights."""
        refuse_reentrant(objective)
        refuse_hidden(objective, calls.ran - calls.graphs)
        # Gradients of what the graph begins with, and of the weights that no call reads.
        leaves = leaves_of(objective)
        gradients = torch.autograd.grad(objective, leaves, allow_unused=True)
        read = {id(leaf): gradient for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
        del gradients
        called = {id(o.weight) for o in self.converted.operators if o.operator_name in calls.names}
        uncalled = {id(weight): weight for weight in self._uncalled if id(weight) in read and id(weight) not in called}
        # To first order, a change of a weight by its norm, or by 1, moves the loss by at most ||g|| max(||w||, 1).
        reach = [self._meter.reach()]
        for key, weight in uncalled.items():
            norm = torch.linalg.vector_norm(read[key], dtype=torch.float64)
            reach.append(norm[None] * torch.linalg.vector_norm(weight.detach(), dtype=torch.float64).clamp(min=1))
        self._refuse_unreached(objective, torch.cat(reach), calls, where)
        self.read |= {o.operator_name for o in self.converted.operators if id(o.weight) in uncalled}

    def _refuse_unreached(self, objective: Tensor, reach: Tensor, calls: OperatorCalls, where: str) -> None:
        """Raise ValueError if the objective does not depend on the weights (`refuse_constant`); record the calls."""
        right = "its loss does not depend on the linears of this model (or reentrant checkpointing hides that it does)"
        if calls.ran:
            right = "its linears run without gradient; have it run them outside of torch.no_grad() and without detach()"
        require(len(reach), "run", "...", right)
        refuse_constant(objective, reach, where, "its linears")
        self.called |= calls.names
        self.graphs |= calls.graphs

    def _rescued(self, price: str) -> np.ndarray:
        """Return one of the meter's prices of fprop on each rescue, (R, U)."""
        nats = np.zeros((len(self.rescues), len(self.converted.operators)))
        for row, name in enumerate(self.rescues):
            if (candidate := f"rescue {name}") in self._meter.candidates:  # else it is the reference of all errors
                nats[row] = self._meter.by_operator(candidate)[price].cpu().numpy()
        return nats

    def _numbers(self, place: int) -> dict[str, np.ndarray]:
        """Return the numbers of a batch from the meter, and reset it."""
        prices = self._meter.by_operator()
        tensors = {name: prices[name] for name in (*_PRICES, "mse", "norm")}
        stacked: np.ndarray = torch.stack([*tensors.values()]).cpu().numpy()  # one wait for the device
        numbers = dict(zip(tensors, stacked, strict=True))
        self._meter.reset()
        for name, values in numbers.items():
            if name != "fprop_sequence" and not np.isfinite(values).all():  # NaN if there are no sequences
                first = self.converted.operators[int(np.flatnonzero(~np.isfinite(values))[0])].operator_name
                raise ValueError(f"batch {place + 1}: what {first} reads, or its gradient, is not finite in 16 bits")
        return numbers

    def _norms(self, batch: Any, place: int, drawn: np.ndarray) -> np.ndarray:
        """Return the weights' gradient norms on the data's labels, (U,) float64; without such labels, `drawn`."""
        self.converted.end_step()
        self._recover()
        torch.manual_seed(place)
        # The data's labels give other gradients than drawn ones, so this is a backward pass of its own.
        self._meter.enabled = self._meter.gradients_only = True
        try:
            if self.blocks is not None:
                self.expect_more(3)  # one forward pass, and a backward pass that takes two
                with self._recording():
                    self.blocks.backward(batch, place, lambda result: (scalar(output_of(result, "").loss, ""), None))
            else:
                with self._recording():
                    loss = self._output(batch, place).loss
                if loss is None or not loss.requires_grad:
                    return drawn
                torch.autograd.grad(loss, leaves_of(loss), allow_unused=True)
            norms: np.ndarray = self._meter.by_operator()["norm"].cpu().numpy()
            return norms
        finally:
            self._meter.enabled = self._meter.gradients_only = False
            self._meter.reset()

    def _recover(self) -> None:
        for operator in self.converted.operators:
            operator.switch(True)
