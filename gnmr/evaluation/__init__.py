"""Scores on language tasks: `gnmr eval`, and `RunScorer` for runs in training.

subject = load_subject("runs/.../RUN")                        # or a Hugging Face checkpoint
scores = score(subject, ["hellaswag"], limit=100, data=Path("my_tasks"))

Needs the extra finetune, whose packages are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnmr.evaluation.in_training import RunScorer
    from gnmr.evaluation.scoring import score
    from gnmr.evaluation.subjects import Subject, load_subject, of_run

__all__ = ["RunScorer", "Subject", "load_subject", "of_run", "score"]

_HOME = {
    "RunScorer": "in_training",
    "Subject": "subjects",
    "load_subject": "subjects",
    "of_run": "subjects",
    "score": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
