"""The config from words of the command line, by Hydra; and its errors in one line that says what would be right."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gnmr.doctor.plan import PATHS, read_plan
from gnmr.errors import UserError, guess
from gnmr.lab.config import Config, load, meant, one_line, schema
from gnmr.lab.config.base import with_base
from gnmr.lab.config.overrides import as_given, as_text, is_text


def conf_dir() -> Path:
    """The YAML tree: the packaged copy in an installed wheel, else the checkout's `conf/`."""
    package = Path(__file__).parents[2]
    return next(
        (d for d in (package / "conf", package.parent / "conf") if (d / "config.yaml").exists()), package / "conf"
    )


def register() -> None:
    """Tells Hydra the schema that conf/config.yaml names."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="gnmr_schema", node=schema())


def compose(overrides: list[str]) -> Config:
    """The config of `gnmr train <overrides>` without running it (for benchmarks, examples and tests)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        overrides = as_given(overrides)
        return load_composed(hydra_compose("config", overrides, return_hydra_config=True))


def load_composed(composed: DictConfig) -> Config:
    """`gnmr.lab.config.load` of what Hydra composed, its own settings included: ${hydra:...} refers to them."""
    from hydra.core.hydra_config import HydraConfig

    current = HydraConfig.instance()
    before = current.cfg
    with_plan(composed, composed.hydra.overrides.task)
    with_base(composed, composed.hydra.overrides.task)
    try:
        current.set_config(composed)
        return load(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
    finally:
        current.cfg = before


def with_plan(composed: DictConfig, words: Sequence[str]) -> None:
    """Puts the paths of `plan=plan.json` into what Hydra composed of these words of the command line, and its trigger
    where the controller's signal is a price.

    UserError for a plan that cannot be read, and for words that say what a plan says.
    """
    if (path := composed.get("plan")) is None:
        return
    found = read_plan(str(path))
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key == "preset" or (key.startswith("precision.") and key.split(".")[1] in PATHS):
            raise UserError(f"{word}: plan={path} says which paths; leave one of them out")
    with open_dict(composed.precision):
        for key, value in found.paths().items():
            composed.precision[key] = value
    controller = composed.controller
    with open_dict(controller):
        controller.options.update(found.threshold(controller.signal, controller.options))


def mistake(error: Exception, words: Sequence[str]) -> str | None:
    """One line for an error in composing these words of the command line; None for any other error."""
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # Hydra's missing file is both
        return _unwritable(error)
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    by_hydra = frame.f_globals["__name__"].startswith("hydra.") and frame.f_code.co_name != "return_value"  # a job's
    if not isinstance(error, (HydraException, OmegaConfBaseException)) and not (by_hydra and type(error) is ValueError):
        return None
    line = one_line(error)
    if by_hydra and type(error) is ValueError and (called := [word for word in words if "range(" in word]):
        line = f"{called[0]}: {line}"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        line = f"{line.rstrip('.')}: {one_line(cause)}"
    if (unlike := re.match(_UNLIKE, line)) and (right := _KINDS.get(unlike[2])):
        return f"{unlike[1]}: must be {right}"
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.+)'$", line):
        key, values = several.groups()
        one = f"text is {as_text(key, values)}" if is_text(key) else f"list is {key}=[{values}]"
        return f"{key}={values}: several values are a sweep's: add -m; one {one}"
    if re.match("Error parsing override|LexerNoViableAltException", line):
        missing = meant.no_equals_sign(words, {group: choices_of(group) for group in meant.GROUPS})
        return missing or line.replace("LexerNoViableAltException: ", "must be key=value: ")
    if under := re.match(r"Error merging override (\w+)\.(\w+)=(.*?): Cannot convert 'dict' to string", line):
        word, section, value = under.groups()
        right = f"{section}.name={value}" if section in schema() else f"{word}=VALUE"
        return f"{word}.{section}={value}: {word} has no keys of its own: did you mean {right}?"
    if dotted := re.match(r"Error merging override ([\w.]+)=(.*?): Invalid type", line):
        if off := meant.switched_off(dotted[1], dotted[2]):
            return f"{dotted[1]}={dotted[2]}: {off}"
        known = choices_of(group := dotted[1].replace(".", "/"))
        right = f"chosen as a whole by {group}={dotted[2]}" if known else f"has keys of its own: {dotted[1]}.KEY=VALUE"
        return f"{dotted[1]}={dotted[2]}: {right}"
    if line.startswith("Config group override must be"):
        for word in words:
            group, _, value = word.lstrip("+").partition("=")
            if group and re.fullmatch(r"-?[\d.]+|null|true|false", value) and (files := choices_of(group)):
                return f"{word}: use one of {', '.join(files)}"
    choices = re.search(r"Available options in .*:\n((?:\t.*\n)+)", str(error))
    lost = re.search(r"Could not find '([^/']+)/(?:([^']*)/)?", line)
    there = set(choices[1].split() if choices else ()) | set(choices_of(lost[1]) if lost else ())
    beside = {file for file in there if lost and lost[2] and file.startswith(f"{lost[2]}/")}
    if len(beside) > 1:
        there = beside
    if not there:
        return line
    known = sorted(there, key=_by_number)
    given = re.search(r"Could not find '\w+/([^']+)'", line)
    close = guess(given[1], [one for one in known if _letters(one) != _letters(given[1])]) if given else None
    return f"{line}: use one of {', '.join(known)}{f'; did you mean {close}?' if close else ''}"


def _letters(name: str) -> str:
    """What tells table2 from scale2, and not from table3, which is as near to it as any other number."""
    return re.sub(r"\d", "", name)


_UNLIKE = (
    r"Error merging override ([\w.]+=.*?): Value '.*' (?:of type '\w+' could not be converted to|is not a valid) (\w+)"
)
_KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
"""Types by OmegaConf's names."""


def _by_number(name: str) -> list[tuple[int, str]]:
    """For sorting: table2 before table10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _unwritable(error: OSError) -> str | None:
    """Of a folder that Hydra itself makes for a job; None for any other error."""
    calls = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [name for name in calls if name not in ("pathlib", "os")]
    if not own or not own[-1].startswith("hydra."):
        return None
    return f"hydra.run.dir, hydra.sweep.dir: {error.filename}: cannot be written ({error.strerror})"


def choices_of(group: str) -> list[str]:
    """What stands in that folder of `conf/`, which chooses a part of the config as a whole: none for any other name."""
    folder = conf_dir() / group
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))  # preset/8/16
