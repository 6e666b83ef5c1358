"""GreedyLore: the algorithm against a slow scalar reading, virtual workers against real ranks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_compressed import compress
from omegaconf import OmegaConf
from torch import Tensor, nn

from gnmr.distributed.compressed import GreedyLore, GreedyLoreSpec, Traffic
from gnmr.distributed.workers import RankWorkers, VirtualWorkers
from gnmr.lab import config, models

Pair = Callable[..., list[Any]]
ROOT = Path(__file__).parents[2]
START, TAU = 2, 5
WIDE, TALL, BIAS = "up_proj.weight", "down_proj.weight", "up_proj.bias"


def net(dtype: torch.dtype = torch.float64) -> nn.ModuleDict:
    torch.manual_seed(0)
    modules = {
        "embed_tokens": nn.Embedding(11, 4),
        "up_proj": nn.Linear(7, 4),
        "down_proj": nn.Linear(4, 7, bias=False),
        "norm": nn.LayerNorm(4),
        "lm_head": nn.Linear(4, 11, bias=False),
    }
    return nn.ModuleDict(modules).to(dtype)


def gradients(model: nn.Module, step: int, workers: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(workers, *one.shape, generator=generator, dtype=torch.float64).to(one.dtype)
        for name, one in model.named_parameters()
    }


def made(model: nn.Module, number: int = 2, **options: Any) -> GreedyLore:
    spec = GreedyLoreSpec(**{"rank": 2, "refresh_every": TAU, "dense_steps": START, **options})
    return GreedyLore(model, spec, workers=VirtualWorkers(number))


def recover(compressed: GreedyLore, *names: str) -> None:
    for unit in compressed.units():
        assert unit.switch is not None
        unit.switch(unit.name in names)


class Scalar:
    """The table of the module's docstring for one matrix, number by number; its own singular vectors."""

    def __init__(self, rank: int, feedback: bool) -> None:
        self.rank, self.feedback = rank, feedback
        self.basis: Any = None
        self.held: Any = None

    def step(self, t: int, given: list[np.ndarray], xi: np.ndarray, recovered: bool) -> np.ndarray:
        """The mean of gradients (m, n) as the workers get it, m <= n."""
        workers, (m, n) = range(len(given)), given[0].shape
        if t < START:
            return sum(given) / len(given)
        if (t - START) % TAU == 0:
            mean = sum(given) / len(given)
            self.basis, self.held = np.linalg.svd(mean)[0], [np.zeros((m, n)) for _ in workers]
            return mean
        sums = [given[w] + self.held[w] for w in workers]
        if recovered:
            self.held = [np.zeros((m, n)) for _ in workers]
            return sum(sums) / len(sums)
        scores = []
        for j in range(m):
            score = 0.0
            for h in sums:
                for a in range(m):
                    for b in range(n):
                        score += self.basis[a, j] * h[a, b] * xi[b] / len(sums)
            scores.append(score**2)
        columns = sorted(range(m), key=lambda j: -scores[j])[: self.rank]
        mean = np.zeros((m, n))
        for w in workers:
            for a in range(m):
                for b in range(n):
                    sent = sum(self.basis[a, j] * self.basis[c, j] * sums[w][c, b] for j in columns for c in range(m))
                    mean[a, b] += sent / len(sums)
                    if self.feedback:
                        self.held[w][a, b] = sums[w][a, b] - sent
        return mean


@pytest.mark.parametrize("feedback", [True, False])
def test_it_is_what_a_slow_scalar_reading_gives(feedback: bool) -> None:
    model = net()
    compressed = made(model, feedback=feedback)
    slow = {WIDE: Scalar(2, feedback), TALL: Scalar(2, feedback)}
    changed = 0
    for t in range(2 * TAU + START + 2):
        recovered = {WIDE: t % 4 == 3, TALL: t % 3 == 2}
        recover(compressed, *(name.removesuffix(".weight") for name in recovered if recovered[name]))
        given = gradients(model, t)
        xi = {name: compressed._normal(name, None, given[name]).numpy() for name in slow}
        found = compressed.reduce(given)
        for name, one in slow.items():
            turn = np.transpose if name == TALL else np.asarray
            expected = turn(one.step(t, [turn(g.numpy()) for g in given[name]], xi[name], recovered[name]))
            np.testing.assert_allclose(found[name].numpy(), expected, atol=1e-12)
            changed += not np.allclose(expected, given[name].mean(0).numpy())
        for name in given.keys() - slow:
            assert torch.equal(found[name], given[name].mean(0)), "always dense"
    assert changed >= 2 * TAU, "a run in which little was compressed shows little"


@pytest.mark.parametrize("basis", ["greedy", "random"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sent_and_held_back_are_the_true_sum(basis: str, dtype: torch.dtype) -> None:
    """From one refresh to the next: the means so far and the mean held back are the mean gradients so far."""
    model = net(dtype)
    compressed = made(model, basis=basis, refresh_every=9, dense_steps=0)
    compressed.reduce(gradients(model, 0))
    sent = {name: torch.zeros(model.get_parameter(name).shape, dtype=torch.float64) for name in (WIDE, TALL)}
    true = {name: one.clone() for name, one in sent.items()}
    for t in range(1, 9):
        recover(compressed, *(["up_proj"] if t == 4 else []))
        given = gradients(model, t)
        found = compressed.reduce(given)
        for name in sent:
            sent[name] += found[name].double()
            true[name] += given[name].double().mean(0)
    for name in sent:
        held = compressed.state_dict()["held"][name].double().mean(0)
        held = held if name == WIDE else held.mT
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(sent[name] + held, true[name], rtol=0, atol=tolerance)
        assert held.abs().max() > 0.3
    assert (compressed.held_back() > 0.1).all()


def test_recovery_sends_what_was_held_back() -> None:
    model = net()
    compressed = made(model, dense_steps=0)
    for t in range(3):
        compressed.reduce(gradients(model, t))
    held = compressed.state_dict()["held"][WIDE].mean(0)
    recover(compressed, "up_proj")
    given = gradients(model, 3)
    torch.testing.assert_close(compressed.reduce(given)[WIDE], given[WIDE].mean(0) + held, rtol=0, atol=1e-14)
    up, down = compressed.held_back().tolist()
    assert up == 0 and down > 0


def test_random_bases_change_with_the_step_and_the_seed() -> None:
    model = net()
    given = gradients(model, 0)

    def ranges(seed: int) -> list[Tensor]:
        compressed = made(model, basis="random", dense_steps=0, feedback=False, seed=seed)
        return [compressed.reduce(given)[WIDE] for _ in range(3)]

    dense, one, two = ranges(0)
    torch.testing.assert_close(dense, given[WIDE].mean(0))
    assert torch.linalg.matrix_rank(one) == torch.linalg.matrix_rank(two) == 2
    assert not torch.allclose(one, two) and not torch.allclose(one, ranges(1)[1])
    assert torch.equal(one, ranges(0)[1])


def test_what_is_sent_is_counted() -> None:
    model = net()
    compressed = made(model)
    traffic = Traffic.of(model, compressed.spec)
    dense = sum(one.numel() for one in model.parameters())
    assert (traffic.dense, traffic.matrices) == (dense, 2 * 28)
    sent = []
    for t in range(START + TAU + 3):
        recover(compressed, *(["up_proj"] if t == START + TAU + 2 else []))
        compressed.reduce(gradients(model, t))
        sent.append(compressed.sent)
    low = dense - 2 * 28 + 2 * (2 * 7 + 4 + 1)  # rows, scores, a flag
    assert sent == [dense] * (START + 1) + [low] * (TAU - 1) + [dense, low, low + compressed.units()[0].cost]
    assert compressed.sent_total == sum(sent)
    assert {unit.cost for unit in compressed.units()} == {2 * 7}
    assert traffic.mean(compressed.spec) == sum(sent[START : START + TAU]) / TAU
    everything = traffic.mean(compressed.spec, 1.0)
    assert everything == dense + traffic.overhead * (TAU - 1) / TAU


@pytest.mark.parametrize("scale", ["130m", "350m", "1.3b"])
def test_the_table_of_numbers_sent_is_computed(scale: str) -> None:
    """The row of docs/compressed.md, of the shipped scale on the meta device."""
    sizes = config.load({"model": OmegaConf.load(ROOT / "conf" / "scale" / f"{scale}.yaml").model}).model
    with torch.device("meta"):
        model = models.build(sizes, 32000, 256)
    spec = GreedyLoreSpec()
    assert (spec.rank, spec.refresh_every, spec.dense_steps) == (32, 200, 1000), "the paper's"
    traffic = Traffic.of(model, spec)
    numbers = [traffic.dense, *(traffic.mean(spec, share) for share in (0, 1 / 7, 1 / 4))]
    row = " | ".join([scale, *(f"{number / 1e6:.1f}" for number in numbers)])
    assert f"| {row} |" in (ROOT / "docs" / "compressed.md").read_text()
    if scale == "130m":
        assert [round(number / traffic.dense, 2) for number in numbers] == [1, 0.40, 0.48, 0.55]
        assert len(GreedyLore(model, spec, workers=VirtualWorkers(2)).units()) == 84


def test_a_step_that_is_not_finite_leaves_the_state_as_it_was() -> None:
    model = net()
    compressed = made(model, dense_steps=0)
    for t in range(2 * TAU):
        before = compressed.state_dict()
        given = gradients(model, t)
        given["norm.bias"][1, 0] = torch.nan
        given[WIDE][0, 0, 0] = torch.inf
        if t in (3, TAU):  # on the low path, and in a refresh
            assert not compressed.reduce(given)["norm.bias"].isfinite().all()
            after = compressed.state_dict()
            for kind in ("held", "bases"):
                assert all(torch.equal(after[kind][name], before[kind][name]) for name in (WIDE, TALL))
        else:
            compressed.reduce(gradients(model, t))


# ---- under the controller ----


def changes(sets: list[list[bool]]) -> int:
    return sum(a != b for a, b in pairwise(sets))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(torch.equal(one, theirs["model"][name]) for name, one in ours["model"].items())


def test_a_loop_goes_on_from_its_state() -> None:
    whole, first = compress(steps=30), compress(steps=17)
    rest = compress(steps=13, start=17, saved=first)
    assert first["sets"] + rest["sets"] == whole["sets"] and changes(whole["sets"]) > 10
    assert first["sent"] + rest["sent"] == whole["sent"]
    assert same(rest, whole) and torch.equal(rest["held_back"], whole["held_back"])


@pytest.mark.slow
@pytest.mark.xdist_group("pair")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
class TestRanks:
    @pytest.mark.parametrize("basis", ["greedy", "random"])
    def test_virtual_workers_are_two_real_ranks(self, pair: Pair, basis: str) -> None:
        one, ranks = compress(steps=50, basis=basis), pair("compress", how="ranks", steps=50, basis=basis)
        assert changes(one["sets"]) >= 20
        for i, rank in enumerate(ranks):
            assert rank["sets"] == one["sets"] and rank["sent"] == one["sent"]
            for name, weight in one["model"].items():
                torch.testing.assert_close(rank["model"][name], weight, rtol=0, atol=1e-12)
            for name, held in one["compressed"]["held"].items():
                torch.testing.assert_close(rank["compressed"]["held"][name][0], held[i], rtol=0, atol=1e-12)
        assert same(ranks[0], ranks[1]) and torch.equal(ranks[0]["held_back"], ranks[1]["held_back"])

    def test_the_hook_of_ddp_does_the_same_to_the_last_bit(self, pair: Pair) -> None:
        ours, hooks = (pair("compress", how=how, steps=20, parts=2) for how in ("ranks", "hook"))
        for rank, hook in zip(ours, hooks, strict=True):
            assert hook["sets"] == rank["sets"] and hook["sent"] == rank["sent"] and changes(rank["sets"]) > 5
            assert same(hook, rank) and torch.equal(hook["held_back"], rank["held_back"])

    def test_each_rank_goes_on_from_its_state_or_from_that_of_all(self, pair: Pair) -> None:
        together, apart = compress(steps=10), pair("compress", how="ranks", steps=10)
        rest = compress(steps=15, start=10, saved=together)
        for saved in (apart, together):
            for rank in pair("compress", how="ranks", steps=15, start=10, saved=saved):
                assert rank["sets"] == rest["sets"] and changes(rest["sets"]) > 5
                torch.testing.assert_close(rank["held_back"], rest["held_back"], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("hook", [False, True])
    def test_sets_that_differ_end_in_one_line_on_each(self, pair: Pair, hook: bool) -> None:
        for told in pair("differing_sets", hook=hook):
            assert told.startswith("RunFailed: ranks disagree before step 2: 0.up_proj is on the recovery path of some")

    def test_sharded_weights_are_refused(self, pair: Pair) -> None:
        for told in pair("sharded"):
            assert (
                told
                == "ValueError: 0.up_proj is sharded (FSDP2): gradients are compressed whole, wrap the model by DDP"
            )


def test_another_number_of_workers_is_warned_of() -> None:
    model = net()
    two, three = made(model, 2, dense_steps=0), made(model, 3, dense_steps=0)
    for t in range(2):
        two.reduce(gradients(model, t))
    with pytest.warns(UserWarning, match="is of 2 workers, here are 3: its bases are kept, what the workers held back"):
        three.load_state_dict(two.state_dict())
    assert torch.equal(three.state_dict()["bases"][WIDE], two.state_dict()["bases"][WIDE])
    assert three.t == 2 and not three.held_back().any()
    three.reduce(gradients(model, 2, 3))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda state: state.pop("held"), "state: has no held"),
        (lambda state: state["matrices"].pop(WIDE), "belongs to other matrices"),
        (lambda state: state.update(t=-1), "t=-1: must be a whole number"),
        (lambda state: state["bases"].update({WIDE: torch.ones(7, 7)}), r"holds of up_proj.weight, \(7, 7\), does not"),
    ],
)
def test_a_state_that_is_none_is_refused(change: Callable[[dict[str, Any]], None], line: str) -> None:
    compressed = made(net())
    state = compressed.state_dict()
    change(state)
    with pytest.raises(ValueError, match=line):
        compressed.load_state_dict(state)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "targets", "line"),
    [
        ({"rank": 5}, ["*_proj"], "rank=5: up_proj is 4 wide, above 3 it would send as much as a dense one"),
        ({}, ["embed_tokens"], "targets: embed_tokens is an embedding or the head, which are always sent dense"),
        ({}, ["lm_head"], "targets: lm_head is an embedding or the head"),
        ({}, ["norm"], r"targets: norm must have a weight of 2 dimensions, and has 1 dimension\(s\): leave it out"),
        ({}, ["q_proj"], "targets: no module matches 'q_proj'"),
        ({"rank": 0}, ["*_proj"], "rank=0: must be a whole number of at least 1"),
        ({"basis": "best"}, ["*_proj"], "basis=best: must be one of greedy, random"),
    ],
)
def test_bad_input_is_one_line(options: dict[str, Any], targets: list[str], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        GreedyLore(net(), GreedyLoreSpec(**{"rank": 2, **options}), workers=VirtualWorkers(2), targets=targets)


def test_a_tied_head_and_frozen_weights_are_refused() -> None:
    model = net()
    model["up_proj"].weight.requires_grad_(False)
    assert [unit.name for unit in made(model).units()] == ["down_proj"]
    model["down_proj"].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="none of the weights is trained"):
        made(model)
    model["output"] = nn.Linear(4, 11, bias=False)
    model["output"].weight = model["embed_tokens"].weight
    with pytest.raises(ValueError, match="output is an embedding or the head"):
        GreedyLore(model, GreedyLoreSpec(rank=2), workers=VirtualWorkers(2), targets=["output"])


def test_one_process_alone_has_nothing_to_compress() -> None:
    with pytest.raises(ValueError, match="need data parallelism, here is one process"):
        RankWorkers()
    with pytest.raises(ValueError, match="virtual workers have no DistributedDataParallel"):
        made(net()).register(None)
    with pytest.raises(ValueError, match="workers=1: must be a whole number of at least 2"):
        VirtualWorkers(1)
