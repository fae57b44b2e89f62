"""For users' own test suites: the conformance suite that every store passes.

Needs pytest and pytest-asyncio, which are loaded only when the suite is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.testing.store_contract import StoreContract

__all__ = ["StoreContract"]


def __getattr__(name: str) -> Any:
    if name == "StoreContract":
        from windlass.testing.store_contract import StoreContract  # noqa: PLC0415 - needs pytest

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
