"""Which failed enqueues a client makes again by itself."""

from collections.abc import Sequence
from typing import Any

import pytest

from windlass.client.asking import EnqueueOptions
from windlass.client.verbs import REPEAT_AT_MOST, Client
from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.model.task import Enqueued, NewTask, TypeDefaults
from windlass.registry import Registry
from windlass.store.memory import MemoryStore
from windlass.testing.store_contract.steps import AGEING


class Refusing(MemoryStore):
    def __init__(self, error: StoreUnavailable) -> None:
        super().__init__()
        self.error = error
        self.calls: list[bool] = []

    async def enqueue(self, tasks: Sequence[NewTask], **options: Any) -> list[Enqueued]:
        self.calls.append(options["repeated"])
        raise self.error


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (StoreUnavailable("broke"), [False] + [True] * REPEAT_AT_MOST),
        # It was answered: nothing was written, and whoever holds the key may do so for long.
        (StoreBusy("somebody holds the key"), [False]),
    ],
)
async def test_an_enqueue_is_repeated_if_nobody_knows_what_became_of_it(
    error: StoreUnavailable, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.client.verbs.backoff", lambda *_, **__: 0.0)
    store = Refusing(error)
    client = Client(store=store, registry=Registry(), max_payload_bytes=1000, ageing=AGEING)

    with pytest.raises(type(error)):
        await client.enqueue_named(TypeDefaults("resize"), {}, EnqueueOptions())

    assert store.calls == calls
