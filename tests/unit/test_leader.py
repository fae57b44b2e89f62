"""A leader does its chores while its term lasts, and not a moment longer."""

import asyncio
from datetime import timedelta
from uuid import UUID

from windlass.maintenance.chores import Chore
from windlass.maintenance.leader import Leader
from windlass.model.errors import NotLeader
from windlass.model.task import Leadership
from windlass.service import Stop

ME = UUID(int=1)


class Seat:
    def __init__(self, answers: list[Leadership | None]) -> None:
        self.answers = answers
        self.asked: list[Leadership | None] = []
        self.resigned: list[Leadership] = []

    async def lead(
        self, candidate: UUID, *, current: Leadership | None, term: timedelta
    ) -> Leadership | None:
        self.asked.append(current)
        return self.answers.pop(0) if self.answers else Leadership(ME, 9)

    async def resign(self, leadership: Leadership) -> None:
        self.resigned.append(leadership)


def leader(seat: Seat, *chores: Chore) -> Leader:
    return Leader(store=seat, candidate=ME, term=timedelta(seconds=0.3), chores=chores)


async def test_who_is_not_elected_does_nothing_and_asks_again() -> None:
    seat = Seat([None, None, Leadership(ME, 4)])
    stop = Stop()
    done: list[int] = []

    async def chore(leadership: Leadership) -> bool:
        done.append(leadership.term)
        stop.set()
        return False

    await asyncio.wait_for(leader(seat, Chore("a", 60, chore)).run(stop), 10)

    assert done == [4]
    assert seat.asked == [None, None, None]
    assert seat.resigned == [Leadership(ME, 4)]


async def test_a_deposed_leader_stops_and_stands_again() -> None:
    seat = Seat([Leadership(ME, 4), Leadership(ME, 6)])
    stop = Stop()
    done: list[int] = []

    async def chore(leadership: Leadership) -> bool:
        done.append(leadership.term)
        if leadership.term == 4:
            raise NotLeader("over")
        stop.set()
        return False

    await asyncio.wait_for(leader(seat, Chore("a", 0, chore)).run(stop), 10)

    assert done == [4, 6]
    assert seat.asked == [None, None]


async def test_a_chore_that_fails_or_hangs_does_not_stop_the_others() -> None:
    seat = Seat([Leadership(ME, 1)])
    stop = Stop()
    done: list[str] = []

    async def fails(_: Leadership) -> bool:
        done.append("fails")
        raise ValueError("no")

    async def hangs(_: Leadership) -> bool:
        done.append("hangs")
        await asyncio.Event().wait()
        return False

    async def works(_: Leadership) -> bool:
        done.append("works")
        stop.set()
        return False

    chores = [Chore("fails", 60, fails), Chore("hangs", 60, hangs), Chore("works", 60, works)]
    await asyncio.wait_for(leader(seat, *chores).run(stop), 10)

    assert done == ["fails", "hangs", "works"]
