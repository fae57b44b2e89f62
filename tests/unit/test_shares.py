"""Queues have their share of what a worker starts, by weight, and lend what they do not use."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as some

from windlass.policy.shares import LEAST, LOOK_AFTER, Ask, Queues, Shares

MAIL, BULK = ("mail",), ("bulk",)
PLENTY = 1 << 30


class World:
    """Queues with so many tasks each, and a worker that asks for them."""

    def __init__(self, weights: Mapping[Queues, float], **tasks: int) -> None:
        self.shares = Shares(weights)
        self.tasks = Counter(tasks)
        self.most: dict[Queues, int] = {}
        self.now = 0.0
        self.asked: list[Ask] = []

    def room(self, queues: Queues) -> int:
        return self.most.get(queues, PLENTY)

    def turn(self, size: int) -> Counter[str]:
        turn = self.shares.turn(size, room=self.room, now=self.now)
        taken: Counter[str] = Counter()
        self.asked = []
        while (ask := turn.next()) is not None:
            self.asked.append(ask)
            found = self._found(ask)
            turn.took(found)
            taken += found
        turn.close()
        return taken

    def _found(self, ask: Ask) -> Counter[str]:
        found: Counter[str] = Counter()
        for queue in ask.queues:
            number = min(self.tasks[queue], ask.limit - found.total())
            found[queue] = number
            self.tasks[queue] -= number
            if (queue,) in self.most:
                self.most[queue,] -= number
        return found


def both(**tasks: int) -> World:
    return World({MAIL: 3, BULK: 1}, **tasks)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 50, 100, 1000])
def test_while_both_have_work_each_has_its_share(size: int) -> None:
    world = both(mail=10**6, bulk=10**6)

    taken: Counter[str] = Counter()
    for _ in range(40):
        taken += world.turn(size)

    assert taken.total() == 40 * size
    assert abs(taken["mail"] - 30 * size) <= max(size, LEAST)


def test_a_large_turn_is_one_claim_for_each_queue() -> None:
    world = both(mail=1000, bulk=1000)
    world.turn(100)

    assert world.asked == [Ask(MAIL, 75), Ask(BULK, 25)]


def test_a_small_turn_is_one_claim() -> None:
    world = both(mail=1000, bulk=1000)
    for _ in range(8):
        world.turn(LEAST)

        assert len(world.asked) == 1


def test_what_one_does_not_use_goes_to_the_other() -> None:
    world = both(mail=5, bulk=1000)

    assert world.turn(100) == Counter(mail=5, bulk=95)


def test_what_was_lent_is_not_asked_back() -> None:
    world = both(bulk=100_000)
    for _ in range(10):
        world.turn(1000)
    world.tasks["mail"] = 10_000
    world.now += LOOK_AFTER
    world.turn(100)

    taken = world.turn(100)

    assert taken == Counter(mail=75, bulk=25)


def test_a_queue_that_was_empty_is_not_asked_in_every_turn_while_others_fill_the_room() -> None:
    world = both(bulk=100_000)
    world.turn(100)
    world.turn(100)

    assert world.asked == [Ask(BULK, 100)]


def test_a_queue_that_was_empty_is_soon_asked_again_and_first() -> None:
    world = both(bulk=100_000)
    world.turn(100)
    world.tasks["mail"] = 1000
    world.now += LOOK_AFTER

    taken = world.turn(100)

    assert world.asked[0].queues == MAIL
    assert taken["mail"] == 75


def test_those_that_seem_empty_are_asked_in_one_claim() -> None:
    world = both()
    world.turn(10)
    world.turn(10)

    assert world.asked == [Ask(("mail", "bulk"), 10)]


def test_fewer_than_asked_for_means_that_every_queue_came_back_short() -> None:
    world = both(mail=3)
    world.turn(10)

    assert {queue for ask in world.asked for queue in ask.queues} == {"mail", "bulk"}


def test_a_queue_may_take_no_more_than_it_has_room_for_and_holds_up_nobody() -> None:
    world = both(mail=1000, bulk=1000)
    world.most[MAIL] = 5

    assert world.turn(100) == Counter(mail=5, bulk=95)
    assert world.turn(100) == Counter(bulk=100)


def test_a_queue_without_room_is_not_asked() -> None:
    world = both(mail=1000)
    world.most[MAIL] = 0
    world.turn(100)

    assert [ask.queues for ask in world.asked] == [BULK]


@given(
    weights=some.lists(some.integers(1, 1000), min_size=1, max_size=6),
    turns=some.lists(
        some.tuples(
            some.integers(1, 300),  # size
            some.lists(some.integers(0, 200), min_size=6, max_size=6),  # new tasks
            some.lists(some.none() | some.integers(0, 30), min_size=6, max_size=6),  # room
            some.floats(0, 0.1),
        ),
        max_size=12,
    ),
)
def test_no_slot_stays_free_while_a_queue_with_room_has_work(
    weights: list[int],
    turns: list[tuple[int, list[int], list[int | None], float]],
) -> None:
    names = [f"q{number}" for number in range(len(weights))]
    world = World({(name,): weight for name, weight in zip(names, weights, strict=True)})
    for size, new, rooms, seconds in turns:
        world.now += seconds
        world.tasks.update(dict(zip(names, new, strict=False)))
        asked = zip(names, rooms, strict=False)
        world.most = {(name,): room for name, room in asked if room is not None}
        before = dict(world.most)

        taken = world.turn(size)

        left = [name for name in names if world.tasks[name] and world.room((name,)) > 0]
        assert taken.total() == size or (taken.total() < size and not left)
        assert all(taken[name] <= room for (name,), room in before.items())
        assert abs(sum(world.shares.credit.values())) < 1e-6
