"""The paper's theory (its section 7) as numbers: what recovering a unit gains, and how often luck triggers."""

from __future__ import annotations

from pathlib import Path

from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.setting import Setting
from gnmr.lab.paper.false_triggers import false_triggers, recorded_norms
from gnmr.lab.paper.recovery_gaps import recovery
from gnmr.lab.paper.theory_tables import show_tables


def check_theory(setting: Setting) -> None:
    """UserError unless both paths exist and the run whose norms are asked for can be read."""
    if setting.config.precision.recovery is None:
        raise UserError("bench theory: runs both paths, and precision.recovery=null has none")
    if setting.config.run_dir is not None:
        recorded_norms(Path(setting.config.run_dir).expanduser())


def theory(setting: Setting) -> list[Figure]:
    """Theorem 1's identity and corollary 1's set where all paths are run; theorem 2's false triggers, simulated, and
    in the norms of a run where one is given."""
    if setting.config.run_dir is None:
        setting.say("theory: theorem 2 in recorded norms is left out; run=FOLDER gives a run")
    return recovery(setting) + false_triggers(setting)


PARTS = {"theory": theory}
CHECKS = {"theory": check_theory}
SHOW = show_tables
