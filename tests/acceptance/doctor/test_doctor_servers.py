"""What can be found only on a server or behind a pooler of its own."""

import asyncio
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from psycopg import pq

from acceptance.doctor.conditions import ERROR, NOTE, OK, WARNING, setting
from acceptance.doctor.findings import findings, said, tells
from contract.pgbouncer import BEHIND_POOLER, DEADLINE, Pooler
from windlass import App
from windlass.model.examination import Level
from windlass.policy.diagnosis import storage
from windlass.store.postgres.embedded import EmbeddedServer, is_installed


@pytest.mark.skipif(not is_installed(), reason="needs the embedded extra")
@pytest.mark.needs_direct("a server of its own")
async def test_what_only_the_whole_server_can_be_set_to_is_judged(
    with_data: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "OPEN_NOTE", -1.0)
    settings = {"max_prepared_transactions": "1", "autovacuum": "off", "full_page_writes": "off"}
    server = EmbeddedServer.acquire(with_data(tmp_path / ".windlass"), settings=settings)
    try:
        async with App(server.url):
            pass
        session = await asyncpg.connect(server.url)
        await session.execute("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'forgotten'")
        # Nobody is there to confirm a commit from here on.
        await session.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        await session.execute("SELECT pg_reload_conf()")
        while await session.fetchval("SHOW synchronous_standby_names") != "nobody":
            await asyncio.sleep(0.01)
        found = await findings(server.url)
        await session.close()
    finally:
        server.release()

    told = {(one.check, one.level): f"{one.found} {one.advice}" for one in found}
    assert "autovacuum or track_counts is off" in told["bloat", WARNING]
    assert "full_page_writes off" in told["durability", WARNING]
    assert "ROLLBACK PREPARED 'forgotten'" in told["transactions", WARNING]
    assert "synchronous_standby_names is 'nobody'" in told["replication", WARNING]


@contextmanager
def standby(url: str, slot: str, start: str, snapshot: int) -> Iterator[None]:
    """Follow a slot as a standby does whose oldest query has this snapshot, and confirm nothing."""
    connection = pq.PGconn.connect(f"{url}&replication=true".encode())
    try:
        begun = connection.exec_(f"START_REPLICATION SLOT {slot} PHYSICAL {start}".encode())
        assert begun.status == pq.ExecStatus.COPY_BOTH, connection.error_message
        feedback = struct.pack("!cqIIII", b"h", 0, snapshot, 0, 0, 0)
        connection.put_copy_data(feedback)
        connection.flush()
        yield
    finally:
        connection.finish()


@pytest.mark.skipif(not is_installed(), reason="needs the embedded extra")
@pytest.mark.needs_direct("a server of its own")
async def test_a_slot_that_holds_back_dead_rows_is_found(
    with_data: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "HELD_BACK", 2)
    monkeypatch.setattr(storage, "RETAINED", -1)
    directory = with_data(tmp_path / ".windlass")
    with (directory / "data" / "pg_hba.conf").open("a") as rules:
        rules.write("local replication all trust\n")
    # A server of its own: no dead row of the others is to stay because of this.
    server = EmbeddedServer.acquire(directory, settings={"fsync": "off"})
    try:
        session = await asyncpg.connect(server.url)
        await session.execute("SELECT pg_create_physical_replication_slot('behind', true)")
        snapshot = int(await session.fetchval("SELECT pg_current_xact_id()::text"))
        start = await session.fetchval("SELECT restart_lsn::text FROM pg_replication_slots")
        with standby(server.url, "behind", start, snapshot):
            async with asyncio.timeout(DEADLINE):
                while not await session.fetchval("SELECT xmin FROM pg_replication_slots"):
                    await asyncio.sleep(0.01)
            for _ in range(3):
                await session.execute("SELECT pg_current_xact_id()")
            followed = await said(server.url, "replication")
        async with asyncio.timeout(DEADLINE):
            while await session.fetchval("SELECT active FROM pg_replication_slots"):
                await asyncio.sleep(0.01)
        left = await said(server.url, "replication")
        await session.execute("SELECT pg_drop_replication_slot('behind')")
        dropped = await said(server.url, "replication")
        await session.close()
    finally:
        server.release()

    assert tells(followed, NOTE, "slot 'behind' is behind by"), followed
    assert tells(followed, WARNING, "'behind' holds back dead rows of"), followed
    assert tells(left, WARNING, "of the write-ahead log, and dead rows"), left
    assert [level for level, _ in dropped] == [OK]


# Around the pooler, and behind one that was not told of


IGNORED = (
    "jit",
    "default_transaction_isolation",
    "idle_in_transaction_session_timeout",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_keepalives_count",
)


@pytest.fixture
def lenient_pooler(server_url: str) -> Iterator[Pooler]:
    """One that lets in whoever does not know of it."""
    with Pooler.running(server_url, ignored=IGNORED) as pooler:
        yield pooler


@pytest.mark.skipif(BEHIND_POOLER, reason="has a pooler of its own")
async def test_a_pooler_is_noticed_and_what_it_lacks(
    lenient_pooler: Pooler, patient_sql_url: str, sql_url: str, sql: asyncpg.Connection
) -> None:
    async def told(**settings: Any) -> dict[str, list[tuple[Level, str]]]:
        found = await App(lenient_pooler.url(patient_sql_url), **settings).diagnosis()
        return {
            check: [(one.level, one.found) for one in found if one.check == check]
            for check in ("connection", "pooler", "isolation", "places")
        }

    unaware = await told()
    alone = await told(pooler=True)
    astray = await told(pooler=True, direct_url=sql_url)
    lost = await told(pooler=True, direct_url="postgresql://nobody@127.0.0.1:1/none")
    await sql.execute(setting("default_transaction_isolation", "''serializable''"))
    await sql.execute(setting("idle_in_transaction_session_timeout", "''1 min''"))
    try:
        await lenient_pooler.close_sessions(patient_sql_url)
        around = await told(pooler=True, direct_url=patient_sql_url)
    finally:
        await sql.execute(setting("default_transaction_isolation", None))
        await sql.execute(setting("idle_in_transaction_session_timeout", None))

    assert tells(unaware["pooler"], WARNING, "the setting pooler is off")
    assert tells(alone["pooler"], NOTE, "direct_url is not")
    assert tells(alone["pooler"], NOTE, "idle_in_transaction_session_timeout is not set")
    assert tells(astray["pooler"], WARNING, "direct_url: direct_url leads to database")
    assert tells(lost["pooler"], WARNING, "127.0.0.1:1 cannot be reached")
    assert around["pooler"] == [(OK, "through a pooler, with a way around it")]
    assert tells(around["isolation"], ERROR, "is 'serializable' for role")
    for found in (unaware, alone, astray, lost):
        assert [found[check][0][0] for check in ("connection", "isolation", "places")] == [OK] * 3
