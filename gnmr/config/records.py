"""records.* and scores.*: what is written, shown and scored."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.config.checks import one_of, positive, require

TASKS = ("gsm8k", "mmlu", "hellaswag", "wikitext2")


@dataclass(frozen=True)
class ScoresConfig:
    """Language tasks that the model is scored on in training (gnmr/evaluation); changes no number of the run itself."""

    tasks: list[str] = field(default_factory=list)
    """Some of gsm8k, mmlu, hellaswag, wikitext2, at the run's end; empty: none. Needs the extra finetune."""
    every: int | None = None
    """Steps between scorings before that; null: at the end only."""
    limit: int | None = None
    """Items of a task at the most, of mmlu of each subject; null: all."""
    shots: int | None = None
    """Examples in the prompts of gsm8k and mmlu; null: 5."""
    data: str | None = None
    """Folder of local task files (gnmr/evaluation/tasks.py); null: the hub."""
    path: str = "16bit"
    """Path in force while scoring: 16bit, or low: the run's low-cost path."""
    batch_size: int = 8
    """Inputs a pass."""

    def __post_init__(self) -> None:
        for task in self.tasks:
            one_of("scores.tasks", task, TASKS)
        one_of("scores.path", self.path, ("16bit", "low"))
        for key in ("every", "limit", "batch_size"):
            positive(f"scores.{key}", getattr(self, key), optional=key != "batch_size")
        require(self.shots is None or self.shots >= 0, "scores.shots", self.shots, "must be 0 or more, or null")


@dataclass(frozen=True)
class RecordsConfig:
    """What is written and shown; nothing here changes the numbers of a run."""

    ratios_every: int = 1
    """Steps between rows of ratios.parquet."""
    evidence: list[str] = field(default_factory=list)
    """Evidence that ratios.parquet keeps besides what the signal shows (docs/signals.md): replay and calibration of
    other signals need theirs. Each costs what measuring it costs."""
    monitor: list[str] = field(default_factory=list)
    """Modules outside of the units whose gradient norms steps.jsonl keeps, as paths.targets: what a recipe leaves in 16
    bits is watched and never routed. It costs nothing."""
    live: str = "auto"
    """auto: a live view on a terminal, else plain lines; plain; off."""
    plain_every: int = 20
    """Steps between plain lines."""
    wandb: str = "auto"
    """auto: online where the user is logged in, else offline; online; offline; off."""
    wandb_project: str = "gnmr"
    wandb_every: int = 10
    """Steps between the per-unit ratios sent to W&B (losses go every step)."""

    def __post_init__(self) -> None:
        for key in ("ratios_every", "plain_every", "wandb_every"):
            positive(f"records.{key}", getattr(self, key))
        one_of("records.live", self.live, ("auto", "plain", "off"))
        one_of("records.wandb", self.wandb, ("auto", "online", "offline", "off"))
