"""What saved activations of few bits cost in time and save in bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.steps import same_step
from gnmr.bench.timing import alternate, clock_of
from gnmr.training.parts import Parts, assemble
from gnmr.training.step import StepResult

REFERENCE = "bf16"
# Format: the most that time and bytes should be against 16-bit.
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "int4": (1.25, 0.28),
    "int8": (None, 0.53),
    "e2m1": (None, 0.28),
    "e4m3": (None, 0.53),
}


def saved(setting: Setting) -> list[Figure]:
    """Whole training steps of static runs that differ in the format alone, taking turns."""
    formats = [REFERENCE, *TARGETS]
    arms = {fmt: assemble(setting.static(fmt), Path(), setting.say) for fmt in formats}
    last: dict[str, StepResult] = {}
    steps = {fmt: _step(parts, fmt, last) for fmt, parts in arms.items()}
    rounds = setting.rounds(f"saved: steps with {', '.join(formats)}", 15, warm_up=2)
    seconds = alternate(steps, rounds, clock_of(arms[REFERENCE].device, setting.clock))

    times, sizes = [], []
    whole = last[REFERENCE].saved_bytes
    for fmt, (most_time, most_bytes) in TARGETS.items():
        ratio = seconds[fmt] / seconds[REFERENCE]
        times.append(median(f"step with {fmt} over {REFERENCE}", ratio, "x", most_time, interval=True))
        own = last[fmt].saved_bytes
        if own is not None and whole:
            note = f"{own / 2**20:.2f} of {whole / 2**20:.2f} MiB, read from the autograd graph"
            sizes.append(Figure(f"bytes with {fmt} over {REFERENCE}", own / whole, "x", target=most_bytes, note=note))
    return [*times, *sizes, median(f"step with {REFERENCE}", seconds[REFERENCE], "s")]


def _step(parts: Parts, fmt: str, last: dict[str, StepResult]) -> Callable[[], None]:
    """One step of `gnmr train` without records, on the same batch each time; leaves its result in `last`."""
    take_step = same_step(parts)

    def step() -> None:
        last[fmt] = take_step()

    return step
