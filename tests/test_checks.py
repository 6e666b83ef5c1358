"""The checks of options: what passes, and the one line of what does not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnmr import options as checks
from gnmr.errors import UserError, as_user_error

NO_NUMBERS = [None, True, "3", math.nan, math.inf, -math.inf]


@given(st.integers() | st.floats() | st.booleans() | st.none() | st.text())
def test_a_value_passes_where_it_is_right(value: object) -> None:
    number = type(value) in (int, float) and -math.inf < value < math.inf
    for sound, check in (
        (number and value > 0, lambda: checks.positive(x=value)),
        (number and 0 <= value < 1, lambda: checks.fraction(x=value)),
        (number and -2 <= value <= 7, lambda: checks.within(-2, 7, x=value)),
        (type(value) is int and value >= 3, lambda: checks.whole_number(3, x=value)),
        (value in ("a", "b"), lambda: checks.one_of(("a", "b"), x=value)),
    ):
        if sound:
            check()
        else:
            with pytest.raises(ValueError, match=r"^x="):
                check()


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_null_passes_where_it_may(value: object) -> None:
    for check in (checks.positive, checks.whole_number, lambda **options: checks.within(0, 1, **options)):
        if value is None:
            check(or_null=True, x=value)
        else:
            with pytest.raises(ValueError, match=r"or null$"):
                check(or_null=True, x=value)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ValueError, match=r"^x=a{500}\.\.\. \(600 characters\): must be one of b$"):
        checks.one_of(("b",), x="a" * 600)


def test_a_mistake_begins_with_the_whole_key() -> None:
    @as_user_error("training.")
    def check(steps: int) -> None:
        checks.whole_number(steps=steps)

    check(1)
    with pytest.raises(UserError, match=r"^training\.steps=0: must be a whole number of at least 1$"):
        check(0)
    with pytest.raises(UserError, match=r"^a\.b$"), as_user_error("c."):
        raise UserError("a.b")
