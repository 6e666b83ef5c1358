"""A sweep's records sent to W&B offline and read back; the report that W&B's own package would write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from html_runs import fake_run
from wandb_files import read_history, read_records

from gnmr.cli.report import main as report
from gnmr.cli.sync import main
from gnmr.errors import UserError
from gnmr.lab.records.wandb_sink import PANELS, WandbSink
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.runs import Run
from gnmr.lab.report.wandb_runs import send

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


def test_loops_of_ones_own_do_not_share_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their config nor their header has one."""
    runs = [fake_run(tmp_path / "mine" / f"{name}-s0") for name in ("a", "b")]
    for run, experiment in zip(runs, ("one", "two"), strict=True):
        run.hash, run.experiment = "unknown", experiment
    ids: list[str] = []
    monkeypatch.setattr(Run, "tree", {})
    monkeypatch.setattr(WandbSink, "start", lambda _, labels, **__: ids.append(labels.run_id))
    for _ in range(2):
        send(compare(runs), project=None, mode="offline", folder=None, every=10, say=lambda _: None)
    assert len(ids) == 4 and len(set(ids)) == 2, "the same ones when they are sent again"


def test_a_report_says_how_where_the_package_is_not_there(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    write_run()
    with pytest.raises(UserError, match="pip install wandb-workspaces") as error:
        report([str(tmp_path / "runs"), "wandb=mine", "--no-plots"])
    assert "\n" not in str(error.value) and not (tmp_path / "runs" / "report").exists()


@pytest.mark.slow
def test_a_report_as_wandbs_package_sends_it(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real package makes it; in the place of W&B's server stands what takes and answers its three requests."""
    interface = pytest.importorskip(
        "wandb_workspaces.reports.v2.interface", reason="needs wandb-workspaces, the extra wandb"
    )
    sent: list[dict[str, Any]] = []

    def answer(_: object, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "ProjectInternalId" in query:
            return {"project": {"internalId": f"of {variables['entityName']}/{variables['projectName']}"}}
        sent.append(variables)
        where = {"name": variables["projectName"], "entityName": variables["entityName"]}
        view = {key: variables[key] for key in ("name", "displayName", "description", "spec")}
        return {"upsertView": {"view": view | {"id": "Vmlldzox", "project": where}}}

    server = SimpleNamespace(default_entity="me", projects=lambda _: [SimpleNamespace(name="mine")])
    monkeypatch.setattr(interface, "_get_api", lambda: server)
    monkeypatch.setattr(interface, "get_app_url", lambda _: "https://wandb.example")
    monkeypatch.setattr(interface, "execute_graphql", answer)
    for arm in ("bf16", "int4"):
        write_run(arm=arm)
    for project, owner in (("team/mine", "team"), ("mine", "me")):
        assert report([str(tmp_path / "runs"), f"wandb={project}", "--no-plots"]) == 0
        assert f"W&B: https://wandb.example/{owner}/mine/reports/gnmr:-stress,-scale-cpu--V" in capsys.readouterr().out
        made = sent.pop()
        assert (made["entityName"], made["displayName"]) == (owner, "gnmr: stress, scale cpu")
        blocks = json.loads(made["spec"])["blocks"]
        told = [block["content"] for block in blocks if block["type"] == "markdown-block"]
        assert told[0].startswith("**Low precision cost") and any("| int4 |" in text for text in told)
        (grid,) = (block["metadata"] for block in blocks if block["type"] == "panel-grid")
        (runs,) = grid["runSets"]
        assert runs["project"] == {"name": "mine", "entityName": owner, "id": f"of {owner}/mine"}
        assert runs["search"] == {"query": "stress"}
        *lines, media = (panel["config"] for panel in grid["panelBankSectionConfig"]["panels"])
        assert [line["metrics"] for line in lines] == [[panel] for panel in PANELS] and media["mediaKeys"] == [
            "risk_map"
        ]
        assert {(line["xAxis"], line["groupBy"], line["groupAgg"]) for line in lines} == {("step", "arm.value", "mean")}

    def refuse(*_: object) -> None:
        raise RuntimeError("no such team\nand more")

    monkeypatch.setattr(interface, "execute_graphql", refuse)
    with pytest.raises(UserError, match=r"mine: W&B did not take the report \(RuntimeError: no such team\)$"):
        report([str(tmp_path / "runs"), "wandb=team/mine", "--no-plots"])
