"""training.*, optim.*, fork.* and compression.*: length, batch, optimizer, healing, compressed gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gnmr.errors import as_user_error
from gnmr.options import fields, one_of, require, whole_number, within


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch, dtype of the weights, and checkpoints."""

    steps: int = 600
    seq_len: int = 256
    """Tokens per block."""
    batch_size: int = 8
    """Blocks per micro-batch."""
    accumulation: int = 1
    """Micro-batches per step. A step has seq_len * batch_size * accumulation tokens."""
    seed: int = 0
    """Seed of initialization, data order and stochastic rounding. In a fork, 0 continues the data in the order of the
    base, and other values draw a new order for the rest of the epoch."""
    dtype: str = "bfloat16"
    """Dtype of weights, gradients and optimizer state: bfloat16 (the paper) or float32."""
    device: str = "auto"
    """auto (cuda if available, else cpu), cpu or cuda."""
    threads: int | None = None
    """CPU threads. If null, PyTorch chooses; in a joblib sweep, cores / jobs. Losses are bit-identical only for equal
    thread counts."""
    eval_every: int = 100
    """Steps between evaluations. The last step is always evaluated."""
    eval_sequences: int = 64
    """Validation blocks, which are the same for all arms."""
    checkpoint_every: int = 100
    """Steps between checkpoints, of which the last two are kept. The last step is always saved."""
    activation_checkpointing: bool = False
    """Recompute each block's forward pass during the backward pass."""
    compile: bool = False
    """Use torch.compile for each block. Converted linears run between its graphs, or inside under unit=block."""
    export_hf: bool = False
    """Write the final model to hf/ in the run folder, in the layout of Hugging Face. It works for llama and pretrained,
    and needs the extra finetune."""

    @as_user_error("training.")
    def __post_init__(self) -> None:
        whole_number(**fields(self, "steps", "seq_len", "batch_size", "accumulation"))
        whole_number(**fields(self, "eval_every", "eval_sequences", "checkpoint_every"))
        whole_number(or_null=True, **fields(self, "threads"))
        require(self.threads is None or self.threads <= 4096, "threads", self.threads, "must be 4096 or less")
        require(0 <= self.seed < 2**62, "seed", self.seed, "must lie between 0 and 2^62")
        one_of(("bfloat16", "float32"), dtype=self.dtype)
        one_of(("auto", "cpu", "cuda"), device=self.device)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all its micro-batches."""
        return self.seq_len * self.batch_size * self.accumulation


@dataclass(frozen=True)
class TransformConfig:
    """A gradient transform before the optimizer (gnmr/lab/rivals/transforms)."""

    name: str | None = None
    """A transform of gnmr/lab/rivals/transforms, or null for none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the transform's constructor. The defaults are the published ones."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its schedule and clipping."""

    name: str = "adamw"
    """adamw or scale."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    lr: float = 1e-3
    """Peak learning rate, 1e-30 to 1000."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
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
        # The bounds are far beyond useful values and within FP32's range: all factors of a step are finite and nonzero.
        within(1e-30, 1e3, **fields(self, "lr"))
        sound = len(self.betas) == 2 and all(0 <= beta <= 0.999999 for beta in self.betas)
        require(sound, "betas", self.betas, "two numbers from 0 to 0.999999")
        within(0, 1e3, weight_decay=self.weight_decay)
        # Decay multiplies weights by 1 - lr * weight_decay, which must not change their sign.
        sound = self.lr * self.weight_decay <= 1
        require(sound, "weight_decay", self.weight_decay, f"times lr={self.lr} must be 1 at most")
        within(0, 1, **fields(self, "warmup_frac", "min_lr_frac"))
        whole_number(or_null=True, schedule_steps=self.schedule_steps)
        within(1e-30, 1e30, or_null=True, clip_norm=self.clip_norm)


@dataclass(frozen=True)
class ForkConfig:
    """Settings of a run with a `base` (gnmr/lab/train/fork_base.py)."""

    heal: int = 0
    """Steps in 16 bits after the training.steps steps of the arm."""

    @as_user_error("fork.")
    def __post_init__(self) -> None:
        require(0 <= self.heal < 2**62, "heal", self.heal, "must lie between 0 and 2^62")


@dataclass(frozen=True)
class CompressionConfig:
    """Low-rank gradients instead of full gradients (docs/compressed.md); `GreedyLoreSpec` checks the numbers."""

    name: str = "none"
    """none or greedylore. greedylore is a low path whose recovery is the dense mean; gradients are routed."""
    rank: int = 32
    """Number of rows that are sent of a weight's gradient, oriented with its shorter side first."""
    refresh_every: int = 200
    """Steps between two bases. A new basis needs a dense step."""
    dense_steps: int = 1000
    """Number of initial steps in which full gradients are sent."""
    workers: int | None = None
    """Data-parallel workers. If null, the processes of parallel=ddp. In one process, this number of virtual workers
    gives the same result as the same number of processes."""

    @as_user_error("compression.")
    def __post_init__(self) -> None:
        one_of(("none", "greedylore"), name=self.name)

    @property
    def routes(self) -> bool:
        """Return True if the compressed matrices are the controller's units."""
        return self.name != "none"

    @property
    def arm(self) -> str:
        """Part of an arm's name."""
        return f"{self.name}-r{self.rank}"
