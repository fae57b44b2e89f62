"""Drains: of nothing, of sleepers, in threads, with payloads, results, lanes and keys."""

from functools import partial

from bench.cases.case import Case, Contest, Run, against
from bench.contenders import Contender
from bench.drains import drain
from bench.limit import limit
from bench.stage import Workload

PROCESSES = (1, 2, 4)
SLEEPS_MS = (1.0, 50.0)
SLEEPERS = 500  # at a time
PAYLOADS = {"0": 0, "1kB": 1_000, "100kB": 100_000}
LANES = 5  # queues, each with five priorities
LIMIT_BATCH = 500
LARGE = 100_000  # bytes: of such payloads a run has fewer


def throughput_cases(contest: Contest) -> list[Case]:
    """Every case that is a drain of a new database."""
    return [
        *(_drain(contest, number) for number in PROCESSES),
        *(_sleepers(contest, milliseconds) for milliseconds in SLEEPS_MS),
        _in_threads(contest),
        *(_payload(contest, name, size) for name, size in PAYLOADS.items()),
        _variant(contest, "results", "a result kept of each task", results=True),
        _variant(contest, "lanes", "five queues of five priorities each", lanes=LANES),
        _variant(contest, "keys", "an idempotency key for each task", keys=True),
        _gates(contest),
        _memory(contest),
        _limit(contest),
    ]


def _run(
    contest: Contest,
    contender: Contender,
    workload: Workload,
    *,
    label: str | None = None,
    processes: int = 1,
) -> Run:
    measure = partial(drain, contest.stage, contender, workload, processes=processes)
    return Run(label or contender.name, measure)


def _drain(contest: Contest, processes: int) -> Case:
    workload = Workload(contest.sizes.tasks)
    entrants = (contest.ours, contest.yardstick, *contest.peers)
    return Case(
        f"drain-{processes}",
        f"no-op tasks, worker processes: {processes}",
        tuple(_run(contest, one, workload, processes=processes) for one in entrants),
        against(contest.ours.name, [one.name for one in entrants]),
        compared=("rate", "wal_all"),
    )


def _sleepers(contest: Contest, milliseconds: float) -> Case:
    tasks = contest.sizes.tasks // 2
    workload = Workload(tasks, sleep_ms=milliseconds, at_once=SLEEPERS)
    plain = f"{contest.ours.name}, no-op"
    return Case(
        f"sleepers-{milliseconds:g}ms",
        f"handlers that sleep {milliseconds:g} ms, {SLEEPERS} at a time",
        (
            _run(contest, contest.ours, Workload(tasks, at_once=SLEEPERS), label=plain),
            *(_run(contest, one, workload) for one in contest.queues),
        ),
        against(contest.ours.name, [plain, *(one.name for one in contest.peers)]),
    )


def _in_threads(contest: Contest) -> Case:
    workload = Workload(contest.sizes.tasks // 5, sync=True)
    entrants = [one for one in contest.queues if one.is_python]
    return Case(
        "sync",
        "no-op tasks that are plain functions, in threads",
        tuple(_run(contest, one, workload) for one in entrants),
        against(contest.ours.name, [one.name for one in entrants]),
    )


def _payload(contest: Contest, name: str, size: int) -> Case:
    tasks = contest.sizes.tasks // (25 if size >= LARGE else 1)
    workload = Workload(max(tasks, 1), payload_bytes=size)
    return Case(
        f"payload-{name}",
        f"no-op tasks with payloads of {name}",
        tuple(_run(contest, one, workload) for one in contest.queues),
        against(contest.ours.name, [one.name for one in contest.queues]),
        compared=("rate", "enqueue_rate"),
        shown=("rate", "enqueue_rate", "worker_us", "postgres_us", "wal", "wal_all", "rss_mb"),
    )


def _variant(
    contest: Contest,
    name: str,
    about: str,
    *,
    results: bool = False,
    lanes: int = 1,
    keys: bool = False,
) -> Case:
    tasks = contest.sizes.tasks
    workload = Workload(tasks, results=results, lanes=lanes, keys=keys)
    return Case(
        name,
        f"no-op tasks of windlass, {about}",
        (
            _run(contest, contest.ours, Workload(tasks), label="plain"),
            _run(contest, contest.ours, workload, label=name),
        ),
        ((name, "plain"),),
        compared=("rate", "enqueue_rate"),
        shown=("rate", "enqueue_rate", "worker_us", "postgres_us", "statements", "wal", "buffers"),
    )


def _gates(contest: Contest) -> Case:
    tasks = contest.sizes.tasks
    ways = {
        "queue": "limit of its queue",
        "values": "limit by value",
        "ordering": "ordering key of its own",
    }
    return Case(
        "gates",
        "no-op tasks of windlass that have limits: one of their queue, or one of ten at once for each of 1,000 values; "
        "or an ordering key each",
        (
            _run(contest, contest.ours, Workload(tasks), label="plain"),
            *(
                _run(contest, contest.ours, Workload(tasks, gates=way), label=label)
                for way, label in ways.items()
            ),
        ),
        tuple((label, "plain") for label in ways.values()),
        compared=("rate", "enqueue_rate", "wal_all"),
        shown=("rate", "enqueue_rate", "worker_us", "postgres_us", "statements", "wal", "wal_all"),
    )


def _memory(contest: Contest) -> Case:
    few = Workload(contest.sizes.tasks, at_once=SLEEPERS)
    large = Workload(4 * SLEEPERS, payload_bytes=LARGE, sleep_ms=50, at_once=SLEEPERS)
    labels = {one: f"{one.name}, 100 kB each" for one in contest.queues}
    return Case(
        "memory",
        f"{SLEEPERS} no-op tasks at a time; {SLEEPERS} payloads of 100 kB in flight",
        (
            *(_run(contest, one, few) for one in contest.queues),
            *(_run(contest, one, large, label=label) for one, label in labels.items()),
        ),
        (
            *against(contest.ours.name, [one.name for one in contest.queues]),
            *against(labels[contest.ours], list(labels.values())),
        ),
        compared=("rss_mb",),
        shown=("rss_mb", "rate"),
    )


def _limit(contest: Contest) -> Case:
    workload = Workload(contest.sizes.tasks)
    ways = {f"pgbench, connections: {clients}": clients for clients in (1, 2)}
    bare = [
        Run(label, partial(limit, contest.stage, contest.ours, workload, LIMIT_BATCH, clients))
        for label, clients in ways.items()
    ]
    return Case(
        "limit",
        f"our statements by pgbench, batches of {LIMIT_BATCH}: the most that the store allows",
        (
            _run(contest, contest.ours, workload),
            _run(contest, contest.yardstick, workload),
            *bare,
        ),
        against(contest.ours.name, ways),
        shown=("rate", "postgres_us", "statements", "wal", "buffers"),
    )
