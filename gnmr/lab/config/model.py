"""model.*: the architecture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from gnmr.errors import as_user_error
from gnmr.options import fields, fraction, one_of, require, whole_number, within

LLAMAS = ("llama", "pangu")
"""Architectures with LLaMA's layers: rotary embedding, RMSNorm, a gated MLP, grouped queries."""


@dataclass(frozen=True)
class OutlierConfig:
    """Function-preserving outlier channels (gnmr/lab/models/outliers.py)."""

    number: int = 0
    """Number of scaled channels per norm, per v/o pair and per up/down pair. 0 switches them off."""
    gain: float = 1.0
    """Factor on the chosen channels; the weights that read them are divided by it. A power of two is exact in BF16."""
    window: list[int] = field(default_factory=list)
    """First and last step of the window in which the channels exist. If empty, they exist in all steps."""

    @as_user_error("model.outlier_channels.")
    def __post_init__(self) -> None:
        sound = not self.window or (len(self.window) == 2 and 1 <= self.window[0] <= self.window[1])
        require(sound, "window", self.window, "must be empty, or [first step, last step] from 1")
        whole_number(0, number=self.number)
        within(1e-6, 1e6, gain=self.gain)


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of model=moe (gnmr/lab/models/moe.py). Each is an MLP of width model.intermediate_size."""

    number: int = 0
    """Experts in every layer. It is 0 in the other models, which have one MLP."""
    top_k: int = 2
    """Number of experts that process each token."""

    @as_user_error("model.experts.")
    def __post_init__(self) -> None:
        whole_number(0, number=self.number)
        whole_number(top_k=self.top_k)


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters around the `*_proj` linears of model=pretrained, whose weights are then frozen (E.3; peft)."""

    rank: int = 0
    """Rank of the adapters. With 0, there are no adapters and every weight is trained."""
    dropout: float = 0.05
    """Dropout on the adapters' inputs in training."""

    @as_user_error("model.adapter.")
    def __post_init__(self) -> None:
        whole_number(0, rank=self.rank)
        fraction(dropout=self.dropout)


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Precision is set by `precision` and `training.dtype`."""

    name: str = "llama"
    """llama, pangu (llama with the constants of Pangu), gpt, moe, or pretrained: a checkpoint in the layout of Hugging
    Face, which determines the sizes."""
    checkpoint: str | None = None
    """pretrained: a folder with config.json, weights and tokenizer, or a name on the hub."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    hidden_size: int = 256
    intermediate_size: int = 704
    """Width of the MLP, or of each expert in moe."""
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention). If null, there are num_heads of them."""
    tied_head: bool = False
    """llama, pangu: use the embedding as the head, as gpt and moe always do."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    outlier_channels: OutlierConfig = field(default_factory=OutlierConfig)

    @as_user_error("model.")
    def __post_init__(self) -> None:
        one_of(("llama", "pangu", "gpt", "moe", "pretrained"), name=self.name)
        self._check_pretrained()
        whole_number(**fields(self, "hidden_size", "intermediate_size", "num_layers", "num_heads"))
        most = 50_000 // max(self.experts.number, 1)  # each linear is built separately
        require(self.num_layers <= most, "num_layers", self.num_layers, f"{most:,} layers are the most")
        heads, kv_heads, llama = self.num_heads, self.num_kv_heads, self.name in LLAMAS
        divides = self.hidden_size % heads == 0
        require(divides, "hidden_size", self.hidden_size, f"model.num_heads={heads} does not divide it")
        # Channel i of a head rotates with channel i + K/2.
        sound = not llama or self.hidden_size // heads % 2 == 0
        require(sound, "num_heads", heads, "the rotary embedding needs an even width per head")
        if kv_heads is not None:
            require(llama, "num_kv_heads", kv_heads, "only llama has grouped queries")
            sound = kv_heads > 0 and heads % kv_heads == 0
            require(sound, "num_kv_heads", kv_heads, f"must divide model.num_heads={heads}")
        require(llama or not self.tied_head, "tied_head", True, "only llama has the choice")
        self._check_experts()

    def _check_pretrained(self) -> None:
        if self.name == "pretrained":
            right = "model=pretrained needs a checkpoint: a folder in Hugging Face's layout, or a name on the hub"
            require(self.checkpoint, "checkpoint", self.checkpoint, right)
            number = self.outlier_channels.number
            require(number == 0, "outlier_channels.number", number, "a checkpoint has its own outliers; use 0")
            return
        require(self.checkpoint is None, "checkpoint", self.checkpoint, "belongs to model=pretrained")
        require(self.adapter.rank == 0, "adapter.rank", self.adapter.rank, "belongs to model=pretrained")

    def _check_experts(self) -> None:
        number, top_k = self.experts.number, self.experts.top_k
        if self.name != "moe":
            for key, value in asdict(self.experts).items():
                default = getattr(ExpertsConfig, key)
                require(value == default, f"experts.{key}", value, f"model.name={self.name} has no experts")
            return
        require(number >= 1, "experts.number", number, "moe needs at least one expert")
        require(top_k <= number, "experts.top_k", top_k, f"there are only model.experts.number={number} experts")

    @property
    def norm_eps(self) -> float:
        """Constant under the root of each norm: LLaMA's, or that of GPT-2 and Pangu."""
        return 1e-6 if self.name == "llama" else 1e-5

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embedding of llama and pangu."""
        return 4e6 if self.name == "pangu" else 1e4
