"""A sweep's records sent to W&B offline and read back; the report that W&B's own package would write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wandb
from wandb_files import read_history, read_records

from gnmr.commands.pack import main as pack
from gnmr.commands.report import main as report
from gnmr.commands.sync import main
from gnmr.errors import UserError

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_login(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.mark.slow
def test_a_sweep_goes_to_wandb_with_its_arms_and_what_they_lose(
    write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm, loss in (("bf16", 4.0), ("int4_int8", 4.5)):
        write_run(arm=arm, steps=6, loss=[loss] * 6, val_loss={3: loss, 6: loss - 0.5}, header={"run_id": arm})
    assert main([str(tmp_path / "runs"), "project=team/mine", "mode=offline", "every=2"]) == 0
    wandb.teardown()
    out = capsys.readouterr().out
    assert "1 of 2: " in out and out.count("W&B: wandb sync") == 2 and "off from here" not in out

    low, high = sorted((tmp_path / "runs" / "stress").glob("*"), key=lambda path: path.name, reverse=True)
    history = read_history(low)
    assert sorted(history) == [1, 2, 3, 4, 5, 6]
    assert [history[step]["compare/loss_minus_16bit"] for step in history] == [0.5] * 6
    assert history[3]["compare/val_loss_minus_16bit"] == 0.5 and history[6]["val/loss"] == 4.0
    assert "compare/loss_minus_16bit" not in read_history(high)[1]
    run = next(record.run for record in read_records(low) if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_id, run.project, run.entity) == ("int4_int8", "mine", "team")
    assert run.job_type == config["arm"] == low.name.rsplit("-", 2)[0] and run.job_type in run.tags
    assert run.run_group == f"stress/{low.name.removesuffix('-s0')}"
    assert config["header"]["commit"].startswith("0123") and config["training"]["steps"] == 6
    (units,) = low.glob("wandb/offline-run-*/files/media/table/units_*")
    assert [row[:2] for row in json.loads(units.read_text())["data"][:2]] == [
        [2, "layers.0.self_attn.q_proj"],
        [2, "layers.0.self_attn.k_proj"],
    ]


def test_a_pack_needs_a_folder(write_run: Write, tmp_path: Path) -> None:
    write_run()
    assert pack([str(tmp_path / "runs"), f"out={tmp_path / 'a.parquet'}"]) == 0
    with pytest.raises(UserError, match="out=DIR"):
        main([str(tmp_path / "a.parquet")])


def test_a_report_says_how_where_the_package_is_not_there(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    write_run()
    with pytest.raises(UserError, match="pip install wandb-workspaces") as error:
        report([str(tmp_path / "runs"), "wandb=mine", "--no-plots"])
    assert "\n" not in str(error.value) and not (tmp_path / "runs" / "report").exists()


def test_a_report_for_wandb(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    class Report(SimpleNamespace):
        url = "https://wandb.example/report"

        def save(self) -> None:
            made.append(self)

    kinds = ("PanelGrid", "Runset", "LinePlot", "MediaBrowser", "MarkdownBlock", "H1", "H2", "P")
    module = ModuleType("wandb_workspaces.reports.v2")
    module.__dict__.update({kind: type(kind, (SimpleNamespace,), {}) for kind in kinds}, Report=Report)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", ModuleType("wandb_workspaces"))
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports", ModuleType("wandb_workspaces.reports"))
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", module)
    for arm in ("bf16", "int4"):
        write_run(arm=arm)
    assert report([str(tmp_path / "runs"), "wandb=team/mine", "--no-plots"]) == 0
    assert "W&B: https://wandb.example/report" in capsys.readouterr().out
    (one,) = made
    assert (one.project, one.entity, one.title) == ("mine", "team", "gnmr: stress, scale cpu")
    told = [block.text for block in one.blocks if type(block).__name__ == "MarkdownBlock"]
    assert told[0].startswith("**Low precision cost") and any("| int4 |" in text for text in told)
    (grid,) = (block for block in one.blocks if type(block).__name__ == "PanelGrid")
    assert grid.runsets[0].project == "mine"
    assert next(panel.y for panel in grid.panels if type(panel).__name__ == "LinePlot") == ["train/loss"]
