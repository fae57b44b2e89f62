"""Rules for the lanes of a queue or a type: how many tasks at once, how many in a time, how they age."""

from dataclasses import dataclass
from enum import StrEnum

STRICT = float("inf")  # as ageing: no task is ever preferred to one of a higher priority


class RuleScope(StrEnum):
    """Whose lanes a rule is for; the values are what users and the database see."""

    QUEUE = "queue"
    TYPE = "type"


@dataclass(frozen=True, slots=True)
class LaneRule:
    """What holds for all tasks of a queue or a type together, across all workers."""

    scope: RuleScope
    name: str
    concurrency: int | None = None  # how many may be claimed at once
    rate: float | None = None  # how many may be claimed in a second
    burst: float | None = None  # how many of these at once, after a quiet time
    ageing: float | None = None  # seconds for each point of priority; None: as the worker says
    weight: int | None = None  # share among the queues of a worker

    @property
    def key(self) -> tuple[RuleScope, str]:
        """Whose rule it is."""
        return self.scope, self.name

    @property
    def is_limit(self) -> bool:
        """Whether a claim has to ask before it takes tasks."""
        return self.concurrency is not None or self.rate is not None


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """A rule that is in force, as people see it."""

    rule: LaneRule
    by_operator: bool  # and not as code declares it
    used: int = 0  # how much of its concurrency


FAIR_WINDOW = (
    100  # tasks of one value that are let through ahead of the others, for each point of weight
)


@dataclass(frozen=True, slots=True)
class ValueRule:
    """What holds for the tasks of a type that have one value of the arguments its limit is by."""

    type: str
    value: str | None = None  # None: for each value that has no rule of its own
    concurrency: int | None = None  # how many may be let through at once
    rate: float | None = None  # in a second
    burst: float | None = None
    weight: int | None = None  # how many more than others, where `concurrency` says nothing

    @property
    def slots(self) -> int:
        """How many tasks may be let through at once."""
        return FAIR_WINDOW * (self.weight or 1) if self.concurrency is None else self.concurrency


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """Such a rule that is in force, as people see it."""

    rule: ValueRule
    by_operator: bool
