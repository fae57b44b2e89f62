"""Histories written by hand: each step a second later and with the next number."""

from typing import Any, Literal

from windlass.testing.history_check import Call, History, Pause, Run
from windlass.testing.history_check.events import (
    Born,
    Changed,
    Claimed,
    Ended,
    Event,
    Extended,
    Forgotten,
    Led,
    Placed,
    Returned,
    Vanished,
)

LEASE = 5.0
REST: dict[str, Literal["history", "dead"]] = {
    "completed": "history",
    "cancelled": "history",
    "failed": "dead",
    "dead": "dead",
}


class Story:
    """A task `a` unless another is named; its claims are named by their tokens."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self.runs: list[Run] = []
        self.pauses: list[Pause] = []
        self.places: dict[str, frozenset[str]] = {}
        self.now = 0.0

    def history(self) -> History:
        return History(
            events=self.events,
            calls=self.calls,
            pauses=self.pauses,
            runs=self.runs,
            places=self.places,
        )

    def wait(self, seconds: float) -> "Story":
        self.now += seconds
        return self

    def _when(self) -> dict[str, Any]:
        self.now += 1
        return {"n": len(self.events), "at": self.now, "began": self.now}

    def _add(self, event: Event) -> "Story":
        self.events.append(event)
        return self

    def asked(self, outcome: Literal["ok", "fail", "unknown"] = "ok", **values: Any) -> "Story":
        asked = {"intent": "i", "type": "resize", "task": "a"} | values
        self.calls.append(Call(outcome=outcome, **asked))
        return self

    def born(self, task: str = "a", *, due: float = 0.0, **values: Any) -> "Story":
        self.places[task] = frozenset({"task"})
        rest: dict[str, Any] = {
            "type": "resize",
            "queue": "q",
            "max_attempts": 2,
            "intent": "i",
        } | values
        return self._add(Born(**self._when(), task=task, due=due, **rest))

    def changed(self, task: str = "a", *, due: float, **values: Any) -> "Story":
        rest: dict[str, Any] = {"queue": "q", "generation": 1, "attempts": 0} | values
        return self._add(Changed(**self._when(), task=task, due=due, **rest))

    def placed(
        self,
        place: Literal["ready", "scheduled"] = "ready",
        generation: int = 1,
        *,
        task: str = "a",
        is_there: bool = True,
    ) -> "Story":
        where = {"place": place, "is_there": is_there, "generation": generation}
        return self._add(Placed(**self._when(), task=task, **where))  # type: ignore[arg-type]

    def claimed(
        self, token: str, generation: int = 1, *, task: str = "a", worker: str = "w", **values: Any
    ) -> "Story":
        when = self._when()
        granted = values.pop("granted_at", self.now)
        values.setdefault("expires_at", granted + LEASE)
        values.setdefault("fence", len(self.events))
        return self._add(
            Claimed(
                **when,
                task=task,
                token=token,
                generation=generation,
                worker=worker,
                granted_at=granted,
                **values,
            )
        )

    def extended(self, token: str) -> "Story":
        when = self._when()
        return self._add(Extended(**when, token=token, expires_at=self.now + LEASE))

    def ran(self, fence: int, *, attempt: int = 1, worker: str = "w") -> "Story":
        run = Run(task="a", attempt=attempt, fence=fence, worker=worker, pid=1, began=self.now)
        self.runs.append(run)
        return self

    def returned(self, token: str | None, generation: int = 2, **values: Any) -> "Story":
        rest = {
            "attempts": 0,
            "due": 0.0,
            "is_attempt_noted": False,
            "was_running": False,
            "term": 1 if token is None else None,
        } | values
        return self._add(
            Returned(**self._when(), task="a", token=token, generation=generation, **rest)
        )

    def ended(
        self, token: str | None, state: str = "completed", generation: int = 1, **values: Any
    ) -> "Story":
        place = values.setdefault("place", REST[state])
        self.places["a"] = frozenset({place})
        rest = {
            "attempts": 1,
            "max_attempts": 2,
            "worker": "w" if token else None,
            "was_live": True,
        } | values
        return self._add(
            Ended(**self._when(), task="a", token=token, state=state, generation=generation, **rest)
        )

    def vanished(self) -> "Story":
        self.places.pop("a")
        return self._add(Vanished(**self._when(), task="a"))

    def forgotten(self) -> "Story":
        self.places.pop("a")
        return self._add(Forgotten(**self._when(), task="a"))

    def led(self, term: int, holder: str = "w", *, seconds: float = 15.0) -> "Story":
        when = self._when()
        return self._add(Led(**when, term=term, holder=holder, expires_at=self.now + seconds))
