"""Workers with little to do: how soon a task starts, what an idle one costs, who gets a share."""

import time
from functools import partial

from bench.cases.case import Case, Contest, Run, against
from bench.contenders import Contender
from bench.ratios import Values, percentile
from bench.stage import NO_OPS, Fleet, Stage, Workload

BEGIN_WITHIN = 30.0  # seconds
CALM_AFTER = 3.0  # seconds, of a worker that has begun
WARM_UP = 0.5  # seconds
BUFFER = 10_000  # tasks, of the greedy worker
SHARED_TASKS = 8_000  # four seconds of one worker
SHARED_AT_ONCE = 20
SHARED_MS = 10.0


def waiting_cases(contest: Contest) -> list[Case]:
    """Every case whose worker mostly waits."""
    return [_latency(contest), _idle(contest), _share(contest)]


def _latency(contest: Contest) -> Case:
    stage, ours, seconds = contest.stage, contest.ours, contest.sizes.latency_seconds
    names = [one.name for one in contest.peers]
    joining = [one for one in contest.queues if one.joins_transactions]
    within = {one.name: f"{one.name}, in a transaction" for one in joining}
    return Case(
        "latency",
        "milliseconds from before the enqueue until the handler runs, a task every 20 ms; also "
        "if it is enqueued in a transaction of the caller, which begins and commits meanwhile",
        (
            *(Run(one.name, partial(latency, stage, one, seconds)) for one in contest.queues),
            *(
                Run(within[one.name], partial(latency, stage, one, seconds, Workload(within=True)))
                for one in joining
            ),
        ),
        (
            *against(ours.name, names),
            *against(within[ours.name], names),
            *against(within[ours.name], [within[one] for one in names if one in within]),
        ),
        compared=("p50_ms", "p99_ms"),
        shown=("p50_ms", "p99_ms"),
    )


def _idle(contest: Contest) -> Case:
    stage, seconds = contest.stage, contest.sizes.idle_seconds
    return Case(
        "idle",
        f"a worker with nothing to do, for {seconds:g} s",
        tuple(Run(one.name, partial(idle, stage, one, seconds)) for one in contest.queues),
        against(contest.ours.name, [one.name for one in contest.peers]),
        compared=(),
        shown=("cpu_percent", "statements_s", "postgres_percent", "rss_mb"),
    )


def _share(contest: Contest) -> Case:
    tasks = SHARED_TASKS
    return Case(
        "share",
        f"{tasks:,} tasks of {SHARED_MS:g} ms for a worker with a buffer of {BUFFER:,} "
        "and one that comes later",
        (Run(contest.ours.name, partial(share, contest.stage, contest.ours, tasks)),),
        (),
        compared=(),
        shown=("share_percent", "wait_ms", "rate"),
    )


def latency(
    stage: Stage, contender: Contender, seconds: float, workload: Workload = NO_OPS
) -> Values:
    """Measure how soon handlers run in an idle worker."""
    with stage.database(contender) as database, stage.fleet(contender, database) as fleet:
        fleet.start(NO_OPS)
        _calm(fleet)
        warmed = stage.ask(contender, database, "latency", WARM_UP, workload)["sent"]
        fleet.wait(lambda: fleet.ran() >= warmed, BEGIN_WITHIN, "the first tasks")
        fleet.forget_starts()
        sent = stage.ask(contender, database, "latency", seconds, workload)["sent"]
        fleet.wait(lambda: len(fleet.starts()) >= sent, BEGIN_WITHIN, "every task")
        starts = fleet.starts()
    return {"p50_ms": percentile(starts, 50), "p99_ms": percentile(starts, 99)}


def idle(stage: Stage, contender: Contender, seconds: float) -> Values:
    """Measure what a worker costs that has had one task and gets no other."""
    with stage.database(contender) as database, stage.fleet(contender, database) as fleet:
        fleet.start(NO_OPS)
        stage.ask(contender, database, "bulk", 1)
        fleet.wait(lambda: fleet.ran() > 0, BEGIN_WITHIN, "the first task")
        time.sleep(CALM_AFTER)
        before, cpu = stage.counters.read(database), fleet.cpu_seconds()
        time.sleep(seconds)
        counted = stage.counters.read(database).since(before)
        return {
            "cpu_percent": 100 * (fleet.cpu_seconds() - cpu) / seconds,
            "statements_s": counted.statements / seconds,
            "postgres_percent": 100 * counted.cpu_seconds / seconds,
            "rss_mb": fleet.peak_megabytes(),
        }


def share(stage: Stage, contender: Contender, tasks: int) -> Values:
    """Measure what a second worker gets beside one that takes all it can into its buffer."""
    workload = Workload(tasks, sleep_ms=SHARED_MS, at_once=SHARED_AT_ONCE)
    with stage.database(contender) as database, stage.fleet(contender, database) as fleet:
        stage.ask(contender, database, "bulk", tasks, workload)
        fleet.start(workload, {"WINDLASS_BUFFER": str(BUFFER)})
        fleet.wait(lambda: fleet.ran() > SHARED_AT_ONCE, BEGIN_WITHIN, "the first tasks")
        fleet.start(workload)
        fleet.wait(lambda: len(fleet.tallies()) == len(fleet.workers), BEGIN_WITHIN, "the second")
        done = fleet.ran()
        fleet.wait(lambda: fleet.ran() >= tasks, BEGIN_WITHIN + tasks / 1000, "all tasks")
        ended = time.monotonic()
        second = max(fleet.tallies(), key=lambda tally: tally.began)
        waited = (second.first or time.monotonic_ns()) - second.began
        return {
            "share_percent": 100 * second.ran / max(1, tasks - done),
            "wait_ms": waited / 1e6,
            "rate": tasks / (ended - fleet.first() / 1e9),
        }


def _calm(fleet: Fleet) -> None:
    fleet.wait(lambda: bool(fleet.tallies()), BEGIN_WITHIN, "its beginning")
    time.sleep(CALM_AFTER)
