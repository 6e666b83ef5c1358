"""Products of codes under scales of tiles and blocks, whose kernels no CPU has.

What stands in for them reads the scales where cuBLAS would, by its own index arithmetic, after PyTorch's own check of
shapes and strides for CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from close import assert_close
from test_scaled_mm import RECOVERED, through
from test_simulated import normal
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gnmr.conversion import PathSpec, convert, scaled_mm

Scaling = F.ScalingType
PLAIN = F.scaled_mm


def on_cuda(a: Tensor) -> Tensor:
    """A tensor of its kind on a GPU, without data."""
    return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda")


def read_scales(scale: Tensor, scaling: Any, lines: int, groups: int) -> Tensor:
    """(lines, groups): the scale of each group of each line, from where cuBLAS reads it in memory."""
    line, group = torch.arange(lines)[:, None], torch.arange(groups)[None, :]
    if scaling == Scaling.BlockWise1x128:
        assert scale.shape == (lines, groups) and scale.dtype == torch.float32 and lines % 4 == 0
        place = group * lines + line
    else:
        filled = groups + -groups % 4
        assert scale.shape == (filled, lines / 128) and scale.dtype == torch.float32
        place = line // 128 * filled + group
    assert scale.stride(0) == 1 and scale.t().is_contiguous()
    return scale.as_strided((scale.numel(),), (1,))[place]


def hardware(
    a: Tensor, b: Tensor, scale_a: Tensor, scaling_a: Any, scale_b: Tensor, scaling_b: Any, *swizzles: Any, **how: Any
) -> Tensor:
    """What `F.scaled_mm` does on a GPU, and what it refuses there."""
    blocks = Scaling.BlockWise128x128
    assert a.dtype == b.dtype == torch.float8_e4m3fn and (scaling_a, scaling_b) != (blocks, blocks)
    assert swizzles == (F.SwizzleType.NO_SWIZZLE,) * 2
    with FakeTensorMode():  # which knows some of PyTorch's own rules
        fake = [on_cuda(each) for each in (a, b, scale_a, scale_b)]
        shape = PLAIN(fake[0], fake[1], fake[2], scaling_a, fake[3], scaling_b, *swizzles, **how).shape
    groups = a.shape[1] // 128
    assert a.shape[1] == groups * 128 and a.is_contiguous() and b.t().is_contiguous() and b.shape[1] % 16 == 0
    whole = []
    for each, scale, scaling in ((a, scale_a, scaling_a), (b.t(), scale_b, scaling_b)):
        scales = read_scales(scale, scaling, len(each), groups)
        whole.append(each.double() * scales.double().repeat_interleave(128, 1))
    result = (whole[0] @ whole[1].t()).to(how["output_dtype"])
    assert result.shape == shape
    return result


@pytest.fixture
def on_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", hardware)
    monkeypatch.setattr(scaled_mm, "_device_missing", lambda *_: None)


OPERANDS = normal(130, 384, seed=2), normal(256, 384, seed=1), normal(130, 256, seed=3)


@pytest.mark.parametrize("recovers", [None, *RECOVERED], ids=str)
@pytest.mark.usefixtures("on_hardware")
def test_a_linear_is_the_simulation_for_all_gemms_low_or_recovered(recovers: list[str] | None) -> None:
    """Of 130 tokens, which no group divides; float32 operands, so that nothing but the order of sums differs."""
    how = {"recovers": recovers, "operands": OPERANDS, "bias": True, "probe": ("gap_low", "mse")}
    real, converted = through("scaled_mm", "deepseek_v3", **how)
    simulated, _ = through("simulated", "deepseek_v3", **how)
    assert converted.low.backend == "scaled_mm" and real[4] > 0
    # wgrad's groups lie along the tokens: 2 of them
    assert recovers or converted.cost.predicted_bytes() == 130 * 384 + 384 * 2 * 4
    for ours, theirs in zip(real, simulated, strict=True):
        assert_close(ours, theirs, terms=384)


@pytest.mark.usefixtures("on_hardware")
def test_what_casts_meet_is_counted_as_in_the_simulation() -> None:
    counts = []
    for backend in ("scaled_mm", "simulated"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(384, 256))
        converted = convert(net, PathSpec.of("deepseek_v3", None, targets=["0"], backend=backend))
        x = normal(130, 384, seed=2)
        x[7, 300] = float("inf")
        y = net(x.requires_grad_())
        assert not y[7].isfinite().any() and y[6].isfinite().all()
        y.backward(normal(130, 256, seed=3))
        counts.append({name: found.tolist() for name, found in converted.saturation().items()})
    assert counts[0] == counts[1] and counts[0]["input"][0][1] >= 1


# ---- where it runs ----


@pytest.mark.parametrize(
    ("capability", "cuda", "said"),
    [
        ((9, 0), "12.9", None),
        ((9, 0), "12.8", "CUDA 12.9 or newer .* has 12.8"),
        ((8, 9), "12.9", r"9.0 \(Hopper\), this one has 8.9"),
        ((10, 0), "13.0", r"9.0 \(Hopper\), this one has 10.0"),
    ],
)
def test_what_the_device_must_have(
    capability: tuple[int, int], cuda: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    net = nn.Sequential(nn.Linear(128, 128, device="meta"))
    spec = PathSpec.of("deepseek_v3", None, targets=["0"], backend="scaled_mm")
    if said is None:
        assert convert(net, spec, device=torch.device("cuda")).low.backend == "scaled_mm"
        return
    with pytest.raises(ValueError, match=f"backend='scaled_mm': .*{said}"):
        convert(net, spec, device=torch.device("cuda"))


def test_a_model_for_a_gpu_that_is_elsewhere() -> None:
    net = nn.Sequential(nn.Linear(128, 128, device="meta"))
    converted = convert(
        net, PathSpec.of("deepseek_v3", None, targets=["0"], backend="scaled_mm"), device=torch.device("cuda")
    )
    y = net(torch.empty(64, 128, device="meta", requires_grad=True))
    assert y.shape == (64, 128) and converted.cost.predicted_bytes() == 64 * 128 + 128 * 4
