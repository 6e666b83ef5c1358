"""The whole suite: python -m tests.attacks [KIND ...] [--cases N] [--seed S] [--out FILE.json]."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from .harness import HELD, Arena, Kind, Tally, attack, provenance

_MODULES = ("kills", "damaged", "hostile", "inputs")
_START = "\r\33[K" if sys.stdout.isatty() else ""  # of a line, which is emptied


def kinds() -> dict[str, Kind]:
    """All kinds by name."""
    there = [name for name in _MODULES if (Path(__file__).parent / f"{name}.py").exists()]
    modules = [importlib.import_module(f".{name}", __package__) for name in there]
    return {kind.name: kind for module in modules for kind in module.KINDS}


def main(argv: list[str]) -> int:
    """Plays the kinds; exit code 1 if anything did not hold."""
    known = kinds()
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("kinds", metavar="KIND", nargs="*", help=f"{', '.join(known)} (default: all)")
    parser.add_argument("--cases", type=int, help="of each kind so many, evenly spread (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file of the counts; other kinds in it stay")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print such files as a table")
    asked = parser.parse_args(argv)
    if asked.table:
        print(_table([json.loads(file.read_text()) for file in asked.table]))
        return 0
    if unknown := set(asked.kinds) - known.keys():
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    scratch = Path(tempfile.mkdtemp(prefix="attacks-"))
    tallies: list[Tally] = []
    try:
        with Arena(scratch) as arena:
            print(f"attacking {arena.checkout}", flush=True)
            for name in asked.kinds or known:
                tallies.append(attack(known[name], arena, asked.seed, asked.cases, _Line(name)))
                print(f"{_START}{_row(tallies[-1])}", flush=True)
            found = provenance(arena.checkout, asked.seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if asked.out is not None:
        tree = {**found, "kinds": _earlier(asked.out, found) | {tally.kind: tally.tree() for tally in tallies}}
        asked.out.write_text(json.dumps(tree, indent=1) + "\n")
    return int(any(tally.broken for tally in tallies))


def _earlier(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What the file holds of other kinds, if it is of the same program and seed."""
    earlier = json.loads(file.read_text()) if file.exists() else {}
    same = all(earlier.get(key) == found[key] for key in ("commit", "seed", "machine"))
    return dict(earlier["kinds"]) if same else {}


def _table(files: list[dict[str, Any]]) -> str:
    """Markdown: a row a kind, a column a file, of docs/attacks.md."""
    rows = [["kind", *(f"commit {file['commit'][:10]}" for file in files)], ["---"] * (len(files) + 1)]
    for kind in {kind: None for file in files for kind in file["kinds"]}:
        cells = [file["kinds"].get(kind) for file in files]
        rows.append([kind, *("–" if cell is None else _held(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _held(cell: dict[str, Any]) -> str:
    broken = ", ".join(f"{number} {verdict}" for verdict, number in cell["broken"].items())
    return f"{cell['held']} of {cell['cases']}" + (f" ({broken})" if broken else "")


class _Line:
    """What is said of each case: a line if it did not hold, and how many there were, on a terminal all the time."""

    def __init__(self, kind: str) -> None:
        self._kind, self._number = kind, 0

    def __call__(self, name: str, verdict: str) -> None:
        self._number += 1
        if verdict != HELD:
            print(f"{_START}  {self._kind}: {name}: {verdict}", flush=True)
        if _START:
            print(f"{_START}  {self._kind}: {self._number}", end="", flush=True)
        elif self._number % 25 == 0:
            print(f"  {self._kind}: {self._number} played", flush=True)


def _row(tally: Tally) -> str:
    broken = ", ".join(f"{len(names)} {verdict}" for verdict, names in sorted(tally.broken.items()))
    total, held = tally.verdicts.total(), tally.verdicts[HELD]
    return f"{tally.kind:24} {held:5} of {total:5} held  {tally.seconds:6.0f} s  {broken}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
