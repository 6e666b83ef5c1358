"""The schema: what it refuses, and that a run's identity is what changes its numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import yaml

from gnmr.control import ControlSpec
from gnmr.errors import UserError
from gnmr.lab.config import Config, OptimConfig, config_hash, identity, load, to_dict
from gnmr.lab.config.controller import ControllerConfig
from gnmr.lab.config.precision import USUAL
from gnmr.lab.fault_injection import KINDS


def test_the_seed_and_how_a_run_is_watched_stay_outside_the_hash() -> None:
    tree = to_dict(Config())
    same = load({**tree, "training": {**tree["training"], "seed": 7}, "runs_dir": "elsewhere"})
    assert config_hash(same) == config_hash(Config())
    assert "training.seed" not in identity(Config())


@pytest.mark.parametrize(
    "key", ["optim.lr", "training.steps", "controller.alpha", "data.vocab_size", "training.threads"]
)
def test_what_changes_the_numbers_changes_the_hash(key: str) -> None:
    tree = to_dict(Config())
    group, name = key.split(".")
    changed = load({**tree, group: {**tree[group], name: (tree[group][name] or 1) * 2}})
    assert config_hash(changed) != config_hash(Config())


def test_a_config_survives_being_written_and_read() -> None:
    assert load(yaml.safe_load(yaml.safe_dump(to_dict(Config())))) == Config()


@pytest.mark.parametrize(
    ("controller", "unread"),
    [
        ({}, ""),
        ({"signal": "module:Own"}, "alpha alpha_init beta delta"),
        ({"routing": "ranked"}, "t_lock trigger"),
        ({"routing": "ranked", "options": {"active_frac": 0.1}}, "trigger"),
    ],
)
def test_keys_that_choose_nothing(controller: dict, unread: str) -> None:
    assert sorted(load({"controller": controller}).controller.unread()) == unread.split()


BEYOND_32_BITS = {"lr": (1e39, 2e3, 1e-46, math.nan), "weight_decay": (1e39, -0.1, math.inf)}
BEYOND_32_BITS |= {"betas": ([0.9, 0.99999999999], [-0.1, 0.9], [0.9]), "clip_norm": (1e-46, 1e39)}


@pytest.mark.parametrize(("key", "values"), BEYOND_32_BITS.items())
def test_rates_that_32_bits_do_not_hold_are_refused(key: str, values: tuple[object, ...]) -> None:
    OptimConfig(lr=1e-3, weight_decay=10.0, betas=[0.0, 0.9999], clip_norm=1e6)
    for value in values:
        with pytest.raises(UserError, match=rf"optim\.{key}="):
            OptimConfig(**{key: value})


def test_the_config_says_of_the_controller_and_of_faults_what_these_say() -> None:
    """What they do not share by `Rules` is written twice, because the config is read without torch."""
    ours, theirs = (
        {field.name: field.default for field in dataclasses.fields(c)} for c in (ControllerConfig, ControlSpec)
    )
    shared = ours.keys() & theirs.keys() - {"options"}
    assert len(shared) >= 12 and {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert ("none", *KINDS) == tuple(USUAL)
