"""Values that cannot be carried end their task for good, and cost the worker nothing."""

from typing import Any

import pytest

from windlass import App, TaskState


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
