"""Evidence of a step, by name; only what a signal needs is measured.

The evidence of one step maps names to tensors over the U units, (U,) float64 on their device; `observed` is bool.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from gnmr.control.device import all_set

EVIDENCE: dict[str, str] = {
    "norm": "2-norm of the unit's gradient after accumulation, before clipping; always there",
    "observed": "the unit had a gradient in this step, and not one of exact zeros (bool); always there",
    "micro_square": "mean over the step's micro-batches of the squared norm of that micro-batch's own gradient",
    "gap_low": "sum over tokens of ||grad_output||^2 ||x - Q(x)||^2 with the low-cost path's Q: its expected squared "
    "error of the weight gradient; of a recipe that casts grad_output the same of that operand besides",
    "gap_recovery": "the same with the recovery path's Q",
    "mse": "mean of (x - Q(x))^2 on the low-cost path; of a recipe the forward pass's cast",
    "price": "what recovery saves: price_fprop - price_fprop_recovery, nats, where a path casts what fprop reads; "
    "elsewhere the squared error that it takes off the weight gradient, as a share of all units' squared gradient",
    "price_fprop": "by how much the loss is higher because fprop is on the low-cost path, nats, by the empirical "
    "Fisher matrix; the sum of the unit's operators",
    "price_dgrad": "||d||^2 / ||g||^2 of the gradient that dgrad hands on from the low-cost path; the operators' mean",
    "price_wgrad": "the same of the weight gradient, of the measured tokens",
    "price_fprop_recovery": "price_fprop of the recovery path",
    "price_dgrad_recovery": "price_dgrad of the recovery path",
    "price_wgrad_recovery": "price_wgrad of the recovery path",
    "input_std": "standard deviation of the elements of the unit's input",
    "weight_std": "standard deviation of the elements of the unit's weights",
    "true_gap": "squared distance of the gradients of both paths, run on the same batch",
}
GAPS = ("gap_low", "gap_recovery")
"""Squares of gradients."""
PATH_EVIDENCE = (*GAPS, "mse", "input_std")
"""Measured by the paths themselves, for the low-cost path, whichever path the unit ran on."""
PRICE_EVIDENCE = (
    "price",
    *(f"price_{gemm}{path}" for path in ("", "_recovery") for gemm in ("fprop", "dgrad", "wgrad")),
)
"""Measured by price meters for both paths, whichever path the unit ran on."""


def missing(needs: Sequence[str], available: Collection[str]) -> list[str]:
    """Return the needs that are not available.

    Raises:
        ValueError: if a name is not evidence.
    """
    for name in needs:
        if name not in EVIDENCE:
            raise ValueError(f"evidence {name!r} is not known: use one of {', '.join(EVIDENCE)}")
    return [name for name in needs if name not in available]


def without_zeros(evidence: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the evidence with every unit whose gradient is exactly 0 marked as unobserved.

    A module that did not run leaves zeros or None, depending on `zero_grad(set_to_none=...)`, empty batches, masked
    labels and the reduction over processes. The difference carries no information about the unit. Evidence measured
    during its passes becomes 0 as well; `weight_std` is measured without a gradient. Does not wait for the device.
    """
    # On a CPU most steps have no zero, and copy nothing.
    norm, observed = evidence["norm"], evidence["observed"]
    if all_set(norm):
        return evidence
    zeros = observed & (norm == 0)
    # The norm is 0 already, and weight_std is not of the step's passes.
    return {
        name: values if name in ("norm", "weight_std") else values.masked_fill(zeros, 0)
        for name, values in evidence.items()
    }
