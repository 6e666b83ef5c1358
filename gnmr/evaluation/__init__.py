"""Scores on language tasks: `gnmr eval`, and `RunScorer` for runs in training.

subject = load_subject("runs/.../RUN")                        # or a Hugging Face checkpoint
scores = score(subject, ["hellaswag"], limit=100, data=Path("my_tasks"))

Needs the extra finetune, whose packages are imported when first used.
"""

from typing import TYPE_CHECKING

from gnmr.lazy import loader

if TYPE_CHECKING:
    from gnmr.evaluation.in_training import RunScorer
    from gnmr.evaluation.scoring import score
    from gnmr.evaluation.subjects import Subject, load_subject, of_run

__all__ = ["RunScorer", "Subject", "load_subject", "of_run", "score"]

__getattr__ = loader(
    __name__,
    {"in_training": ("RunScorer",), "scoring": ("score",), "subjects": ("Subject", "load_subject", "of_run")},
)
