"""Every file of conf/ composes and loads; scales have the paper's sizes; scales and arms take two real steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import hydra
import pytest
import torch
from hydra import initialize_config_dir

from gnmr.control import Decision
from gnmr.control.signals import SIGNALS
from gnmr.errors import UserError
from gnmr.lab import config, models
from gnmr.lab.config import compose as composing
from gnmr.lab.config.faults import USUAL
from gnmr.lab.sweep import combinations_of
from gnmr.lab.train.build import assemble, train_step
from gnmr.lab.train.step import TrainStep
from gnmr.lab.train.transforms import TRANSFORMS
from gnmr.names import RECIPES
from gnmr.precision import PathSpec, convert

pytestmark = pytest.mark.slow

CONF = composing.conf_dir()


def choices(group: str, folders: str = "*") -> list[str]:
    """With folders="**/*" those that have a slash too: 6/8."""
    files = (CONF / group).glob(f"{folders}.yaml")
    return sorted(str(file.relative_to(CONF / group).with_suffix("")) for file in files)


compose = cache(lambda *words: composing.compose(list(words)))
"""Composing takes a tenth of a second."""


@pytest.mark.parametrize("group", ["experiment", "model"])
def test_every_choice_composes(group):
    for choice in choices(group):
        words = [f"{group}={choice}"]
        if choice in ("pretrained", "finetune"):
            words += ["model.checkpoint=somewhere", "scale=finetune_cpu"]
        loaded = compose(*words)
        assert choice == (loaded.experiment_name if group == "experiment" else loaded.model.name)


def test_no_file_of_conf_is_left_out():
    """A new group needs a test here."""
    folders = {str(folder.relative_to(CONF)) for folder in CONF.rglob("*") if folder.is_dir()}
    nested = {"preset/4", "preset/6", "preset/8", "preset/int8", "sweep/paper", "hydra/sweeper", "hydra/hydra_logging"}
    assert folders == nested | {"experiment", "model", "scale", "sweep", "debug", "preset", "hydra"}


# ---- faults ----


@pytest.mark.parametrize("kind", USUAL)
def test_a_kind_of_stress(kind):
    """What is not given is the kind's usual; one that skips steps does not end the run."""
    faults = compose(f"faults.kind={kind}").faults
    assert (faults.kind, faults.rate == 0) == (kind, kind == "none")
    assert {key: getattr(faults, key) for key in USUAL[kind]} == USUAL[kind]
    given = compose(f"faults.kind={kind}", *(f"faults.{key}=1" for key in USUAL[kind]))
    assert {getattr(given.faults, key) for key in USUAL[kind]} == {1}
    if kind in ("nan", "inf"):
        assert faults.duration < config.load({}).training.max_nonfinite_streak


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), "int4_int8-gnmr"),
        (("precision.recovery=null",), "int4"),
        (("precision.low=fp8_hybrid", "precision.recovery=bf16", "controller.signal=random"), "fp8_hybrid_bf16-random"),
        (("controller.signal=gnmr_delta", "controller.routing=ranked"), "int4_int8-gnmr-ranked"),
        (("controller.signal=mse", "optim.transform.name=spam"), "int4_int8-mse-spam"),
        (("precision.name=mine", "controller.name=held"), "mine-held"),
        (("precision.name=mine", "arm=other"), "other"),
        (("controller.signal=module:Own",), "int4_int8-Own"),
    ],
)
def test_an_arms_name_says_what_it_is(words, name):
    assert compose(*words).arm_name == name


# ---- sweeps and their arms ----


@cache
def cells_of(sweep: str, *words: str) -> list[config.Config]:
    """Of one seed."""
    base = ["model.checkpoint=somewhere"] if sweep == "paper/table7" else []
    compose()  # stores the schema
    with initialize_config_dir(str(CONF), version_base="1.3"):
        sweeper = hydra.compose("config", [f"sweep={sweep}", *base], return_hydra_config=True).hydra.sweeper
    seed = "fork.order" if sweep in ("demo", "fork") else "training.seed"
    assert len(sweeper.params.get(seed, "").split(",")) in (3, 5, 10), "a sweep names three, five or ten of them"
    combinations = combinations_of([f"{seed}=0", *words], sweeper.params, sweeper.arms)
    return [compose(f"sweep={sweep}", *base, *cell) for cell in combinations]


of_sweeps = pytest.mark.xdist_group("sweeps")
"""Tests that compose whole sweeps, each cell 0.2 s: on one worker each sweep is composed once."""


CELLS = {
    "act_quant_stress": 4,
    "compressed_gradients": 6,
    "demo": 5,
    "faults": 8,
    "fork": 7,
    "from_scratch": 6,
    "hold": 6,
    "neighbours": 18,
    "operands": 4,
    "promotion": 2,
    "recipe_stress": 7,
    "regime_map": 8,
    **{f"paper/table{number}": cells for number, cells in {1: 6, 2: 7, 7: 3, 9: 3}.items()},
    "paper/table10": 4,
    "paper/table11": 16,
    "paper/table13": 3,
    "paper/table15": 3,
    "paper/tables": 39,
}
"""Of one seed."""


@of_sweeps
@pytest.mark.parametrize("sweep", choices("sweep", "**/*"))
def test_the_cells_of_a_sweep(sweep):
    cells = cells_of(sweep)
    assert sweep in CELLS, "a new sweep is named in CELLS, with its cells of one seed"
    assert len({(cell.arm_name, config.config_hash(cell)) for cell in cells}) == len(cells) == CELLS[sweep]
    assert len({cell.experiment_name for cell in cells}) == 1
    assert all("cpu" in cell.scale_name or cell.scale_name == "fork_small" for cell in cells)


@of_sweeps
def test_what_all_cells_are_made_of():
    assert {cell.faults.kind for cell in cells_of("faults")} == {*USUAL}
    assert {cell.optim.transform.name for cell in cells_of("neighbours")} == {None, *TRANSFORMS}
    signals = {cell.controller.signal for cell in cells_of("paper/table11")}
    assert signals <= {*SIGNALS}, "those of the published runs: CELLS has their number, newer ones are not among them"


@of_sweeps
def test_the_tables_of_one_setting_share_their_runs():
    parts = [(f"paper/table{number}",) for number in (1, 10, 11)]
    staged = "two_stage_1.1_1.1,two_stage_1.5_1.1,two_stage_1.5_1.5,max_o_2,max_o_6,max_o_8"  # tables 5 and 6
    parts.append(("paper/tables", f"arm={staged}"))
    together = {config.config_hash(cell) for part in parts for cell in cells_of(*part)}
    assert {config.config_hash(cell) for cell in cells_of("paper/tables")} == together


@of_sweeps
def test_an_arm_of_each_kind_takes_two_steps(text_file):
    """One of each evidence, routing, recipe and warm-up: the others differ in numbers, or in signals that
    tests/control steps through."""
    kinds = {}
    for cell in cells_of("paper/tables"):
        control, precision = cell.controller, cell.precision
        warmup = control.warmup_path if control.warmup_frac else None
        kinds.setdefault(
            (SIGNALS[control.signal].needs, control.routing, warmup, precision.low, precision.recovery), cell
        )
    assert len(kinds) < CELLS["paper/tables"]
    for cell in kinds.values():
        takes_two_steps(cell, text_file)


def takes_two_steps(cell: config.Config, text_file: Path) -> None:
    """And from its first step on it spends what its name says."""
    model = replace(cell.model, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2)
    data = replace(cell.data, name="text", path=str(text_file), vocab_size=300)
    training = replace(cell.training, seq_len=16, batch_size=2, steps=100, threads=1)
    loaded = replace(cell, model=model, data=data, training=training)
    parts = assemble(loaded, Path("unused"), lambda _: None)
    step = TrainStep(parts.model, parts.controller, parts.optimizer, transform=parts.transform)
    batches = torch.from_numpy(parts.corpus.train[: 2 * 17].astype("int64")).view(2, 1, 17)
    batches = [batches[i % 2] for i in range(loaded.training.accumulation)]
    results = [step(batches, loaded.optim.lr) for _ in range(2)]
    assert all(torch.tensor(result.loss).isfinite() and not result.skipped for result in results)
    spent, control = results[1].decision.in_force.sum(), loaded.controller
    if control.name == "adapt":  # which warms up in 16 bits, and whose unit is the one block
        assert spent == 1 and parts.converted.operators[0].path.name == "bf16"
    elif control.routing == "ranked" and control.signal != "static_k":
        assert spent == control.max_o == 4
    elif control.signal == "always_high":  # which warms up first
        assert spent == 7
    elif control.signal == "always_low" or loaded.precision.recovery is None:
        assert spent == 0


def test_the_arms_of_act_quant_stress():
    """Static low path, GNMR, static recovery path, 16-bit."""
    arms = {cell.arm_name: cell for cell in cells_of("act_quant_stress")}
    assert arms.keys() == {"int4", "int4_int8-gnmr", "int8", "bf16"}
    routed = arms["int4_int8-gnmr"]
    for arm in arms.values():
        assert arm.precision.recovery == ("int8" if arm is routed else None)
        differing = {key for key, value in config.identity(arm).items() if value != config.identity(routed)[key]}
        assert differing <= {"precision.name", "precision.low", "precision.recovery"}
    assert (routed.controller.max_o, routed.controller.t_lock, routed.precision.site) == (4, 1, "saved")


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        (["arm=always_low"], [["controller.hold=1", "controller.signal=always_low"]]),
        (
            ["arm=high,ranked", "controller.signal=recovery_gap"],
            [
                ["controller.hold=1", "controller.signal=recovery_gap", "controller.warmup_frac=1"],
                ["controller.hold=1", "controller.routing=ranked", "controller.signal=recovery_gap"],
            ],
        ),
        (
            ["controller.hold=2"],
            [["controller.hold=2", "controller.routing=ranked", f"controller.signal={one}"] for one in ("recovery_gap", "mse")],
        ),
        (["arm=null"], [["controller.hold=1", "arm=null"]]),
    ],
)
def test_arms_of_a_sweep(words, cells):
    """What is typed wins over an arm's words, and those over the sweep's axes."""
    arms = {
        "ranked": "controller.routing=ranked controller.signal=recovery_gap,mse",
        "always_low": "controller.signal=always_low",
        "high": "controller.signal=always_high controller.warmup_frac=1",
    }
    assert combinations_of(words, {"controller.hold": "1", "arm": "ranked"}, arms) == cells


def test_all_arms_of_a_seed_come_before_the_next_seed():
    cells = combinations_of([], {"training.seed": "0,1"}, {"a": "optim.lr=1", "b": "optim.lr=2"})
    assert [cell[0] for cell in cells] == ["training.seed=0", "training.seed=0", "training.seed=1", "training.seed=1"]


def test_an_arm_that_there_is_not():
    with pytest.raises(
        UserError, match=r"arm=c: is no arm of this sweep: use one of a \(optim.lr=1\); b \(optim.lr=2\)"
    ):
        combinations_of(["arm=a,c"], {}, {"a": "optim.lr=1", "b": "optim.lr=2"})
    assert combinations_of(["arm=c"], {}, {}) == [["arm=c"]], "without arms it is the run's name"


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


TABLE_9 = {
    # hidden, MLP, heads, layers, tokens, rate; a quarter of the layers
    "130m": (768, 2048, 12, 12, 2.6e9, 1e-3, 3),
    "350m": (1024, 2736, 16, 24, 7.8e9, 5e-4, 6),
    "1.3b": (2048, 5472, 32, 24, 13.1e9, 5e-4, 6),
    "3b": (2560, 6848, 32, 32, 28.8e9, 3e-4, 8),
}
RECIPE_CPU = {"small": "recipe_cpu_small", "middle": "recipe_cpu", "large": "recipe_cpu_large"}
"""Arm of table 9: its scale's name."""


def test_no_scale_is_left_out():
    ours = {"cpu", "cpu_2bit", "cpu_transient", "moe_cpu", "pangu_cpu", "pretrain_cpu", "finetune_cpu", "recipe_cpu"}
    ours |= {"fork", "fork_small", "compressed_cpu"}
    theirs = {*TABLE_8, "moe_3.7b", "pangu_1b", "finetune_13b"}
    assert set(choices("scale")) == ours | theirs


def test_the_transient_scale_is_the_maps_cell():
    """The words with which the cell was run (docs/log.md)."""
    cell = "precision.low=int4 precision.site=forward model.outlier_channels.number=0 faults.kind=noise faults.rate=5"
    words = ["experiment=act_quant_stress", "scale=cpu_2bit", *cell.split(), "faults.magnitude=8"]
    ours = compose("experiment=act_quant_stress", "scale=cpu_transient")
    assert replace(ours, scale_name="cpu_2bit") == compose(*words)


@pytest.mark.parametrize("size", TABLE_9)
def test_a_size_of_table_9_is_the_papers(size):
    (loaded,) = cells_of("paper/table9", f"arm={size}")
    model, training, optim = loaded.model, loaded.training, loaded.optim
    *sizes, tokens, rate, max_o = TABLE_9[size]
    assert [model.hidden_size, model.intermediate_size, model.num_heads, model.num_layers] == sizes
    assert (training.seq_len, training.tokens_per_step, loaded.data.name) == (256, 131_072, "c4")
    assert training.steps * training.tokens_per_step == pytest.approx(tokens, rel=1e-3)
    assert (optim.lr, optim.warmup_frac, optim.min_lr_frac) == (rate, 0.1, 0.1)
    assert loaded.controller.max_o == max_o == model.num_layers // 4
    assert model.outlier_channels.number == 0 and loaded.scale_name == size


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


@pytest.mark.parametrize("scale", [*TABLE_8, "cpu", "cpu_2bit", "cpu_transient"])
def test_a_scale_takes_two_steps(scale, text_file):
    """At its width and rate, one layer deep, two real blocks of 16 tokens."""
    small = ["model.num_layers=1", "training.seq_len=16", "training.batch_size=1", "training.accumulation=1"]
    data = ["data.name=text", f"data.path={text_file}", "data.vocab_size=300", "training.threads=1"]
    loaded = compose(f"scale={scale}", "experiment=act_quant_stress", *data, *small)
    parts = assemble(loaded, Path("unused"), lambda _: None)
    step = TrainStep(parts.model, parts.controller, parts.optimizer, clip_norm=loaded.optim.clip_norm)
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
    plan = convert(
        model, PathSpec.of(loaded.precision.low, loaded.precision.recovery, targets=loaded.precision.targets)
    )
    assert len(plan.operators) == 7 * loaded.model.num_layers
    assert model(tokens).shape == (training.batch_size, training.seq_len, 32000)
    # By hand: q, k, v and gate, up share one copy; half a byte a number, and a 16-bit scale a token.
    hidden, mlp = loaded.model.hidden_size, loaded.model.intermediate_size
    copies = loaded.model.num_layers * tokens.numel() * (3 * ((hidden + 1) // 2 + 2) + (mlp + 1) // 2 + 2)
    assert plan.predicted_bytes() == copies


# ---- scales of the recipe setting: tables 12 and 14 ----


@pytest.mark.parametrize(
    ("scale", "sizes", "seq_len", "batch", "steps_or_tokens", "rate"),
    [
        (
            "moe_3.7b",
            {"hidden_size": 7168, "intermediate_size": 2048, "num_heads": 128, "num_layers": 3},
            4096,
            32,
            29e3,
            5e-5,
        ),
        (
            "pangu_1b",
            {"hidden_size": 1536, "intermediate_size": 6144, "num_heads": 12, "num_layers": 26},
            4096,
            256,
            4e9,
            2e-3,
        ),
    ],
)
def test_a_scale_is_that_of_its_table(scale, sizes, seq_len, batch, steps_or_tokens, rate):
    loaded = compose(f"scale={scale}")
    model, training = loaded.model, loaded.training
    assert {key: getattr(model, key) for key in sizes} == sizes
    assert (training.seq_len, training.batch_size * training.accumulation, loaded.optim.lr) == (seq_len, batch, rate)
    length = training.steps if steps_or_tokens < 1e6 else training.steps * training.tokens_per_step
    assert length == pytest.approx(steps_or_tokens, rel=1e-3)
    if scale == "moe_3.7b":
        assert (model.name, model.experts.number, model.experts.top_k) == ("moe", 64, 8)
    else:
        assert (model.name, model.num_kv_heads, model.hidden_size // model.num_heads) == ("llama", 6, 128)


def test_the_cpu_sizes_of_both():
    """Those of scale=cpu in all but the architecture."""
    for scale in ("moe_cpu", "pangu_cpu"):
        ours, cpu = (config.identity(compose(f"scale={name}")) for name in (scale, "cpu"))
        differing = {key for key, value in ours.items() if value != cpu[key]}
        assert {key for key in differing if not key.startswith("model.")} == {"scale_name", "controller.max_o"}
    moe, pangu = compose("scale=moe_cpu").model, compose("scale=pangu_cpu").model
    assert (moe.name, moe.experts.number, moe.experts.top_k, moe.hidden_size) == ("moe", 8, 2, 128)
    assert (pangu.num_heads // pangu.num_kv_heads, pangu.intermediate_size // pangu.hidden_size) == (2, 4)


@pytest.mark.parametrize("scale", ["moe_cpu", "moe_3.7b", "pangu_cpu", "pangu_1b"])
def test_a_scale_of_the_recipe_setting_takes_two_steps(scale, text_file):
    """As above; of the 3.7B a narrow one with all its experts."""
    small = ["model.num_layers=1", "training.seq_len=16", "training.batch_size=1", "training.accumulation=1"]
    small += ["model.hidden_size=256", "model.intermediate_size=64"] if scale == "moe_3.7b" else []
    data = ["data.name=text", f"data.path={text_file}", "data.vocab_size=300", "training.threads=1"]
    loaded = compose(f"scale={scale}", *data, *small)
    parts = assemble(loaded, Path("unused"), lambda _: None)
    step = TrainStep(parts.model, parts.controller, parts.optimizer, clip_norm=loaded.optim.clip_norm)
    block = torch.from_numpy(parts.corpus.train[:17].astype("int64"))[None]
    first, second = (step([block], loaded.optim.lr) for _ in range(2))
    assert not first.skipped and not second.skipped and second.loss < first.loss
    assert first.saved_bytes == first.saved_bytes_predicted
    units = {"moe_cpu": 4 + 2 * 8, "moe_3.7b": 4 + 2 * 64}.get(scale, 7)
    assert len(second.decision.units) == units
    assert bool(second.statistics) == scale.startswith("moe")


@pytest.mark.parametrize("scale", ["moe_3.7b", "pangu_1b"])
def test_a_scale_of_the_recipe_setting_is_built_whole_on_the_meta_device(scale):
    loaded = compose(f"scale={scale}")
    training, sizes = loaded.training, loaded.model
    with torch.device("meta"):
        model = models.build(sizes, loaded.data.vocab_size, training.seq_len).to(torch.bfloat16)
        tokens = torch.zeros(training.batch_size, training.seq_len, dtype=torch.int64)
    plan = convert(
        model, PathSpec.of(loaded.precision.low, loaded.precision.recovery, targets=loaded.precision.targets)
    )
    assert model(tokens).shape == (training.batch_size, training.seq_len, loaded.data.vocab_size)
    # q, k, v share one copy, o has its own; gate and up share one, or every expert's up has its rows.
    hidden, mlp, k = sizes.hidden_size, sizes.intermediate_size, sizes.experts.top_k if sizes.experts.number else 1
    copies = 2 * (hidden // 2 + 2) + k * (hidden // 2 + 2 + mlp // 2 + 2)
    assert plan.predicted_bytes() == sizes.num_layers * tokens.numel() * copies


# ---- the recipe setting: experiments, hierarchies, recipes ----

PAPER = {
    # alpha in the first stage, alpha, beta, share in high fidelity; low and recovery path
    "6/8": (1.5, 1.1, 1.5, 0.0, "sim_e3m2", "fp8_hybrid"),
    "4/8": (1.5, 1.1, 1.5, 0.0, "sim_e2m1", "fp8_hybrid"),
    "8/16": (1.5, 1.1, None, 0.0, "fp8_hybrid", "bf16"),
    "8/16_moe": (None, 0.9, None, 0.05, "fp8_hybrid", "bf16"),
    "4/16": (None, 0.4, None, 0.0, "sim_e2m1", "bf16"),
    "int8/16": (1.5, 1.1, 1.5, 0.0, "llm_int8", "bf16"),
}
SETTINGS = {
    # unit, hierarchy, cpu size, units, the paper's size
    "deepseek_recipe": ("block", "6/8", "recipe_cpu", 4, "1.3b"),
    "moe_stress": ("expert", "8/16_moe", "moe_cpu", 4 * 8, "moe_3.7b"),
    "pangu_4bit": ("operator", "4/16", "pangu_cpu", 4 * 7, "pangu_1b"),
}


def in_force(loaded: config.Config) -> tuple:
    c, precision = loaded.controller, loaded.precision
    assert c.alpha_init is None or c.init_frac == 0.025
    return c.alpha_init, c.alpha, c.beta, c.warmup_frac, precision.low, precision.recovery


def test_no_experiment_and_no_hierarchy_is_left_out():
    others = {"act_quant_stress", "pretrain", "finetune", "fork", "fork_base", "compressed_gradients"}
    assert set(choices("experiment")) == {*SETTINGS, *others}, "a new one is named here, with a test of what it is for"
    assert set(choices("preset", "**/*")) == set(PAPER)


@pytest.mark.parametrize("experiment", SETTINGS)
def test_an_experiment_of_the_recipe_setting(experiment):
    unit, hierarchy, scale, units, large = SETTINGS[experiment]
    loaded = compose(f"experiment={experiment}")
    assert (loaded.experiment_name, loaded.scale_name, loaded.precision.unit) == (experiment, scale, unit)
    assert in_force(loaded) == PAPER[hierarchy] and loaded.controller.max_o == units // 4
    assert in_force(compose(f"experiment={experiment}", f"scale={large}")) == PAPER[hierarchy]


@pytest.mark.parametrize("hierarchy", PAPER)
def test_a_preset_is_the_papers(hierarchy):
    assert in_force(compose("experiment=deepseek_recipe", f"preset={hierarchy}")) == PAPER[hierarchy]


def test_the_cells_of_the_papers_tables():
    """Arms by name; and what two tables have in common is one run."""
    sweeps = ("table2", "table9", "table13", "table15")
    arms = {sweep: [cell.arm_name for cell in cells_of(f"paper/{sweep}")] for sweep in sweeps}
    six_eight, eight = "sim_e3m2_fp8_hybrid-gnmr", "fp8_hybrid_bf16-gnmr"
    static = ["fp8_hybrid", "bf16", "sim_e3m2", "sim_e2m1"]
    assert arms["table2"] == [six_eight, eight, "sim_e2m1_fp8_hybrid-gnmr", *static]
    table4 = cells_of("paper/table2", "arm=gnmr_8_16,fp8,bf16")
    assert [cell.arm_name for cell in table4] == arms["table13"] == [eight, "fp8_hybrid", "bf16"]
    assert arms["table9"] == [six_eight] * 3
    assert arms["table15"] == ["sim_e2m1_bf16-gnmr", "sim_e2m1", "bf16"]
    hashes = {sweep: {config.config_hash(cell) for cell in cells_of(f"paper/{sweep}")} for sweep in sweeps}
    assert {config.config_hash(cell) for cell in table4} < hashes["table2"]
    assert len(hashes["table2"] & hashes["table9"]) == 1
    assert config.config_hash(compose("experiment=deepseek_recipe")) in hashes["table2"]


# ---- the fine-tuning setting ----


def test_fine_tuning_is_the_papers():
    """5.3 and E.3; LLaMA-2 13B has 40 decoder layers."""
    loaded = compose("experiment=finetune", "model.checkpoint=somewhere", "scale=finetune_13b")
    control, optim, adapter = loaded.controller, loaded.optim, loaded.model.adapter
    assert in_force(loaded) == PAPER["int8/16"] and loaded.precision.unit == "block" and control.observe == "adapter"
    assert (control.max_o, control.t_lock, control.delta, control.routing) == (10, 1, 5, "thresholded")
    assert (optim.name, optim.lr, optim.weight_decay, optim.clip_norm) == ("adamw", 2e-5, 0.0, 1.0)
    assert (adapter.rank, adapter.scaling, adapter.dropout, adapter.targets) == (8, 16, 0.05, ["*_proj"])


def test_the_arms_of_table_7_differ_in_their_paths_alone():
    cells = cells_of("paper/table7")
    assert [(cell.precision.low, cell.precision.recovery) for cell in cells] == [
        ("llm_int8", "bf16"),
        ("bf16", None),
        ("llm_int8", None),
    ]
    bare = [config.flatten(config.to_dict(cell)) for cell in cells]
    differ = {key for key in bare[0] if len({str(tree[key]) for tree in bare}) > 1}
    assert all(key.startswith(("paths.", "controller.")) for key in differ)
    assert cells[0].controller.max_o == 2 == 8 // 4


def test_what_pre_training_leaves_is_what_fine_tuning_begins_with():
    loaded = compose("experiment=pretrain")
    assert loaded.training.export_hf and (loaded.precision.low, loaded.precision.recovery) == ("bf16", None)
    assert loaded.model.num_layers == 4 * compose("scale=finetune_cpu", "model=llama").controller.max_o


def tiny_cell(text_file: Path, *words: str) -> config.Config:
    """As narrow as the tiles of deepseek_v3 allow, two blocks of 16 tokens; depth as small as it can be."""
    small = ["model.num_layers=2", "model.hidden_size=128", "model.intermediate_size=128", "controller.max_o=1"]
    small += ["training.seq_len=16", "training.batch_size=1", "training.accumulation=1", "training.threads=1"]
    window = ["model.outlier_channels.window=[2,2]"] if "sweep=recipe_stress" in words else []
    return composing.compose(
        [*words, "data.name=text", f"data.path={text_file}", "data.vocab_size=300", *small, *window]
    )


STEPS = [
    *((f"experiment={experiment}",) for experiment in SETTINGS),
    *(("experiment=deepseek_recipe", f"preset={hierarchy}") for hierarchy in ("4/8", "8/16", "int8/16")),
    *(("experiment=deepseek_recipe", f"precision.low={recipe}", "precision.recovery=null") for recipe in RECIPES),
    *(
        (f"sweep={sweep}", f"precision.low={low}", f"precision.recovery={recovery}")
        for sweep, low, recovery in (
            ("paper/table13", "fp8_hybrid", "bf16"),
            ("paper/table15", "sim_e2m1", "bf16"),
            ("recipe_stress", "fp8_delayed_1024", "bf16"),
            ("recipe_stress", "deepseek_v3_blocks", "null"),
        )
    ),
    ("experiment=moe_stress", "precision.unit=layer"),
    ("experiment=deepseek_recipe", "preset=8/16", "precision.backend=scaled_mm"),
]


@pytest.mark.parametrize("words", STEPS, ids=" ".join)
def test_a_cell_of_the_recipe_setting_takes_two_steps(words, text_file):
    """Its units are what they should be, and whatever is routed is whole units."""
    loaded = tiny_cell(text_file, *words)
    parts = assemble(loaded, Path("unused"), lambda _: None)
    step = train_step(parts)
    block = torch.from_numpy(parts.corpus.train[:17].astype("int64"))[None]
    results = []
    for number in (1, 2):
        for stress in parts.stress:
            stress.begin_step(number)
        results.append(step([block], loaded.optim.lr))
    first, second = results
    assert not first.skipped and not second.skipped
    assert parts.stress or second.loss < first.loss
    assert first.saved_bytes == first.saved_bytes_predicted
    experts = [f"layers.{i}.mlp.experts.{e}" for i in range(2) for e in range(loaded.model.experts.number)]
    units = {"block": ["layers.0", "layers.1"], "expert": experts, "layer": ["layers.0.mlp", "layers.1.mlp"]}
    assert parts.controller.names == units.get(
        loaded.precision.unit, [o.operator_name for o in parts.converted.operators]
    )
    for group in parts.converted.units:
        assert {operator.recovering for operator in group.operators} == {group.name in parts.controller.active}
    active, control = len(parts.controller.active), loaded.controller
    assert active <= (0 if loaded.precision.recovery is None else control.max_o) or active == len(
        parts.controller.units
    )
    assert (active == len(parts.controller.units)) == (control.warmup_frac > 0)
    watched = ["layers.0.mlp.router", "layers.1.mlp.router"] if experts else ["embed_tokens", "norm"]
    assert list(second.monitored) == (watched if loaded.records.monitor else [])
    casts = loaded.precision.low != "bf16"
    assert set(second.saturation) == ({"input", "weight", "grad_output", "result"} if casts else set())


@pytest.mark.parametrize("size", RECIPE_CPU)
def test_a_cpu_size_of_the_recipe_setting(size):
    """The quarter of its blocks, widths for every recipe but in the smallest, and marks for table 2."""
    (loaded,) = cells_of("paper/table9", f"arm={size}")
    assert loaded.scale_name == RECIPE_CPU[size]
    assert loaded.controller.max_o * 4 == loaded.model.num_layers
    widths = loaded.model.hidden_size, loaded.model.intermediate_size
    assert all(width % 128 == 0 for width in widths) == (size != "small")
    assert loaded.training.eval_every * 10 == loaded.training.steps


@pytest.mark.parametrize("size", ["3b", "moe_3.7b", "pangu_1b"])
def test_the_papers_size_has_its_units(size):
    """Built on the meta device, as the experiment has it."""
    experiment = {"moe_3.7b": "moe_stress", "pangu_1b": "pangu_4bit"}.get(size)
    words = (f"experiment={experiment}", f"scale={size}")
    loaded = compose(*words) if experiment else cells_of("paper/table9", f"arm={size}")[0]
    with torch.device("meta"):
        model = models.build(loaded.model, loaded.data.vocab_size, loaded.training.seq_len)
    precision = loaded.precision
    plan = convert(
        model, PathSpec.of(precision.low, precision.recovery, targets=precision.targets, unit=precision.unit)
    )
    assert len(plan.units) // 4 == loaded.controller.max_o
    assert len(plan.operators) == {"3b": 7 * 32, "moe_3.7b": 2 * 64 * 3, "pangu_1b": 7 * 26}[size]
