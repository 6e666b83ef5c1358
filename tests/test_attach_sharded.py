"""What `attach` refuses of models that PyTorch shards; what works is in tests/distributed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gnmr
from gnmr.conversion import PathSpec, convert

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(OrderedDict(up_proj=nn.Linear(16, 32), down_proj=nn.Linear(32, 16))))


def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    whole, part = (FullyShardedDataParallel(net(), device_id=cpu) for _ in range(2))
    for model in (whole, nn.Sequential(part)):
        with pytest.raises(ValueError, match=r"^model: is wrapped by FullyShardedDataParallel \(FSDP1\).*use FSDP2"):
            gnmr.attach(model)


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


def test_what_needs_whole_parameters_is_refused_of_sharded_ones() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net(), mesh=init_device_mesh("cpu", (1,)))
    controller = gnmr.attach(model, max_o=1)
    model(torch.ones(1, 16)).sum().backward()
    with pytest.raises(ValueError, match=r"^explain: runs in one process, on parameters that are whole"):
        controller.explain(lambda: model(torch.ones(1, 16)).sum())
    with pytest.raises(ValueError, match=r"^0.up_proj has sharded parameters.*give the controller ranks="):
        gnmr.Controller(gnmr.control.Unit(n, m) for n, m in [("0.up_proj", model[0].up_proj)])
