"""GreedyLore: the algorithm against a slow scalar reading, the hook of DDP, and what is refused.

That ranks do as virtual workers, and that a state is restored, is shown by runs in test_compressed_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gnmr.lab.rivals.greedylore import GreedyLore, GreedyLoreSpec, RankWorkers, VirtualWorkers

Pair = Callable[..., list[Any]]
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

    def __init__(self, rank: int) -> None:
        self.rank = rank
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
                    self.held[w][a, b] = sums[w][a, b] - sent
        return mean


def test_it_is_what_a_slow_scalar_reading_gives() -> None:
    model = net()
    compressed = made(model)
    slow = {WIDE: Scalar(2), TALL: Scalar(2)}
    changed, dense = 0, compressed.dense
    low = dense - 2 * 28 + 2 * (2 * 7 + 4 + 1)  # rows, scores, a flag
    for t in range(2 * TAU + START + 2):
        recovered = {WIDE: t % 4 == 3, TALL: t % 3 == 2}
        recover(compressed, *(name.removesuffix(".weight") for name in recovered if recovered[name]))
        given = gradients(model, t)
        xi = {name: compressed._xi(name, given[name]).numpy() for name in slow}
        found = compressed.reduce(given)
        compresses = compressed.spec.phase(t) == "low"
        more = sum(unit.cost for unit in compressed.units() if recovered[f"{unit.name}.weight"])
        assert compressed.sent == (low + more if compresses else dense)
        for name, one in slow.items():
            turn = np.transpose if name == TALL else np.asarray
            expected = turn(one.step(t, [turn(g.numpy()) for g in given[name]], xi[name], recovered[name]))
            np.testing.assert_allclose(found[name].numpy(), expected, atol=1e-12)
            changed += not np.allclose(expected, given[name].mean(0).numpy())
        for name in given.keys() - slow:
            assert torch.equal(found[name], given[name].mean(0)), "always dense"
    assert changed >= 2 * TAU, "a run in which little was compressed shows little"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sent_and_held_back_are_the_true_sum(dtype: torch.dtype) -> None:
    """From one refresh to the next: the means so far and the mean held back are the mean gradients so far."""
    model = net(dtype)
    compressed = made(model, refresh_every=9, dense_steps=0)
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
        state = compressed.state_dict()
        held = torch.stack([state[f"worker_{i}"][name] for i in range(2)]).double().mean(0)
        held = held if name == WIDE else held.mT
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(sent[name] + held, true[name], rtol=0, atol=tolerance)
        assert held.abs().max() > 0.3


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
            for kind in ("worker_0", "worker_1", "bases"):
                assert all(torch.equal(after[kind][name], before[kind][name]) for name in (WIDE, TALL))
        else:
            compressed.reduce(gradients(model, t))


def test_a_restored_state_goes_on() -> None:
    model, whole, restored = net(), made(net()), made(net())
    for t in range(2 * TAU):
        given = gradients(model, t)
        means = whole.reduce(given)
        if t > START + 2:
            assert all(torch.equal(mean, means[name]) for name, mean in restored.reduce(given).items())
        elif t == START + 2:  # on the low path, with something held back
            restored.load_state_dict(whole.state_dict())
    assert (restored.t, restored.sent_total) == (whole.t, whole.sent_total)


# ---- under the controller ----


def changes(sets: list[list[bool]]) -> int:
    return sum(a != b for a, b in pairwise(sets))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(torch.equal(one, theirs["model"][name]) for name, one in ours["model"].items())


def held(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    pairs = [one["compressed"] for one in (ours, theirs)]
    workers = [key for key in pairs[0] if key.startswith("worker_")]
    return all(torch.equal(one, pairs[1][key][name]) for key in workers for name, one in pairs[0][key].items())


@pytest.mark.slow
@pytest.mark.xdist_group("pair")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
class TestRanks:
    def test_the_hook_of_ddp_does_the_same_to_the_last_bit(self, pair: Pair) -> None:
        ours, hooks = (pair("compress", how=how, steps=20, parts=2) for how in ("ranks", "hook"))
        for rank, hook in zip(ours, hooks, strict=True):
            assert hook["sets"] == rank["sets"] and hook["sent"] == rank["sent"] and changes(rank["sets"]) > 5
            assert same(hook, rank) and held(hook, rank)

    @pytest.mark.parametrize("hook", [False, True])
    def test_sets_that_differ_end_in_one_line_on_each(self, pair: Pair, hook: bool) -> None:
        for told in pair("differing_sets", hook=hook):
            assert told.startswith("RunFailed: ranks disagree before step 2: 0.up_proj is on the recovery path of some")

    def test_sharded_weights_are_refused(self, pair: Pair) -> None:
        assert all(told.startswith("ValueError: 0.up_proj is sharded (FSDP2)") for told in pair("sharded"))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "targets", "line"),
    [
        ({"rank": 5}, ["*_proj"], "rank=5"),
        ({}, ["lm_head"], "targets: lm_head"),
        ({}, ["norm"], "targets: norm"),
        ({}, ["q_proj"], "targets: no module matches 'q_proj'"),
        ({"rank": 0}, ["*_proj"], "rank=0"),
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


def test_what_is_no_worker_and_a_state_of_other_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="need data parallelism, here is one process"):
        RankWorkers()
    with pytest.raises(ValueError, match="virtual workers have no DistributedDataParallel"):
        made(net()).register(None)
    bases = {WIDE: torch.ones(7, 7), TALL: torch.ones(4, 4)}
    with pytest.raises(ValueError, match=r"holds of up_proj.weight, \(7, 7\), does not fit"):
        made(net()).load_state_dict(made(net()).state_dict() | {"bases": bases})
    with pytest.raises(ValueError, match="is of 2 workers, here are 3"):
        made(net(), 3).load_state_dict(made(net()).state_dict())
