"""Free slots → claimed tasks."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol
from uuid import UUID

from windlass.model.errors import StoreUnavailable
from windlass.model.limits import PROMOTE_BATCH
from windlass.model.task import Claim, ClaimAnswer, ClaimRequest
from windlass.policy.shares import OTHERS, Queues, Shares
from windlass.runtime.serving import QueueRoom
from windlass.service import Stop, answered_within, backoff, first_of, is_set_within, patience
from windlass.store.port import ChoreStore, ClaimStore, PulseStore
from windlass.telemetry import emit, tell

LARGEST_CLAIM = 1000
GATHER = 0.005  # seconds to wait for more free slots while there is work
ENOUGH = 100  # free slots that are worth a claim without waiting for more
SHORTEST_POLL = 0.02
LATE = 0.5  # seconds after which any worker promotes what the leader did not
BUSY_AFTER = 0.5  # seconds without a claim
STUCK_AFTER = 60.0  # seconds without one although there is room: longer than any answer takes


class FetchStore(ClaimStore, PulseStore, ChoreStore, Protocol):
    """What the fetcher asks of the store."""


class Room(Protocol):
    """What the worker can take, and how it is told of a claim."""

    def wanted(self) -> int:
        """How many tasks it would take now."""

    def at_once(self) -> int:
        """How many may come in one claim."""

    def free_slots(self) -> int:
        """How many could begin at once."""

    async def slot_freed(self) -> None:
        """Wait until one could."""

    def busy(self) -> int:
        """How many tasks it holds."""

    def has_room(self) -> bool:
        """Whether it is time to claim."""

    async def room(self) -> None:
        """Wait until it is."""

    async def emptied(self) -> None:
        """Wait until it holds none."""

    def hold(self, claim: Claim, asked_at: float) -> None:
        """Keep the lease of a claim that was asked for at this moment of the monotonic clock."""

    async def take(self, claim: Claim) -> None:
        """Run a claim that is held, unless it was lost meanwhile."""


class Beside:
    """The fetchers of one worker: the first, and one of types for which it has room of another kind.

    One claims at a time, so that nothing begins beside a suspect. The first alone says whether the worker is
    idle: it is the one that may be busy with very many tasks, and then enqueues should not notify.
    """

    def __init__(self) -> None:
        self.turns = asyncio.Lock()
        self.fetchers: list[Fetcher] = []
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be claimed."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """Claim nothing until told to go on."""
        self._resumed.clear()
        self.wake()  # those that sleep say that they are not idle

    def resume(self) -> None:
        """Go on."""
        self._resumed.set()

    async def until_resumed(self, stop: Stop) -> None:
        """Wait until it may claim."""
        await first_of(self._resumed.wait(), stop.wait())

    def wake(self, lane: int | None = None, task_id: UUID | None = None) -> None:
        """Look for work now instead of at the next poll; of which kind it is nobody says."""
        for fetcher in self.fetchers:
            fetcher.wake(lane, task_id)

    def share(self, weights: Mapping[Queues, int]) -> None:
        """Divide the room among queues by these weights."""
        for fetcher in self.fetchers:
            fetcher.share(weights)

    async def run(self, stop: Stop) -> None:
        """Claim until asked to stop."""
        if len(self.fetchers) == 1:
            await self.fetchers[0].run(stop)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for fetcher in self.fetchers:
                    group.create_task(fetcher.run(stop))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # as if there were one

    def registers(self, fetcher: "Fetcher") -> bool:
        """Whether this one says that the worker is idle."""
        return fetcher is self.fetchers[0]

    def wake_others(self, fetcher: "Fetcher") -> None:
        """Let those that sleep look again, once the first has said that enqueues should notify."""
        if self.registers(fetcher):
            for other in self.fetchers[1:]:
                other.wake()


class Fetcher:
    """Claims tasks as slots come free; sleeps when there are none, and is woken or polls."""

    def __init__(
        self,
        *,
        store: FetchStore,
        room: Room,
        request: ClaimRequest,
        poll: timedelta,
        is_leader: Callable[[], bool],
        went_idle: Callable[[], None],
        beside: "Beside | None" = None,
        weights: Mapping[Queues, int] | None = None,
        queue_room: QueueRoom | None = None,
    ) -> None:
        self._store = store
        self._room = room
        self._request = request
        self._patience = patience(request.lease)
        self._poll = poll.total_seconds()
        self._is_leader = is_leader
        self._went_idle = went_idle
        self._beside = beside or Beside()
        self._beside.fetchers.append(self)
        self._weights: Mapping[Queues, int] = weights or {}
        self._shares: Shares | None = (
            None  # by these weights; without any, one claim is for all queues
        )
        self._queue_room = queue_room or QueueRoom({})
        self._wakened = asyncio.Event()
        self._woken_for: set[int | None] = set()  # lanes; None: perhaps any
        self._woken_by: UUID | None = None  # the task that it was woken for, if by one alone
        self._idle = False
        self._is_woken = False
        self._has_read_all = False  # and since then only what it was woken for is new
        self._look_by = 0.0  # monotonic, when it has to look at all lanes again
        self._pause = SHORTEST_POLL
        self._due_at: float | None = None  # monotonic
        self._more_at: float | None = None  # monotonic, when a limit lets more through
        self._is_capped = False  # tasks that have a limit wait until one can begin at once
        self._turned_at = time.monotonic()  # when it last claimed
        self._answered_at = time.monotonic()  # when a claim was answered, or could not be made
        self._is_alone = False  # a suspect runs, and nothing beside it

    @property
    def worker_id(self) -> UUID:
        """Whose claims these are."""
        return self._request.worker_id

    @property
    def idle(self) -> bool:
        """Whether enqueues should notify this worker."""
        return self._idle

    @property
    def trouble(self) -> str:
        """Whether it has found out nothing about work for long, although there would be room."""
        silent = time.monotonic() - self._answered_at
        is_kept = self._is_alone or self._beside.is_paused
        if silent < STUCK_AFTER or is_kept or self._room.wanted() < 1:
            return ""
        return f"no look for work was answered for {silent:.0f} s"

    def wake(self, lane: int | None = None, task_id: UUID | None = None) -> None:
        """Look for work now instead of at the next poll; `lane`, `task_id`: it is in this one, or this."""
        self._woken_by = None if self._woken_for else task_id
        if len(self._woken_for) < 2:  # more than one are as good as any
            self._woken_for.add(lane)
        self._wakened.set()

    def share(self, weights: Mapping[Queues, int]) -> None:
        """Divide the room by these weights, from the next look on."""
        self._weights = weights

    async def run(self, stop: Stop) -> None:
        """Claim until asked to stop."""
        stop.tell(self._wakened)
        failures = 0
        while not stop:
            await self._until_room(stop)
            if stop:
                return
            try:
                if self._beside.is_paused:
                    await self._rest(stop)
                else:
                    await self._turn(stop)
                failures = 0
            except StoreUnavailable as error:
                failures += 1
                emit("store.unavailable", doing="claim", error=error)
                await stop.wait(backoff(failures))

    async def _rest(self, stop: Stop) -> None:
        """Claim nothing while the worker is paused; it is not idle, or enqueues would notify it for nothing."""
        await self._set_idle(False)
        await self._beside.until_resumed(stop)
        self._answered_at = time.monotonic()
        self._has_read_all = False
        self._pause = SHORTEST_POLL

    async def _until_room(self, stop: Stop) -> None:
        """Wait for a free slot, and a moment more if there is work: not to claim one by one."""
        if not self._room.has_room():
            await first_of(self._room.room(), stop.wait())
            self._answered_at = time.monotonic()
        # While most slots are free not even for a moment: the store is to look while what it gave begins.
        busy = self._room.busy()
        if busy and self._room.wanted() < min(ENOUGH, busy):
            await asyncio.sleep(GATHER)

    async def _turn(self, stop: Stop) -> None:
        async with self._beside.turns:
            lane, found, size = await self._look(stop)
        if await self.promote_due() or found == size:
            await self._set_idle(False)
            self._pause = SHORTEST_POLL
            return
        if found and self._is_capped:
            return  # a limit would let more through: as soon as there is room
        if not self._idle:
            # Registered first and looked again: an enqueue that checked before cannot be missed.
            await self._set_idle(True)
            return
        if not found:
            self._went_idle()
        if lane is None:
            # What a poll finds no wake-up has told of, so there may be more of that kind. Wake-ups need no
            # polls.
            is_missed = found and not self._is_woken
            self._pause = SHORTEST_POLL if is_missed else min(2 * self._pause, self._poll)
            jitter = random.uniform(0.95, 1.0)  # noqa: S311
            self._look_by = time.monotonic() + self._pause * jitter
        if self._more_at is not None:
            self._look_by = min(self._look_by, self._more_at)
        await self._sleep(stop)

    async def _look(self, stop: Stop) -> tuple[int | None, int, int]:
        """Claim, once; return in which lane alone, how many were found, and how many asked for."""
        size = max(1, min(self._room.wanted(), self._room.at_once(), LARGEST_CLAIM))
        await self.promote_due()
        self._turned_at = time.monotonic()
        lane = self._only_lane()
        task_id = None if lane is None else self._woken_by
        self._wakened.clear()  # before the look, so that what arrives during it is not missed
        self._woken_for.clear()
        self._has_read_all = False
        self._weigh()
        if lane is None and self._shares is not None:
            answer, found = await self._take_shares(size, self._shares, stop)
        else:
            queues, size = self._open_queues(size)
            answer, found = await self._take(size, queues, lane=lane, task_id=task_id)
        if answer.alone_waiting:
            await self._claim_alone(stop)
        if answer.due_in is not None:
            self._due_at = time.monotonic() + answer.due_in
        elif lane is None:
            self._due_at = None
        if lane is None or answer.more_in is not None:
            self._more_at = answer.more_in and time.monotonic() + answer.more_in
        self._is_capped = answer.is_capped
        return lane, found, size

    def _weigh(self) -> None:
        if self._weights != ({} if self._shares is None else self._shares.weights):
            self._shares = Shares(self._weights) if self._weights else None

    async def _take(
        self,
        size: int,
        queues: Queues | None,
        *,
        lane: int | None = None,
        task_id: UUID | None = None,
    ) -> tuple[ClaimAnswer, int]:
        """Claim, and run what was granted; return how many that are."""
        answer, asked_at = await self._claim(size, queues, lane=lane, task_id=task_id)
        if answer.claim is None:
            return answer, 0
        self._room.hold(answer.claim, asked_at)
        await self._room.take(answer.claim)
        return answer, len(answer.claim.tasks)

    async def _take_shares(self, size: int, shares: Shares, stop: Stop) -> tuple[ClaimAnswer, int]:
        """Claim from one queue after the other, by their shares; what one leaves goes to the others.

        Fewer than `size` are found only if every queue came back short, or may take no more.
        """
        turn = shares.turn(size, room=self._queue_room.of, now=time.monotonic())
        answers: list[ClaimAnswer] = []
        found = 0
        while not stop and (asked := turn.next()) is not None:
            answer, number = await self._take(asked.limit, asked.queues)
            tasks = answer.claim.tasks if answer.claim else ()
            turn.took(shares.counted(task.queue for task in tasks))
            found += number
            answers.append(answer)
        turn.close()
        waits = [answer.more_in for answer in answers if answer.more_in is not None]
        together = ClaimAnswer(
            None,
            alone_waiting=any(answer.alone_waiting for answer in answers),
            due_in=answers[-1].due_in if answers else None,
            more_in=min(waits, default=None),
            is_capped=any(answer.is_capped for answer in answers),
        )
        return together, found

    def _open_queues(self, size: int) -> tuple[Queues | None, int]:
        """The queues that may take more, and how many may come of them in one claim."""
        if self._shares is None:
            return None, size
        room = self._queue_room.of
        queues = tuple(queue for queue in self._shares.queues if room((queue,)) > 0)
        return queues, min(size, room(queues))

    def _part(self, queues: Queues | None) -> tuple[Queues | None, Queues, bool]:
        """What a claim of some of the queues asks for: which, all but which, and whether it is not all."""
        if queues is None or self._shares is None:
            return self._request.queues, (), False
        left_out = tuple(one for one in self._shares.queues if one not in queues)
        if OTHERS in queues:
            return None, left_out, bool(left_out)
        return queues, (), bool(left_out)

    async def _sleep(self, stop: Stop) -> None:
        until = self._look_by
        if self._due_at is not None:
            until = min(until, self._due_at + (0 if self._is_leader() else LATE))
        pause = max(until - time.monotonic(), 0.001)
        if stop:  # one made before this turn is forgotten by the event that it set
            return
        if self._is_capped:
            await first_of(self._room.slot_freed(), is_set_within(self._wakened, pause))
            self._is_woken = True
            return  # all lanes are to be read, and nothing is known to be new
        self._is_woken = await is_set_within(self._wakened, pause)
        self._has_read_all = True

    def _only_lane(self) -> int | None:
        """The lane that alone can hold anything new, if it is known.

        All are read when a poll is due, whatever happens meanwhile: wake-ups do not tell of everything.
        """
        if not self._has_read_all or len(self._woken_for) != 1:
            return None
        (lane,) = self._woken_for
        return lane if time.monotonic() < self._look_by else None

    async def _claim(
        self,
        size: int,
        queues: Queues | None,
        *,
        alone: bool = False,
        lane: int | None = None,
        task_id: UUID | None = None,
    ) -> tuple[ClaimAnswer, float]:
        request = self._request
        asked_at = time.monotonic()
        named, other_than, is_part = self._part(queues)
        if other_than:
            lane = task_id = None  # it may be of one that is left out
        asked = ClaimRequest(
            request.worker_id,
            request.types,
            size,
            request.lease,
            request.ageing,
            named,
            alone,
            lane,
            task_id,
            request.apart,
            is_part,
            self._room.free_slots(),
            other_than,
        )
        async with answered_within(self._patience):
            answer = await self._store.claim(asked)
        self._answered_at = time.monotonic()
        if answer.claim is not None:
            tell("claimed", answer.claim)
        return answer, asked_at

    async def _claim_alone(self, stop: Stop) -> None:
        """Run a suspect with nothing beside it, so that if it kills the worker it is found out.

        It is claimed first: no other worker then empties itself for the same task.
        """
        queues, size = self._open_queues(LARGEST_CLAIM)
        answer, asked_at = await self._claim(size, queues, alone=True)
        claim = answer.claim
        if claim is None:
            return
        self._room.hold(claim, asked_at)  # its lease is kept while the others finish
        is_single = self._is_alone = len(claim.tasks) == 1
        try:
            if is_single:
                await first_of(self._room.emptied(), stop.wait())
            await self._room.take(claim)
            if is_single:
                await first_of(self._room.emptied(), stop.wait())
        finally:
            self._is_alone = False
            self._answered_at = time.monotonic()

    async def promote_due(self) -> bool:
        """Make due tasks ready: the leader at once, any worker when that does not happen."""
        due_at = self._due_at
        if due_at is None or time.monotonic() < due_at + (0 if self._is_leader() else LATE):
            return False
        self._due_at = None  # until the next claim of all lanes says more
        self._has_read_all = False
        promoted = await self._promote()
        if not promoted:  # somebody holds them just now, perhaps to do the same
            self._due_at = time.monotonic() + SHORTEST_POLL
        return promoted > 0

    async def promote_while_busy(self) -> None:
        """Do it also while no slot is free, and so no claim says what is due."""
        is_busy = self._beside.is_paused or not self._room.has_room()
        if is_busy and time.monotonic() - self._turned_at > BUSY_AFTER:
            await self._promote()

    async def _promote(self) -> int:
        async with answered_within(self._patience):
            return await self._store.promote(PROMOTE_BATCH, just_due=True)

    async def _set_idle(self, idle: bool) -> None:
        if idle != self._idle:
            if self._beside.registers(self):
                async with answered_within(self._patience):
                    await self._store.set_idle(self.worker_id, idle)
            self._idle = idle
            if idle:
                self._beside.wake_others(self)
