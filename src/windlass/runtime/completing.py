"""A handler that ends its own task: what it writes and its success are one commit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from windlass.model.attempt import AttemptOutcome, Failed, Succeeded
from windlass.model.errors import ConfigurationError, LeaseLost, PayloadError, WindlassError
from windlass.model.task import Completion
from windlass.runtime.describe import describe
from windlass.runtime.job import Job
from windlass.service import check_no_event_loop, run_now
from windlass.store.port import CompleteStore, Guest
from windlass.telemetry import emit

_UNKNOWN = "the transaction that was given to ctx.complete() had not been committed in the end"


class Completing:
    """What one attempt may do to end its task, at most once, and what became of that.

    Used from the event loop of the worker, or from the thread of the handler.
    """

    def __init__(
        self,
        *,
        store: CompleteStore,
        job: Job,
        lease: timedelta,
        encode: Callable[[Any], str | None],
    ) -> None:
        self._store = store
        self._job = job
        self._lease = lease
        self._encode_value = encode
        self.refused: PayloadError | None = None
        self._loop = asyncio.get_running_loop()
        self._completion: Completion | None = None
        self._is_open = False
        self._is_committed = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Open a transaction that completes the task when it is left."""
        completion = await self._begun()
        self._is_open = True
        try:
            async with self._store.completing(completion, idle=self._lease) as connection:
                try:
                    yield connection
                finally:
                    self._is_open = False
                self._check_held()
            self._is_committed = True
        finally:
            self._is_open = False
            if not completion.is_asked:
                self._completion = None  # rolled back: it may be tried again

    def set_result(self, value: Any) -> None:
        """Keep the result that is written when the transaction is left."""
        if self._completion is None or not self._is_open:
            raise ConfigurationError(
                "ctx.complete() without a connection belongs into `async with ctx.transaction():`; "
                "give connection= to complete in a transaction of your own"
            )
        self._completion.result = self._encode(value)

    async def complete(self, value: Any, connection: Any) -> None:
        """Complete the task in the transaction of a connection of the handler."""
        guest = self._store.guest(connection, is_async=True)
        result = self._encode(value)
        completion = await self._begun()
        await self._complete(guest, completion, result)

    def complete_sync(self, value: Any, connection: Any) -> None:
        """`complete` for a handler that runs in a thread."""
        check_no_event_loop("ctx.complete_sync()", instead="await ctx.complete()")
        guest = self._store.guest(connection, is_async=False)
        result = self._encode(value)
        completion = asyncio.run_coroutine_threadsafe(self._begun(), self._loop).result()
        run_now(self._complete(guest, completion, result))

    def _encode(self, value: Any) -> str | None:
        try:
            return self._encode_value(value)
        except PayloadError as error:
            self.refused = error
            raise

    async def _complete(self, guest: Guest, completion: Completion, result: str | None) -> None:
        if guest.commits_by_itself:
            self._completion = None
            raise ConfigurationError(
                "ctx.complete(connection=) needs a transaction, and on this connection none is "
                "open; begin one, so that what you write there is committed with the task"
            )
        completion.result = result
        await self._store.complete_within(guest, completion)

    async def _begun(self) -> Completion:
        if self._completion is not None:
            raise WindlassError(
                f"task {self._job.task.id} is completed once in an attempt, and was before"
            )
        self._check_held()
        self._completion = Completion(fence=self._job.fence, started_after=self._job.started_after)
        try:
            await self._store.check_completion(self._job.fence)
        except BaseException:
            self._completion = None
            raise
        return self._completion

    def _check_held(self) -> None:
        if self._job.is_lost():
            raise LeaseLost(f"task {self._job.task.id}: the lease is lost")

    def judge(self, outcome: AttemptOutcome | None) -> AttemptOutcome | None:
        """Return what is to be settled, given what the handler did after all.

        Where it is not known whether the task was completed the settlement finds out: it is
        answered "already" if so, and else it fails the attempt.
        """
        if self._completion is None or outcome is None:
            return outcome
        if self._is_committed:
            if isinstance(outcome, Failed):
                task = self._job.task
                emit("handler.failed_late", task_id=task.id, type=task.type)
            return Succeeded(self._completion.result)
        if isinstance(outcome, Succeeded):
            return Failed(describe("NotCommitted", _UNKNOWN))
        return outcome
