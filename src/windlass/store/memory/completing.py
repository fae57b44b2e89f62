"""Complete in memory: there are no transactions to take part in."""

from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, Never

from windlass.model.errors import ConfigurationError
from windlass.model.task import Completion, Fence
from windlass.store.memory.tables import MemoryTables
from windlass.store.port import Guest


class CompleteVerbs(MemoryTables):
    """What a handler would need that ends its task in a transaction of its own."""

    async def check_completion(self, fence: Fence) -> Never:
        raise ConfigurationError(
            f"task {fence.task_id}: a store in memory has no transactions; ctx.transaction() and "
            "ctx.complete() need PostgreSQL"
        )

    def completing(
        self, completion: Completion, *, idle: timedelta
    ) -> AbstractAsyncContextManager[Any]:
        raise AssertionError(f"not let begin: {completion}, {idle}")

    async def complete_within(self, guest: Guest, completion: Completion) -> Never:
        raise AssertionError(f"not let begin: {guest}, {completion}")
