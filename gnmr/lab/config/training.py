"""training.*, fork.* and compression.*: length, batch, device, checkpoints, healing, and compressed gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.errors import as_user_error, fields, one_of, require, whole


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
    """Seed of initialization, data order and stochastic rounding."""
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
    """Steps between checkpoints. The last step is always saved."""
    keep_checkpoints: int = 2
    resume: str = "auto"
    """auto: continue from the newest checkpoint of the run folder. never: refuse a folder that holds a run."""
    max_nonfinite_streak: int = 10
    """Number of consecutive skipped steps (non-finite loss or gradient) after which the run ends as FAILED."""
    activation_checkpointing: bool = False
    """Recompute each block's forward pass during the backward pass."""
    compile: bool = False
    """Use torch.compile for each block. Converted linears run between its graphs, or inside under unit=block."""
    export_hf: bool = False
    """Write the final model to hf/ in the run folder, in the layout of Hugging Face. It works for llama and pretrained,
    and needs the extra finetune."""

    @as_user_error("training.")
    def __post_init__(self) -> None:
        whole(**fields(self, "steps", "seq_len", "batch_size", "accumulation", "max_nonfinite_streak"))
        whole(**fields(self, "eval_every", "eval_sequences", "checkpoint_every", "keep_checkpoints"))
        whole(or_null=True, **fields(self, "threads"))
        require(self.threads is None or self.threads <= 4096, "threads", self.threads, "must be 4096 or less")
        require(0 <= self.seed < 2**62, "seed", self.seed, "must lie between 0 and 2^62")
        one_of(("bfloat16", "float32"), dtype=self.dtype)
        one_of(("auto", "cpu", "cuda"), device=self.device)
        one_of(("auto", "never"), resume=self.resume)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all its micro-batches."""
        return self.seq_len * self.batch_size * self.accumulation


@dataclass(frozen=True)
class ForkConfig:
    """Settings of a run with a `base` (gnmr/lab/train/fork.py)."""

    heal: int = 0
    """Steps in 16 bits after the training.steps steps of the arm."""
    order: int = 0
    """Continuation of the data: 0 is the order of the base, other values draw a new order for the rest of the epoch.
    The key works like a seed: it is not part of the hash, and training.seed equals it."""

    @as_user_error("fork.")
    def __post_init__(self) -> None:
        for key, value in fields(self, "heal", "order").items():
            require(0 <= value < 2**62, key, value, "must lie between 0 and 2^62")


@dataclass(frozen=True)
class CompressionConfig:
    """Low-rank gradients instead of full gradients (docs/compressed.md)."""

    name: str = "none"
    """none or greedylore. greedylore is a low path whose recovery is the dense mean; gradients are routed."""
    rank: int = 32
    """Number of rows that are sent of a weight's gradient, oriented with its shorter side first."""
    refresh_every: int = 200
    """Steps between two bases. A new basis needs a dense step."""
    dense_steps: int = 1000
    """Number of initial steps in which full gradients are sent."""
    targets: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of the modules whose weights are compressed. Embedding and head never are."""
    workers: int | None = None
    """Data-parallel workers. If null, the processes of parallel=ddp. In one process, this number of virtual workers
    gives the same result as the same number of processes."""

    @as_user_error("compression.")
    def __post_init__(self) -> None:
        one_of(("none", "greedylore"), name=self.name)
        whole(**fields(self, "rank", "refresh_every"))
        whole(0, dense_steps=self.dense_steps)
        whole(2, or_null=True, workers=self.workers)
        require(self.targets, "targets", self.targets, "needs at least one pattern")

    @property
    def routes(self) -> bool:
        """Return True if the compressed matrices are the controller's units."""
        return self.name != "none"

    @property
    def arm(self) -> str:
        """Part of an arm's name."""
        return f"{self.name}-r{self.rank}"
