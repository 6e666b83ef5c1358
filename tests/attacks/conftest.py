from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import Arena


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """The program under attack."""
    with Arena(tmp_path_factory.mktemp("attacks")) as made:
        yield made
