from __future__ import annotations

import pytest

from .harness import Arena, Kind, attack
from .kills import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks")]  # one arena, whose start takes seconds


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "_"))
def test_a_disturbed_run_ends_as_if_nothing_had_been(kind: Kind, arena: Arena) -> None:
    assert attack(kind, arena, number=kind.sample).broken == {}
