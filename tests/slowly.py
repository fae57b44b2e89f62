"""Leaves some cases of a test to `make slow`: places beyond those that show the rule."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def slowly(cases: Iterable[T], is_slow: Callable[[T], object]) -> list[Any]:
    """Return the cases, those marked that take long for what they add."""
    return [pytest.param(one, marks=pytest.mark.slow) if is_slow(one) else one for one in cases]
