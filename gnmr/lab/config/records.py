"""records.* and scores.*: records, live views and scores of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.errors import as_user_error
from gnmr.names import TASKS
from gnmr.options import fields, one_of, whole_number


@dataclass(frozen=True)
class ScoresConfig:
    """Language tasks that score the model during training (gnmr/lab/evaluation). They do not change its numbers."""

    tasks: list[str] = field(default_factory=list)
    """Some of gsm8k, mmlu, hellaswag, wikitext2, scored at the end of the run. They need the extra finetune."""
    every: int | None = None
    """Steps between further scorings. If null, the model is scored only at the end."""
    limit: int | None = None
    """Largest number of items per task, or per subject of mmlu. If null, all items are used."""
    data: str | None = None
    """Folder of task definitions for lm-eval (its include_path). If null, the definitions of lm-eval are used."""
    path: str = "16bit"
    """Path in force while scoring: 16bit, or low for the run's low-cost path."""

    @as_user_error("scores.")
    def __post_init__(self) -> None:
        for task in self.tasks:
            one_of(TASKS, tasks=task)
        one_of(("16bit", "low"), path=self.path)
        whole_number(or_null=True, **fields(self, "every", "limit"))


@dataclass(frozen=True)
class RecordsConfig:
    """Records and live views. Nothing here changes the numbers of a run."""

    units_every: int = 1
    """Steps between rows of units.arrows."""
    evidence: list[str] = field(default_factory=list)
    """Evidence in units.arrows in addition to the signal's (docs/signals.md). Replay and calibration of other signals
    need their evidence. Measuring it has a cost."""
    monitor: list[str] = field(default_factory=list)
    """Modules outside of the units whose gradient norms go to steps.jsonl, as in precision.targets. Modules that a
    recipe leaves in 16 bits can be monitored but never routed. Monitoring costs nothing."""
    verdicts: bool = True
    """Run a step that spikes or is not finite again, to determine the cause (docs/blame.md). If false, only a loss that
    is not finite is examined, and only if controller.nonfinite=find and there is a recovery path."""
    live: str = "auto"
    """How progress is shown: auto, plain, log or off. auto: a live view on a terminal, plain lines elsewhere, log in a
    sweep. log: plain lines to log.txt in the run folder."""
    wandb: str = "auto"
    """auto: online if the user is logged in, else offline; online; offline; off. WANDB_PROJECT and WANDB_ENTITY of the
    environment name the project."""

    @as_user_error("records.")
    def __post_init__(self) -> None:
        whole_number(**fields(self, "units_every"))
        one_of(("auto", "plain", "log", "off"), live=self.live)
        one_of(("auto", "online", "offline", "off"), wandb=self.wandb)
