"""A standby takes no writes until it is promoted: who waits, who looks on, who follows."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest

from contract.postgres_sessions import new_task
from faults.noting import enqueue_in_the_end, noting_worker
from faults.processes import until
from faults.said import DEADLINE
from faults.standby import Pair, pair
from windlass import App, StoreUnavailable
from windlass.model.examination import Level
from windlass.store.postgres.embedded import is_installed
from windlass.store.postgres.store import PostgresOptions, PostgresStore

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
    pytest.mark.needs_direct("which host is the primary is asked of the hosts themselves"),
]
LEASE = {"lease": 10, "heartbeat": 2}
WAITING = "FROM pg_stat_activity WHERE application_name = 'windlass' AND wait_event = 'SyncRep'"


@pytest.fixture(scope="module")
def standing(with_data: Callable[[Path], Path]) -> Iterator[Pair]:
    """Two servers that stay what they are, with our schema, for tests that do not part them."""
    with pair(with_data) as servers:
        asyncio.run(migrate(servers))
        yield servers


@pytest.fixture
def servers(with_data: Callable[[Path], Path]) -> Iterator[Pair]:
    with pair(with_data) as servers:
        yield servers


async def migrate(servers: Pair) -> None:
    async with App(servers.primary.url):
        pass


@pytest.mark.parametrize("auto_migrate", [True, False])
async def test_an_app_that_leads_to_a_standby_alone_is_told_so(
    standing: Pair, auto_migrate: bool
) -> None:
    with pytest.raises(StoreUnavailable, match="takes no writes: it is a standby"):
        await App(standing.standby.url, auto_migrate=auto_migrate).enqueue("note", {"n": 1})


async def test_whoever_only_wants_to_read_may_do_so_on_a_standby(standing: Pair) -> None:
    async with App(standing.primary.url) as app:
        handle = await app.enqueue("note", {"n": 1}, ordering_key="k")

    async with App(f"{standing.standby.url}&target_session_attrs=any") as app:
        assert (await app.handle(handle.id).get()).status == "pending"
        reasons = [reason.kind for reason in (await app.handle(handle.id).explain()).reasons]
        assert reasons == ["gate_called", "nobody_handles"]
        with pytest.raises(StoreUnavailable, match="read-only transaction"):
            await app.enqueue("note", {"n": 2})


async def test_the_doctor_examines_a_standby_and_says_that_it_is_one(standing: Pair) -> None:
    async def found(url: str) -> dict[str, tuple[Level, str]]:
        return {one.check: (one.level, one.found) for one in await App(url).diagnosis()}

    primary = await found(standing.primary.url)
    standby = await found(standing.standby.url)
    reader = await found(f"{standing.standby.url}&target_session_attrs=any")

    assert (primary["connection"][0], primary["version"][0]) == (Level.OK, Level.OK)
    assert primary["replication"] == (Level.OK, "0 slots, 1 standby connection")
    assert standby["connection"][0] is Level.ERROR
    assert "it is a standby" in standby["connection"][1]
    assert (reader["connection"][0], reader["version"][0]) == (Level.OK, Level.WARNING)
    for one in (primary, standby, reader):
        assert (one["migrations"][0], one["places"][0]) == (Level.OK, Level.OK)


async def test_of_several_hosts_the_primary_is_found(standing: Pair) -> None:
    both = standing.url(standing.standby.host, standing.primary.host)

    async with App(both) as app:
        handle = await app.enqueue("note", {"n": 1})

    async with App(standing.primary.url) as app:
        assert (await app.handle(handle.id).get()).status == "pending"


async def test_a_host_that_is_silent_does_not_keep_us_from_the_next(standing: Pair) -> None:
    both = standing.url(standing.standby.host, standing.primary.host)

    with standing.standby.silent():
        # The driver by itself gives up on all hosts after a minute with the first.
        async with asyncio.timeout(50), App(both) as app:
            await app.enqueue("note", {"n": 1})


async def test_what_the_url_says_of_the_session_decides(standing: Pair) -> None:
    hosts = (standing.primary.host, standing.standby.host)

    async with App(standing.url(*hosts, target_session_attrs="standby")) as app:
        with pytest.raises(StoreUnavailable, match="read-only transaction"):
            await app.enqueue("note", {"n": 1})
    with pytest.raises(StoreUnavailable, match="not what target_session_attrs"):
        await App(standing.url(hosts[0], target_session_attrs="standby")).enqueue("note", {})


async def test_a_worker_whose_address_leads_to_a_standby_waits_until_it_is_promoted(
    servers: Pair, tmp_path: Path
) -> None:
    url = servers.url(servers.address)
    async with App(url) as app:
        with noting_worker(tmp_path, url, **LEASE) as worker:
            await app.enqueue("note", {"n": 0})
            await asyncio.to_thread(until, lambda: worker.ran() == [0])
            servers.move_address(servers.standby)
            servers.primary.kill()
            await asyncio.to_thread(
                until, lambda: worker.said().count("takes no writes: it is a standby") > 3
            )
            await servers.promote()

            await enqueue_in_the_end(app, 1)
            await asyncio.to_thread(until, lambda: worker.ran() == [0, 1])
            await asyncio.to_thread(worker.drain)


async def test_workers_and_clients_follow_a_failover_and_lose_nothing(
    servers: Pair, tmp_path: Path
) -> None:
    url = servers.url(servers.primary.host, servers.standby.host)
    acknowledged = []

    async def enqueue(app: App, numbers: range) -> None:
        for n in numbers:
            try:
                await app.enqueue("note", {"n": n})
            except StoreUnavailable:
                await asyncio.sleep(0.05)
            else:
                acknowledged.append(n)

    async with App(url) as app:
        with noting_worker(tmp_path, url, concurrency=2, **LEASE) as worker:
            await enqueue(app, range(200))
            await asyncio.to_thread(until, lambda: len(worker.ran()) > 20)
            servers.primary.kill()
            await enqueue(app, range(200, 210))
            await servers.promote()
            await enqueue_in_the_end(app, 300)
            await enqueue(app, range(301, 400))

            wanted = {*acknowledged, 300}
            await asyncio.to_thread(until, lambda: wanted <= set(worker.ran()))
            await asyncio.to_thread(worker.drain)

    assert set(range(200)) <= wanted
    assert set(Counter(worker.ran()).values()) == {1}


async def test_connections_to_a_demoted_primary_are_given_up(servers: Pair) -> None:
    async with App(servers.url(servers.primary.host, servers.standby.host)) as app:
        await asyncio.gather(*(app.enqueue("note", {"n": n}) for n in range(8)))
        await servers.primary.set("default_transaction_read_only", "on")
        await servers.promote()

        await asyncio.gather(*(app.enqueue("note", {"n": n}) for n in range(8)))

    assert await servers.standby.run("SELECT count(*) FROM windlass.tasks") == 16


@asynccontextmanager
async def somebody_idle(servers: Pair) -> AsyncIterator[None]:
    """Have a worker registered that waits for tasks, but does nothing."""
    await servers.primary.run(
        "INSERT INTO windlass.worker_pulse VALUES (gen_random_uuid(), now(), now() + '1 h', 0, true)"
    )
    try:
        yield
    finally:
        await servers.primary.run("DELETE FROM windlass.worker_pulse")


@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
@pytest.mark.parametrize(
    ("key", "is_awaited"), [(None, False), (None, True), ("k", False)], ids=str
)
async def test_an_enqueue_is_acknowledged_only_once_the_standby_has_it(
    standing: Pair, end: str, key: str | None, is_awaited: bool
) -> None:
    """Whoever ends the wait of a commit does not undo it, and does not make it safe either."""
    idle = somebody_idle(standing) if is_awaited else nullcontext()
    async with idle, App(standing.primary.url) as app:
        await app.enqueue("note", {"n": 1})
        await standing.standby.run("SELECT pg_wal_replay_pause()")
        try:
            key = key and f"{key} {end}"
            enqueueing = asyncio.create_task(app.enqueue("note", {"n": 2}, idempotency_key=key))
            while not await standing.primary.run(f"SELECT {end}(pid) {WAITING}"):
                await asyncio.sleep(0.01)
            again = f"SELECT count(*) {WAITING} AND query = 'COMMIT;'"
            while not enqueueing.done() and not await standing.primary.run(again):
                await asyncio.sleep(0.01)
            assert not enqueueing.done()
        finally:
            await standing.standby.run("SELECT pg_wal_replay_resume()")
        handle = await enqueueing

    query = f"SELECT count(*) FROM windlass.tasks WHERE id = '{handle.id}'"
    assert await standing.standby.run(query) == 1


async def test_an_enqueue_does_not_answer_for_what_its_connection_did_before(
    standing: Pair,
) -> None:
    store = PostgresStore(PostgresOptions(url=standing.primary.url))
    await store.open()
    try:
        await standing.standby.run("SELECT pg_wal_replay_pause()")
        try:
            pausing = asyncio.create_task(store.pause("unsure"))
            while not pausing.done():
                await standing.primary.run(f"SELECT count(pg_cancel_backend(pid)) {WAITING}")
                await asyncio.sleep(0.01)
            await pausing  # nobody promises that it is on the standby
        finally:
            await standing.standby.run("SELECT pg_wal_replay_resume()")
        (answer,) = await store.enqueue([new_task()])
    finally:
        await store.close()

    query = f"SELECT count(*) FROM windlass.tasks WHERE id = '{answer.id}'"
    assert await standing.standby.run(query) == 1


async def test_a_key_that_is_found_is_acknowledged_only_once_the_standby_has_its_task(
    standing: Pair,
) -> None:
    """Its first call was told that it may not have happened, and is made again by hand."""
    async with App(standing.primary.url) as app:
        await standing.standby.run("SELECT pg_wal_replay_pause()")
        try:
            first = asyncio.create_task(app.enqueue("note", {"n": 3}, idempotency_key="found"))
            while not first.done():
                await standing.primary.run(f"SELECT count(pg_cancel_backend(pid)) {WAITING}")
                await asyncio.sleep(0.01)
            assert isinstance(first.exception(), StoreUnavailable)
            again = asyncio.create_task(app.enqueue("note", {"n": 3}, idempotency_key="found"))
            while not again.done() and not await standing.primary.run(f"SELECT count(*) {WAITING}"):
                await asyncio.sleep(0.01)
            assert not again.done()
        finally:
            await standing.standby.run("SELECT pg_wal_replay_resume()")
        handle = await again

    query = f"SELECT count(*) FROM windlass.tasks WHERE id = '{handle.id}'"
    assert await standing.standby.run(query) == 1


async def test_a_task_is_claimed_while_its_enqueue_waits_and_begins_when_both_are_safe(
    standing: Pair,
) -> None:
    app = App(standing.primary.url)
    ran = asyncio.Event()

    @app.task
    async def note_early() -> str:
        ran.set()
        return "done"

    claiming = f"SELECT count(*) {WAITING} AND query LIKE '-- claim_%'"  # by its name, or by a poll
    async with app, app.worker():
        while not await standing.primary.run(
            "SELECT count(*) FROM windlass.worker_pulse WHERE idle"
        ):
            await asyncio.sleep(0.01)
        await standing.standby.run("SELECT pg_wal_replay_pause()")
        try:
            enqueueing = asyncio.create_task(note_early.enqueue())
            async with asyncio.timeout(DEADLINE):
                while not await standing.primary.run(claiming):
                    await asyncio.sleep(0.01)
            assert not enqueueing.done()
            assert not ran.is_set()
        finally:
            await standing.standby.run("SELECT pg_wal_replay_resume()")
        assert await (await enqueueing).result(timeout=DEADLINE) == "done"
