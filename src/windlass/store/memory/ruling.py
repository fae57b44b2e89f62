"""Rules of lanes in memory: limits and what they let through, ageing, paused types."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from windlass.model.rule import STRICT, LaneRule, RuleRecord, RuleScope, ValueRecord, ValueRule
from windlass.policy.limit import Bucket
from windlass.store.memory.state import LaneKey, RuleKey
from windlass.store.memory.tables import MemoryTables, transaction


class RuleVerbs(MemoryTables):
    """What code declares for queues and types, and what operators set instead."""

    @transaction
    async def declare_rules(
        self, rules: Sequence[LaneRule], *, types: Sequence[str], values: Sequence[ValueRule] = ()
    ) -> None:
        for name in types:
            self._declared.pop((RuleScope.TYPE, name), None)
        self._declared |= {rule.key: rule for rule in rules}
        self._gates.declare(values, types, self._clock())
        self._has_news = True

    @transaction
    async def set_rule(self, rule: LaneRule) -> None:
        self._set_by_operator[rule.key] = rule
        self._has_news = True

    @transaction
    async def reset_rule(self, scope: RuleScope, name: str) -> bool:
        self._has_news = True
        return self._set_by_operator.pop((scope, name), None) is not None

    @transaction
    async def rules(self) -> list[RuleRecord]:
        in_force = self._declared | self._set_by_operator
        return [
            RuleRecord(
                rule,
                key in self._set_by_operator,
                0 if rule.concurrency is None else self._used(key),
            )
            for key, rule in sorted(in_force.items())
        ]

    @transaction
    async def set_value_rule(self, rule: ValueRule) -> None:
        self._gates.set_rule(rule, self._clock())
        self._has_news = True

    @transaction
    async def reset_value_rule(self, type: str, value: str | None) -> bool:  # noqa: A002 - as everywhere
        self._has_news = True
        return self._gates.reset_rule((type, value), self._clock())

    @transaction
    async def value_rules(self, type: str | None = None) -> list[ValueRecord]:  # noqa: A002
        return [one for one in self._gates.rules() if type in (None, one.rule.type)]

    @transaction
    async def pause_type(self, type: str) -> None:  # noqa: A002 - as everywhere
        self._paused_types.setdefault(type, self._clock())

    @transaction
    async def resume_type(self, type: str) -> bool:  # noqa: A002
        self._has_news = True
        return self._paused_types.pop(type, None) is not None


@dataclass(slots=True)
class Allowance:
    """What the limits that a claim has met let through."""

    at_most: int | None
    rooms: dict[RuleKey, int] = field(default_factory=dict)
    buckets: dict[RuleKey, tuple[LaneRule, Bucket]] = field(default_factory=dict)
    capped: set[RuleKey] = field(default_factory=set)
    spent: set[RuleKey] = field(default_factory=set)  # whose buckets were taken from

    def meet(self, rule: LaneRule, used: int, bucket: Bucket | None) -> int:
        """Return how many more tasks a limit lets through; what it is asked first counts."""
        if rule.key not in self.rooms:
            rooms = [] if rule.concurrency is None else [rule.concurrency - used]
            if bucket is not None:
                rooms.append(bucket.whole)
                self.buckets[rule.key] = rule, bucket
            room = max(0, min(rooms))
            if self.at_most is not None and rule.concurrency is not None:
                # What waits in a worker would be taken from the others, if a limit has little left.
                most = max(self.at_most, room // 4)
                if room > most:
                    room = most
                    self.capped.add(rule.key)
            self.rooms[rule.key] = room
        return self.rooms[rule.key]

    def take(self, rule: LaneRule, number: int) -> None:
        """Count tasks that were taken."""
        self.rooms[rule.key] -= number
        if rule.key in self.buckets and number:
            self.spent.add(rule.key)
            _, bucket = self.buckets[rule.key]
            self.buckets[rule.key] = rule, bucket._replace(tokens=bucket.tokens - number)

    @property
    def is_capped(self) -> bool:
        """Whether more could be granted than can begin at once."""
        return any(self.rooms[key] <= 0 for key in self.capped)

    @property
    def more_in(self) -> float | None:
        """When a rate lets more through."""
        waits = [
            bucket.more_in(rule.rate, rule.burst)
            for rule, bucket in self.buckets.values()
            if rule.rate and rule.burst
        ]
        return min((wait for wait in waits if wait is not None), default=None)


class RuledTables(MemoryTables):
    """What a claim asks of the rules."""

    def _limits(self, lane: LaneKey) -> list[LaneRule]:
        """The limits that tasks of a lane count for."""
        keys = (RuleScope.QUEUE, lane.queue), (RuleScope.TYPE, lane.type)
        return [rule for key in keys if (rule := self._rule(key)) is not None and rule.is_limit]

    def _room(self, lane: LaneKey, allowance: Allowance, now: datetime) -> int | None:
        """How many tasks the limits of a lane let through, if it has any."""
        limits = self._limits(lane)
        rooms = [
            allowance.meet(rule, self._used(rule.key), self._bucket(rule, now)) for rule in limits
        ]
        return min(rooms, default=None)

    def _bucket(self, rule: LaneRule, now: datetime) -> Bucket | None:
        if rule.rate is None or rule.burst is None:
            return None
        moment = now.timestamp()
        known = self._buckets.get(rule.key, Bucket(rule.burst, moment))
        return known.at(moment, rule.rate, rule.burst)

    def _ranked(self, lanes: Collection[LaneKey], ageing: timedelta) -> list[LaneKey]:
        """Lanes with tasks, most urgent first.

        In a queue that is strict none comes before one of a higher priority: each has the rank of the
        last one that has to come before it.
        """
        ranks: dict[LaneKey, datetime] = {}
        for lane in sorted(lanes, key=lambda lane: -lane.priority):
            rule = self._rule((RuleScope.QUEUE, lane.queue))
            step = rule.ageing if rule is not None else None
            own = ageing if step is None or step == STRICT else timedelta(seconds=step)
            head = next(iter(self._ready[lane].values()))
            rank = head.scheduled_for - lane.priority * own
            if step == STRICT:
                above = (o for o in ranks if o.queue == lane.queue and o.priority > lane.priority)
                rank = max([rank, *(ranks[other] for other in above)])
            ranks[lane] = rank
        return sorted(
            lanes,
            key=lambda lane: (ranks[lane], -lane.priority, lane.queue, lane.type, -lane.kind),
        )
