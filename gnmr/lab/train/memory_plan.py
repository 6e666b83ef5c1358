"""The device memory that a run will need, before anything is loaded (memory_plan=true).

The model is built on the meta device (shapes without contents), given its adapters and paths, and run forward once on
one micro-batch: autograd then saves what it would save on the device, whatever the architecture. Attention is
counted as the fused kernels keep it: queries, keys, values, output and one float32 a query.

Not counted: the allocator's fragments, the CUDA context (0.5 to 1 GB), and temporaries of single operators
other than those of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gnmr.lab import models
from gnmr.lab.config import Config
from gnmr.lab.train.build import blocks_of, build_optim, check_control, device_of, empty_model, with_paths
from gnmr.lab.train.memory_bound import GB, refuse_plan
from gnmr.precision import ConvertedModel, Recipe
from gnmr.precision.int8 import Int8Linear
from gnmr.precision.recipes import described

DEVICES = (("80 GB (A100, H100)", 80 * GB), ("141 GB (H200)", 141 * GB))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for, in the order of the report."""

    rows: list[tuple[str, int, str]]
    """(what, bytes, note)."""
    assumed: list[str]
    """Assumptions, printed above the rows."""

    @property
    def total(self) -> int:
        """Bytes of all rows together."""
        return sum(size for _, size, _ in self.rows)

    def __str__(self) -> str:
        width = max(len(what) for what, _, _ in self.rows)
        lines = [*self.assumed]
        lines += [f"{what:<{width}}  {size / GB:9.3f} GB  {note}".rstrip() for what, size, note in self.rows]
        lines.append(f"{'together':<{width}}  {self.total / GB:9.3f} GB")
        for name, size in DEVICES:
            left = size - self.total
            verdict = f"fits, {left / GB:.1f} GB left" if left > 0 else f"does not fit, {-left / GB:.1f} GB too much"
            lines.append(f"one device of {name}, or each of several, for nothing is sharded: {verdict}")
        return "\n".join(lines)


def plan_run(config: Config) -> MemoryPlan:
    """The plan of a step of this run. UserError as the run itself would raise it; no weights are read."""
    training = config.training
    refuse_plan(config)
    model, vocab_size = empty_model(config)
    device = torch.device("cuda") if training.device == "cuda" else device_of(training.device)
    plan = with_paths(model, config, device)
    optimizer, transform = build_optim(model, config)
    check_control(config, model, plan)
    checkpointed = list(blocks_of(model)) if training.activation_checkpointing else []
    max_o = min(config.controller.cap, len(plan.units)) if config.precision.recovery is not None else 0
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values() if isinstance(tensor, Tensor)]
    state += [] if transform is None else transform.state.values()
    warmup = config.controller.warmup_steps(training.steps) > 0
    rows = _rows(model, plan, state, training.batch_size, training.seq_len, max_o, vocab_size, checkpointed, warmup)
    return MemoryPlan(rows, _assumed(config, plan, device))


def _assumed(config: Config, plan: ConvertedModel, device: torch.device) -> list[str]:
    """The assumptions that the config does not show."""
    paths = [path for path in (plan.low, plan.recovery) if path is not None]
    elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    lines = [f"for {device}{' (none here)' if elsewhere else ''}, paths: {' / '.join(map(described, paths))}"]
    unsure = [path for path in paths if isinstance(path, Recipe) and path.casts and path.backend == "simulated"]
    if elsewhere and config.precision.backend == "auto" and unsure:
        lines.append(
            "whether that GPU runs FP8 itself is not known here: planned as if not; precision.backend=scaled_mm plans as if"
        )
    return lines


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """As `training.step.loss_of`; a model of Hugging Face's is handed its mask, which it would make by looking."""
    if isinstance(model, models.Decoder):
        logits = model(tokens)
    else:
        length = tokens.shape[1]
        mask = torch.empty(len(tokens), 1, length, length, dtype=torch.bool, device="meta")
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def _rows(
    model: nn.Module,
    plan: ConvertedModel,
    state: Sequence[Tensor],
    batch_size: int,
    seq_len: int,
    max_o: int,
    vocab_size: int,
    checkpointed: Sequence[nn.Module],
    warmup: bool,
) -> list[tuple[str, int, str]]:
    """`MemoryPlan.rows` of one training step of `model`, which stands on the meta device with its paths.

    `state`: the optimizer's and the gradient transform's. `checkpointed`: modules whose forward is recomputed in
    backward; one of them at a time is then held as a whole. `warmup`: the run has one, with every unit in recovery.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained, buffers = sum(p.nbytes for p in trainable), sum(b.nbytes for b in model.buffers())
    kept = [o.kept_codes(o.weight) for o in plan.operators if isinstance(o, Int8Linear) and o.weights == "beside"]
    codes = [tensor for own in kept if own is not None for tensor in (own.codes, own.scale)]
    tokens = torch.empty(batch_size, seq_len, dtype=torch.int64, device="meta")
    known = [*model.parameters(), *model.buffers(), *codes]
    saved, largest = _saved_bytes(lambda: _loss(model, tokens), known, checkpointed)
    recovery, note = (
        round(plan.cost.extra_bytes_bound(max_o) - plan.cost.spent()[1]),
        f"Eq. 67: at most {max_o} units, above their low path",
    )
    if warmup:
        for group in plan.units:
            group.switch(True)
        plan.begin_step(1)
        all_of_them = _saved_bytes(lambda: _loss(model, tokens), known, checkpointed)
        if (more := sum(all_of_them) - saved - largest) > recovery:
            recovery, note = more, "the warm-up: every unit, above its low path"
    logits = batch_size * seq_len * vocab_size
    numbers = sum(p.numel() for p in model.parameters())
    rows = [
        ("frozen weights", frozen, f"{numbers - sum(p.numel() for p in trainable):,} numbers"),
        ("trained weights", trained, f"{sum(p.numel() for p in trainable):,} numbers"),
        ("INT8 copies of weights", sum(t.nbytes for t in codes), "precision.weights=beside"),
        ("buffers", buffers, ""),
        ("gradients", trained, ""),
        ("optimizer", sum(t.nbytes for t in state), "and gradient transform"),
        ("kept for backward", saved, f"{batch_size} x {seq_len} tokens, every unit on its low path"),
        ("recomputed block", largest, "activation checkpointing: the largest of the blocks at a time"),
        ("recovery", recovery, note),
        # float32 log-probabilities are among what is kept; backward makes their gradient and its 16-bit copy.
        ("loss in backward", logits * (4 + next(model.parameters()).element_size()), f"{vocab_size:,} logits a token"),
    ]
    return [row for row in rows if row[1] > 0 or row[0] == "recovery"]


def _saved_bytes(run: Callable[[], Any], there: Sequence[Tensor], checkpointed: Sequence[nn.Module]) -> tuple[int, int]:
    """(bytes that autograd saves of one forward pass besides what is `there`, the most of one checkpointed module).

    With `checkpointed` modules only the inputs of each count in the first number.
    """
    known = {t.untyped_storage()._cdata for t in there}
    inside: list[nn.Module] = []
    totals: dict[nn.Module | None, dict[int, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            totals.setdefault(inside[-1] if inside else None, {})[storage._cdata] = storage.nbytes()
            alive.append(tensor)  # a storage that is let go could give its address to another
        return tensor

    alive: list[Tensor] = []

    def enter(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        for tensor in (*inputs, *named.values()):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                pack(tensor)
        inside.append(module)

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in checkpointed]
    handles += [module.register_forward_hook(lambda *_: inside.pop() and None) for module in checkpointed]
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor), _fused_attention():
            run()
    finally:
        for handle in handles:
            handle.remove()
    kept = totals.pop(None, {})
    blocks = [sum(size for key, size in own.items() if key not in kept) for own in totals.values()]
    return sum(kept.values()), max(blocks, default=0)


class _Fused(torch.autograd.Function):
    """Attention's shapes, and what a fused kernel keeps of it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        B, H, T, _ = q.shape
        output = q.new_empty(B, T, H, v.shape[-1]).transpose(
            1, 2
        )  # in the kernels' layout: o_proj reads it without a copy
        bias = () if mask is None else (q.new_empty(mask.shape),)  # a mask of documents becomes one, in every layer
        ctx.save_for_backward(q, k, v, output, q.new_empty(q.shape[:-1], dtype=torch.float32), *bias)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise NotImplementedError("shapes only")


@contextmanager
def _fused_attention() -> Iterator[None]:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                return _Fused.apply(*args[:3], (kwargs or {}).get("attn_mask"))
            return func(*args, **(kwargs or {}))

    with Mode():
        yield
