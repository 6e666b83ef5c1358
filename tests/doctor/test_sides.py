"""Lists of a trainer and of a rollout engine: what they treat differently, after incidents that were reported."""

from __future__ import annotations

import pytest

from gnmr.auditing.sides import SideComparison, compare

ATTENTION = [f"self_attn.{x}_proj" for x in "qkvo"]
MLP = [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
EXPERTS = [f"mlp.experts.{i}.{x}_proj" for i in range(2) for x in ("gate", "up", "down")]


def model(*kinds: list[str]) -> list[str]:
    """The names of a model's linears; a kind has the linears of one block."""
    return [f"model.layers.{i}.{name}" for i, own in enumerate(kinds) for name in own] + ["lm_head"]


DENSE = model(*[[*ATTENTION, *MLP]] * 12)
MIXED = model([*ATTENTION, *MLP], *[[*ATTENTION, "mlp.gate", *EXPERTS]] * 3)
ALL = {"filter_fqns": []}
"""Everything is quantized."""
HEAD = {"filter_fqns": ["lm_head"]}


def unlike(found: SideComparison) -> set[str]:
    return {name for name, one in found.trainer.items() if one.low != found.rollout[name].low}


def ends(*parts: str, names: list[str] = DENSE) -> set[str]:
    return {name for name in names if name.endswith(parts)}


def text(found: SideComparison) -> str:
    return "\n".join(one.line() for one in found.findings)


# ---- incidents ----


def test_prime_rl_2442_a_dot_of_a_regular_expression_is_any_letter() -> None:
    """The dense blocks' gate_proj stayed in BF16 on the trainer, and was FP8 in the checkpoint that generated."""
    names = model(*[[*ATTENTION, *MLP]] * 3, *[[*ATTENTION, "mlp.router.gate", *EXPERTS]] * 2)
    rollout = {"ignore": ["lm_head", "re:.*mlp.router.gate"]}
    found = compare(names, trainer={"ignore_patterns": ["lm_head", "router", "mlp.gate."]}, rollout=rollout)
    assert unlike(found) == ends("mlp.gate_proj", names=names) and len(found.findings) == 1
    assert "ignore_patterns 'mlp.gate.', within a word" in text(found)
    assert compare(names, trainer={"ignore_patterns": ["lm_head", "router", r"mlp\.gate\."]}, rollout=rollout).sound


def test_verl_7519_a_part_of_a_name_swallows_the_fused_linear() -> None:
    """verl names a router in each block of a dense Qwen3-1.7B, and vLLM's ModelOpt config reads parts of names."""
    names = model(*[[*ATTENTION, *MLP]] * 28)
    gates = [f"model.layers.{i}.mlp.gate" for i in range(28)]
    found = compare(names, trainer=HEAD, rollout={"exclude_modules": ["lm_head", *gates]})
    assert unlike(found) == ends("gate_proj", "up_proj", names=names) and len(unlike(found)) == 56
    (finding,) = found.findings
    assert len(finding.where) == 56
    assert "'model.layers.*.mlp.gate', by the engine's name gate_up_proj" in finding.problem
    exact = compare(names, trainer=HEAD, rollout={"ignore": ["lm_head", *gates]})
    assert exact.sound and len(exact.notes[0].where) == 28, "verl 7918 reads them as whole names"


def test_nemo_rl_3614_two_spellings_miss_the_other_routers() -> None:
    """'router' and 'mlp.gate.' leave out neither NemotronH's mixer.gate nor Qwen2-MoE's shared_expert_gate."""
    names = model(["mlp.gate", "mlp.shared_expert_gate", *EXPERTS], ["mixer.gate", "block_sparse_moe.gate", *EXPERTS])
    trainer = {"modules_to_not_convert": ["lm_head", r".*\.gate", ".*shared_expert_gate"]}
    found = compare(names, trainer=trainer, rollout={"extra_high_precision_layers_hf": []})
    assert unlike(found) == ends("shared_expert_gate", "mixer.gate", "block_sparse_moe.gate", names=names)
    wider = {"extra_high_precision_layers_hf": [".gate.", "shared_expert_gate."]}
    assert compare(names, trainer=trainer, rollout=wider).sound


def test_compressed_tensors_733_a_saved_list_without_the_routers() -> None:
    """Routers are no nn.Linear in transformers 5, so that the list that a checkpoint saves lacks them."""
    trainer = {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    found = compare(MIXED, trainer=trainer, rollout={"ignore": ["lm_head"]})
    assert unlike(found) == ends("mlp.gate", names=MIXED) and "no entry of ignore names it" in text(found)
    routers = sorted(ends("mlp.gate", names=MIXED))
    assert compare(MIXED, trainer=trainer, rollout={"ignore": ["lm_head", *routers]}).sound


def test_vllm_48606_a_glob_where_whole_names_are_read() -> None:
    """The list of AMD Quark was copied into config.json, and its globs were read as names."""
    trainer = {"disabled_layers": ["lm_head", "*.mlp.gate"]}
    found = compare(MIXED, trainer=trainer, rollout={"ignore": ["lm_head", "*.mlp.gate"]})
    assert unlike(found) == ends("mlp.gate", names=MIXED)
    (note,) = found.notes
    assert "rollout.ignore '*.mlp.gate'" in note.line() and "* is not a wildcard" in note.right
    assert compare(MIXED, trainer=trainer, rollout={"ignore": ["lm_head", r"re:.*\.mlp\.gate$"]}).sound


def test_torchtitan_4008_the_head_has_another_name() -> None:
    """`output` was the head of older versions, and leaves out nothing of a model whose head is `lm_head`."""
    rollout = {"ignore": ["lm_head"]}
    found = compare(DENSE, trainer={"torchtitan.filter_fqns": ["output", "wo"]}, rollout={"ignore": ["lm_head"]})
    assert "lm_head" in unlike(found) and [one.where for one in found.notes] == [
        ("trainer.torchtitan.filter_fqns 'output'",)
    ]
    with pytest.raises(ValueError, match=r"trainer\.torchtitan\.filter_fqns=output: matches no linear"):
        compare(DENSE, trainer={"torchtitan.filter_fqns": ["output"]}, rollout=rollout)
    assert compare(DENSE, trainer={"torchtitan.filter_fqns": ["lm_head"]}, rollout=rollout).sound


def test_blocks_at_the_ends_are_counted_over_the_whole_model() -> None:
    """Megatron's flags and NeMo-RL's keys; a block count of one side alone is a difference."""
    trainer = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
    rollout = {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 2}
    assert compare(DENSE, trainer=trainer, rollout=rollout).sound
    found = compare(DENSE, trainer=trainer, rollout={"num_first_layers_in_bf16": 1})
    assert unlike(found) == {name for name in DENSE if name.startswith(("model.layers.10.", "model.layers.11."))}


def test_a_linear_has_one_name_in_the_checkpoint_and_another_in_memory() -> None:
    """transformers 5 calls Mixtral's block_sparse_moe mlp; lists of libraries that load the checkpoint do not."""
    saved = [f"block_sparse_moe.{x}" for x in ("gate", *(f"experts.{i}.w{n}" for i in range(2) for n in (1, 2, 3)))]
    names = model(*[[*ATTENTION, *saved]] * 2)
    parts = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
    in_memory = {}
    for name in (name for name in names if "block_sparse_moe" in name):
        *path, leaf = name.replace("block_sparse_moe", "mlp").split(".")
        in_memory[name] = ".".join([*path, parts.get(leaf, leaf)])
    engine = {"ignore": ["lm_head", r"re:.*\.block_sparse_moe\.experts"]}
    for trainer in (
        {"filter_fqns": ["lm_head", "mlp.experts"]},
        {"filter_fqns": ["lm_head", "block_sparse_moe.experts"]},
        {"quant_cfg": ["*mlp.experts*:off", "*lm_head*:off"]},
        {"modules_to_not_convert": ["lm_head", r".*mlp\.experts"]},
    ):
        found = compare(names, trainer=trainer, rollout=engine, in_memory=in_memory)
        assert found.sound and not found.notes and not found.trainer["model.layers.1.block_sparse_moe.experts.0.w3"].low
    wrong = {"ignore": ["lm_head", "model.layers.0.mlp.gate"]}
    found = compare(names, trainer={"filter_fqns": ["lm_head"]}, rollout=wrong, in_memory=in_memory)
    assert [one.right for one in found.notes] == ["'model.layers.0.block_sparse_moe.gate', as the checkpoint calls it"]
    both = {"ignore": [*wrong["ignore"], "model.layers.0.block_sparse_moe.gate"]}
    found = compare(names, trainer={"filter_fqns": ["lm_head", "layers.0.mlp.gate"]}, rollout=both, in_memory=in_memory)
    assert found.sound and not found.notes, "a list may have the names of both"


def test_linears_in_the_checkpoints_file_alone_are_compared_with_nothing() -> None:
    """The layer of GLM-4.5 that predicts further tokens is no part of the model that is trained."""
    alone = [f"model.layers.12.{name}" for name in ("eh_proj", *ATTENTION)]
    out = {"ignore": ["lm_head", r"re:model\.layers\.12\."]}
    found = compare(DENSE, trainer=HEAD, rollout=out, unloaded=alone)
    assert found.sound and not found.notes and not {*alone} & {*found.trainer}
    assert found.verdict().endswith("both sides agree; 5 more are in the checkpoint's file alone and were not compared")
    found = compare(DENSE, trainer=HEAD, rollout={"ignore": ["lm_head"]}, unloaded=alone)
    assert (
        found.sound and [one.kind for one in found.notes] == ["in the file alone"] and found.notes[0].where == (*alone,)
    )
    last = {"num_first_layers_in_bf16": 0, "num_last_layers_in_bf16": 1}
    found = compare(DENSE, trainer={"filter_fqns": ["lm_head", "layers.11."]}, rollout=last, unloaded=alone)
    assert found.sound, "blocks are counted without it"


# ---- one entry more, and equal lists in other words ----

PLANTED = [
    ({"filter_fqns": ["lm_head", "layers.1"]}, {"ignore": ["lm_head", r"re:.*layers\.1\."]}, 14),
    (HEAD, {"ignore": ["lm_head", "model.layers.3.self_attn.qkv_proj"]}, 3),
    (HEAD, {"ignored_layers": ["model.layers.3.mlp.down_proj"]}, 1),
    (HEAD, {"sglang.ignored_layers": ["layers.0.mlp"]}, 3),
    ({"ignore_patterns": ["lm_head", "o_proj"]}, {"quantization_ignored_layer_kws": [".11.", "o_proj"]}, 6),
    (
        {"modules_to_not_convert": ["lm_head", "down_proj"]},
        {"ignore": ["lm_head", "re:.*down_proj$", "re:.*o_proj"]},
        12,
    ),
    ({"quant_cfg": ["*lm_head*:off", "*:on"]}, {"ignore": ["lm_head"]}, 1),
    ({"torchtitan.filter_fqns": ["lm_head", "feed_forward.w2"]}, {"exclude_modules": ["lm_head"]}, 12),
    ({"fqns": ["layers.0.", "layers.10"]}, {"num_first_layers_in_bf16": 1}, 77),
    (HEAD, {"extra_high_precision_layers_megatron": ["linear_fc2."]}, 12),
    ({"targets": ["*_proj"]}, {"disabled_layers": ["lm_head", "*.0.*"]}, 7),
    (ALL, {"ignore": ["lm_head"]}, 1),
]
EQUAL = [
    ({"filter_fqns": ["lm_head", "down_proj"]}, {"ignore": ["lm_head", r"re:.*\.down_proj$"]}),
    ({"filter_fqns": ["lm_head", "qkv", "gate_proj", "up_proj"]}, {"ignore_patterns": ["lm_head", "(gate|up)_proj"]}),
    ({"ignore_patterns": ["lm_head", r"layers\.1\."]}, {"sglang.ignored_layers": ["layers.1"]}),
    ({"modules_to_not_convert": ["lm_head", "o_proj"]}, {"quantization_ignored_layer_kws": ["o_proj"]}),
    ({"torchtitan.filter_fqns": ["lm_head", "attention.qkv_linear"]}, {"ignore": ["lm_head", "re:.*[qkv]_proj"]}),
    (HEAD, {"quant_cfg": ["*:off", "*weight_quantizer:on", "*lm_head*:off"]}),
    ({"fqns": ["feed_forward.w2"]}, {"quant_cfg": ["*:off", "*down_proj.weight_quantizer:on"]}),
    (
        {"filter_fqns": ["lm_head", "layers.0.", "layers.11"]},
        {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 1},
    ),
    (
        {"disabled_layers": ["lm_head", "*.mlp.gate_proj", "*.mlp.up_proj"]},
        {"exclude_modules": ["lm_head", "gate_up_proj"]},
    ),
    ({"filter_fqns": ["lm_head", "mlp"]}, {"extra_high_precision_layers_megatron": ["mlp."]}),
    ({"ignore_patterns": ["lm_head", "q_proj", "k_proj", "v_proj"]}, {"extra_high_precision_layers_megatron": ["qkv"]}),
    ({"targets": ["*_proj"]}, {"ignored_layers": []}),
]


@pytest.mark.parametrize(("trainer", "rollout", "count"), PLANTED)
def test_one_entry_more_is_named(trainer: dict, rollout: dict, count: int) -> None:
    found = compare(DENSE, trainer=trainer, rollout=rollout)
    assert len(unlike(found)) == count and not found.sound, text(found)
    assert {name for one in found.findings if one.kind == "differs" for name in one.where} == unlike(found)
    again = compare(DENSE, trainer=rollout, rollout=trainer)
    assert unlike(again) == unlike(found), "the sides may be exchanged"


@pytest.mark.parametrize(("trainer", "rollout"), EQUAL)
def test_equal_lists_in_other_words_are_silent(trainer: dict, rollout: dict) -> None:
    found = compare(DENSE, trainer=trainer, rollout=rollout)
    assert found.sound and not unlike(found), text(found)
    assert found.verdict().endswith("both sides agree")


def test_an_engine_refuses_a_part_of_what_it_fuses() -> None:
    only = {"ignore": ["lm_head", "re:.*q_proj"]}
    found = compare(DENSE, trainer=only, rollout=only)
    assert not unlike(found) and [one.kind for one in found.findings] == ["split", "split"], text(found)
    assert "q_proj, 1 of the 3" in found.findings[1].problem and len(found.findings[1].where) == 12
    experts = {"ignored_layers": ["model.layers.1.mlp.experts.0.down_proj"]}
    found = compare(MIXED, trainer=HEAD, rollout=experts)
    assert unlike(found) == {name for name in MIXED if "layers.1.mlp.experts." in name}, "one leaves out all"


MISTAKES = [
    ({"filter_fqn": ["a"]}, "must be one of"),
    ({"ignore_patterns": ["lm_head", "a("]}, "is not a regular expression"),
    ({"ignore": ["lm_head", "re:a("]}, "is not a regular expression"),
    ({"ignore": ["lm_head", ""]}, "has an empty entry"),
    ({"filter_fqns": ["lm_haed"]}, "matches no linear of this model; 'lm_head'"),
    ({"quant_cfg": ["*lm_head*"]}, "must end in :on or :off"),
    ({"quant_cfg": [{"enable": False}]}, "must have a quantizer_name"),
    ({"num_first_layers_in_bf16": ["two"]}, "must be one whole number"),
    ({"num_layers_at_end_in_bf16": 1}, "name rollout.num_layers_at_start_in_bf16 too"),
    ({}, "has no list"),
]


@pytest.mark.parametrize(("lists", "message"), MISTAKES)
def test_a_mistake_is_one_line(lists: dict, message: str) -> None:
    with pytest.raises(ValueError, match="rollout") as raised:
        compare(DENSE, trainer=ALL, rollout=lists)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_quant_cfg_as_modelopt_writes_it() -> None:
    off, on = {"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8}}
    head = {"quantizer_name": "*lm_head*", "enable": False}
    assert compare(DENSE, trainer=HEAD, rollout={"quant_cfg": [off, on, head]}).sound
    assert unlike(compare(DENSE, trainer=HEAD, rollout={"quant_cfg": [head, off, on]})) == {"lm_head"}
