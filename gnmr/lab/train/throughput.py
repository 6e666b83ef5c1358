"""How fast a run trains: tokens per second, and the model FLOPs utilization (MFU) of its devices.

    MFU = FLOPs of the model per token * tokens per second / (peak FLOPs per second of a device * devices)

FLOPs of the model are those of all GEMMs and of attention, forward and backward; the embedding multiplies nothing, and
recomputation does not count (PaLM, arXiv 2204.02311, appendix B), nor do gradients of weights that adapters leave
frozen. The peak is that of dense BF16, whatever recipe runs.
"""

from __future__ import annotations

import torch

PEAK_FLOPS = {
    "A100": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "L4": 121e12,
    "L40S": 362e12,
    "MI250X": 191.5e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2517e12,
}
"""Dense BF16 FLOPs per second by the name of the device, from the data sheets; of an MI250X one of its two halves."""


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of `device` in dense BF16, FLOPs per second; None for a CPU or an unknown GPU."""
    return None if device.type != "cuda" else peak_of_name(torch.cuda.get_device_name(device))


def peak_of_name(name: str) -> float | None:
    """Return the peak of a device by its full name, as in "NVIDIA H100 80GB HBM3"; None if it is unknown.

    It is unknown of a part of a GPU (MIG), which is named after the whole.
    """
    words = name.replace("-", " ").split()
    if "MIG" in words:
        return None
    known = [model for model in PEAK_FLOPS if set(model.split()) <= set(words)]
    # "H100 PCIe" says more than "H100".
    return PEAK_FLOPS[max(known, key=len)] if known else None


def throughput(
    tokens: int, seconds: float, flops_per_token: float, peak: float | None, devices: int = 1
) -> dict[str, float | None]:
    """Return the fields `tokens_per_s` and `mfu` of `records.schema.STEP_FIELDS`.

    Args:
        tokens: tokens of the step, over all devices.
        seconds: time of the step.
        flops_per_token: forward and backward FLOPs of the model.
        peak: see `peak_flops`; `mfu` is None without it.
        devices: number of devices that took the step.
    """
    tokens_per_s = tokens / seconds
    return {
        "tokens_per_s": tokens_per_s,
        "mfu": None if peak is None else flops_per_token * tokens_per_s / (peak * devices),
    }
