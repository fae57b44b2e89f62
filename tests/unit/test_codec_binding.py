"""Arguments are bound to their parameters as Python binds them, although shapes of calls are remembered."""

import inspect
import itertools
from typing import Any

import pytest

from windlass import Context, PayloadError
from windlass.codec import ArgumentCodec
from windlass.encoding import decode_json

LIMIT = 1000  # bytes


def plain(a: Any, b: Any = 1, *, c: Any = 2) -> None: ...
def by_place(a: Any, b: Any = 1, /, c: Any = 2) -> None: ...
def by_name(*, a: Any, b: Any = 1, c: Any = 2) -> None: ...
def in_context(a: Any, ctx: Context, b: Any = 1, c: Any = 2) -> None: ...


@pytest.mark.parametrize("function", [plain, by_place, by_name, in_context])
def test_arguments_are_bound_as_python_binds_them(function: Any) -> None:
    parameters = [
        one for name, one in inspect.signature(function).parameters.items() if name != "ctx"
    ]
    signature = inspect.Signature(parameters)
    one = ArgumentCodec("resize", function)
    for number in range(5):
        for names in itertools.chain.from_iterable(
            itertools.permutations("abcx", size) for size in range(4)
        ):
            args, kwargs = tuple(range(number)), {name: f"by name {name}" for name in names}
            assert outcome(one, args, kwargs) == expected(signature, args, kwargs)


def outcome(one: ArgumentCodec, args: Any, kwargs: Any) -> Any:
    try:
        return list(decode_json(one.encode(args, kwargs, max_bytes=LIMIT)).items())
    except PayloadError as refused:
        return str(refused)


def expected(signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
    try:
        return list(signature.bind(*args, **kwargs).arguments.items())
    except TypeError as error:
        return f"task 'resize': {error}"
