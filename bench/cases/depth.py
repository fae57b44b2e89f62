"""Drains beside much else: millions of rows, an old snapshot, an open transaction that writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

from bench.cases.case import Case, Contest, Run
from bench.drains import PARTS, Beside, drain, drain_in, nothing
from bench.filling import fill
from bench.ratios import Values
from bench.servers import Server
from bench.stage import Workload

EMPTY, PENDING, FINISHED = "empty", "pending", "finished"
SCHEDULED = "scheduled"
AN_HOUR = 3600.0  # seconds


def depth_cases(contest: Contest) -> list[Case]:
    """The cases that need long, and are run by name only."""
    return [_deep(contest), _later(contest), _snapshot(contest)]


def _deep(contest: Contest) -> Case:
    stage, ours = contest.stage, contest.ours
    workload = Workload(contest.sizes.tasks)

    @cache  # filled once, and drained in every round
    def filled(place: str, number: int) -> str:
        database = stage.make(ours)
        stage.ask(ours, database, "bulk", 1)
        if place == FINISHED:
            drain_in(stage, ours, database, Workload(1))
        fill(stage.server, database, number)
        return database

    def beside(place: str, number: int) -> Values:
        database = filled(place, number)
        stage.ask(ours, database, "bulk", workload.tasks)
        stage.settle_down(database)
        return drain_in(stage, ours, database, workload)

    def alone() -> Values:
        with stage.database(ours) as database:
            stage.ask(ours, database, "bulk", workload.tasks)
            stage.settle_down(database)
            return drain_in(stage, ours, database, workload)

    sizes = contest.sizes
    return Case(
        "deep",
        f"no-op tasks of windlass with {sizes.pending:,} pending, or beside "
        f"{sizes.finished:,} finished; until so many handlers have run",
        (
            Run(EMPTY, alone),
            Run(PENDING, partial(beside, PENDING, sizes.pending)),
            Run(FINISHED, partial(beside, FINISHED, sizes.finished)),
        ),
        ((PENDING, EMPTY), (FINISHED, EMPTY)),
        shown=("rate", "postgres_us", "wal", "buffers"),
    )


def _later(contest: Contest) -> Case:
    stage, ours = contest.stage, contest.ours
    workload = Workload(contest.sizes.tasks)
    number = contest.sizes.pending

    @cache
    def filled() -> str:
        database = stage.make(ours)
        stage.ask(ours, database, "bulk", 1, workload=Workload(1, delay=AN_HOUR))
        fill(stage.server, database, number)
        return database

    def drained(database: str) -> Values:
        stage.ask(ours, database, "bulk", workload.tasks)
        stage.settle_down(database)
        return drain_in(stage, ours, database, workload)

    def alone() -> Values:
        with stage.database(ours) as database:
            return drained(database)

    return Case(
        "later",
        f"no-op tasks of windlass beside {number:,} that wait for their time",
        (Run(EMPTY, alone), Run(SCHEDULED, lambda: drained(filled()))),
        ((SCHEDULED, EMPTY),),
        shown=("rate", "postgres_us", "wal", "buffers"),
    )


def _snapshot(contest: Contest) -> Case:
    server = contest.stage.server
    ways: dict[str, Beside] = {
        "alone": nothing,
        "old snapshot": partial(_old_snapshot, server),
        "open writer": partial(_open_writer, server),
    }
    workload = Workload(contest.sizes.snapshot_tasks)
    return Case(
        "snapshot",
        f"{workload.tasks:,} no-op tasks of windlass while another session holds an old snapshot, "
        "or an open transaction that has written; tasks/s also by fifths of the run",
        tuple(
            Run(label, partial(drain, contest.stage, contest.ours, workload, beside=way))
            for label, way in ways.items()
        ),
        (("old snapshot", "alone"), ("open writer", "alone")),
        shown=("rate", *(f"part_{part + 1}" for part in range(PARTS)), "postgres_us", "buffers"),
    )


@contextmanager
def _old_snapshot(server: Server, database: str) -> Iterator[None]:
    with server.connect(database) as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT FROM pg_class LIMIT 1")  # which takes the snapshot
        yield
        connection.execute("ROLLBACK")


@contextmanager
def _open_writer(server: Server, database: str) -> Iterator[None]:
    with server.connect(database) as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE public.held ()")
        yield
        connection.execute("ROLLBACK")
