"""The extras of pyproject.toml: optional packages."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that installs an extra. gnmr is on no package index, so it needs the checkout."""
    return f"pip install -e '.[{extra}]' in gnmr's checkout"
