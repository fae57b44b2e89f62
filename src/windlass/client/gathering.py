"""Single tasks that are enqueued at the same time, written together."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import NamedTuple, Protocol, cast

from windlass.model.errors import StoreUnavailable
from windlass.model.task import Enqueued, NewTask

AT_ONCE = 2  # calls of the store: who comes while one is under way need not wait for its end
GROUP_TASKS = 500
GROUP_BYTES = 1 << 20  # of payloads, unless one alone has more
CLOSE_WITHIN = 5.0  # seconds for a store that may have fallen silent


class Add(Protocol):
    """How tasks are written: all or none, in one transaction."""

    async def __call__(self, tasks: Sequence[NewTask], *, repeated: bool) -> list[Enqueued]:
        """Add tasks; `repeated`: they may have been added before."""


class _Waiting(NamedTuple):
    task: NewTask
    answer: asyncio.Future[Enqueued]


class Gatherer:
    """Adds single tasks: one that comes alone at once, those that come meanwhile in one transaction.

    A commit takes nearly as long for one task as for a hundred. Nobody waits for others to come: a
    group is what came while the calls before it were under way.
    """

    def __init__(self, add: Add) -> None:
        self._add = add
        self._waiting: deque[_Waiting] = deque()
        self._under_way = 0
        self._senders: dict[asyncio.Task[None], list[_Waiting]] = {}  # with what each writes now
        # Not that of whoever comes while one is under way.
        self._context = contextvars.copy_context()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def add(self, task: NewTask) -> Enqueued:
        """Add a task; what is raised is about this one, or about the store.

        If the caller is cancelled, the task may or may not have been added.
        """
        if self._under_way:
            answer: asyncio.Future[Enqueued] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(task, answer))
            self._send()
            try:
                return await answer
            except asyncio.CancelledError:
                self._give_up()
                raise
        self._begin()
        try:
            return (await self._add([task], repeated=False))[0]
        finally:
            self._end()

    async def close(self) -> None:
        """Wait until everybody who waits is answered; a store that is silent is not waited for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._is_idle.wait()

    def _begin(self) -> None:
        self._under_way += 1
        self._is_idle.clear()

    def _end(self) -> None:
        self._under_way -= 1
        self._send()
        if not self._under_way:
            self._is_idle.set()

    def _send(self) -> None:
        while self._waiting and self._waiting[0].answer.done():
            self._waiting.popleft()  # its caller has given up
        if self._waiting and self._under_way < AT_ONCE:
            self._begin()
            sender = self._context.copy().run(asyncio.create_task, self._send_waiting())
            self._senders[sender] = []
            sender.add_done_callback(self._senders.pop)

    def _give_up(self) -> None:
        """Cancel what nobody waits for any more: a store that is silent would hold up all who come."""
        for sender, group in self._senders.items():
            if group and all(one.answer.done() for one in group):
                sender.cancel()

    async def _send_waiting(self) -> None:
        group: list[_Waiting] = []
        sender = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            while group := self._next_group():
                self._senders[sender] = group
                await self._write(group)
        finally:
            self._end()
            for one in group:
                one.answer.cancel()  # the event loop ends, and nobody else would tell them

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        size = 0
        while self._waiting and len(group) < GROUP_TASKS:
            one = self._waiting[0]
            size += len(one.task.payload)
            if group and size > GROUP_BYTES:
                break
            self._waiting.popleft()
            if not one.answer.done():
                group.append(one)
        return group

    async def _write(self, group: list[_Waiting], *, repeated: bool = False) -> None:
        try:
            answers = await self._add([one.task for one in group], repeated=repeated)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to whom it concerns
            if len(group) == 1 or isinstance(error, StoreUnavailable):
                for place, one in enumerate(group):
                    _fail(one, _copied(error) if place else error)
                return
            # One of them was refused, and all with it. The first call may still be under way, if its
            # connection broke before.
            middle = len(group) // 2
            await self._write(group[:middle], repeated=True)
            await self._write(group[middle:], repeated=True)
            return
        for one, answer in zip(group, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)


def _copied(error: Exception) -> Exception:
    """An error to be raised by somebody else: whoever raises one adds to its traceback."""
    copied = copy(error)
    copied.__cause__ = error.__cause__
    return copied


def _fail(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
