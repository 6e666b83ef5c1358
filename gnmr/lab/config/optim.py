"""optim.*: the optimizer, its schedule and the gradient transform."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gnmr.errors import as_user_error, fields, one_of, require, whole, within


@dataclass(frozen=True)
class TransformConfig:
    """A gradient transform before the optimizer (gnmr/lab/train/transforms)."""

    name: str | None = None
    """A transform of gnmr/lab/train/transforms, or null for none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the transform's constructor. The defaults are the published ones."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its schedule and clipping."""

    name: str = "adamw"
    """adamw or scale."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer. adamw has none; scale has momentum, of the head's gradient (0.9)."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    lr: float = 1e-3
    """Peak learning rate, 1e-30 to 1000."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_frac: float = 0.1
    """Linear warm-up as a fraction of the schedule."""
    min_lr_frac: float = 0.1
    """Learning rate at the end of the cosine as a fraction of the peak."""
    schedule_steps: int | None = None
    """Length of the schedule in steps. If null, it is training.steps. A longer schedule leaves the run in the middle of
    the cosine, to be forked. After the end of the schedule, the rate stays constant."""
    clip_norm: float | None = None
    """Largest global gradient norm, or null for no clipping. The controller reads the norms before clipping."""

    @as_user_error("optim.")
    def __post_init__(self) -> None:
        one_of(("adamw", "scale"), name=self.name)
        adam = self.name == "adamw"
        sound = adam or self.transform.name != "stable_spam"
        require(sound, "transform.name", self.transform.name, "resets Adam's moments; it needs optim.name=adamw")
        require(not adam or not self.options, "options", self.options, "adamw has none")
        if not adam:
            object.__setattr__(self, "options", {"momentum": 0.9} | self.options)
        # The bounds are far beyond useful values and within FP32's range: all factors of a step are finite and nonzero.
        within(1e-30, 1e3, **fields(self, "lr", "eps"))
        sound = len(self.betas) == 2 and all(0 <= beta <= 0.999999 for beta in self.betas)
        require(sound, "betas", self.betas, "two numbers from 0 to 0.999999")
        within(0, 1e3, weight_decay=self.weight_decay)
        sound = self.lr * self.weight_decay <= 1
        require(sound, "weight_decay", self.weight_decay, f"times lr={self.lr} must be 1 at most")
        within(0, 1, **fields(self, "warmup_frac", "min_lr_frac"))
        whole(or_null=True, schedule_steps=self.schedule_steps)
        within(1e-30, 1e30, or_null=True, clip_norm=self.clip_norm)
