"""A user-defined risk signal: a unit is at risk if its gradient norm is far above the norm of the other units.

    python examples/own_signal.py [--steps 30]

A training loop passes the class to `gnmr.attach`, as below. `gnmr train` takes its name and its options:

    PYTHONPATH=examples gnmr train controller.signal=own_signal:MedianRatio \\
        controller.options.threshold=4
"""

import argparse
from functools import partial

import torch
from torch import Tensor, nn

import gnmr
from gnmr.control.signals import Context, Evidence, SignalBase
from gnmr.control.threshold import check_threshold


class MedianRatio(SignalBase):
    """Norm over the median norm of all units in the same step; no memory, so no state."""

    columns = ("median_ratio",)  # recorded with the risk; `needs` would name evidence besides the norms

    def __init__(self, context: Context, *, threshold: float = 3.0) -> None:
        super().__init__(context)
        self.threshold = check_threshold(threshold, "threshold")  # raises ValueError unless positive

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        norm = evidence["norm"]
        usable = evidence["observed"] & norm.isfinite()
        median = torch.where(usable, norm, torch.nan).nanmedian()  # selected, not indexed: does not wait for the device
        return self.verdict(evidence, step, norm / (median + 1e-12))  # risk = column / threshold, Inf where not finite


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    steps = parser.parse_args(argv).steps

    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 32), torch.rand(64, 32) - 0.5
    controller = gnmr.attach(model, max_o=2, targets=("*",), signal=partial(MedianRatio, threshold=2.0))

    for step in range(1, steps + 1):
        loss = (model(x) - y).square().mean()
        loss.backward()
        if step == 10:
            model[4].weight.grad *= 50  # something goes wrong in one layer
        decision = controller.step()
        optimizer.step()
        optimizer.zero_grad()
        ratios = " ".join(f"{ratio:6.2f}" for ratio in decision.columns["median_ratio"])
        print(
            f"step {step:3d}  loss {loss.item():.4f}  norm over median {ratios}  next in recovery {controller.active}"
        )

    controller.detach()


if __name__ == "__main__":
    main()
