"""Two sessions that meet at a window: one task comes of it, and nobody waits for what is certain."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    SECOND,
    Sessions,
    add,
    claim,
    granted,
    lead,
    new_task,
    settlements,
)
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Answer, CancelAnswer, Change, Enqueued, Outcome, Window, WindowKind
from windlass.store.postgres import enqueueing
from windlass.store.postgres.store import PostgresStore

UNIQUE = Window(WindowKind.UNIQUE, 60.0)
THROTTLE = Window(WindowKind.THROTTLE, 60.0)
DEBOUNCE = Window(WindowKind.DEBOUNCE, 60.0)
SOON = Window(WindowKind.DEBOUNCE, 0.001)
EVERY_KIND = pytest.mark.parametrize(
    "window", [UNIQUE, THROTTLE, DEBOUNCE], ids=lambda one: one.kind
)
FIRST_WINS = pytest.mark.parametrize("window", [UNIQUE, THROTTLE], ids=lambda one: one.kind)
LEFT = "SELECT extract(epoch FROM until - windlass.clock())::float8 FROM windlass.dedupe"


# Also a statement that is under way sees it move.
MOVING_CLOCK = """
CREATE TABLE public.ahead (by interval NOT NULL);
INSERT INTO public.ahead VALUES ('0');
CREATE OR REPLACE FUNCTION windlass.clock() RETURNS timestamptz LANGUAGE plpgsql VOLATILE
AS 'BEGIN RETURN clock_timestamp() + (SELECT a.by FROM public.ahead a); END';
"""
AHEAD = "UPDATE public.ahead SET by = $1"


async def payload_of(store: PostgresStore, task_id: UUID) -> Any:
    return (await store.get(task_id)).payload


def asked(window: Window, number: int = 0) -> Any:
    return new_task(window=window, payload=json.dumps({"n": 0 if window is UNIQUE else number}))


@EVERY_KIND
async def test_an_enqueue_waits_for_an_open_twin_and_answers_with_its_task(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    producer = await sessions.begin()
    (first,) = await producer.store.enqueue([asked(window, 1)])

    twin = await sessions.blocked(store.enqueue([asked(window, 2)]), by=producer)
    await producer.commit()

    assert await twin == [Enqueued(first.id, created=False)]
    last = {"n": {UNIQUE: 0, THROTTLE: 1, DEBOUNCE: 2}[window]}
    assert await payload_of(store, first.id) == last
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.task") == 1


@EVERY_KIND
async def test_an_enqueue_whose_open_twin_is_undone_creates_the_task(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    await sessions.watcher.execute(MOVING_CLOCK)
    producer = await sessions.begin()
    await producer.store.enqueue([asked(window, 1)])
    second = asked(window, 2)

    twin = await sessions.blocked(store.enqueue([second]), by=producer)
    await sessions.watcher.execute(AHEAD, 30 * SECOND)
    await producer.rollback()

    assert await twin == [Enqueued(second.id, created=True)]
    assert await payload_of(store, second.id) == json.loads(second.payload)
    # It begins when the task is there, and not when it was asked for.
    assert 55 < await sessions.watcher.fetchval(LEFT) <= 60


@FIRST_WINS
async def test_a_window_that_ends_while_its_next_task_is_waited_for_is_opened_once(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    await store.enqueue([asked(window)])
    await sessions.advance(61 * SECOND)
    producer = await sessions.begin()
    (second,) = await producer.store.enqueue([asked(window)])
    assert second.created

    twin = await sessions.blocked(store.enqueue([asked(window)]), by=producer)
    await producer.commit()

    assert await twin == [Enqueued(second.id, created=False)]


@FIRST_WINS
async def test_who_waits_for_a_twin_until_that_window_is_over_opens_the_next(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    await sessions.watcher.execute(MOVING_CLOCK)
    producer = await sessions.begin()
    await producer.store.enqueue([asked(window)])
    second = asked(window)

    twin = await sessions.blocked(store.enqueue([second]), by=producer)
    await sessions.watcher.execute(AHEAD, 90 * SECOND)
    await producer.commit()

    assert await twin == [Enqueued(second.id, created=True)]
    assert 55 < await sessions.watcher.fetchval(LEFT) <= 60


@FIRST_WINS
async def test_who_finds_a_task_holds_up_nobody(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    (first,) = await store.enqueue([asked(window)])
    caller = await sessions.begin()
    assert not (await caller.store.enqueue([asked(window)]))[0].created

    async with asyncio.timeout(AT_ONCE):
        assert await store.enqueue([asked(window)]) == [Enqueued(first.id, created=False)]
        await sessions.advance(61 * SECOND)
        assert (await store.enqueue([asked(window)]))[0].created


@EVERY_KIND
async def test_calls_that_take_the_same_windows_in_another_order_do_not_deadlock(
    store: PostgresStore, sessions: Sessions, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "ENQUEUE_CHUNK", 2)
    other = await sessions.open_store()

    def call(keys: str) -> list[Any]:
        return [new_task(window=window._replace(key=key)) for key in keys]

    for _ in range(5):
        one, two = await asyncio.gather(
            store.enqueue(call("abcdefg")), other.enqueue(call("gfedcba"))
        )
        assert {answer.id for answer in one} == {answer.id for answer in two}
        assert (
            sorted(a.created or b.created for a, b in zip(one, reversed(two), strict=True))
            == [True] * 7
        )
        await sessions.watcher.execute("DELETE FROM windlass.dedupe")


async def test_one_statement_takes_its_windows_in_an_order_of_their_own(
    store: PostgresStore, sessions: Sessions
) -> None:
    first, second = (Window(WindowKind.THROTTLE, 60.0, key) for key in "ab")
    other = await sessions.begin()
    await other.store.enqueue([asked(first)])

    both = [asked(second), asked(first)]
    waiting = await sessions.blocked(store.enqueue(both), by=other)
    await other.store.enqueue([asked(second)])  # it would wait for who waits for it
    await other.commit()

    assert [one.created for one in await waiting] == [False, False]


@EVERY_KIND
async def test_a_large_call_is_answered_as_a_small_one(
    store: PostgresStore, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "ENQUEUE_CHUNK", 2)
    (before,) = await store.enqueue([asked(window._replace(key="old"), 1)])
    call = [
        new_task(window=window._replace(key=key), payload=json.dumps({"n": number}))
        for number, key in enumerate(["a", "old", "b", "a", "b", "a", "old"])
    ]

    answers = await store.enqueue(call)
    again = await store.enqueue(call, repeated=True)

    a, b = call[0].id, call[2].id
    assert [answer.id for answer in answers] == [a, before.id, b, a, b, a, before.id]
    assert [answer.created for answer in answers] == [True, False, True, *[False] * 4]
    assert again == answers
    last = window is DEBOUNCE
    assert [(await payload_of(store, one))["n"] for one in (a, b)] == ([5, 4] if last else [0, 2])


@EVERY_KIND
async def test_a_repeated_call_waits_for_its_first_and_answers_for_it(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    producer = await sessions.begin()
    task = asked(window)
    await producer.store.enqueue([task])

    again = await sessions.blocked(store.enqueue([task], repeated=True), by=producer)
    await producer.commit()

    assert await again == [Enqueued(task.id, created=True)]
    assert await sessions.places(task.id) == ["scheduled" if window is DEBOUNCE else "ready"]


async def test_a_debounce_waits_for_a_promotion_and_makes_another_task(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    await sessions.advance(61 * SECOND)
    leader = await sessions.begin()
    assert await leader.store.promote(10) == 1

    second = await sessions.blocked(store.enqueue([asked(DEBOUNCE, 2)]), by=leader)
    await leader.commit()

    (answer,) = await second
    assert answer.created
    assert await payload_of(store, first.id) == {"n": 1}
    assert await sessions.places(first.id) == ["ready"]
    assert await sessions.places(answer.id) == ["scheduled"]


async def test_a_debounce_whose_promotion_is_undone_replaces(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    await sessions.advance(61 * SECOND)
    leader = await sessions.begin()
    await leader.store.promote(10)

    second = await sessions.blocked(store.enqueue([asked(DEBOUNCE, 2)]), by=leader)
    await leader.rollback()

    assert await second == [Enqueued(first.id, created=False)]
    assert await payload_of(store, first.id) == {"n": 2}
    assert await store.promote(10) == 0


async def test_a_promotion_goes_round_what_is_being_debounced(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    (other,) = await add(store, delay=60.0)
    await sessions.advance(61 * SECOND)
    caller = await sessions.begin()
    await caller.store.enqueue([asked(DEBOUNCE, 2)])

    async with asyncio.timeout(AT_ONCE):
        assert await store.promote(10) == 1
        assert await granted(store) == [other]
    await caller.commit()

    assert await store.promote(10) == 0
    assert await sessions.places(first.id) == ["scheduled"]


async def test_a_debounce_does_not_wait_for_a_claim(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    await sessions.advance(61 * SECOND)
    await store.promote(10)
    worker = await sessions.begin()
    assert await granted(worker.store) == [first.id]

    async with asyncio.timeout(AT_ONCE):
        (second,) = await store.enqueue([asked(DEBOUNCE, 2)])

    assert second.created
    await worker.commit()
    assert await payload_of(store, first.id) == {"n": 1}


@pytest.mark.parametrize("is_undone", [False, True])
async def test_a_debounce_waits_for_a_cancellation(
    store: PostgresStore, sessions: Sessions, is_undone: bool
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    person = await sessions.begin()
    assert await person.store.cancel(first.id, "no longer needed") is CancelAnswer.CANCELLED

    second = await sessions.blocked(store.enqueue([asked(DEBOUNCE, 2)]), by=person)
    await (person.rollback() if is_undone else person.commit())

    (answer,) = await second
    assert answer.created is not is_undone
    assert await payload_of(store, first.id) == {"n": 2 if is_undone else 1}
    assert await sessions.places(first.id) == ["scheduled" if is_undone else "history"]


async def test_a_cancellation_waits_for_a_debounce_and_comes_after_it(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    caller = await sessions.begin()
    await caller.store.enqueue([asked(DEBOUNCE, 2)])

    cancelled = await sessions.blocked(store.cancel(first.id, "no longer needed"), by=caller)
    await caller.commit()

    assert await cancelled is CancelAnswer.CANCELLED
    assert await sessions.places(first.id) == ["history"]
    assert await payload_of(store, first.id) == {"n": 2}


async def test_a_debounce_waits_for_a_change_and_finds_the_task_again(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    person = await sessions.begin()
    await person.store.change(first.id, Change(queue="bulk", delay=3600.0))

    second = await sessions.blocked(store.enqueue([asked(DEBOUNCE, 2)]), by=person)
    await person.commit()

    assert await second == [Enqueued(first.id, created=False)]
    record = await store.get(first.id)
    assert (record.queue, record.payload) == ("bulk", {"n": 2})


async def test_of_two_debounces_at_once_the_last_to_commit_counts(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(DEBOUNCE, 1)])
    caller = await sessions.begin()
    await caller.store.enqueue([asked(DEBOUNCE, 2)])

    last = await sessions.blocked(store.enqueue([asked(DEBOUNCE, 3)]), by=caller)
    await caller.commit()

    assert await last == [Enqueued(first.id, created=False)]
    assert await payload_of(store, first.id) == {"n": 3}
    assert await sessions.places(first.id) == ["scheduled"]


async def test_many_debounces_beside_promotions_lose_none_and_double_none(
    store: PostgresStore, sessions: Sessions
) -> None:
    other = await sessions.open_store()
    made: list[UUID] = []

    async def call(which: PostgresStore, first: int) -> None:
        for number in range(first, first + 40):
            (answer,) = await which.enqueue([asked(SOON, number)])
            made.extend([answer.id] if answer.created else [])

    async def promote() -> None:
        for _ in range(60):
            await store.promote(10)
            await asyncio.sleep(0)

    await asyncio.gather(call(store, 0), call(other, 100), promote())
    await sessions.advance(SECOND)
    await store.promote(1000)

    assert len(set(made)) == len(made)
    assert {*await granted(store, limit=1000)} == set(made)


@EVERY_KIND
async def test_the_leader_goes_round_a_window_that_is_being_opened_again(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    await store.enqueue([asked(window)])
    await sessions.advance(61 * SECOND)
    await store.promote(10)
    caller = await sessions.begin()
    (second,) = await caller.store.enqueue([asked(window)])
    leadership = await lead(store)

    async with asyncio.timeout(AT_ONCE):
        assert await store.tidy(leadership=leadership) == 0
    await caller.commit()

    assert second.created
    assert await store.enqueue([asked(window)]) == [Enqueued(second.id, created=False)]


async def test_of_very_many_windows_some_are_forgotten_at_a_time(
    store: PostgresStore, sessions: Sessions
) -> None:
    await sessions.watcher.execute(
        "INSERT INTO windlass.dedupe SELECT 'resize', 't:' || n, gen_random_uuid(), '2020-01-01' "
        "FROM generate_series(1, 50001) AS s (n)"
    )
    leadership = await lead(store)

    assert (await store.due()).leftovers
    assert await store.tidy(leadership=leadership) == 50_000
    assert await store.tidy(leadership=leadership) == 1
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.dedupe") == 0


@EVERY_KIND
async def test_a_caller_of_a_higher_isolation_is_told_of_a_twin_it_cannot_see(
    store: PostgresStore, sessions: Sessions, window: Window
) -> None:
    caller = await sessions.begin("repeatable read")
    await caller.connection.fetchval("SELECT 1 FROM windlass.task")
    await store.enqueue([asked(window)])

    with pytest.raises(StoreUnavailable, match="could not serialize"):
        await caller.store.enqueue([asked(window)])


@pytest.mark.parametrize("sizes", [(10, 10), (10, 5000), (5000, 10), (5000, 6000)])
async def test_a_large_payload_is_kept_apart_only_while_it_is_the_last(
    store: PostgresStore, sessions: Sessions, sizes: tuple[int, int]
) -> None:
    for size in sizes:
        await store.enqueue([new_task(window=DEBOUNCE, payload=json.dumps({"s": "x" * size}))])

    apart = await sessions.watcher.fetch("SELECT payload FROM windlass.large_payload")
    assert [json.loads(row[0]) for row in apart] == (
        [{"s": "x" * sizes[1]}] if sizes[1] > 2000 else []
    )
    assert await sessions.watcher.fetchval(
        "SELECT (payload IS NULL) = $1 FROM windlass.task", sizes[1] > 2000
    )


async def test_a_role_that_may_enqueue_may_use_windows(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.enqueue([asked(DEBOUNCE, 1)])
    user = await sessions.begin()
    await user.connection.execute(
        """
        CREATE ROLE web_of_windows;
        GRANT USAGE ON SCHEMA windlass TO web_of_windows;
        GRANT SELECT ON ALL TABLES IN SCHEMA windlass TO web_of_windows;
        GRANT INSERT ON windlass.task, windlass.ready, windlass.scheduled, windlass.lane,
            windlass.idempotency, windlass.task_tag, windlass.large_payload, windlass.expiry
            TO web_of_windows;
        GRANT EXECUTE ON FUNCTION windlass.enqueue_windowed, windlass.reserve_windows
            TO web_of_windows;
        SET LOCAL ROLE web_of_windows;
        """
    )

    answers = await user.store.enqueue([asked(DEBOUNCE, 2), asked(UNIQUE), asked(THROTTLE)])

    assert [answer.created for answer in answers] == [False, True, True]
    await user.connection.execute("RESET ROLE")
    right = "SELECT has_function_privilege('public', p.oid, 'EXECUTE') FROM pg_proc p WHERE proname = $1"
    for name in ("enqueue", "enqueue_windowed", "reserve_windows"):
        assert not await user.connection.fetchval(right, name)
    await user.rollback()


async def test_what_a_debounced_task_was_enqueued_with_comes_whole(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await store.enqueue([asked(SOON, 1)])
    await store.enqueue([asked(SOON._replace(seconds=30.0), 2)])
    await sessions.advance(31 * SECOND)
    await store.promote(10)

    held = await claim(store)

    assert [(task.id, json.loads(task.payload)) for task in held.tasks] == [(first.id, {"n": 2})]
    assert await store.settle(settlements(held, Outcome.COMPLETED)) == [Answer.APPLIED]
