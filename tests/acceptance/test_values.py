"""Values that cannot be carried end their task for good, and cost the worker nothing."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from windlass import App, PayloadError, TaskState
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


class Odd:
    """A value whose own code raises on its way to JSON, and back."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def model_dump(self, *, mode: str) -> Any:
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


async def test_a_payload_too_deep_to_be_compared_is_refused(app_url: str) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    async with App(app_url) as app:

        @app.task
        async def takes(value: Any) -> None: ...

        with pytest.raises(PayloadError, match="would not arrive"):
            await takes.enqueue(deep)
        with pytest.raises(PayloadError, match="would not arrive"):
            await app.enqueue("unknown", {"value": deep})
