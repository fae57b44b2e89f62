"""Values to JSON and back: what PostgreSQL can hold, and what arrives as it was sent."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import msgspec

from windlass.model.errors import PayloadError
from windlass.model.limits import DEEPEST_VALUE, shown

# An escaped NUL that is not itself the tail of an escaped backslash. PostgreSQL cannot hold it.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_LOOK_DOWN = 20  # levels to which the place of an error is looked for
_LOOK_AT = 2000  # parts among which one that contains itself is looked for
_DEEP = f"it is nested deeper than {DEEPEST_VALUE} levels"
_TOO_DEEP = f"{_DEEP}; flatten it, or store the data elsewhere and pass a reference"
_ENDLESS = f"{_DEEP}, for a part of it contains itself; leave that out"
_TOO_LONG = "a number has more digits than can be read back; pass it as a string"
_LONG_NUMBER = re.compile(rb"\d{300}")
_PERHAPS_LONG = re.compile(rb"\d{10}")  # in every thirtieth byte: far cheaper, and misses none
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_SHORT = min(DEEPEST_VALUE, 300)  # bytes in which nothing can be too deep, and no number too long


class _TooDeepError(ValueError):
    """A value whose levels do not end before the encoder gives up."""


def _encode_other(value: Any) -> Any:
    if _is_model(value):
        return _dumped(value)
    plain = _plain(value)
    if plain is None:
        raise TypeError(f"a value of type {type(value).__name__} cannot be carried as JSON")
    return plain


def _plain(value: Any) -> str | int | float | None:
    """The text or number that a value is besides what its own class adds, if it is one."""
    if _is(value, Enum):
        return None  # its value stands for it, which the encoder knows how to carry, or refuses
    if _is(value, str):
        return str.__str__(value)
    if _is(value, int):
        return int.__index__(value)
    return float.__float__(value) if _is(value, float) else None


def _is(value: Any, *kinds: type) -> bool:
    # By its class itself: a mock says to `isinstance` that it is whatever it stands for.
    return issubclass(type(value), kinds)


def _is_model(value: Any) -> bool:
    """Whether a value is a Pydantic model, or of a class that dumps itself as one does.

    An object that answers to every name, as mocks do, is none: its class does not define the method.
    """
    for kind in type(value).__mro__:
        if "model_dump" in kind.__dict__:
            return isinstance(kind.__dict__["model_dump"], FunctionType)
    return False


def _dumped(model: Any) -> Any:
    # By the names and with the fields that `model_validate` reads. What does not fit is found when it is
    # read back; Pydantic's warnings would show it.
    plain = model.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
    if _is_model(plain):
        raise TypeError(f"model_dump of a value of type {type(model).__name__} gives a model again")
    return plain


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_other)


def decode_other(kind: type, value: Any) -> Any:
    """Read what msgspec itself does not know: a Pydantic model."""
    validate = getattr(kind, "model_validate", None)
    if validate is not None:
        try:
            return validate(value)
        except ValueError as error:
            raise ValueError(_told_by(error)) from error
    if isinstance(value, kind):
        return value
    raise TypeError(f"{kind.__name__} cannot be read from JSON")


def _told_by(error: ValueError) -> str:
    """What a Pydantic model says of a value, without the value."""
    try:
        said = error.errors(include_url=False, include_context=True, include_input=False)  # type: ignore[attr-defined]  # of Pydantic's
        return "; ".join(map(_without_value, said))
    except Exception:  # noqa: BLE001 - of another library that has the same methods
        return str(error)


def _without_value(said: dict[str, Any]) -> str:
    place, message = [str(step) for step in said["loc"]], said["msg"]
    if place[-1:] == ["[key]"]:
        del place[-2:]  # the key is what does not fit
        place.append("[key]")
    if said["type"] == "union_tag_invalid":
        message = f"Input tag should be one of {said['ctx']['expected_tags']}"
    elif said["type"].endswith("_parsing"):
        message = message.partition(",")[0]  # then comes which character it is
    return ": ".join((*place, message))


def encode_json(value: Any, *, what: str, max_bytes: int) -> str:
    """Encode a value as JSON that PostgreSQL can hold, or raise `PayloadError`.

    Numbers that are not finite and keys that are no strings, which the encoder would alter, are
    refused.
    """
    text = _encode(value, what=what, max_bytes=max_bytes)
    # A number that is not finite became null. Most results have neither that nor a key, and most of
    # the others come back equal: only the rest is looked at piece by piece.
    if ("{" in text or "null" in text) and not _comes_back(text, value):
        try:
            altered = _altered(value)
        except Exception as error:
            raise PayloadError(f"{what}: {error}") from error
        if altered is not None:
            raise PayloadError(f"{what}: {altered}")
    return text


def _comes_back(text: str, value: Any) -> bool:
    try:
        return bool(decode_json(text) == value)
    except Exception:  # noqa: BLE001 - a value may bring an equality of its own
        return False


def _encode(value: Any, *, what: str, max_bytes: int) -> str:
    try:
        encoded = _to_json(value)
    except _TooDeepError as error:
        raise PayloadError(f"{what}: {error}") from error  # every part of it is too deep as well
    except Exception as error:
        # Of ours or of the value's own: it may bring code with it.
        raise PayloadError(f"{what}: {error}{_where(value)}") from error
    size = len(encoded)
    if size > max_bytes:
        del encoded  # whoever gets the error would keep it
        raise PayloadError(
            f"{what}: {size} bytes are more than the limit of {max_bytes}; "
            "store the data elsewhere and pass a reference"
        )
    if size > _SHORT and (fault := _unreadable(encoded)) is not None:
        raise PayloadError(f"{what}: {fault}")
    return encoded.decode()


def _unreadable(encoded: bytes) -> str | None:
    """Say why JSON that was written could not be read back, by whoever looks at the task."""
    if encoded.count(b"[") + encoded.count(b"{") > DEEPEST_VALUE:
        brackets = _STRING.sub(b"", encoded).translate(_TO_SQUARE, _NO_BRACKET)
        for _ in range(DEEPEST_VALUE):
            brackets = brackets.replace(b"[]", b"")  # the innermost level
        if brackets:
            return _TOO_DEEP
    if _PERHAPS_LONG.search(encoded[::30]) and _LONG_NUMBER.search(encoded):
        try:
            msgspec.json.decode(encoded)
        except msgspec.DecodeError:
            return _TOO_LONG
    return None


def encode_short(value: Any, max_bytes: int) -> bytes:
    """Encode a value that is short enough for little to be wrong with it, or return nothing."""
    encoded = _ENCODER.encode(value)
    if len(encoded) > _SHORT or len(encoded) > max_bytes or b"\\u0000" in encoded:
        return b""
    return encoded


def encode_lines(values: Sequence[Any], max_bytes: int) -> bytes:
    """Encode values, each in a line, or return nothing: one is too large, or may hold a NUL."""
    lines = _ENCODER.encode_lines(values)
    longest = max(map(len, lines.split(b"\n")))
    return b"" if longest > max_bytes or b"\\u0000" in lines else lines


def encode_arguments(arguments: dict[str, Any], *, what: str, max_bytes: int) -> str:
    """Encode arguments by name, or raise `PayloadError`, which names the one that does not fit."""
    try:
        return _encode(arguments, what=what, max_bytes=max_bytes)
    except PayloadError:
        for name, value in arguments.items():  # one that fails by itself is named
            _encode(value, what=f"{what}: argument {shown(name)}", max_bytes=max_bytes)
        raise


def _to_json(value: Any) -> bytes:
    try:
        encoded = _ENCODER.encode(value)
    except UnicodeEncodeError as error:
        raise ValueError(
            "a string holds half of a surrogate pair, which UTF-8 cannot carry"
        ) from error
    except RecursionError as error:
        raise _TooDeepError(_ENDLESS if _contains_itself(value) else _TOO_DEEP) from error
    except ValueError as error:
        if "integer string conversion" in str(error):  # of the interpreter, and not of the value
            raise ValueError(_TOO_LONG) from error
        raise
    if b"\\u0000" in encoded and _NUL.search(encoded):
        raise ValueError("a string holds the NUL character, which PostgreSQL refuses")
    return encoded


def _where(value: Any) -> str:
    """Say where in a value that cannot be carried the fault lies, if it is not all of it."""
    place: _Place | None = None
    for _ in range(_LOOK_DOWN):
        fault = _fault(place, value)
        if fault is None:
            return f", at {place}" if str(place or "") else ""
        place, value = fault
    return ""


def _fault(place: "_Place | None", value: Any) -> "tuple[_Place, Any] | None":
    try:
        return next((part for part in _parts(place, value) if _fails(part[1])), None)
    except Exception:  # noqa: BLE001 - of the value's own
        return None


def _fails(value: Any) -> bool:
    try:
        _to_json(value)
    except Exception:  # noqa: BLE001 - of ours or of the value's own
        return True
    return False


def _contains_itself(value: Any) -> bool:
    """Whether a value, as far as it is looked at, contains itself or a part that does."""
    inside = {id(value): _parts(None, value)}  # from the outermost to where the look is
    for _ in range(_LOOK_AT):
        part = next(next(reversed(inside.values())), None)
        if part is None:
            inside.popitem()
            if not inside:
                break
        elif id(part[1]) in inside:
            return True
        else:
            inside[id(part[1])] = _parts(None, part[1])
    return False


class _Place(NamedTuple):
    """Where in a value: a chain from the inside out, written down only if it is asked for."""

    outer: "_Place | None"
    step: str
    key: Any

    def __str__(self) -> str:
        place: _Place | None = self
        steps = []
        while place is not None:
            steps.append(place.step.format(place.key if place.step == "{}" else shown(place.key)))
            place = place.outer
        return "".join(reversed(steps))


def _altered(value: Any) -> str | None:
    """Say what in a value became something else as JSON, and where."""
    for place, one in _within(value):
        if _is(one, float) and not math.isfinite(one):
            return f"{_no_number(place, one)}; return None or a string for it"
        if _is(one, dict):
            for key in one:
                if not _is(key, str):
                    return f"key {shown(key)} of {place or 'the dict'} is no string; use strings"
    return None


def no_number(value: Any) -> str | None:
    """Say which number in a value, if one, is none of JSON, and where."""
    for place, one in _within(value):
        if _is(one, float, Decimal) and not math.isfinite(one):
            return _no_number(place, one)
    return None


def _no_number(place: "_Place | None", value: float | Decimal) -> str:
    named = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return f"{named}{'' if place is None else f' at {place}'} is no number of JSON"


def _within(value: Any) -> "Iterator[tuple[_Place | None, Any]]":
    """A value and all that it is made of, each with its place."""
    waiting: list[tuple[_Place | None, Any]] = [(None, value)]
    while waiting:
        place, one = waiting.pop()
        yield place, one
        waiting += _parts(place, one)


def _parts(place: _Place | None, value: Any) -> Iterator[tuple[_Place, Any]]:
    """What a value is made of, each with its place."""
    if _is(value, dict):
        for key, item in value.items():
            yield _Place(place, "[{}]", key), item
    elif _is(value, list, tuple, set, frozenset):
        for index, item in enumerate(value):
            yield _Place(place, "[{}]", index), item
    elif value is not None and not _is(value, str, int, float):
        for name, item in _fields(value):
            yield _Place(place, "{}", name), item


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a record, of whichever kind the encoder knows."""
    kind = type(value)
    if issubclass(kind, msgspec.Struct):
        names = list(kind.__struct_fields__)
    elif is_dataclass(kind):
        names = [field.name for field in fields(kind)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [attribute.name for attribute in kind.__attrs_attrs__]
    elif _is_model(value):
        return [("", _dumped(value))]
    else:
        names = []
    return [(f".{name}", getattr(value, name)) for name in names]


def decode_json(text: str) -> Any:
    """Decode JSON into plain values."""
    return msgspec.json.decode(text)
