"""Arguments to JSON and back, checked on both ways."""

import inspect
import math
import re
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import msgspec

from windlass.context import Context
from windlass.model.errors import ConfigurationError, PayloadError
from windlass.model.limits import shown

# An escaped NUL that is not itself the tail of an escaped backslash. PostgreSQL cannot hold it.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_DEEPEST = 20  # levels to which the place of an error is looked for


def _encode_other(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is not None:  # a Pydantic model, without importing Pydantic
        return dump(mode="json")
    raise TypeError(f"a value of type {type(value).__name__} cannot be carried as JSON")


def _decode_other(kind: type, value: Any) -> Any:
    validate = getattr(kind, "model_validate", None)
    if validate is not None:
        return validate(value)
    if isinstance(value, kind):
        return value
    raise TypeError(f"{kind.__name__} cannot be read from JSON")


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
    if len(encoded) > max_bytes:
        raise PayloadError(
            f"{what}: {len(encoded)} bytes are more than the limit of {max_bytes}; "
            "store the data elsewhere and pass a reference"
        )
    return encoded.decode()


def _encode_arguments(arguments: dict[str, Any], *, what: str, max_bytes: int) -> str:
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
    if b"\\u0000" in encoded and _NUL.search(encoded):
        raise ValueError("a string holds the NUL character, which PostgreSQL refuses")
    return encoded


def _where(value: Any) -> str:
    """Say where in a value that cannot be carried the fault lies, if it is not all of it."""
    place: _Place | None = None
    for _ in range(_DEEPEST):
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
        return [("", value.model_dump(mode="json"))]
    else:
        names = []
    return [(f".{name}", getattr(value, name)) for name in names]


def decode_json(text: str) -> Any:
    """Decode JSON into plain values."""
    return msgspec.json.decode(text)


class ArgumentCodec:
    """The arguments of one function as a JSON object, by name."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        try:
            signature = inspect.signature(function)
        except ValueError as error:  # some that are built in say nothing of their parameters
            raise ConfigurationError(
                f"task '{name}': {error}; write a function around it"
            ) from None
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            raise ConfigurationError(
                f"task '{name}': an annotation cannot be resolved: {error}; "
                "import what it names at the top of the module"
            ) from error
        parameters = []
        shape_fields: list[Any] = []
        self.context_name: str | None = None
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigurationError(
                    f"task '{name}': parameter '{parameter}' takes any number of arguments; "
                    "a payload has named ones, so name them"
                )
            if hints.get(parameter.name) in (Context, Context | None):
                if self.context_name is not None:
                    raise ConfigurationError(
                        f"task '{name}': '{self.context_name}' and '{parameter.name}' are both "
                        "annotated Context; leave one"
                    )
                self.context_name = parameter.name
                continue
            parameters.append(parameter)
            kind = hints.get(parameter.name, Any)
            shape_fields.append(
                (parameter.name, kind)
                if parameter.default is parameter.empty
                else (parameter.name, kind, msgspec.UNSET)
            )
        self._signature = signature.replace(parameters=parameters)
        self._positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        self._names = [p.name for p in parameters]
        try:
            shape = msgspec.defstruct(
                "Arguments", shape_fields, kw_only=True, forbid_unknown_fields=True
            )
            self._decoder = msgspec.json.Decoder(shape, dec_hook=_decode_other)
        except (TypeError, ValueError, NameError) as error:
            raise ConfigurationError(f"task '{name}': {error}") from error

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, max_bytes: int) -> str:
        """Bind a call and encode it; what would not arrive as it was sent is refused."""
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise PayloadError(f"task '{self._name}': {error}") from error
        return self.encode_named(bound, max_bytes=max_bytes)

    def encode_named(self, arguments: Any, *, max_bytes: int) -> str:
        """Encode arguments that already have their names."""
        what = f"task '{self._name}'"
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise PayloadError(f"{what}: the payload is a {kind}; give a dict of arguments")
        text = _encode_arguments(arguments, what=what, max_bytes=max_bytes)
        try:
            arrived = self._decoder.decode(text)
        except Exception as error:
            raise PayloadError(f"{what}: {error}") from error
        for name, sent in arguments.items():
            if not _arrives(sent, getattr(arrived, name)):
                raise PayloadError(
                    f"{what}: argument '{name}' ({type(sent).__name__}) would not arrive as it was "
                    "sent; annotate the parameter with its type, or pass what JSON can carry"
                )
        return text

    def decode(self, payload: str) -> dict[str, Any]:
        """Return the arguments for the handler, or raise `PayloadError`."""
        try:
            arrived = self._decoder.decode(payload)
        except Exception as error:
            # Of ours or of the parameter's own type: a handler that cannot be called has failed.
            raise PayloadError(f"task '{self._name}': the payload does not fit: {error}") from error
        return {
            name: value
            for name in self._names
            if (value := getattr(arrived, name)) is not msgspec.UNSET
        }

    def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call the function with decoded arguments."""
        if not self._positional:
            return function(**arguments)
        # One that was left out keeps its place: the next would be taken for it.
        first = [arguments.pop(one.name, one.default) for one in self._positional]
        return function(*first, **arguments)


def _arrives(sent: Any, arrived: Any) -> bool:
    try:
        return _same(sent, arrived)
    except Exception:  # noqa: BLE001 - too deep, or an equality of the value's own
        return False


def _same(sent: Any, arrived: Any) -> bool:
    """Whether a value arrived as it was sent; records are compared by field, without their equality."""
    if type(sent) is type(arrived):
        if is_dataclass(sent):
            names = [field.name for field in fields(sent)]
            return all(_same(getattr(sent, name), getattr(arrived, name)) for name in names)
        if isinstance(sent, msgspec.Struct):
            names = list(sent.__struct_fields__)
            return all(_same(getattr(sent, name), getattr(arrived, name)) for name in names)
        if isinstance(sent, list | tuple):
            return len(sent) == len(arrived) and all(map(_same, sent, arrived))
        if isinstance(sent, dict):
            return sent.keys() == arrived.keys() and all(
                _same(value, arrived[key]) for key, value in sent.items()
            )
    # True and 1 are equal in Python and differ in JSON.
    return bool(sent == arrived) and isinstance(sent, bool) == isinstance(arrived, bool)


def check_plain(name: str, payload: Any, *, max_bytes: int) -> str:
    """Encode a payload whose types nobody here knows: only what JSON itself carries."""
    if not isinstance(payload, dict):
        raise PayloadError(
            f"task '{name}': the payload is a {type(payload).__name__}; give a dict of arguments"
        )
    text = _encode_arguments(payload, what=f"task '{name}'", max_bytes=max_bytes)
    if not _arrives(payload, decode_json(text)):
        raise PayloadError(
            f"task '{name}': the payload would not arrive as it was sent; "
            "use only dicts with string keys, lists, strings, finite numbers, booleans and None"
        )
    return text
