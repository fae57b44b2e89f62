"""What is at or beyond a limit, on both stores: carried out, or refused in our own words."""

import pytest

from windlass import App, TaskState
from windlass.model.limits import LONGEST_RETENTION


@pytest.fixture(params=["memory", "postgres"])
def app_url(request: pytest.FixtureRequest) -> str:
    return "memory:" if request.param == "memory" else request.getfixturevalue("database_url")


async def test_the_longest_retentions_hold_for_every_end(app_url: str) -> None:
    longest = {"retention": LONGEST_RETENTION, "idempotency_retention": LONGEST_RETENTION}
    async with App(app_url, dead_retention=LONGEST_RETENTION, **longest) as app:

        @app.task(retention=LONGEST_RETENTION)
        async def own() -> None: ...

        @app.task(retry=1)
        async def broken() -> None:
            raise ValueError

        ended = [
            await own.enqueue(),
            await broken.options(idempotency_key="k").enqueue(),
            await own.options(delay=60).enqueue(),
        ]
        assert await ended[2].cancel()

        await app.run_worker(until_idle=True)

        assert [(await one.get()).status for one in ended] == [
            TaskState.COMPLETED,
            TaskState.DEAD,
            TaskState.CANCELLED,
        ]


async def test_the_longest_durations_are_carried_out(app_url: str) -> None:
    month = 30 * 86_400
    settings = dict.fromkeys(("lease", "leader_term", "sweep", "poll", "ageing"), month)
    async with App(app_url, **settings) as app:

        @app.task(priority=100, timeout=month)
        async def work() -> int:
            return 1

        handle = await work.enqueue()
        far = await work.options(delay=100 * 365 * 86_400).enqueue()
        await app.run_worker(until_idle=True)

        assert await handle.result(5) == 1
        assert (await far.get()).status is TaskState.SCHEDULED
