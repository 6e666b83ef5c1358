"""The two ways a command ends badly, apart from a defect of ours.

`UserError` is a mistake in what was asked for: one line, exit code 2, nothing half-written.
`RunFailed` is a run that could not go on: one line, exit code 1, the run folder marked FAILED.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """What was wrong, where, and what would be right, in one line."""


class RunFailed(RuntimeError):
    """Why a training run ended, and at which step it began."""


@contextmanager
def writing(what: object) -> Iterator[None]:
    """A place that the user named and that cannot be written is the user's mistake."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: cannot be written ({error.strerror or error})") from error
