"""`attach` in a loop of several processes: every rank chooses what one process alone would have chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import in_ranks
import numpy as np
import pytest
import torch
from close import EIGHT_BITS, assert_close

from gnmr.attachment.ranks import world
from gnmr.attachment.ranks.reduce import DistributedRanks
from gnmr.errors import RunFailed

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
Pair = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def equal(weights: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether ranks with whole tensors have the bits of one process."""
    return all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


SHARDED: dict[str, Any] = {"terms": 33, "products": 80, "recast": EIGHT_BITS}
"""A shard begins at another address, so that a kernel may add in another order, in each of eight steps."""


def close(ours: list[list[float]], theirs: list[list[float]], rtol: float) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=rtol, atol=0, equal_nan=True)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "dtype", "after"),
    [
        ("ddp", "bfloat16", False),
        ("fsdp", "float32", True),
        pytest.param("ddp", "float32", True, marks=SLOW),
        pytest.param("fsdp", "bfloat16", False, marks=SLOW),
        pytest.param("hsdp", "float32", False, marks=SLOW),
        pytest.param("hsdp", "bfloat16", True, marks=SLOW),
    ],
)
def test_two_ranks_are_one_process_with_two_micro_batches(pair: Pair, how: str, dtype: str, after: bool) -> None:
    one, ranks = in_ranks.loop(dtype=dtype), pair("loop", how=how, dtype=dtype, after=after)
    assert len({tuple(units) for units in one["sets"]}) > 2, "a run without changes shows little"
    for rank in ranks:
        assert rank["sets"] == one["sets"]
        if how == "ddp":
            assert equal(rank["weights"], one["weights"])
            assert rank["norms"] == one["norms"] and rank["risks"] == one["risks"]
        else:
            assert_close(rank["weights"], one["weights"], **SHARDED)
    close(ranks[0]["norms"], one["norms"], 1e-6 if how == "ddp" else 1e-3)
    assert ranks[0]["norms"] == ranks[1]["norms"] and ranks[0]["risks"] == ranks[1]["risks"]


@pytest.mark.parametrize("after", [pytest.param(False, marks=SLOW), True])
def test_experts_and_attention_in_two_ranks_are_those_of_one_process(pair: Pair, after: bool) -> None:
    options = {"experts": True, "low": "fp8_hybrid", "recovery": "bf16", "backend": "simulated", "targets": ["*"]}
    one, ranks = in_ranks.loop(steps=4, **options), pair("loop", how="fsdp", after=after, steps=4, **options)
    assert one["names"][:3] == ["0.self_attn.in_proj", "0.self_attn.out_proj", "0.experts.0.up"]
    assert len({tuple(units) for units in one["sets"]}) > 1
    for rank in ranks:
        assert rank["sets"] == one["sets"]
        assert_close(rank["weights"], one["weights"], **SHARDED)
        close(rank["norms"], one["norms"], 1e-3)


MEASURED = ["gap_recovery", "mse", "input_std"]
OPTIONS: list[dict[str, Any]] = [
    {"signal": "recovery_gap", "routing": "ranked", "record": MEASURED},
    {"observe": "input_grad"},
    {"low": "fp8_delayed", "recovery": "bf16", "backend": "simulated", "signal": "mse", "routing": "ranked"},
    {"low": "sim_e2m1", "recovery": "sim_e4m3", "backend": "simulated", "signal": "price", "routing": "ranked"}
    | {"record": ["price_fprop_recovery", "price_dgrad", "price_wgrad"]},
]


@pytest.mark.parametrize("how", ["ddp", pytest.param("fsdp", marks=SLOW)])
@pytest.mark.parametrize(
    "options",
    [*OPTIONS[:3], pytest.param(OPTIONS[3], marks=SLOW)],
    ids=["evidence", "input_grad", "delayed", "prices"],
)
def test_what_each_rank_measures_of_its_own_batch_is_summed(pair: Pair, how: str, options: dict[str, Any]) -> None:
    number = 2 if options.get("signal") == "price" else 4  # under 4-bit operators other rounding grows with the steps
    one, ranks = in_ranks.loop(accumulation=number, **options), pair("loop", how=how, accumulation=number, **options)
    for rank in ranks:
        assert rank["sets"] == one["sets"] and any(one["sets"])
        for name in ("norms", "risks", *options.get("record", ())):
            close(rank[name], one[name], 1e-4)


def test_a_nan_on_one_rank_acts_on_all_in_the_same_step(pair: Pair) -> None:
    one, ranks = in_ranks.loop(nan=4), pair("loop", how="ddp", nan=4)
    for rank in ranks:
        assert rank["sets"] == one["sets"]
        assert [any(n != n for n in norms) for norms in rank["norms"]] == [step == 4 for step in range(8)]
        assert equal(rank["weights"], one["weights"])


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("apart", "RunFailed: ranks disagree in step 1: they have other units, settings or recovered sets"),
        ("other_set", "RunFailed: ranks disagree in step 1"),
        ("unreduced", "RunFailed: gradients differ between ranks in step 1: call step() after the backward pass"),
    ],
)
def test_ranks_that_went_apart_end_in_one_line_on_each(pair: Pair, case: str, line: str) -> None:
    for told in pair("disagreeing", case=case):
        assert told.startswith(line) and "\n" not in told


@pytest.mark.parametrize("size", [2, 1000, 8192])
def test_the_guard_is_exact_for_thousands_of_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "size", lambda: size)
    ranks = DistributedRanks()
    for digest in (0xFFFFF, 714_025):
        same = np.array([size * digest, size * digest**2, 0.0, 0.0])
        ranks.check(same, step=1)
        other = np.array([-1.0, (digest - 1) ** 2 - digest**2, 0.0, 0.0])  # of one rank, by one
        with pytest.raises(RunFailed, match="ranks disagree in step 1"):
            ranks.check(same + other, step=1)
