"""Calls that are encoded together become what each becomes by itself, or are left to go one by one."""

import itertools
import math
from datetime import date
from enum import IntEnum
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass import PayloadError
from windlass.codec import ArgumentCodec, Arguments

LIMIT = 1000  # bytes


class Size(IntEnum):
    SMALL = 1


def free(a: Any, b: Any = 1, *, c: Any = 2) -> None: ...
def typed(a: int, b: str | None = None, *, c: float = 0.0) -> None: ...
def narrow(a: Size, b: date | None = None, *, c: UUID | bool = True) -> None: ...
def limited(a: Annotated[int, msgspec.Meta(ge=0)], b: bool = False, *, c: bytes = b"") -> None: ...
def empty() -> None: ...


FUNCTIONS = [free, typed, narrow, limited, empty]


def one_by_one(codec: ArgumentCodec, calls: list[Arguments]) -> list[str | PayloadError]:
    texts: list[str | PayloadError] = []
    for args, kwargs in calls:
        try:
            texts.append(codec.encode(args, kwargs, max_bytes=LIMIT))
        except PayloadError as refused:
            texts.append(refused)
    return texts


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (typed, [((), {"a": n}) for n in range(3)]),
        (typed, [((n, f"line\n\u2028\x85 {n}"), {"c": n / 7}) for n in range(3)]),
        (typed, [((), {"c": 0.5, "b": None, "a": n}) for n in range(3)]),
        (free, [((value,), {}) for value in (1, True, None, "ü", 0.1, 2**70, "\\u00001"[:5])]),
        (free, [((), {"a": "x" * 900})] * 2),
        (empty, [((), {})] * 3),
    ],
)
def test_calls_of_plain_values_are_encoded_together(function: Any, calls: list[Arguments]) -> None:
    codec = ArgumentCodec("resize", function)

    assert codec.encode_alike(calls, LIMIT) == one_by_one(codec, calls)


@pytest.mark.parametrize(
    ("function", "odd"),
    [
        (typed, ((), {"a": 1, "b": "two"})),  # another shape
        (typed, ((), {})),  # misses one
        (typed, ((), {"x": 1})),
        (typed, ((), {"a": "1"})),
        (typed, ((), {"a": True})),
        (typed, ((), {"a": 1.0})),
        (free, ((), {"a": math.nan})),
        (free, ((), {"a": [1]})),
        (free, ((), {"a": Size.SMALL})),
        (free, ((), {"a": "\x00"})),
        (free, ((), {"a": "\ud800"})),
        (free, ((), {"a": "x" * LIMIT})),
        (free, ((), {"a": 10**5000})),
        (limited, ((), {"a": -1})),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_call_that_is_not_plain_lets_all_go_one_by_one(
    function: Any, odd: Arguments, place: int
) -> None:
    calls: list[Arguments] = [((), {"a": n}) for n in range(2)]
    calls.insert(place, odd)

    assert ArgumentCodec("resize", function).encode_alike(calls, LIMIT) is None


@pytest.mark.parametrize("given", [{"b": "2026-01-01"}, {"c": str(UUID(int=1))}, {"b": None}])
def test_what_would_arrive_as_something_else_is_not_taken_for_plain(given: Any) -> None:
    codec = ArgumentCodec("resize", narrow)

    assert codec.encode_alike([((), {"a": 1, **given})] * 2, LIMIT) is None


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_limit_below_the_smallest_payload_is_kept(function: Any, limit: int) -> None:
    together = ArgumentCodec("resize", function).encode_alike([((), {})] * 2, limit)

    assert together == (["{}", "{}"] if limit == 2 and function is empty else None)


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2)
    | st.floats()
    | st.text('ab"\\\n\u2028ü0', max_size=5)
    | st.sampled_from(["2026-01-01", str(UUID(int=1)), "\x00", "\ud800", "x", [1], Size.SMALL])
)
shapes = st.sampled_from(
    [
        (number, names)
        for number in range(3)
        for size in range(3)
        for names in itertools.permutations("abc", size)
    ]
)


@st.composite
def alike(draw: st.DrawFn) -> list[Arguments]:
    number, names = draw(shapes)
    return [
        (
            tuple(draw(values) for _ in range(number)),
            {name: draw(values) for name in names},
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(deadline=None)  # the machine may be busy
@given(calls=alike())
def test_whatever_is_encoded_together_is_what_each_becomes_by_itself(
    function: Any, calls: list[Arguments]
) -> None:
    codec = ArgumentCodec("resize", function)

    together = codec.encode_alike(calls, LIMIT)

    assert together is None or together == one_by_one(codec, calls)


def test_long_texts_are_encoded_one_by_one() -> None:
    """There are several copies of what is encoded together."""
    codec = ArgumentCodec("resize", typed)
    calls: list[Arguments] = [((1, "x" * 50_001), {})] * 4

    assert codec.encode_alike(calls, 10**6) is None
    assert codec.encode_alike(calls[:3], 10**6) is not None
