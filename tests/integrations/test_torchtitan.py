"""In torchtitan's own Trainer, two processes under FSDP2; skipped where torchtitan is not installed."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import assert_same, run_pair

from gnmr.attachment.torchtitan_rules import ControlSection
from gnmr.records.reader import read_json, read_jsonl

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: it needs an environment of its own", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchtitan")]

STEPS, SAVED = 8, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and of either rank what titan_loops saw."""
    folder = tmp_path_factory.mktemp("titan")
    return folder, run_pair(Path(__file__).parent / "titan_loops.py", folder)


def test_the_sets_are_those_of_a_plain_loop(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    """Selective checkpointing, accumulation and FSDP2 against one process that has none of them."""
    _, (first, second) = pair
    assert len(first["whole"]) == STEPS == first["t"] and len({tuple(one.active) for one in first["whole"]}) > 3
    assert_same(first["whole"], first["by hand"], 1e-3)
    assert first["whole"][0].units == first["by hand"][0].units
    assert_same(second["whole"], first["whole"], 0)
    assert all("_checkpoint_wrapped_module" in name for name in first["routed"]), "checkpointing came over the linears"
    assert len(first["routed"]) == len(first["whole"][0].units) == 10


def test_a_checkpoint_goes_on_with_the_same_sets(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = pair
    for rank in ranks:
        assert_same(rank["rest"], rank["whole"][SAVED:], 0)


def test_records_have_the_loss_of_all_ranks_and_go_on_from_a_checkpoint(
    pair: tuple[Path, list[dict[str, Any]]],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, (first, _) = pair
    rows, again = (read_jsonl(folder / "records" / f"{name}-s0" / "steps.jsonl") for name in ("first", "titan"))
    assert [row["step"] for row in again] == [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    assert len(read_json(folder / "records" / "titan-s0" / "header.json")["resumed"]) == 1
    assert (folder / "records" / "titan-s0" / "DONE").exists()
    assert [row["num_active"] for row in rows] == [int(one.in_force.sum()) for one in first["whole"]]
    assert rows[-1]["tokens"] == STEPS * 2 * 2 * 2 * 16 and {row["lr"] for row in rows} == {5e-3}
    told = EventAccumulator(str(min(file.parent for file in (folder / "run").rglob("events.out.*"))))
    told.Reload()
    (name,) = (tag for tag in told.Tags()["scalars"] if tag.endswith("global_avg_loss"))
    theirs = {one.step: one.value for one in told.Scalars(name)}
    assert [theirs[row["step"]] for row in rows] == pytest.approx([row["loss"] for row in rows], rel=1e-5)


def test_evidence_counts_the_loss_as_torchtitan_divides_it(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    """Its loss is over the tokens of all ranks and gradients are summed: each rank's gap is a term of the whole."""
    _, (first, _) = pair
    for mine, theirs in zip(first["gap"], first["gap by hand"], strict=True):
        assert (theirs.columns["recovery_gap"] > 0).all()
        np.testing.assert_allclose(mine.columns["recovery_gap"], theirs.columns["recovery_gap"], rtol=1e-5)


def test_checkpoints_that_do_not_fit_are_one_line(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, _) = pair
    assert first["without state"].startswith("the checkpoint has no state of GnmrTrainer")
    assert "checkpoint.exclude_from_loading=gnmr" in first["without state"]
    assert "max_o=1 allows 1" in first["of other settings"]
    assert first["of other settings"].endswith("use the model and paths it was saved with")


def test_paths_are_in_force_where_torchtitan_wraps_every_forward(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    """Its usual spmd_backend, of which FSDP2 alone needs a newer torch."""
    _, ranks = pair
    assert ranks[0]["in 16 bits"] == [True, False], "validation"
    assert [rank["spmd_types"] for rank in ranks] == [(True, True)] * 2


def test_blocks_are_compiled_as_one_graph_a_path(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, _) = pair
    assert_same(first["compiled"], first["eager"], 1e-6)
    assert any(one.in_force.any() for one in first["eager"]) and first["graphs"] == 2
    assert first["compiled units"].startswith("GnmrTrainer: torchtitan compiles a block as one graph, and units are")


# ---- in one process, without a group ----


@pytest.fixture(scope="module")
def titan() -> Any:
    import gnmr.attachment.torchtitan as module

    return module


def spec_of(*converters: Any) -> Any:
    from torchtitan.models.llama3 import model_registry

    return model_registry("debugmodel", converters=list(converters))


def test_linears_of_layers_are_exchanged_and_nothing_else(titan: Any) -> None:
    from torchtitan.models.common.linear import Linear

    config = spec_of(titan.GnmrConverter.Config()).model
    kinds = {fqn: type(one) for fqn, one, *_ in config.traverse(Linear.Config)}
    assert kinds.pop("lm_head") is Linear.Config
    assert set(kinds.values()) == {titan.RoutedLinear.Config} and len(kinds) == 6 * 5
    some = spec_of(titan.GnmrConverter.Config(paths={"targets": ["layers.1.feed_forward.w2", "wo"]})).model
    ours = {fqn for fqn, one, *_ in some.traverse(Linear.Config) if isinstance(one, titan.RoutedLinear.Config)}
    assert ours == {"layers.1.feed_forward.w2", *(f"layers.{i}.attention.wo" for i in range(6))}
    one = next(x for fqn, x, *_ in config.traverse(Linear.Config) if fqn != "lm_head")
    before = next(x for fqn, x, *_ in spec_of().model.traverse(Linear.Config) if fqn != "lm_head")
    assert (one.in_features, one.out_features, one.bias) == (before.in_features, before.out_features, before.bias)
    assert one.param_init.keys() == before.param_init.keys()


def test_a_linear_without_controller_refuses_to_compute(titan: Any) -> None:
    linear = titan.RoutedLinear.Config(in_features=4, out_features=4).build()
    assert "RoutedLinear(in_features=4" in repr(linear)
    with pytest.raises(titan.UserError, match="has linears for two paths and no controller; train it with"):
        linear(torch.zeros(1, 4))


def test_a_wrapped_forward_runs_the_paths_and_after_detach_the_plain_linear(titan: Any) -> None:
    """`Module.parallelize` keeps the forward that the linear was built with."""
    import gnmr

    linear = titan.RoutedLinear.Config(in_features=32, out_features=32).build()
    torch.nn.init.normal_(linear.weight)
    kept = linear.forward
    linear.forward = lambda input: kept(input)
    model = torch.nn.Sequential(linear)
    controller = gnmr.attach(model, low="sim_int8", recovery="bf16", targets=["0"], max_o=1)
    x = torch.randn(8, 32)
    exact = torch.nn.functional.linear(x, linear.weight)
    assert not torch.equal(model(x), exact)
    controller.detach()
    assert type(linear) is titan.Linear and torch.equal(model(x), exact)


def small_spec(converter: Any) -> Any:
    """One block of the debug model."""
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    del spec.model.layers[1:]
    spec.model = converter.build().convert(spec.model)
    return spec


def test_a_plan_says_paths_and_pins(titan: Any, tmp_path: Path) -> None:
    from gnmr.plan.pin_plan import PinPlan

    shapes = {"attention.qkv_linear.wqkv": (256, 768), "attention.wo": (256, 256)}
    shapes |= {f"feed_forward.{name}": (256, 768) for name in ("w1", "w3")} | {"feed_forward.w2": (768, 256)}
    operators = {f"layers.0.{name}": shape for name, shape in shapes.items()}
    pins = {"layers.0.feed_forward.w2": ["fprop"]}
    plan = PinPlan(operators=operators, targets=["*"], low="sim_int8", recovery="bf16", pins=pins)
    for name, other in (("plan", plan), ("other", replace(plan, operators={**operators, "layers.1.w": (8, 8)}))):
        (tmp_path / f"{name}.json").write_text(other.text())

    def attached(name: str) -> Any:
        spec = small_spec(titan.GnmrConverter.Config(plan=str(tmp_path / f"{name}.json")))
        model = spec.model.build()
        model.init_weights()
        config = titan.GnmrTrainer.Config(model_spec=spec, gnmr=ControlSection(max_o=2))
        return titan._attached(model, titan._routing_of(spec.model), config)

    controller = attached("plan")
    assert set(controller.names) == set(operators)
    assert [one.operator_name for one in controller.converted.operators if one.pinned == ("fprop",)] == [*pins]
    with pytest.raises(titan.UserError, match=r"plan: was made for another model \(6 operators, here 5; "):
        attached("other")


def test_what_is_refused_before_anything_is_built(titan: Any) -> None:
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.quantization import Float8LinearConverter

    mine = titan.GnmrConverter.Config()
    float8 = Float8LinearConverter.Config(emulate=True)
    for converters, line in (
        ([float8, mine], "is a Float8Linear, and only torchtitan's plain Linear"),
        ([titan.GnmrConverter.Config(paths={"low": "int99"})], "GnmrConverter: low"),
        ([titan.GnmrConverter.Config(paths={"lov": "int4"})], "paths has no 'lov': did you mean low"),
        ([titan.GnmrConverter.Config(paths={"low": "int4"}, plan="plan.json")], "leave paths out"),
        ([titan.GnmrConverter.Config(plan="nowhere.json")], "plan=nowhere.json: there is no such file"),
        (
            [titan.GnmrConverter.Config(paths={"targets": ["q_proj"]})],
            "there are lm_head, w1, w2",
        ),
        ([titan.GnmrConverter.Config(paths={"targets": ["lm_head"]})], "the output head stays in 16 bits"),
        ([titan.GnmrConverter.Config(paths={"low": "llm_int8", "recovery": "bf16"})], "recipes of integers"),
    ):
        with pytest.raises(titan.UserError, match=line):
            spec_of(*converters)
    for converters, line in (
        ([], "no linear has two paths: give model_registry converters="),
        ([mine, float8], "take one converter or the other"),
        ([mine, LoRAConverter.Config()], "another converter (LoRA) was applied after"),
    ):
        config = titan.GnmrTrainer.Config(model_spec=spec_of(*converters))
        config.training.disable_cuda_graphs = True
        with pytest.raises(titan.UserError, match=re.escape(line)):
            titan.GnmrTrainer(config)
    assert not torch.distributed.is_initialized()
