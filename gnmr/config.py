"""The schema of `conf/`: one frozen dataclass per group, merged strictly.

Hydra composes the YAML tree; this file says which keys exist, their types, and which values make sense. An unknown
key fails while Hydra composes (the schema is in struct mode, so `+key=1` fails too); a senseless value fails in
`__post_init__`, before anything is created on disk. Neither torch nor any other module of ours is imported here, but
for recipes that a config declares itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gnmr.errors import UserError

FORMATS = ("int2", "int3", "int4", "int8", "e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "bf16")
RECIPES = {
    "fp8_hybrid": 8,
    "fp8_delayed": 8,
    "fp8_delayed_1024": 8,
    "deepseek_v3": 8,
    "deepseek_v3_blocks": 8,
    "mxfp8": 8,
    "sim_e2m1": 4,
    "sim_e2m3": 6,
    "sim_e3m2": 6,
    "sim_e4m3": 8,
    "sim_int4": 4,
    "sim_int8": 8,
    "llm_int8": 8,
    "llm_int8_dgrad": 8,
    "bf16": 16,
}
"""And their bits (those of the forward input)."""
GEMMS = ("fprop", "dgrad", "wgrad")
UNITS = ("operator", "expert", "layer", "block")
BACKENDS = ("auto", "simulated", "scaled_mm", "int_mm", "te")
WEIGHTS = ("online", "beside", "instead")


def _require(condition: bool, key: str, value: object, right: str) -> None:
    if not condition:
        raise UserError(f"{key}={value}: {right}")


def _one_of(key: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, key, value, f"must be one of {', '.join(choices)}")


def _positive(key: str, value: float | None, optional: bool = False) -> None:
    if value is None and optional:
        return
    _require(
        value is not None and value > 0 and math.isfinite(value),
        key,
        value,
        "must be a positive number" + (" or null" if optional else ""),
    )


def _share(key: str, value: float) -> None:
    _require(0.0 <= value <= 1.0, key, value, "must lie between 0 and 1")


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
        _require(
            len(self.window) in (0, 2) and (not self.window or 1 <= self.window[0] <= self.window[1]),
            "model.outlier_channels.window",
            self.window,
            "must be empty, or [first step, last step] from 1",
        )
        _require(self.number >= 0, "model.outlier_channels.number", self.number, "must be 0 or more")
        _positive("model.outlier_channels.gain", self.gain)


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
        _require(self.number >= 0, "model.experts.number", self.number, "must be 0 or more")
        _positive("model.experts.top_k", self.top_k)
        _require(
            0 <= self.balance_coef < math.inf,
            "model.experts.balance_coef",
            self.balance_coef,
            "must be a number, 0 or more",
        )
        _require(
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
        _require(self.rank >= 0, "model.adapter.rank", self.rank, "must be 0 or more")
        _positive("model.adapter.scaling", self.scaling)
        _require(0 <= self.dropout < 1, "model.adapter.dropout", self.dropout, "must lie in [0, 1)")
        _require(len(self.targets) > 0, "model.adapter.targets", self.targets, "needs at least one pattern")


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
        _one_of("model.name", self.name, ("llama", "gpt", "moe", "pretrained"))
        self._check_pretrained()
        for key in ("hidden_size", "intermediate_size", "num_layers", "num_heads"):
            _positive(f"model.{key}", getattr(self, key))
        _require(
            self.hidden_size % self.num_heads == 0,
            "model.hidden_size",
            self.hidden_size,
            f"model.num_heads={self.num_heads} does not divide it",
        )
        _require(
            self.name != "llama" or self.hidden_size // self.num_heads % 2 == 0,
            "model.num_heads",
            self.num_heads,
            "the rotary embedding needs an even width per head",
        )
        if self.num_kv_heads is not None:
            _require(self.name == "llama", "model.num_kv_heads", self.num_kv_heads, "only llama has grouped queries")
            _require(
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
                "model.num_kv_heads",
                self.num_kv_heads,
                f"must divide model.num_heads={self.num_heads}",
            )
        _positive("model.norm_eps", self.norm_eps)
        _positive("model.rope_theta", self.rope_theta)
        _positive("model.init_std", self.init_std)
        _require(self.name == "llama" or not self.tied_head, "model.tied_head", True, "only llama has the choice")
        self._check_experts()

    def _check_pretrained(self) -> None:
        if self.name == "pretrained":
            right = "model=pretrained needs a checkpoint: a folder in Hugging Face's layout, or a name on the hub"
            _require(bool(self.checkpoint), "model.checkpoint", self.checkpoint, right)
            number = self.outlier_channels.number
            _require(number == 0, "model.outlier_channels.number", number, "model=pretrained has its own outliers")
            return
        _require(self.checkpoint is None, "model.checkpoint", self.checkpoint, "belongs to model=pretrained")
        _require(self.adapter.rank == 0, "model.adapter.rank", self.adapter.rank, "belongs to model=pretrained")

    def _check_experts(self) -> None:
        number, top_k = self.experts.number, self.experts.top_k
        if self.name != "moe":
            for key, value in asdict(self.experts).items():
                default = getattr(ExpertsConfig, key)
                _require(value == default, f"model.experts.{key}", value, f"model.name={self.name} has no experts")
            return
        _require(number >= 1, "model.experts.number", number, "moe needs at least one expert")
        _require(top_k <= number, "model.experts.top_k", top_k, f"there are only model.experts.number={number} experts")
        _require(
            top_k > 1 or number == 1 or not self.experts.normalized,
            "model.experts.normalized",
            True,
            "with model.experts.top_k=1 every gate weight would be 1 and the gate could not learn; use false",
        )


@dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and their cache."""

    name: str = "stdlib"
    """stdlib (this Python's own library sources), c4, gsm8k, wikitext2 (hub, or local in its layout), text (local
    files) or instructions (local files of prompts and answers)."""
    path: str | None = None
    """File or folder for data=text and data=instructions; for the others a local copy, or null to read from the hub."""
    text_column: str = "text"
    """Column that holds the text in .jsonl, .json.gz and .parquet files."""
    prompt_column: str = "prompt"
    """Column that holds the prompt; data=instructions."""
    response_column: str = "response"
    """Column that holds the answer; data=instructions."""
    input_column: str | None = None
    """Column of a text that follows the prompt where it is not blank (Alpaca's "input"); data=instructions."""
    answers_only: bool = True
    """Loss on the answers alone; false: on prompts too. Plain text has no prompts."""
    vocab_size: int = 4096
    """Largest vocabulary of the byte-level BPE; a tiny corpus may give a smaller one."""
    tokenizer: str | None = None
    """A tokenizer.json to use instead of training one; for fine-tuning, instead of the checkpoint's: a folder too."""
    tokenizer_bytes: int = 50_000_000
    """Text that the tokenizer is trained on at the most, bytes of UTF-8."""
    max_tokens: int | None = None
    """Training tokens to prepare at the most; null: the whole corpus, for the hub what the run needs."""
    cache_dir: str = "~/.cache/gnmr"
    """Where tokenizers and token files are kept."""

    def __post_init__(self) -> None:
        _one_of("data.name", self.name, ("stdlib", "c4", "text", "gsm8k", "wikitext2", "instructions"))
        _require(
            self.name not in ("text", "instructions") or self.path is not None,
            "data.path",
            self.path,
            f"data={self.name} needs a file or folder",
        )
        _require(
            257 <= self.vocab_size <= 2**31, "data.vocab_size", self.vocab_size, "byte-level BPE needs 257 or more"
        )
        _positive("data.tokenizer_bytes", self.tokenizer_bytes)
        _positive("data.max_tokens", self.max_tokens, optional=True)


@dataclass(frozen=True)
class PathsConfig:
    """The two execution paths of a unit (gnmr/paths)."""

    name: str = "int4_int8"
    """Name of this choice, part of the arm's name."""
    low: str = "int4"
    """The low-cost path: a format of the saved activations, or a recipe (gnmr/paths/recipes.py)."""
    recovery: str | None = "int8"
    """The recovery path, of the same kind; null: a static run, units are monitored and never routed."""
    recipes: dict[str, Any] = field(default_factory=dict)
    """Recipes of one's own, {name: {gemm: {operand: cast}}}, for low and recovery to name."""
    targets: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of the linears to exchange, matched at the end of the name: down_proj, *_proj, layers.0.*."""
    unit: str = "operator"
    """What one decision moves: operator, expert (all its operators), layer (an attention, or an MLP with all its
    experts) or block (5.2); of the operators that targets chooses."""
    site: str = "saved"
    """saved: only what backward keeps is quantized; forward: the forward pass reads the quantized input too."""
    rounding: str = "nearest"
    """nearest (ties to even) or stochastic."""
    recovers: list[str] = field(default_factory=lambda: list(GEMMS))
    """GEMMs that the recovery recipe takes over; without effect where the paths are formats."""
    backend: str = "auto"
    """What runs a recipe (gnmr/paths/fp8.py): simulated, scaled_mm (FP8 hardware), int_mm (integers), te, or auto: a
    real one where device, recipe and widths allow it, else simulated."""
    weights: str = "online"
    """Where the weights' INT8 codes are under llm_int8 (gnmr/paths/int8.py): online (made in every forward pass),
    beside or instead of the 16-bit weights; the latter two for frozen weights."""
    outlier_threshold: float | None = None
    """Input columns with a magnitude from here on stay in 16 bits under llm_int8; published: 6.0; null: off."""
    probe_tokens: int = 1
    """Of this many tokens one is measured where a signal needs the paths' errors (evidence gap_low, mse, ...)."""

    def __post_init__(self) -> None:
        _positive("paths.probe_tokens", self.probe_tokens)
        self._check_recipes()
        recipes = (*RECIPES, *self.recipes)
        choices = tuple(dict.fromkeys((*FORMATS, *recipes)))
        _one_of("paths.low", self.low, choices)
        if self.recovery is not None:
            _one_of("paths.recovery", self.recovery, choices)
            kind = "a format" if self.low in FORMATS else "a recipe"
            alike = any(self.low in known and self.recovery in known for known in (FORMATS, recipes))
            _require(alike, "paths.recovery", self.recovery, f"must be {kind}, as paths.low={self.low} is")
        _require(
            len(self.recovers) > 0 and set(self.recovers) <= set(GEMMS),
            "paths.recovers",
            self.recovers,
            f"must be some of {', '.join(GEMMS)}",
        )
        _require(len(self.targets) > 0, "paths.targets", self.targets, "needs at least one pattern")
        _one_of("paths.unit", self.unit, UNITS)
        _one_of("paths.backend", self.backend, BACKENDS)
        _one_of("paths.weights", self.weights, WEIGHTS)
        _positive("paths.outlier_threshold", self.outlier_threshold, optional=True)
        _one_of("paths.site", self.site, ("saved", "forward"))
        _one_of("paths.rounding", self.rounding, ("nearest", "stochastic"))

    def _check_recipes(self) -> None:
        """UserError for what no recipe can be. Whoever declares one waits for torch, which knows the formats."""
        if not self.recipes:
            return
        from gnmr.paths.recipes import Recipe

        for name, gemms in self.recipes.items():
            try:
                Recipe.of(name, gemms)
            except ValueError as error:
                raise UserError(f"paths.recipes: {error}") from error


STRESSES = ("none", "scale_up", "scale_down", "stale_scale", "noise", "bit_flip", "nan", "inf")


@dataclass(frozen=True)
class StressConfig:
    """Faults in the low-cost path of chosen units at known times (gnmr/paths/faults.py)."""

    kind: str = "none"
    """What fails; none: nothing."""
    magnitude: float = 1.0
    """How much: the factor on the scale, the noise in grid steps; bit_flip, nan and inf have none."""
    share: float = 1.0
    """Part of a unit's rows (tokens) that is hit."""
    targets: list[str] = field(default_factory=lambda: ["*"])
    """Patterns of the units, or of their operators, that may be hit, as paths.targets."""
    windows: list[list[int]] = field(default_factory=list)
    """[[first step, number of steps], ...] in which every target is hit; empty: drawn from rate."""
    rate: float = 0.0
    """Windows per 1,000 unit-steps, drawn for each target by itself; without effect where windows are given."""
    duration: int = 1
    """Steps of a drawn window."""
    history: int = 16
    """Steps that stale_scale looks back."""
    seed: int | None = None
    """Draws the windows and what is random in them; null: training.seed."""

    def __post_init__(self) -> None:
        _one_of("stress.kind", self.kind, STRESSES)
        _positive("stress.magnitude", self.magnitude)
        _share("stress.share", self.share)
        _positive("stress.share", self.share)
        _require(len(self.targets) > 0, "stress.targets", self.targets, "needs at least one pattern")
        for window in self.windows:
            _require(
                len(window) == 2 and min(window) >= 1,
                "stress.windows",
                self.windows,
                "each must be [first step, number of steps], both 1 or more",
            )
        _require(
            self.kind == "none" or len(self.windows) > 0 or self.rate > 0,
            "stress.rate",
            self.rate,
            "give windows, or a rate above 0",
        )
        _require(0 <= self.rate <= 1000, "stress.rate", self.rate, "must lie between 0 and 1000")
        _positive("stress.duration", self.duration)
        _positive("stress.history", self.history)
        _require(self.seed is None or 0 <= self.seed < 2**62, "stress.seed", self.seed, "must lie between 0 and 2^62")


@dataclass(frozen=True)
class SignalConfig:
    """The risk signal (gnmr/controller/signals)."""

    name: str = "gnmr_delta"
    """One of docs/signals.md, or package.module:Class for one of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the signal's constructor takes; its own defaults where nothing is said."""

    def __post_init__(self) -> None:
        _require(bool(self.name), "controller.signal.name", self.name, "give the name, package.module:Class")
        for key in ("alpha", "beta", "delta"):
            _require(
                key not in self.options or ":" in self.name,
                f"controller.signal.options.{key}",
                self.options.get(key),
                f"is controller.{key}",
            )


THRESHOLDS = {"gnmr_delta": ("alpha", "beta"), "gnmr": ("alpha",), "delta_gnmr": ("beta",)}
"""The paper's signals, whose thresholds have keys of their own in conf/controller."""


@dataclass(frozen=True)
class ControllerConfig:
    """Algorithms 1 and 2 (gnmr/controller)."""

    name: str = "gnmr"
    """Name of this choice, part of the arm's name."""
    signal: SignalConfig = field(default_factory=SignalConfig)
    observe: str = "parameters"
    """What a unit's norm is taken of (gnmr/controller/observed.py): parameters (its operators'), adapter (everything
    trainable below its name) or input_grad (the gradient of its output)."""
    routing: str = "thresholded"
    """thresholded (max_o is a cap) or ranked (the max_o largest risks are always taken)."""
    trigger: float = 1.0
    """Multiplies all thresholds of the signal: over where R > trigger. `gnmr replay RUN calibrate=...` finds it."""
    alpha: float | None = 1.5
    """Threshold of GNMR; null switches this signal off. alpha, beta, delta and eps belong to the signals gnmr_delta,
    gnmr and delta_gnmr; the others do not read them."""
    beta: float | None = 1.3
    """Threshold of dGNMR; null switches this signal off."""
    alpha_init: float | None = None
    """Threshold of GNMR during the first init_frac of the steps; null: alpha throughout (section 3, two stages)."""
    beta_init: float | None = None
    """Threshold of dGNMR during the first init_frac of the steps; null: beta throughout."""
    init_frac: float = 0.025
    """Length of the first stage as a share of training.steps; without effect unless an *_init is set."""
    warmup_frac: float = 0.0
    """High-fidelity warm-up: share of training.steps with every unit on the recovery path before control starts."""
    delta: int = 5
    """Window of dGNMR, steps."""
    max_o: int = 4
    """Most units on the recovery path at once, once control has started."""
    t_lock: int = 1
    """Steps for which a triggered unit stays a candidate."""
    hold: int = 1
    """Steps for which a chosen set stays in force; 1: a new choice in every step (section 3)."""
    eps: float = 1e-8
    """Guards the two ratios against division by zero (Eqs. 2 and 3)."""

    def __post_init__(self) -> None:
        for key in ("alpha", "beta", "alpha_init", "beta_init"):
            _positive(f"controller.{key}", getattr(self, key), optional=True)
        _one_of("controller.observe", self.observe, ("parameters", "adapter", "input_grad"))
        _one_of("controller.routing", self.routing, ("thresholded", "ranked"))
        for key in ("delta", "max_o", "t_lock", "hold", "eps", "trigger"):
            _positive(f"controller.{key}", getattr(self, key))
            _require(getattr(self, key) < 2**31, f"controller.{key}", getattr(self, key), "must be less than 2^31")
        for key in ("alpha", "beta"):
            _require(
                getattr(self, key) is not None or getattr(self, f"{key}_init") is None,
                f"controller.{key}_init",
                getattr(self, f"{key}_init"),
                f"needs controller.{key} too",
            )
        _share("controller.init_frac", self.init_frac)
        _share("controller.warmup_frac", self.warmup_frac)

    def unread(self) -> dict[str, str]:
        """Keys that choose nothing as the others stand, and the setting that makes it so."""
        signal = f"signal.name={self.signal.name}"
        read = THRESHOLDS.get(self.signal.name, ())
        found = {key: signal for one in ("alpha", "beta") if one not in read for key in (one, f"{one}_init")}
        if not read:
            found |= {"delta": signal, "eps": signal}
        if self.routing == "ranked":
            found["trigger"] = "routing=ranked"
            if self.signal.options.get("share") is None:  # with a share most risks are 0, and locked units fill up
                found["t_lock"] = "routing=ranked"
        return found


@dataclass(frozen=True)
class TransformConfig:
    """A gradient transform before the optimizer (gnmr/training/transforms)."""

    name: str | None = None
    """See conf/optim/transform; null: none."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the transform's constructor takes; its published defaults where nothing is said."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its schedule and clipping."""

    name: str = "adamw"
    """adamw or scale."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the optimizer's constructor takes besides the keys below; adamw has none."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    lr: float = 1e-3
    """Peak rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_frac: float = 0.1
    """Linear warm-up, share of training.steps."""
    min_lr_frac: float = 0.1
    """Rate at the end of the cosine, share of the peak."""
    clip_norm: float | None = None
    """Largest global gradient norm; null: no clipping. The controller reads the norms before it."""

    def __post_init__(self) -> None:
        _one_of("optim.name", self.name, ("adamw", "scale"))
        if self.name != "adamw" and self.transform.name in ("spam", "stable_spam"):
            raise UserError(
                f"optim.transform.name={self.transform.name}: resets Adam's moments; it needs optim.name=adamw"
            )
        _require(self.name != "adamw" or not self.options, "optim.options", self.options, "adamw has none")
        _positive("optim.lr", self.lr)
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "optim.betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        _positive("optim.eps", self.eps)
        _require(0 <= self.weight_decay < 1e6, "optim.weight_decay", self.weight_decay, "must be a number, 0 or more")
        _share("optim.warmup_frac", self.warmup_frac)
        _share("optim.min_lr_frac", self.min_lr_frac)
        _positive("optim.clip_norm", self.clip_norm, optional=True)


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
    eval_blocks: int = 64
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
    """torch.compile for each block; converted linears run outside the graphs."""
    export_hf: bool = False
    """At the end the model is also written to the run folder's hf/, in Hugging Face's layout (llama and pretrained;
    gnmr[finetune])."""

    def __post_init__(self) -> None:
        for key in (
            "steps",
            "seq_len",
            "batch_size",
            "accumulation",
            "eval_every",
            "eval_blocks",
            "checkpoint_every",
            "keep_checkpoints",
            "max_nonfinite_streak",
        ):
            _positive(f"training.{key}", getattr(self, key))
        _positive("training.threads", self.threads, optional=True)
        _require(0 <= self.seed < 2**62, "training.seed", self.seed, "must lie between 0 and 2^62")
        _require(self.threads is None or self.threads <= 4096, "training.threads", self.threads, "must be 4096 or less")
        _one_of("training.dtype", self.dtype, ("bfloat16", "float32"))
        _one_of("training.device", self.device, ("auto", "cpu", "cuda"))
        _one_of("training.resume", self.resume, ("auto", "never"))

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_size * self.accumulation


TASKS = ("gsm8k", "mmlu", "hellaswag", "wikitext2")


@dataclass(frozen=True)
class ScoresConfig:
    """Language tasks that the model is scored on in training (gnmr/evaluation); changes no number of the run itself."""

    tasks: list[str] = field(default_factory=list)
    """Some of gsm8k, mmlu, hellaswag, wikitext2, at the run's end; empty: none. Needs gnmr[finetune]."""
    every: int | None = None
    """Steps between scorings before that; null: at the end only."""
    limit: int | None = None
    """Items of a task at the most, of mmlu of each subject; null: all."""
    shots: int | None = None
    """Examples in the prompts of gsm8k and mmlu; null: 5."""
    data: str | None = None
    """Folder of local task files (gnmr/evaluation/tasks.py); null: the hub."""
    path: str = "16bit"
    """Path in force while scoring: 16bit, or low: the run's low-cost path."""
    batch_size: int = 8
    """Inputs a pass."""

    def __post_init__(self) -> None:
        for task in self.tasks:
            _one_of("scores.tasks", task, TASKS)
        _one_of("scores.path", self.path, ("16bit", "low"))
        for key in ("every", "limit", "batch_size"):
            _positive(f"scores.{key}", getattr(self, key), optional=key != "batch_size")
        _require(self.shots is None or self.shots >= 0, "scores.shots", self.shots, "must be 0 or more, or null")


@dataclass(frozen=True)
class RecordsConfig:
    """What is written and shown; nothing here changes the numbers of a run."""

    ratios_every: int = 1
    """Steps between rows of ratios.parquet."""
    evidence: list[str] = field(default_factory=list)
    """Evidence that ratios.parquet keeps besides what the signal shows (docs/signals.md): replay and calibration of
    other signals need theirs. Each costs what measuring it costs."""
    monitor: list[str] = field(default_factory=list)
    """Modules outside of the units whose gradient norms steps.jsonl keeps, as paths.targets: what a recipe leaves in 16
    bits is watched and never routed. It costs nothing."""
    live: str = "auto"
    """auto: a live view on a terminal, else plain lines; plain; off."""
    plain_every: int = 20
    """Steps between plain lines."""
    wandb: str = "auto"
    """auto: online where the user is logged in, else offline; online; offline; off."""
    wandb_project: str = "gnmr"
    wandb_every: int = 10
    """Steps between the per-unit ratios sent to W&B (losses go every step)."""

    def __post_init__(self) -> None:
        for key in ("ratios_every", "plain_every", "wandb_every"):
            _positive(f"records.{key}", getattr(self, key))
        _one_of("records.live", self.live, ("auto", "plain", "off"))
        _one_of("records.wandb", self.wandb, ("auto", "online", "offline", "off"))


@dataclass(frozen=True)
class Config:
    """One run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    stress: StressConfig = field(default_factory=StressConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    scores: ScoresConfig = field(default_factory=ScoresConfig)
    experiment_name: str = "custom"
    """First folder of the run's path."""
    scale_name: str = "custom"
    """Name of the scale; the report puts the paper's figures beside runs of the paper's scales."""
    arm: str | None = None
    """Name of the arm; null: from paths.name and controller.name."""
    run_dir: str | None = None
    """Run folder; null: runs_dir/<experiment>/<arm>-<hash>-s<seed>."""
    runs_dir: str = "runs"
    plan: bool = False
    """Print what memory the run will need, and train nothing."""

    def __post_init__(self) -> None:
        _require(
            not self.training.export_hf or self.model.name in ("llama", "pretrained"),
            "training.export_hf",
            True,
            f"Hugging Face's layout is written for llama and pretrained, not for model.name={self.model.name}",
        )
        _require(
            not self.training.export_hf or self.model.adapter.rank == 0,
            "training.export_hf",
            True,
            "with adapters the run leaves adapter/, for peft to put on the checkpoint; use model.adapter.rank=0 for a "
            "whole model",
        )
        _require(
            self.model.checkpoint is None or self.data.tokenizer is None,
            "data.tokenizer",
            self.data.tokenizer,
            "model=pretrained reads its checkpoint's own tokenizer; leave it null",
        )
        if (
            self.training.activation_checkpointing
            and self.paths.site == "forward"
            and self.paths.rounding == "stochastic"
        ):
            raise UserError(
                "training.activation_checkpointing=true: with paths.site=forward and paths.rounding=stochastic the "
                "recomputed forward pass would differ from the first; use paths.rounding=nearest"
            )
        if self.controller.warmup_frac > 0 and self.paths.recovery is None:
            raise UserError(
                f"controller.warmup_frac={self.controller.warmup_frac}: a high-fidelity warm-up needs paths.recovery"
            )

    @property
    def arm_name(self) -> str:
        if self.arm is not None:
            return self.arm
        parts = [self.paths.name]
        if self.paths.recovery is not None:
            signal = self.controller.signal.name.rpartition(":")[2]
            parts.append(self.controller.name if signal == "gnmr_delta" else signal)
            parts += ["ranked"] if self.controller.routing == "ranked" else []
        parts += [self.optim.name] if self.optim.name != "adamw" else []
        parts += [self.optim.transform.name] if self.optim.transform.name else []
        return "-".join(parts)


# Keys that say where a run is kept, how it is watched or how it is continued. They do not change its numbers, so they
# stay out of the hash (records.ratios_every stays in: it decides what is there to replay). The seed stands beside the
# hash in the folder's name.
_OUTSIDE_THE_HASH = (
    "plan",
    "run_dir",
    "runs_dir",
    "data.cache_dir",
    "training.seed",
    "training.resume",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.export_hf",
    "records.live",
    "records.plain_every",
    "records.wandb",
    "records.wandb_project",
    "records.wandb_every",
    "records.monitor",
    *(f"scores.{key.name}" for key in fields(ScoresConfig)),
)


def schema() -> DictConfig:
    """The empty schema for Hydra: typed (so an unknown key is refused) and writable.

    OmegaConf makes frozen dataclasses read-only, which would forbid every override; the objects that `load` returns
    are frozen all the same.
    """
    node = OmegaConf.structured(Config)

    def unlock(config: DictConfig) -> None:
        OmegaConf.set_readonly(config, None)
        for key in config:
            child = config._get_node(key)
            if isinstance(child, DictConfig):
                unlock(child)

    unlock(node)
    OmegaConf.set_struct(node.paths.recipes, False)  # its keys are the user's: they need no +
    return node


def load(composed: DictConfig | dict[str, Any]) -> Config:
    """Strictly typed, frozen `Config` of a composed (or saved) tree.

    Raises `UserError` for an unknown key, a value of the wrong type or one that makes no sense.
    """
    try:
        # As plain containers: a key that `+` forced into a typed node would otherwise pass as the node's own.
        plain = OmegaConf.to_container(OmegaConf.create(composed), resolve=True, throw_on_missing=True)
        config = OmegaConf.to_object(OmegaConf.merge(schema(), plain))
    except OmegaConfBaseException as error:
        raise UserError(one_line(error)) from error
    assert isinstance(config, Config)
    return config


def read(path: Path) -> Config:
    """The config that a run saved. UserError, naming the file, for anything that cannot be one."""
    try:
        return load(OmegaConf.load(path))  # type: ignore[arg-type]
    except Exception as error:
        raise UserError(f"{path}: cannot be read as a run's config ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    """The message of a Hydra or OmegaConf error without its multi-line details, naming the full key."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    full_key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), None)
    text = lines[0] if lines else type(error).__name__
    return f"{text} (key {full_key})" if full_key and full_key not in text else text


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists are leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def identity(config: Config) -> dict[str, Any]:
    """The flat keys that decide a run's numbers, the seed aside."""
    return {key: value for key, value in flatten(to_dict(config)).items() if key not in _OUTSIDE_THE_HASH}


def config_hash(config: Config) -> str:
    """Eight hex digits over `identity`: equal for two seeds of one arm, different for two arms."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()[:8]
