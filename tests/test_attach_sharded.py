"""What `attach` does with models that PyTorch shards, in one process: FSDP2 works, tensor parallelism is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnmr
from gnmr.precision import PathLinear, PathSpec, convert

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step(model: nn.Module, seed: int = 1) -> None:
    model.zero_grad()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    (model(x) - 2 * x).square().mean().backward()


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        f"{i}.{name}": how()
        for i in "01"
        for name, how in (("up_proj", ColwiseParallel), ("down_proj", RowwiseParallel))
    }
    return parallelize_module(model, init_device_mesh("cpu", (1,)), plan)


def gradients(model: nn.Module) -> list[Tensor]:
    step(model)
    return [getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters()]


@pytest.mark.parametrize("low", ["int4", "fp8_hybrid"])
def test_tensor_parallelism_after_conversion_is_refused_where_it_would_compute(low: str) -> None:
    model = net()
    convert(model, PathSpec.of(low, None, backend="auto" if low == "int4" else "simulated"))
    model = parallel(model)
    with pytest.raises(ValueError, match=r"^0\.up_proj: its input or weight is a DTensor.*out of the targets$"):
        step(model)


def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    whole, part = (FullyShardedDataParallel(net(), device_id=cpu) for _ in range(2))
    for model in (whole, nn.Sequential(part)):
        with pytest.raises(ValueError, match=r"^model: is wrapped by FullyShardedDataParallel \(FSDP1\).*use FSDP2"):
            gnmr.attach(model)


def test_tensor_parallelism_before_conversion_is_refused() -> None:
    model = parallel(net())
    for make in (lambda: gnmr.attach(model), lambda: convert(model, PathSpec.of("int4", None))):
        with pytest.raises(ValueError, match=r"^0\.up_proj has sharded parameters: its weight is a DTensor"):
            make()
        assert not any(isinstance(module, PathLinear) for module in model.modules())


@pytest.mark.parametrize("low", ["int4", "fp8_hybrid"])
def test_a_gradient_that_is_sharded_is_refused(low: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    model = net()[0].up_proj
    convert(
        nn.Sequential(model), PathSpec.of(low, None, targets=["0"], backend="auto" if low == "int4" else "simulated")
    )
    output = model(torch.randn(4, 16))
    mesh = init_device_mesh("cpu", (1,))
    output.register_hook(lambda grad: DTensor.from_local(grad, mesh))
    with pytest.raises(ValueError, match=r"^the gradient of a linear's output is a DTensor"):
        output.sum().backward()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("low", ["int4", "fp8_hybrid"])
def test_fsdp2_gives_the_same_gradients_before_and_after_conversion(low: str, first: bool) -> None:
    how: dict[str, Any] = {"low": low, "recovery": None, "backend": "auto" if low == "int4" else "simulated"}
    alone, model = net(), net()
    convert(alone, PathSpec.of(**how))
    if first:
        convert(model, PathSpec.of(**how))
    shard(model)
    if not first:
        convert(model, PathSpec.of(**how))
    for ours, theirs in zip(gradients(model), gradients(alone), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("observe", ["parameters", "input_grad"])
@pytest.mark.parametrize("first", [False, True])
def test_units_of_a_sharded_model_are_routed_as_those_of_a_whole_one(first: bool, observe: str) -> None:
    how: dict[str, Any] = {"max_o": 1, "observe": observe, "alpha": 1.01, "beta": 1.01}
    alone, model = net(), net()
    if first:
        shard(model)
    controllers = [gnmr.attach(one, **how) for one in (alone, model)]
    if not first:
        shard(model)
    sets = []
    for seed in range(4):
        for one in (alone, model):
            step(one, seed)
        decisions = [controller.step() for controller in controllers]
        assert decisions[0].norm.tolist() == decisions[1].norm.tolist() and decisions[0].observed.all()
        sets.append([controller.active for controller in controllers])
    assert all(ours == theirs for ours, theirs in sets) and any(ours for ours, _ in sets)


def test_what_needs_whole_parameters_is_refused_of_sharded_ones() -> None:
    model = shard(net())
    controller = gnmr.attach(model, max_o=1)
    step(model)
    with pytest.raises(ValueError, match=r"^explain: runs in one process, on parameters that are whole"):
        controller.explain(lambda: model(torch.ones(1, 16)).sum())
    with pytest.raises(ValueError, match=r"^0.up_proj has sharded parameters.*give the controller ranks="):
        gnmr.Controller(gnmr.control.Unit(n, m) for n, m in [("0.up_proj", model[0].up_proj)])
