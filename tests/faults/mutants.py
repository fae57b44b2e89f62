"""Ways to break the engine, and for each a run that goes wrong by it and by nothing else."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from contract.postgres_sessions import (
    AGEING,
    DEADLINE,
    LEASE,
    OTHER_WORKER,
    SECOND,
    TERM,
    WORKER,
    Session,
    Sessions,
    add,
    new_task,
)
from windlass.model.task import Claim, ClaimRequest, Outcome, Pulse, Settlement
from windlass.store.postgres.store import PostgresStore
from windlass.testing.history_check import ClientLog

TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
IS_BLOCKED = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND $1 = ANY (pg_blocking_pids(pid))
)
"""
FENCE = """
    SELECT array_agg(c.token), array_agg(c.worker_id), array_agg(c.claimed_at)
    INTO held, workers, claim_times
"""
NO_FENCE = """
    SELECT array_agg(u.token), array_agg(NULL::uuid), array_agg(windlass.clock())
    INTO held, workers, claim_times
"""
GENERATIONS = {
    "complete_batch": ("t.generation = 1 AND generations[u.ordinal] = 1", "true"),
    "settle_batch": ("t.generation = s.generation", "true"),
}
RECHECK = "        FOR UPDATE SKIP LOCKED\n    LOOP"
LOCK_TIMEOUT = "SET lock_timeout TO '100ms'"
NOT_EXISTS = """
UPDATE windlass.leadership l
SET holder = $1, term = l.term + 1, expires_at = windlass.clock() + $3::interval
WHERE $2::bigint IS NULL AND $4::interval + $5::interval IS NOT NULL
    AND NOT EXISTS (SELECT FROM windlass.leadership o WHERE o.expires_at > windlass.clock())
RETURNING l.term
"""


@dataclass(slots=True)
class Engine:
    """A store of which everything is recorded, and sessions beside it."""

    store: PostgresStore
    sessions: Sessions
    client: ClientLog

    async def rewrite(self, function: str, *changes: tuple[str, str]) -> None:
        """Change the text of a function, which has to be what the change expects."""
        watcher = self.sessions.watcher
        name = f"windlass.{function}"
        text: str = await watcher.fetchval("SELECT pg_get_functiondef($1::regproc)", name)
        for old, new in changes:
            assert old in text, f"{name} has changed: {old}"
            text = text.replace(old, new)
        await watcher.execute(text)

    async def claim(self, worker: Any, limit: int = 10) -> Claim | None:
        answer = await self.store.claim(ClaimRequest(worker, ("resize",), limit, LEASE, AGEING))
        return answer.claim

    async def granted(self, worker: Any, limit: int = 10) -> Claim:
        claim = await self.claim(worker, limit)
        assert claim is not None
        return claim

    async def settle(self, claim: Claim, outcome: Outcome, place: int = 0) -> None:
        task = claim.tasks[place]
        await self.store.settle([Settlement(claim.token, task.id, task.generation, outcome)])

    async def rescue(self) -> None:
        leadership = await self.store.lead(WORKER, current=None, term=TERM)
        assert leadership is not None
        await self.store.rescue(1000, leadership=leadership)

    async def until_done_or_blocked(self, call: asyncio.Task[Any], session: Session) -> None:
        deadline = time.monotonic() + DEADLINE
        while not call.done():
            if await self.sessions.watcher.fetchval(IS_BLOCKED, session.pid):
                return
            assert time.monotonic() < deadline, "neither ended nor waited"
            await asyncio.sleep(0.005)


# Runs


async def a_zombie_settles(engine: Engine) -> None:
    """A worker is stopped until its claim was rescued and granted anew, and then goes on."""
    await add(engine.store)
    zombie = await engine.granted(WORKER)
    await engine.sessions.advance(LEASE + SECOND)
    await engine.rescue()
    owner = await engine.granted(OTHER_WORKER)

    await engine.settle(zombie, Outcome.COMPLETED)
    await engine.settle(owner, Outcome.COMPLETED)


async def a_settlement_is_repeated(engine: Engine) -> None:
    """The answer to a release was lost, so it is sent again; the task has another owner by then."""
    await add(engine.store, 2)
    claim = await engine.granted(WORKER)
    await engine.settle(claim, Outcome.RELEASED)
    await engine.granted(OTHER_WORKER)

    await engine.settle(claim, Outcome.RELEASED)
    await engine.settle(claim, Outcome.COMPLETED, place=1)


async def a_claim_is_extended_at_the_last_moment(engine: Engine) -> None:
    """A rescue sees an expired claim while the heartbeat that prolonged it has yet to commit."""
    await add(engine.store)
    claim = await engine.granted(WORKER)
    await engine.sessions.advance(LEASE - 10 * SECOND)
    heart = await engine.sessions.begin()
    await heart.store.pulse(Pulse(WORKER, [claim.token], LEASE, running=1, idle=False))
    await engine.sessions.advance(LEASE + SECOND)

    sweep = asyncio.ensure_future(engine.rescue())
    await engine.until_done_or_blocked(sweep, heart)
    await heart.commit()
    await sweep
    await engine.claim(OTHER_WORKER)
    await engine.settle(claim, Outcome.COMPLETED)


async def sessions_are_cut_after_the_answer(engine: Engine, store: PostgresStore) -> None:
    """A client is told that its task is enqueued; then every connection breaks."""
    intent = engine.client.invoke("resize")
    (answer,) = await store.enqueue([new_task(tags=(intent,))])
    engine.client.ok(intent, answer.id)
    await engine.sessions.watcher.execute(TERMINATE)


async def acknowledged(engine: Engine) -> None:
    await sessions_are_cut_after_the_answer(engine, engine.store)


async def acknowledged_before_commit(engine: Engine) -> None:
    session = await engine.sessions.begin()
    await sessions_are_cut_after_the_answer(engine, session.store)


async def two_stand_for_election(engine: Engine, statement: str | None = None) -> None:
    """The second candidate asks while the first has won and has yet to commit."""
    first = await engine.sessions.begin()
    if statement is not None:
        for store in (first.store, engine.store):
            assert "FOR UPDATE" in store._sql.statement("lead")
            store._sql._statements["lead"] = statement
    await first.store.lead(WORKER, current=None, term=TERM)
    second = await engine.sessions.blocked(
        engine.store.lead(OTHER_WORKER, current=None, term=timedelta(minutes=1)), by=first
    )
    await first.commit()
    await second


async def two_stand_and_look_first(engine: Engine) -> None:
    await two_stand_for_election(engine, NOT_EXISTS)


# What is broken


async def fence_off(engine: Engine) -> None:
    await engine.rewrite("settle_batch", (FENCE, NO_FENCE))
    await generation_off(engine)


async def generation_off(engine: Engine) -> None:
    for function, change in GENERATIONS.items():
        await engine.rewrite(function, change)


async def expiry_not_rechecked(engine: Engine) -> None:
    await engine.rewrite(
        "rescue_claims", (RECHECK, "    LOOP"), (LOCK_TIMEOUT, "SET lock_timeout TO 0")
    )


async def nothing(engine: Engine) -> None:
    """The run itself is what is broken."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is broken, what happens then, what happens otherwise, and who finds out."""

    breaks: Callable[[Engine], Awaitable[None]]
    run: Callable[[Engine], Awaitable[None]]
    rule: str
    unbroken: Callable[[Engine], Awaitable[None]] | None = None


MUTANTS = {
    "fence off": Mutant(fence_off, a_zombie_settles, "I4"),
    "generation off": Mutant(generation_off, a_settlement_is_repeated, "I4"),
    "expiry not re-checked": Mutant(
        expiry_not_rechecked, a_claim_is_extended_at_the_last_moment, "I3"
    ),
    "ack before commit": Mutant(nothing, acknowledged_before_commit, "I1", acknowledged),
    "election by NOT EXISTS": Mutant(
        nothing, two_stand_and_look_first, "I9", two_stand_for_election
    ),
}
