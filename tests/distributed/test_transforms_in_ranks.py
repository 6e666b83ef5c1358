"""Gradient transforms, SCALE, windows of outliers and signals of whole weights, on shards: as on whole parameters."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from everything import differences, everything
from in_transforms import OPTIONS, transformed

from gnmr.lab.rivals.transforms import TRANSFORMS

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
WORDS = ("training.accumulation=2", "training.batch_size=1", "training.dtype=float32")


SUMS = {"terms": 33, "products": 50}
"""Of a small model's longest sum, and of the products in a row of five steps."""
SLOW = pytest.mark.slow
REST = [name for name in TRANSFORMS if name not in ("agc", "stable_spam")]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("fsdp", ["agc", "stable_spam"]),  # rows, sums and largest
        pytest.param("fsdp", [None, *REST], marks=SLOW),
        pytest.param("hsdp", TRANSFORMS, marks=SLOW),
    ],
    ids=["fsdp, two", "fsdp", "hsdp"],
)
def test_a_transform_of_shards_is_that_of_the_whole(pair, how, names):
    """Norms, clipped elements, rows and memory; of every transform, each of which does something here."""
    assert OPTIONS.keys() == TRANSFORMS.keys()
    plain = transformed()
    for name in names:
        alone, ranks = transformed(transform=name), pair("transformed", how=how, transform=name)
        for rank in ranks:
            assert isinstance(rank, dict), rank
            assert differences(rank, alone, **SUMS) == []
        if name == "skip_step":
            assert any(alone["skips"])
        elif name is not None:
            assert differences(alone["gradients"], plain["gradients"], **SUMS) != [], name


def losses(run: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in run["steps"]]


@pytest.fixture(scope="module")
def sound(train, tmp_path_factory):
    return everything(train(tmp_path_factory.mktemp("sound") / "run", *WORDS))


@pytest.mark.slow
def test_a_run_in_shards_is_stopped_and_goes_on_as_one_process_would(told, ranks, train, sound, tmp_path):
    """With SCALE and a window of outliers; a transform of shards is tested above."""
    words = ["optim.name=scale", "optim.lr=1e-3", "model.outlier_channels.number=2", "records.evidence=[weight_std]"]
    words += ["model.outlier_channels.gain=16", "model.outlier_channels.window=[2,6]"]
    alone = everything(train(tmp_path / "one", *WORDS, *words))
    assert told([*WORDS, *words], "fsdp", stop=5) == [128 + signal.SIGTERM] * 2
    found = everything(ranks([*WORDS, *words], "fsdp"))
    assert differences(found["state"]["model"], alone["state"]["model"], **SUMS) == []
    assert losses(found) == pytest.approx(losses(alone), rel=1e-5)
    assert [row["unit"] for row in found["events"]] == [row["unit"] for row in alone["events"]] != []
    values = [[row.get("weight_std") for row in one["units"]] for one in (found, alone)]
    assert differences(*values, **SUMS) == []
    assert any(values[0])
    assert differences(alone["state"]["model"], sound["state"]["model"], **SUMS) != []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_", "evidence", "parallel"),
    [("oracle", "true_gap", "fsdp"), ("gsnr", "micro_square", "ddp")],
)
def test_what_takes_passes_or_gradients_of_its_own_is_that_of_one_process(
    ranks, train, tmp_path, signal_, evidence, parallel
):
    """One process over four micro-batches, and two over two each: true_gap takes passes of its own, micro_square the
    gradient of each micro-batch, the last of them before it is reduced."""
    words = [f"controller.signal={signal_}", "controller.routing=ranked", "training.steps=4", *WORDS[1:]]
    words += ["training.accumulation=4", f"records.evidence=[{evidence}]"]
    alone, found = everything(train(tmp_path / "one", *words)), everything(ranks(words, parallel))
    values = [[row[evidence] for row in one["units"]] for one in (found, alone)]
    assert len({*values[1]}) > 7 and min(values[1]) > 0
    assert values[0] == pytest.approx(values[1], rel=1e-3)
    assert [row["unit"] for row in found["events"]] == [row["unit"] for row in alone["events"]] != []
