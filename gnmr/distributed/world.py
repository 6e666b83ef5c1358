"""Which processes train together: those of torch.distributed's default group, else this one alone.

Asked for anew each time: a controller may be made before the group is.
"""

from __future__ import annotations

import torch


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def size() -> int:
    """How many processes there are."""
    return torch.distributed.get_world_size() if _grouped() else 1


def rank() -> int:
    """Which of them this one is, from 0."""
    return torch.distributed.get_rank() if _grouped() else 0
