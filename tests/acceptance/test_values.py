"""What becomes of values on their way; those that cannot be carried cost the worker nothing."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from unittest.mock import Mock
from uuid import UUID, uuid4

import pytest

from windlass import App, PayloadError, TaskFailed, TaskState
from windlass.model.task import NewTask


@pytest.fixture(params=["memory", "postgres"])
def app_url(request: pytest.FixtureRequest) -> str:
    return "memory:" if request.param == "memory" else request.getfixturevalue("database_url")


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"mean": [1.0, float("nan")]}, "nan at ['mean'][1]"),
        (float("inf"), "inf is no number"),
        ({"by_year": {2026: 1}}, "key 2026 of ['by_year']"),
    ],
)
async def test_a_result_that_json_would_alter_is_a_permanent_failure(
    app_url: str, returned: Any, named: str
) -> None:
    async with App(app_url) as app:

        @app.task
        async def measure() -> Any:
            return returned

        handle = await measure.enqueue()
        await app.run_worker(until_idle=True)

        record = await handle.get()
        assert (record.status, record.attempts) == (TaskState.FAILED, 1)
        assert named in str(record.last_error)
        assert record.result is None


async def test_the_limits_of_an_app_are_its_own(app_url: str) -> None:
    async with App(app_url, max_payload_bytes=50, max_result_bytes=20) as app:

        @app.task
        async def repeat(text: str) -> str:
            return text

        handles = [await repeat.enqueue("x" * length) for length in (18, 19)]
        await app.run_worker(until_idle=True)

        assert await handles[0].result(5) == "x" * 18
        with pytest.raises(TaskFailed, match=r"21 bytes.*limit of 20"):
            await handles[1].result(5)
        for enqueue in (repeat.enqueue, lambda text: app.enqueue("unknown", {"text": text})):
            with pytest.raises(PayloadError, match="limit of 50"):
                await enqueue("x" * 50)


@dataclass
class Size:
    width: int


class Colour(Enum):
    RED = "red"


class Markup(str):
    """As texts that are safe to show have a class of their own."""

    __slots__ = ()


class Metres(float):
    pass


@pytest.mark.parametrize(
    ("returned", "arrives"),
    [
        (Size(3), {"width": 3}),
        ({"sizes": [Size(3)]}, {"sizes": [{"width": 3}]}),
        ((1, 2), [1, 2]),
        ({5}, [5]),
        (frozenset({"a"}), ["a"]),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00Z"),
        (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (b"bytes", "Ynl0ZXM="),
        (Colour.RED, "red"),
        (Markup("<b>"), "<b>"),
        ([Metres(1.5)], [1.5]),
    ],
    ids=repr,
)
async def test_a_result_arrives_as_plain_json(app_url: str, returned: Any, arrives: Any) -> None:
    async with App(app_url) as app:

        @app.task
        async def give() -> Any:
            return returned

        handle = await give.enqueue()
        await app.run_worker(until_idle=True)

        assert await handle.result(5) == arrives


@pytest.mark.parametrize(
    ("sent", "plain", "annotated"),
    [
        (0.1, "0.1", "0.1"),
        (3.0, "3.0", "3.0"),
        (9e15, "9000000000000000.0", "9000000000000000.0"),
        (1e16, "10000000000000000", "1e+16"),
        (2.0**63, "9223372036854776000", "9.223372036854776e+18"),
        (-0.0, "0.0", "0.0"),
        (10**22, "10000000000000000000000", "1e+22"),
    ],
)
async def test_a_number_arrives_by_its_digits_unless_it_is_annotated(
    database_url: str, sent: float, plain: str, annotated: str
) -> None:
    async with App(database_url) as app:

        @app.task
        async def show(one: Any, other: float) -> list[Any]:
            return [repr(one), repr(other), sent]

        handle = await show.enqueue(sent, sent)
        await app.run_worker(until_idle=True)

        one, other, returned = await handle.result(5)
        assert (one, other, repr(returned)) == (plain, annotated, plain)


class Odd:
    """A value whose own code raises on its way to JSON, and back."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def model_dump(self, *, mode: str, **_: Any) -> Any:
        if self.number:
            raise LookupError(f"cannot be dumped as {mode}")
        return {}

    @classmethod
    def model_validate(cls, _: Any) -> Any:
        raise LookupError("cannot be read")


async def test_a_value_whose_own_code_raises_fails_its_task_and_frees_its_slot(
    app_url: str,
) -> None:
    async with App(app_url) as app, asyncio.timeout(20):

        @app.task
        async def returns() -> Any:
            return Odd(1)

        @app.task
        async def takes(odd: Odd) -> None: ...

        payload = NewTask(id=uuid4(), type="takes", payload='{"odd": {}}')
        await (await app.store()).enqueue([payload])
        handles = [await returns.enqueue(), app.handle(payload.id)]
        await app.run_worker(until_idle=True, concurrency=1)

        ended = [await handle.get() for handle in handles]
        assert [one.status for one in ended] == [TaskState.FAILED] * 2
        assert "cannot be dumped" in str(ended[0].last_error)
        assert "cannot be read" in str(ended[1].last_error)
        with pytest.raises(PayloadError, match="cannot be dumped"):
            await takes.enqueue(Odd(1))
        with pytest.raises(PayloadError, match="cannot be read"):
            await takes.enqueue(Odd())


async def test_what_is_kept_of_a_payload_that_does_not_fit_does_not_repeat_it(app_url: str) -> None:
    async with App(app_url) as app:

        @app.task
        async def paint(colour: Colour) -> None: ...

        payload = NewTask(id=uuid4(), type="paint", payload='{"colour": "geheim-token"}')
        await (await app.store()).enqueue([payload])
        await app.run_worker(until_idle=True)

        record = await app.handle(payload.id).get()
        assert record.status is TaskState.FAILED
        assert "Invalid value - at `$.colour`; use one of 'red'" in str(record.last_error)
        assert "geheim" not in str((record.last_error, record.errors))


async def test_a_mock_is_refused_at_once(app_url: str) -> None:
    async with App(app_url) as app, asyncio.timeout(20):

        @app.task
        async def give() -> Any:
            return {"a": Mock()}

        handle = await give.enqueue()
        await app.run_worker(until_idle=True)

        with pytest.raises(TaskFailed, match=r"type Mock cannot be carried as JSON, at \['a'\]"):
            await handle.result(5)


async def test_a_payload_too_deep_to_be_read_is_refused(app_url: str) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    async with App(app_url) as app:

        @app.task
        async def takes(value: Any) -> None: ...

        with pytest.raises(PayloadError, match="nested deeper than 200 levels"):
            await takes.enqueue(deep)
        with pytest.raises(PayloadError, match="nested deeper than 200 levels"):
            await app.enqueue("unknown", {"value": deep})
