"""What there is to say when the use of an attached model ends: by `detach`, with the model, or with the process."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

from gnmr.control.hints import Hints
from gnmr.errors import users_level


class Ending:
    """Warns, once, of a controller that never routed anything. Calling it ends the use."""

    def __init__(self, model: nn.Module, hints: Hints, low: str) -> None:
        """`low`: the name of the path that the model stays on if nobody calls `step`."""
        self._hints, self._low = hints, low
        self.stepped = False
        self.calibration: tuple[int, int] | None = None
        """(steps taken, steps wanted) of a calibration that is not over."""
        self._end = weakref.finalize(model, self._tell)  # at the end of the process too

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the controller has nothing to say."""
        return type(None), ()

    def __call__(self) -> None:
        self._end()

    def _tell(self) -> None:
        if not self.stepped and self._hints.trained:
            warnings.warn(
                f"step() was never called: the model was trained on its low path ({self._low}) and nothing was ever "
                "routed; call controller.step() once per optimizer step, after its last backward pass",
                stacklevel=users_level(),
            )
        elif self.calibration is not None:
            done, wanted = self.calibration
            warnings.warn(
                f"still calibrating after {done} of {wanted} steps: nothing was ever routed; "
                "calibrate(steps=...) must be shorter than the run",
                stacklevel=users_level(),
            )
