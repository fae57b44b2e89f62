"""Outcomes → settlements → one batched commit."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.model.task import Answer, Outcome, Settlement
from windlass.runtime.describe import describe
from windlass.runtime.job import Job
from windlass.service import LONGEST_PATIENCE, answered_within, backoff
from windlass.store.port import SettleStore
from windlass.telemetry import emit, tell

LARGEST_BATCH = 500
AGAIN_WITHIN = 2.0  # seconds: meanwhile leases run out
HELD_AGAIN_AFTER = 1.0


class Done(NamedTuple):
    """A job whose attempt has ended, and what is to be written of it."""

    job: Job
    settlement: Settlement

    def was_completed(self, answer: Answer) -> bool:
        """Whether its handler had completed it in a transaction, for all that was to be settled."""
        return answer is Answer.ALREADY and self.job.completing is not None


class Settled(NamedTuple):
    """What was written, and what the store said of each."""

    batch: Sequence[Done]
    answers: Sequence[Answer]


class Committer:
    """Writes whatever ended while the previous commit was under way. There is no timer."""

    def __init__(
        self,
        *,
        store: SettleStore,
        settled: Callable[[Sequence[Done]], None],
        patience: float = LONGEST_PATIENCE,
    ) -> None:
        self._store = store
        self._patience = patience  # seconds, for an answer of the store
        self._settled = settled
        self._waiting: list[Done] = []
        self._arrived = asyncio.Event()
        self._closing = False
        self._aside: set[asyncio.Task[None]] = set()

    def add(self, done: Done) -> None:
        """Hand over the end of an attempt."""
        self._waiting.append(done)
        self._arrived.set()

    async def run(self) -> None:
        """Commit until closed and everything is written."""
        try:
            while self._waiting or self._aside or not self._closing:
                await self._turn()
        finally:
            for task in self._aside:  # of a worker that waits no longer
                task.cancel()

    async def _turn(self) -> None:
        if self._waiting:
            batch = self._waiting[:LARGEST_BATCH]
            del self._waiting[:LARGEST_BATCH]
            await self._commit(batch)
        elif self._closing:
            await asyncio.wait(self._aside)
        else:
            self._arrived.clear()
            await self._arrived.wait()

    def close(self) -> None:
        """Write what there is and end."""
        self._closing = True
        self._arrived.set()

    async def _commit(self, batch: Sequence[Done]) -> None:
        failures = 0
        while True:
            try:
                async with answered_within(self._patience):
                    answers = await self._store.settle([done.settlement for done in batch])
            except StoreBusy as error:
                emit("settlement.delayed", tasks=len(batch), error=error)
                batch = await self._without_held(batch)
                if not batch:
                    return
            except StoreUnavailable as error:
                emit("store.unavailable", doing="settle", error=error)
            except Exception as error:  # noqa: BLE001 - one refused row must not stop the others
                await self._refused(batch, error)
                return
            else:
                tell("settled", Settled(batch, answers))
                self._report(batch, answers)
                self._settled(batch)
                return
            failures += 1
            await asyncio.sleep(backoff(failures, longest=AGAIN_WITHIN))

    async def _without_held(self, batch: Sequence[Done]) -> Sequence[Done]:
        """Set aside what somebody's transaction holds, however long it may; return the others."""
        try:
            async with answered_within(self._patience):
                held = await self._store.held([done.settlement for done in batch])
        except StoreUnavailable:
            return batch  # told when it is tried again
        if aside := [done for done, is_held in zip(batch, held, strict=True) if is_held]:
            task = asyncio.create_task(self._commit_later(aside), name="windlass-held")
            self._aside.add(task)
            task.add_done_callback(self._aside.discard)
        return [done for done, is_held in zip(batch, held, strict=True) if not is_held]

    async def _commit_later(self, batch: Sequence[Done]) -> None:
        await asyncio.sleep(HELD_AGAIN_AFTER)
        await self._commit(batch)

    async def _halves(self, batch: Sequence[Done]) -> None:
        middle = len(batch) // 2
        await self._commit(batch[:middle])
        await self._commit(batch[middle:])

    async def _refused(self, batch: Sequence[Done], error: Exception) -> None:
        if len(batch) > 1:
            await self._halves(batch)
            return
        done = batch[0]
        emit("settlement.refused", task_id=done.job.task.id, error=type(error).__name__)
        if done.settlement.outcome is Outcome.FAILED:
            self._settled(batch)  # not even its failure can be written: its lease will run out
            return
        failure = describe("Refused", f"the store refused the outcome: {error}")
        await self._commit(
            [
                Done(
                    done.job,
                    done.settlement._replace(outcome=Outcome.FAILED, result=None, error=failure),
                )
            ]
        )

    def _report(self, batch: Sequence[Done], answers: Sequence[Answer]) -> None:
        for done, answer in zip(batch, answers, strict=True):
            if answer is Answer.LOST:
                emit("settlement.lost", task_id=done.job.task.id, type=done.job.task.type)
            elif done.settlement.outcome is Outcome.DEAD and not done.was_completed(answer):
                emit("task.dead", task_id=done.job.task.id, type=done.job.task.type)
