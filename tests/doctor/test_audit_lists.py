"""Lists of names: what an entry matches by the rule of its library, traps, near misses, and what was not applied."""

from __future__ import annotations

import re

import pytest
import torch
from audited import lines, net, said
from torch import nn

import gnmr
from gnmr.conversion import PathSpec, convert
from gnmr.plan.lists import LISTS, Entry, entries_of, fits_none, matches, read_lists, repaired, suggested

NAMES = [f"layers.{i}.mlp.{name}" for i in range(12) for name in ("gate_proj", "up_proj", "down_proj")] + ["lm_head"]


@pytest.mark.parametrize(
    ("which", "text", "meant", "swept"),
    [
        ("filter_fqns", "layers.1", 3, 6),  # layers.10 and layers.11
        ("filter_fqns", "layers.1.", 3, 0),
        ("filter_fqns", "proj", 0, 36),
        ("filter_fqns", "head", 0, 1),
        ("fqns", "1.mlp", 3, 3),  # layers.11
        ("modules_to_not_convert", "layers.1", 3, 0),
        ("modules_to_not_convert", "layers.*", 36, 0),
        ("modules_to_not_convert", "up_proj", 12, 0),
        ("modules_to_not_convert", "proj", 0, 36),
        ("targets", "layers.1.*", 3, 0),
        ("targets", "layers.1*", 3, 6),
        ("targets", "up_proj", 12, 0),
        ("targets", "layers.1?.*", 6, 0),
        ("pins", "*_proj", 36, 0),
    ],
)
def test_an_entry_means_what_its_library_reads(which: str, text: str, meant: int, swept: int) -> None:
    (entry,) = entries_of(which, [text], NAMES)
    assert (len(entry.meant), len(entry.swept)) == (meant, swept)
    assert entry.trap == (swept > 0 and (meant > 0)), entry


@pytest.mark.slow  # it imports transformers
@pytest.mark.parametrize("name", [*NAMES[:6], "lm_head"])
@pytest.mark.parametrize("text", ["layers.1", "up_proj", "proj", "layers.*", "lm_head", "mlp", "layers.1.mlp.gate"])
def test_the_rule_of_transformers_is_its_own(text: str, name: str) -> None:
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    assert matches(text, name, "start") != quantizers.should_convert_module(name, [text])


def test_a_repaired_entry_means_the_whole_words_alone() -> None:
    for which, text, better in (
        ("filter_fqns", "layers.1", "layers.1."),
        ("fqns", "1.mlp", ".1.mlp"),
        ("targets", "layers.1*", "layers.1.*"),
    ):
        (entry,) = entries_of(which, [text], NAMES)
        assert repaired(entry, NAMES) == better
        assert entries_of(which, [better], NAMES)[0].names == entry.meant


CHECKPOINT = [
    f"model.layers.{i}.{name}"
    for i in range(12)
    for name in (
        *(f"self_attn.{letter}_proj" for letter in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
] + ["lm_head"]
MEANT = ["layers.3", "layers.1", "model.layers.3.mlp", "q_proj", "self_attn", "up_proj", "lm_head", "output", "lm_haed"]
MEANT += ["*.layers.3.*", "re:layers[.]3.*", r"re:layers\.3\..*", "mlp.up", "feed_forward.w2", "QPROJ", "nobody"]


@pytest.mark.parametrize("which", LISTS)
def test_advice_is_an_entry_that_the_library_matches(which: str) -> None:
    """Also for an entry that is a name of the model, but no entry of this list."""
    rule = LISTS[which].rule
    texts = ["0", "1", "99"] if rule in ("first", "last") else MEANT
    for text in [f"{text}:off" for text in texts] if rule == "quantizer" else texts:
        advice = suggested(text, CHECKPOINT, which)
        if rule in ("first", "last"):
            assert advice.startswith("a number of blocks") and not fits_none(Entry(which, "0", (), ()), CHECKPOINT)
            continue
        entry = re.search(r"'([^']+)'$", advice) or re.match(r"names such as (\S+)$", advice)
        assert entry is not None, (text, advice)
        (fed_back,) = entries_of(which, read_lists({which: [entry[1]]})[which], CHECKPOINT)
        assert fed_back.names and not fed_back.trap, (text, advice)
        if text.startswith("layers.3") and advice.startswith("'"):
            assert {*fed_back.names} == {name for name in CHECKPOINT if ".layers.3." in name}


@pytest.mark.parametrize(
    ("which", "text", "advice"),
    [
        ("ignore", "layers.3", "'re:.*layers.3'"),
        ("ignore", "layers.1", "'re:.*layers.1[.].*'"),
        ("ignored_layers", "q_proj", "their names, such as 'model.layers.0.self_attn.q_proj'"),
        ("disabled_layers", "layers.3", "'*layers.3*'"),
        ("quant_cfg", "layers.3:off", "'*layers.3*:off'"),
        ("modules_to_not_convert", "layers.3", "'.*layers.3'"),
        ("targets", "layers.3", "'layers.3.*'"),
        ("filter_fqns", "output", "'lm_head'"),
        ("filter_fqns", "LM_HEAD", "'lm_head'"),
        ("filter_fqns", "layer.1.mlp", "'layers.1.mlp'"),
        ("filter_fqns", "zzz", "names such as model.layers.0.self_attn.q_proj"),
        ("filter_fqns", "feed_forward.w2", "'down_proj'"),
        ("fqns", "up_proj", "'w3'"),
    ],
)
def test_advice_keeps_the_words_and_takes_the_spelling_of_the_list(which: str, text: str, advice: str) -> None:
    assert suggested(text, CHECKPOINT, which) == advice


def low(skip: object = None, **options: bool) -> nn.Module:
    model = net(blocks=12, **options)
    names = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head" and not (skip and skip(n))
    ]
    convert(model, PathSpec(low="fp8_hybrid", recovery=None, targets=names))
    return model


def test_a_trap_a_miss_and_a_list_that_was_not_applied() -> None:
    model = low(lambda name: "layers.1" in name)  # as the library reads it: layers.10 and layers.11 too
    found = gnmr.audit(model, lists={"filter_fqns": ["layers.1", "lm_head"]})
    assert said(found) == [("substring", "filter_fqns 'layers.1'")], lines(found)
    assert "means 2 linears between dots, and 4 more within" in lines(found) and "right would be: 'layers.1.'" in lines(
        found
    )
    found = gnmr.audit(low(), lists={"filter_fqns": ["layers.3.", "lm_haed"]})
    assert said(found) == [("no match", "filter_fqns 'lm_haed'"), ("not applied", "layers.3.up_proj")], lines(found)
    assert "right would be: 'lm_head'" in lines(found) and len(found.findings[1].where) == 2


def test_a_list_that_a_pin_does_not_replace_is_reported_with_the_gemms_that_are_cast() -> None:
    model, pins = net(), {"layers.0.up_proj": {"fprop": "bf16"}}
    convert(model, PathSpec(low="fp8_hybrid", recovery="bf16", exclude=["lm_head"], pins=pins))
    found = gnmr.audit(model, lists={"filter_fqns": ["layers.0.up_proj", "lm_head"]})
    assert lines(found).startswith(
        "not applied: layers.0.up_proj: filter_fqns 'layers.0.up_proj' leaves it out, and it is in low precision "
        "(dgrad and wgrad in e5m2/tensor x e4m3/tensor); right would be: all GEMMs in 16 bits; "
    ), lines(found)


def test_what_no_list_leaves_out_should_be_converted() -> None:
    model = low(lambda name: name == "layers.4.up_proj")
    assert said(gnmr.audit(model, lists={"filter_fqns": ["lm_head"]})) == [("not converted", "layers.4.up_proj")]
    assert gnmr.audit(model, lists={"filter_fqns": ["lm_head", "layers.4.up_proj"]}).sound
    found = gnmr.audit(low(), lists={"fqns": ["up_proj"]})
    assert said(found) == [("not applied", "layers.0.down_proj")] and len(found.findings[0].where) == 12
    assert "no entry names it" in lines(found)


def test_modules_without_a_gemm_and_names_of_other_versions_are_no_misses() -> None:
    given = {"modules_to_not_convert": ["lm_head", "embed_tokens"], "filter_fqns": ["output", "lm_head", "norm"]}
    assert gnmr.audit(low(), lists=given).sound
    assert said(gnmr.audit(low(), lists={"filter_fqns": ["output"]}))[0] == ("no match", "filter_fqns 'output'")


@pytest.mark.parametrize(("which", "text"), [("ignore", "layers.1"), ("ignored_layers", "layers.1")])
def test_a_block_in_a_list_of_whole_names_leaves_out_none_of_its_linears(which: str, text: str) -> None:
    found = gnmr.audit(low(), lists={which: [text, "lm_head"]})
    assert said(found) == [("no match", f"{which} '{text}'")], lines(found)
    assert (
        "matches layers.1, and none of the linears in it; right would be: their names, such as 'layers.1.up_proj'"
        in (lines(found))
    )
    assert gnmr.audit(low(lambda name: "layers.1." in name), lists={"modules_to_not_convert": ["layers.1"]}).sound


@pytest.mark.slow  # it imports transformers
@pytest.mark.parametrize(
    ("which", "texts", "unmatched"),
    [
        ("ignored_layers", ["model.layers.0.block_sparse_moe.experts", "model.layers.0.block_sparse_moe.gate"], []),
        ("ignored_layers", ["model.layers.0.mlp.experts", "model.layers.0.mlp.gate"], [0, 1]),
        ("quantization_ignored_layer_kws", ["w2", "mlp"], [1]),
        ("ignore", ["lm_head", "re:.*block_sparse_moe.experts", "re:.*mlp.experts"], []),
        (
            "modules_to_not_convert",
            ["lm_head", "model.layers.0.block_sparse_moe.experts", "model.layers.0.mlp.gate"],
            [],
        ),
        ("disabled_layers", ["*lm_head*", "*.mlp.experts.*", "*block_sparse_moe*"], [2]),
    ],
)
def test_lists_of_engines_are_read_by_the_names_in_the_checkpoint(
    which: str, texts: list[str], unmatched: list[int]
) -> None:
    transformers = pytest.importorskip("transformers")
    widths = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.MixtralConfig(num_hidden_layers=1, vocab_size=64, **widths, **experts)
    model = transformers.MixtralForCausalLM(config)
    convert(model, PathSpec(low="fp8_hybrid", recovery=None, targets=["self_attn.*"]))
    found = gnmr.audit(model, lists={which: texts})
    misses = [one.where[0] for one in found.findings if one.kind == "no match"]
    assert misses == [f"{which} {texts[i]!r}" for i in unmatched], lines(found)
    inside = {f"model.layers.0.mlp.experts.{i}.{x}_proj" for i in (0, 1) for x in ("gate_up", "down")}
    missing = {name for one in found.findings if one.kind == "not converted" for name in one.where}
    left_out = set() if unmatched == [0, 1] else {name for name in inside if "down" in name or texts[0] != "w2"}
    assert missing & inside == inside - left_out


def test_lists_of_a_model_of_which_nothing_is_converted() -> None:
    """The conversion was forgotten: what the lists leave to it is named, the rest is not."""
    left_out = gnmr.audit(net(), lists={"filter_fqns": ["layers.1.", "lm_head"]})
    assert [(one.kind, len(one.where)) for one in left_out.findings] == [("not converted", 4)], lines(left_out)
    assert "layers.0.up_proj" in lines(left_out) and "no linear is in low precision" in lines(left_out)
    chosen = gnmr.audit(net(), lists={"fqns": ["layers.2"]})
    assert [one.where for one in chosen.findings] == [("layers.2.up_proj", "layers.2.down_proj")], lines(chosen)
    assert gnmr.audit(net(), lists={"pins": ["layers.2.up_proj"]}).sound, "pins leave nothing to convert"


def test_heads_and_routers_and_tied_heads_in_low_precision() -> None:
    model = net(tied=True, router=True)
    spec = PathSpec(low="int4", recovery=None, targets=["*_proj", "router", "lm_head"])  # formats pass over nothing
    convert(model, spec)
    assert said(gnmr.audit(model)) == [("router", "router"), ("tied head", "lm_head")]
    model = net()
    convert(model, PathSpec(low="int4", recovery=None, targets=["*_proj", "lm_head"]))
    found = gnmr.audit(model)
    assert said(found) == [("head", "lm_head")] and "the output head is in" in lines(found)
    assert gnmr.audit(model, lists={"targets": ["*_proj", "lm_head"]}).sound, "who names it wants it"
    assert torch.is_tensor(model.lm_head.weight)
