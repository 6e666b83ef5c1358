"""The wheel holds the package and its YAML tree, nothing else, and finds that tree by itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MISSING = [name for name in ("build", "hatchling") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"building a wheel needs {' and '.join(MISSING)}"),
    pytest.mark.xdist_group("wheel"),  # built once
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        commands = archive.read(entry_points).decode().split("\n")
    kinds = ("*.py", "py.typed", "*.js", "*.j2", "published.yaml")
    sources = {path.relative_to(ROOT).as_posix() for kind in kinds for path in (ROOT / "gnmr").rglob(kind)}
    settings = {f"gnmr/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    sources |= {file.relative_to(ROOT).as_posix() for file in (ROOT / "gnmr/lab/bases").rglob("*") if file.is_file()}
    assert {
        "gnmr/lab/bases/shipped/config.yaml",
        "gnmr/cli/__init__.py",
        "gnmr/conf/config.yaml",
        "gnmr/conf/experiment/act_quant_stress.yaml",
    } < sources | settings
    assert {name for name in names if ".dist-info/" not in name} == sources | settings
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "gnmr = gnmr.cli:main" in commands


def test_packaged_conf_comes_before_a_folder_beside_the_package(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    beside = tmp_path / "conf"
    beside.mkdir()
    (beside / "config.yaml").write_text("{}\n")

    done = subprocess.run(
        [sys.executable, "-c", "from gnmr.lab.config.compose import conf_dir; print(conf_dir())"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(tmp_path / "gnmr" / "conf")
