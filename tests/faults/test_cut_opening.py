"""Opening, migrating and closing, cut off or left without an answer."""

import asyncio
import socket

import asyncpg
import pytest

from contract.pgbouncer import store_options
from faults.messages import COMMIT
from faults.proxy import Effect, Point, Proxy, after, before
from faults.scene import DEADLINE
from windlass.model.errors import StoreUnavailable
from windlass.store.postgres import connection as connection_module
from windlass.store.postgres import store as store_module
from windlass.store.postgres.parts import PACKAGE
from windlass.store.postgres.store import PostgresOptions, PostgresStore
from windlass.store.sqlfiles import SqlFiles

MIGRATIONS = [migration.number for migration in SqlFiles(PACKAGE, "windlass").migrations()]
# Everything that the migrations make, and how often each was noted.
SCHEMA = """
SELECT 'migration' AS kind, number::text AS said FROM windlass.migration
UNION ALL
SELECT 'relation', relname || ' ' || relkind::text FROM pg_class WHERE relnamespace = 'windlass'::regnamespace
UNION ALL
SELECT 'function', pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'windlass'::regnamespace
UNION ALL
SELECT 'constraint', conname || ' ' || pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = 'windlass'::regnamespace
"""


def store_on(url: str, *, auto_migrate: bool = True) -> PostgresStore:
    return PostgresStore(store_options(url, auto_migrate=auto_migrate))


async def test_opening_cut_off_at_any_point_can_be_repeated(
    proxy: Proxy, database_url: str
) -> None:
    url = proxy.url(database_url)
    with proxy.recording() as recording:
        store = store_on(url)
        await store.open()
        await store.close()
    assert after("Startup") in recording.points()

    for point in recording.points():
        rule = proxy.at(point)
        store = store_on(url)
        with pytest.raises(StoreUnavailable):
            await store.open()
        proxy.drop(rule)
        await store.open()
        assert await store.queues() == []
        await store.close()


async def test_a_migration_whose_commit_is_cut_off_is_there_once_or_not_at_all(
    proxy: Proxy, sql_url: str, empty_database_url: str, empty_sql_url: str
) -> None:
    schema = store_on(empty_database_url).schema

    # The first transaction makes the schema, each of the others is one migration. Each opening goes
    # on from where the last one was cut off.
    for number in range(1, len(MIGRATIONS) + 2):
        for side, done in ((before, max(0, number - 2)), (after, number - 1)):
            rule = proxy.at(side(COMMIT, number), text="COMMIT")
            store = store_on(proxy.url(empty_database_url))
            try:
                await store.open()
            except StoreUnavailable:
                pass
            else:
                await store.close()
            proxy.drop(rule)
            assert rule.reached.is_set()
            assert [one.number for one in await schema.pending()] == MIGRATIONS[done:]

    store = store_on(proxy.url(empty_database_url))
    await store.open()
    assert await schema_of(empty_sql_url) == await schema_of(sql_url)
    assert await store.queues() == []
    await store.close()


@pytest.mark.parametrize("point", [before("Parse"), before(COMMIT, 3), after(COMMIT, 3)], ids=str)
async def test_who_gives_up_on_opening_a_silent_server_ends(
    proxy: Proxy, empty_database_url: str, monkeypatch: pytest.MonkeyPatch, point: Point
) -> None:
    monkeypatch.setattr(connection_module, "GIVE_UP_AFTER", 0.05)
    proxy.pass_cancellations = False
    rule = proxy.at(point, Effect.HALF_OPEN)
    store = store_on(proxy.url(empty_database_url))

    opening = asyncio.create_task(store.open())
    async with asyncio.timeout(DEADLINE):
        await rule.reached.wait()
        opening.cancel()
        await asyncio.wait([opening])

    assert opening.cancelled()
    proxy.cut_all()
    await store.open()
    assert await store.queues() == []
    await store.close()


@pytest.mark.parametrize("statement", ["read_isolation", "has_migrations"])
async def test_opening_a_server_that_takes_connections_and_is_silent_is_given_up(
    proxy: Proxy, database_url: str, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.setattr(connection_module, "LOOK_WITHIN", 0.05)
    monkeypatch.setattr(connection_module, "GIVE_UP_AFTER", 0.05)
    proxy.pass_cancellations = False
    proxy.at(before("Execute"), Effect.HALF_OPEN, text=f"-- {statement}")
    store = PostgresStore(PostgresOptions(url=proxy.url(database_url), pooler=True))

    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            await store.open()

        await store.open()
        assert await store.queues() == []
    await store.close()


async def test_a_server_that_lets_nobody_in_and_is_silent_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "CONNECT_WITHIN", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        store = PostgresStore(PostgresOptions(url=f"postgresql://a@127.0.0.1:{port}/b"))

        async with asyncio.timeout(DEADLINE):
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} cannot be reached"):
                await store.open()


@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_store_is_closed_whatever_became_of_its_connections(
    proxy: Proxy, database_url: str, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    monkeypatch.setattr(store_module, "CLOSE_WITHIN", 0.05)
    store = store_on(proxy.url(database_url))
    await store.open()
    await store.queues()

    proxy.cut_all() if is_cut else proxy.half_open_all()

    async with asyncio.timeout(DEADLINE):
        await store.close()
    with pytest.raises(StoreUnavailable):
        await store.queues()


async def schema_of(url: str) -> list[tuple[str, str]]:
    connection = await asyncpg.connect(url)
    rows = await connection.fetch(SCHEMA)
    await connection.close()
    return sorted((row["kind"], row["said"]) for row in rows)
