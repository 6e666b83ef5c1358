"""Whoever types a word of an earlier version is told today's; configs that were saved then are read as they were."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gnmr import config
from gnmr.config.compose import compose
from gnmr.config.old_words import _DEFAULTS, is_old, new_words, translated
from gnmr.controller.signals import SIGNALS
from gnmr.errors import UserError

OLD: dict[str, dict] = json.loads((Path(__file__).parent / "old_words.json").read_text())
"""What each file of conf/ that is gone changed, as it resolved then; table 9's sizes are called 130m ... 3b now."""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("controller/signal=gap", "controller.signal=gap"),
        ("controller/signal=own", "controller.signal=package.module:Class"),
        ("controller.signal.name=gap", "controller.signal=gap"),
        ("+controller.signal.options.every=2", "controller.options.every=2"),
        ("controller.signal=gap", None),
        ("controller.signal_name=gap", None),
        ("optim/transform=none", "optim.transform.name=null"),
        ("recipe.backend=te", "paths.backend=te"),
        ("hierarchy.low=int4", "preset.low=int4"),
        ("~recipe", "without it: there is no such group"),
        ("paths=bf16,int4_int8", "paths.low=bf16 paths.recovery=null or paths.low=int4 paths.recovery=int8"),
        ("paths=default", "without it: that is what they are"),
        ("stress=none,underflow,scale_nan", "stress.kind=none,scale_up,nan"),
        ("data=text", "data.name=text"),
        ("data.path=data=text", None),
        ("preset=6/8", None),
        ("plan=true", "memory_plan=true"),
        ("plan=plan.json", None),
        ("sweep=table11", "sweep=paper/table11"),
        ("sweep=tables", "sweep=paper/tables"),
        ("sweep=figure4", "sweep=paper/table9"),
        ("sweep=paper/table3", "sweep=paper/table1 arm=gnmr_2_1.5,gnmr_3_2"),
        ("scale=60m,recipe_130m", "scale=60m or scale=130m optim.lr=1.0e-3 controller.max_o=3"),
        ("sweep=hold", None),
    ],
)
def test_new_words(old: str, new: str | None) -> None:
    assert new_words(old) == new


usual = cache(lambda: compose([]))


def resolved(words: list[str]) -> config.Config:
    """As composed; where no file of conf/ is chosen, without Hydra, which takes a tenth of a second."""
    if not all("." in word.partition("=")[0] for word in words):
        return compose(words)
    tree = config.to_dict(usual())
    tree["paths"]["name"] = tree["controller"]["name"] = None  # of what is chosen
    return config.load(OmegaConf.merge(tree | {"stress": {}}, OmegaConf.from_dotlist(words)))


@pytest.mark.slow
@pytest.mark.parametrize("word", OLD)
def test_the_new_words_say_what_the_old_one_did(word: str) -> None:
    new = new_words(word)
    assert new is not None
    before, now = config.identity(usual()), config.identity(resolved(new.split()))
    assert {key: value for key, value in now.items() if before.get(key) != value} == OLD[word]


def test_an_old_word_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^controller/signal=gap: is now controller\.signal=gap$"):
        compose(["controller/signal=gap"])


def test_replay_knows_them_too(gnmr, tmp_path: Path) -> None:
    (tmp_path / "norms.csv").write_text("step,unit,norm\n1,a,1.0\n")
    line = gnmr("replay", str(tmp_path / "norms.csv"), "signal=gap", "signal.options.every=2").mistake
    assert line == "signal.options.every=2: is now options.every=2"


def saved(name: str, options: dict) -> dict:
    """A config as earlier versions saved it."""
    tree = config.to_dict(config.Config())
    tree["controller"] = {key: value for key, value in tree["controller"].items() if key != "options"}
    return tree | {"controller": tree["controller"] | {"signal": {"name": name, "options": options}}}


@pytest.mark.parametrize("name", [*_DEFAULTS, "always_low", "always_high"])
def test_options_that_repeat_the_defaults_are_left_out(name: str) -> None:
    own = {key: value for key, value in SIGNALS[name].options().items() if key not in ("alpha", "beta", "delta")}
    own = {key: value for key, value in own.items() if key != "eps" or "gnmr" not in name}
    tree = saved(name, own)
    assert is_old(tree) and not is_old(translated(tree))
    controller = config.load(tree).controller
    assert (controller.signal, controller.options) == (name, {})
    kept = dict.fromkeys(list(own)[:1], 7)
    assert config.load(saved(name, own | kept)).controller.options == kept


def test_an_old_and_a_new_config_of_one_run_are_one_arm() -> None:
    assert config.identity(config.load(saved("gnmr_delta", {"window": 100}))) == config.identity(config.Config())


def test_a_run_of_an_earlier_version_is_read_and_not_continued(tmp_path: Path) -> None:
    from gnmr.training.folder import check_folder

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved("gnmr_delta", {})))
    assert config.read(tmp_path / "config.yaml") == config.Config()
    with pytest.raises(UserError, match="earlier version"):
        check_folder(tmp_path, config.Config())


@pytest.mark.parametrize("name", _DEFAULTS)
def test_options_that_are_left_out_have_the_value_that_they_had(name):
    """A default that changes would give old runs another meaning: it then leaves the table."""
    assert _DEFAULTS[name].items() <= SIGNALS[name].options().items()
