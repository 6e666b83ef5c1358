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
from gnmr.lab.config import Config, flatten, from_words, load, one_line, schema
from gnmr.lab.config.base_run import covers, typed, with_base
from gnmr.lab.config.data import DataConfig
from gnmr.options import guess, nearest
from gnmr.plan.pin_plan import PATHS, read_plan


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
    found = {}
    for name in map(str, names or tree.arms):
        own = deepcopy(tree)
        own.arm = name
        found[name] = load_composed(own, [*overrides, f"arm={name}"])
    return found


def composed_tree(overrides: list[str], hydra: bool = True) -> Any:
    """Compose these words with Hydra. With `hydra`, the result contains Hydra's own settings."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra_compose("config", overrides, return_hydra_config=hydra)


def load_composed(composed: DictConfig, words: Sequence[str]) -> Config:
    """Return the config of a composed tree, after applying the sweep's arm, the plan and a fork's base."""
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
        given = OmegaConf.to_container(from_words(shlex.split(arms[arm] or "")))
        for key, value in flatten(given).items():  # type: ignore[arg-type]
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
    found = read_plan(str(path))
    said = [f"precision.{key}" for key in PATHS]
    for word in words:
        (key,) = typed([word])
        if key == "precision" or covers(said, key):
            raise UserError(f"{word}: plan={path} says which precision; leave one of them out")
    with open_dict(composed.precision):
        for key, value in found.paths().items():
            composed.precision[key] = value
    controller = composed.controller
    with open_dict(controller):
        controller.options.update(found.threshold(controller.signal, controller.options))


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
        known = sorted({*choices[1].split(), *choices_of(missing[1])})
        close = guess(missing[2], known)
        return f"{missing[1]}={missing[2]}: use one of {', '.join(known)}{f'; did you mean {close}?' if close else ''}"
    return line


def choices_of(group: str) -> list[str]:
    """Return the choices of a group of `conf/`, including those in subfolders (`paper/table1`)."""
    folder = conf_dir() / group
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))
