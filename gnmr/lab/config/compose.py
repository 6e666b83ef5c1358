"""Compose the config from command-line words with Hydra, and report errors in one line with the remedy."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gnmr.errors import UserError
from gnmr.lab.config import Config, flatten, from_words, load, one_line, read, schema, to_dict
from gnmr.lab.config.data import DataConfig
from gnmr.options import guess, nearest
from gnmr.plan.pin_plan import PATHS as OF_A_PLAN
from gnmr.plan.pin_plan import read_plan
from gnmr.records.untrusted import Damaged, exists, text

SHIPPED = "shipped"
"""The `base` that is part of the package. A folder with this name is ./shipped."""
_BATCH = ("training.seq_len", "training.batch_size", "training.accumulation", "training.dtype")
FROM_BASE = ("model", "data", "optim", *_BATCH)
"""Keys in which a fork and its base agree: model, data, optimizer with its schedule, and the batch."""
OF_THE_ARM = ("optim.transform", "optim.clip_norm")
"""Exceptions to `FROM_BASE`, which an arm chooses."""
PATHS = ("data.path", "data.tokenizer", "model.checkpoint")
"""Keys that are never taken from a base, because they name files of this machine and the base may be untrusted."""


def conf_dir() -> Path:
    """Return the YAML tree: the packaged copy in an installed wheel, else the checkout's `conf/`."""
    package = Path(__file__).parents[2]
    return next(
        (d for d in (package / "conf", package.parent / "conf") if (d / "config.yaml").exists()), package / "conf"
    )


@cache  # a quarter of the time of a composition
def register() -> None:
    """Register the schema of conf/config.yaml, the model sizes, and the resolver `${names:arms}` with Hydra."""
    from hydra.core.config_store import ConfigStore

    for name, size in OmegaConf.load(conf_dir() / "sizes.yaml").items():
        ConfigStore.instance().store(group="model", name=str(name), node=size, package="_global_")
    node = deepcopy(schema())
    with open_dict(node):
        node.arms = {}
    OmegaConf.set_struct(node.arms, False)
    ConfigStore.instance().store(name="gnmr_schema", node=node)
    OmegaConf.register_new_resolver("names", _names, replace=True)


def _names(key: str, *, _root_: DictConfig) -> str:
    return ",".join(map(str, _root_[key]))


def compose(overrides: list[str]) -> Config:
    """Return the config of `gnmr train <overrides>` without running it (for examples and tests)."""
    return load_composed(composed_tree(overrides, hydra=False), overrides)


def compose_arms(overrides: list[str], names: Iterable[str] | None = None) -> dict[str, Config]:
    """Return the config of each of these arms of a sweep, by default of all its arms, and compose the sweep once."""
    tree = composed_tree(overrides, hydra=False)
    configs = {}
    for name in map(str, names or tree.arms):
        of_arm = deepcopy(tree)
        of_arm.arm = name
        configs[name] = load_composed(of_arm, [*overrides, f"arm={name}"])
    return configs


def composed_tree(overrides: list[str], hydra: bool = True) -> Any:
    """Compose these words with Hydra. With `hydra`, the result contains Hydra's own settings."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra_compose("config", overrides, return_hydra_config=hydra)


def load_composed(composed: DictConfig, words: Sequence[str]) -> Config:
    """Return the config of a composed tree, after applying the sweep's arm, the plan and a fork's base.

    Args:
        composed: The tree of Hydra, which is changed.
        words: The command-line words, which take precedence over arm and base.

    Raises:
        UserError: If a value is invalid, or if words contradict the plan.
    """
    apply_arm(composed, words)
    with_own_text(composed, words)
    with_plan(composed, words)
    with_base(composed, words)
    return load(composed)


def apply_arm(composed: DictConfig, words: Sequence[str]) -> None:
    """Apply the words of the chosen arm to the composed config. Command-line words take precedence.

    An arm is several keys that change together. A sweep names its arms under `arms`, and `arm=NAME` chooses one. Raises
    UserError for an unknown arm, and for words of an arm that are invalid.
    """
    arms, arm = composed.arms, composed.arm
    with open_dict(composed):
        del composed["arms"]
    if not arms or arm is None:
        return
    arms = {str(name): of for name, of in arms.items()}  # YAML reads some names as numbers
    if arm not in arms:
        raise UserError(f"arm={arm}: is not an arm of this sweep{nearest(str(arm), arms)}")
    try:
        tree_of_arm = OmegaConf.to_container(from_words(shlex.split(arms[arm] or "")))
        for key, value in flatten(tree_of_arm).items():  # type: ignore[arg-type]
            if not covers(typed(words), key):
                OmegaConf.update(composed, key, value, force_add=key.startswith("controller.options."))
    except OmegaConfBaseException as error:
        raise UserError(f"arms.{arm}={arms[arm]}: {one_line(error)}") from error
    except (UserError, ValueError) as error:
        raise UserError(f"arms.{arm}={arms[arm]}: {error}") from error
    composed.arm = None


def with_own_text(composed: DictConfig, words: Sequence[str]) -> None:
    """Set data.name=text if the words name a path and no corpus, and the default corpus would not read it."""
    chosen, data = typed(words), composed.data
    if "data.path" not in chosen or chosen & {"data", "data.name"} or composed.get("base") is not None:
        return
    if data.path is not None and data.name == DataConfig.name:
        data.name = "text"


def with_plan(composed: DictConfig, words: Sequence[str]) -> None:
    """Apply the precision of `plan=plan.json` to the composed config, and its threshold if the signal is a price.

    Raises UserError for a plan that cannot be read, and for command-line words that set what the plan sets.
    """
    if (path := composed.get("plan")) is None:
        return
    plan = read_plan(str(path))
    said = [f"precision.{key}" for key in OF_A_PLAN]
    for word in words:
        (key,) = typed([word])
        if key == "precision" or covers(said, key):
            raise UserError(f"{word}: plan={path} says which precision; leave one of them out")
    with open_dict(composed.precision):
        for key, value in plan.paths().items():
            composed.precision[key] = value
    controller = composed.controller
    with open_dict(controller):
        controller.options.update(plan.threshold(controller.signal, controller.options))


def mistake(error: Exception) -> str | None:
    """Return one line for an error that Hydra raised while composing or creating a folder, or None for other errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals["__name__"]) for frame in frames]
    modules = [name for name in names if name.partition(".")[0] not in ("pathlib", "os")]  # 3.13 has pathlib._local
    by_hydra = modules[-1].startswith(("hydra.", "yaml.")) and frames[-1].f_code.co_name != "return_value"  # not a job
    if isinstance(error, yaml.MarkedYAMLError) and by_hydra:
        mark = error.problem_mark or error.context_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}" if mark else one_line(error)
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # Hydra's missing file has both types
        sweeps = any(frame.f_code.co_name == "sweep" for frame in frames)
        saved = modules[-1].startswith("omegaconf.") and frames[-1].f_code.co_name == "save"
        if saved or (by_hydra and sweeps):  # a sweep's folder and its multirun.yaml
            return f"{error.filename}: cannot be written ({error.strerror}); choose another runs_dir"
        return f"{error.filename}: {error.strerror}" if by_hydra else None
    if not isinstance(error, HydraException | OmegaConfBaseException) and not (by_hydra and type(error) is ValueError):
        return None
    line = one_line(error)
    if ambiguous := re.match(r"Ambiguous value for argument '([^=]+)=(.+)'$", line):
        key, values = ambiguous.groups()
        return f"{key}={values}: several values are a sweep's: add -m; a list is {key}=[{values}]"
    if isinstance(error, OverrideParseException):
        right = "must be key=value or group=choice, with quotes around a value that has other letters: 'key=\"value\"'"
        return f"Error parsing override '{error.override}': {right}"
    choices = re.search(r"Available options in .*:\n((?:\t.*\n?)+)", str(error))
    missing = re.search(r"Could not find '([^/']+)/(.+?)'", line)
    if choices and missing:
        group, word = missing.groups()
        names = sorted({*choices[1].split(), *choices_of(group)})
        close = guess(word, names)
        return f"{group}={word}: use one of {', '.join(names)}{f'; did you mean {close}?' if close else ''}"
    return line


def choices_of(group: str) -> list[str]:
    """Return the choices of a group of `conf/`, including those in subfolders (`paper/table1`)."""
    folder = conf_dir() / group
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))


# ---- the base of a fork ----


def agreed(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a flat config in which a fork and its base agree. The schedule's length is a number."""
    settings = {key: value for key, value in flat.items() if covers(FROM_BASE, key) and not covers(OF_THE_ARM, key)}
    if settings.get("optim.schedule_steps") is None:
        settings["optim.schedule_steps"] = flat["training.steps"]
    return settings


def typed(words: Sequence[str]) -> set[str]:
    """Return the keys and groups that these command-line words set."""
    return {word.lstrip("+~").partition("=")[0] for word in words}


def covers(names: Iterable[str], key: str) -> bool:
    """Return True if the key is one of these keys or lies in one of these groups."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def with_base(composed: DictConfig, words: Sequence[str]) -> None:
    """Merge the settings of a fork's base into the composed config, except those that command-line words set.

    A group that a word chooses (`model=gpt`) is left to the user as a whole. Raises UserError for an invalid base, and
    if the base names a file that the user has not named.
    """
    if (base := composed.get("base")) is None:
        return
    of_base = flatten(to_dict(read_base(str(base))))
    for key in PATHS:
        if of_base[key] is not None and OmegaConf.select(composed, key) is None:
            raise UserError(f"{key}=null: the base {base} has {text(of_base[key])}, which you have to give yourself")
    named = {*PATHS, *typed(words)}
    for key, value in (agreed(of_base) | {"scale_name": of_base["scale_name"]}).items():
        if not covers(named, key):
            OmegaConf.update(composed, key, value)


def place_of_base(base: str) -> tuple[Path, Path]:
    """Return (run folder, folder with its checkpoints or the named one). Raises UserError for an invalid base."""
    folder = Path(__file__).parents[1] / "bases" / SHIPPED if base == SHIPPED else Path(base).expanduser()
    step = re.fullmatch(r"step-\d{8}", folder.name) and folder.parent.name == "checkpoints"
    run, checkpoints = (folder.parents[1], folder) if step else (folder, folder / "checkpoints")
    if not exists(run / "config.yaml") or not exists(checkpoints):
        lacking = "config.yaml" if not exists(run / "config.yaml") else checkpoints.relative_to(run)
        raise UserError(f"base={base}: is not a run with a checkpoint ({lacking} is missing there)")
    return run, checkpoints


def read_base(base: str) -> Config:
    """Return the config of a fork's base. Raises UserError if the base is invalid or cannot be forked."""
    run, _ = place_of_base(base)
    try:
        config = read(run / "config.yaml")
    except Damaged as error:
        raise UserError(f"base={base}: {error}") from error
    if config.base is not None:
        raise UserError(f"base={base}: is a fork itself; fork its base, {config.base}")
    if config.model.outlier_channels.window:
        raise UserError(f"base={base}: a model with a window of outliers cannot be forked")
    return config
