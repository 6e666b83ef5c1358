"""The extras of pyproject.toml: packages that a part of gnmr needs and the rest does not."""

from __future__ import annotations


def install(extra: str) -> str:
    """What brings them. gnmr is on no package index, so `pip install gnmr[...]` would find nothing."""
    return f"pip install -e '.[{extra}]' in gnmr's checkout"
