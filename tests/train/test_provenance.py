"""What a run's files tell of the machine and its user."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnmr.lab.config import config_hash, read
from gnmr.lab.train import provenance
from gnmr.lab.train.provenance import portable_command
from gnmr.lab.train.run import run
from gnmr.records.reader import read_json


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout of this package inside another repository, and what git says of its commit."""
    for folder in (tmp_path, tmp_path / "checkout"):
        git(folder, "init", "-q")
        git(folder, "commit", "-q", "--allow-empty", "-m", folder.name)
    monkeypatch.setattr(provenance.gnmr, "__file__", str(tmp_path / "checkout" / "gnmr" / "__init__.py"))
    provenance.commit.cache_clear()
    yield tmp_path / "checkout"
    provenance.commit.cache_clear()


def git(folder: Path, *words: str) -> str:
    folder.mkdir(exist_ok=True)
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"GIT_DIR": ".git"},
        {"GIT_DIR": ".git", "GIT_WORK_TREE": "."},
        {"GIT_COMMON_DIR": ".git"},
        {"GIT_INDEX_FILE": "none"},
        {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"},
    ],
)
def test_the_commit_is_that_of_this_package(variables, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a hook has exported."""
    ours = git(checkout, "rev-parse", "--short=12", "HEAD")
    for name, value in variables.items():
        monkeypatch.setenv(name, value if value == "1" else str(checkout.parent / value))
    assert provenance.commit() == ours


@pytest.mark.parametrize("how", ["broken", "no git", "empty"])
def test_a_checkout_without_a_commit_is_told(how, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "no git":
        monkeypatch.setenv("PATH", "")
    else:
        shutil.rmtree(checkout / ".git")
        (checkout / ".git").write_text("gitdir: nowhere") if how == "broken" else (checkout / ".git").mkdir()
    with pytest.warns(UserWarning, match="the records name no commit: git gives none for"):
        assert provenance.commit() is None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; the home folder is beside it."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("gnmr train data.path={here}/data/x.txt", "gnmr train data.path=data/x.txt"),
        ("gnmr train data.path={home}/x.txt", "gnmr train 'data.path=~/x.txt'"),
        ("gnmr train run_dir=/scratch/alice/run", "gnmr train run_dir=run"),
        ("gnmr train data.path=/data/gsm run_dir=/scratch/x/run", "gnmr train data.path=/data/gsm run_dir=run"),
        ("gnmr diagnose /data/llama data=/data/x.txt out=/tmp/p", "gnmr diagnose /data/llama data=/data/x.txt out=p"),
        ("gnmr train +scores.data=/d/t out=/scratch/c", "gnmr train +scores.data=/d/t out=c"),
        ("gnmr train 'a=[/scratch/x,{here}/c d]'", "gnmr train 'a=[/scratch/x,c d]'"),
        ("/usr/local/bin/gnmr train preset=6/8", "gnmr train preset=6/8"),
        ("gnmr train data.path=https://host/x", "gnmr train data.path=https://host/x"),
    ],
)
def test_a_command(command: str, told: str, here: Path) -> None:
    assert portable_command(command.format(here=here, home=Path.home())) == told


def test_a_run_tells_no_user_host_or_folder(tiny, text_file: Path, here: Path, tmp_path: Path) -> None:
    """And goes on as before: what it is has not changed."""
    (here / "babble.txt").write_text(text_file.read_text())
    words = ("training.steps=2", "data.path=babble.txt")
    made = tiny(f"run_dir={here}/runs/one", f"runs_dir={tmp_path}/runs", *words)
    folder = run(made, lambda _: None, command=f"gnmr train run_dir={here}/runs/one data.path={here}/babble.txt")
    header = read_json(folder / "header.json")
    assert header is not None and header["command"] == "gnmr train run_dir=runs/one data.path=babble.txt"
    written = (folder / "config.yaml").read_text() + (folder / "header.json").read_text()
    assert str(tmp_path) not in written
    assert header["machine"].keys() == {"cpu", "kernels", "cores", "threads", "products", "device"}
    saved = read(folder / "config.yaml")
    assert (saved.run_dir, saved.runs_dir) == (None, "runs")
    assert config_hash(saved) == config_hash(made)
    said = list[str]()
    run(made, said.append)
    assert said == [f"{folder} is done: skipped"]
