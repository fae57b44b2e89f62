"""What applications ask of workers: to pause, to go on, to drain."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar
from uuid import UUID

from windlass.model.errors import WorkerNotFound
from windlass.model.limits import shown
from windlass.model.task import WorkerOrder, WorkerRecord
from windlass.store.port import OperateStore, ReadStore

T = TypeVar("T")
Records = list[WorkerRecord]
WorkerId = str | UUID


class FleetStore(OperateStore, ReadStore, Protocol):
    """What workers are seen in, and ordered by."""


class FleetClient:
    """The verbs on workers, on a store that is open."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store

    async def list(self) -> Records:
        """Return the registered workers."""
        return await self._store.workers()

    async def order(self, worker_id: WorkerId, order: WorkerOrder) -> None:
        """Ask a worker to do something, or raise `WorkerNotFound`."""
        if not await self._store.order_workers([_checked_id(worker_id)], order):
            raise _unknown(worker_id)

    async def drain_all(self, host: str | None) -> Records:
        """Ask all workers, or those of a host, to finish and end; return those that were asked."""
        chosen = [one for one in await self.list() if host in (None, one.host)]
        known = await self._store.order_workers([UUID(one.id) for one in chosen], WorkerOrder.DRAIN)
        return [one for one in chosen if UUID(one.id) in known]


class FleetHolder(Protocol):
    """Whoever has the verbs on workers."""

    @property
    def fleet(self) -> FleetClient:
        """The verbs."""


class FleetAccess(Protocol):
    """How workers are reached, whatever event loop they are asked for from."""

    def using(self) -> AbstractAsyncContextManager[FleetHolder]:
        """Yield the client of the running event loop, which stays open while the block lasts."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


class Workers:
    """The workers of an application's database: `app.workers`."""

    def __init__(self, access: FleetAccess) -> None:
        self._access = access

    async def list(self) -> Records:
        """Return the registered workers, oldest first."""
        async with self._access.using() as client:
            return await client.fleet.list()

    async def pause(self, worker_id: WorkerId) -> None:
        """Let a worker claim nothing more; it finishes what it has, and stays."""
        await self._order(worker_id, WorkerOrder.PAUSE)

    async def resume(self, worker_id: WorkerId) -> None:
        """Let a worker that was paused go on."""
        await self._order(worker_id, WorkerOrder.RESUME)

    async def drain(self, worker_id: WorkerId) -> None:
        """Let a worker finish what it has and end, as after SIGTERM. It cannot be taken back."""
        await self._order(worker_id, WorkerOrder.DRAIN)

    async def drain_all(self, *, host: str | None = None) -> Records:
        """Let all workers end that are registered now, or those of a host; return them."""
        async with self._access.using() as client:
            return await client.fleet.drain_all(host)

    async def _order(self, worker_id: WorkerId, order: WorkerOrder) -> None:
        async with self._access.using() as client:
            await client.fleet.order(worker_id, order)

    def list_sync(self) -> Records:
        """`list` for synchronous code."""
        return self._access.run_sync("workers.list", self.list)

    def pause_sync(self, worker_id: WorkerId) -> None:
        """`pause` for synchronous code."""
        self._access.run_sync("workers.pause", lambda: self.pause(worker_id))

    def resume_sync(self, worker_id: WorkerId) -> None:
        """`resume` for synchronous code."""
        self._access.run_sync("workers.resume", lambda: self.resume(worker_id))

    def drain_sync(self, worker_id: WorkerId) -> None:
        """`drain` for synchronous code."""
        self._access.run_sync("workers.drain", lambda: self.drain(worker_id))

    def drain_all_sync(self, *, host: str | None = None) -> Records:
        """`drain_all` for synchronous code."""
        return self._access.run_sync("workers.drain_all", lambda: self.drain_all(host=host))


def _checked_id(worker_id: Any) -> UUID:
    try:
        return worker_id if isinstance(worker_id, UUID) else UUID(worker_id)
    except (ValueError, AttributeError, TypeError):
        raise WorkerNotFound(
            f"{shown(worker_id)} is not the id of a worker; ids are UUIDs: windlass workers list"
        ) from None


def _unknown(worker_id: WorkerId) -> WorkerNotFound:
    return WorkerNotFound(
        f"worker {worker_id} is not registered: it never was, or it has ended; "
        "those that are: windlass workers list"
    )
