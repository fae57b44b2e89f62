"""The fetcher claims what fits, in an order that misses nothing and runs suspects alone."""

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta
from unittest import mock
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Claim, ClaimAnswer, ClaimedTask, ClaimRequest
from windlass.runtime import fetcher
from windlass.runtime.fetcher import LARGEST_CLAIM, Fetcher
from windlass.service import Stop
from windlass.store.memory import MemoryStore

ME = UUID(int=1)
FOR_EVER = 1e6  # seconds
FIRST, SECOND = UUID(int=1), UUID(int=2)
NOTHING = ClaimAnswer(None)


def claim(*numbers: int, alone: bool = False) -> Claim:
    tasks = [ClaimedTask(UUID(int=n), "t", "q", 10, "{}", 0, 4, 1, None) for n in numbers]
    return Claim(UUID(int=100 + numbers[0]), 1, tuple(tasks), alone)


class Bench:
    """A store that answers claims by a script, and a room that takes what it is given."""

    def __init__(
        self,
        *,
        wanted: int = 10,
        poll: float = FOR_EVER,
        queues: tuple[str, ...] | None = None,
    ) -> None:
        self.log: list[str] = []
        self.answers: list[ClaimAnswer] = []
        self.limits: list[int] = []
        self.named: list[UUID | None] = []
        self.lanes: list[int | None] = []  # that claims were to look at
        self.queues: list[tuple[str, ...] | None] = []
        self.during_claim: Callable[[], None] = lambda: None
        self.during_set_idle: Callable[[], None] = lambda: None
        self.during_promote: Callable[[], None] = lambda: None
        self.during_run: Callable[[], None] = lambda: None
        self.clock = MovedClock()
        self.asked_at: dict[UUID, float] = {}
        self.free = wanted
        self.held = 0
        self.most = 1000
        self.stop = Stop()
        self.is_leader = True
        self.fetcher = Fetcher(
            store=_Store(self),
            room=self,
            request=ClaimRequest(
                ME, ("t",), 1, timedelta(seconds=30), timedelta(seconds=6), queues
            ),
            poll=timedelta(seconds=poll),
            is_leader=lambda: self.is_leader,
            went_idle=lambda: self.log.append("went idle"),
            weights=None if queues is None else {(one,): 1 for one in queues},
        )

    async def run(self) -> None:
        async with asyncio.timeout(10):
            await self.fetcher.run(self.stop)

    def wanted(self) -> int:
        return self.free

    def busy(self) -> int:
        return self.held

    def free_slots(self) -> int:
        return self.free

    async def slot_freed(self) -> None:
        await self.room()

    def at_once(self) -> int:
        return self.most

    def has_room(self) -> bool:
        return self.free > 0

    async def room(self) -> None:
        while not self.has_room():
            await asyncio.sleep(0)

    async def emptied(self) -> None:
        self.log.append("emptied")

    def hold(self, claim: Claim, asked_at: float) -> None:
        self.log.append("hold")
        self.asked_at[claim.token] = asked_at

    async def take(self, claim: Claim) -> None:
        self.log.append(f"take {len(claim.tasks)}")
        asyncio.get_running_loop().call_soon(self.during_run)


class _Store(MemoryStore):
    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        bench = self._bench
        bench.log.append("claim alone" if request.alone else "claim")
        bench.limits.append(request.limit)
        bench.lanes.append(request.lane)
        bench.queues.append(request.queues)
        assert request.is_part == (len(request.queues or ()) == 1)
        bench.named.append(request.task_id)
        answer = bench.answers.pop(0) if bench.answers else NOTHING
        bench.during_claim()
        return answer

    async def set_idle(self, worker_id: UUID, idle: bool) -> None:
        self._bench.log.append("idle" if idle else "not idle")
        self._bench.during_set_idle()

    async def promote(self, *_: object, **__: object) -> int:
        self._bench.log.append("promote")
        self._bench.during_promote()
        return 0


@pytest.fixture
def queues() -> tuple[str, ...] | None:
    return None


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, queues: tuple[str, ...] | None) -> Bench:
    bench = Bench(queues=queues)
    monkeypatch.setattr(fetcher, "time", bench.clock)
    monkeypatch.setattr(fetcher, "SHORTEST_POLL", FOR_EVER)  # whoever sleeps must be woken
    bench.fetcher._pause = FOR_EVER
    return bench


async def test_a_lease_is_counted_from_asking_and_not_from_the_answer(bench: Bench) -> None:
    held = claim(1)
    bench.answers = [ClaimAnswer(held)]
    asked_at = bench.clock.now

    def slow() -> None:
        bench.clock.now += 7
        bench.stop.set()

    bench.during_claim = slow
    await bench.run()

    assert bench.asked_at == {held.token: asked_at}


async def test_what_was_enqueued_before_it_registered_as_idle_is_found_at_once(
    bench: Bench,
) -> None:
    def enqueue() -> None:
        # It looked for idle workers before this one was among them, so it wakes nobody.
        bench.answers = [ClaimAnswer(claim(1))]
        bench.during_claim = bench.stop.set

    bench.during_set_idle = enqueue
    await bench.run()

    assert bench.log == ["claim", "idle", "claim", "hold", "take 1"]


async def test_a_wake_up_during_a_look_is_not_missed(bench: Bench) -> None:
    def enqueue() -> None:
        if bench.log.count("claim") == 2:
            bench.answers = [ClaimAnswer(claim(1))]
            bench.fetcher.wake()
        if bench.log.count("claim") == 3:
            bench.stop.set()

    bench.during_claim = enqueue
    await bench.run()

    assert bench.log == ["claim", "idle", "claim", "went idle", "claim", "hold", "take 1"]


async def test_the_next_claim_is_under_way_before_what_was_taken_begins_to_run(
    bench: Bench,
) -> None:
    bench.free = 1
    bench.answers = [ClaimAnswer(claim(1)), ClaimAnswer(claim(2))]
    bench.during_run = lambda: bench.log.append("run")
    bench.during_set_idle = bench.stop.set
    await bench.run()
    await asyncio.sleep(0)

    assert bench.log[:6] == ["claim", "hold", "take 1", "claim", "hold", "take 1"]
    assert bench.log.count("run") == 2


async def test_a_full_claim_is_followed_by_the_next_without_a_pause(bench: Bench) -> None:
    bench.free = 2
    bench.answers = [NOTHING, ClaimAnswer(claim(1, 2)), ClaimAnswer(claim(3))]

    def end() -> None:
        if bench.log.count("claim") == 3:
            bench.stop.set()

    bench.during_claim = end
    await bench.run()

    taken = ["claim", "hold", "take 2", "not idle", "claim", "hold", "take 1", "idle"]
    assert bench.log == ["claim", "idle", *taken]


async def test_no_claim_is_larger_than_the_largest(bench: Bench) -> None:
    bench.free = LARGEST_CLAIM + 1
    bench.during_claim = bench.stop.set
    await bench.run()

    assert bench.limits == [LARGEST_CLAIM]


async def test_no_claim_is_larger_than_what_may_come_at_once(bench: Bench) -> None:
    bench.most = 7
    bench.during_claim = bench.stop.set
    await bench.run()

    assert bench.limits == [7]


async def test_a_suspect_is_run_when_the_others_are_done_and_nothing_is_claimed_beside_it(
    bench: Bench,
) -> None:
    bench.answers = [
        ClaimAnswer(claim(1, 2), alone_waiting=True),
        ClaimAnswer(claim(3, alone=True)),
    ]

    def end() -> None:
        if bench.log.count("claim") == 2:
            bench.stop.set()

    bench.during_claim = end
    await bench.run()

    suspect = ["claim alone", "hold", "emptied", "take 1", "emptied"]
    assert bench.log[:9] == ["claim", "hold", "take 2", *suspect, "idle"]


async def test_suspects_in_a_batch_do_not_wait_for_the_others(bench: Bench) -> None:
    bench.answers = [
        ClaimAnswer(None, alone_waiting=True),
        ClaimAnswer(claim(3, 4, alone=True)),
    ]

    def end() -> None:
        if bench.log.count("claim alone"):
            bench.stop.set()

    bench.during_claim = end
    await bench.run()

    assert bench.log == ["claim", "claim alone", "hold", "take 2", "idle"]
    assert bench.limits[-1] == LARGEST_CLAIM


@pytest.mark.parametrize(
    ("is_leader", "late", "promoted"),
    [(True, 1.0, True), (False, 1.4, False), (False, 1.6, True)],
)
async def test_a_due_task_is_promoted_by_the_leader_at_once_and_by_others_when_late(
    bench: Bench, is_leader: bool, late: float, promoted: bool
) -> None:
    bench.is_leader = is_leader
    bench.answers = [ClaimAnswer(None, due_in=1.0)]
    await bench.fetcher._turn(bench.stop)

    bench.clock.now += late
    await bench.fetcher.promote_due()
    await bench.fetcher.promote_due()  # until the next claim there is nothing new to know

    assert bench.log.count("promote") == promoted


@pytest.mark.parametrize(("free", "since", "promoted"), [(0, 0.6, 1), (0, 0.4, 0), (1, 0.6, 0)])
async def test_due_tasks_are_promoted_beside_only_while_no_claim_does_it(
    bench: Bench, free: int, since: float, promoted: int
) -> None:
    await bench.fetcher._turn(bench.stop)
    bench.free = free
    bench.clock.now += since
    await bench.fetcher.promote_while_busy()

    assert bench.log.count("promote") == promoted


@pytest.mark.parametrize(
    ("free", "held", "is_awaited"), [(5, 95, True), (5, 1, False), (200, 800, False)]
)
async def test_more_free_slots_are_awaited_only_while_few_are_free(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, free: int, held: int, is_awaited: bool
) -> None:
    monkeypatch.setattr(fetcher, "GATHER", FOR_EVER)
    bench.free, bench.held = free, held
    running = asyncio.create_task(bench.run())
    for _ in range(10):
        await asyncio.sleep(0)
    has_claimed = "claim" in bench.log
    running.cancel()
    await asyncio.wait([running])

    assert has_claimed is not is_awaited


async def test_who_takes_nothing_any_more_claims_nothing_although_it_holds_nothing(
    bench: Bench,
) -> None:
    bench.free = bench.held = 0  # it drains, and whoever asked for that stops the fetcher next
    running = asyncio.create_task(bench.run())
    for _ in range(10):
        bench.fetcher.wake(7)
        await asyncio.sleep(0)
    has_claimed = "claim" in bench.log
    running.cancel()
    await asyncio.wait([running])

    assert not has_claimed


# Wake-ups that name a lane


class Sleeper(Bench):
    """A fetcher that is asked to look at all lanes, and then sleeps; whatever happens in its sleeps."""

    def __init__(self, *sleeps: Callable[["Sleeper"], None], poll: float = FOR_EVER) -> None:
        super().__init__(poll=poll)
        self._sleeps = list(sleeps)
        self.first: list[ClaimAnswer] = [NOTHING, NOTHING]
        self.pauses: list[float] = []  # for which it would have slept

    async def looks(self) -> list[int | None]:
        """The lanes of the claims that follow the first two, which register it as idle."""
        self.answers = [*self.first, *self.answers]
        with mock.patch.object(fetcher, "is_set_within", self._sleep):
            await self.run()
        assert self.lanes[:2] == [None, None]
        return self.lanes[2:]

    async def _sleep(self, wakened: asyncio.Event, seconds: float) -> bool:
        self.pauses.append(seconds)
        if self._sleeps:
            self._sleeps.pop(0)(self)
        else:
            self.stop.set()
        return wakened.is_set()


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """The clock of a fetcher that is made after this, and polls without jitter."""
    clock = MovedClock()
    monkeypatch.setattr(fetcher, "time", clock)
    monkeypatch.setattr(random, "uniform", lambda *_: 1.0)
    return clock


def woken_for(*lanes: int | None) -> Callable[[Sleeper], None]:
    def wake(bench: Sleeper) -> None:
        for lane in lanes:
            bench.fetcher.wake(lane)

    return wake


@pytest.mark.usefixtures("moved")
async def test_only_what_no_wake_up_told_of_makes_it_poll_quickly_again() -> None:
    wake = woken_for(None)
    bench = Sleeper(wake, wake, wake, lambda _: None, poll=0.5)
    found = ClaimAnswer(claim(1))
    bench.answers = [found, found, NOTHING, found]

    await bench.looks()

    shortest = fetcher.SHORTEST_POLL
    expected = [2 * shortest, 4 * shortest, 8 * shortest, 16 * shortest, shortest]
    assert bench.pauses == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lanes", "look"),
    [((7,), 7), ((0,), 0), ((7, 7), 7), ((7, 8), None), ((7, None), None), ((None,), None)],
)
async def test_a_look_is_at_the_lane_that_all_wake_ups_name(
    lanes: tuple[int | None, ...], look: int | None
) -> None:
    assert await Sleeper(woken_for(*lanes)).looks() == [look]


async def named_looks(*sleeps: Callable[[Sleeper], None]) -> list[tuple[int | None, UUID | None]]:
    """The lanes and tasks of the claims after each sleep."""
    bench = Sleeper(*sleeps)
    lanes = await bench.looks()
    return list(zip(lanes, bench.named[2:], strict=True))


def woken_by(*named: tuple[int | None, UUID | None]) -> Callable[[Sleeper], None]:
    def wake(bench: Sleeper) -> None:
        for one in named:
            bench.fetcher.wake(*one)

    return wake


@pytest.mark.parametrize(
    ("named", "look"),
    [
        ([(7, FIRST)], (7, FIRST)),
        ([(7, FIRST), (7, SECOND)], (7, None)),
        ([(7, None), (7, FIRST)], (7, None)),
        ([(7, FIRST), (7, None)], (7, None)),
        ([(7, FIRST), (8, SECOND)], (None, None)),
        ([(7, FIRST), (None, None)], (None, None)),
    ],
)
async def test_a_look_is_at_the_task_that_the_one_wake_up_names(
    named: list[tuple[int | None, UUID | None]], look: tuple[int | None, UUID | None]
) -> None:
    assert await named_looks(woken_by(*named)) == [look]


async def test_a_task_that_was_named_for_one_look_is_not_that_of_the_next() -> None:
    first, second = woken_by((7, FIRST)), woken_by((7, SECOND))

    looks = await named_looks(first, woken_by((7, None)), second, lambda _: None)

    assert looks == [(7, FIRST), (7, None), (7, SECOND), (None, None)]


async def test_a_look_that_no_wake_up_led_to_is_at_all_lanes() -> None:
    assert await Sleeper(woken_for(7), lambda _: None, woken_for(8)).looks() == [7, None, 8]


async def test_a_lane_that_was_named_before_it_registered_as_idle_is_not_all_there_may_be() -> None:
    bench = Sleeper(woken_for(8))
    bench.during_set_idle = lambda: bench.fetcher.wake(7)

    assert await bench.looks() == [8]


async def test_a_lane_that_is_named_during_a_look_is_looked_at_next() -> None:
    bench = Sleeper(woken_for(7), lambda _: None)

    def name_another() -> None:
        if bench.lanes[2:] == [7]:
            bench.fetcher.wake(8)

    bench.during_claim = name_another

    assert await bench.looks() == [7, 8]


async def test_after_a_full_claim_of_a_lane_all_are_looked_at() -> None:
    bench = Sleeper(woken_for(7), woken_for(7))
    bench.free = 2
    bench.answers = [ClaimAnswer(claim(1, 2)), NOTHING]

    # Then it registers as idle anew, and sleeps.
    assert await bench.looks() == [7, None, None, 7]


async def test_a_full_claim_of_a_lane_leads_to_a_look_at_all_whatever_is_named_meanwhile() -> None:
    bench = Sleeper(woken_for(7))
    bench.free = 2
    bench.answers = [ClaimAnswer(claim(1, 2)), NOTHING]

    def name_another() -> None:
        if bench.lanes[2:] == [7]:
            bench.fetcher.wake(8)

    bench.during_claim = name_another

    assert (await bench.looks())[:2] == [7, None]


@pytest.mark.parametrize("every", [0.01, 0.3])
async def test_all_lanes_are_looked_at_when_a_poll_is_due_whatever_is_named(
    moved: MovedClock, every: float
) -> None:
    began, at = moved.now, list[float]()

    def wake_for_one(bench: Sleeper) -> None:
        moved.now += min(every, bench.pauses[-1])
        if bench.pauses[-1] > every:
            bench.fetcher.wake(7)

    bench = Sleeper(*[wake_for_one] * int(4 / every), poll=1.0)

    def note() -> None:
        if bench.lanes[-1] is None:
            at.append(moved.now - began)

    bench.during_claim = note
    looks = await bench.looks()

    assert looks.count(7) > len(looks) / 2
    polls = [0.04, 0.08, 0.16, 0.32, 0.64, 1.0]  # each is twice as long as the one before
    expected = [sum(polls[:number]) for number in range(len(polls) + 1)]
    assert at[1 : len(expected) + 1] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("is_leader", "pause"), [(True, 0.3), (False, 0.8)])
async def test_it_sleeps_no_longer_than_until_something_is_due(
    moved: MovedClock, is_leader: bool, pause: float
) -> None:
    bench = Sleeper(woken_for(7))
    bench.is_leader = is_leader
    bench.fetcher._pause = FOR_EVER
    bench.first = [NOTHING, ClaimAnswer(None, due_in=0.3)]
    await bench.looks()

    assert bench.pauses == pytest.approx([pause, pause])


async def test_what_is_due_and_held_by_somebody_is_tried_again_soon(moved: MovedClock) -> None:
    def pass_time(bench: Sleeper) -> None:
        moved.now += bench.pauses[-1]

    bench = Sleeper(pass_time, pass_time)
    bench.fetcher._pause = FOR_EVER
    bench.first = [NOTHING, ClaimAnswer(None, due_in=0.0)]
    bench.answers = [ClaimAnswer(None, due_in=0.0), NOTHING]

    assert await bench.looks() == [None, None]
    assert bench.pauses[:2] == pytest.approx([fetcher.SHORTEST_POLL] * 2)
    assert bench.log.count("promote") == 4  # before and after the second look, and before the third


async def test_any_number_of_wake_ups_takes_little_memory() -> None:
    bench = Sleeper()
    for lane in range(1000):
        bench.fetcher.wake(lane)

    assert len(bench.fetcher._woken_for) == 2


async def test_what_is_due_is_not_forgotten_by_a_look_at_one_lane(moved: MovedClock) -> None:
    def come_due(_: Sleeper) -> None:
        moved.now += 11

    bench = Sleeper(woken_for(7), come_due)
    bench.first = [NOTHING, ClaimAnswer(None, due_in=10.0)]

    assert await bench.looks() == [7, None]
    assert bench.log.count("promote") == 1


async def test_after_a_promotion_all_lanes_are_looked_at(moved: MovedClock) -> None:
    def come_due(bench: Sleeper) -> None:
        moved.now += 11
        bench.fetcher.wake(7)

    bench = Sleeper(come_due, woken_for(7))
    bench.first = [NOTHING, ClaimAnswer(None, due_in=10.0)]

    assert await bench.looks() == [None, 7]


async def test_after_a_look_that_failed_all_lanes_are_looked_at() -> None:
    bench = Sleeper(woken_for(7))

    def fail_once() -> None:
        if bench.lanes[2:] == [7]:
            raise StoreUnavailable("gone")

    bench.during_claim = fail_once

    assert await bench.looks() == [7, None]


async def test_a_request_to_stop_that_comes_before_the_look_ends_the_sleep_after_it(
    bench: Bench,
) -> None:
    """The look forgets the wake-ups of before it, and with them what the request had set."""
    bench.fetcher._due_at = bench.clock.now
    bench.fetcher._idle = True
    bench.during_promote = bench.stop.set

    await bench.run()

    assert bench.log.count("claim") == 1


async def test_a_request_to_stop_ends_a_sleep(bench: Bench) -> None:
    bench.fetcher._idle = True
    running = asyncio.create_task(bench.run())
    while "went idle" not in bench.log:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)  # it sleeps by now
    bench.stop.set()
    await running

    assert bench.log.count("claim") == 1


# Shares of queues

with_shares = pytest.mark.parametrize("queues", [("q", "r")])


@with_shares
async def test_with_shares_it_is_idle_only_when_every_queue_came_back_short(bench: Bench) -> None:
    bench.free = 4
    bench.answers = [ClaimAnswer(claim(1, 2, 3)), NOTHING]

    bench.during_set_idle = bench.stop.set
    await bench.run()

    assert bench.log == ["claim", "hold", "take 3", "claim", "idle"]
    assert (bench.queues, bench.limits) == ([("q",), ("r",)], [4, 1])


@with_shares
async def test_with_shares_a_full_room_is_followed_by_the_next_claims(bench: Bench) -> None:
    bench.free = 2
    bench.answers = [ClaimAnswer(claim(1, 2)), NOTHING, NOTHING]

    bench.during_set_idle = bench.stop.set
    await bench.run()

    assert bench.log == ["claim", "hold", "take 2", "claim", "claim", "idle"]


@with_shares
async def test_with_shares_a_wake_up_that_names_a_lane_is_one_claim(bench: Bench) -> None:
    def wake() -> None:
        if bench.log.count("claim") == 3:  # all came back short, asked together the second time
            bench.fetcher.wake(5, FIRST)
        if bench.log.count("claim") == 4:
            bench.stop.set()

    bench.during_claim = wake
    await bench.run()

    assert bench.lanes == [None, None, None, 5]
    assert bench.queues == [("q",), ("r",), ("q", "r"), ("q", "r")]


@with_shares
async def test_with_shares_a_suspect_of_any_queue_is_claimed_after_them(bench: Bench) -> None:
    bench.answers = [
        ClaimAnswer(None, alone_waiting=True),
        NOTHING,
        ClaimAnswer(claim(3, alone=True)),
    ]
    bench.during_set_idle = bench.stop.set
    await bench.run()

    assert bench.log[:3] == ["claim", "claim", "claim alone"]
    assert bench.queues[2] == ("q", "r")


# Pausing


async def test_while_it_is_paused_it_claims_nothing_and_is_not_idle(bench: Bench) -> None:
    running = asyncio.create_task(bench.run())
    while not bench.log.count("went idle"):
        await asyncio.sleep(0)
    bench.fetcher._beside.pause()
    while "not idle" not in bench.log:
        await asyncio.sleep(0)
    before = list(bench.log)
    bench.fetcher.wake()
    for _ in range(10):
        await asyncio.sleep(0)
    paused = list(bench.log)
    bench.during_claim = bench.stop.set
    bench.fetcher._beside.resume()
    await running

    assert before == paused == ["claim", "idle", "claim", "went idle", "not idle"]
    assert bench.log[5:] == ["claim", "idle"]


async def test_a_paused_worker_has_no_trouble_with_its_claims_and_can_stop(bench: Bench) -> None:
    bench.fetcher._beside.pause()
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(0)
    bench.clock.now += 1000
    trouble = bench.fetcher.trouble
    bench.stop.set()
    await running

    assert trouble == ""
    assert bench.log == []
