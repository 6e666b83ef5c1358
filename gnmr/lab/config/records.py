"""records.* and scores.*: what is written, shown and scored."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.errors import as_user_error, fields, one_of, whole
from gnmr.names import TASKS


@dataclass(frozen=True)
class ScoresConfig:
    """Language tasks that the model is scored on in training (gnmr/lab/evaluation); no number of the run changes."""

    tasks: list[str] = field(default_factory=list)
    """Some of gsm8k, mmlu, hellaswag, wikitext2, at the run's end; empty: none. Needs the extra finetune."""
    every: int | None = None
    """Steps between scorings before that; null: at the end only."""
    limit: int | None = None
    """Items of a task at the most, of mmlu of each subject; null: all."""
    shots: int | None = None
    """Examples in the prompts of gsm8k and mmlu; null: 5."""
    data: str | None = None
    """Folder of task definitions for lm-eval (its include_path), in place of its own; null: lm-eval's own."""
    path: str = "16bit"
    """Path in force while scoring: 16bit, or low: the run's low-cost path."""
    batch_size: int = 8
    """Inputs a pass."""

    @as_user_error("scores.")
    def __post_init__(self) -> None:
        for task in self.tasks:
            one_of(TASKS, tasks=task)
        one_of(("16bit", "low"), path=self.path)
        whole(or_null=True, **fields(self, "every", "limit"))
        whole(0, or_null=True, shots=self.shots)
        whole(batch_size=self.batch_size)


@dataclass(frozen=True)
class RecordsConfig:
    """What is written and shown; nothing here changes the numbers of a run."""

    units_every: int = 1
    """Steps between rows of units.arrows."""
    evidence: list[str] = field(default_factory=list)
    """Evidence that units.arrows keeps besides what the signal shows (docs/signals.md): replay and calibration of
    other signals need theirs. Each costs what measuring it costs."""
    monitor: list[str] = field(default_factory=list)
    """Modules outside of the units whose gradient norms steps.jsonl keeps, as precision.targets: what a recipe leaves
    in 16 bits is watched and never routed. It costs nothing."""
    verdicts: bool = True
    """A step that spikes or is not finite is run again, to say what is to blame (docs/blame.md)."""
    check_every: int = 100
    """Steps between digests of the weights in steps.jsonl, in which several processes are held against each other."""
    live: str = "auto"
    """auto: a live view on a terminal, else plain lines, in a sweep log; plain; log: the plain lines to log.txt in the
    run's folder; off."""
    plain_every: int = 20
    """Steps between plain lines."""
    wandb: str = "auto"
    """auto: online where the user is logged in, else offline; online; offline; off."""
    wandb_project: str | None = None
    """NAME or ENTITY/NAME; null: the environment's WANDB_PROJECT, else gnmr."""
    wandb_every: int = 10
    """Steps between the points of a unit's lines in W&B, and its rows in the table (losses go every step)."""
    wandb_units: int | None = 64
    """Units that have lines in W&B, the most promoted ones; null: all."""

    @as_user_error("records.")
    def __post_init__(self) -> None:
        whole(**fields(self, "units_every", "check_every", "plain_every", "wandb_every"))
        whole(or_null=True, wandb_units=self.wandb_units)
        one_of(("auto", "plain", "log", "off"), live=self.live)
        one_of(("auto", "online", "offline", "off"), wandb=self.wandb)
