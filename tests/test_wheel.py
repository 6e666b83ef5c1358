"""The wheel holds the package and its YAML tree, and nothing else."""

from __future__ import annotations

import importlib.util
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
]


def test_contents(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        commands = archive.read(entry_points).decode().split("\n")
    kinds = ("*.py", "py.typed", "*.js", "*.j2")
    sources = {path.relative_to(ROOT).as_posix() for kind in kinds for path in (ROOT / "gnmr").rglob(kind)}
    settings = {f"gnmr/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    sources |= {file.relative_to(ROOT).as_posix() for file in (ROOT / "gnmr/lab/bases").rglob("*") if file.is_file()}
    assert {"gnmr/lab/bases/shipped/config.yaml", "gnmr/conf/experiment/act_quant_stress.yaml"} < sources | settings
    assert {name for name in names if ".dist-info/" not in name} == sources | settings
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "gnmr = gnmr.lab.cli:main" in commands
