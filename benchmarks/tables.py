"""Pages of docs/results and numbers of other texts that come from benchmarks/results: python benchmarks/tables.py
writes them.

    python benchmarks/tables.py [RESULTS [DOCS]]    from another folder (benchmarks/evidence.py fills one)

A number in a text is <!--:NAME-->, and behind it ?<!--/-->; `pages.numbers` has the names. A page of which RESULTS has
no record is left out. tests/bench/test_tables.py fails where a committed page or number is not what the committed
figures give.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from pages import blame, compressed, divergence, fair, parallel, price, spend
from pages.figure import spend_figure
from pages.layout import ROOT, Results
from pages.numbers import TEXTS, filled, numbers

RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
FIGURE = ROOT / "docs" / "img" / "spend.svg"
PAGES: dict[str, Callable[[Results], str]] = {
    "price-truth.md": price.truth,
    "price-sampling.md": price.sampling,
    "price-atlas.md": price.atlas,
    "spend.md": spend.spend,
    "spend-table11.md": spend.table11,
    "spend-regimes.md": spend.regimes,
    "compressed.md": compressed.compressed,
    "blame.md": blame.blame,
    "divergence.md": divergence.divergence,
    "parallel.md": parallel.parallel,
    "fair.md": fair.fair,
}


def made(results: Results) -> dict[str, str]:
    """Text by file: the pages of which there are records."""
    found = {}
    for name, page in PAGES.items():
        with contextlib.suppress(FileNotFoundError):
            found[name] = page(results)
    return found


def main(words: list[str]) -> None:
    """Writes pages and figure; without words, the numbers of texts too."""
    results = Results(Path(words[0]) if words else RESULTS)
    docs = Path(words[-1]) if words else DOCS
    docs.mkdir(parents=True, exist_ok=True)
    for name, text in made(results).items():
        (docs / name).write_text(text)
    with contextlib.suppress(FileNotFoundError):
        (docs / FIGURE.name if words else FIGURE).write_bytes(spend_figure(results))
    if not words:
        known = numbers(results)
        for page in TEXTS:
            page.write_text(filled(page.read_text(), known))


if __name__ == "__main__":
    main(sys.argv[1:])
