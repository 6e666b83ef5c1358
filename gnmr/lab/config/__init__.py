"""The schema of `conf/`: one frozen dataclass per section, merged strictly.

Hydra composes the YAML tree. These files define the keys, their types, and the valid values. An unknown key fails while
Hydra composes, because the schema is in struct mode; so does `+key=1`. An invalid value fails in `__post_init__`,
before anything is created on disk. torch is imported here only for recipes that a config declares.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gnmr.errors import UserError, as_user_error, printable
from gnmr.lab.config.controller import ControllerConfig
from gnmr.lab.config.data import DataConfig
from gnmr.lab.config.model import LLAMAS, ModelConfig
from gnmr.lab.config.precision import FaultsConfig, PrecisionConfig
from gnmr.lab.config.records import RecordsConfig, ScoresConfig
from gnmr.lab.config.training import CompressionConfig, ForkConfig, OptimConfig, TrainingConfig
from gnmr.options import fields, guess, nearest, one_of, require
from gnmr.records.untrusted import MAX_CONFIG, MAX_DEPTH, Damaged, bounded, content, reading

_LONGEST_ARM = 200
"""Largest length of an arm's name in bytes. A folder's name also contains the hash and the seed."""


def _has_control_characters(text: str) -> bool:
    """Return True for line breaks, NUL and the like, and for bytes that are not UTF-8 (lone surrogates)."""
    return any(category(letter) in ("Cc", "Cs") for letter in text)


def _check_folder_name(key: str, value: str | None) -> None:
    """Raise ValueError unless the text, or None, can be part of a folder's name."""
    if value is not None:
        sound = value and value[0] != "." and not {*value} & {"/", "\\"} and not _has_control_characters(value)
        require(sound, key, printable(value), "is part of a folder's name: not empty, no leading dot, no slash")


def _check_path(key: str, value: str | None) -> None:
    """Raise ValueError unless the text, or None, can be the path of a file or folder."""
    if value is None:
        return
    sound = value.strip() and not _has_control_characters(value)
    require(sound, key, printable(value), "must be a path without control characters")
    try:
        Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{key}={value}: {error}") from error


@dataclass(frozen=True)
class Config:
    """The config of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    base: str | None = None
    """The run to fork: a folder with a checkpoint, RUN or RUN/checkpoints/step-..., or `shipped` (part of the package).
    If null, the run begins with new weights."""
    fork: ForkConfig = field(default_factory=ForkConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    scores: ScoresConfig = field(default_factory=ScoresConfig)
    experiment_name: str = "custom"
    """First folder of the run's path."""
    scale_name: str = "custom"
    """Name of the scale, within which the report compares runs."""
    arm: str | None = None
    """Name of the arm. If null, it is derived from precision.name and controller.name."""
    run_dir: str | None = None
    """Run folder. If null, it is `runs_dir/<experiment>/<arm>-<hash>-s<seed>`."""
    runs_dir: str = "runs"
    plan: str | None = None
    """plan.json of `gnmr diagnose` (gnmr/plan/pin_plan.py), which sets low, recovery, recipes, targets and pins."""
    parallel: str = "none"
    """Data parallelism: none (one process), ddp, fsdp (FSDP2) or hsdp (docs/distributed.md)."""
    compression: CompressionConfig = field(default_factory=CompressionConfig)

    @as_user_error()
    def __post_init__(self) -> None:
        model, training, precision = self.model, self.training, self.precision
        one_of(("none", "ddp", "fsdp", "hsdp"), parallel=self.parallel)
        exports = training.export_hf
        right = f"Hugging Face's layout is written for llama and pretrained, not for model.name={model.name}"
        require(not exports or model.name in (*LLAMAS, "pretrained"), "training.export_hf", exports, right)
        right = "a run with adapters leaves adapter/ for peft; use model.adapter.rank=0 for a whole model"
        require(not exports or model.adapter.rank == 0, "training.export_hf", exports, right)
        right = "model=pretrained reads its checkpoint's own tokenizer; leave it null"
        require(model.checkpoint is None or self.data.tokenizer is None, "data.tokenizer", self.data.tokenizer, right)
        drawn = precision.site == "forward" and precision.rounding == "stochastic"
        right = "a recomputed forward pass would draw other roundings; use precision.rounding=nearest"
        sound = not (training.activation_checkpointing and drawn)
        require(sound, "training.activation_checkpointing", "true", right)
        names = ("experiment_name", "scale_name", "arm", "precision.name", "controller.name", "optim.transform.name")
        for key, value in fields(self, *names).items():
            _check_folder_name(key, value)
        places = ("base", "plan", "run_dir", "runs_dir", "model.checkpoint", "data.path", "data.tokenizer")
        for key, value in fields(self, *places, "scores.data").items():
            _check_path(key, value)
        length = len(self.arm_name.encode())
        require(length <= _LONGEST_ARM, "arm", f"{self.arm_name[:20]}...", f"has {length} bytes; use {_LONGEST_ARM}")
        self._check_fork()
        tokens = self.total_steps * training.tokens_per_step
        require(tokens < 2**63, "training.steps", training.steps, "makes more tokens than 2^63 with this batch")
        warmup = self.controller.warmup_frac
        right = "a high-fidelity warm-up needs precision.recovery; 0 in a static run"
        routed = precision.recovery is not None or self.compression.routes
        require(warmup == 0 or routed, "controller.warmup_frac", warmup, right)
        self._check_compression()

    def _check_compression(self) -> None:
        compression, steps = self.compression, self.total_steps
        if not compression.routes:
            return
        dense = compression.dense_steps
        require(dense < steps, "compression.dense_steps", dense, f"the run has {steps} steps: nothing is compressed")
        right = f"compression.name={compression.name}: the controller routes gradients; use precision.recovery=null"
        require(self.precision.recovery is None, "precision.recovery", self.precision.recovery, right)
        observe, name = self.controller.observe, self.model.name
        require(observe == "parameters", "controller.observe", observe, "gradients that are sent are parameters'")
        require(name != "moe", "model.name", name, "an expert without tokens has no gradient to send compressed")
        right = "the steps of a fork's healing send gradients whole; use fork.heal=0 with compression"
        require(self.fork.heal == 0, "fork.heal", self.fork.heal, right)

    def _check_fork(self) -> None:
        if self.base is None:
            require(self.fork.heal == 0, "fork.heal", self.fork.heal, "needs base=RUN, the run to be forked")
            return
        window = self.model.outlier_channels.window
        require(not window, "model.outlier_channels.window", window, "a fork has none: its steps count anew")

    @property
    def total_steps(self) -> int:
        """Steps of the run: training.steps, plus the healing steps of a fork."""
        return self.training.steps + self.fork.heal

    @property
    def arm_name(self) -> str:
        """The arm's name in run folders and reports: `arm`, or the names of paths, controller and other differences."""
        if self.arm is not None:
            return self.arm
        words = [str(self.precision.name)]
        words += [self.compression.arm] if self.compression.routes else []
        words += [str(self.controller.name)] if self.precision.recovery is not None or self.compression.routes else []
        words += [self.optim.name] if self.optim.name != "adamw" else []
        words += [self.optim.transform.name] if self.optim.transform.name else []
        return "-".join(words)


# These keys say where a run is kept, how it is watched or how it is continued. They do not change its numbers, so the
# hash excludes them. It includes records.units_every, which determines what can be replayed. The folder's name contains
# the seed next to the hash.
_OUTSIDE_THE_HASH = (
    "plan",  # precision.* contains the plan's content
    "data.columns",  # `_DERIVED` contains them
    "parallel",
    "run_dir",
    "runs_dir",
    "training.seed",
    "fork.order",  # of earlier versions, as the next one
    "training.keep_checkpoints",
    "training.checkpoint_every",
    "training.export_hf",
    "records.live",
    "records.wandb",
    "records.monitor",
    "records.verdicts",
    *(f"scores.{key}" for key in ScoresConfig.__dataclass_fields__),
)


# Earlier versions had keys for these numbers. A run with another value cannot be continued or forked.
_HASHED_CONSTANTS = {
    "model.adapter.targets": ["*_proj"],
    "model.experts.routing_seed": None,
    "controller.beta_init": None,
    "controller.cost": "gemm",
    "controller.init_frac": 0.025,
    "training.max_nonfinite_streak": 10,
}
"""Those that are part of the hash, so that the folders of runs keep their names."""
_CONSTANTS = _HASHED_CONSTANTS | {
    "model.adapter.scaling": 16,
    "model.experts.balance_coef": 0.01,
    "model.init_std": 0.02,
    "controller.eps": 1e-8,
    "optim.eps": 1e-8,
    "optim.options.momentum": 0.9,
    "faults.history": 16,
    "faults.seed": None,
    "compression.targets": ["*_proj"],
}
_IN_PYTHON_ONLY = ("group", "outlier_threshold", "probe_tokens", "price_tokens")
"""Fields of `PathSpec` that are not keys of `gnmr train`. Its runs have their defaults."""
_COLUMNS = ("data.text_column", "data.prompt_column", "data.input_column", "data.response_column")
_DERIVED = ("faults.rows_frac", "faults.duration", *_COLUMNS, *(f"precision.{key}" for key in _IN_PYTHON_ONLY))
"""Keys of earlier versions whose values now follow from other keys, or are defaults. They are part of the hash too."""


@cache  # building the schema takes as long as the rest of `load`
def schema() -> DictConfig:
    """Return the empty schema for Hydra, which is typed (so it refuses unknown keys) and writable. Do not modify it.

    OmegaConf makes frozen dataclasses read-only, which would forbid every override. The objects that `load` returns are
    frozen nevertheless.
    """
    node = OmegaConf.structured(Config)

    def unlock(config: DictConfig) -> None:
        OmegaConf.set_readonly(config, None)
        for key in config:
            child = config._get_node(key)
            if isinstance(child, DictConfig):
                unlock(child)

    unlock(node)
    for free in (
        node.precision.recipes,
        node.precision.pins,
        node.precision.times,
        node.controller.options,
        node.optim.transform.options,
    ):
        OmegaConf.set_struct(free, False)  # these are checked where they are used, and their keys need no +
    node.precision.name = node.controller.name = None  # derived from the chosen values, which may not be the defaults
    node.faults.magnitude = node.faults.rate = None  # the defaults depend on the kind
    with open_dict(node.precision):
        for key in _IN_PYTHON_ONLY:
            del node.precision[key]
    return node


def load(composed: DictConfig | dict[str, Any]) -> Config:
    """Return the strictly typed, frozen `Config` of a tree.

    Args:
        composed: The tree of Hydra, or nested mappings of keys and values. Missing keys have their defaults.

    Returns:
        The config, in which all interpolations are resolved.

    Raises:
        UserError: For an unknown key, a value of the wrong type or an invalid value.
    """
    try:
        # Convert to plain containers, because a key that `+` forced into a typed node would otherwise be accepted.
        plain = OmegaConf.to_container(OmegaConf.create(composed), resolve=True, throw_on_missing=True)
        config = OmegaConf.to_object(OmegaConf.merge(schema(), plain))
    except OmegaConfBaseException as error:
        raise UserError(one_line(error)) from error
    assert isinstance(config, Config)
    return config


def read(path: Path) -> Config:
    """Return the config that a run saved.

    Args:
        path: config.yaml of a run folder. Keys that only earlier versions had are ignored, unless their values would
            change the numbers of this version.

    Raises:
        Damaged: If the file is invalid. The message begins with its path.
    """
    try:
        tree = read_tree(path)
        if tree.get("own_loop") is True:  # gnmr/attachment/record.py
            raise Damaged(
                f"{path.parent}: was recorded by attach() in a loop of its own, and is not a run of gnmr train"
            )
        return load_saved(tree)
    except Damaged:
        raise
    except Exception as error:
        raise Damaged(f"{path}: cannot be read as a run's config ({one_line(error)})") from error


def read_tree(path: Path) -> dict[str, Any]:
    """Return config.yaml as it is written. Nothing in it is resolved, imported or looked up.

    Raises `Damaged` for anything but a mapping of plain values. A saved config is resolved, so an interpolation (`${`)
    does not come from the run, and neither do aliases and tags.
    """
    with reading(path):
        tree = _plain_yaml(content(path, MAX_CONFIG))
    if not isinstance(tree, dict):
        raise Damaged(f"{path}: cannot be read (not a config: a mapping was expected)")
    return tree


def _plain_yaml(text: bytes) -> Any:
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("YAML aliases are not supported")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise ValueError(f"{event.value[:60]}: a saved config has no interpolations")
    return bounded(_with_texts_as_keys(yaml.load(text, Loader=loader)))


def _with_texts_as_keys(tree: Any) -> Any:
    """Return the tree with keys that are text, because YAML reads the widths of precision.times as numbers."""
    if isinstance(tree, dict):
        return {str(key): _with_texts_as_keys(value) for key, value in tree.items()}
    return [_with_texts_as_keys(value) for value in tree] if isinstance(tree, list) else tree


def load_saved(tree: dict[str, Any]) -> Config:
    """Return the config of a saved tree, without the keys of earlier versions that this version does not have.

    Args:
        tree: the content of a run's config.yaml.

    Returns:
        The config.

    Raises:
        UserError: a value is invalid.
        ValueError: a key of an earlier version had another value than the one that this version always uses.
    """

    def pruned(saved: Any, section: Any) -> Any:
        if not is_dataclass(section) or not isinstance(saved, dict):
            return saved
        names = {*section.__dataclass_fields__}
        if isinstance(section, PrecisionConfig):
            names -= {*_IN_PYTHON_ONLY}
        return {key: pruned(value, getattr(section, key)) for key, value in saved.items() if key in names}

    config, saved = load(pruned(tree, Config())), flatten(tree)
    constants = _CONSTANTS | fields(config, "model.norm_eps", "model.rope_theta", *_DERIVED)
    for key, constant in constants.items():
        if saved.get(key, constant) != constant:
            raise ValueError(f"{key}={saved[key]}: this version always uses {constant}")
    return config


def from_words(words: Sequence[str]) -> DictConfig:
    """Return key=value words as a tree. Raises UserError, which names the word, for invalid YAML."""
    for word in words:
        try:
            OmegaConf.from_dotlist([word])
        except (OmegaConfBaseException, yaml.YAMLError, RecursionError) as error:
            raise UserError(f"{word}: {one_line(error)}") from error
    return OmegaConf.from_dotlist(list(words))


def one_line(error: Exception) -> str:
    """Return the message of a Hydra or OmegaConf error in one line, with the full key.

    For an unknown key, the message suggests the most similar key.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0]
    if text.endswith("raised while composing config:") and len(lines) > 1:
        text = f"{text.partition(': ')[0]}: {lines[1]}"
    full_key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), None)
    if full_key and full_key not in text:
        text = f"{text} (key {full_key})"
    if percent := re.search(r"Value '(\d+\.?\d*)%' of type 'str' could not be converted to Float", text):
        text = f"{text}; write {float(percent[1]) / 100:g}"
    # Under a debugger or a tracer, OmegaConf sets an error as its own cause.
    if isinstance(error.__cause__, OmegaConfBaseException) and error.__cause__ is not error:
        return f"{text.rstrip('.')}: {one_line(error.__cause__)}"
    inner = error if hasattr(error, "parent_node") else error.__context__
    parent, key = getattr(inner, "parent_node", None), getattr(inner, "key", None)
    if not isinstance(parent, DictConfig) or not isinstance(key, str) or key in parent.keys():  # noqa: SIM118 (`in` is false of ???)
        return text
    everywhere = list(flatten(OmegaConf.to_container(schema())))  # type: ignore[arg-type]
    siblings = [str(name) for name in parent if name != "hydra"]
    leaf = guess(key, [*siblings, *(full_name.rpartition(".")[2] for full_name in everywhere)])
    if leaf is None or leaf in siblings:
        return f"{text}{nearest(key, siblings)}"
    return f"{text}: did you mean {next(full_name for full_name in everywhere if full_name.endswith(f'.{leaf}'))}?"


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested plain dictionaries, for YAML."""
    tree = asdict(config)
    for key in _IN_PYTHON_ONLY:
        del tree["precision"][key]
    return tree


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {"a": {"b": 1}} into {"a.b": 1}. Lists are leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def identity(config: Config) -> dict[str, Any]:
    """Return the flat keys that determine a run's numbers, except the seed."""
    return decisive(_HASHED_CONSTANTS | fields(config, *_DERIVED) | flatten(to_dict(config)))


def decisive(flat: dict[str, Any]) -> dict[str, Any]:
    """Return those of a config's flat keys that determine a run's numbers, except the seed."""
    return {key: value for key, value in flat.items() if key not in _OUTSIDE_THE_HASH}


def config_hash(config: Config) -> str:
    """Return eight hex digits over `identity`: equal for two seeds of an arm, different for two arms."""
    return hash_of(identity(config))


def hash_of(settings: dict[str, Any]) -> str:
    """Return eight hex digits over the flat keys that determine a run's numbers."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
