"""Outcomes → settlements → one batched commit."""

import asyncio
import contextvars
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from windlass.failures.describe import describe
from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.model.failure import ErrorClass
from windlass.model.task import Answer, Claim, Outcome, Settlement
from windlass.runtime.job import Job
from windlass.service import LONGEST_PATIENCE, answered_within, backoff
from windlass.store.port import SettleStore
from windlass.telemetry import emit, tell

LARGEST_BATCH = 2000
BATCH_BYTES = 8 << 20  # of results and errors in one batch, unless a single one has more
HALVE_AFTER = 2  # failures in a row: perhaps it is too much for one try
AGAIN_WITHIN = 2.0  # seconds: meanwhile leases run out
HELD_AGAIN_AFTER = 1.0


class Done(msgspec.Struct, eq=False, gc=False):
    """A job whose attempt has ended, and what is to be written of it."""

    job: Job
    settlement: Settlement

    def was_completed(self, answer: Answer) -> bool:
        """Whether its handler had completed it in a transaction, for all that was to be settled."""
        completing = self.job.completing
        return answer is Answer.ALREADY and completing is not None and completing.may_have_completed


@dataclass(slots=True)
class Settled:
    """What was written, and what the store said of each."""

    batch: Sequence[Done]
    claims: Counter[Claim]  # how many tasks of each
    outcomes: Sequence[Outcome]
    answers: Sequence[Answer]


class Committer:
    """Writes whatever ended while the previous commit was under way. There is no timer.

    If that is a whole batch it does not wait: two commits may be under way, as one waits for the disk.
    """

    def __init__(
        self,
        *,
        store: SettleStore,
        settled: Callable[[Counter[Claim]], None],
        died: Callable[[Sequence[UUID]], None] = lambda _: None,
        patience: float = LONGEST_PATIENCE,
    ) -> None:
        self._store = store
        self._patience = patience  # seconds, for an answer of the store
        self._settled = settled
        self._died = died  # tasks that have failed for good
        self._waiting: list[Done] = []
        self._in_hand: dict[int, Sequence[Done]] = {}  # batches that are not written yet
        self._arrived = asyncio.Event()
        self._closing = False
        self._aside: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()
        self._failure: BaseException | None = None
        self._is_committing = False
        self._beside: asyncio.Task[None] | None = None  # the second commit, one of those aside

    def add(self, done: Done) -> None:
        """Hand over the end of an attempt."""
        self._waiting.append(done)
        self._arrived.set()
        if len(self._waiting) >= LARGEST_BATCH and self._is_committing and self._beside is None:
            batch = self._next_batch()
            self._beside = self._set_aside(batch, self._commit(batch))

    async def run(self) -> None:
        """Commit until closed and everything is written."""
        try:
            while self._waiting or self._aside or self._failure or not self._closing:
                await self._turn()
        finally:
            for task in self._aside:  # of a worker that waits no longer
                task.cancel()

    async def _turn(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._waiting:
            self._is_committing = True
            try:
                await self._commit(self._next_batch())
            finally:
                self._is_committing = False
        elif self._closing:
            await asyncio.wait(self._aside)
        else:
            self._arrived.clear()
            await self._arrived.wait()

    def _next_batch(self) -> list[Done]:
        batch = self._waiting[:LARGEST_BATCH]
        batch = batch[: _fitting([done.settlement for done in batch])]
        del self._waiting[: len(batch)]
        return batch

    def _set_aside(
        self, batch: Sequence[Done], commit: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        self._in_hand[id(batch)] = batch  # before it begins
        # Not in the context of the handler whose end was the last one of the batch.
        task = self._context.copy().run(asyncio.create_task, commit)
        self._aside.add(task)
        task.add_done_callback(self._end_aside)
        return task

    def _end_aside(self, task: asyncio.Task[None]) -> None:
        self._aside.discard(task)
        if task is self._beside:
            self._beside = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error  # of ours: what the store does is dealt with
            self._arrived.set()

    def last_settlements(self) -> list[Settlement]:
        """What may not be written yet; to write it twice is harmless. Another thread may ask."""
        batches = [*self._in_hand.copy().values(), self._waiting.copy()]
        return list({done.job: done.settlement for batch in batches for done in batch}.values())

    def close(self) -> None:
        """Write what there is and end."""
        self._closing = True
        self._arrived.set()

    async def _commit(self, batch: Sequence[Done], failures: int = 0) -> None:
        """Write a batch, however long that takes."""
        self._in_hand[id(batch)] = batch
        try:
            await self._write(batch, failures)
        finally:
            del self._in_hand[id(batch)]

    async def _write(self, batch: Sequence[Done], failures: int) -> None:
        while True:
            settlements = [done.settlement for done in batch]
            try:
                async with answered_within(self._patience):
                    answers = await self._store.settle(settlements)
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
                outcomes = [settlement.outcome for settlement in settlements]
                claims = _claims(batch)
                tell("settled", Settled(batch, claims, outcomes, answers))
                as_usual = outcomes.count(Outcome.COMPLETED), answers.count(Answer.APPLIED)
                if as_usual != (len(batch), len(batch)):
                    self._report(batch, answers)
                self._settled(claims)
                return
            failures += 1
            await asyncio.sleep(backoff(failures, longest=AGAIN_WITHIN))
            if failures >= HALVE_AFTER and len(batch) > 1:
                await self._halves(batch, failures)
                return

    async def _without_held(self, batch: Sequence[Done]) -> Sequence[Done]:
        """Set aside what somebody's transaction holds, however long it may; return the others."""
        try:
            async with answered_within(self._patience):
                held = await self._store.held([done.settlement for done in batch])
        except StoreUnavailable:
            return batch  # told when it is tried again
        if aside := [done for done, is_held in zip(batch, held, strict=True) if is_held]:
            self._set_aside(aside, self._commit_later(aside))
        return [done for done, is_held in zip(batch, held, strict=True) if not is_held]

    async def _commit_later(self, batch: Sequence[Done]) -> None:
        await asyncio.sleep(HELD_AGAIN_AFTER)
        await self._commit(batch)

    async def _halves(self, batch: Sequence[Done], failures: int = 0) -> None:
        middle = len(batch) // 2
        await self._commit(batch[:middle], failures)
        await self._commit(batch[middle:])

    async def _refused(self, batch: Sequence[Done], error: Exception) -> None:
        if len(batch) > 1:
            await self._halves(batch)
            return
        done = batch[0]
        emit("settlement.refused", task_id=done.job.task.id, error=type(error).__name__)
        if done.settlement.outcome is Outcome.FAILED:
            self._settled(
                _claims(batch)
            )  # not even its failure can be written: its lease will run out
            return
        said = f"the store refused the outcome: {error}"
        failure = describe("Refused", said, ErrorClass.CODE_BUG)
        await self._commit(
            [
                Done(
                    done.job,
                    replace(done.settlement, outcome=Outcome.FAILED, result=None, error=failure),
                )
            ]
        )

    def _report(self, batch: Sequence[Done], answers: Sequence[Answer]) -> None:
        died = []
        for done, answer in zip(batch, answers, strict=True):
            job = done.job
            if answer is Answer.LOST:
                emit("settlement.lost", task_id=job.task.id, type=job.task.type)
            elif done.was_completed(answer):
                if job.completing is not None and job.completing.is_failed:
                    emit("handler.failed_late", task_id=job.task.id, type=job.task.type)
            else:
                given_up = answer is Answer.GIVEN_UP
                outcome = Outcome.DEAD if given_up else done.settlement.outcome
                _tell_failure(job, outcome, done.settlement.error_class)
                if outcome in (Outcome.FAILED, Outcome.DEAD) and answer is not Answer.ALREADY:
                    died.append(job.task.id)
        if died:
            self._died(died)


def _tell_failure(job: Job, outcome: Outcome, error_class: ErrorClass | None) -> None:
    """Say what somebody should know of a failed attempt. Its message is the handler's, and may hold data."""
    told = {"task_id": job.task.id, "type": job.task.type, "error_class": error_class}
    if outcome is Outcome.DEAD:
        emit("task.dead", **told)
    elif outcome is Outcome.FAILED:
        emit("task.code_bug" if error_class is ErrorClass.CODE_BUG else "task.failed", **told)
    elif error_class is ErrorClass.UNKNOWN:
        emit("task.unknown_error", **told)


def _claims(batch: Sequence[Done]) -> Counter[Claim]:
    return Counter([done.job.claim for done in batch])


def _fitting(settlements: Sequence[Settlement]) -> int:
    """How many of these, from the first on, may be written together."""
    results, errors = [one.result for one in settlements], [one.error for one in settlements]
    if results.count(None) == errors.count(None) == len(settlements):
        return len(settlements)
    sizes = [len(a or "") + len(b or "") for a, b in zip(results, errors, strict=True)]
    return max(1, bisect_right(list(accumulate(sizes)), BATCH_BYTES))
