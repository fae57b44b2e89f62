"""The last that a worker writes, when it gives up its process with everything in it."""

import asyncio
from collections.abc import Sequence
from uuid import UUID

from windlass.model.task import Settlement
from windlass.store.port import Store
from windlass.telemetry import emit

BATCH = 500


async def leave_behind(
    store: Store, worker_id: UUID, settlements: Sequence[Settlement], *, within: float
) -> None:
    """Write these and strike the worker off the list; what cannot be written in time is rescued later."""
    try:
        async with asyncio.timeout(within):
            await store.open()
            for first in range(0, len(settlements), BATCH):
                await store.settle(settlements[first : first + BATCH])
            await store.deregister(worker_id)
    except Exception as error:  # noqa: BLE001 - whatever it is, the process is of no more use
        emit("store.unavailable", doing="leave", error=error)
