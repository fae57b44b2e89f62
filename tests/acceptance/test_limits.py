"""What is at or beyond a limit, on both stores: carried out, or refused in our own words."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from windlass import App, ConfigurationError, TaskState
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


EAST, WEST = timezone(timedelta(hours=5)), timezone(timedelta(hours=-5))


@pytest.mark.parametrize("zone", [UTC, EAST, WEST, ZoneInfo("Asia/Tokyo")])
async def test_the_first_moment_of_the_calendar_means_now(app_url: str, zone: timezone) -> None:
    async with App(app_url) as app:

        @app.task
        async def work() -> None: ...

        first = datetime.min.replace(tzinfo=zone)
        handle = await work.options(at=first).enqueue()
        changed = await work.options(delay=60).enqueue()
        await changed.change(at=first)

        assert (await handle.get()).status is TaskState.PENDING
        assert (await changed.get()).status is TaskState.PENDING


async def test_a_time_after_the_last_moment_of_the_calendar_is_refused(app_url: str) -> None:
    async with App(app_url) as app:

        @app.task
        async def work() -> None: ...

        handle = await work.options(at=datetime.max.replace(tzinfo=UTC)).enqueue()
        after = datetime.max.replace(tzinfo=WEST)

        with pytest.raises(ConfigurationError, match=r"at .*9999"):
            await work.options(at=after).enqueue()
        with pytest.raises(ConfigurationError, match=r"at .*9999"):
            await handle.change(at=after)

        record = await handle.get()
        assert (record.status, record.scheduled_for.year) == (TaskState.SCHEDULED, 9999)
        (queue,) = await (await app.store()).queues()
        assert queue.counts == {TaskState.SCHEDULED: 1}


@pytest.mark.parametrize(
    "reason", [5, None, b"x", "a\x00b", "\ud800", "x" * 2001, "x" * 10_000_000]
)
async def test_a_reason_that_cannot_be_kept_is_refused_and_the_task_waits_on(
    app_url: str, reason: Any
) -> None:
    async with App(app_url) as app:

        @app.task
        async def work() -> None: ...

        handle = await work.enqueue()

        with pytest.raises(ConfigurationError, match="reason") as raised:
            await handle.cancel(reason)

        assert len(str(raised.value)) < 300
        assert (await handle.get()).status is TaskState.PENDING


@pytest.mark.parametrize(
    "by", ["", 5, b"x", "a\x00b", "a\nb", "\ud800", "x" * 201, "a (asked for by b)"]
)
async def test_a_name_that_cannot_be_kept_is_refused_and_the_task_waits_on(
    app_url: str, by: Any
) -> None:
    async with App(app_url) as app:

        @app.task
        async def work() -> None: ...

        handle = await work.enqueue()

        with pytest.raises(ConfigurationError, match=r"^by ") as raised:
            await handle.cancel("no", by=by)

        assert len(str(raised.value)) < 300
        assert (await handle.get()).status is TaskState.PENDING


async def test_the_longest_reason_and_the_longest_name_are_kept_together(app_url: str) -> None:
    async with App(app_url) as app:

        @app.task
        async def work() -> None: ...

        handle = await work.enqueue()

        assert await handle.cancel("ü" * 2000, by="ä" * 200)
        record = await handle.get()
        assert record.last_error is not None
        assert record.last_error.startswith("ü" * 2000)
        assert record.cancelled_by == "ä" * 200


@pytest.mark.parametrize("reason", ["", "two\nlines, tab\t\x7f", "ü" * 2000])
async def test_any_other_text_is_a_reason(app_url: str, reason: str) -> None:
    async with App(app_url) as app:

        @app.task
        async def work() -> None: ...

        handle = await work.enqueue()

        assert await handle.cancel(reason)
        assert (await handle.get()).last_error == reason
