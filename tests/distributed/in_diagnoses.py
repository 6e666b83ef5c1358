"""What processes of the fixture `pair` diagnose and audit: a model that FSDP2 shards, beside a whole copy of it."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import torch
from small_decoder import Decoder, token_ids
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gnmr


def sharded_decoder() -> tuple[nn.Module, nn.Module]:
    """Return a whole model, and its copy over the two processes."""
    whole = Decoder()
    model, mesh = deepcopy(whole), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return whole, fully_shard(model, mesh=mesh)


def diagnosed(differ: str = "", **options: Any) -> tuple[str, str]:
    """Return the numbers of the whole model and of the sharded one; `differ` has other batches in each process."""
    whole, model = sharded_decoder()
    weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    seed = torch.distributed.get_rank() if differ else 0
    batches = {"batches": [token_ids(1), token_ids(2)], "held_out": [token_ids(3)]}
    batches |= {differ: [token_ids(4), token_ids(5 + seed)]} if differ else {}

    def numbers(of: nn.Module) -> str:
        def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
            return of(tokens), tokens.roll(-1, dims=1)

        return json.dumps(gnmr.diagnose(of, run, **batches, rescue=["mxfp8", "bf16"], confirm=2, **options).tree())

    answers = "" if differ else numbers(whole), numbers(model)
    for name, parameter in model.named_parameters():
        assert hasattr(parameter, "device_mesh") and parameter.grad is None and parameter.requires_grad, name
        assert torch.equal(parameter.full_tensor(), weights[name]), name
    return answers


def audited(recipe: str | None = None) -> list[str]:
    """Return the audits of the whole model and of the sharded one, converted if a recipe is given."""
    audits = []
    for model in sharded_decoder():

        def loss(tokens: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten())

        for parameter in model.parameters():  # those of a step that is not over
            parameter.grad = torch.ones_like(parameter)
        if recipe is not None:
            gnmr.attach(model, low=recipe, recovery="bf16", max_o=1)
        audits.append(json.dumps(gnmr.audit(model, loss, token_ids(1), recipe=recipe).tree()))
        for parameter in model.parameters():
            assert parameter.grad is not None and bool((parameter.grad == 1).all())
    return audits


def audited_in_parts(recipe: str | None = None) -> list[str]:
    """Return the audits of a whole model and of one whose linears tensor parallelism shards."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = Decoder()
    model, mesh = deepcopy(whole), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})
    audits = []
    for of in (whole, model):

        def loss(tokens: Tensor, of: nn.Module = of) -> Tensor:
            return F.cross_entropy(of(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten())

        audits.append(json.dumps(gnmr.audit(of, loss, token_ids(1), recipe=recipe).tree()))
    return audits
