"""model.*: the architecture."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field

from gnmr.config.checks import one_of, positive, require, within


@dataclass(frozen=True)
class OutlierConfig:
    """Function-preserving outlier channels (gnmr/models/outliers.py)."""

    number: int = 0
    """Channels per norm, per v/o pair and per up/down pair that are scaled; 0 switches it off."""
    gain: float = 1.0
    """Factor on the chosen channels; the weights that read them are divided by it. A power of two is exact in BF16."""
    window: list[int] = field(default_factory=list)
    """First and last step of a window outside of which there are none; empty: from the start and for good."""

    def __post_init__(self) -> None:
        require(
            len(self.window) in (0, 2) and (not self.window or 1 <= self.window[0] <= self.window[1]),
            "model.outlier_channels.window",
            self.window,
            "must be empty, or [first step, last step] from 1",
        )
        require(self.number >= 0, "model.outlier_channels.number", self.number, "must be 0 or more")
        within("model.outlier_channels.gain", self.gain, 1e-6, 1e6)


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of model=moe (gnmr/models/moe.py); each is an MLP of model.intermediate_size."""

    number: int = 0
    """Experts in every layer; 0 in the other models, which have one MLP."""
    top_k: int = 2
    """Experts that every token goes to."""
    normalized: bool = True
    """A token's gate weights are divided by their sum; false: they stay parts of the softmax over all experts."""
    balance_coef: float = 0.01
    """Weight of the load-balancing loss in training; without effect where the routing is fixed."""
    routing_seed: int | None = None
    """Fixes the routing: a hash of the token, the layer and this seed chooses the experts; null: the gate does."""

    def __post_init__(self) -> None:
        require(self.number >= 0, "model.experts.number", self.number, "must be 0 or more")
        positive("model.experts.top_k", self.top_k)
        require(
            0 <= self.balance_coef < math.inf,
            "model.experts.balance_coef",
            self.balance_coef,
            "must be a number, 0 or more",
        )
        require(
            self.routing_seed is None or 0 <= self.routing_seed < 2**31,
            "model.experts.routing_seed",
            self.routing_seed,
            "must lie between 0 and 2^31, or be null",
        )


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters around the linears of model=pretrained, whose own weights are then frozen (E.3; peft)."""

    rank: int = 0
    """Rank of the adapters; 0: none, every weight is trained."""
    scaling: int = 16
    """lora_alpha: what an adapter adds is multiplied by scaling / rank."""
    dropout: float = 0.05
    """Dropout on the adapters' inputs in training."""
    targets: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of the linears that get one, as paths.targets."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "model.adapter.rank", self.rank, "must be 0 or more")
        positive("model.adapter.scaling", self.scaling)
        require(0 <= self.dropout < 1, "model.adapter.dropout", self.dropout, "must lie in [0, 1)")
        named = [isinstance(p, str) and re.fullmatch(r"[\w.*?!\[\]-]+", p) for p in self.targets]
        require(bool(named) and all(named), "model.adapter.targets", self.targets, "needs patterns of linears' names")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture only; precision is `paths`'s and `training.dtype`'s."""

    name: str = "llama"
    """llama, gpt or moe, or pretrained: a checkpoint in Hugging Face's layout, which says the sizes itself."""
    checkpoint: str | None = None
    """pretrained: a folder with config.json, weights and tokenizer, or the name of one on the hub."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    hidden_size: int = 256
    intermediate_size: int = 704
    """Width of the MLP; in moe of each expert's."""
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); null: as many as num_heads."""
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    """Base of the rotary embedding (llama)."""
    init_std: float = 0.02
    """Standard deviation of the normal initialisation."""
    tied_head: bool = False
    """llama: the head is the embedding, as it always is in gpt and moe."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    outlier_channels: OutlierConfig = field(default_factory=OutlierConfig)

    def __post_init__(self) -> None:
        one_of("model.name", self.name, ("llama", "gpt", "moe", "pretrained"))
        self._check_pretrained()
        for key in ("hidden_size", "intermediate_size", "num_layers", "num_heads"):
            positive(f"model.{key}", getattr(self, key))
        require(
            self.hidden_size % self.num_heads == 0,
            "model.hidden_size",
            self.hidden_size,
            f"model.num_heads={self.num_heads} does not divide it",
        )
        require(
            self.name != "llama" or self.hidden_size // self.num_heads % 2 == 0,
            "model.num_heads",
            self.num_heads,
            "the rotary embedding needs an even width per head",
        )
        if self.num_kv_heads is not None:
            require(self.name == "llama", "model.num_kv_heads", self.num_kv_heads, "only llama has grouped queries")
            require(
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
                "model.num_kv_heads",
                self.num_kv_heads,
                f"must divide model.num_heads={self.num_heads}",
            )
        within("model.norm_eps", self.norm_eps, 1e-30, 1)
        positive("model.rope_theta", self.rope_theta)
        within("model.init_std", self.init_std, 1e-30, 1e3)
        require(self.name == "llama" or not self.tied_head, "model.tied_head", True, "only llama has the choice")
        self._check_experts()

    def _check_pretrained(self) -> None:
        if self.name == "pretrained":
            right = "model=pretrained needs a checkpoint: a folder in Hugging Face's layout, or a name on the hub"
            require(bool(self.checkpoint), "model.checkpoint", self.checkpoint, right)
            number = self.outlier_channels.number
            right = (
                "a checkpoint has its own outliers: choose scale=finetune_cpu or finetune_13b, or 0 (scale=cpu has 2)"
            )
            require(number == 0, "model.outlier_channels.number", number, right)
            return
        require(self.checkpoint is None, "model.checkpoint", self.checkpoint, "belongs to model=pretrained")
        require(self.adapter.rank == 0, "model.adapter.rank", self.adapter.rank, "belongs to model=pretrained")

    def _check_experts(self) -> None:
        number, top_k = self.experts.number, self.experts.top_k
        if self.name != "moe":
            for key, value in asdict(self.experts).items():
                default = getattr(ExpertsConfig, key)
                require(value == default, f"model.experts.{key}", value, f"model.name={self.name} has no experts")
            return
        require(number >= 1, "model.experts.number", number, "moe needs at least one expert")
        require(top_k <= number, "model.experts.top_k", top_k, f"there are only model.experts.number={number} experts")
        require(
            top_k > 1 or number == 1 or not self.experts.normalized,
            "model.experts.normalized",
            True,
            "with model.experts.top_k=1 every gate weight would be 1 and the gate could not learn; use false",
        )
