"""AdamW, its learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnmr.lab.config import OptimConfig
from gnmr.lab.rivals.scale import build_scale


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of step `step` (from 1).

    The rate rises linearly from 0 to the peak over the warm-up. It then follows a cosine to `min_lr_frac` of the peak
    at step `steps`, where it stays.
    """
    warmup = round(config.warmup_frac * steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_frac + (1 - config.min_lr_frac) * cosine)


class UncompiledAdamW(torch.optim.AdamW):
    """AdamW whose methods do not import torch's compiler, which takes a second. They do the same otherwise."""

    # torch wraps these methods so that they stay out of the graphs of torch.compile; nothing here compiles a step.
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the config, with state in the parameters' dtype. Norm gains and biases (1-D) do not decay.

    AdamW is fused, because its kernel can skip the update by a flag on the device (`skip_where`).
    """
    if config.name == "scale":
        return build_scale(model, config)
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    first, second = config.betas
    optimizer = UncompiledAdamW([g for g in groups if g["params"]], lr=config.lr, betas=(first, second), fused=True)
    # The first step would create this state only for parameters with gradients. A checkpoint needs it for all experts.
    # A model on the meta device, which only checks the config, has no use for it.
    for p in (p for p in (*matrices, *vectors) if not p.is_meta):
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def skip_where(optimizer: torch.optim.Optimizer, nonfinite: Tensor) -> None:
    """Make the next `optimizer.step()` change nothing if `nonfinite` (a bool scalar on the device) is true.

    The fused kernel selects on the device: nothing is synchronized, and nothing is multiplied by NaN.
    """
    # Fused kernels read these two attributes for GradScaler of torch.amp, which sets them in the same way.
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = nonfinite.to(torch.float32)  # type: ignore[attr-defined]


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients to a global norm of at most `max_norm`; `norm` is the current norm (scalar tensor)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    # As torch.nn.utils.clip_grad_norm_ does, with a norm that the step has computed already.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        # Private, because the public torch.nn.utils.clip_grads_with_norm_ scales in the dtype of the norm. It would
        # replace this if it took the scale.
        torch._foreach_mul_(gradients, scale.float())  # a scale rounded to bf16 could exceed the bound
