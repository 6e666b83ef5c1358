"""What pages are made of: the records of a folder, rows of a table, and where figures come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Results:
    """A folder of records: benchmarks/results, or what benchmarks/evidence.py fills."""

    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        """A record, and as `file` its name."""
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found | {"file": name}

    def there(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Those of these records that are there."""
        return [self.read(name) for name in names if (self.folder / name).exists()]

    def records(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Those that are there. FileNotFoundError where none is."""
        found = self.there(names)
        if not found:
            raise FileNotFoundError(f"{self.folder}: has none of {', '.join(names) or 'these records'}")
        return found

    def figures(self, name: str) -> dict[str, dict[str, Any]]:
        """Of a record, by name."""
        return by_name(self.read(name))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Rows of a jsonl file."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def beside(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows that a record was made of."""
        return self.lines(str(Path(record["file"]).with_suffix(".jsonl")))


def by_name(*records: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of records."""
    return {figure["name"]: figure for record in records for figure in record["figures"]}


def table_head(names: Sequence[str]) -> list[str]:
    return [table_row(names), table_row(["---", *["---:"] * (len(names) - 1)])]


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def listed(words: Sequence[str]) -> str:
    """a, b and c; of no word none."""
    *first, last = words or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def spends(figure: dict[str, Any]) -> float:
    """Of an arm's figure in `gnmr bench spend` the share of the arithmetic, by its note: "spends 9.9%"."""
    return float(figure["note"].split()[1].rstrip("%,:")) / 100


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def origin(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "## Where it comes from"
    yield ""
    for one in records:
        machine = one["machine"]
        cpu = f"{machine['cpu']}{', products in FP32' if machine.get('products') == 'in FP32' else ''}"
        yield f"- benchmarks/results/{one['file']}: commit {one['commit']}, {cpu}, PyTorch {one['torch']}:"
        note = f": {one['note']}" if "note" in one else ""
        yield f"  `{one['command']}`{note}"
    yield ""
