"""Run the forward and backward pass of an audit without leaving a trace in the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.auditing.seen_operands import Measured, watching
from gnmr.conversion import PathLinear
from gnmr.conversion.adapters import Found
from gnmr.conversion.reads import is_sharded
from gnmr.conversion.shared import SharedState
from gnmr.conversion.unit_names import operator_names
from gnmr.errors import require
from gnmr.measure.coverage import Coverage, Product, count
from gnmr.measure.guards import (
    as_it_was,
    refuse_constant,
    refuse_not_finite,
    refuse_reentrant,
    refuse_without_gradients,
    scalar,
)
from gnmr.measure.in_force import Operator
from gnmr.measure.passes import Progress


def met_not_finite(found: Mapping[tuple[str, str, str], Measured]) -> bool:
    """Return True if any operand or output was not finite."""
    return any(cause.kind == "not finite" for one in found.values() for cause in one.causes)


def measured_pass(
    model: nn.Module,
    operators: Sequence[Operator],
    loss_of_batch: Callable[[Any], Tensor] | None,
    batch: Any,
    progress: Progress | None,
) -> tuple[dict[tuple[str, str, str], Measured], set[str], set[str], Coverage]:
    """Measure one forward and backward pass, and count the model's products in another forward pass.

    Returns:
        The measurements; the names of the operators that ran; the names of those whose weight has a gradient or was
        read without a call; and the products that the model ran. All are empty without a loss. Unconverted operators
        within modules (`Found`) are known from the counted products alone.
    """
    if loss_of_batch is None:
        return {}, set(), set(), Coverage()
    refuse_without_gradients(model)
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    right = "has sharded parameters (DTensor); audit it in one process, before it is sharded"
    require(not sharded, "model", type(model).__name__, right)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    read: set[int] = set()
    passes = 2 * len(operators)

    def report(done: int) -> None:
        if progress is not None:
            progress(min(done, passes), passes)

    with as_it_was(model), _quiet(operators), watching(operators, report) as watch:
        torch.manual_seed(0)
        loss = scalar(loss_of_batch(batch), "loss_of_batch", bool(trained))
        right = "its loss does not run the linears of this model"
        require(watch.ran or any(isinstance(o.module, Found) for o in operators), "loss_of_batch", "...", right)
        if not met_not_finite(watch.found):
            refuse_not_finite(float(loss.detach()), "loss_of_batch", model)
        if trained:
            refuse_reentrant(loss)
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            refuse_constant(loss, trained, gradients, "loss_of_batch", "what is trained")
            read = {id(one) for one, gradient in zip(trained, gradients, strict=True) if gradient is not None}
            del gradients
        del loss
        torch.manual_seed(0)
        own = [operator.module for operator in operators if isinstance(operator.module, PathLinear)]
        counted = count(model, lambda: loss_of_batch(batch), [one for one in own if one.converted])
    coverage = _by_operator(counted, operators)
    ran = watch.ran | {o.name for o in operators if isinstance(o.module, Found) and o.name in coverage.called()}
    require(ran, "loss_of_batch", "...", right)
    read -= {id(o.module.weight) for o in operators if o.name in ran}  # weights that another linear shares
    names = {o.name for o in operators if o.name in ran or id(o.module.weight) in read}
    return watch.found, ran, names | {one.name for one in coverage.products if not one.called}, coverage


def _by_operator(coverage: Coverage, operators: Sequence[Operator]) -> Coverage:
    """Return the coverage with products of unconverted inner operators counted as called linears.

    Operators that lie in one tensor share its products evenly.
    """
    within: dict[str, list[str]] = {}
    for operator in operators:
        if isinstance(operator.module, Found):
            (name,) = operator_names([replace(operator.module, place=None).name])
            within.setdefault(name, []).append(operator.name)
    products = Counter[Product]()
    for one, number in coverage.products.items():
        if own := within.get(one.name):
            products.update({Product(name, "Linear"): (number + i) // len(own) for i, name in enumerate(own)})
        else:
            products[one] += number
    return replace(coverage, products=dict(products))


@contextmanager
def _quiet(operators: Sequence[Operator]) -> Iterator[None]:
    """Keep passes of converted operators from changing delayed scales, probes and generators."""
    own = [operator.module for operator in operators if isinstance(operator.module, PathLinear)]
    shared: dict[int, SharedState] = {id(module.shared): module.shared for module in own}
    kept = [(module, module.read, module._node) for module in own]
    with ExitStack() as stack:
        for state in shared.values():
            stack.enter_context(_untouched(state))
        try:
            yield
        finally:
            for module, read, node in kept:
                module.read, module._node = read, node


@contextmanager
def _untouched(state: SharedState) -> Iterator[None]:
    effects, probe, prices = state.no_side_effects, state.probe, state.prices
    drawn = None if state.rounding is None else state.rounding.mark()
    replaced = None if state.amax is None else state.amax.replaced
    state.no_side_effects, state.probe, state.prices = True, None, None
    state.forget()
    try:
        yield
    finally:
        state.no_side_effects, state.probe, state.prices = effects, probe, prices
        state.forget()
        if drawn is not None and state.rounding is not None:
            state.rounding.back_to(drawn)
        if replaced is not None and state.amax is not None:
            state.amax.replaced = replaced
