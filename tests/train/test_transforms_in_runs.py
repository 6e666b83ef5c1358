"""A step that a gradient transform leaves out, in whole runs."""

from __future__ import annotations

import pytest

from gnmr.records.reader import read_json, read_jsonl

pytestmark = pytest.mark.slow

SKIP = ["optim.transform.name=skip_step", "optim.transform.options.window=4"]
SKIP += ["optim.transform.options.min_values=3", "optim.transform.options.sigmas=0.3"]
"""So few sigmas that a good part of the steps is left out."""


@pytest.mark.parametrize("optimizer", [[], ["optim.name=scale"]], ids=["adamw", "scale"])
def test_a_step_left_out(optimizer, train, tmp_path):
    """Skipped, but not for a number that is not finite: no streak, no unit, no end of the run."""
    words = ["training.max_nonfinite_streak=1", "training.steps=12", *optimizer]
    folder = train(tmp_path / "run", *words, *SKIP)
    rows = read_jsonl(folder / "steps.jsonl")
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert 2 <= len(skipped) <= 9 and skipped[0] >= 3  # not before min_values were seen
    for row in rows:
        assert (row["nonfinite_unit"], row["nonfinite_total"], row["nonfinite_streak"]) == (None, 0, 0)
    assert read_json(folder / "summary.json")["nonfinite_total"] == 0 and (folder / "DONE").exists()
