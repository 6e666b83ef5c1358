"""One look for all HTML pages of the package: a page extends `base.html.j2`, loads nothing, and opens from disk.

The base has the header, the styles, dark mode, phones and print; `parts.html.j2` has the summary that stands first on
every page. `findings.html.j2` is a whole page of them with tables (`gnmr audit`, `gnmr blame`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gnmr.errors import printable

_FOLDER = Path(__file__).parent


class Figure(NamedTuple):
    """A tile: a number, its name, and what it refers to."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table of a page of findings; the first cell of a row is its name."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    lead: str = ""
    folded: bool = False
    """True if the table is opened by a click on its title."""


def render(template: str, folder: Path = _FOLDER, filters: tuple[Callable[..., str], ...] = (), **values: Any) -> str:
    """Return the page.

    Args:
        template: name of the template.
        folder: the folder with the template.
        filters: functions that the template uses as filters, by their names.
        values: the variables of the template.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([folder, _FOLDER])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {function.__name__: function for function in (printable, *filters)}
    return environment.get_template(template).render(values)


def findings_page(
    command: str,
    title: str,
    card: dict[str, str],
    verdict: str,
    figures: list[Figure],
    tables: list[PageTable],
    origin: str,
) -> str:
    """Return a page of findings.

    Args:
        command: the command of gnmr that found them.
        title: what it examined, for the title of the window.
        card: subject, model and machine, by name; empty texts are left out.
        verdict: the verdict in one sentence.
        figures: the tiles.
        tables: the tables, the most important one first.
        origin: the command line that makes the page.
    """
    texts = [(name, text) for name, text in card.items() if text]
    values = {"command": command, "title": f"gnmr {command}: {title}", "card": texts, "verdict": verdict}
    return render("findings.html.j2", **values, figures=figures, tables=tables, origin=origin)
