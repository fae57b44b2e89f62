"""For users' own test suites: an application in memory, and the conformance suite of stores.

The suite needs pytest and pytest-asyncio, which are loaded only when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from windlass.testing.kit import Clock, app_in_memory, assert_enqueued, drain, enqueued

if TYPE_CHECKING:
    from windlass.testing.store_contract import StoreContract

__all__ = [
    "Clock",
    "StoreContract",
    "app_in_memory",
    "assert_enqueued",
    "drain",
    "enqueued",
]


def __getattr__(name: str) -> Any:
    if name == "StoreContract":
        from windlass.testing.store_contract import StoreContract  # noqa: PLC0415 - needs pytest

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
