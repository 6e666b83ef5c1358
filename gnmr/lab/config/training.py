"""training.*: length, batch, device and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

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
