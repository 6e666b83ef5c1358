"""Which folders are runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gnmr.errors import UserError


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run folders at or below the paths, each once, in order of name; hidden folders below a path are passed over.

    Raises `UserError` for a path that does not exist or has no run in it.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: {'not a folder or pack' if path.exists() else 'no such folder'}")
        inside = []
        for parent, folders, files in os.walk(path):
            names = {*folders, *files}  # whatever they are: what is no file is told where it is read
            if "config.yaml" in names and names & {"steps.jsonl", "header.json"}:
                inside.append(Path(parent))
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith("."))
        if not inside:
            raise UserError(f"{path}: no run in it (a run folder holds config.yaml and steps.jsonl or header.json)")
        for folder in inside:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())
