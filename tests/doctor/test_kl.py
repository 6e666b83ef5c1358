"""The KL that a diagnosis measures: against plain passes, against an exact Gauss-Newton product, between two sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plausible import diagnosis
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F
from torch.nn.utils import prune

import gnmr
from gnmr.conversion import ConvertedModel, PathLinear, PathSpec, convert
from gnmr.formats.cast import quantize
from gnmr.formats.recipes import Cast
from gnmr.measure.gemm_costs import GemmCost, PathCost, format_nats
from gnmr.measure.kl import IGNORED, divergence, draw_labels
from gnmr.measure.price import measure_prices
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.knapsack import front
from gnmr.plan.page import page

VOCABULARY, WIDTH, LENGTH = 24, 32, 12


class Mixer(nn.Module):
    """Two blocks that mix tokens and channels: an error at one token reaches all later ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        names = ("q_proj", "k_proj", "v_proj", "up_proj")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names}) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_ST: Tensor) -> Tensor:
        h = self.embed(tokens_ST)
        for layer in self.layers:
            q, k, v = (layer[name](h) for name in ("q_proj", "k_proj", "v_proj"))
            h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + torch.tanh(layer["up_proj"](h))
        return self.head(h)


def batches_of(number: int, size: int = 4, seed: int = 1) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return list(torch.randint(VOCABULARY, (number, size, LENGTH), generator=draw))


def diagnosed(model: nn.Module, **options: Any) -> Diagnosis:
    given = {"recipe": "sim_e2m1", "held_out": batches_of(2, seed=2), "budget": 0.1} | options
    return gnmr.diagnose(model, given.pop("run", model), given.pop("batches", batches_of(2)), **given)


def kl_by_hand(high: Tensor, low: Tensor) -> Tensor:
    log_p, log_q = high.double().log_softmax(-1), low.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kls_of(model: nn.Module, batches: Sequence[Tensor], alone: str | None = None, **spec: Any) -> list[Tensor]:
    """KLs (S, T) of each batch by plain passes, with everything on the low path or one operator alone."""
    with torch.no_grad():
        high = [model(batch) for batch in batches]
        converted = convert(model, PathSpec(**{"low": "sim_e2m1", "recovery": "bf16"} | spec, backend="simulated"))
        for operator in converted.operators:
            operator.switch(alone is not None and operator.operator_name != alone)
        low = [model(batch) for batch in batches]
        converted.restore()
    return [kl_by_hand(*both) for both in zip(high, low, strict=True)]


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
def test_the_divergence_is_that_of_its_definition_down_to_what_float32_holds(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    high = torch.randn(3, 200, 50, generator=draw) * 4
    low = high + size * torch.randn(high.shape, generator=draw)
    each = kl_by_hand(high, low)
    assert divergence(high.log_softmax(-1), low).tolist() == pytest.approx(each.mean(1).tolist(), rel=0.01)
    targets = torch.zeros(3, 200, dtype=torch.int64)
    targets[0, 10:], targets[1] = IGNORED, IGNORED
    some = divergence(high.log_softmax(-1), low, targets)
    assert some.tolist() == pytest.approx([float(each[0, :10].mean()), float(each[2].mean())], rel=0.01)


@pytest.mark.parametrize("size", [10.0, 30.0, 100.0, 1e4])
def test_predictions_that_are_far_apart_have_a_finite_divergence(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    high, low = size * torch.randn(2, 3, 200, 50, generator=draw)
    each = kl_by_hand(high, low).mean(1)
    assert divergence(high.log_softmax(-1), low).tolist() == pytest.approx(each.tolist(), rel=1e-4)


@pytest.mark.parametrize("surer", [25.0, 110.0])
def test_tokens_whose_probability_is_0_in_float32_count(surer: float) -> None:
    """Many tokens of which each adds little, where no term overflows."""
    high, low = torch.zeros(2, 1, 1, 5000)
    high[..., 0], low[..., 0] = surer, 22.0
    each = kl_by_hand(high, low).mean(1)
    assert divergence(high.log_softmax(-1), low).tolist() == pytest.approx(each.tolist(), rel=1e-3)


def test_tokens_that_are_masked_in_both_predictions_add_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    high, low = torch.randn(2, 3, 200, 50, generator=draw)
    each = kl_by_hand(high[..., :40], low[..., :40]).mean(1)
    high, low = (one.masked_fill(torch.arange(50) >= 40, -torch.inf) for one in (high, low))
    assert divergence(high.log_softmax(-1), low).tolist() == pytest.approx(each.tolist(), rel=1e-4)
    assert divergence(torch.zeros(1, 1, 2).log_softmax(-1), torch.tensor([[[0.0, -torch.inf]]])).item() == torch.inf
    assert divergence(torch.zeros(1, 1, 2).log_softmax(-1), torch.full((1, 1, 2), torch.nan)).isnan().all()
    underflows, never = torch.tensor([[[0.0, -200.0]]]), torch.tensor([[[0.0, -torch.inf]]])
    assert divergence(underflows, never).item() == 0


def test_labels_are_drawn_from_the_predictions() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log().expand(20_000, 3)
    drawn = draw_labels(logits, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    assert shares.tolist() == pytest.approx([0.1, 0.6, 0.3], abs=0.01)
    targets = torch.full((20_000,), IGNORED)
    targets[::2] = 0
    assert (draw_labels(logits, torch.Generator().manual_seed(0), targets) == IGNORED).tolist() == [
        False,
        True,
    ] * 10_000


def quadratic_form(model: nn.Module, converted: ConvertedModel, operator: PathLinear, tokens: Tensor) -> float:
    """1/2 D' J' F J D a token."""
    seen: list[Tensor] = []
    with converted.no_side_effects(), torch.no_grad():
        for other in converted.operators:
            other.switch(True)
        handle = operator.register_forward_hook(lambda _m, inputs, output: seen.extend((inputs[0], output)))
        logits = model(tokens).double()
        handle.remove()
        operator.switch(False)
        error = operator(seen[0]) - seen[1]

    def shifted(by: Tensor) -> Tensor:
        handle = operator.register_forward_hook(lambda _m, _i, output: output + by)
        try:
            with converted.high_precision():
                return model(tokens)
        finally:
            handle.remove()

    _, moved = jvp(shifted, (torch.zeros_like(error),), (error,))
    p, moved = logits.softmax(-1), moved.double()
    return float(((p * moved.square()).sum(-1) - (p * moved).sum(-1).square()).mean().detach() / 2)


def test_by_sequence_and_drawn_labels_the_price_is_the_exact_quadratic_form() -> None:
    """1/2 D' J' F J D of one operator's error D, J its Jacobian to the logits, F the Fisher matrix of the predictions,
    from `torch.func`; by token it lacks the products of two tokens."""
    model, (tokens,) = Mixer().eval(), batches_of(1, size=3)
    together = tokens.repeat(8, 1)
    converted = convert(model, PathSpec(low="sim_e2m1", recovery="bf16", backend="simulated"))
    exact = [quadratic_form(model, converted, operator, tokens) for operator in converted.operators]
    meter = measure_prices(converted, ["price_fprop"], tokens=1, against_recovery=True)
    for operator in converted.operators:
        operator.switch(True)
    draw, number = torch.Generator().manual_seed(0), 50
    sums = {"fprop": 0.0, "fprop_sequence": 0.0}
    for _ in range(number):
        logits = model(together)
        F.cross_entropy(logits.flatten(0, 1), draw_labels(logits, draw).flatten()).backward()
        found = meter.by_operator()
        sums = {name: total + found[name].numpy() / number for name, total in sums.items()}
        meter.reset()
        converted.end_step()
    assert sums["fprop_sequence"] == pytest.approx(np.array(exact), rel=0.15)  # 1,200 sequences
    assert np.abs(np.log(sums["fprop"] / exact)).max() > 0.2


def test_a_diagnosis_measures_what_plain_passes_say() -> None:
    model = Mixer().eval()
    batches, held_out = batches_of(4), batches_of(2, seed=2)
    found = diagnosed(model, batches=batches, confirm=3)
    low = torch.cat(kls_of(model, batches)).mean(1)
    alone = {name: float(torch.cat(kls_of(model, batches[:2], name)).mean()) for name in found.operators}
    left = torch.cat(kls_of(model, held_out, **found.plan().paths()))
    assert found.measured.kl == pytest.approx(float(low.mean()), rel=1e-4)
    assert found.measured.kl_error == pytest.approx(float(low.std() / 4), rel=1e-3) and found.measured.sequences == 16
    assert (found.measured.high, found.measured.cost) == (None, None), "there are no targets"
    forward = {row.operator: row for row in found.rows if row.gemm == "fprop"}
    confirmed = {name: row.measured for name, row in forward.items() if row.measured is not None}
    assert 3 <= len(confirmed) <= 6 and confirmed == pytest.approx({name: alone[name] for name in confirmed}, rel=1e-3)
    for name, row in forward.items():
        assert row.value == (row.measured if name in confirmed else row.by_sequence)
    assert found.remaining["plan"].kl == pytest.approx(float(left.mean()), rel=1e-3)
    assert found.interaction == pytest.approx(found.measured.kl - found.total) and found.limit < 1e-9
    assert [share for share, _ in found.curve] == sorted(share for share, _ in found.curve) and len(found.curve) > 1
    assert "nats of KL per token" in found.verdict() and found.labels == "model" and found.estimate == "sequence"


def test_the_default_device_changes_no_diagnosis() -> None:
    """A script on a GPU may set it to "cuda"; here "meta" shows tensors that name no device."""
    model, options = Mixer().eval(), {"batches": batches_of(2), "held_out": batches_of(1, seed=2), "confirm": 1}

    def run(batch: Tensor) -> Tensor:
        with torch.device("cpu"):  # attention makes a mask
            return model(batch)

    expected = diagnosed(model, run=run, **options)
    torch.set_default_device("meta")
    try:
        found = diagnosed(model, run=run, **options)
    finally:
        torch.set_default_device(None)
    assert found.measured.kl == expected.measured.kl
    assert [row.value for row in found.rows] == [row.value for row in expected.rows]


def test_forty_sequences_are_told_apart_in_float16() -> None:
    """Their marks stay within its range; the gradients of queries and keys lie below it, and are by token."""
    found = diagnosed(Mixer().eval().half(), batches=batches_of(2, size=40), held_out=[], confirm=0)
    right = diagnosed(Mixer().eval(), batches=batches_of(2, size=40), held_out=[], confirm=0)
    assert {name.split(".")[-1] for name in found.without_sequences} <= {"q_proj", "k_proj"}
    assert found.total == pytest.approx(right.total, rel=0.1)


SENTENCES = [(1, 11), (5, 3), (9, 12), (2, 7), (12, 4), (7, 9)]
"""(first token, length) of sequences."""


def sentence(first: int, length: int) -> Tensor:
    return (torch.arange(length) * 7 + first) % VOCABULARY


def padded(several: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """A batch of tokens and targets, padded to the longest."""
    tokens = nn.utils.rnn.pad_sequence([sentence(*one) for one in several], batch_first=True)
    kept = torch.arange(tokens.shape[1]) < torch.tensor([length for _, length in several])[:, None]
    return tokens, torch.where(kept, (tokens * 5 + 1) % VOCABULARY, IGNORED)


SPLITS = [[1, 5], [2, 2, 2], [4, 1, 1]]


def in_batches(split: list[int]) -> list[tuple[Tensor, Tensor]]:
    starts = np.cumsum([0, *split])
    return [padded(SENTENCES[start : start + size]) for start, size in zip(starts, split, strict=False)]


def test_any_split_into_batches_gives_the_same_averages() -> None:
    """KL, losses and prices are means over the tokens that count, of all batches."""
    model = Mixer().eval()
    options: Any = {"run": lambda batch: (model(batch[0]), batch[1]), "confirm": 0, "rescue": "bf16"}
    found = [
        diagnosed(model, batches=in_batches(split), held_out=in_batches(split)[::-1], **options) for split in SPLITS
    ]
    kl, loss = kls_by_hand(model, SENTENCES)
    for diagnosis_of_split in found:
        assert diagnosis_of_split.measured.kl == pytest.approx(kl, rel=1e-4)
        assert diagnosis_of_split.remaining["last"].kl == pytest.approx(found[0].remaining["last"].kl, rel=1e-4)
        assert diagnosis_of_split.measured.high == pytest.approx(loss, rel=1e-5)
        assert diagnosis_of_split.held_out.cost == pytest.approx(diagnosis_of_split.measured.cost, abs=1e-5)
        for row, same in zip(diagnosis_of_split.rows, found[0].rows, strict=True):
            if row.gemm == "fprop":
                assert (row.by_token, row.value) == pytest.approx((same.by_token, same.value), rel=1e-4)


def kls_by_hand(model: nn.Module, sentences: list[tuple[int, int]]) -> tuple[float, float]:
    """KL and loss per token, by one sequence at a time in float64."""
    kls, losses = [], []
    for first, length in sentences:
        tokens, targets = padded([(first, length)])
        kls += kls_of(model, [tokens])
        with torch.no_grad():
            logits = model(tokens).double()
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
    return float(torch.cat(kls, dim=1).mean()), float(torch.cat(losses).mean())


def test_the_error_of_unequal_sequences_is_that_of_a_ratio() -> None:
    """As in resampling sequences: long ones weigh more, and their number of tokens varies too."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 50, 400).astype(float)
    nats = tokens * rng.gamma(2.0, 0.01, 400)
    found = PathCost.of([np.stack([nats, tokens], axis=1)], [np.nan], [np.nan], [1])
    draws = rng.integers(0, 400, (2000, 400))
    assert found.kl == pytest.approx(nats.sum() / tokens.sum())
    assert found.kl_error == pytest.approx((nats[draws].sum(1) / tokens[draws].sum(1)).std(), rel=0.1)


class Arranged(Mixer):
    """The same function, whose linears are given their rows in another layout."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def run(self, linear: nn.Module, x: Tensor) -> Tensor:
        sequences, length, width = x.shape
        if self.layout == "rows":
            return linear(x.flatten(0, 1)).view_as(x)
        if self.layout in ("tokens first", "logits tokens first"):
            return linear(x.transpose(0, 1)).transpose(0, 1)
        if self.layout == "rows, tokens first":
            return linear(x.transpose(0, 1).flatten(0, 1)).view(length, sequences, width).transpose(0, 1)
        if self.layout == "windows":
            return linear(x.reshape(4 * sequences, length // 4, width)).view_as(x)
        if self.layout == "windows first":
            parts = x.view(sequences, 4, length // 4, width).transpose(0, 1)
            return linear(parts.flatten(0, 1)).view_as(parts).transpose(0, 1).reshape_as(x)
        if self.layout == "two calls":
            return torch.cat([linear(part) for part in x.split([5, length - 5], dim=1)], dim=1)
        return linear(x.view(sequences, 2, length // 2, width)).view_as(x)  # heads

    def forward(self, tokens_ST: Tensor) -> Tensor:
        h = self.embed(tokens_ST)
        for layer in self.layers:
            q, k, v = (self.run(layer[name], h) for name in ("q_proj", "k_proj", "v_proj"))
            h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + torch.tanh(self.run(layer["up_proj"], h))
        logits = self.head(h)
        return logits.transpose(0, 1) if self.layout == "logits tokens first" else logits


LAYOUTS = (
    *("rows", "tokens first", "logits tokens first", "rows, tokens first"),
    *("windows", "windows first", "heads", "two calls"),
)


@cache
def usual(size: int) -> Diagnosis:
    few: Any = {"batches": batches_of(2, size=size), "confirm": 0, "held_out": []}
    return diagnosed(Mixer().eval(), **few)


@pytest.mark.parametrize("size", [LENGTH, *[pytest.param(size, marks=pytest.mark.slow) for size in (4, 40)]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_operators_changes_no_price(layout: str, size: int) -> None:
    """40 sequences have two digits, and as many sequences as tokens leave no trace in a shape."""
    few: Any = {"batches": batches_of(2, size=size), "confirm": 0, "held_out": []}
    found = diagnosed(Arranged(layout).eval(), **few)
    for row, same in zip(found.rows, usual(size).rows, strict=True):
        assert row.by_sequence == pytest.approx(same.by_sequence, rel=1e-4), row.operator
        assert row.by_token == pytest.approx(same.by_token, rel=1e-4), row.operator
    assert found.measured.kl_error == pytest.approx(usual(size).measured.kl_error, rel=1e-3)
    assert not found.without_sequences


def test_where_sequences_are_unknown_the_estimate_is_by_token_and_it_is_said() -> None:
    """Flat logits do not say which of them belong together."""
    model = Mixer().eval()
    found = diagnosed(model, run=lambda tokens: model(tokens).flatten(0, 1), confirm=0, held_out=[])
    assert "layers.0.v_proj" in found.without_sequences and "estimated by token alone, as " in found.verdict()
    for row in found.rows:
        if row.operator in found.without_sequences and row.gemm == "fprop":
            assert row.by_sequence is None and row.value == row.by_token


class Looped(Mixer):
    """One block that runs four times."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[1]
        with torch.no_grad():
            self.layers[0]["up_proj"].weight.mul_(3)

    def forward(self, tokens_ST: Tensor) -> Tensor:
        h = self.embed(tokens_ST)
        for _ in range(4):
            h = h + torch.tanh(self.layers[0]["up_proj"](h))
        return self.head(h)


def test_a_block_that_runs_several_times_makes_one_error() -> None:
    model = Looped().eval()
    options: Any = {"targets": ["up_proj"], "batches": batches_of(6, size=40), "held_out": [], "recipe": "mxfp4"}
    (estimate,), (measured,) = (
        [row for row in diagnosed(model, confirm=number, **options).rows if row.gemm == "fprop"] for number in (0, 1)
    )
    assert estimate.by_sequence == pytest.approx(measured.measured, rel=0.25)
    assert estimate.by_token == pytest.approx(measured.measured, rel=0.25), "tokens do not meet in this model"

    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    alone, targets = (
        diagnosed(model, run=run, labels="data", confirm=0, **options).total
        for run in (loss, lambda tokens: (model(tokens), tokens))
    )
    assert alone == pytest.approx(targets, rel=1e-4), "the number of tokens is not that of rows of all calls"


class Towers(nn.Module):
    """One tower that reads two texts of a pair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up_proj = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, tokens_ST: Tensor) -> Tensor:
        both = [torch.tanh(self.up_proj(self.embed(one) * 3)).mean(1) for one in tokens_ST.split([5, LENGTH - 5], 1)]
        return 8 * self.head(torch.cat(both, dim=-1))


def test_of_two_towers_the_errors_of_a_pair_are_one_error() -> None:
    model = Towers().eval()
    options: Any = {"targets": ["up_proj"], "batches": batches_of(4, size=120), "held_out": [], "recipe": "mxfp4"}
    found = diagnosed(model, confirm=0, **options)
    (row,) = [row for row in diagnosed(model, confirm=1, **options).rows if row.gemm == "fprop"]
    assert row.by_sequence == pytest.approx(row.measured, rel=0.25) and found.rows[0].value == row.by_sequence

    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens), tokens[:, 0] % 5)

    alone, targets = (
        diagnosed(model, run=run, labels="data", confirm=0, **options).total
        for run in (loss, lambda tokens: (model(tokens), tokens[:, 0] % 5))
    )
    assert alone == pytest.approx(targets, rel=1e-4), "a loss term per pair, not per token"


def test_a_loss_alone_counts_its_own_terms() -> None:
    """Nine in ten labels are masked; logits with a loss inside say the same as targets."""
    model, batches = Mixer().eval(), batches_of(3)
    few: Any = {"batches": batches, "confirm": 0, "rescue": "bf16", "held_out": []}

    def targets(tokens: Tensor) -> Tensor:
        return tokens.masked_fill(torch.arange(LENGTH) < LENGTH - 1, IGNORED)

    class Result:
        def __init__(self, tokens: Tensor) -> None:
            self.logits = model(tokens)
            self.loss = F.cross_entropy(self.logits.flatten(0, 1), targets(tokens).flatten())

    def in_chunks(tokens: Tensor) -> Tensor:
        head, model.head = model.head, nn.Identity()
        hidden, model.head = model(tokens), head
        parts = zip(hidden.flatten(0, 1).split(13), targets(tokens).flatten().split(13), strict=True)
        return (
            sum(F.cross_entropy(head(h), right, reduction="sum") for h, right in parts) / (targets(tokens) >= 0).sum()
        )

    runs = (lambda tokens: (model(tokens), targets(tokens)), Result, lambda tokens: Result(tokens).loss, in_chunks)
    data = [diagnosed(model, run=run, labels="data", **few) for run in runs]
    assert [one.total for one in data[1:]] == pytest.approx([data[0].total] * 3, rel=1e-4)
    drawn = [diagnosed(model, run=run, **few | {"held_out": batches_of(1, seed=2)}) for run in runs[:2]]
    assert drawn[1].total == pytest.approx(drawn[0].total, rel=1e-4)
    assert drawn[1].measured.kl == pytest.approx(drawn[0].measured.kl, rel=1e-5)
    assert drawn[1].remaining["plan"].kl == pytest.approx(drawn[0].remaining["plan"].kl, rel=1e-5)
    assert diagnosed(model, run=runs[2], terms=lambda _: 8, **few).total == pytest.approx(2 * data[0].total, rel=1e-4)


def test_operators_are_measured_alone_on_batches_of_different_sizes() -> None:
    model, batches = Mixer().eval(), [batch[:size] for batch, size in zip(batches_of(3), (4, 2, 3), strict=True)]
    found = diagnosed(model, batches=batches, run=model, held_out=[], confirm=1)
    row = next(row for row in found.rows if row.measured is not None)
    by_hand = float(torch.cat(kls_of(model, batches[:2], row.operator)).mean())
    assert row.measured == pytest.approx(by_hand, rel=1e-3) and found.measured.sequences == 9


def test_what_run_may_return() -> None:
    """Logits, these and targets, an output of transformers: the KL is the same, and with targets there is the loss."""
    model = Mixer().eval()

    def with_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return model(tokens), tokens

    class Result:
        def __init__(self, tokens: Tensor) -> None:
            self.logits = model(tokens)
            self.loss = F.cross_entropy(self.logits.flatten(0, 1), tokens.flatten())

    few: Any = {"confirm": 2, "held_out": ()}
    plain, targets, output = (diagnosed(model, run=run, **few) for run in (model, with_targets, Result))
    assert plain.measured.kl == targets.measured.kl == output.measured.kl
    # A difference of two losses of about 3 nats, which are added up in another order.
    assert targets.measured.cost == pytest.approx(output.measured.cost, abs=1e-6)
    data = diagnosed(model, run=with_targets, labels="data", **few)
    assert data.estimate == "token" and data.measured.kl == plain.measured.kl
    with pytest.raises(ValueError, match=r"^run of batch 1=logits: has no loss"):
        diagnosed(model, labels="data")
    for wrong, says in (
        (lambda tokens: tokens[:, 1:], "must be of the same positions"),
        (lambda tokens: tokens.float(), "must be whole numbers"),
        (lambda tokens: tokens + VOCABULARY, f"must be below {VOCABULARY}"),
        (lambda tokens: torch.full_like(tokens, IGNORED), "all are left out"),
    ):
        with pytest.raises(ValueError, match=f"^run of batch 1=.*{says}"):
            diagnosed(model, run=lambda tokens, wrong=wrong: (model(tokens), wrong(tokens)))


def test_in_bfloat16_the_limit_is_above_what_float32_shows() -> None:
    few: Any = {"batches": batches_of(2), "confirm": 0, "held_out": ()}
    limits = [diagnosed(Mixer().to(dtype), **few).limit for dtype in (torch.float32, torch.bfloat16)]
    assert limits[0] < 1e-9 < 1e-7 < limits[1]
    with pytest.raises(ValueError, match=r"^gate=.*below what rounding of this model makes"):
        diagnosed(Mixer().to(torch.bfloat16), against="fp8_hybrid", gate=limits[1] / 2)
    with pytest.raises(ValueError, match=r"^gate=0.003: is about a KL"):
        diagnosed(Mixer(), run=lambda tokens: Mixer()(tokens).square().mean(), against="fp8_hybrid", gate=0.003)


NAMES = [f"layers.{i}.{name}" for i in range(2) for name in ("q_proj", "k_proj", "v_proj", "up_proj")]
PLANTED = [
    *[({"*": "fp8_hybrid", name: "bf16"}, "fp8_hybrid", name) for name in NAMES[::3]],  # an entry of a list too many
    *[("fp8_hybrid", {"*": "fp8_hybrid", name: "mxfp8"}, name) for name in NAMES[1::3]],  # another granularity
    *[({"*": "mxfp8", name: "nvfp4"}, "mxfp8", name) for name in NAMES[2::3]],  # another format
    ("bf16", {"*": "bf16", NAMES[3]: "nvfp4"}, NAMES[3]),
]
PLANTED[1:6:2] = [pytest.param(*case, marks=pytest.mark.slow) for case in PLANTED[1:6:2]]


@pytest.mark.parametrize(("rollout", "trainer", "culprit"), PLANTED)
def test_a_planted_difference_between_two_sides_is_named(rollout: Any, trainer: Any, culprit: str) -> None:
    few: Any = {"batches": batches_of(2), "held_out": batches_of(1, size=2, seed=2), "confirm": 2}
    found = diagnosed(Mixer().eval(), recipe=rollout, against=trainer, gate=1e-9, **few)
    assert [row.operator for row in found.worst() if row.value > 0] == [culprit]
    assert found.verdict().startswith("the gate does not hold") and culprit in found.verdict()
    assert list(found.choice().pins) == [culprit] and found.choice().pins[culprit].keys() == {"fprop"}
    assert found.remaining["plan"].kl == 0


EQUAL = [
    *[(name, name) for name in ("fp8_delayed", "nvfp4", "llm_int8")],
    *[pytest.param(name, name, marks=pytest.mark.slow) for name in ("fp8_hybrid", "mxfp8", "sim_e2m1", "sim_int8")],
    ({"*": "fp8_hybrid", NAMES[4]: "bf16"}, {"*": "fp8_hybrid", f"*{NAMES[4][7:]}": "bf16"}),
    ({"*": "nvfp4", "*up_proj": "mxfp8"}, {"*": "mxfp8", "[qkv]*": "nvfp4", "*_proj": "nvfp4", "*.up_proj": "mxfp8"}),
    ({"*": "bf16"}, {"*": "mxfp8", "*_proj": "bf16"}),
]


@pytest.mark.parametrize(("rollout", "trainer"), EQUAL)
def test_equal_sides_are_silent(rollout: Any, trainer: Any) -> None:
    few: Any = {"batches": batches_of(2, size=2), "held_out": (), "confirm": 2}
    found = diagnosed(Mixer().eval(), recipe=rollout, against=trainer, gate=1e-9, **few)
    assert found.verdict().startswith("the gate holds") and not any(row.value for row in found.worst())


class Routed(Mixer):
    """The same with a router, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens_ST: Tensor) -> Tensor:
        share = self.router(self.embed(tokens_ST)).softmax(-1)[..., :1]
        return super().forward(tokens_ST) * share


BESIDE = {"kv_cast": "int4/row", "recipe": "sim_int4", "held_out": ()}


@cache
def beside(batches: int) -> Diagnosis:
    kinds = ["head", "router", "kv"]
    return diagnosed(Routed().eval(), include=kinds, batches=batches_of(batches, size=8), confirm=5, **BESIDE)


@pytest.mark.parametrize("number", [12, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["head", "router", "k_cache", "v_cache"])
def test_what_is_beside_the_plan_is_measured_alone(name: str, number: int) -> None:
    model, batches, found = Routed().eval(), batches_of(2, size=8), beside(number)
    (row,) = [row for row in found.unplanned if row.operator == name]

    def low(given: Tensor) -> Tensor:
        rows = given.reshape(-1, given.shape[-1])
        return quantize(rows, Cast.of("int4/row"), 1)[0].view_as(given)

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return exact(q, low(k) if name == "k_cache" else k, low(v) if name == "v_cache" else v, is_causal=is_causal)

    exact, kls = F.scaled_dot_product_attention, []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for batch in batches:
            high = model(batch)
            if name in ("head", "router"):
                spec = PathSpec(low="sim_int4", recovery="bf16", targets=[name], backend="simulated")
                converted = convert(model, spec, include_heads=True)
                kls.append(kl_by_hand(high, model(batch)).mean(1))
                converted.restore()
            else:
                patch.setattr(F, "scaled_dot_product_attention", attention)
                kls.append(kl_by_hand(high, model(batch)).mean(1))
                patch.undo()
    by_hand = float(torch.cat(kls).mean())
    assert len(found.unplanned) == 4, "there are two blocks in this module, of which a name is one cache"
    assert row.measured == pytest.approx(by_hand, rel=1e-3) and row.value == row.measured
    assert row.operator not in found.operators and row.operator not in found.plan().pins
    if number == 30:  # an estimate from few batches is too noisy
        assert row.by_sequence == pytest.approx(row.measured, rel=0.5)


@pytest.mark.parametrize("under", [False, True])
def test_what_all_keys_and_values_cost_alone_and_what_a_plan_leaves_with_them(under: bool) -> None:
    model, held_out = Mixer().eval(), batches_of(2, seed=2)
    options: dict[str, Any] = {"include": ["kv"], "kv_cast": "int4/row", "confirm": 3, "budget": 0.3}
    found = diagnosed(model, batches=batches_of(2), **options)
    pins = found.choice().pins
    if under:
        found = diagnosed(model, recipe="bf16", plan=found.plan(), batches=batches_of(2), **options)
        assert found.pins == pins
    assert pins and found.kv_cast == "int4/row" and found.held_out is not None
    held_out = held_out[-found.held_out.batches :]  # the others chose the plan
    exact = F.scaled_dot_product_attention

    def low(x: Tensor) -> Tensor:
        return quantize(x.reshape(-1, x.shape[-1]), Cast.of("int4/row"), 1)[0].view_as(x)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        high = [model(batch) for batch in held_out]
        patch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **more: exact(q, low(k), low(v), **more))
        alone = [kl_by_hand(logits, model(batch)) for logits, batch in zip(high, held_out, strict=True)]
        converted = convert(model, PathSpec(low="sim_e2m1", recovery="bf16", pins=pins, backend="simulated"))
        left = [kl_by_hand(logits, model(batch)) for logits, batch in zip(high, held_out, strict=True)]
        converted.restore()
    assert found.caches["alone"].kl == pytest.approx(float(torch.cat(alone).mean()), rel=1e-3)
    assert found.caches["plan"].kl == pytest.approx(float(torch.cat(left).mean()), rel=1e-3)
    assert "; keys and values in int4/row cost " in found.verdict() and "the plan leaves " in found.verdict()
    assert found.tree()["caches"]["plan"]["kl"] == found.caches["plan"].kl
    assert "caches" in found.tree() and (under or "keys and values" in found.plan().provenance)


def test_a_head_in_bf16_against_one_in_fp32() -> None:
    """Operands and logits are rounded, and the sums between are those of float32."""
    model, batches = Routed().eval(), batches_of(2, size=8)
    found = diagnosed(
        model, recipe="sim_bf16", against="bf16", include=["head"], batches=batches, confirm=5, held_out=()
    )
    (row,) = found.unplanned

    def in_bf16(head: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        operands = (x.bfloat16().float() for x in (inputs[0], head.weight))
        return F.linear(*operands, head.bias).bfloat16().float()

    with torch.no_grad():
        high = [model(batch) for batch in batches]
        handle = model.head.register_forward_hook(in_bf16)
        kls = [kl_by_hand(logits, model(batch)).mean() for logits, batch in zip(high, batches, strict=True)]
        handle.remove()
    assert row.operator == "head" and row.measured == pytest.approx(float(torch.stack(kls).mean()), rel=1e-2)
    assert found.limit is not None and 0 < 100 * found.limit < row.measured
    assert (found.recipe, found.recovery, found.against) == ("sim_bf16", "bf16", True)


def test_the_model_is_as_it_was_after_a_mistake_in_what_is_beside() -> None:
    model = Routed()
    for options, says in (({"kv_cast": "foo"}, "kv_cast=foo: "), ({"include": ["head", "tail"]}, "include=tail: ")):
        with pytest.raises(ValueError, match=f"^{says}"):
            diagnosed(model, **{"include": ["head", "kv"]} | options)
    diagnosed(model, include=["head", "router"], batches=batches_of(2), confirm=1, held_out=())
    assert all(type(module) is nn.Linear for module in (model.head, model.router))


class Odd(Mixer):
    """Its attention is called below a module of its own, in some batches alone, and without a dimension of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.more = Flat()

    def forward(self, tokens_ST: Tensor) -> Tensor:
        y = super().forward(tokens_ST)
        return y + self.more(y) if tokens_ST[0, 0] % 2 else y


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.scaled_dot_product_attention(one, one, one, is_causal=True) for one in x])


def test_caches_of_odd_attention() -> None:
    batches = batches_of(4)
    for i, batch in enumerate(batches):
        batch[0, 0] = i
    found = diagnosed(Odd().eval(), include=["kv"], batches=batches, **BESIDE)
    assert {row.operator for row in found.unplanned} == {"k_cache", "v_cache", "more.k_cache", "more.v_cache"}
    assert all(row.measured and 0.1 < row.by_token / row.measured < 10 for row in found.unplanned)
    model = Mixer()

    def attends(tokens: Tensor) -> Tensor:
        y = model.head(model.layers[0]["up_proj"](model.embed(tokens)))
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)

    outside = diagnosed(model, run=attends, include=["kv"], **BESIDE)
    assert {row.operator for row in outside.unplanned} == {"k_cache", "v_cache"}


def test_an_attention_that_is_not_seen_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    with pytest.raises(ValueError, match=r"^include=kv"):
        diagnosed(model, include=["kv"])
    with pytest.raises(ValueError, match=r"^include=router"):
        diagnosed(model, include=["router"])


class Adapted(nn.Module):
    """As peft wraps a linear."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


def test_linears_below_adapters_are_diagnosed_too() -> None:
    model, few = Mixer(), {"batches": batches_of(2), "confirm": 0, "held_out": ()}
    model.layers[0]["q_proj"] = Adapted(model.layers[0]["q_proj"])
    found, plain = (diagnosed(one, **few) for one in (model, Mixer()))
    assert list(found.operators) == list(plain.operators) and found.measured.kl == plain.measured.kl


class Bounded(Mixer):
    """Its predictions are NaN as soon as one operator is off by more than rounding."""

    def forward(self, tokens_ST: Tensor) -> Tensor:
        h = self.embed(tokens_ST)
        own = self.layers[0]["v_proj"]
        off = (own(h) - F.linear(h, own.weight)).abs() > 0.01
        return torch.where(off.any(-1, keepdim=True), torch.nan, super().forward(tokens_ST))


def test_an_operator_that_alone_makes_predictions_nan_is_the_worst_and_is_kept() -> None:
    found = diagnosed(Bounded().eval(), budget=0.6)
    worst = found.worst()[0]
    assert (worst.operator, worst.value, worst.measured) == ("layers.0.v_proj", np.inf, np.inf)
    assert found.verdict().startswith("the predictions are not finite under sim_e2m1; worst: fprop of layers.0.v_proj")
    plan = found.plan()
    assert plan.pins["layers.0.v_proj"] == {"fprop": "bf16"}, "on mxfp8 they are not finite either"
    assert "layers.0.v_proj" not in plan.prices and plan.expected is None and np.isfinite(found.remaining["plan"].kl)
    html = page(found, "", {})
    assert "nan%" not in html and "inf%" not in html
    assert all(np.isfinite(left) for _, left in front(found.prices, found.costs, found.recipe, found.groups)[1:])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipe": "foo"}, "recipe=foo: is not a recipe"),
        ({"recipe": {"q_proj": "nvfp4"}}, 'recipe=.*: has no "\\*"'),
        ({"recipe": {"*": "nvfp4", "lost": "bf16"}}, "recipe=lost: no operator"),
        ({"against": "foo"}, "against=foo: is not a recipe"),
        ({"against": "mxfp8", "recovery": "mxfp8"}, "recovery=mxfp8: cannot be combined with against="),
        ({"recovery": {"*": "bf16"}}, "recovery=.*: must be one recipe"),
        ({"recipe": "bf16", "against": "bf16"}, "recipe=bf16: both sides are in 16 bits"),
        ({"gate": 0.003}, "gate=0.003: is between two sides"),
        *[({"against": "mxfp8", "gate": gate}, "gate=.*: must be nats") for gate in (0, np.nan, np.inf, "0.003", True)],
        ({"plan": "here", "against": "mxfp8"}, "against=mxfp8: cannot be asked for under plan="),
        ({"plan": "here", "gate": 1.0}, "gate=1.0: cannot be"),
        ({"plan": "here", "recovery": "mxfp8"}, "recovery=mxfp8: the plan says which"),
        ({"include": ["kv"], "kv_cast": "e4m3/delayed"}, "kv_cast=e4m3/delayed: a cache has no history"),
        ({"kv_cast": "bf16"}, "kv_cast=bf16: casts nothing"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        diagnosed(Mixer(), **options)


def test_weights_that_are_nan_are_named_before_a_gate_is_judged() -> None:
    model = Mixer()
    model.layers[0]["q_proj"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"elements of layers.0.q_proj.weight are not finite"):
        diagnosed(model, against="mxfp8", gate=0.003)


def test_errors_of_tokens_are_called_coherent_beyond_chance_alone() -> None:
    flat, loud = GemmCost("a", "fprop", 1.0, (1.0, 1.0), 1.0, 2.6), GemmCost("b", "fprop", 1.0, (1.0, 1.0), 1.0, 0.01)
    for sequences, expected in ((6, [loud]), (48, [flat, loud])):
        given = PathCost(2, 1.0, 0.1, sequences, None, None, np.nan)
        assert diagnosis(1, names=["a", "b"], rows=(flat, loud), measured=given).coherent == expected


def test_words_of_two_sides() -> None:
    few: Any = {"batches": batches_of(2), "confirm": 1}
    tiny = diagnosed(Mixer(), against="bf16", budget=1e-6, held_out=(), **few)
    assert "no GEMM fits a budget of 0.0001% of the GEMM time" in tiny.verdict() and not tiny.little
    low = tiny.measured.kl
    held = [batches_of(1, size=1)[0]]
    found = diagnosed(Mixer(), against="bf16", gate=low / 10, held_out=held, **few)
    assert "nan" not in found.verdict() and " nats on other batches" in found.verdict()
    assert found.plan().budget is None and found.plan(0.2).extra is None and not found.little
    assert diagnosed(Mixer(), against="bf16", gate=low * 10, held_out=(), **few).little
    with pytest.raises(ValueError, match=r"^against=bf16: is about a KL"):
        diagnosed(model := Mixer(), run=lambda tokens: model(tokens).square().mean(), against="bf16")


def assert_alike(found: Diagnosis, right: Diagnosis) -> None:
    """Assert that both have the same numbers, up to the order of sums."""
    assert found.measured.kl == pytest.approx(right.measured.kl, rel=1e-4)
    assert [row.operator for row in found.rows] == [row.operator for row in right.rows]
    assert [row.value for row in found.rows] == pytest.approx([row.value for row in right.rows], rel=1e-3)
    for key, scores in right.scores.items():
        assert found.scores[key] == pytest.approx(scores, rel=1e-3)


def pruned(linear: nn.Linear) -> None:
    prune.l1_unstructured(linear, "weight", 0.5)


def replaced(linear: nn.Linear) -> None:
    """Its pre-hook puts a new weight in the module's place, as DropConnect and low-rank products do."""
    made = nn.Parameter(linear.weight.detach() * 2)
    del linear.weight
    linear.made = made
    linear.register_forward_pre_hook(lambda module, _inputs: setattr(module, "weight", module.made / 2))
    linear.weight = made.detach() / 2


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "pruned": pruned,
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "replaced": replaced,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("hook", "names"),
    [
        *[(hook, ("q_proj", "k_proj", "v_proj", "up_proj")) for hook in HOOKS],
        ("pruned", ("q_proj",)),
        *[pytest.param(hook, ("q_proj",), marks=pytest.mark.slow) for hook in HOOKS if hook != "pruned"],
    ],
)
def test_weights_that_a_pre_hook_makes_are_priced_as_the_plain_model_with_these_weights(
    hook: str, names: Sequence[str]
) -> None:
    """Also if they are frozen."""
    model, plain = Mixer().eval(), Mixer().eval()
    for layer, other in zip(model.layers, plain.layers, strict=True):
        for name in names:
            HOOKS[hook](layer[name].eval())
            layer[name].requires_grad_(False)
            layer[name](torch.zeros(1, WIDTH))
            other[name].weight.data = layer[name].weight.detach().clone()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    few: Any = {"batches": batches_of(2), "confirm": 2, "held_out": ()}
    found, right = (diagnosed(one, run=lambda x, one=one: (one(x), x), **few) for one in (model, plain))
    assert not found.idle and found.coverage == right.coverage
    assert_alike(found, right)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert not any(p.requires_grad for layer in model.layers for name in names for p in layer[name].parameters())


def test_each_pass_is_priced_with_the_weight_that_it_read() -> None:
    """The caller puts other weights into the module for a call, as `functional_call` does."""
    model, plain = Mixer().eval(), Mixer().eval()
    for layer in plain.layers:
        layer["up_proj"].weight.data *= 3
    other = {name: 3 * value for name, value in model.state_dict().items() if "up_proj" in name}
    few: Any = {"batches": batches_of(2), "confirm": 0, "held_out": ()}
    found = diagnosed(model, run=lambda x: torch.func.functional_call(model, other, (x,)), **few)
    right = diagnosed(plain, **few)
    assert_alike(found, right)


class Chooser(Mixer):
    """Its `index_proj` chooses a token to read in `no_grad`, and `late_proj` one in a graph that no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer["index_proj"], layer["late_proj"] = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, tokens_ST: Tensor) -> Tensor:
        h = self.embed(tokens_ST)
        for layer in self.layers:
            with torch.no_grad():
                first = layer["index_proj"](h).sum(-1).argmax(-1)
            for chosen in (first, layer["late_proj"](h).sum(-1).argmax(-1)):
                read = h.gather(1, chosen[:, None, None].expand(-1, 1, WIDTH))
                h = h + torch.tanh(layer["up_proj"](h + layer["v_proj"](read)))
            layer["q_proj"](h), layer["k_proj"](h)
        return self.head(h)


def test_operators_without_a_gradient_stay_in_16_bits_and_are_measured_alone() -> None:
    model, choices = Chooser().eval(), [f"layers.{i}.{name}_proj" for i in range(2) for name in ("index", "late")]
    given: Any = {"batches": batches_of(4, size=16), "budget": 0.3}
    found = diagnosed(model, **given)
    without = diagnosed(model, exclude=["index_proj", "late_proj"], **given)
    assert_alike(found, without)
    assert found.remaining["plan"].kl == pytest.approx(without.remaining["plan"].kl)
    assert found.plan().pins == without.plan().pins
    alone, lost = {row.operator: row.measured for row in found.unplanned}, "the loss does not depend on what they give"
    for name, why in found.idle.items():
        chooses = "index" in name or alone[name]
        assert why == ("they run without gradient (frozen, or a choice of tokens)" if chooses else lost)
    for name in choices:
        by_hand = float(torch.cat(kls_of(model, given["batches"][:2], name)).mean())
        assert alone[name] == pytest.approx(by_hand, rel=1e-3, abs=1e-9)
    assert any(alone[name] > 0 for name in choices)


def with_memory(model: nn.Module, seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Add what it saw in earlier passes, as a cache of keys and values that is never emptied."""

    def run(tokens: Tensor) -> Tensor:
        seen.append(model.embed(tokens).mean(1, keepdim=True))
        return model(tokens) + model.head(torch.stack(seen).sum(0))

    return run


def with_late_memory(model: nn.Module, seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Another model from the third pass with gradients on."""

    def run(tokens: Tensor) -> Tensor:
        seen.extend([tokens] * torch.is_grad_enabled())
        return model(tokens) * (1 + 0.2 * (len(seen) > 2))

    return run


def with_noise(model: nn.Module, draw: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(tokens).masked_fill(torch.rand(VOCABULARY, generator=draw) < 0.1, -10)


@pytest.mark.parametrize("alone", [False, True], ids=["logits", "loss"])
@pytest.mark.parametrize("kind", ["memory", "late memory", "noise"])
def test_a_run_that_differs_from_pass_to_pass_is_refused(kind: str, alone: bool) -> None:
    model = Mixer().eval()
    memory = with_memory if kind == "memory" else with_late_memory
    run = with_noise(model, torch.Generator()) if kind == "noise" else memory(model, [])

    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten())

    with pytest.raises(ValueError, match=r"^run=.*: two passes of batch 1 .* cache .*\(dropout, masks\)"):
        diagnosed(model, run=loss if alone else run, batches=batches_of(4), confirm=0)


def test_dropout_of_pytorchs_generator_is_the_same_in_all_passes() -> None:
    model = Mixer().eval()
    found = diagnosed(model, run=lambda tokens: F.dropout(model(tokens), 0.1), confirm=0, held_out=())
    assert found.limit < 1e-9 < found.measured.kl


@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_tokens_of_the_vocabulary_may_be_masked(value: float, targets: bool) -> None:
    model, some = Mixer().eval(), torch.arange(VOCABULARY) >= VOCABULARY - 5

    def run(tokens: Tensor, mask: bool) -> Any:
        logits = model(tokens).masked_fill(some, value) if mask else model(tokens)[..., ~some]
        return (logits, tokens.clamp(max=VOCABULARY - 6)) if targets else logits

    runs = (partial(run, mask=mask) for mask in (True, False))
    found, cut = (diagnosed(model, run=one, confirm=2, held_out=batches_of(1)) for one in runs)
    assert_alike(found, cut)
    assert found.remaining["plan"].kl == pytest.approx(cut.remaining["plan"].kl, rel=1e-3)


def test_predictions_that_are_nowhere_finite_are_refused() -> None:
    model = Mixer().eval()
    with pytest.raises(ValueError, match=r"^run of batch 1=-inf: has logits that are not finite"):
        diagnosed(model, run=lambda tokens: model(tokens) - torch.inf)
    with pytest.raises(ValueError, match=r"^run of batch 1=.*: is not finite; has a target a logit of -inf"):
        diagnosed(model, run=lambda tokens: (model(tokens).masked_fill(tokens[..., None] >= 0, -torch.inf), tokens))


class Rewards(Mixer):
    """A model of which the loss takes no softmax over the last dimension of the logits."""

    def __init__(self, outputs: int, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(WIDTH, outputs), kind

    def judged(self, tokens_ST: Tensor) -> SimpleNamespace:
        logits = self(tokens_ST)
        if self.kind == "segments":  # (S, classes, rows, columns)
            logits = logits.movedim(-1, 1).unflatten(-1, (2, -1))
            return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits, tokens_ST.unflatten(-1, (2, -1)) % 3))
        logits = logits[:, -1]
        right = tokens_ST[:, : logits.shape[-1]]
        if self.kind == "labels":
            loss = F.binary_cross_entropy_with_logits(logits, (right % 2).float())
        else:
            loss = (logits - right / 8).square().mean()
        return SimpleNamespace(logits=logits, loss=loss)


@pytest.mark.parametrize(("outputs", "kind"), [(1, "numbers"), (3, "numbers"), (3, "labels"), (3, "segments")])
def test_numbers_without_a_distribution_are_measured_by_the_loss(outputs: int, kind: str) -> None:
    model = Rewards(outputs, kind).eval()
    few: Any = {"confirm": 2, "held_out": batches_of(1)}
    found = diagnosed(model, run=model.judged, **few)
    right = diagnosed(model, run=lambda tokens: model.judged(tokens).loss, **few)
    assert found.measured.kl is None and found.measured.cost == pytest.approx(right.measured.cost)
    assert found.verdict() == right.verdict() and "constant" not in found.verdict()
    for wrong in (lambda tokens: model.judged(tokens).logits, lambda tokens: SimpleNamespace(logits=model(tokens))):
        if outputs == 1:
            with pytest.raises(ValueError, match=r"^run of batch 1=logits .*one number per position.*give a loss"):
                diagnosed(model, run=wrong)


@pytest.mark.parametrize(("which", "where"), [(1, "run of batch 2"), (4, "run of held-out batch 1")])
def test_batches_with_outputs_of_different_kinds_are_refused(which: int, where: str) -> None:
    model, batches = Mixer().eval(), batches_of(5)

    def run(tokens: Tensor) -> Tensor | SimpleNamespace:
        logits = model(tokens)
        return logits.square().mean() if torch.equal(tokens, batches[which]) else SimpleNamespace(logits=logits)

    with pytest.raises(ValueError, match=f"^{where}=.*: returns no logits, unlike"):
        diagnosed(model, run=run, batches=batches[:4], held_out=batches[4:], confirm=0, rescue="bf16")


def test_a_kl_below_the_detection_limit_is_said() -> None:
    found = diagnosed(Mixer().eval(), confirm=0, held_out=())
    below = replace(found, limit=2 * found.measured.kl)
    assert "no more than the detection limit" not in found.verdict()
    assert (
        f"nats of KL per token, no more than the detection limit of {format_nats(below.limit)} (the KL if each "
        "output moves by one unit in the last place of float32), so nothing can be told of it"
    ) in below.verdict()
