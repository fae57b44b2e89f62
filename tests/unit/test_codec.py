import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, TypedDict
from unittest.mock import MagicMock, Mock
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import ConfigurationError, Context, PayloadError
from windlass.codec import ArgumentCodec, check_plain
from windlass.encoding import decode_json, encode_json

LIMIT = 1000


class Colour(Enum):
    RED = "red"


class Size(TypedDict):
    width: int


@dataclass
class Image:
    name: str
    taken: datetime


@dataclass(eq=False)
class Opaque:
    name: str


class Packed(msgspec.Struct, eq=False):
    name: Any


def codec(function: Any) -> ArgumentCodec:
    return ArgumentCodec("resize", function)


def through(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    one = codec(function)
    return one.decode(one.encode(args, kwargs, max_bytes=LIMIT))


def test_annotated_values_arrive_as_they_were_sent() -> None:
    def function(
        image: Image, colour: Colour, key: UUID, size: Size, names: set[str], opaque: Opaque
    ) -> None: ...

    sent = {
        "image": Image("a", datetime(2026, 1, 2, tzinfo=UTC)),
        "colour": Colour.RED,
        "key": UUID(int=5),
        "size": {"width": 3},
        "names": {"a", "b"},
        "opaque": Opaque("x"),
    }

    arrived = through(function, **sent)

    assert arrived.pop("opaque").name == sent.pop("opaque").name  # type: ignore[attr-defined]  # it has one
    assert arrived == sent


def test_records_are_compared_by_field_and_not_by_their_equality() -> None:
    def function(packed: Packed, anything: object) -> None: ...

    assert through(function, Packed("a"), ["b"])["packed"].name == "a"
    with pytest.raises(PayloadError, match=r"'packed' .*would not arrive"):
        through(function, Packed((1, 2)), ["b"])


def test_only_what_was_passed_is_in_the_payload() -> None:
    def function(ctx: Context, image: str, width: int = 100) -> None: ...

    assert codec(function).encode(("a",), {}, max_bytes=LIMIT) == '{"image":"a"}'
    assert codec(function).context_name == "ctx"


def test_positional_only_parameters_are_called_by_position() -> None:
    def function(a: int, /, b: int) -> int:
        return 10 * a + b

    one = codec(function)

    assert one.call(function, one.decode('{"a": 1, "b": 2}')) == 12


def test_a_positional_only_parameter_that_is_left_out_keeps_its_place() -> None:
    def function(a: int = 3, b: int = 4, /) -> int:
        return 10 * a + b

    one = codec(function)

    assert one.call(function, one.decode('{"b": 5}')) == 35


def test_the_context_may_be_positional_only_or_optional() -> None:
    def first(ctx: Context, /, a: int) -> list[Any]:
        return [ctx, a]

    def optional(a: int, ctx: Context | None = None) -> list[Any]:
        return [ctx, a]

    for function in (first, optional):
        one = codec(function)
        assert one.context_name == "ctx"
        assert one.call(function, {**one.decode('{"a": 1}'), "ctx": "context"}) == ["context", 1]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing"),
        (("a", "b"), {}, "too many"),
        ((1,), {}, "Expected `str`"),
        (("a",), {"nonsense": 1}, "unexpected keyword"),
        (("a\x00b",), {}, "argument 'image'.*NUL"),
        (("\ud800",), {}, "argument 'image': a string holds half of a surrogate pair"),
        (("x" * LIMIT,), {}, "argument 'image'.*limit of 1000"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    def function(image: str) -> None: ...

    with pytest.raises(PayloadError, match=message):
        codec(function).encode(args, kwargs, max_bytes=LIMIT)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        (1, 2),
        {1: "a"},
        float("nan"),
        float("inf"),
        b"bytes",
        [{1, 2}],
        {"a": (1,)},
        datetime(2026, 1, 2, tzinfo=UTC),
        object(),
    ],
)
def test_without_an_annotation_only_what_json_carries_faithfully_passes(value: Any) -> None:
    def function(value: Any) -> None: ...

    with pytest.raises(PayloadError, match="resize"):
        codec(function).encode((value,), {}, max_bytes=LIMIT)
    with pytest.raises(PayloadError, match="resize"):
        check_plain("resize", {"value": value}, max_bytes=LIMIT)


def test_a_list_nested_in_itself_is_refused() -> None:
    def function(value: Any) -> None: ...

    endless: list[Any] = []
    endless.append(endless)

    for value in (endless, {"a": [1, endless]}, Loose([endless])):
        with pytest.raises(PayloadError, match=r"a part of it contains itself; leave that out$"):
            codec(function).encode((value,), {}, max_bytes=LIMIT)


def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    text = encode_json("\\u0000", what="x", max_bytes=LIMIT)

    assert decode_json(text) == "\\u0000"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
        lambda children: (
            st.lists(children, max_size=3)
            | st.dictionaries(
                st.text(
                    alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
                ),
                children,
                max_size=3,
            )
        ),
        max_leaves=10,
    )
)
def test_every_json_value_passes_unchanged(value: Any) -> None:
    def function(value: Any) -> None: ...

    one = codec(function)

    assert one.decode(one.encode((value,), {}, max_bytes=10**6)) == {"value": value}


def test_a_payload_that_does_not_fit_names_the_task() -> None:
    def function(width: int) -> None: ...

    for payload in ('{"width": "a"}', "{}", '{"width": 1, "more": 2}', "[]", "nonsense"):
        with pytest.raises(PayloadError, match="task 'resize'"):
            codec(function).decode(payload)


def test_an_annotation_that_names_nothing_is_refused() -> None:
    def function(value: "pytest.Nothing") -> None: ...  # type: ignore[name-defined]  # on purpose

    with pytest.raises(ConfigurationError, match="annotation"):
        codec(function)


def test_a_function_with_any_number_of_arguments_is_refused() -> None:
    def many(*names: str) -> None: ...
    def named(**names: str) -> None: ...

    for function in (many, named):
        with pytest.raises(ConfigurationError, match="name them"):
            codec(function)


def test_a_number_too_long_to_be_read_back_is_refused() -> None:
    def function(value: Any) -> None: ...

    with pytest.raises(PayloadError):
        codec(function).encode((10**5000,), {}, max_bytes=10**6)


@dataclass
class Loose:
    value: Any


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, {1: 2}, b"x", [(1,)]])
def test_what_would_be_altered_inside_a_record_is_refused(value: Any) -> None:
    def function(loose: Loose) -> None: ...

    with pytest.raises(PayloadError, match="would not arrive"):
        codec(function).encode((Loose(value),), {}, max_bytes=LIMIT)


class Dumped:
    """A record that writes itself down."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def model_dump(self, *, mode: str, **_: Any) -> Any:
        assert mode == "json"
        return {"value": self.value}


@pytest.mark.parametrize(
    ("value", "complaint", "place"),
    [
        ({"rows": [{"name": "a"}, {"name": "\ud800"}]}, "surrogate", ", at ['rows'][1]['name']"),
        ({"loose": Loose(["\x00"])}, "NUL", ", at ['loose'].value[0]"),
        ([Dumped([b"ok", object()])], "type object", ", at [0]['value'][1]"),
        (Dumped("\ud800"), "surrogate", ", at ['value']"),
        ({"\ud800": 1}, "surrogate", "carry"),
    ],
)
def test_what_cannot_be_carried_is_named_with_its_argument_and_place(
    value: Any, complaint: str, place: str
) -> None:
    def function(first: int, value: Any) -> None: ...

    message = f"^task 'resize': argument 'value': .*{complaint}"
    with pytest.raises(PayloadError, match=message) as raised:
        codec(function).encode((1, value), {}, max_bytes=LIMIT)
    with pytest.raises(PayloadError, match=message) as raised_by_name:
        check_plain("resize", {"first": 1, "value": value}, max_bytes=LIMIT)

    assert str(raised.value).endswith(place)
    assert str(raised_by_name.value).endswith(place)


def test_arguments_that_are_too_large_together_are_refused() -> None:
    def function(first: str, second: str) -> None: ...

    encoded = codec(function).encode(("x" * 600, "x" * 376), {}, max_bytes=LIMIT)
    assert len(encoded) == LIMIT
    with pytest.raises(PayloadError, match="task 'resize': 1224 bytes"):
        codec(function).encode(("x" * 600, "x" * 600), {}, max_bytes=LIMIT)


@pytest.mark.parametrize("fold", [0, 1])
def test_a_time_in_the_hour_that_is_there_twice_arrives(fold: int) -> None:
    def remind(at: datetime) -> None: ...

    at = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Zurich"), fold=fold)

    assert through(remind, at)["at"].timestamp() == at.timestamp()


def test_models_of_pydantic_with_aliases_and_computed_fields_arrive() -> None:
    pydantic: Any = pytest.importorskip("pydantic")

    class Order(pydantic.BaseModel):  # type: ignore[misc]  # known when it runs
        model_config = pydantic.ConfigDict(extra="forbid")
        number: int = pydantic.Field(alias="orderNumber")

        @pydantic.computed_field  # type: ignore[untyped-decorator]
        def doubled(self) -> int:
            return 2 * self.number

    def ship(order: Order) -> None: ...

    ship.__annotations__["order"] = Order
    order = Order(orderNumber=7)

    assert through(ship, order) == {"order": order}


class Anything:
    """Answers to every name, as a mock does, and counts how often it was called."""

    calls = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        Anything.calls += 1
        if Anything.calls > 100:
            raise SystemExit
        return Anything()


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: {"a": [1, one]}, Loose])
def test_an_object_that_answers_to_every_name_is_refused_and_not_called(
    wrapped: Callable[[Any], Any],
) -> None:
    def function(value: Any) -> None: ...

    for one in (
        Anything(),
        Mock(),
        MagicMock(),
        Mock(spec=Dumped),
        MagicMock(spec=dict),
        Mock(spec=""),
    ):
        refusal = f"a value of type {type(one).__name__} cannot be carried as JSON"
        with pytest.raises(PayloadError, match=refusal):
            codec(function).encode((wrapped(one),), {}, max_bytes=LIMIT)
        with pytest.raises(PayloadError, match=refusal):
            encode_json(wrapped(one), what="result", max_bytes=LIMIT)

    assert Anything.calls == 0


class Endless(Dumped):
    def model_dump(self, *, mode: str, **_: Any) -> Any:
        return Endless(mode)


def test_a_model_that_dumps_itself_as_a_model_is_refused() -> None:
    with pytest.raises(PayloadError, match="type Endless gives a model again"):
        encode_json([Endless(1)], what="result", max_bytes=LIMIT)


class Markup(str):
    """As texts that are safe to show have a class of their own."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another"


class Metres(float):
    pass


class Number(int):
    pass


@pytest.mark.parametrize("value", [Markup("<b>é</b>"), Number(7), Metres(1.5), [Markup("a")], {Markup("a"): Number(2**70)}])  # fmt: skip
def test_a_text_or_number_of_a_class_of_its_own_is_carried_as_what_it_is(value: Any) -> None:
    def function(value: Any) -> None: ...

    arrived = through(function, value)["value"]
    returned = decode_json(encode_json(value, what="result", max_bytes=LIMIT))

    assert arrived == returned == value
    assert check_plain("resize", {"value": value}, max_bytes=LIMIT)
    assert type(returned) in (str, int, float, list, dict)


def test_an_enum_is_not_taken_for_its_text() -> None:
    def function(value: Any) -> None: ...

    with pytest.raises(PayloadError, match=r"\(Colour\) would not arrive"):
        codec(function).encode((Colour.RED,), {}, max_bytes=LIMIT)


SECRET = "geheim-token"


class Level(IntEnum):
    LOW = 1


class Cat(msgspec.Struct, tag="cat"):
    name: str


class Dog(msgspec.Struct, tag="dog"):
    name: str


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Colour, SECRET, "Invalid value - at `$.value`; use one of 'red'"),
        (Colour | None, SECRET, "Invalid value - at `$.value`; use one of 'red'"),
        (Colour, f"{SECRET}' - at `$.x` in `{SECRET}\n", "Invalid value - at `$.value`; use one of 'red'"),
        (Level, 777, "Invalid value - at `$.value`; use one of 1"),
        (Literal["a", "b"], SECRET, "Invalid value - at `$.value`; use one of 'a', 'b'"),
        (list[Colour], [SECRET], "Invalid value - at `$.value[0]`"),
        (dict[Colour, int], {SECRET: 1}, "Invalid value - at `key` in `$.value`"),
        (Cat | Dog, {"type": SECRET, "name": "x"}, "Invalid value - at `$.value.type`"),
        (Cat, {"type": SECRET, "name": "x"}, "Invalid value - at `$.value.type`"),
        (UUID, SECRET, "Invalid UUID"),
        (datetime, SECRET, "Invalid RFC3339 encoded datetime"),
        (date, SECRET, "Invalid RFC3339 encoded date"),
        (time, SECRET, "Invalid RFC3339 encoded time"),
        (timedelta, SECRET, "Invalid ISO8601 duration"),
        (Decimal, SECRET, "Invalid decimal string"),
        (bytes, SECRET, "Invalid base64 encoded string"),
        (int, SECRET, "Expected `int`, got `str`"),
        (dict[int, int], {SECRET: 1}, "Expected `int`, got `str`"),
        (Annotated[str, msgspec.Meta(pattern="^a$")], SECRET, "Expected `str` matching regex '^a$'"),
        (Annotated[int, msgspec.Meta(ge=1000)], 777, "Expected `int` >= 1000"),
    ],
    ids=str,
)  # fmt: skip
def test_a_message_says_what_does_not_fit_without_repeating_it(
    kind: Any, value: Any, said: str
) -> None:
    check_untold(kind, value, said)


def check_untold(kind: Any, value: Any, said: str) -> None:
    def function(value: Any) -> None: ...

    function.__annotations__["value"] = kind
    one = codec(function)
    for call in (
        lambda: one.encode_named({"value": value}, max_bytes=LIMIT),
        lambda: one.decode(encode_json({"value": value}, what="x", max_bytes=LIMIT)),
    ):
        with pytest.raises(PayloadError) as refused:
            call()
        assert said in str(refused.value)
        told = "".join(traceback.format_exception(refused.value))
        assert SECRET not in told
        assert "777" not in told


def test_a_message_of_pydantic_does_not_repeat_the_value() -> None:
    pydantic: Any = pytest.importorskip("pydantic")

    class Meow(pydantic.BaseModel):  # type: ignore[misc]  # known when it runs
        kind: Literal["cat"]

    class Bark(pydantic.BaseModel):  # type: ignore[misc]
        kind: Literal["dog"]

    class Order(pydantic.BaseModel):  # type: ignore[misc]
        number: int = 0
        colour: Colour = Colour.RED
        size: Literal["s", "m"] = "s"
        key: UUID | None = None
        day: date | None = None
        price: Decimal = Decimal(1)
        code: Annotated[str, pydantic.Field(pattern="^a$")] = "a"
        link: pydantic.AnyUrl | None = None
        by_colour: dict[Colour, int] = {}  # noqa: RUF012 - of Pydantic's
        pet: Annotated[Meow | Bark, pydantic.Field(discriminator="kind")] | None = None

    for sent, said in (
        ({"number": SECRET}, "number: Input should be a valid integer"),
        ({"colour": SECRET}, "colour: Input should be 'red'"),
        ({"size": SECRET}, "size: Input should be 's' or 'm'"),
        ({"key": SECRET}, "key: Input should be a valid UUID - at"),
        ({"day": SECRET}, "day: Input should be a valid date or datetime - at"),
        ({"price": SECRET}, "price: Input should be a valid decimal"),
        ({"code": SECRET}, "code: String should match pattern '^a$'"),
        ({"link": SECRET}, "link: Input should be a valid URL - at"),
        ({"by_colour": {SECRET: 1}}, "by_colour: [key]: Input should be 'red'"),
        ({"pet": {"kind": SECRET}}, "pet: Input tag should be one of 'cat', 'dog'"),
        (SECRET, "Input should be a valid dictionary or instance of Order"),
    ):  # fmt: skip
        check_untold(Order, sent, said)


def test_a_number_that_json_has_not_is_named_whatever_the_annotation() -> None:
    def plain(value: float) -> None: ...
    def many(value: list[float]) -> None: ...
    def optional(value: float | None) -> None: ...
    def exact(value: Decimal) -> None: ...

    for function, value, said in (
        (plain, float("nan"), "argument 'value': nan is no number of JSON; pass None or a string"),
        (many, [1.0, float("-inf")], r"argument 'value': -inf at \[1\] is no number of JSON"),
        (
            optional,
            float("nan"),
            r"\(float\) would not arrive as it was sent; pass None or a string",
        ),
        (
            exact,
            Decimal("NaN"),
            r"\(Decimal\) would not arrive as it was sent; pass None or a string",
        ),
    ):
        with pytest.raises(PayloadError, match=said):
            codec(function).encode((value,), {}, max_bytes=LIMIT)


def test_who_has_annotated_a_parameter_is_not_told_to_annotate_it() -> None:
    def loose(value: Loose) -> None: ...
    def free(value: Any) -> None: ...

    with pytest.raises(PayloadError, match="its annotation does not carry it"):
        codec(loose).encode((Loose((1,)),), {}, max_bytes=LIMIT)
    with pytest.raises(PayloadError, match="annotate the parameter with its type"):
        codec(free).encode(((1,),), {}, max_bytes=LIMIT)


@pytest.mark.parametrize(
    "kind",
    [Iterable[int], list[Iterable[int]] | None, Generator[int, None, None], type[int]],
    ids=str,
)
def test_an_annotation_that_nothing_can_be_read_as_is_refused(kind: Any) -> None:
    def function(value: Any) -> None: ...

    function.__annotations__["value"] = kind

    with pytest.raises(
        ConfigurationError, match=r"parameter 'value' is annotated with .* annotate it"
    ):
        codec(function)


@pytest.mark.parametrize("kind", [Iterable, Sequence[int], list[int] | None], ids=str)
def test_an_annotation_of_a_list_in_other_words_is_taken(kind: Any) -> None:
    def function(value: Any) -> None: ...

    function.__annotations__["value"] = kind

    assert through(function, [1]) == {"value": [1]}


@pytest.mark.parametrize("pad", range(0, 60, 7))
def test_a_number_too_long_to_be_read_is_found_wherever_it_stands(pad: int) -> None:
    raw = msgspec.Raw(b'["' + b"x" * (1000 + pad) + b'",' + b"1" * 5000 + b"]")

    with pytest.raises(PayloadError, match="more digits than can be read back"):
        encode_json(raw, what="the value", max_bytes=10**6)
