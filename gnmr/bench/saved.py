"""What saved activations of few bits cost in time and save in bytes."""

from __future__ import annotations

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.steps import compare

REFERENCE = "bf16"
# Format: the most that time and bytes should be against 16-bit.
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "int4": (1.25, 0.28),
    "int8": (None, 0.53),
    "e2m1": (None, 0.28),
    "e4m3": (None, 0.53),
}


def saved(setting: Setting) -> list[Figure]:
    """Whole training steps of static runs that differ in the format alone."""
    found = compare(setting, "saved: steps with", {fmt: setting.static(fmt) for fmt in (REFERENCE, *TARGETS)})
    times, sizes = [], []
    whole = found.last[REFERENCE].saved_bytes
    for fmt, (most_time, most_bytes) in TARGETS.items():
        times.append(median(f"step with {fmt} over {REFERENCE}", found.ratios[fmt], "x", most_time, interval=True))
        own = found.last[fmt].saved_bytes
        if own is not None and whole:
            note = f"{own / 2**20:.2f} of {whole / 2**20:.2f} MiB, read from the autograd graph"
            sizes.append(Figure(f"bytes with {fmt} over {REFERENCE}", own / whole, "x", target=most_bytes, note=note))
    return [*times, *sizes, median(f"step with {REFERENCE}", found.seconds, "s")]
