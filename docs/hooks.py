"""What the site has that the pages do not: called by mkdocs (mkdocs.yml, `hooks`).

    links         those that leave docs/ lead to files of the repository: checked, and shown as text
    <!-- help: COMMAND -->     what `gnmr COMMAND --help` says
    <!-- fields: NAME -->      a table of gnmr.records.schema.NAME
    <!-- file: PATH -->        a file of the repository

A page reads well with none of this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What is generated put in, links made right."""
    here = Path(page.file.src_uri).parent
    markdown = re.sub(r"<!-- help: (\w*) -->", lambda found: _help(found[1]), markdown)
    markdown = re.sub(r"<!-- fields: (\w+) -->", lambda found: _fields(found[1]), markdown)
    markdown = re.sub(r"<!-- file: (\S+) -->", lambda found: _file(found[1]), markdown)
    markdown = re.sub(r"<!--[=/:].*?-->", "", markdown)  # marks of numbers, which would end a list
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", lambda found: _link(found, here), markdown)


def _link(found: re.Match[str], here: Path) -> str:
    """The link as it is, or its text where it leads to a file that is no page; ValueError where there is none."""
    text, target = found[1], found[2].partition("#")[0]
    if not target or "://" in target:
        return found[0]
    path = Path(os.path.normpath(DOCS / here / target))
    if path.is_relative_to(DOCS):
        return found[0]
    if not path.exists():
        raise ValueError(f"docs/{here}: {found[0]}: there is no such file")
    name = path.relative_to(ROOT).as_posix()
    return text if name in text else f"{text} (`{name}`)"


def _help(command: str) -> str:
    words = [sys.executable, "-m", "gnmr", *([command] if command else []), "--help"]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT) + ":" + os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return f"```text\n{done.stdout.rstrip()}\n```"


def _fields(name: str) -> str:
    from gnmr.records import schema

    rows: dict[str, str] = getattr(schema, name)
    return "\n".join(["| field | meaning |", "|---|---|", *(f"| `{key}` | {_cell(of)} |" for key, of in rows.items())])


def _cell(text: str) -> str:
    return escape(text, quote=False).replace("|", "\\|")


def _file(name: str) -> str:
    language = {"yaml": "yaml", "py": "python"}.get(name.rpartition(".")[2], "text")
    return f"```{language}\n{(ROOT / name).read_text().rstrip()}\n```"


def on_post_page(output: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Nothing that was to be generated is left."""
    for word in ("help", "fields", "file"):
        assert f"<!-- {word}" not in output, f"{page.file.src_uri}: <!-- {word} was not filled in"
    return output
