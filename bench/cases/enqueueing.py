"""Enqueueing: in bulk, one after the other, and from many coroutines of one process."""

from functools import partial

from bench.cases.case import Case, Contest, Run, against
from bench.contenders import Contender
from bench.ratios import Values
from bench.stage import Stage, Workload

SHOWN = ("rate", "postgres_us", "statements", "wal", "buffers")
SINGLY = "single"


def enqueue_cases(contest: Contest) -> list[Case]:
    """Every case without a worker."""
    many, few = contest.sizes.tasks, contest.sizes.singles
    return [
        _case(contest, "bulk", "enqueued by the call for many", many),
        _case(contest, SINGLY, "enqueued one after the other", few),
        _concurrent(contest, few * 5),
    ]


def _case(contest: Contest, command: str, about: str, tasks: int) -> Case:
    return Case(
        command,
        f"{tasks:,} tasks {about}",
        tuple(_run(contest, one, command, tasks) for one in contest.queues),
        against(contest.ours.name, [one.name for one in contest.queues]),
        shown=SHOWN,
    )


def _concurrent(contest: Contest, tasks: int) -> Case:
    one_by_one = f"{contest.ours.name}, one by one"
    return Case(
        "concurrent",
        f"{tasks:,} tasks enqueued one by one from 100 coroutines",
        (
            _run(contest, contest.ours, SINGLY, contest.sizes.singles, label=one_by_one),
            *(_run(contest, one, "concurrent", tasks) for one in contest.queues),
        ),
        against(contest.ours.name, [one_by_one, *(one.name for one in contest.peers)]),
        shown=SHOWN,
    )


def _run(
    contest: Contest, contender: Contender, command: str, tasks: int, *, label: str | None = None
) -> Run:
    measure = partial(enqueue, contest.stage, contender, command, tasks)
    return Run(label or contender.name, measure)


def enqueue(stage: Stage, contender: Contender, command: str, tasks: int) -> Values:
    """Measure one command that enqueues, in a new database."""
    wanted = Workload(tasks).tasks_for(contender) if command == "bulk" else tasks
    with stage.database(contender) as database:
        stage.settle_down(database)
        before = stage.counters.read(database)
        seconds = stage.ask(contender, database, command, wanted)["seconds"]
        counted = stage.counters.read(database).since(before)
    return {"rate": wanted / seconds, **counted.each(wanted)}
