"""`gnmr demo` on a few steps of the shipped base."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnmr.lab.cli import demo
from gnmr.lab.train.folder import run_folder


def test_its_arms_are_those_of_the_sweep_and_spend_alike(tmp_path):
    configs = [config for _, config in demo._cells(2, tmp_path)]
    assert [config.controller.name for config in configs] == [*demo._ARMS] * 2
    assert {config.controller.budget for config in configs[1:4]} == {0.1}
    assert all((config.precision, config.training.steps) == (configs[0].precision, 20) for config in configs)
    assert [config.training.seed for config in configs] == [0] * 5 + [1] * 5
    folders = {run_folder(config) for config in configs}
    assert len(folders) == 10 and {folder.parent for folder in folders} == {tmp_path / "demo"}


@pytest.mark.parametrize("words", [["orders=0"], ["orders=null"], ["steps=3"], ["orders=x"]])
def test_its_mistakes_are_a_line(words, gnmr, tmp_path):
    (tmp_path / "file").touch()
    assert gnmr("demo", f"runs_dir={tmp_path / 'file'}").mistake.endswith("file: is a file; name a folder")
    assert gnmr("demo", *words).mistake.startswith("demo: " if words[0] in ("orders=null", "steps=3") else "orders=")


@pytest.mark.slow
def test_the_demo_from_command_to_page(gnmr, tmp_path, monkeypatch):
    """One order of two steps; a second call runs nothing."""
    cells = demo._cells

    def short(orders, runs_dir):
        for words, config in cells(orders, runs_dir):
            yield words, replace(config, training=replace(config.training, steps=2, eval_sequences=2))

    monkeypatch.setattr(demo, "_cells", short)
    first = gnmr("demo", "orders=1", f"runs_dir={tmp_path}")
    assert first.code == 0, first.err
    assert all(f"int2-{name}" in first.out for name in demo._ARMS)
    assert "1 order of the data: no evidence about other models" in first.out
    assert (tmp_path / "demo" / "report" / "report.html").exists()
    ran = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("demo/*/steps.jsonl"))
    assert gnmr("demo", "orders=1", f"runs_dir={tmp_path}").code == 0
    assert ran == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("demo/*/steps.jsonl"))
