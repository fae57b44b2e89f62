"""Two fetchers of one worker: each fills a room of its own, and they do not disturb each other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from uuid import UUID

import pytest

from windlass.model.task import Claim, ClaimAnswer, ClaimedTask, ClaimRequest
from windlass.runtime import fetcher
from windlass.runtime.fetcher import Beside, Fetcher
from windlass.service import Stop
from windlass.store.memory import MemoryStore

ME = UUID(int=1)
FOR_EVER = 1e6  # seconds
FIRST: tuple[str, ...] = ("first",)
SECOND: tuple[str, ...] = ("second",)
NOTHING = ClaimAnswer(None)


def claim(number: int, *, alone: bool = False) -> Claim:
    task = ClaimedTask(UUID(int=number), "t", "q", 10, "{}", 0, 4, 1, None)
    return Claim(UUID(int=100 + number), 1, (task,), alone)


class Store(MemoryStore):
    """Answers claims of each kind of types by a script, and says what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[ClaimRequest] = []
        self.answers: dict[tuple[str, ...], list[ClaimAnswer]] = {FIRST: [], SECOND: []}
        self.said: list[bool] = []

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        self.asked.append(request)
        answers = self.answers[request.types]
        return answers.pop(0) if answers else NOTHING

    async def set_idle(self, _: UUID, idle: bool) -> None:
        self.said.append(idle)

    def looks(self, types: tuple[str, ...]) -> int:
        return sum(request.types == types for request in self.asked)


class Room:
    """Takes what it is given, and is empty when it is told to be."""

    def __init__(self) -> None:
        self.free = 5
        self.taken: list[Claim] = []
        self.is_empty = asyncio.Event()

    def wanted(self) -> int:
        return self.free

    def free_slots(self) -> int:
        return self.free

    async def slot_freed(self) -> None: ...

    def at_once(self) -> int:
        return 100

    def busy(self) -> int:
        return 0

    def has_room(self) -> bool:
        return self.free > 0

    async def room(self) -> None:
        await asyncio.Event().wait()

    async def emptied(self) -> None:
        await self.is_empty.wait()

    def hold(self, claim: Claim, asked_at: float) -> None: ...

    async def take(self, claim: Claim) -> None:
        self.taken.append(claim)


class Bench:
    def __init__(self) -> None:
        self.store = Store()
        self.both = Beside()
        self.rooms = {FIRST: Room(), SECOND: Room()}
        self.stop = Stop()
        self.running: asyncio.Task[None] | None = None
        for types, room in self.rooms.items():
            lease, ageing = timedelta(seconds=30), timedelta(seconds=6)
            Fetcher(
                store=self.store,
                room=room,
                request=ClaimRequest(ME, types, 1, lease, ageing, apart=types == SECOND),
                poll=timedelta(seconds=FOR_EVER),
                is_leader=lambda: True,
                went_idle=lambda: None,
                beside=self.both,
            )
        for one in self.both.fetchers:
            one._pause = FOR_EVER  # whoever sleeps must be woken

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)

    async def until_quiet(self) -> None:
        """Let both run until they sleep, or wait for something."""
        self.running = self.running or asyncio.create_task(self.both.run(self.stop))
        looks = -1
        while looks != len(self.store.asked):
            looks = len(self.store.asked)
            for _ in range(50):
                await asyncio.sleep(0)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(fetcher, "SHORTEST_POLL", FOR_EVER)
    bench = Bench()
    yield bench
    bench.stop.set()
    if bench.running is not None:
        await asyncio.wait_for(bench.running, 10)


async def test_each_claims_its_own_types_for_its_own_room(bench: Bench) -> None:
    bench.rooms[SECOND].free = 2
    held = {FIRST: claim(1), SECOND: claim(2)}
    for types, one in held.items():
        bench.store.answers[types] = [ClaimAnswer(one)]
    await bench.until_quiet()

    asked = {(one.types, one.limit, one.apart) for one in bench.store.asked}
    assert asked == {(FIRST, 5, False), (SECOND, 2, True)}
    assert {types: room.taken for types, room in bench.rooms.items()} == {
        types: [one] for types, one in held.items()
    }


async def test_one_without_room_does_not_keep_the_other_from_claiming(bench: Bench) -> None:
    bench.rooms[SECOND].free = 0
    await bench.until_quiet()
    before = bench.store.looks(FIRST)

    bench.both.wake()
    await bench.until_quiet()

    assert bench.store.looks(FIRST) == before + 1
    assert bench.store.looks(SECOND) == 0


@pytest.mark.parametrize("types", [FIRST, SECOND], ids=str)
async def test_nothing_is_claimed_while_a_suspect_runs(
    bench: Bench, types: tuple[str, ...]
) -> None:
    await bench.until_quiet()
    suspect = claim(7, alone=True)
    bench.store.answers[types] = [ClaimAnswer(None, alone_waiting=True), ClaimAnswer(suspect)]
    bench.both.wake()
    await bench.until(lambda: bench.store.asked[-1].alone)
    before = len(bench.store.asked)

    bench.both.wake()
    await bench.until_quiet()
    assert len(bench.store.asked) == before
    assert bench.rooms[types].taken == []

    bench.rooms[types].is_empty.set()
    await bench.until_quiet()
    assert bench.rooms[types].taken == [suspect]
    assert len(bench.store.asked) > before


async def test_the_first_alone_says_whether_the_worker_is_idle(bench: Bench) -> None:
    await bench.until_quiet()
    assert bench.store.said == [True]

    bench.store.answers[SECOND] = [ClaimAnswer(claim(n)) for n in range(3)]
    bench.rooms[SECOND].free = 1  # so that each of these is as many as were asked for
    bench.both.wake()
    await bench.until_quiet()

    assert len(bench.rooms[SECOND].taken) == 3
    assert bench.store.said == [True]


async def test_the_second_looks_again_once_enqueues_notify(bench: Bench) -> None:
    await bench.until_quiet()
    bench.store.answers[FIRST] = [ClaimAnswer(claim(1))]
    bench.rooms[FIRST].free = 1
    before = bench.store.looks(SECOND)

    first, _ = bench.both.fetchers
    first.wake()  # it finds as many as it asked for, and so is busy for a moment
    await bench.until_quiet()

    assert bench.store.said == [True, False, True]
    assert bench.store.looks(SECOND) > before


async def test_what_ends_one_ends_both_with_its_error(bench: Bench) -> None:
    async def broken(request: ClaimRequest) -> ClaimAnswer:
        raise LookupError("a fault of ours")

    bench.store.claim = broken  # type: ignore[method-assign]  # on purpose
    with pytest.raises(LookupError, match="a fault of ours"):
        await asyncio.wait_for(bench.both.run(bench.stop), 10)
