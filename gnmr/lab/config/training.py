"""training.*, fork.* and compression.*: length, batch, device and checkpoints; healing; what workers send."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.errors import as_user_error, fields, one_of, require, whole


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch, precision of the weights, checkpoints."""

    steps: int = 600
    seq_len: int = 256
    """Tokens in a block."""
    batch_size: int = 8
    """Blocks in a micro-batch."""
    accumulation: int = 1
    """Micro-batches in a step; tokens a step = seq_len * batch_size * accumulation."""
    seed: int = 0
    """Initialisation, data order and stochastic rounding."""
    dtype: str = "bfloat16"
    """Weights, gradients and optimizer state: bfloat16 (the paper) or float32."""
    device: str = "auto"
    """auto (cuda where there is one, else cpu), cpu or cuda."""
    threads: int | None = None
    """CPU threads; null: as many as PyTorch chooses, in a joblib sweep cores / jobs. Losses are equal to the last bit
    for equal thread counts."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    eval_sequences: int = 64
    """Validation blocks, the same in every arm."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    resume: str = "auto"
    """auto: continue from the newest checkpoint of the run folder; never: refuse a folder that holds a run."""
    max_nonfinite_streak: int = 10
    """Skipped steps in a row (non-finite loss or gradient) after which the run ends FAILED."""
    activation_checkpointing: bool = False
    """Recompute each block's forward during backward."""
    compile: bool = False
    """torch.compile for each block; converted linears are in its graphs under recipes with unit=block, else between."""
    export_hf: bool = False
    """At the end the model is also written to the run folder's hf/, in Hugging Face's layout (llama and pretrained;
    needs the extra finetune)."""

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
        """Of an optimizer step, all its micro-batches together."""
        return self.seq_len * self.batch_size * self.accumulation


@dataclass(frozen=True)
class ForkConfig:
    """Of a run with a `base` (gnmr/lab/train/fork.py)."""

    heal: int = 0
    """Steps in 16 bits after the training.steps steps of the arm."""
    order: int = 0
    """Which continuation of the data: 0 is the base's own, any other draws what is left of the epoch anew. A key like
    a seed: outside of the hash, and training.seed is the same number."""

    @as_user_error("fork.")
    def __post_init__(self) -> None:
        for key, value in fields(self, "heal", "order").items():
            require(0 <= value < 2**62, key, value, "must lie between 0 and 2^62")


@dataclass(frozen=True)
class CompressionConfig:
    """Low-rank gradients in place of whole ones (docs/compressed.md)."""

    name: str = "none"
    """none; greedylore: a low path whose recovery is the dense mean, so the controller routes gradients and not
    operators."""
    rank: int = 32
    """Rows that are sent of a weight's gradient, the shorter side read first."""
    refresh_every: int = 200
    """Steps between two bases, each a dense step."""
    dense_steps: int = 1000
    """Steps at the start in which gradients are sent whole."""
    targets: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of the modules whose weights are compressed. Embedding and head never are."""
    workers: int | None = None
    """Data parallel workers. null: the processes of parallel=ddp; in one process that many virtual workers, which
    leave what as many processes do."""

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
