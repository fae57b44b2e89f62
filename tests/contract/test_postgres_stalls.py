"""A server that ends a session or does not answer costs a call, and not the store."""

import asyncio
import os
import signal
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from windlass.model.errors import StoreUnavailable
from windlass.service import first_of
from windlass.store.postgres import connection as connection_module
from windlass.store.postgres import statements
from windlass.store.postgres.connection import connect, translated
from windlass.store.postgres.dial import Route
from windlass.store.postgres.store import PostgresOptions, PostgresStore

SESSION = """
SELECT pid FROM pg_stat_activity
WHERE application_name = 'windlass' AND datname = current_database()
"""


def test_a_session_that_the_driver_finds_in_a_strange_state_is_an_outage() -> None:
    with pytest.raises(StoreUnavailable), translated():
        raise asyncpg.InternalClientError("cannot switch to state 11")


@pytest.mark.needs_direct("the session of the call is stopped")
@pytest.mark.parametrize("in_transaction", [False, True])
async def test_a_call_given_up_on_a_server_that_does_not_answer_ends_and_the_next_one_works(
    database_url: str, monkeypatch: pytest.MonkeyPatch, in_transaction: bool
) -> None:
    monkeypatch.setattr(statements, "GIVE_UP_AFTER", 0.1)
    store = PostgresStore(PostgresOptions(url=database_url, pool_size=1))
    await store.open()
    await store.queues()
    watcher = await asyncpg.connect(database_url)
    session = await watcher.fetchval(SESSION)
    try:
        os.kill(session, signal.SIGSTOP)
    except PermissionError:
        pytest.skip("NOT TRIED: the server runs as another user, who alone may stop its processes")
    try:
        call = asyncio.create_task(store.promote(1) if in_transaction else store.queues())
        await asyncio.sleep(0.05)
        call.cancel()
        async with asyncio.timeout(10) as limit:
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await store.queues() == []
        assert not limit.expired()
    finally:
        os.kill(session, signal.SIGCONT)
    await watcher.close()
    await store.close()


@pytest.mark.needs_direct("the session of the retention is stopped")
async def test_a_retention_given_up_on_a_server_that_does_not_answer_ends(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []

    async def connect_and_stop(route: Route, **options: Any) -> asyncpg.Connection:
        connection = await connect(route, **options)
        stopped.append(connection.get_server_pid())
        os.kill(stopped[0], signal.SIGSTOP)
        reached.set()
        return connection

    reached = asyncio.Event()
    monkeypatch.setattr(connection_module, "GIVE_UP_AFTER", 0.1)
    store = PostgresStore(PostgresOptions(url=database_url))
    await store.open()
    leadership = await store.lead(UUID(int=1), current=None, term=timedelta(minutes=1))
    assert leadership is not None
    monkeypatch.setattr(connection_module, "connect", connect_and_stop)
    call = asyncio.create_task(store.retain(leadership=leadership))
    try:
        async with asyncio.timeout(10) as limit:
            await first_of(reached.wait(), asyncio.shield(call))
            if call.done() and isinstance(call.exception(), PermissionError):
                pytest.skip("NOT TRIED: the server runs as another user")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert not limit.expired()
    finally:
        for session in stopped:
            with suppress(PermissionError):
                os.kill(session, signal.SIGCONT)
        await store.close()
