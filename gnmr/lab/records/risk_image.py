"""The map of units as a small picture, built as the run goes: risk above the trigger by step, recovery as strips."""

from __future__ import annotations

from typing import Any

import numpy as np

COLUMNS = 400
"""Bins of steps at the most; when they are full, two become one."""
_COLOURS = ((253, 217, 168), (253, 187, 132), (252, 141, 89), (227, 74, 51), (179, 0, 0), (122, 0, 0))
"""Orange to red, from the trigger to four times it."""
_RECOVERY, _UNSEEN, _INK = (0, 114, 178), (233, 233, 233), (34, 34, 34)


class RiskMap:
    """Highest risk and recovery of U units in at most `COLUMNS` bins; its memory does not grow with the steps."""

    def __init__(self, columns: int = COLUMNS) -> None:
        """`columns`: an even number of bins."""
        self._columns = columns
        self._forget([])

    def _forget(self, units: list[str]) -> None:
        self.units, self.width, self.last_step = list(units), 1, 0
        shape = (len(units), self._columns)
        self.risk_UB = np.full(shape, np.nan, np.float32)  # NaN: not observed
        self.active_UB = np.zeros(shape, bool)

    def add(self, step: int, units: list[str], risk: np.ndarray, active: np.ndarray) -> None:
        """`risk` (U,), NaN where a unit was not observed; `active` (U,) bool. Other units begin a new map."""
        if units != self.units:
            self._forget(units)
        while (step - 1) // self.width >= self._columns:
            self._halve()
        place = (step - 1) // self.width
        self.risk_UB[:, place] = np.fmax(self.risk_UB[:, place], risk)
        self.active_UB[:, place] |= active
        self.last_step = max(self.last_step, step)

    def _halve(self) -> None:
        half = self._columns // 2
        risk, active = self.risk_UB, self.active_UB
        self.risk_UB, self.active_UB = np.full_like(risk, np.nan), np.zeros_like(active)
        self.risk_UB[:, :half] = np.fmax(risk[:, ::2], risk[:, 1::2])
        self.active_UB[:, :half] = active[:, ::2] | active[:, 1::2]
        self.width *= 2

    def caption(self) -> str:
        """What the picture shows, in a line."""
        bins = f", {self.width} steps a column" if self.width > 1 else ""
        return (
            f"Risk of {len(self.units)} units to step {self.last_step:,}{bins}: blank below the trigger, orange to red "
            "above; blue strip: on the recovery path; grey: not observed"
        )

    def pixels(self, trigger: float = 1.0) -> np.ndarray:
        """The picture without names, (height, width, 3) uint8: a row of pixels a unit times its height."""
        bins = max(1, -(-self.last_step // self.width))
        high, wide = max(3, min(12, 640 // max(1, len(self.units)))), max(1, min(24, 900 // bins))
        risk_UB, active_UB = self.risk_UB[:, :bins], self.active_UB[:, :bins]
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.log2(risk_UB / trigger) / 2 * (len(_COLOURS) - 1)
        place = np.clip(np.nan_to_num(level, nan=0.0, posinf=1e9, neginf=0.0), 0, len(_COLOURS) - 1).astype(int)
        cells = np.where((risk_UB > trigger)[..., None], np.array(_COLOURS)[place], 255)
        cells = np.where(np.isnan(risk_UB)[..., None], _UNSEEN, cells)
        rows = np.repeat(cells[:, None], high, axis=1)  # (U, high, B, 3)
        strip = high - max(1, high // 3)
        rows[:, strip:] = np.where(active_UB[:, None, :, None], _RECOVERY, rows[:, strip:])
        return np.repeat(rows.reshape(-1, bins, 3), wide, axis=1).astype(np.uint8)

    def picture(self, trigger: float = 1.0) -> Any:
        """`pixels` with the units' names on the left, as a Pillow image; None without units. Imports Pillow."""
        if not self.units:
            return None
        from PIL import Image, ImageDraw

        pixels = self.pixels(trigger)
        high, names = len(pixels) // len(self.units), [unit[-40:] for unit in self.units]
        left = 12 + 6 * max(map(len, names))
        picture = Image.new("RGB", (left + pixels.shape[1], len(pixels) + 2), "white")
        picture.paste(Image.fromarray(pixels), (left, 0))
        draw = ImageDraw.Draw(picture)
        draw.rectangle((left - 1, 0, left + pixels.shape[1] - 1, len(pixels)), outline=_UNSEEN)
        for number in range(0, len(names), -(-11 // high)):  # a name is 11 pixels high
            draw.text((2, number * high), names[number].encode("ascii", "replace").decode(), fill=_INK)
        return picture
