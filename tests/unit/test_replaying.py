"""How many letters are replayed: batches, calls that broke, letters that somebody holds."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from windlass.client import replaying
from windlass.client.dead import DeadClient
from windlass.client.replaying import BATCH, REPEAT_AT_MOST, ReplayPlan
from windlass.model.dead import DiscardAnswer, Replay, ReplayAnswer, Replayed
from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.registry import Registry
from windlass.store.memory import MemoryStore

IDS = [UUID(int=number) for number in range(1, 4)]


class Told(MemoryStore):
    """Answers as it is told, the last answer for ever."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self._answers = list(answers)
        self.calls: list[list[Replay]] = []

    async def replay(self, replays: Sequence[Replay], **_: Any) -> list[Replayed]:
        self.calls.append(list(replays))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [
            Replayed(answer, one.id if answer is ReplayAnswer.REPLAYED else None) for one in replays
        ]

    async def discard(self, task_ids: Sequence[UUID], **_: Any) -> list[DiscardAnswer]:
        self.calls.append([Replay(one, one) for one in task_ids])
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [answer] * len(task_ids)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "backoff", lambda *_, **__: 0.0)
    monkeypatch.setattr(replaying, "HELD_WITHIN", 0.05)


def client(store: MemoryStore) -> DeadClient:
    return DeadClient(store=store, registry=Registry(), max_payload_bytes=1000)


async def test_a_call_that_broke_is_repeated_with_the_same_ids() -> None:
    store = Told(StoreUnavailable("broke"), ReplayAnswer.REPLAYED)

    report = await client(store).replay(IDS, ReplayPlan())

    assert store.calls[0] == store.calls[1]
    assert list(report.replayed.values()) == [str(one.id) for one in store.calls[0]]


async def test_a_store_that_stays_away_is_told_of() -> None:
    store = Told(StoreUnavailable("away"))

    with pytest.raises(StoreUnavailable, match="away"):
        await client(store).replay(IDS, ReplayPlan())

    assert len(store.calls) == 1 + REPEAT_AT_MOST


async def test_a_letter_that_is_held_for_a_moment_is_tried_again() -> None:
    store = Told(ReplayAnswer.HELD, ReplayAnswer.HELD, ReplayAnswer.REPLAYED)

    report = await client(store).replay(IDS, ReplayPlan())

    assert (len(report.replayed), len(store.calls)) == (3, 3)


async def test_a_letter_that_is_held_for_long_is_refused() -> None:
    replay = await client(Told(ReplayAnswer.HELD)).replay(IDS, ReplayPlan())
    discard = await client(Told(DiscardAnswer.HELD)).discard(IDS, dry_run=False)

    for refused in (replay.refused, discard.refused):
        assert list(refused) == [str(one) for one in IDS]
        assert all(isinstance(error, StoreBusy) for error in refused.values())


async def test_many_are_written_in_batches_and_spread_through_all_of_them() -> None:
    store = Told(ReplayAnswer.REPLAYED)
    ids = [UUID(int=number) for number in range(2 * BATCH + 1)]

    await client(store).replay([*ids, *ids], ReplayPlan(rate=10.0))

    written = [one for call in store.calls for one in call]
    assert [len(call) for call in store.calls] == [BATCH, BATCH, 1]
    assert [one.ancestor for one in written] == ids
    assert [one.delay for one in written] == [place / 10 for place in range(len(ids))]
