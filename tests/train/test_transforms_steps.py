"""Every transform against steps worked out by hand: the numbers in the comments are the calculation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gnmr.lab.rivals.transforms import StepContext, Transform, build_transform


class Bench:
    """Parameters, torch's AdamW over them, and a transform that is called as the training step calls it."""

    def __init__(self, name: str, shapes: dict[str, tuple[int, ...]], betas=(0.9, 0.999), **options: object) -> None:
        self.named = [(key, nn.Parameter(torch.zeros(shape))) for key, shape in shapes.items()]
        self.parameters = [p for _, p in self.named]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, betas=betas, weight_decay=0.0, fused=True)
        transform = build_transform(name, options, self.named)
        assert transform is not None
        self.transform: Transform = transform
        self.taken = 0

    def step(self, *gradients: list, loss: float = 2.0, norm: float | None = None) -> Tensor | None:
        """One call, then one step of AdamW; the gradients stay. `norm` stands in for their global norm."""
        self.taken += 1
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = torch.tensor(gradient).reshape(p.shape)
        total = torch.cat([p.grad.flatten() for p in self.parameters]).double().norm()
        if norm is not None:
            total = torch.tensor(norm, dtype=torch.float64)
        context = StepContext(self.taken, torch.tensor(loss), total, torch.tensor(False), self.optimizer)
        skip = self.transform(context)
        self.optimizer.step()
        return skip

    def gradients(self) -> list:
        return [p.grad.tolist() for p in self.parameters]

    def state(self, name: str) -> object:
        return self.transform.state[name].tolist()


def near(*numbers: object) -> list:
    return [pytest.approx(n, rel=1e-5, abs=1e-9) for n in numbers]


def test_agc():
    bench = Bench("agc", {"matrix": (2, 2), "bias": (2,), "lm_head.weight": (1, 2)})
    with torch.no_grad():
        bench.parameters[0].copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        bench.parameters[1].copy_(torch.tensor([0.6, 0.8]))
    bench.optimizer.param_groups[0]["lr"] = 0.0
    # Row 1: bound 0.01 * 5, norm 0.5. Row 2: bound 0.01 * 1e-3 = 1e-5, norm 5e-6. Bias: bound 0.01, norm 0.5.
    bench.step([0.3, 0.4, 3e-6, 4e-6], [0.3, 0.4], [30.0, 40.0])
    assert bench.gradients()[0] == near([0.03, 0.04], [3e-6, 4e-6])
    assert bench.gradients()[1:] == [near(0.006, 0.008), [[30.0, 40.0]]]
    # A spike in row 2 leaves row 1 alone: 1e-5 / 5 of it stays.
    bench.step([0.0, 0.0, 3.0, -4.0], [0.0, 0.001], [0.0, 0.0])
    assert bench.gradients()[0] == near([0.0, 0.0], [6e-6, -8e-6])
    assert bench.gradients()[1] == near(0.0, 0.001)


def test_stable_spam():
    bench = Bench("stable_spam", {"a": (2,)}, gamma1=0.5, gamma2=0.5, theta=0.5, reset_every=3)
    bench.step([3.0, 4.0])  # T = 2, T^ = 4: nothing above; norm 5, m^ = 5, v^ = 25
    assert bench.gradients() == near([0.6, 0.8])
    # T = 9, T^ = 9 / 0.75 = 12 < 16: clipped to 12. m = 7.25, m^ = 9.666667; v = 78.25, v^ = 104.333333
    bench.step([0.0, -16.0])
    assert bench.gradients() == near([0.0, -0.9463802])
    # T = 6.5, T^ = 7.43: nothing above. m = 6.125, m^ = 7; v = 51.625, v^ = 59; 7 / sqrt(59) = 0.9113224
    bench.step([3.0, 4.0])
    assert bench.gradients() == near([0.5467934, 0.7290579])
    state = bench.optimizer.state[bench.parameters[0]]  # reset in step 3: only this step's gradient is in it
    assert state["step"].item() == 1
    assert state["exp_avg"].tolist() == near(0.05467934, 0.07290579)
    # The counter of T^ ran on: T = 0.5 * 6.5 + 0.5 * 80 = 43.25, T^ = 43.25 / 0.9375 = 46.13333.
    # norm sqrt(46.13333^2 + 1) = 46.14417; m = 26.134586, m^ = 27.876891; v = 1090.45472, v^ = 34.10501^2;
    # 27.876891 / 34.10501 = 0.8173841, shared out as 1 / 46.14417 and 46.13333 / 46.14417
    bench.step([1.0, 80.0])
    assert bench.gradients() == near([0.01771370, 0.8171921])


def test_gradient_stabilizer():
    bench = Bench("gradient_stabilizer", {"a": (2,), "b": (1,)}, gamma1=0.5, gamma2=0.75)
    bench.step([3.0, 4.0], [0.0])  # m^ = 5, v^ = 25: norm 1; b is not seen
    assert bench.gradients() == near([0.6, 0.8], [0.0])
    # a: m = 251.25, m^ = 335; v = 62504.6875, v^ = 142867.857; 335 / 377.97865 = 0.8862935. b: first gradient.
    bench.step([300.0, 400.0], [-7.0])
    assert bench.gradients() == near([0.5317761, 0.7090348], [-1.0])
    assert bench.state("count") == [2.0, 1.0]
    bench.step([0.0, 0.0], [-7.0])
    assert bench.gradients() == near([0.0, 0.0], [-1.0])
    assert bench.state("count") == [2.0, 2.0]
    assert bench.state("mean") == near(251.25, 5.25)


def test_gradient_stabilizer_keeps_its_bound_on_a_spike():
    """(1 - 0.6) / sqrt(1 - 0.999) = 12.65 without the bias correction, times sqrt(1 - 0.999^101) with it."""
    bench = Bench("gradient_stabilizer", {"a": (1,)})
    for _ in range(100):
        bench.step([1.0])
    assert bench.gradients() == near([1.0])
    bench.step([1e12])
    assert bench.gradients() == near([0.4 / math.sqrt(0.001) * math.sqrt(1 - 0.999**101)])


def skip_step(**options: object) -> Bench:
    return Bench("skip_step", {"a": (1,)}, window=4, min_values=3, sigmas=2.0, **options)


def test_skip_step():
    bench = skip_step()
    seen = lambda loss, norm: bool(bench.step([1.0], loss=loss, norm=norm))
    assert not seen(1.0, 10.0) and not seen(3.0, 1200.0)  # fewer than three values
    bench = skip_step()
    assert not seen(1.0, 10.0) and not seen(3.0, 12.0)
    # loss: mean 2, std sqrt 2, limit 4.828; norm: mean 11, limit 13.828
    assert not seen(4.8, 13.8)
    assert bench.state("values") == [near(1.0, 3.0, 4.8, 0.0), near(10.0, 12.0, 13.8, 0.0)]
    bench = skip_step()
    assert not seen(1.0, 10.0) and not seen(3.0, 12.0) and seen(4.9, 11.0)
    bench = skip_step()
    assert not seen(1.0, 10.0) and not seen(3.0, 12.0) and not seen(2.0, 11.0)
    assert seen(2.0, 14.0)  # norm: mean 11, std 1, limit 13
    # It entered: mean 11.75, std sqrt(8.75 / 3) = 1.7078, limit 15.166
    assert not seen(2.0, 15.1)
    assert bench.state("values") == [near(2.0, 3.0, 2.0, 2.0), near(15.1, 12.0, 11.0, 14.0)]  # the oldest went
    assert not seen(-1e9, 0.0)  # small values are no spikes


def test_skip_step_gives_in_to_a_row_of_outliers():
    """The share of the window from which an outlier of a constant loss lies within six std of the mean is 1/37."""
    bench = Bench("skip_step", {"a": (1,)})
    assert not any(bench.step([1.0], loss=1.0) for _ in range(130))
    assert [bool(bench.step([1.0], loss=2.0)) for _ in range(5)] == [True] * 4 + [False]
