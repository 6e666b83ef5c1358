"""Every file of conf/ composes and loads; scales have the paper's sizes; scales and variants take two real steps."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from gnmr import config, models
from gnmr.config import compose as composing
from gnmr.controller import Decision
from gnmr.paths import PathSpec, convert
from gnmr.training.build import assemble, train_step
from gnmr.training.step import TrainStep
from gnmr.training.transforms import TRANSFORMS

pytestmark = pytest.mark.slow

CONF = composing.conf_dir()


def choices(group: str, folders: str = "*") -> list[str]:
    """With folders="**/*" those that have a slash too: 6/8."""
    files = (CONF / group).glob(f"{folders}.yaml")
    return sorted(str(file.relative_to(CONF / group).with_suffix("")) for file in files)


compose = cache(lambda *words: composing.compose(list(words)))
"""Composing takes a tenth of a second."""


@pytest.mark.parametrize(
    "group", ["experiment", "model", "data", "paths", "controller", "optim", "training", "records", "scores"]
)
def test_every_choice_composes(group):
    for choice in choices(group):
        words = [f"{group}={choice}"]
        if (group, choice) in (("data", "text"), ("data", "instructions")):
            words.append("data.path=somewhere")
        if choice in ("pretrained", "finetune"):
            words += ["model.checkpoint=somewhere", "scale=finetune_cpu"]
        loaded = compose(*words)
        named = loaded.experiment_name if group == "experiment" else getattr(getattr(loaded, group), "name", choice)
        assert named == choice or (group == "controller" and choice.startswith(f"{named}_"))  # a calibration of it


def test_what_runs_a_recipe_can_be_said_beside_it() -> None:
    paths = composing.compose(["recipe=fp8_hybrid", "recipe.backend=scaled_mm"]).paths
    assert (paths.low, paths.backend) == ("fp8_hybrid", "scaled_mm")
    assert composing.compose(["hierarchy=8/16_moe", "hierarchy.backend=simulated"]).paths.backend == "simulated"
    assert composing.in_full("++recipe.backend=te") == "++paths.backend=te"


def test_no_file_of_conf_is_left_out():
    """A new group needs a test here."""
    tested = {"experiment", "model", "data", "paths", "controller", "optim", "training", "records"}
    tested |= {"scores"}
    folders = {str(folder.relative_to(CONF)) for folder in CONF.rglob("*") if folder.is_dir()}
    nested = {"optim/transform", "hierarchy/4", "hierarchy/6", "hierarchy/8"} | {"hierarchy/int8"}
    assert folders == tested | nested | {"scale", "sweep", "debug", "stress", "variant", "recipe", "hierarchy"}


# ---- transforms, faults: what their files say is what the classes take ----


def test_every_transform_has_its_file():
    assert set(choices("optim/transform")) == {*TRANSFORMS, "none"}
    assert compose("controller.signal=zscore", "optim/transform=spam").arm_name == "int4_int8-zscore-spam"


@pytest.mark.parametrize("choice", choices("stress"))
def test_a_stress_file(choice):
    """All keys in every file, so that nothing of another choice stays; one that skips steps does not end the run."""
    tree = OmegaConf.to_container(OmegaConf.load(CONF / "stress" / f"{choice}.yaml"))
    stress = config.load({"stress": tree}).stress
    assert tree.keys() == config.to_dict(config.load({}))["stress"].keys()
    assert (stress.kind == "none") == (choice == "none") == (stress.rate == 0)
    if stress.kind in ("nan", "inf"):
        assert stress.duration < config.load({}).training.max_nonfinite_streak


@pytest.mark.parametrize("choice", choices("paths"))
def test_a_paths_name_says_its_paths(choice):
    paths = compose(f"paths={choice}").paths
    assert choice == paths.name == "_".join(path for path in (paths.low, paths.recovery) if path)


# ---- sweeps and variants ----


def axes_of(sweep: str) -> dict[str, list[str]]:
    """{key: its values}"""
    params = OmegaConf.load(CONF / "sweep" / f"{sweep}.yaml").hydra.sweeper.params
    commas = re.compile(r",(?![^\[]*\])")  # not those within a list
    return {key: [value.strip() for value in commas.split(str(values))] for key, values in params.items()}


@pytest.mark.parametrize("sweep", choices("sweep"))
def test_the_cells_of_a_sweep(sweep):
    """The first value of every axis and the last; of faults and transforms all, which nothing else composes."""
    axes = axes_of(sweep)
    assert axes["training.seed"] in (["0", "1", "2"], ["0", "1", "2", "3", "4"])
    for key, values in axes.items():
        assert len(set(values)) == len(values)
        if key in ("variant", "stress", "paths", "optim/transform", "scale"):
            assert set(values) <= set(choices(key))
    base = ["model.checkpoint=somewhere"] if sweep == "table7" else []
    long = max(len(axes.get(key, ())) for key in ("stress", "optim/transform"))
    assert long == 0 or len(choices("stress" if sweep == "faults" else "optim/transform")) == long
    places = range(long) if long else (0, -1)
    cells = [compose(f"sweep={sweep}", *base, *(f"{k}={v[i % len(v)]}" for k, v in axes.items())) for i in places]
    assert len({(cell.arm_name, config.config_hash(cell)) for cell in cells}) == len(cells)
    assert len({cell.experiment_name for cell in cells}) == 1
    assert all("cpu" in cell.scale_name for cell in cells)


@pytest.fixture(scope="module")
def variants(text_file) -> dict[str, config.Config]:
    """Each as the sweep of table 11 has it, whether it is an arm of it or not, but in a model of seven units."""
    small = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=1", "model.num_heads=2"]
    data = ["data=text", f"data.path={text_file}", "data.vocab_size=300"]
    length = ["training.seq_len=16", "training.batch_size=2", "training.steps=100", "training.threads=1"]
    words = ["sweep=table11", *small, *data, *length]
    return {name: composing.compose([*words, f"variant={name}"]) for name in choices("variant")}


def test_no_two_variants_are_one_arm(variants):
    """Two that are trained alike (gnmr_... at the default thresholds) have names of their own."""
    arms = {(loaded.arm_name, config.config_hash(loaded)) for loaded in variants.values()}
    assert len(arms) == len(variants)
    assert {loaded.experiment_name for loaded in variants.values()} == {"act_quant_stress"}
    assert set(axes_of("table11")["variant"]) > {name for name in variants if name.startswith("ranked")}


STEPPED = ["adapt", "always_high", "always_low", "bf16", "gnmr_8_16", "llm_int8", "two_stage_1.5_1.1"]
STEPPED += ["ranked_gap_exact", "ranked_gap_per_byte", "ranked_gsnr", "ranked_jacobian", "ranked_oracle"]
STEPPED += ["ranked_spike_share", "ranked_static_k", "ranked_underflow", "ranked_update_norm"]
"""One of each kind of evidence, recipe and warm-up. The others differ in numbers, or in signals that tests/controller
steps through."""


@pytest.mark.parametrize("name", STEPPED)
def test_a_variant_takes_two_steps(name, variants):
    """And from its first step on it spends what its name says."""
    loaded = variants[name]
    parts = assemble(loaded, Path("unused"), lambda _: None)
    step = TrainStep(parts.model, parts.controller, parts.optimizer, transform=parts.transform)
    batches = torch.from_numpy(parts.corpus.train[: 2 * 17].astype("int64")).view(2, 1, 17)
    batches = [batches[i % 2] for i in range(loaded.training.accumulation)]
    results = [step(batches, loaded.optim.lr) for _ in range(2)]
    assert all(torch.tensor(result.loss).isfinite() and not result.skipped for result in results)
    spent = results[1].decision.in_force.sum()
    if name.startswith("ranked") and name != "ranked_static_k":
        assert spent == loaded.controller.max_o == 4
    elif name == "always_high":  # which warms up first
        assert spent == 7
    elif name == "adapt":  # which does too, and whose unit is the one block
        assert spent == 1 and parts.plan.operators[0].path.name == "bf16"
    elif name in ("always_low", "bf16", "llm_int8"):
        assert spent == 0


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


TABLE_9 = {
    # hidden, MLP, heads, layers, tokens, rate; a quarter of the layers
    "130m": (768, 2048, 12, 12, 2.6e9, 1e-3, 3),
    "350m": (1024, 2736, 16, 24, 7.8e9, 5e-4, 6),
    "1.3b": (2048, 5472, 32, 24, 13.1e9, 5e-4, 6),
    "3b": (2560, 6848, 32, 32, 28.8e9, 3e-4, 8),
}
RECIPE_CPU = ["recipe_cpu_small", "recipe_cpu", "recipe_cpu_large"]


def test_no_scale_is_left_out():
    ours = {"cpu", "cpu_2bit", "cpu_transient", "moe_cpu", "pangu_cpu", "pretrain_cpu", "finetune_cpu", *RECIPE_CPU}
    theirs = {*TABLE_8, *(f"recipe_{size}" for size in TABLE_9), "moe_3.7b", "pangu_1b", "finetune_13b"}
    assert set(choices("scale")) == ours | theirs


def test_the_transient_scale_is_the_maps_cell():
    """The words with which the cell was run (docs/evidence.md)."""
    cell = "paths=int4_int8 paths.site=forward model.outlier_channels.number=0 stress=noise stress.rate=5"
    words = ["experiment=act_quant_stress", "scale=cpu_2bit", *cell.split(), "stress.magnitude=8"]
    ours = compose("experiment=act_quant_stress", "scale=cpu_transient")
    assert replace(ours, scale_name="cpu_2bit") == compose(*words)


@pytest.mark.parametrize("size", TABLE_9)
def test_a_scale_of_table_9_is_the_papers(size):
    loaded = compose("experiment=deepseek_recipe", f"scale=recipe_{size}")
    model, training, optim = loaded.model, loaded.training, loaded.optim
    *sizes, tokens, rate, max_o = TABLE_9[size]
    assert [model.hidden_size, model.intermediate_size, model.num_heads, model.num_layers] == sizes
    assert (training.seq_len, training.tokens_per_step, loaded.data.name) == (256, 131_072, "c4")
    assert training.steps * training.tokens_per_step == pytest.approx(tokens, rel=1e-3)
    assert (optim.lr, optim.warmup_frac, optim.min_lr_frac) == (rate, 0.1, 0.1)
    assert loaded.controller.max_o == max_o == model.num_layers // 4
    assert model.outlier_channels.number == 0 and loaded.scale_name == f"recipe_{size}"


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
    data = ["data=text", f"data.path={text_file}", "data.vocab_size=300", "training.threads=1"]
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
    plan = convert(model, PathSpec.of(loaded.paths.low, loaded.paths.recovery, targets=loaded.paths.targets))
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
    data = ["data=text", f"data.path={text_file}", "data.vocab_size=300", "training.threads=1"]
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
    plan = convert(model, PathSpec.of(loaded.paths.low, loaded.paths.recovery, targets=loaded.paths.targets))
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
    "deepseek_recipe": ("block", "6/8", "recipe_cpu", 4, "recipe_1.3b"),
    "moe_stress": ("expert", "8/16_moe", "moe_cpu", 4 * 8, "moe_3.7b"),
    "pangu_4bit": ("operator", "4/16", "pangu_cpu", 4 * 7, "pangu_1b"),
}


def in_force(loaded: config.Config) -> tuple:
    c, paths = loaded.controller, loaded.paths
    assert c.alpha_init is None or c.init_frac == 0.025
    return c.alpha_init, c.alpha, c.beta, c.warmup_frac, paths.low, paths.recovery


def test_no_experiment_and_no_hierarchy_is_left_out():
    assert set(choices("experiment")) == {*SETTINGS, "act_quant_stress", "pretrain", "finetune"}
    assert set(choices("hierarchy", "**/*")) == set(PAPER)


@pytest.mark.parametrize("experiment", SETTINGS)
def test_an_experiment_of_the_recipe_setting(experiment):
    unit, hierarchy, scale, units, large = SETTINGS[experiment]
    loaded = compose(f"experiment={experiment}")
    assert (loaded.experiment_name, loaded.scale_name, loaded.paths.unit) == (experiment, scale, unit)
    assert in_force(loaded) == PAPER[hierarchy] and loaded.controller.max_o == units // 4
    assert in_force(compose(f"experiment={experiment}", f"scale={large}")) == PAPER[hierarchy]


@pytest.mark.parametrize("hierarchy", PAPER)
def test_a_hierarchy_is_the_papers(hierarchy):
    assert in_force(compose("experiment=deepseek_recipe", f"hierarchy={hierarchy}")) == PAPER[hierarchy]


@pytest.mark.parametrize("recipe", choices("recipe"))
def test_a_recipe_is_a_static_run_of_every_experiment(recipe):
    for experiment in (*SETTINGS, "act_quant_stress"):
        paths = compose(f"experiment={experiment}", f"recipe={recipe}").paths
        assert (paths.name, paths.low, paths.recovery) == (recipe, recipe, None)


def test_the_cells_of_the_papers_tables():
    """Arms by name; and what two tables have in common is one run."""
    cells = {}
    for sweep in ("table2", "table4", "table9", "figure4", "table13", "table15"):
        ((axis, values),) = ((key, values) for key, values in axes_of(sweep).items() if key != "training.seed")
        cells[sweep] = [compose(f"sweep={sweep}", f"{axis}={value}") for value in values]
    arms = {sweep: [cell.arm_name for cell in own] for sweep, own in cells.items()}
    eight, six_eight = "fp8_hybrid", "sim_e3m2_fp8_hybrid-gnmr"
    assert arms["table2"][:4] == [six_eight, eight, "fp8_hybrid_bf16-gnmr", "bf16"]
    assert arms["table4"] == [eight, "fp8_hybrid_bf16-gnmr", "bf16"]
    assert arms["table9"] == arms["figure4"] == [six_eight] * 3
    assert arms["table13"] == [eight, "fp8_hybrid_bf16-gnmr", "bf16"]
    assert arms["table15"] == ["sim_e2m1", "sim_e2m1_bf16-gnmr", "bf16"]
    hashes = {sweep: {config.config_hash(cell) for cell in own} for sweep, own in cells.items()}
    assert hashes["table4"] < hashes["table2"] and hashes["table9"] == hashes["figure4"]
    assert len(hashes["table2"] & hashes["table9"]) == 1
    assert config.config_hash(compose("experiment=deepseek_recipe")) in hashes["table2"]


# ---- the fine-tuning setting ----


def test_fine_tuning_is_the_papers():
    """5.3 and E.3; LLaMA-2 13B has 40 decoder layers."""
    loaded = compose("experiment=finetune", "model.checkpoint=somewhere", "scale=finetune_13b")
    control, optim, adapter = loaded.controller, loaded.optim, loaded.model.adapter
    assert in_force(loaded) == PAPER["int8/16"] and loaded.paths.unit == "block" and control.observe == "adapter"
    assert (control.max_o, control.t_lock, control.delta, control.routing) == (10, 1, 5, "thresholded")
    assert (optim.name, optim.lr, optim.weight_decay, optim.clip_norm) == ("adamw", 2e-5, 0.0, 1.0)
    assert (adapter.rank, adapter.scaling, adapter.dropout, adapter.targets) == (8, 16, 0.05, ["*_proj"])


def test_the_arms_of_table_7_differ_in_their_paths_alone():
    cells = [
        compose("sweep=table7", "model.checkpoint=somewhere", f"variant={arm}") for arm in axes_of("table7")["variant"]
    ]
    assert [(cell.paths.low, cell.paths.recovery) for cell in cells] == [
        ("bf16", None),
        ("llm_int8", None),
        ("llm_int8", "bf16"),
    ]
    bare = [config.flatten(config.to_dict(cell)) for cell in cells]
    differ = {key for key in bare[0] if len({str(tree[key]) for tree in bare}) > 1}
    assert all(key.startswith(("paths.", "controller.")) for key in differ)
    assert cells[2].controller.max_o == 2 == 8 // 4


def test_what_pre_training_leaves_is_what_fine_tuning_begins_with():
    loaded = compose("experiment=pretrain")
    assert loaded.training.export_hf and (loaded.paths.low, loaded.paths.recovery) == ("bf16", None)
    assert loaded.model.num_layers == 4 * compose("scale=finetune_cpu", "model=llama").controller.max_o


def tiny_cell(text_file: Path, *words: str) -> config.Config:
    """As narrow as the tiles of deepseek_v3 allow, two blocks of 16 tokens; depth as small as it can be."""
    small = ["model.num_layers=2", "model.hidden_size=128", "model.intermediate_size=128", "controller.max_o=1"]
    small += ["training.seq_len=16", "training.batch_size=1", "training.accumulation=1", "training.threads=1"]
    window = ["model.outlier_channels.window=[2,2]"] if "sweep=recipe_stress" in words else []
    return composing.compose([*words, "data=text", f"data.path={text_file}", "data.vocab_size=300", *small, *window])


CELLS = [
    *((f"experiment={experiment}",) for experiment in SETTINGS),
    *(("experiment=deepseek_recipe", f"hierarchy={hierarchy}") for hierarchy in ("4/8", "8/16", "int8/16")),
    *(("experiment=deepseek_recipe", f"recipe={recipe}") for recipe in choices("recipe")),
    *((f"sweep={sweep}", f"variant={arm}") for sweep in ("table13", "table15") for arm in axes_of(sweep)["variant"]),
    *(("sweep=recipe_stress", f"paths={paths}") for paths in axes_of("recipe_stress")["paths"]),
    ("experiment=moe_stress", "paths.unit=layer"),
    ("experiment=deepseek_recipe", "hierarchy=8/16", "paths.backend=scaled_mm"),
]


@pytest.mark.parametrize("words", CELLS, ids=" ".join)
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
    assert parts.controller.names == units.get(loaded.paths.unit, [o.operator_name for o in parts.plan.operators])
    for group in parts.plan.units:
        assert {operator.recovering for operator in group.operators} == {group.name in parts.controller.active}
    active, control = len(parts.controller.active), loaded.controller
    assert active <= (0 if loaded.paths.recovery is None else control.max_o) or active == len(parts.controller.units)
    assert (active == len(parts.controller.units)) == (control.warmup_frac > 0)
    watched = ["layers.0.mlp.router", "layers.1.mlp.router"] if experts else ["embed_tokens", "norm"]
    assert list(second.monitored) == (watched if loaded.records.monitor else [])
    casts = loaded.paths.low != "bf16"
    assert set(second.saturation) == ({"input", "weight", "grad_output", "result"} if casts else set())


@pytest.mark.parametrize("scale", RECIPE_CPU)
def test_a_cpu_size_of_the_recipe_setting(scale):
    """The quarter of its blocks, widths for every recipe but in the smallest, and marks for table 2."""
    loaded = compose("experiment=deepseek_recipe", f"scale={scale}")
    assert loaded.controller.max_o * 4 == loaded.model.num_layers
    widths = loaded.model.hidden_size, loaded.model.intermediate_size
    assert all(width % 128 == 0 for width in widths) == (scale != "recipe_cpu_small")
    assert loaded.training.eval_every * 10 == loaded.training.steps


@pytest.mark.parametrize("size", ["recipe_3b", "moe_3.7b", "pangu_1b"])
def test_the_papers_size_has_its_units(size):
    """Built on the meta device, as the experiment has it."""
    experiment = next(name for name, own in SETTINGS.items() if size.split("_")[0] == own[4].split("_")[0])
    loaded = compose(f"experiment={experiment}", f"scale={size}")
    with torch.device("meta"):
        model = models.build(loaded.model, loaded.data.vocab_size, loaded.training.seq_len)
    paths = loaded.paths
    plan = convert(model, PathSpec.of(paths.low, paths.recovery, targets=paths.targets, unit=paths.unit))
    assert len(plan.units) // 4 == loaded.controller.max_o
    assert len(plan.operators) == {"recipe_3b": 7 * 32, "moe_3.7b": 2 * 64 * 3, "pangu_1b": 7 * 26}[size]
