"""The in-memory store: the executable specification."""

from windlass.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
