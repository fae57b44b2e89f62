"""Lines that handlers log in their processes, written to the log of the worker."""

import logging
import os
from collections.abc import Callable

from windlass.failures.describe import LONGEST_TRACEBACK, clean
from windlass.runtime.processes.messages import Logged

LONGEST_LINE = 100_000  # characters
_PLAIN = (str, int, float, bool, type(None))
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def levels() -> dict[str, int]:
    """The levels that were set in this process, by the name of the logger."""
    known = {
        name: logger.level
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {"": logging.root.level, **known}


class Forwarder(logging.Handler):
    """Sends what is logged to the worker, as text."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send_line = send
        self._formatter = logging.Formatter()

    def install(self, wanted: dict[str, int]) -> None:
        """Take what any logger says from here on, at the levels of the worker.

        Before anything else does, so that `basicConfig` of a handler's module adds nothing.
        """
        logging.root.addHandler(self)
        for name, level in wanted.items():
            logging.getLogger(name or None).setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        try:
            self._send_line(self._line(record))
        except Exception:  # noqa: BLE001 - a line that cannot be made is told, as other handlers do
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> Logged:
        traceback = record.exc_text
        if record.exc_info and not traceback:
            traceback = self._formatter.formatException(record.exc_info)
        return Logged(
            name=clean(record.name, LONGEST_LINE),
            level=record.levelno,
            text=clean(record.getMessage(), LONGEST_LINE),
            created=record.created,
            path=clean(record.pathname, LONGEST_LINE),
            line=record.lineno,
            function=record.funcName,
            process=os.getpid(),
            thread=clean(str(record.threadName), LONGEST_LINE),
            traceback=clean(traceback, LONGEST_TRACEBACK) if traceback else None,
            extra={
                clean(str(name), LONGEST_LINE): _plain(value)
                for name, value in vars(record).items()
                if name not in _OF_EVERY_RECORD and isinstance(value, _PLAIN)
            },
        )


def _plain(value: str | float | bool | None) -> str | int | float | bool | None:
    if isinstance(value, str) or (isinstance(value, int) and abs(value) >> 63):
        return clean(str(value), LONGEST_LINE)
    return value


def relog(line: Logged) -> None:
    """Log a line of a process here, as if it had been logged in this one."""
    logger = logging.getLogger(line.name)
    if not logger.isEnabledFor(line.level):
        return
    record = logger.makeRecord(
        line.name, line.level, line.path, line.line, line.text, (), None, line.function
    )
    record.created = line.created
    record.msecs = int(line.created % 1 * 1000) + 0.0
    record.process, record.processName = line.process, "windlass-process"
    record.threadName = line.thread
    record.exc_text = line.traceback
    for name, value in line.extra.items():
        setattr(record, name, value)
    logger.handle(record)
