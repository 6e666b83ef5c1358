"""Names of a package that are loaded on first use, so that importing it costs little."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def loader(package: str, homes: dict[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """A `__getattr__` for the package's `__init__.py`; `homes`: {module below it: names that it holds}."""
    where = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{where[name]}"), name)

    return load
