"""Arguments to JSON and back, checked on both ways."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from windlass.context import Context
from windlass.encoding import (
    decode_json,
    decode_other,
    encode_arguments,
    encode_json,
    encode_lines,
    encode_short,
    no_number,
)
from windlass.model.errors import ConfigurationError, PayloadError
from windlass.model.limits import shown

# What msgspec says of a choice repeats the value; where it was comes last.
_CHOICE = re.compile(
    r"Invalid (?:enum )?value .*?(?P<place> - at `[^`]*`(?: in `[^`]*`)?)?", re.DOTALL
)
ALIKE_TEXT = (
    200_000  # characters in calls that are encoded together: there are several copies at once
)
LARGEST_PART = 64 << 10  # bytes of a call to which more is added later
MOST_SHAPES = 100  # of calls that are remembered, of each function
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by place and by name
_PLAIN = frozenset({str, int, float, bool, type(None)})  # equal as they are, if of one type


class _Stray(NamedTuple):
    """Arguments by which a payload and a function differ: the first of each kind."""

    unknown: str | None = None
    missing: str | None = None


class ArgumentCodec:
    """The arguments of one function as a JSON object, by name."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._what = f"task '{name}'"
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
            if (unreadable := _unreadable(kind)) is not None:
                raise ConfigurationError(
                    f"task '{name}': parameter '{parameter.name}' is annotated with {unreadable}, "
                    "which cannot be read from JSON; annotate it with a list, or another type that can"
                )
            shape_fields.append(
                (parameter.name, kind)
                if parameter.default is parameter.empty
                else (parameter.name, kind, msgspec.UNSET)
            )
        self._signature = signature.replace(parameters=parameters)
        self._positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        self._names = [p.name for p in parameters]
        self._kinds = {one.name: hints.get(one.name, Any) for one in parameters}
        self._required = [p.name for p in parameters if p.default is p.empty]
        self._shapes: dict[tuple[int | str, ...], tuple[str, ...]] = {}
        try:
            shape = msgspec.defstruct(
                "Arguments", shape_fields, kw_only=True, forbid_unknown_fields=True
            )
            self._decoder = msgspec.json.Decoder(shape, dec_hook=decode_other)
        except (TypeError, ValueError, NameError) as error:
            raise ConfigurationError(f"task '{name}': {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments that are part of the payload."""
        return tuple(self._names)

    def encoded_default(self, name: str) -> str:
        """Encode the default of a parameter; null if it has none, or none that JSON can carry."""
        default = self._signature.parameters[name].default
        if default is inspect.Parameter.empty:
            return "null"
        try:
            return encode_json(default, what=self._what, max_bytes=LARGEST_PART)
        except PayloadError:
            return "null"

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, max_bytes: int) -> str:
        """Bind a call and encode it; what would not arrive as it was sent is refused."""
        arguments = self._bound(args, kwargs)
        text = self._encode_plain(arguments, max_bytes)
        return self.encode_named(arguments, max_bytes=max_bytes) if text is None else text

    def _encode_plain(self, arguments: dict[str, Any], max_bytes: int) -> str | None:
        """Encode what nearly all calls bring; None: it has to be looked at more closely."""
        for sent in arguments.values():
            if type(sent) not in _PLAIN:
                return None
        try:
            encoded = encode_short(arguments, max_bytes)
            arrived = encoded and self._decoder.decode(encoded)
        except Exception:  # noqa: BLE001 - it is told by whoever looks more closely
            return None
        if not encoded:
            return None
        for name, sent in arguments.items():
            came = getattr(arrived, name)
            if sent != came or type(sent) is not type(came):
                return None
        return encoded.decode()

    def encode_part(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], filled_in: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """Encode a call that may lack arguments which are filled in; return which of them it takes."""
        try:
            arguments = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            raise PayloadError(f"{self._what}: {error}") from error
        missing = [name for name in self._required if name not in {*arguments, *filled_in}]
        if missing:
            raise PayloadError(
                f"{self._what}: argument '{missing[0]}' is missing; give it in the call, or name the "
                f"parameter as one that is filled in: {', '.join(filled_in)}"
            )
        text = encode_arguments(arguments, what=self._what, max_bytes=LARGEST_PART)
        try:
            arrived = self._part_decoder().decode(text)
        except Exception as error:  # noqa: BLE001 - of ours or of the parameter's own type
            raise PayloadError(f"{self._what}: {self._told_by(error)}") from _without_values(error)
        self._check_arrived(arguments, arrived)
        return text, tuple(
            name for name in self._names if name in filled_in and name not in arguments
        )

    def _part_decoder(self) -> msgspec.json.Decoder[Any]:
        optional: list[Any] = [(name, kind, msgspec.UNSET) for name, kind in self._kinds.items()]
        shape = msgspec.defstruct("Part", optional, kw_only=True, forbid_unknown_fields=True)
        return msgspec.json.Decoder(shape, dec_hook=decode_other)

    def encode_alike(self, calls: Sequence[Arguments], max_bytes: int) -> list[str] | None:
        """Encode calls that give the same arguments, all at once: far cheaper, if they are plain.

        None: they are not, or one has to be looked at more closely.
        """
        shapes = {(len(args), *kwargs) for args, kwargs in calls}
        if len(shapes) != 1:
            return None
        try:
            bound = [kwargs for _, kwargs in calls]
            if shapes != {(0, *self._bound(*calls[0]))}:  # they are not bound as they are
                bound = [self._bound(args, kwargs) for args, kwargs in calls]
            columns = {name: [one[name] for one in bound] for name in bound[0]}
            if not all(_PLAIN.issuperset(map(type, sent)) for sent in columns.values()):
                return None
            texts = [one for sent in columns.values() for one in sent if type(one) is str]
            if sum(map(len, texts)) > ALIKE_TEXT:
                return None
            lines = encode_lines(bound, max_bytes)
            arrived = self._decoder.decode_lines(lines)
        except Exception:  # noqa: BLE001 - it is told by whoever looks more closely
            return None
        for name, sent in columns.items():
            came = [getattr(one, name) for one in arrived]
            if sent != came or [*map(type, sent)] != [*map(type, came)]:
                return None
        return lines.decode().split("\n")[:-1] or None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the parameters."""
        # Whether a call fits depends on its shape alone, and most have the same.
        shape: tuple[int | str, ...] = (len(args), *kwargs)
        names = self._shapes.get(shape)
        if names is None:
            try:
                bound = self._signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise PayloadError(f"{self._what}: {error}") from error
            if len(self._shapes) < MOST_SHAPES:
                self._shapes[shape] = tuple(bound)
            return bound
        given = {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs
        return given if tuple(given) == names else {name: given[name] for name in names}

    def encode_named(self, arguments: Any, *, max_bytes: int) -> str:
        """Encode arguments that already have their names."""
        what = self._what
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise PayloadError(f"{what}: the payload is a {kind}; give a dict of arguments")
        text = encode_arguments(arguments, what=what, max_bytes=max_bytes)
        try:
            arrived = self._decoder.decode(text)
        except Exception as error:  # noqa: BLE001 - of ours or of the parameter's own type
            stray = self._stray(text)
            if stray.unknown:
                known = ", ".join(self._names) or "none"
                fault = f"argument {shown(stray.unknown)} is not known; arguments are: {known}"
            elif stray.missing:
                fault = f"argument '{stray.missing}' is missing"
            else:
                fault = _number_among(arguments) or self._told_by(error)
            raise PayloadError(f"{what}: {fault}") from _without_values(error)
        self._check_arrived(arguments, arrived)
        return text

    def _check_arrived(self, arguments: dict[str, Any], arrived: Any) -> None:
        for name, sent in arguments.items():
            if not _arrives(sent, getattr(arrived, name)):
                raise PayloadError(
                    f"{self._what}: argument '{name}' ({type(sent).__name__}) would not arrive as it "
                    f"was sent; {self._way_out(name, sent)}"
                )

    def _way_out(self, name: str, sent: Any) -> str:
        if _number_among({name: sent}) is not None:
            return "pass None or a string for what is no number of JSON"
        if self._kinds[name] in (Any, object):
            return "annotate the parameter with its type, or pass what JSON can carry"
        return "its annotation does not carry it: use one that does, or pass what JSON can carry"

    def _told_by(self, error: Exception) -> str:
        """What is said of a payload that does not fit, without what is in it."""
        choice = _CHOICE.fullmatch(str(error)) if _is_of_msgspec(error) else None
        if choice is None:
            return str(error)
        place = choice["place"] or ""
        name = place.removeprefix(" - at `$.").removesuffix("`")
        allowed = ", ".join(map(repr, _choices(self._kinds.get(name))))
        return f"Invalid value{place}{f'; use one of {allowed}' if allowed else ''}"

    def decode(self, payload: str) -> dict[str, Any]:
        """Return the arguments for the handler, or raise `PayloadError`."""
        try:
            arrived = self._decoder.decode(payload)
        except Exception as error:  # noqa: BLE001 - of ours or of the parameter's own type
            stray = self._stray(payload)
            if stray.unknown:
                fault = (
                    f"argument {shown(stray.unknown)} is not known to the code of this worker; "
                    "update it, then retry the task"
                )
            elif stray.missing:
                fault = (
                    f"argument '{stray.missing}' is missing, and its parameter has no default; "
                    "give it one, then retry the task"
                )
            else:
                fault = self._told_by(error)
            raise PayloadError(
                f"{self._what}: the payload does not fit: {fault}"
            ) from _without_values(error)
        return {
            name: value
            for name in self._names
            if (value := getattr(arrived, name)) is not msgspec.UNSET
        }

    def _stray(self, payload: str) -> "_Stray":
        """Say which argument of a payload that does not fit is too many, or lacks."""
        try:
            given = decode_json(payload)
        except Exception:  # noqa: BLE001 - the error that is told says more
            given = None
        if not isinstance(given, dict):
            return _Stray()
        unknown = (name for name in given if name not in self._names)
        missing = (name for name in self._required if name not in given)
        return _Stray(next(unknown, None), next(missing, None))

    def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call the function with decoded arguments."""
        if not self._positional:
            return function(**arguments)
        # One that was left out keeps its place: the next would be taken for it.
        first = [arguments.pop(one.name, one.default) for one in self._positional]
        return function(*first, **arguments)


def _is_of_msgspec(error: Exception) -> bool:
    return isinstance(error, msgspec.MsgspecError)


def _without_values(error: Exception) -> Exception | None:
    """The cause to show with an error: none that repeats what is in a payload."""
    return None if _is_of_msgspec(error) else error


def _number_among(arguments: dict[str, Any]) -> str | None:
    """Say which argument is or holds a number that JSON has not, if one."""
    for name, value in arguments.items():
        with suppress(Exception):  # of the value's own, or what is too deep
            if (fault := no_number(value)) is not None:
                return f"argument '{name}': {fault}; pass None or a string for it"
    return None


def _choices(kind: Any) -> list[Any]:
    """The values that an annotation allows, if it names them."""
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [one.value for one in kind]
    return [choice for part in _alternatives(kind) for choice in _choices(part)]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else ()


def _unreadable(kind: Any) -> Any:
    """The part of an annotation that no value of JSON can be read as: a generic that msgspec leaves to us."""
    for part in typing.get_args(kind):
        if (found := _unreadable(part)) is not None:
            return found
    if not typing.get_args(kind) or hasattr(kind, "model_validate"):
        return None
    try:
        seen = msgspec.inspect.type_info(kind)
    except Exception:  # noqa: BLE001 - what is wrong with it is told by whoever makes the decoder
        return None
    return kind if isinstance(seen, msgspec.inspect.CustomType) else None


def _arrives(sent: Any, arrived: Any) -> bool:
    kind = type(sent)
    if kind in _PLAIN and kind is type(arrived):
        return bool(sent == arrived)
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
    if (
        isinstance(sent, datetime)
        and isinstance(arrived, datetime)
        and sent.tzinfo
        and arrived.tzinfo
    ):
        # In the hour that is there twice, or not at all, no time equals one of another zone.
        return sent.astimezone(UTC) == arrived.astimezone(UTC)
    # True and 1 are equal in Python and differ in JSON.
    return bool(sent == arrived) and isinstance(sent, bool) == isinstance(arrived, bool)


def check_plain(name: str, payload: Any, *, max_bytes: int) -> str:
    """Encode a payload whose types nobody here knows: only what JSON itself carries."""
    if not isinstance(payload, dict):
        raise PayloadError(
            f"task '{name}': the payload is a {type(payload).__name__}; give a dict of arguments"
        )
    text = encode_arguments(payload, what=f"task '{name}'", max_bytes=max_bytes)
    arrived = decode_json(text)
    for key, sent in payload.items():
        if key not in arrived or not _arrives(sent, arrived[key]):
            raise PayloadError(
                f"task '{name}': argument {shown(key)} ({type(sent).__name__}) would not arrive as it "
                "was sent; pass what JSON can carry: dicts with string keys, lists, strings, finite "
                "numbers, booleans and None"
            )
    return text
