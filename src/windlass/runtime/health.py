"""Whether a worker lives, and whether it is ready to work: real looks, made when they are asked for."""

import asyncio
import concurrent.futures
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from windlass.model.errors import WindlassError
from windlass.runtime.monitor import Page, Pages

ANSWER_WITHIN = 5.0  # seconds for all checks together
FINE = "ok"

Check = Callable[[], str]  # what is wrong, or nothing
SlowCheck = Callable[[], Awaitable[None]]  # raises what is wrong


def starting() -> Pages:
    """Pages of a worker that is not there yet: it waits for its database, or migrates it."""
    return {
        "/livez": lambda: _page({}),
        "/readyz": lambda: _page({"worker": "starting"}),
        "/metrics": lambda: Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"starting\n"),
    }


class Health:
    """The checks of one worker. Made in its event loop, asked from other threads."""

    def __init__(
        self,
        *,
        alive: Mapping[str, Check],
        present: Mapping[str, Check],  # if one of these fails, no other is looked at
        working: Mapping[str, Check],
        store: SlowCheck,
    ) -> None:
        self._alive = alive
        self._present = present
        self._working = working
        self._store = store
        self._loop = asyncio.get_running_loop()
        # One for all who ask meanwhile: however many they are, they take one connection.
        self._looking: asyncio.Future[None] | None = None

    def livez(self) -> Page:
        """Whether there is any use in letting it go on."""
        return _page(_looked(self._alive))

    def readyz(self) -> Page:
        """Whether it takes and runs tasks."""
        told = _looked(self._present)
        if all(said == FINE for said in told.values()):
            told |= _looked(self._working)
            told["store"] = self._ask_store()
            told |= _looked(self._present)  # again: it may have been asked to stop meanwhile
        return _page(told)

    def _ask_store(self) -> str:
        asking = asyncio.run_coroutine_threadsafe(self._store_says(), self._loop)
        try:
            return asking.result(ANSWER_WITHIN + 1)
        except (concurrent.futures.CancelledError, TimeoutError):
            asking.cancel()
            return f"the event loop has not turned for {ANSWER_WITHIN + 1:g} s"

    async def _store_says(self) -> str:
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._store())
            self._looking.add_done_callback(_hear_of)
        looking = self._looking
        done, _ = await asyncio.wait({looking}, timeout=ANSWER_WITHIN)
        if self._looking is looking:
            self._looking = None
        if not done:
            # To let go of its connection takes it longer than whoever asks may wait.
            looking.cancel()
        if not done or looking.cancelled():
            return f"the store gave no answer within {ANSWER_WITHIN:g} s"
        try:
            looking.result()
        except WindlassError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whoever asks is to hear of it
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return FINE


def _hear_of(looking: asyncio.Future[None]) -> None:
    """Let nothing be logged of a look that nobody waits for any more."""
    if not looking.cancelled():
        looking.exception()


def _looked(checks: Mapping[str, Check]) -> dict[str, str]:
    return {name: check() or FINE for name, check in checks.items()}


def _page(told: Mapping[str, str]) -> Page:
    is_fine = all(said == FINE for said in told.values())
    status = HTTPStatus.OK if is_fine else HTTPStatus.SERVICE_UNAVAILABLE
    body = {"status": FINE if is_fine else "failing", "checks": told}
    return Page(status, "application/json", json.dumps(body).encode() + b"\n")
