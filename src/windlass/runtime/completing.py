"""A handler that ends its own task: what it writes and its success are one commit."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from windlass.failures.describe import failed
from windlass.model.attempt import AttemptOutcome, Failed, Succeeded
from windlass.model.errors import ConfigurationError, LeaseLost, WindlassError
from windlass.model.failure import ErrorClass
from windlass.model.task import Completion
from windlass.runtime.job import Job
from windlass.service import check_no_event_loop, run_now
from windlass.store.port import CompleteStore, Guest

_UNKNOWN = (
    "the transaction that was given to ctx.complete() had not been committed in the end, or a savepoint "
    "around the call had been rolled back"
)
_NOT_AWAITED = (
    "ctx.complete(connection=) was called without `await`, so the task was not completed in that "
    "transaction, which may be committed; write: await ctx.complete(..., connection=...)"
)


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
        calls_back: bool = False,
    ) -> None:
        self._store = store
        self._job = job
        self._lease = lease
        self._encode = encode
        self._calls_back = calls_back
        self.is_failed = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._completion: Completion | None = None
        self._called: list[Coroutine[Any, Any, None]] = []  # to be awaited by the handler
        self._is_open = False
        self._is_committed = False

    @property
    def may_have_completed(self) -> bool:
        """Whether the task may have been completed, for all that is known here."""
        return self._completion is not None and self._completion.is_asked

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction that completes the task when it is left."""
        if threading.get_ident() != self._thread:
            raise TypeError(
                "ctx.transaction() is for coroutines, and this handler runs in a thread: use a "
                "connection of your own and ctx.complete_sync(value, connection=...)"
            )
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
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

    def complete(self, value: Any, connection: Any) -> Coroutine[Any, Any, None]:
        """Complete the task in the transaction of a connection of the handler, once awaited."""
        # At once: of a call that is not awaited nobody would hear.
        guest = self._store.guest(connection, is_async=True)
        self._check_in_event_loop()
        self._check_first()
        call = self._complete_awaited(guest, self._encode(value))
        self._called.append(call)
        return call

    def _check_in_event_loop(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:
            raise TypeError(
                "ctx.complete(connection=) was called outside of the worker's event loop, where "
                "nothing awaits it; use ctx.complete_sync() and a synchronous connection"
            )

    async def _complete_awaited(self, guest: Guest, result: str | None) -> None:
        await self._check_in_transaction(guest)
        completion = await self._begun()
        completion.result = result
        await self._store.complete_within(guest, completion)

    def complete_sync(self, value: Any, connection: Any) -> None:
        """`complete` for a handler that runs in a thread."""
        check_no_event_loop("ctx.complete_sync()", instead="await ctx.complete()")
        guest = self._store.guest(connection, is_async=False)
        result = self._encode(value)
        run_now(self._check_in_transaction(guest))
        completion = asyncio.run_coroutine_threadsafe(self._begun(), self._loop).result()
        completion.result = result
        run_now(self._store.complete_within(guest, completion))

    async def _check_in_transaction(self, guest: Guest) -> None:
        if await guest.commits_by_itself():
            raise ConfigurationError(
                "ctx.complete(connection=) needs a transaction, and on this connection none is "
                "open; begin one, so that what you write there is committed with the task"
            )

    async def _begun(self) -> Completion:
        self._check_first()
        self._check_held()
        self._completion = Completion(
            fence=self._job.fence,
            started_after=self._job.started_after,
            calls_back=self._calls_back,
        )
        try:
            await self._store.check_completion(self._job.fence)
        except BaseException:
            self._completion = None
            raise
        return self._completion

    def _check_first(self) -> None:
        if self._completion is not None:
            raise WindlassError(
                f"task {self._job.task.id} is completed once in an attempt, and was before"
            )

    def _check_held(self) -> None:
        if self._job.is_lost():
            raise LeaseLost(f"task {self._job.task.id}: the lease is lost")

    def judge(self, outcome: AttemptOutcome | None) -> AttemptOutcome | None:
        """Return what is to be settled, given what the handler did after all.

        Where it is not known whether the task was completed the settlement finds out: it is
        answered "already" if so, and else it fails the attempt.
        """
        is_forgotten = self._drop_unawaited()
        if outcome is None:
            return None
        self.is_failed = isinstance(outcome, Failed)
        if self._completion is None:
            if is_forgotten and isinstance(outcome, Succeeded):
                # What it wrote may be committed: to repeat that is for a person to decide.
                return failed("NotAwaited", _NOT_AWAITED, ErrorClass.CODE_BUG)
            return outcome
        if self._is_committed:
            return Succeeded(self._completion.result)
        if isinstance(outcome, Succeeded):
            return failed("NotCommitted", _UNKNOWN, ErrorClass.UNKNOWN)
        return outcome

    def _drop_unawaited(self) -> bool:
        """Close the calls that nobody awaited, of which Python would warn; say if there are any."""
        unawaited = [
            call for call in self._called if inspect.getcoroutinestate(call) == inspect.CORO_CREATED
        ]
        for call in unawaited:
            call.close()
        return bool(unawaited)
