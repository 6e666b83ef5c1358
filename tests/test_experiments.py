"""Every file of conf/ composes and loads; every scale has the paper's sizes and takes two real steps."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from gnmr import config, launch, models
from gnmr.controller import Decision
from gnmr.paths import convert
from gnmr.training.run import assemble
from gnmr.training.step import TrainStep

CONF = launch.conf_dir()


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


compose = cache(lambda *words: launch.compose(list(words)))
"""Composing takes a tenth of a second."""


@pytest.mark.parametrize(
    "group", ["experiment", "model", "data", "paths", "controller", "optim", "training", "records"]
)
def test_every_choice_composes(group):
    for choice in choices(group):
        words = [f"{group}={choice}"]
        if (group, choice) == ("data", "text"):
            words.append("data.path=somewhere")
        loaded = compose(*words)
        named = loaded.experiment_name if group == "experiment" else getattr(getattr(loaded, group), "name", choice)
        assert named == choice or (group == "controller" and choice.startswith(f"{named}_"))  # a calibration of it


def test_no_file_of_conf_is_left_out():
    """A new group needs a test here."""
    tested = {"experiment", "model", "data", "paths", "controller", "optim", "training", "records"}
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} == tested | {"scale", "sweep", "debug"}


@pytest.mark.parametrize("choice", choices("paths"))
def test_a_paths_name_says_its_formats(choice):
    paths = compose(f"paths={choice}").paths
    low, _, recovery = choice.partition("_")
    assert (paths.low, paths.recovery) == (low, recovery or None)


@pytest.mark.parametrize("sweep", choices("sweep"))
def test_every_cell_of_a_sweep(sweep):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        params = hydra_compose("config", [f"sweep={sweep}"], return_hydra_config=True).hydra.sweeper.params
    axes = [[f"{key}={value}" for value in str(values).split(",")] for key, values in params.items()]
    cells = {cell: compose(f"sweep={sweep}", *cell) for cell in product(*axes)}
    folders = {(loaded.arm_name, config.config_hash(loaded), loaded.training.seed) for loaded in cells.values()}
    assert len(folders) == len(cells) > 1
    assert len({name for name, *_ in folders}) == len({code for _, code, _ in folders})  # an arm, a name
    assert {loaded.experiment_name for loaded in cells.values()} == {sweep}


def test_the_arms_of_act_quant_stress():
    """Static low path, GNMR, static recovery path, 16-bit."""
    arms = {
        choice: compose("sweep=act_quant_stress", f"paths={choice}") for choice in ("int4", "int4_int8", "int8", "bf16")
    }
    assert [arm.arm_name for arm in arms.values()] == ["int4", "int4_int8-gnmr", "int8", "bf16"]
    routed = arms["int4_int8"]
    for name, arm in arms.items():
        assert arm.paths.recovery == ("int8" if name == "int4_int8" else None)
        differing = {key for key, value in config.identity(arm).items() if value != config.identity(routed)[key]}
        assert differing <= {"paths.name", "paths.low", "paths.recovery"}
    assert (routed.controller.max_o, routed.controller.t_lock, routed.paths.site) == (4, 1, "saved")


def test_the_debug_profile_is_small_whatever_the_scale():
    loaded = compose("debug=smoke", "scale=1.3b")
    assert (loaded.training.steps, loaded.model.hidden_size, loaded.model.num_layers) == (2, 64, 2)


# ---- scales: table 8 and appendix E.1 ----

TABLE_8 = {
    # hidden, MLP, heads, layers, tokens, rate
    "60m": (512, 1376, 8, 8, 1.3e9, 2.5e-3),
    "130m": (768, 2048, 12, 12, 2.6e9, 2.5e-3),
    "350m": (1024, 2736, 16, 24, 7.8e9, 1e-3),
    "1.3b": (2048, 5461, 32, 24, 13.1e9, 6e-4),
}


def test_no_scale_is_left_out():
    assert set(choices("scale")) == {*TABLE_8, "cpu"}


@pytest.mark.parametrize("scale", TABLE_8)
def test_a_scale_is_the_papers(scale):
    loaded = compose(f"scale={scale}", "experiment=act_quant_stress")
    model, training, optim = loaded.model, loaded.training, loaded.optim
    hidden, mlp, heads, layers, tokens, rate = TABLE_8[scale]
    assert (model.hidden_size, model.intermediate_size, model.num_heads, model.num_layers) == (
        hidden,
        mlp,
        heads,
        layers,
    )
    assert (training.seq_len, training.tokens_per_step) == (256, 131_072)
    assert training.steps * training.tokens_per_step == pytest.approx(tokens, rel=1e-3)
    assert (optim.lr, optim.warmup_frac, optim.min_lr_frac, optim.clip_norm) == (rate, 0.1, 0.1, None)
    assert (training.dtype, loaded.data.name, loaded.data.vocab_size) == ("bfloat16", "c4", 32000)
    assert model.outlier_channels.number == 0 and loaded.scale_name == scale


@pytest.mark.parametrize("scale", [*TABLE_8, "cpu"])
def test_a_scale_takes_two_steps(scale, text_file):
    """At its width and rate, one layer deep, two real blocks of 16 tokens."""
    small = ["model.num_layers=1", "training.seq_len=16", "training.batch_size=1", "training.accumulation=1"]
    data = ["data=text", f"data.path={text_file}", "data.vocab_size=300", "training.threads=1"]
    loaded = compose(f"scale={scale}", "experiment=act_quant_stress", *data, *small)
    parts = assemble(loaded, Path("unused"), lambda _: None)
    step = TrainStep(parts.model, parts.plan, parts.controller, parts.optimizer, loaded.optim.clip_norm)
    before = parts.model.layers[0].mlp.down_proj.weight.detach().clone()
    block = torch.from_numpy(parts.corpus.train[:17].astype("int64"))[None]
    first, second = (step([block], loaded.optim.lr) for _ in range(2))
    assert not first.skipped and not second.skipped and second.loss < first.loss
    assert first.saved_bytes == first.saved_bytes_predicted
    assert not torch.equal(before, parts.model.layers[0].mlp.down_proj.weight)
    assert isinstance(second.decision, Decision) and len(second.decision.units) == 7


@pytest.mark.parametrize("scale", TABLE_8)
def test_a_scale_is_built_whole_on_the_meta_device(scale):
    """Full depth and vocabulary, its plan, and one forward pass of a whole micro-batch: shapes without numbers."""
    loaded = compose(f"scale={scale}", "experiment=act_quant_stress")
    training = loaded.training
    with torch.device("meta"):
        model = models.build(loaded.model, loaded.data.vocab_size, training.seq_len).to(torch.bfloat16)
        tokens = torch.zeros(training.batch_size, training.seq_len, dtype=torch.int64)
    plan = convert(model, loaded.paths.low, loaded.paths.recovery, loaded.paths.targets)
    assert len(plan.operators) == 7 * loaded.model.num_layers
    assert model(tokens).shape == (training.batch_size, training.seq_len, 32000)
    # By hand: q, k, v and gate, up share one copy; half a byte a number, and a 16-bit scale a token.
    hidden, mlp = loaded.model.hidden_size, loaded.model.intermediate_size
    copies = loaded.model.num_layers * tokens.numel() * (3 * ((hidden + 1) // 2 + 2) + (mlp + 1) // 2 + 2)
    assert plan.predicted_bytes() == copies
