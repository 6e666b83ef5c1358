"""The paper's theory (its section 7) as numbers: what recovering a unit gains, and how often luck triggers.

    python -m gnmr.lab.paper.theory OUT.json                     theorem 1, corollary 1, and theorem 2 by simulation
    python -m gnmr.lab.paper.theory OUT.json --run RUN_OR_CSV    theorem 2 in recorded norms too

Overrides of the config are those of `gnmr train`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from gnmr.console import for_tables
from gnmr.errors import UserError
from gnmr.lab.config.compose import compose
from gnmr.lab.paper.false_triggers import false_triggers, recorded_norms
from gnmr.lab.paper.recovery_gaps import recovery
from gnmr.lab.paper.theory_tables import show_tables
from gnmr.lab.train.provenance import commit
from gnmr.records import output


def main(argv: list[str]) -> None:
    """Measure, show and write. Raises UserError if there is no recovery path or the run cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--run", type=Path, help="a run folder or a CSV file, whose recorded norms are counted too")
    parser.add_argument("--repeats", type=int, help="steps on which all paths run, and rounds of simulated histories")
    asked = parser.parse_intermixed_args(argv)
    config = compose(asked.overrides)
    if config.precision.recovery is None:
        raise UserError("precision.recovery=null: the theory compares two paths; name a recovery path")
    norms = None if asked.run is None else recorded_norms(asked.run.expanduser())
    figures = recovery(config, asked.repeats or 2) + false_triggers(norms, asked.repeats or 20)
    show_tables(figures, for_tables())
    rows = [asdict(figure) | {"met": figure.met} for figure in figures]
    output.write_json(asked.out, {"commit": commit(), "figures": rows}, str(asked.out))


if __name__ == "__main__":
    main(sys.argv[1:])
