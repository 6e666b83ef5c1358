"""Gradient transforms: stabilizers that change the gradient before the optimizer, as baselines for routing.

`optim.transform.name` selects a transform, and `optim.transform.options` holds the keyword arguments of its class. A
transform runs between the backward pass and the optimizer. It may change the gradients and skip the update. It does not
switch paths; the controller reads the gradients before the transform.

If parameters are sharded (FSDP2), each rank changes its own shards, using statistics of the complete parameters.
`tensor_norms` sums over ranks, and code that processes elements uses `local` tensors.

Two rules hold for all transforms. First, nothing waits for the device: decisions are tensors. Second, a step whose loss
or gradient is not finite changes no state. New state is *selected* (`Transform.remember`), never multiplied by a flag,
because 0 * NaN = NaN. The contents of `.grad` do not matter after such a step, because the caller skips the update.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.attachment.ranks.reduce import DistributedRanks, counts, is_sharded, local
from gnmr.control.device import flags
from gnmr.control.norms import batched_norms
from gnmr.errors import UserError, as_user_error
from gnmr.options import fraction, positive, require, whole_number


@dataclass(frozen=True)
class StepContext:
    """The values of a step besides its gradients. Tensors are scalars on the parameters' device."""

    step: int
    """Number of the step, from 1. Skipped steps count."""
    loss: Tensor
    """Mean loss of the step, in nats."""
    grad_norm: Tensor
    """Global 2-norm of the gradients before any transform, float64."""
    nonfinite: Tensor
    """bool: the loss or a gradient is not finite, and the update will be skipped."""
    optimizer: torch.optim.Optimizer


class Transform(ABC):
    """A change of the gradients before the optimizer reads them. Keyword arguments of a subclass are its options.

    `state` holds tensors with fixed names and shapes: everything that the next step depends on besides the options.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        # A parameter under several names (tied) counts once.
        self.parameters = list({id(p): p for _, p in named_parameters if p.requires_grad}.values())
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def __call__(self, context: StepContext) -> Tensor | None:
        """Change the gradients in place and return a bool scalar "skip this update", or None to never skip.

        Parameters without a gradient are left out. Does not wait for the device.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state.

        A checkpoint is loaded into the tensors that this returns, and before the first step one tensor of zeros may be
        the state under several names.
        """
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a transform with the same options over the same parameters."""
        self.state = {name: state[name].to(old.device, old.dtype, copy=True) for name, old in self.state.items()}

    def remember(self, where: Tensor, **new: Tensor) -> None:
        """Replace the state by `new` where `where` (bool, broadcastable) is true."""
        for name, value in new.items():
            self.state[name] = torch.where(where, value, self.state[name])


def tensor_norms(
    parameters: Sequence[nn.Parameter], order: float = 2.0, tensors: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Return the norms of tensors, over the shards of all ranks.

    Args:
        parameters: P parameters. If they are sharded, one collective sums over ranks.
        order: 2 or Inf.
        tensors: P tensors with the shapes and shards of `parameters`, by default their gradients.

    Returns:
        (P,) float64, accumulated in float32; 0 for a missing tensor. NaN propagates.
    """
    tensors = [p.grad for p in parameters] if tensors is None else tensors
    device = parameters[0].device
    present = [tensor is not None and local(tensor).numel() > 0 for tensor in tensors]
    norms = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    if any(present):
        existing = [local(tensor) for tensor in tensors if tensor is not None and local(tensor).numel() > 0]
        norms.masked_scatter_(flags(present, device), batched_norms(existing, order, torch.float32))
    if not any(is_sharded(p) for p in parameters):
        return norms
    if order == torch.inf:
        # Replicas do not change a maximum, unlike a sum.
        DistributedRanks().take_largest(norms)
        return norms
    # Squares of shards add up; a replicated parameter is counted by one rank.
    counted = flags([counts(p) for p in parameters], device)
    return DistributedRanks().sum({"squares": torch.where(counted, norms.square(), 0.0)})["squares"].sqrt()


def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """Compute gradient <- factor * gradient with one rounding: the product of a bf16 gradient is formed in float32.

    Only this rank's shard of a sharded gradient is scaled, by one factor or by one factor per row.
    """
    shard = local(gradient)
    shard.copy_(shard.float().mul_(factor))


def scale_gradients(parameters: Sequence[nn.Parameter], factors: Tensor) -> None:
    """Scale each parameter's gradient in place by its factor in `factors`, (P,)."""
    for parameter, factor in zip(parameters, factors.float().unbind(), strict=True):
        if parameter.grad is not None:
            scale_gradient(parameter.grad, factor)


class AGC(Transform):
    """Adaptive gradient clipping (Brock et al., arXiv 2102.06171), which bounds each unit's gradient by its weights.

        G_u <- G_u min(1, clip max(||W_u||, floor) / max(||G_u||, 1e-6))

    A unit u is a row of a matrix (one output of a linear, one token of an embedding). A parameter with one dimension is
    one unit. Because of the floor, zero weights can change. As in the paper, the final linear layer (a parameter below
    a module `lm_head`) is not clipped. A head that is tied to the embedding is clipped as an embedding. The transform
    has no state.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        clip: float = 0.01,
        floor: float = 1e-3,
    ) -> None:
        named = list(named_parameters)
        super().__init__(named)
        positive(clip=clip, floor=floor)
        self.clip, self.floor = clip, floor
        self._unclipped = {id(p) for name, p in named if "lm_head" in name.split(".")}

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        clipped = [p for p in self.parameters if p.grad is not None and id(p) not in self._unclipped]
        # Norms of rows, or of the whole tensor for one dimension.
        weights, gradients = _unit_norms(clipped, clipped), _unit_norms([p.grad for p in clipped], clipped)
        for p, of_weight, of_gradient in zip(clipped, weights, gradients, strict=True):
            assert p.grad is not None
            bound = self.clip * of_weight.clamp(min=self.floor)
            scale_gradient(p.grad, (bound / of_gradient.clamp(min=1e-6)).clamp(max=1.0))
        return None


def _unit_norms(tensors: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the norm of each row of `tensors`, keeping dimensions, or of the whole tensor if it is 1-D. float32.

    FSDP2 shards by rows, so each rank has complete rows. Norms of 1-D tensors are summed over ranks.
    """
    vector_norms = {}
    if vectors := [i for i, p in enumerate(parameters) if p.ndim == 1 and is_sharded(p)]:
        norms = tensor_norms([parameters[i] for i in vectors], tensors=[tensors[i] for i in vectors])
        vector_norms = dict(zip(vectors, norms.float().unbind(), strict=True))
    unit_norms = []
    for i, tensor in enumerate(tensors):
        assert tensor is not None
        dims = tuple(range(1, tensor.ndim)) or None  # None: the norm of a 1-D tensor
        rows = torch.linalg.vector_norm(local(tensor), dim=dims, keepdim=True, dtype=torch.float32)
        unit_norms.append(vector_norms.get(i, rows))
    return unit_norms


class GradientStabilizer(Transform):
    """GradientStabilizer (arXiv 2502.17055v4): keeps a gradient's direction and replaces its norm by a stable one.

    For each tensor, with R = ||g||:

        m <- gamma1 m + (1 - gamma1) R;     v <- gamma2 v + (1 - gamma2) R^2
        m^ = m / (1 - gamma1^t);            v^ = v / (1 - gamma2^t)
        g <- m^ / (sqrt(v^) + eps) * g / R

    The resulting norm is about 1 while R is steady, so the optimizer must be invariant to the gradient's scale. The
    values of gamma1 and gamma2 are the paper's; bias correction and eps follow the public code. As there, a tensor with
    no gradient or an exact zero gradient is skipped: t counts the gradients that entered m and v.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        gamma1: float = 0.6,
        gamma2: float = 0.999,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(named_parameters)
        fraction(gamma1=gamma1, gamma2=gamma2)
        positive(eps=eps)
        self.gamma1, self.gamma2, self.eps = gamma1, gamma2, eps
        zeros = torch.zeros(len(self.parameters), dtype=torch.float64, device=self.parameters[0].device)
        self.state = {"mean": zeros, "square": zeros, "count": zeros}

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        norms = tensor_norms(self.parameters)
        # t counts per tensor: the gradients of a rarely used expert are corrected by their own number.
        seen = (norms > 0) & ~context.nonfinite
        count = self.state["count"] + 1
        mean = self.gamma1 * self.state["mean"] + (1 - self.gamma1) * norms
        square = self.gamma2 * self.state["square"] + (1 - self.gamma2) * norms.square()
        target = mean / (1 - self.gamma1**count) / ((square / (1 - self.gamma2**count)).sqrt() + self.eps)
        # Factor 1 where nothing was seen: dividing by a norm of 0 would make NaN of a zero gradient.
        scale_gradients(self.parameters, torch.where(seen, target / norms, 1.0))
        self.remember(seen, mean=mean, square=square, count=count)
        return None


class StableSPAM(GradientStabilizer):
    """Stable-SPAM (arXiv 2502.17055v1): adaptive clipping of elements, then a stable norm, then momentum resets.

    AdaClip, for each tensor:

        T <- theta T + (1 - theta) max|g|;   T^ = T / (1 - theta^t)
        elements with |g| > T^ become g T^ / max|g|

    AdaGN applies `GradientStabilizer` to the result, with its own rates. Every `reset_every` steps, Adam's moments and
    step count are set to zero. This includes skipped steps, so that the bias correction fits the new moments.

    The defaults are the defaults of the public code for 4 bits. Its BF16 runs use gamma1 0.85, gamma2 0.99999 and
    reset_every 500. t counts the gradients of a tensor and is never reset. The public code divides by Adam's step
    count, which a reset sets to 1. T^ is then several hundred times too large, and nothing is clipped.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        gamma1: float = 0.7,
        gamma2: float = 0.9,
        theta: float = 0.999,
        reset_every: int = 1000,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(named_parameters, gamma1=gamma1, gamma2=gamma2, eps=eps)
        fraction(theta=theta)
        whole_number(reset_every=reset_every)
        self.theta, self.reset_every = theta, reset_every
        self.state["largest"] = torch.zeros_like(self.state["mean"])

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        if context.step % self.reset_every == 0:
            for state in context.optimizer.state.values():
                for tensor in state.values():
                    local(tensor).zero_()
        # AdaClip: scale down the elements above T^, the others stay.
        top = tensor_norms(self.parameters, torch.inf)
        largest = self.theta * self.state["largest"] + (1 - self.theta) * top
        bounds = largest / (1 - self.theta ** (self.state["count"] + 1))
        for p, bound, factor in zip(self.parameters, bounds.float(), (bounds / top).float(), strict=True):
            if p.grad is not None:
                shard = local(p.grad)
                wide = shard.float()
                shard.copy_(torch.where(wide.abs() > bound, wide * factor, wide))
        # An exact zero gradient does not enter T.
        self.remember((top > 0) & ~context.nonfinite, largest=largest)
        return super().__call__(context)


class SkipStep(Transform):
    """OLMo-core's skip-step optimizer, which skips updates that look like spikes.

        skip  where  loss - mean > sigmas std   or   ||g|| - mean > sigmas std

    mean and std (n - 1 in the denominator) are computed over the last `window` steps, excluding the current one; ||g||
    is the global norm. Nothing is skipped before `min_values` steps were seen, including the current one. As in the
    source, a skipped value enters the window too. Otherwise, a permanent change of the loss level would stop all
    updates. A non-finite value never enters, because it would invalidate the statistics for `window` steps.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        window: int = 128,
        min_values: int = 64,
        sigmas: float = 6.0,
    ) -> None:
        super().__init__(named_parameters)
        whole_number(window=window, min_values=min_values)
        positive(sigmas=sigmas)
        require(
            3 <= min_values <= window + 1,
            "min_values",
            min_values,
            f"must be at least 3 (a spread needs two earlier values) and at most window + 1 = {window + 1}",
        )
        self.window, self.min_values, self.sigmas = window, min_values, sigmas
        device = self.parameters[0].device
        # A ring buffer: the value of the n-th step that entered (from 0) is at index n mod window. Rows: loss, norm.
        self.state = {
            "values": torch.zeros(2, window, dtype=torch.float64, device=device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }
        self._places = torch.arange(window, device=device)

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        values, count = self.state["values"], self.state["count"]
        now = torch.stack([context.loss.detach().double(), context.grad_norm.double()])
        filled = self._places < count
        n = filled.sum()
        mean = values.sum(dim=1) / n  # empty places hold zeros
        variance = torch.where(filled, (values - mean[:, None]).square(), 0.0).sum(dim=1) / (n - 1)
        # With fewer than two earlier values these are NaN, and no comparison with NaN is true.
        spike = (now - mean > self.sigmas * variance.sqrt()).any()
        skip = spike & (count + 1 >= self.min_values) & ~context.nonfinite
        ring = torch.where(self._places == count % self.window, now[:, None], values)
        self.remember(~context.nonfinite, values=ring, count=count + 1)
        return skip


TRANSFORMS: dict[str, type[Transform]] = {
    "agc": AGC,
    "stable_spam": StableSPAM,
    "gradient_stabilizer": GradientStabilizer,
    "skip_step": SkipStep,
}


def build_transform(
    name: str | None, options: Mapping[str, Any], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> Transform | None:
    """Return the transform `name` over the trainable parameters, or None if `name` is None.

    Raises UserError for an unknown name or option, listing the known ones, and for an invalid value.
    """
    if name is None:
        if options:
            raise UserError(
                f"optim.transform.options={dict(options)}: without effect while optim.transform.name is null"
            )
        return None
    if name not in TRANSFORMS:
        raise UserError(f"optim.transform.name={name}: must be null or one of {', '.join(TRANSFORMS)}")
    parameters = inspect.signature(TRANSFORMS[name]).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if unknown := [option for option in options if option not in known]:
        raise UserError(f"optim.transform.options.{unknown[0]}: {name} has no such option, it has {', '.join(known)}")
    with as_user_error("optim.transform.options."):
        return TRANSFORMS[name](named_parameters, **options)
