"""A new process in place of this one: the same command, number and environment, and nothing else of it."""

import logging
import os
import sys
import threading
from typing import Never

FLUSH_WITHIN = 1.0  # seconds: a thread that is lost may hold what is to be flushed


def replace_process() -> Never:
    """Begin anew. No thread and no connection of this process goes on. From any thread."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_WITHIN)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - it is our own command


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
