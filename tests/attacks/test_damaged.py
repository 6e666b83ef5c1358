from __future__ import annotations

import pytest

from .damaged import KINDS
from .harness import Arena, Kind, attack

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks")]  # one arena, whose start takes seconds


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "_"))
def test_damage_gives_no_other_numbers_unsaid(kind: Kind, arena: Arena) -> None:
    assert attack(kind, arena, number=kind.sample).broken == {}
