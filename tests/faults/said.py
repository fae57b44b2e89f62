"""What the log says, for tests that wait for it."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

DEADLINE = 30.0  # seconds until a test gives up


class Said(logging.Handler):
    """Hears the events of Windlass; for the event loop that it was made in."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator["Said"]:
        log, said = logging.getLogger("windlass"), cls()
        level = log.level
        log.addHandler(said)
        log.setLevel(logging.INFO)
        try:
            yield said
        finally:
            log.removeHandler(said)
            log.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._loop.call_soon_threadsafe(self._news.set)

    def events(self, prefix: str = "") -> list[str]:
        """The names of the events so far that begin so."""
        names = [line.partition(" ")[0] for line in self.lines]
        return [name for name in names if name.startswith(prefix)]

    async def until(self, event: str, times: int = 1) -> None:
        """Wait until an event was said so many times."""
        async with asyncio.timeout(DEADLINE):
            while self.events().count(event) < times:
                self._news.clear()
                await self._news.wait()
