"""Values to JSON and back: what PostgreSQL can hold, and what arrives as it was sent."""

import math
import re
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import msgspec

from windlass.model.errors import PayloadError
from windlass.model.limits import DEEPEST_VALUE, shown

# An escaped NUL that is not itself the tail of an escaped backslash. PostgreSQL cannot hold it.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_LOOK_DOWN = 20  # levels to which the place of an error is looked for
_TOO_DEEP = (
    f"it is nested deeper than {DEEPEST_VALUE} levels; flatten it, or store the data elsewhere and "
    "pass a reference"
)
_TOO_LONG = "a number has more digits than can be read back; pass it as a string"
_LONG_NUMBER = re.compile(rb"\d{300}")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def _encode_other(value: Any) -> Any:
    if hasattr(value, "model_dump"):  # a Pydantic model, without importing Pydantic
        return _dumped(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be carried as JSON")


def _dumped(model: Any) -> Any:
    # By the names and with the fields that `model_validate` reads.
    return model.model_dump(mode="json", by_alias=True, round_trip=True)


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
        said = error.errors(include_url=False, include_context=False, include_input=False)  # type: ignore[attr-defined]  # of Pydantic's
        return "; ".join(": ".join((*map(str, one["loc"]), one["msg"])) for one in said)
    except Exception:  # noqa: BLE001 - of another library that has the same methods
        return str(error)


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
    if (fault := _unreadable(encoded)) is not None:
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
    if _LONG_NUMBER.search(encoded):
        try:
            msgspec.json.decode(encoded)
        except msgspec.DecodeError:
            return _TOO_LONG
    return None


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
        encoded = msgspec.json.encode(value, enc_hook=_encode_other)
    except UnicodeEncodeError as error:
        raise ValueError(
            "a string holds half of a surrogate pair, which UTF-8 cannot carry"
        ) from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error  # or nested in itself
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
        parts = _parts(place, value)
    except Exception:  # noqa: BLE001 - of the value's own
        return None
    for part in parts:
        try:
            _to_json(part[1])
        except Exception:  # noqa: BLE001 - of ours or of the value's own
            return part
    return None


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
    waiting: list[tuple[_Place | None, Any]] = [(None, value)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, float):
            if not math.isfinite(one):
                at = "" if place is None else f" at {place}"
                return f"{one}{at} is no number of JSON; return None or a string for it"
        elif isinstance(one, dict):
            for key in one:
                if not isinstance(key, str):
                    return f"key {shown(key)} of {place or 'the dict'} is no string; use strings"
        waiting += _parts(place, one)
    return None


def _parts(place: _Place | None, value: Any) -> list[tuple[_Place, Any]]:
    """What a value is made of, each with its place."""
    if isinstance(value, dict):
        return [(_Place(place, "[{}]", key), item) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(_Place(place, "[{}]", index), item) for index, item in enumerate(value)]
    if isinstance(value, str | int | float | None):
        return []
    return [(_Place(place, "{}", name), item) for name, item in _fields(value)]


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a record, of whichever kind the encoder knows."""
    if isinstance(value, msgspec.Struct):
        names = list(value.__struct_fields__)
    elif is_dataclass(value):
        names = [field.name for field in fields(value)]
    elif hasattr(value, "__attrs_attrs__"):
        names = [attribute.name for attribute in value.__attrs_attrs__]
    elif hasattr(value, "model_dump"):
        return [("", _dumped(value))]
    else:
        names = []
    return [(f".{name}", getattr(value, name)) for name in names]


def decode_json(text: str) -> Any:
    """Decode JSON into plain values."""
    return msgspec.json.decode(text)
