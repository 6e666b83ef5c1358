"""The two ways a command ends badly, apart from a defect of ours.

`UserError` is a mistake in what was asked for: one line, exit code 2, nothing half-written.
`RunFailed` is a run that could not go on: one line, exit code 1, the run folder marked FAILED.
"""


class UserError(ValueError):
    """What was wrong, where, and what would be right, in one line."""


class RunFailed(RuntimeError):
    """Why a training run ended, and at which step it began."""
