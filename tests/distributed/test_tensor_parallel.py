"""Tensor parallelism in two processes: what it shards gets no two paths, in whichever order; what it leaves does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import in_ranks
import pytest
import torch

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
Pair = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("order", "options", "line"),
    [
        ("first", {}, "0.up_proj has sharded parameters: its weight is a DTensor"),
        ("after", {}, "0.up_proj: its input or weight is a DTensor"),
        ("after", {"low": "fp8_hybrid", "backend": "simulated", "recovery": "bf16"}, "0.up_proj: its input or"),
        ("after", {"observe": "input_grad"}, "0.up_proj: its input or weight is a DTensor"),
    ],
)
def test_what_is_sharded_is_refused_in_one_line(pair: Pair, order: str, options: dict[str, Any], line: str) -> None:
    for told in pair("tensor_parallel", order=order, **options):
        assert isinstance(told, str) and told.startswith(f"ValueError: {line}"), told
        assert told.endswith("leave what tensor parallelism shards out of the targets") and "\n" not in told


def test_what_it_leaves_is_routed_by_its_gradients_and_by_nothing_that_a_rank_measures(pair: Pair) -> None:
    """The second block alone has paths; both ranks have the same batch."""
    whole = in_ranks.tensor_parallel("alone")
    for norms in pair("tensor_parallel", order="beside"):
        assert norms == pytest.approx(whole, rel=1e-5)
    for options in ({"observe": "input_grad"}, {"signal": "recovery_gap", "routing": "ranked"}):
        for told in pair("tensor_parallel", order="beside", **options):
            line = "ValueError: 0.up_proj.weight is sharded by tensor parallelism, whose processes have the same batch"
            assert told.startswith(line) and "\n" not in told
    line = "RunFailed: a parameter is sharded over 1 of 2 processes: shard all over one mesh of all of them"
    assert pair("on_a_part") == [line, line]
