"""What a handler returns is stored as it is, or refused by name."""

from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest

from windlass import PayloadError
from windlass.encoding import decode_json, encode_json

NAN, INFINITY = float("nan"), float("inf")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Loose:
    value: Any


class Packed(msgspec.Struct):
    value: Any


class Modelled:
    """As a Pydantic model dumps itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def model_dump(self, *, mode: str, **_: Any) -> Any:
        assert mode == "json"
        return {"value": self.value}


class Colour(Enum):
    RED = 1


def encode(value: Any) -> str:
    return encode_json(value, what="result of task 'measure'", max_bytes=10_000)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (NAN, "nan is no number"),
        (-INFINITY, "-inf is no number"),
        ([1.0, NAN], r"nan at \[1\]"),
        ({"a": [None, INFINITY]}, r"inf at \['a'\]\[1\]"),
        ({"a": {NAN}}, r"nan at \['a'\]"),
        (Pair(1, NAN), r"nan at \[1\]"),
        (Loose({"a": NAN}), r"nan at \.value\['a'\]"),
        ([Packed(NAN)], r"nan at \[0\]\.value"),
        (Modelled(NAN), r"nan at \['value'\]"),
        ({1: "a"}, "key 1 of the dict"),
        ([{"a": {2.5: 1}}], r"key 2\.5 of \[0\]\['a'\]"),
        ({UUID(int=1): 1}, "key UUID"),
        ({date(2026, 1, 2): 1}, "key datetime.date"),
        ({Colour.RED: 1}, "key <Colour.RED"),
        ({b"x": 1}, "key b'x'"),
        (Loose({1: 2}), r"key 1 of \.value"),
    ],
)
def test_what_json_would_alter_is_refused_with_its_place(value: Any, named: str) -> None:
    with pytest.raises(PayloadError, match=f"result of task 'measure': .*{named}"):
        encode(value)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ([None, {"null": None}], [None, {"null": None}]),
        ({"a": {"b": [1, 2.5, True, "x"]}}, {"a": {"b": [1, 2.5, True, "x"]}}),
        (Loose(Packed((1, 2))), {"value": {"value": [1, 2]}}),
        (Modelled({"a": None}), {"value": {"a": None}}),
        (
            {"at": datetime(2026, 1, 2, tzinfo=UTC), "id": UUID(int=1), "colour": Colour.RED},
            {
                "at": "2026-01-02T00:00:00Z",
                "id": "00000000-0000-0000-0000-000000000001",
                "colour": 1,
            },
        ),
    ],
)
def test_everything_else_is_stored_as_json(value: Any, stored: Any) -> None:
    assert decode_json(encode(value)) == stored


def test_a_deep_result_is_stored_or_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(199):
        deep = {"a": deep}

    assert encode(deep).startswith('{"a":')
    for levels in (1, 5000):
        for _ in range(levels):
            deep = {"a": deep}
        with pytest.raises(PayloadError, match="nested deeper than 200 levels"):
            encode(deep)
    with pytest.raises(PayloadError, match="nested deeper than 200 levels"):
        encode(["]}\\" * 300, nested(200)])


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_a_record_that_raises_when_looked_at_again_is_refused() -> None:
    class Once(Modelled):
        def model_dump(self, *, mode: str, **_: Any) -> Any:
            self.value, now = LookupError("only once"), self.value
            if isinstance(now, Exception):
                raise now
            return {"value": now, "mode": mode}

    with pytest.raises(PayloadError, match="only once"):
        encode(Once(1))
