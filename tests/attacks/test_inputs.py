from __future__ import annotations

import pytest

from .harness import Arena, Kind, attack
from .inputs import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks")]  # one arena, whose start takes seconds


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "_"))
def test_a_mistake_is_told_in_one_line(kind: Kind, arena: Arena) -> None:
    assert attack(kind, arena, number=kind.sample).broken == {}
