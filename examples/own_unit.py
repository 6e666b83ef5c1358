"""A custom operator under the controller: its own INT8 products, and 16 bits while it is at risk.

    python examples/own_unit.py [--steps 60]

`gnmr.attach` gives plain linears two paths. Any other operator that can compute in two ways becomes a unit by a name,
its parameters and a switch. Examples are another library's FP8 linear, a fused kernel, or experts in one tensor. The
rest is the same.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr


class Int8Product(torch.autograd.Function):
    """x W^T with both rounded to 8 bits, one scale each; the backward pass is that of the exact product."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _rounded(x) @ _rounded(weight).T

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


def _rounded(x: Tensor) -> Tensor:
    scale = x.abs().amax().clamp(min=1e-12) / 127
    return (x / scale).round() * scale


class MyLinear(nn.Module):
    """An operator that can compute in two ways."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.careful = False

    def be_careful(self, recovering: bool) -> None:
        """Use the recovery path (True) or the low-cost path from the next forward pass on; this is the switch."""
        self.careful = recovering

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T if self.careful else Int8Product.apply(x, self.weight)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    steps = parser.parse_args(argv).steps

    torch.manual_seed(0)
    model = nn.Sequential(MyLinear(32, 64), nn.GELU(), MyLinear(64, 64), nn.GELU(), MyLinear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    units = [gnmr.Unit(name, m, m.be_careful) for name, m in model.named_modules() if isinstance(m, MyLinear)]
    controller = gnmr.Controller(units, gnmr.ControlSpec(max_o=1, alpha=1.5, beta=1.3))

    for step in range(1, steps + 1):
        x = torch.randn(128, 32)
        if step % 20 == 0:
            x[:, 0] *= 50  # an occasional outlier feature makes 8 bits coarse for all others
        loss = F.mse_loss(model(x).squeeze(1), x[:, 1:].sin().sum(1))
        loss.backward()
        decision = controller.step()
        optimizer.step()
        optimizer.zero_grad()
        moves = ", ".join(f"{event.unit} {event.event} ({event.cause})" for event in decision.events)
        print(f"step {step:3d}  loss {loss.item():7.3f}  {moves}")


if __name__ == "__main__":
    main()
