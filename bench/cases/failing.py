"""Tasks that call a dependency of which half the calls fail: what is done while they arrive, with and without a budget."""

import asyncio
import random
import time
from dataclasses import replace
from functools import partial

from bench.cases.case import Case, Contest, Run
from bench.ratios import Values
from windlass import App, Budget, Retry

PLAIN, BUDGET = "plain backoff", "with a budget"
ARRIVALS = 120  # tasks a second
SERVERS, SERVICE = (
    4,
    0.02,
)  # calls that it answers at once, and seconds that each takes: 200 a second
PATIENCE = 0.25  # seconds after which a caller gives up; the dependency does the work all the same
FAILING = 0.5  # of the calls that it answers
BACKOFF = Retry(max_attempts=100, base=0.1, ceiling=5.0, jitter="full")


def failing_cases(contest: Contest) -> list[Case]:
    """The case that shows whether retries crowd out first attempts."""
    seconds = contest.sizes.failing_seconds
    return [
        Case(
            "budget",
            f"tasks that complete while {ARRIVALS} a second arrive for {seconds:g} s; they call what answers "
            f"{SERVERS / SERVICE:.0f} calls a second and fails {FAILING:.0%} of them",
            (
                Run(PLAIN, partial(_goodput, contest, None)),
                Run(BUDGET, partial(_goodput, contest, Budget(share=0.2, window=2.0))),
            ),
            ((BUDGET, PLAIN),),
            shown=("rate", "calls"),
        )
    ]


class Dependency:
    """Answers so many calls at once, in order, also those that nobody waits for any more."""

    def __init__(self) -> None:
        self._servers = asyncio.Semaphore(SERVERS)
        self._chance = random.Random(1)  # the same for both
        self._serving: set[asyncio.Task[None]] = set()
        self.calls = 0

    async def call(self) -> None:
        """Wait for an answer, for a while."""
        self.calls += 1
        answering = asyncio.create_task(self._answer())
        self._serving.add(answering)
        answering.add_done_callback(self._forget)
        async with asyncio.timeout(PATIENCE):
            await asyncio.shield(answering)

    def _forget(self, answering: asyncio.Task[None]) -> None:
        self._serving.discard(answering)
        if not answering.cancelled():
            answering.exception()  # nobody may wait for it any more

    async def _answer(self) -> None:
        async with self._servers:
            await asyncio.sleep(SERVICE)
        if self._chance.random() < FAILING:
            raise ConnectionError("it fails")


def _goodput(contest: Contest, budget: Budget | None) -> Values:
    with contest.stage.database(contest.ours) as database:
        url = contest.stage.server.on(database)
        return asyncio.run(_run(url, budget, contest.sizes.failing_seconds))


async def _run(url: str, budget: Budget | None, seconds: float) -> Values:
    dependency, done = Dependency(), 0
    async with App(url, shutdown_timeout=0.1) as app:

        @app.task(retry=replace(BACKOFF, budget=budget), keep_result=False)
        async def ask() -> None:
            nonlocal done
            await dependency.call()
            done += 1

        async with app.worker(concurrency=1000):
            began = time.monotonic()
            for n in range(int(ARRIVALS * seconds)):
                await asyncio.sleep(max(0.0, began + n / ARRIVALS - time.monotonic()))
                await ask.enqueue()
            return {"rate": done / seconds, "calls": dependency.calls / seconds}
