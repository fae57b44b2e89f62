"""Statements that the server gives up: too slow, or in a deadlock. They are repeated."""

import asyncio

import asyncpg
import psycopg
import pytest

from acceptance.quick import QUICK
from contract.pgbouncer import store_options
from contract.postgres_sessions import LEASE, Sessions, add, claim, settlements
from windlass import App
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Answer, Outcome
from windlass.store.postgres.connection import connected
from windlass.store.postgres.dial import Route
from windlass.store.postgres.store import PostgresStore

SLOW_ENDS = """
CREATE FUNCTION public.linger() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_sleep(5); RETURN NEW; END $$;
CREATE TRIGGER linger BEFORE INSERT ON windlass.history
FOR EACH ROW EXECUTE FUNCTION public.linger();
"""


async def test_a_settlement_that_times_out_in_the_server_is_repeated_and_applied_once(
    database_url: str, sql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = await asyncpg.connect(sql_url)
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f"ALTER DATABASE {name} SET statement_timeout = '200ms'")
    await connection.execute(SLOW_ENDS)
    runs: list[int] = []
    async with App(database_url, **QUICK) as app:

        @app.task
        async def work(n: int) -> int:
            runs.append(n)
            return n

        async with app.worker():
            handle = await work.enqueue(7)
            async with asyncio.timeout(30):
                while "store.unavailable doing=settle" not in caplog.text:
                    await asyncio.sleep(0.02)
            await connection.execute("DROP TRIGGER linger ON windlass.history")
            assert await handle.result(timeout=30) == 7
    await connection.close()

    assert runs == [7]
    assert "canceling statement due to statement timeout" in caplog.text


async def test_a_settlement_that_a_deadlock_costs_changes_nothing_and_can_be_repeated(
    database_url: str, postgres_store: PostgresStore, sessions: Sessions
) -> None:
    """A user's transaction waits for what the settlement holds, and the other way round."""
    name = await sessions.watcher.fetchval("SELECT current_database()")
    await sessions.watcher.execute(f"ALTER DATABASE {name} SET deadlock_timeout = '1s'")
    store = PostgresStore(store_options(database_url, patience=10 * LEASE))
    await store.open()
    first, second = sorted(await add(postgres_store, 2))
    held = await claim(postgres_store)
    ends = settlements(held, Outcome.COMPLETED)
    user = await sessions.begin()
    await user.connection.execute("SET deadlock_timeout = '1h'")  # ours is to be the victim
    await user.lock_task(second)

    settling = await sessions.blocked(store.settle(ends), by=user)
    waiting = asyncio.create_task(user.lock_task(first))
    with pytest.raises(StoreUnavailable, match="deadlock"):
        await settling
    await waiting
    assert await sessions.places(first) == await sessions.places(second) == ["claim"]
    await user.commit()

    assert await store.settle(ends) == [Answer.APPLIED] * 2
    assert await sessions.places(first) == await sessions.places(second) == ["history"]
    await store.close()


async def test_to_take_leave_of_a_session_that_was_ended_is_no_error(sql_url: str) -> None:
    async with connected(Route(sql_url)) as connection:
        process = await connection.fetchval("SELECT pg_backend_pid()")
        with psycopg.connect(sql_url, autocommit=True) as other:
            # Waits for its end, in this thread: the event loop does not see it before we leave.
            ended = other.execute("SELECT pg_terminate_backend(%s, 30000)", [process]).fetchone()

    assert ended == (True,)
