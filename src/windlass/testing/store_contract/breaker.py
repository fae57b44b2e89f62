"""Rules of breakers that workers share."""

# ruff: noqa: S101 - tests assert

from windlass.model.breaker import SharedBreaker
from windlass.store.port import Store
from windlass.testing.store_contract.steps import LEASE, OTHER_WORKER, SECOND, WORKER, Steps

NAME = "payments"


class BreakerRules(Steps):
    """Breaker rules."""

    async def known_breaker(self, store: Store) -> SharedBreaker:
        (known,) = await store.breakers([NAME, "never opened"])
        return known

    async def half_open(self, store: Store) -> None:
        await store.open_breaker(NAME, epoch=0, recovery=SECOND)
        await self.advance(store, 2 * SECOND)

    async def test_a_breaker_that_opened_says_for_how_long(self, store: Store) -> None:
        is_open = await store.open_breaker(NAME, epoch=0, recovery=30 * SECOND)

        known = await self.known_breaker(store)

        assert is_open
        assert known.epoch == 1
        assert known.open_for is not None
        assert 0 < known.open_for <= 30

    async def test_a_breaker_whose_time_is_over_is_half_open(self, store: Store) -> None:
        await self.half_open(store)

        assert await self.known_breaker(store) == SharedBreaker(NAME, 1, 0.0)

    async def test_an_old_opening_changes_nothing(self, store: Store) -> None:
        await store.open_breaker(NAME, epoch=0, recovery=30 * SECOND)
        await store.close_breaker(NAME, epoch=1)

        first = await store.open_breaker(NAME, epoch=0, recovery=30 * SECOND)
        second = await store.open_breaker(NAME, epoch=1, recovery=30 * SECOND)

        assert (first, second) == (False, False)
        assert await self.known_breaker(store) == SharedBreaker(NAME, 2, None)

    async def test_an_old_closing_changes_nothing(self, store: Store) -> None:
        await store.open_breaker(NAME, epoch=0, recovery=SECOND)
        await store.open_breaker(NAME, epoch=1, recovery=30 * SECOND)

        is_closed = await store.close_breaker(NAME, epoch=1)

        known = await self.known_breaker(store)
        assert not is_closed
        assert known.epoch == 2
        assert known.open_for

    async def test_a_breaker_that_is_closed_is_closed_once(self, store: Store) -> None:
        assert not await store.close_breaker(NAME, epoch=0)
        assert await store.breakers([NAME]) == []

        await store.open_breaker(NAME, epoch=0, recovery=SECOND)
        first = await store.close_breaker(NAME, epoch=1)
        again = await store.close_breaker(NAME, epoch=2)

        assert (first, again) == (True, False)
        assert await self.known_breaker(store) == SharedBreaker(NAME, 2, None)

    async def test_one_makes_the_trials_of_a_half_open_breaker(self, store: Store) -> None:
        await self.half_open(store)

        mine = await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)
        other = await store.probe_breaker(NAME, epoch=1, holder=OTHER_WORKER, lease=LEASE)
        again = await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)

        assert (mine, other, again) == (True, False, True)

    async def test_trials_of_a_lost_worker_are_given_to_another(self, store: Store) -> None:
        await self.half_open(store)
        await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)
        await self.advance(store, LEASE + SECOND)

        assert await store.probe_breaker(NAME, epoch=1, holder=OTHER_WORKER, lease=LEASE)

    async def test_there_are_no_trials_unless_it_is_half_open(self, store: Store) -> None:
        unknown = await store.probe_breaker(NAME, epoch=0, holder=WORKER, lease=LEASE)
        await store.open_breaker(NAME, epoch=0, recovery=30 * SECOND)
        still_open = await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)
        await self.advance(store, 31 * SECOND)
        of_before = await store.probe_breaker(NAME, epoch=0, holder=WORKER, lease=LEASE)
        await store.close_breaker(NAME, epoch=1)
        closed = await store.probe_breaker(NAME, epoch=2, holder=WORKER, lease=LEASE)

        assert [unknown, still_open, of_before, closed] == [False] * 4

    async def test_who_opens_it_again_ends_the_trials(self, store: Store) -> None:
        await self.half_open(store)
        await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)
        await store.open_breaker(NAME, epoch=1, recovery=SECOND)
        await self.advance(store, 2 * SECOND)

        assert await store.probe_breaker(NAME, epoch=2, holder=OTHER_WORKER, lease=LEASE)

    async def test_one_that_was_closed_opens_again(self, store: Store) -> None:
        await self.half_open(store)
        await store.close_breaker(NAME, epoch=1)

        assert await store.open_breaker(NAME, epoch=2, recovery=30 * SECOND)

        known = await self.known_breaker(store)
        assert known.epoch == 3
        assert known.open_for

    async def test_trials_that_were_left_are_given_to_another_at_once(self, store: Store) -> None:
        await self.half_open(store)
        await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)

        await store.leave_breaker(NAME, holder=WORKER)

        assert await store.probe_breaker(NAME, epoch=1, holder=OTHER_WORKER, lease=LEASE)

    async def test_nobody_leaves_the_trials_of_another(self, store: Store) -> None:
        await store.leave_breaker(NAME, holder=WORKER)
        await self.half_open(store)
        await store.probe_breaker(NAME, epoch=1, holder=OTHER_WORKER, lease=LEASE)

        await store.leave_breaker(NAME, holder=WORKER)

        assert not await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)

    async def test_a_clock_that_was_set_back_keeps_no_breaker_open(self, store: Store) -> None:
        await store.open_breaker(NAME, epoch=0, recovery=30 * SECOND)
        await self.advance(store, -100 * LEASE)

        assert await self.known_breaker(store) == SharedBreaker(NAME, 1, 0.0)
        assert await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)

    async def test_a_clock_that_was_set_back_keeps_no_trials(self, store: Store) -> None:
        await self.half_open(store)
        await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)
        await self.advance(store, -100 * LEASE)

        assert await store.probe_breaker(NAME, epoch=1, holder=OTHER_WORKER, lease=LEASE)
