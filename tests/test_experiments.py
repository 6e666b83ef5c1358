"""Every file of conf/ composes; published sizes are the paper's, and are built dry; settings take two real steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gnmr.control import Unit
from gnmr.control.signals import Context, build_signal
from gnmr.conversion import PathSpec, convert
from gnmr.errors import UserError
from gnmr.lab import config, models
from gnmr.lab.config import compose as composing
from gnmr.lab.train.build import assemble, first_batch, train_step

CHECKPOINT = "model.checkpoint=somewhere"
SETTINGS = {
    # alpha in the first stage, alpha, beta, share in 16 bits; low and recovery path; unit
    ("act_quant_stress", "model=llama_60m"): (None, 1.5, 1.3, 0.0, "int4", "int8", "operator"),
    ("deepseek_recipe",): (1.5, 1.1, 1.5, 0.0, "sim_e3m2", "fp8_hybrid", "block"),
    ("deepseek_recipe", "model=llama_130m"): (1.5, 1.1, 1.5, 0.0, "sim_e3m2", "fp8_hybrid", "block"),
    ("moe_stress",): (None, 0.9, None, 0.05, "fp8_hybrid", "bf16", "expert"),
    ("moe_stress", "model=moe_3.7b"): (None, 0.9, None, 0.05, "fp8_hybrid", "bf16", "expert"),
    ("pangu_4bit", "model=pangu_1b"): (None, 0.4, None, 0.0, "sim_e2m1", "bf16", "operator"),
    ("finetune",): (1.5, 1.1, 1.5, 0.0, "llm_int8", "bf16", "block"),
}
GROUPS = sorted(path.name for path in composing.conf_dir().iterdir() if path.is_dir())


def needed(words: Collection[str]) -> list[str]:
    """Return what these words lack, because everyone has to give it."""
    found = [CHECKPOINT] if {"experiment=finetune", "model=pretrained", "model=llama2_13b"} & {*words} else []
    return found + (["data.path=somewhere"] if "experiment=english" in words else [])


@cache
def compose(*words: str) -> config.Config:
    """Compose once: it takes a quarter of a second."""
    return composing.compose([*words, *needed(words)])


@cache
def default() -> DictConfig:
    return composing.composed_tree([], hydra=False)


def changed(*words: str) -> config.Config:
    """The default config with these keys changed, which takes less time than to compose it with them."""
    return composing.load_composed(OmegaConf.merge(default(), OmegaConf.from_dotlist(list(words))), words)


def choices() -> list[tuple[str, ...]]:
    """Words in which every choice of every group stands once; those of four groups that go together side by side."""
    words = {group: [f"{group}={name}" for name in composing.choices_of(group)] for group in GROUPS if group != "sweep"}
    beside = zip_longest(*(words.pop(group) for group in ("controller", "data", "model", "precision")))
    rows = [tuple(filter(None, row)) for row in beside] + [(word,) for group in words.values() for word in group]
    return [
        row for row in rows if row[0].removeprefix("experiment=") not in {key[0] for key in SETTINGS if not key[1:]}
    ]


@cache
def cells_of(sweep: str, *words: str) -> dict[str, config.Config]:
    """Each arm of a sweep, of its first seed."""
    return composing.compose_arms([f"sweep={sweep}", *words, *needed(words)])


SWEEPS = [(sweep,) for sweep in composing.choices_of("sweep")]
SWEEPS += [("paper/tables_7_13_15", f"experiment={name}") for name in ("finetune", "pangu_4bit")]


def quick(of: Iterable[Any], some: Collection[Any]) -> list[Any]:
    """Return parameters of which all but `some` are slow."""
    return [pytest.param(one, marks=() if one in some else pytest.mark.slow, id=str(one)) for one in of]


@pytest.mark.parametrize(
    "words, name",
    [
        (["data.path=my.txt"], "text"),
        (["data.path=my.txt", "data.name=stdlib"], "stdlib"),
        (["data.path=my.txt", "data.name=c4"], "c4"),
        (["data.path=my_gsm8k", "experiment=finetune", "model.checkpoint=base"], "gsm8k"),
        ([], "stdlib"),
    ],
)
def test_a_path_of_text_is_read_without_the_name_of_a_corpus(words, name):
    assert compose(*words).data.name == name


@pytest.mark.parametrize("words", quick(SWEEPS, [("act_quant_stress",), ("faults",)]))
def test_every_sweep_composes(words: tuple[str, ...]) -> None:
    """Its arms are different runs of one experiment with signals that there are, and those that it runs are its own."""
    tree, cells = composing.composed_tree([f"sweep={words[0]}", *words[1:]]), cells_of(*words)
    assert len(next(iter(tree.hydra.sweeper.params.values())).split(",")) in (3, 5, 10), "seeds or orders"
    units = [Unit(f"layers.{i}", (nn.Parameter(torch.ones(2)),)) for i in range(4)]
    for cell in cells.values():
        spec = cell.controller.spec(cell.total_steps)
        build_signal(
            spec.signal, spec.signal_options(), Context.of(units, max_o=1, steps=cell.total_steps, hold=spec.hold)
        )
    assert len({config.config_hash(cell) for cell in cells.values()}) == len(cells)
    assert len({cell.experiment_name for cell in cells.values()}) <= 1
    assert {*tree.hydra.sweeper.params.get("arm", "").split(",")} - {""} <= {*cells}


@pytest.mark.parametrize("words", choices(), ids=" ".join)
def test_every_choice_composes(words: tuple[str, ...]) -> None:
    loaded = compose(*words)
    if words[0].startswith("experiment="):
        assert words[0].partition("=")[2].startswith(loaded.experiment_name)


def test_the_arms_of_act_quant_stress() -> None:
    cells = cells_of("act_quant_stress")
    assert {name: cell.arm_name for name, cell in cells.items()} == {
        "bf16": "bf16",
        "int4": "int4",
        "int8": "int8",
        "gnmr": "int4_int8-gnmr",
    }
    assert cells["gnmr"] == compose("experiment=act_quant_stress")
    for cell in cells.values():
        differing = {
            key for key, value in config.identity(cell).items() if value != config.identity(cells["gnmr"])[key]
        }
        assert differing <= {"precision.name", "precision.low", "precision.recovery"}


@pytest.mark.slow
def test_what_is_typed_wins_over_an_arm_and_an_arm_over_its_sweep() -> None:
    assert cells_of("act_quant_stress")["bf16"].precision.low == "bf16"
    assert compose("sweep=act_quant_stress", "arm=bf16", "precision.low=e4m3").precision.low == "e4m3"
    pins = compose("sweep=paper/table1", "arm=adapt").controller
    assert (pins.options, pins.name) == ({"calibration_frac": 0.0252, "k_frac": 0.25}, "adapt")
    with pytest.raises(UserError, match="arm=adopt: is not an arm of this sweep: did you mean adapt"):
        compose("sweep=paper/table1", "arm=adopt")
    assert changed("arm=mine").arm_name == "mine", "without arms it is the run's name"


def test_words_of_an_arm_that_make_no_sense_name_the_arm() -> None:
    tree = composing.composed_tree(["+arms.mine=''", "arm=mine"], hydra=False)
    for words in ("optim.lrr=1", "precision.low=[a", "'", "controller.alpha=much"):
        own = deepcopy(tree)
        own.arms.mine = words
        with pytest.raises(UserError, match=r"^arms\.mine="):
            composing.load_composed(own, ["arm=mine"])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("precision.recovery=null",), "int4"),
        (("precision.low=fp8_hybrid", "precision.recovery=bf16", "controller.signal=random"), "fp8_hybrid_bf16-random"),
        (("controller.routing=ranked", "optim.name=scale"), "int4_int8-gnmr-ranked-scale"),
        (("precision.name=mine", "controller.name=held"), "mine-held"),
        (("controller.signal=module:Own",), "int4_int8-Own"),
    ],
)
def test_an_arms_name_says_what_it_is(words: tuple[str, ...], name: str) -> None:
    assert changed(*words).arm_name == name


# ---- the paper's settings and sizes ----


@pytest.mark.parametrize("words", quick(SETTINGS, [*SETTINGS][:2] + [key for key in SETTINGS if not key[1:]]))
def test_a_setting_is_the_papers(words: tuple[str, ...]) -> None:
    loaded = compose(f"experiment={words[0]}", *words[1:])
    assert words[0].startswith(loaded.experiment_name)
    c, precision = loaded.controller, loaded.precision
    found = c.alpha_init, c.alpha, c.beta, c.warmup_frac, precision.low, precision.recovery, precision.unit
    assert found == SETTINGS[words] and (c.t_lock, c.delta, c.routing) == (1, 5, "thresholded")


def test_fine_tuning_is_the_papers() -> None:
    """5.3 and E.3; LLaMA-2 13B has 40 decoder layers."""
    loaded = compose("experiment=finetune", "model=llama2_13b")
    optim, adapter = loaded.optim, loaded.model.adapter
    assert (loaded.controller.max_o, loaded.controller.observe) == (10, "adapter")
    assert (optim.name, optim.lr, optim.weight_decay, optim.clip_norm) == ("adamw", 2e-5, 0.0, 1.0)
    assert (adapter.rank, adapter.dropout) == (8, 0.05)
    assert loaded.data.name == "gsm8k" and loaded.training.tokens_per_step == 16 * 2048


SIZES = {
    # hidden, MLP, heads, layers; tokens a step, tokens, rate; units of the setting, parameters
    "llama_60m": (512, 1376, 8, 8, 131_072, 1.3e9, 2.5e-3, 7 * 8, 58_073_600),
    "llama_130m": (768, 2048, 12, 12, 131_072, 2.6e9, 2.5e-3, 7 * 12, 134_105_856),
    "llama_350m": (1024, 2736, 16, 24, 131_072, 7.8e9, 1e-3, 7 * 24, 367_969_280),
    "llama_1.3b": (2048, 5461, 32, 24, 131_072, 13.1e9, 6e-4, 7 * 24, 1_339_082_752),
    "llama_3b": (2560, 6848, 32, 32, 131_072, 28.8e9, 3e-4, 32, 2_685_831_680),
    "moe_3.7b": (7168, 2048, 128, 3, 131_072, 3.8e9, 5e-5, 3 * 64, 6_515_775_488),
    "pangu_1b": (1536, 6144, 12, 26, 1_048_576, 4e9, 2e-3, 7 * 26, 1_155_792_384),
}
EXPERIMENTS = {"llama_3b": "deepseek_recipe", "moe_3.7b": "moe_stress", "pangu_1b": "pangu_4bit"}


@pytest.mark.parametrize("size", quick(SIZES, ["llama_60m"]))
def test_a_published_size_is_the_papers_and_is_built_dry(size: str) -> None:
    """Tables 8, 9, 12 and 14. On the meta device: full depth and vocabulary, its units, and one forward pass."""
    loaded = compose(f"experiment={EXPERIMENTS.get(size, 'act_quant_stress')}", f"model={size}")
    model, training, optim, precision = loaded.model, loaded.training, loaded.optim, loaded.precision
    hidden, mlp, heads, layers, step, tokens, rate, units, parameters = SIZES[size]
    found = model.hidden_size, model.intermediate_size, model.num_heads, model.num_layers, training.tokens_per_step
    assert found == (hidden, mlp, heads, layers, step) and model.outlier_channels.number == 0
    assert training.steps * step == pytest.approx(tokens, rel=2e-3)
    assert (optim.lr, optim.warmup_frac, optim.min_lr_frac, optim.clip_norm) == (rate, 0.1, 0.1, None)
    assert (training.dtype, loaded.data.name) == ("bfloat16", "c4") and size.endswith(loaded.scale_name)
    with torch.device("meta"):
        built = models.build(model, loaded.data.vocab_size, training.seq_len).to(torch.bfloat16)
        ids = torch.zeros(1, 16, dtype=torch.int64)
    assert sum(weight.numel() for weight in built.parameters()) == parameters
    spec = PathSpec.of(precision.low, precision.recovery, targets=precision.targets, unit=precision.unit)
    assert len(convert(built, spec).units) == units
    assert built(ids).shape == (1, 16, loaded.data.vocab_size)
    assert loaded.controller.max_o == (
        4 if size in ("llama_60m", "llama_130m", "llama_350m", "llama_1.3b") else units // 4
    )


# ---- two real steps ----

STEPS = [
    *((f"experiment={name}",) for name in ("act_quant_stress_2bit", "deepseek_recipe", "moe_stress", "pangu_4bit")),
    ("experiment=act_quant_stress", "model=llama_1.3b"),
    ("experiment=moe_stress", "precision.unit=layer"),
    ("sweep=paper/table1", "arm=adapt", "training.steps=100"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", STEPS, ids=" ".join)
def test_a_setting_takes_two_steps(words: tuple[str, ...], text_file: Path) -> None:
    """As narrow as the tiles of deepseek_v3 allow, two blocks of 16 tokens; whole units are routed, and no more."""
    small = ["model.num_layers=2", "model.hidden_size=128", "model.intermediate_size=128", "model.num_heads=4"]
    small += ["training.seq_len=16", "training.batch_size=1", "training.accumulation=1", "training.threads=1"]
    cap = [] if "arm=adapt" in words else ["controller.max_o=1"]
    data = ["data.name=text", f"data.path={text_file}", "data.vocab_size=300"]
    loaded = composing.compose([*words, *data, *small, *cap])
    parts = assemble(loaded, Path("unused"), lambda _: None)
    step = train_step(parts)
    (block,) = first_batch(parts)
    results = []
    for number in (1, 2):
        for stress in parts.stress:
            stress.begin_step(number)
        results.append(step([block], loaded.optim.lr))
    first, second = results
    assert not first.skipped and not second.skipped
    assert parts.stress or second.loss < first.loss
    assert first.saved_bytes == first.saved_bytes_predicted
    for unit in parts.converted.units:
        assert {operator.recovering for operator in unit.operators} == {unit.name in parts.router.active}
    active, control = len(parts.router.active), loaded.controller
    everything = len(parts.router.units)
    assert active == everything if control.warmup_frac else active <= (loaded.precision.recovery is not None)
