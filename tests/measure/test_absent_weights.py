"""Diagnoses and audits of models that accelerate offloads give the numbers of the model in memory, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import CAUSAL
from small_decoder import Decoder, token_ids
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn import functional as F

import gnmr

accelerate = pytest.importorskip("accelerate")


def logits_of(result: Any) -> Tensor:
    return getattr(result, "logits", result)


def diagnosed(model: nn.Module, **options: Any) -> str:
    """Return all numbers of a diagnosis."""

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return logits_of(model(tokens)), tokens.roll(-1, dims=1)

    batches, rescue = [token_ids(1), token_ids(2)], ["mxfp8", "bf16"]
    diagnosis = gnmr.diagnose(model, run, batches, held_out=[token_ids(3)], rescue=rescue, confirm=2, **options)
    return json.dumps(diagnosis.tree())


@cache
def diagnosed_in_memory(measure: str) -> str:
    return diagnosed(Decoder(), measure=measure)


def audited(model: nn.Module) -> str:
    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(model(tokens)).flatten(0, 1), tokens.roll(-1, dims=1).flatten())

    return json.dumps(gnmr.audit(model, loss, token_ids(1)).tree())


@cache
def audited_in_memory() -> str:
    return audited(Decoder())


def offloaded(model: nn.Module, how: str, folder: Path) -> nn.Module:
    """Return a copy of a decoder that accelerate offloads."""
    model = deepcopy(model)
    if how == "cpu":
        return accelerate.cpu_offload(model, "cpu")
    if how == "disk":
        return accelerate.disk_offload(model, str(folder), "cpu")
    device_map = {"embed": "cpu", "head": "disk", "layers.0": "cpu", "layers.1": "disk", "layers.2": "disk"}
    return accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def state_of(model: nn.Module) -> list[Any]:
    return [(name, p.device, p.requires_grad, p.grad) for name, p in model.named_parameters()]


@pytest.mark.parametrize("how", ["cpu", "disk", "device_map"])
@pytest.mark.parametrize("measure", ["estimate", "all"])
def test_an_offloaded_model_has_the_diagnosis_of_one_in_memory(how: str, measure: str, tmp_path: Path) -> None:
    whole = Decoder()
    model = offloaded(whole, how, tmp_path)
    before = state_of(model)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert diagnosed(model, measure=measure) == diagnosed_in_memory(measure)
    assert state_of(model) == before
    assert torch.equal(model(token_ids(4)), whole(token_ids(4)))


@pytest.mark.parametrize("measure", ["estimate", "all"])
def test_blocks_that_cannot_be_followed_are_measured_by_whole_passes(measure: str, tmp_path: Path) -> None:
    whole = Decoder(between=torch.neg)
    with pytest.warns(UserWarning, match="cannot be run block by block"):
        assert diagnosed(offloaded(whole, "disk", tmp_path), measure=measure) == diagnosed(whole, measure=measure)


def test_a_loss_of_an_offloaded_model_is_estimated(tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> str:
        def run(tokens: Tensor) -> Tensor:
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten())

        return json.dumps(gnmr.diagnose(model, run, [token_ids(1), token_ids(2)], recipe="nvfp4").tree())

    whole = Decoder()
    assert loss_of(offloaded(whole, "disk", tmp_path)) == loss_of(whole)


@pytest.mark.filterwarnings("error:.*cannot be run block by block")
def test_parts_outside_of_the_plan_are_measured_too(tmp_path: Path) -> None:
    whole = Decoder()
    assert diagnosed(offloaded(whole, "disk", tmp_path), include=["head"]) == diagnosed(whole, include=["head"])


def test_offloaded_weights_of_a_block_are_read_once(tmp_path: Path) -> None:
    model = offloaded(Decoder(), "disk", tmp_path)
    read: list[str] = []
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None and hook.offload and path.startswith("layers.1."):
            by_name = hook.weights_map

            class Counted(dict[str, Tensor]):
                def __missing__(self, key: str, path: str = path, by_name: Any = by_name) -> Tensor:
                    read.append(f"{path}.{key}")
                    return by_name[key]

            hook.weights_map = Counted()
    gnmr.diagnose(model, model, [token_ids(1)], measure="all")
    times = {read.count(name) for name in read}
    # Blocks are followed once to try, once to measure 6 operators and once to count products; a whole pass compares.
    assert times == {4} and len({*read}) == 6


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3_moe", "gpt2", "gemma2")]
)
@pytest.mark.parametrize("measure", ["estimate", "all"])
def test_families_from_a_device_map(family: str, measure: str, tmp_path: Path) -> None:
    """Tied heads, experts in one tensor, `Conv1D`."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CAUSAL[family]()).save_pretrained(tmp_path / "hf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = load(tmp_path / "hf", use_cache=False).eval()
    model = load(tmp_path / "hf", use_cache=False, device_map={"": "disk"}, offload_folder=str(tmp_path / "offloaded"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert diagnosed(model, measure=measure, recipe="nvfp4") == diagnosed(whole, measure=measure, recipe="nvfp4")


@pytest.mark.parametrize("how", ["cpu", "disk", "device_map"])
def test_an_audit_of_an_offloaded_model_is_that_of_one_in_memory(how: str, tmp_path: Path) -> None:
    model = offloaded(Decoder(), how, tmp_path)
    before, right = state_of(model), audited_in_memory()
    with pytest.warns(UserWarning, match=r"holds all offloaded weights in memory while it runs \(\S+ GB\)"):
        assert audited(model) == right
    assert state_of(model) == before


def test_a_model_on_several_devices_is_refused() -> None:
    model = accelerate.cpu_offload(Decoder(), "cpu")
    model.layers[0].up_proj._hf_hook.execution_device = torch.device("cuda:1")
    line = r"^model=Decoder: runs on several devices \(cpu, cuda:1\); load it with a device_map of one"
    for ask in (diagnosed, audited):
        with pytest.raises(ValueError, match=line):
            ask(model)


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_fsdp1_is_refused(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Decoder(), device_id=torch.device("cpu"))
    for ask in (diagnosed, audited):
        with pytest.raises(ValueError, match=r"^model=FullyShardedDataParallel: is wrapped by .*use FSDP2"):
            ask(model)


def test_a_diagnosis_refuses_tensor_parallelism(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(Decoder(), init_device_mesh("cpu", (1,)), {"layers.1.up_proj": ColwiseParallel()})
    line = r"^model=Decoder: has layers.1.up_proj.weight sharded by tensor parallelism.*use FSDP2"
    with pytest.raises(ValueError, match=line):
        diagnosed(model)


def test_a_pass_that_fails_leaves_the_model_offloaded(tmp_path: Path) -> None:
    model = offloaded(Decoder(), "disk", tmp_path)
    before = state_of(model)

    def fails(_module: nn.Module, _inputs: Any) -> None:
        raise RuntimeError("as asked")

    # Within the pass of a module that has its weights.
    model.layers[1].register_forward_pre_hook(fails)
    for ask in (diagnosed, audited):
        with pytest.raises(RuntimeError, match="as asked"):
            ask(model)
        assert state_of(model) == before


# ---- the folder of a checkpoint ----


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without weights, whose buffers have values."""
    copy = deepcopy(model)
    for module in copy.modules():
        for key, parameter in module.named_parameters(recurse=False):
            setattr(module, key, nn.Parameter(torch.empty_like(parameter, device="meta")))
    return copy


@pytest.mark.parametrize("measure", ["estimate", "all"])
def test_a_model_without_weights_reads_them_from_a_folder(measure: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole = Decoder()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    model = on_meta(whole)
    assert diagnosed(model, measure=measure, weights=tmp_path) == diagnosed_in_memory(measure)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "gpt2", "gemma2"))]
)
def test_a_checkpoint_of_transformers_is_read_by_its_rules(family: str, tmp_path: Path) -> None:
    """Experts that are many tensors in the file, and a head that is in no file because it is tied."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CAUSAL[family]()).save_pretrained(tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, use_cache=False).eval()
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(whole.config)
    assert all(parameter.is_meta for parameter in model.parameters())
    options = {"measure": "all", "recipe": "nvfp4"}
    assert diagnosed(model, weights=str(tmp_path), **options) == diagnosed(whole, **options)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole = Decoder()
    tensors = whole.state_dict()
    del tensors["layers.1.up_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"^weights=.*: has no layers.1.up_proj.bias in its files"):
        diagnosed(on_meta(whole), measure="all", weights=tmp_path)
    with pytest.raises(ValueError, match=r"^model=Decoder: has parameters on the meta device; load its weights"):
        diagnosed(on_meta(whole), measure="all")
    with pytest.raises(gnmr.errors.UserError, match="holds no"):
        diagnosed(on_meta(whole), measure="all", weights=tmp_path / "empty")
    with pytest.raises(ValueError, match=r"^weights=.*: is for a model on the meta device, and this one has its"):
        diagnosed(whole, weights=tmp_path)  # whose numbers may be others
    with pytest.raises(ValueError, match=r"^weights=3: must be a checkpoint's folder, or a function"):
        diagnosed(on_meta(whole), weights=3)


def test_a_refused_diagnosis_leaves_compiled_functions_compiled(tmp_path: Path) -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    add = torch.compile(lambda x: x + 1, backend=backend)
    with accelerate.init_empty_weights():
        model = Decoder()
    with pytest.raises(ValueError):
        gnmr.diagnose(model, model, [token_ids(0), token_ids(1)], weights=tmp_path)  # which holds no checkpoint
    add(torch.ones(2))
    assert len(graphs) == 1
