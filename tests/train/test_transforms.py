"""What holds for every transform: options, steps that are not finite, resuming, tied and missing gradients, bf16."""

from __future__ import annotations

import math

import pytest
import torch
from everything import Waits, same_bits
from torch import Tensor, nn

from gnmr.lab.rivals.transforms import TRANSFORMS, StepContext, build_transform
from gnmr.lab.train.optim import skip_where

# So short that eight steps meet every branch: warm-up, clipping, reset, a full window.
BUSY: dict[str, dict[str, object]] = {
    "agc": {},
    "stable_spam": {"theta": 0.5, "reset_every": 4},
    "gradient_stabilizer": {},
    "skip_step": {"window": 4, "min_values": 3, "sigmas": 0.5},
}
READ_GRADIENTS = [name for name in TRANSFORMS if name != "skip_step"]


class Run:
    """A few parameters under AdamW and a transform, fed with gradients that depend on the step's number alone."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"up.weight": (3, 4), "norm.weight": (4,), "unused.weight": (2, 2), "lm_head.weight": (5, 4)}
        self.named = [
            (key, nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)))
            for key, shape in shapes.items()
        ]
        self.parameters = [p for _, p in self.named]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        self.transform = build_transform(name, BUSY[name], iter(self.named))

    def step(self, step: int, spoiled: float | None = None, loss: float | None = None) -> list[Tensor]:
        """One training step; returns the transformed gradients and what the transform says of skipping."""
        generator = torch.Generator().manual_seed(step)
        for (name, p), scale in zip(self.named, (1.0, 0.1, 0.0, 3.0), strict=True):
            g = torch.randn(p.shape, generator=generator) * scale * (30.0 if step in (3, 7) else 1.0)
            p.grad = None if name.startswith("unused") else g.to(p.device, p.dtype)
        if spoiled is not None:
            self.parameters[0].grad[1, 2] = spoiled
        norm = torch.cat([p.grad.double().flatten() for p in self.parameters if p.grad is not None]).norm()
        value = torch.tensor(2.0 + math.sin(step) if loss is None else loss, device=norm.device)
        nonfinite = ~(value.isfinite() & norm.isfinite())
        skip = self.transform(StepContext(step, value, norm, nonfinite, self.optimizer))
        gradients = [p.grad.clone() for p in self.parameters if p.grad is not None]
        skip_where(self.optimizer, nonfinite if skip is None else nonfinite | skip)
        self.optimizer.step()
        return gradients if skip is None else [*gradients, skip]

    def weights(self) -> list[Tensor]:
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return [t.detach().clone() for t in [*self.parameters, *kept]]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_eight_steps_meet_the_transform(name):
    """Without this the tests below could pass on steps that nothing changes."""
    run = Run(name)
    changed = skipped = False
    for step in range(1, 9):
        generator = torch.Generator().manual_seed(step)
        raw = torch.randn(3, 4, generator=generator) * (30.0 if step in (3, 7) else 1.0)
        out = run.step(step)
        changed |= not same_bits(out[0], raw)
        skipped |= out[-1].dtype == torch.bool and bool(out[-1])
    assert skipped if name == "skip_step" else changed
    assert all(t.isfinite().all() for t in run.weights())
    assert bool(run.transform.state_dict()) == (name != "agc")


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "bad",
    [{"spoiled": math.nan}, {"spoiled": -math.inf}, {"loss": math.nan}, {"loss": math.inf}],
    ids=["nan_gradient", "inf_gradient", "nan_loss", "inf_loss"],
)
@pytest.mark.parametrize("at", [1, 2, 6], ids=["first", "warming", "later"])
def test_a_step_that_is_not_finite_leaves_no_trace(name, bad, at):
    """State, weights, moments and all later steps are those of a run which never met it."""
    spoiled, spared = Run(name), Run(name)
    for step in range(1, 9):
        if step == at:
            before = spoiled.transform.state_dict()
            spoiled.step(step, **bad)
            after = spoiled.transform.state_dict()
            assert equal(list(before.values()), list(after.values()))
        else:
            assert equal(spoiled.step(step), spared.step(step))
    assert equal(spoiled.weights(), spared.weights())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_tied_parameter_counts_once(name):
    a, b = Run(name), Run(name)
    named = [*b.named, ("tied.weight", b.parameters[0])]
    b.transform = build_transform(name, BUSY[name], named)
    b.parameters = [*b.parameters, b.parameters[0]]
    norm = torch.tensor(40.0, dtype=torch.float64)
    for step in range(1, 5):
        for run in (a, b):
            generator = torch.Generator().manual_seed(step)
            for p in run.parameters[:4]:
                p.grad = torch.randn(p.shape, generator=generator)
            context = StepContext(step, torch.tensor(2.0), norm, torch.tensor(False), run.optimizer)
            run.transform(context)
            run.optimizer.step()
        assert equal([p.grad for p in a.parameters], [p.grad for p in b.parameters[:4]])


@pytest.mark.parametrize("name", READ_GRADIENTS)
def test_bf16_is_float32_rounded_once(name):
    """The first step's gradients in bf16 are float32's, rounded; the statistics are float32's to the last bit."""
    low, high = Run(name, torch.bfloat16), Run(name)
    with torch.no_grad():
        for p, q in zip(low.parameters, high.parameters, strict=True):
            q.copy_(p)
    norm = torch.tensor(40.0, dtype=torch.float64)
    for run in (low, high):
        generator = torch.Generator().manual_seed(5)
        for p in run.parameters:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
            # The same moments on both sides, exact in bf16.
            run.optimizer.state[p] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.full_like(p, 0.25),
            }
        run.transform(StepContext(1, torch.tensor(2.0), norm, torch.tensor(False), run.optimizer))
    assert equal([p.grad for p in low.parameters], [p.grad.bfloat16() for p in high.parameters])
    assert equal(list(low.transform.state_dict().values()), list(high.transform.state_dict().values()))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_transform_waits_for_the_device(name):
    run = Run(name)
    for step in range(1, 9):
        run.step(step)
        for p in run.parameters[:2]:
            p.grad = torch.ones_like(p)
        norm = torch.tensor(4.0, dtype=torch.float64)
        context = StepContext(step, torch.tensor(2.0), norm, torch.tensor(False), run.optimizer)
        with Waits() as waits:
            run.transform(context)
        assert waits.seen == []


REFUSED = [
    ("agc", {"floor": -1}, "floor=-1"),
    ("stable_spam", {"theta": 1}, "theta=1"),
    ("gradient_stabilizer", {"eps": 0}, "eps=0"),
    ("skip_step", {"min_values": 130}, "min_values=130"),
    ("skip_step", {"alpha": 0.9}, "alpha: skip_step has no such option"),
    ("clip", {}, "optim.transform.name=clip"),
    (None, {"clip": 1}, "without effect"),
]


@pytest.mark.parametrize(("name", "options", "line"), REFUSED)
def test_what_is_refused(name, options, line):
    with pytest.raises(ValueError, match=line) as caught:
        build_transform(name, options, Run("agc").named)
    assert "\n" not in str(caught.value)
