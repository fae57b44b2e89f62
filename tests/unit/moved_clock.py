"""A monotonic clock that moves only when it is told to."""


class MovedClock:
    """Stands in for the `time` module of the file under test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
