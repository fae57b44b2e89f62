"""Handlers that compute, in one process of a worker and in two; and what the machine gives without us."""

import subprocess
import sys
import time
from functools import partial

from bench.cases.case import Case, Contest, Run
from bench.drains import DRAIN_WITHIN
from bench.ratios import Values
from bench.stage import Workload

LOOPS = 2_000_000  # of arithmetic in each task: some tens of milliseconds
ONE, TWO = "1 process", "2 processes"
BARE_ONE, BARE_TWO = "bare, 1 process", "bare, 2 processes"
BARE = "import sys\nfor _ in range(int(sys.argv[1])): sum(range(int(sys.argv[2])))"


def computing_cases(contest: Contest) -> list[Case]:
    """The case that shows whether more cores do more work."""
    return [
        Case(
            "processes",
            f"{contest.sizes.computing:,} tasks of windlass that compute, with run='process' in one worker",
            (
                Run(ONE, partial(_compute, contest, 1)),
                Run(TWO, partial(_compute, contest, 2)),
                Run(BARE_ONE, partial(_compute_bare, contest, 1)),
                Run(BARE_TWO, partial(_compute_bare, contest, 2)),
            ),
            ((TWO, ONE), (BARE_TWO, BARE_ONE), (TWO, BARE_TWO)),
            shown=("rate",),
        )
    ]


def _compute(contest: Contest, processes: int) -> Values:
    """Measure from the first handler until every task has ended; processes are started before."""
    stage, ours, tasks = contest.stage, contest.ours, contest.sizes.computing
    workload = Workload(tasks, loops=LOOPS, processes=processes)
    with stage.database(ours) as database:
        stage.ask(ours, database, "bulk", tasks)
        stage.settle_down(database)
        with stage.server.connect(database) as connection, stage.fleet(ours, database) as fleet:
            fleet.start(workload)
            fleet.wait(
                lambda: connection.execute(ours.unfinished).fetchone() == (False,),
                DRAIN_WITHIN,
                "the end of every task",
            )
            return {"rate": tasks / (time.monotonic() - fleet.first() / 1e9)}


def _compute_bare(contest: Contest, processes: int) -> Values:
    """Measure the same arithmetic by itself, so that what others do to the machine can be told apart."""
    each = max(1, contest.sizes.computing // processes)
    command = [sys.executable, "-c", BARE, str(each), str(LOOPS)]
    began = time.monotonic()
    running = [subprocess.Popen(command) for _ in range(processes)]
    for one in running:
        one.wait()
    return {"rate": each * processes / (time.monotonic() - began)}
