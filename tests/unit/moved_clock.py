"""A monotonic clock that moves only when it is told to."""

import time


class MovedClock:
    """Stands in for the `time` module of the file under test."""

    def __init__(self) -> None:
        self.now = time.monotonic()  # which files beside the one under test still ask

    def monotonic(self) -> float:
        return self.now
