"""Gates in memory: who was let through, who waits, and which are to be looked at."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count, islice
from typing import NamedTuple
from uuid import UUID

from windlass.model.rule import ValueRecord, ValueRule
from windlass.model.situation import COUNTED, HOLDERS, GateState
from windlass.model.task import NewTask, TaskState
from windlass.policy.limit import Bucket, value_text
from windlass.store.memory.state import GateKey, TaskEntry

ValueKey = tuple[str, str | None]  # type and value; None: each that has no rule of its own
Put = Callable[[TaskEntry, datetime], GateKey | None]


def gates_of(task: NewTask) -> tuple[GateKey, ...]:
    """The gates that a task has to pass, in this order."""
    gates = [] if task.ordering_key is None else [GateKey(None, task.ordering_key)]
    if task.limit_by is not None:
        payload, arguments = json.loads(task.payload), json.loads(task.limit_by)
        values = [payload.get(name, default) for name, default in arguments]
        gates.append(GateKey(task.type, value_text(values)))
    return tuple(gates)


class Call(NamedTuple):
    """A gate to look at from some time on, and who leaves it."""

    due: datetime
    number: int
    key: GateKey
    leaving: UUID | None


@dataclass(slots=True)
class Gate:
    """An ordering key, or a value, that is in use."""

    passed: dict[UUID, None] = field(default_factory=dict)  # and not left; as they came
    leaving: set[UUID] = field(default_factory=set)  # those of them whose call is not answered
    line: dict[UUID, tuple[int, TaskEntry]] = field(default_factory=dict)  # as they came
    bucket: Bucket | None = None


class Gates:
    """All that are in use, their calls, and the rules of values."""

    def __init__(self, is_ready: Callable[[UUID], bool]) -> None:
        self._is_ready = is_ready  # whether a task waits to be claimed
        self.calls: list[Call] = []
        self._gates: dict[GateKey, Gate] = {}
        self._declared: dict[ValueKey, ValueRule] = {}
        self._set_by_operator: dict[ValueKey, ValueRule] = {}
        self._numbers = count()

    def next_for(self, task: TaskEntry, now: datetime) -> GateKey | None:
        """Return the gate that a task has to pass next, unless it waits for its time or is ready."""
        for key in task.gates:
            if not key.is_order and task.scheduled_for > now:
                return None
            if task.asked.id not in self._at(key).passed:
                return key
        return None

    def enter(self, key: GateKey, task: TaskEntry) -> None:
        """Let a task wait behind the others."""
        gate = self._gates.setdefault(key, Gate())
        gate.line[task.asked.id] = next(self._numbers), task

    def step_out(self, task: TaskEntry) -> None:
        """Let a task wait no longer."""
        del self._gates[self._waits_at(task)].line[task.asked.id]

    def call(self, key: GateKey, due: datetime, leaving: UUID | None = None) -> None:
        """Have a gate looked at."""
        self.calls.append(Call(due, next(self._numbers), key, leaving))
        if leaving is not None:
            self._gates[key].leaving.add(leaving)

    def take_calls(self, now: datetime, limit: int | None) -> list[Call]:
        """Take up to so many calls that are due."""
        waiting = sorted(self.calls)
        taken = [call for call in waiting if call.due <= now][:limit]
        self.calls = waiting[len(taken) :]
        return taken

    def recall(self, task: TaskEntry) -> None:
        """Forget that a task was to leave, where it has not."""
        self.calls = [call for call in self.calls if call.leaving != task.asked.id]
        for key in task.gates:
            self._at(key).leaving.discard(task.asked.id)

    def held_by(self, task: TaskEntry) -> list[GateKey]:
        """Where a task was let through and is not about to leave."""
        task_id, gates = task.asked.id, [(key, self._at(key)) for key in task.gates]
        return [
            key for key, gate in gates if task_id in gate.passed and task_id not in gate.leaving
        ]

    def left_by(self, task: TaskEntry) -> list[GateKey]:
        """Where it has to leave, because it has ended, or waits for its time."""
        match task.status:
            case TaskState.SCHEDULED:
                keeps_key = True
            case TaskState.FAILED | TaskState.DEAD:
                keeps_key = task.asked.keeps_key
            case TaskState.COMPLETED | TaskState.CANCELLED:
                keeps_key = False
            case _:
                return []
        return [key for key in self.held_by(task) if not (keeps_key and key.is_order)]

    def hand_over(self, task: TaskEntry, heir: UUID) -> None:
        """Let another task have the key that a dead one has not left."""
        for key in task.gates:
            if key.is_order and task.asked.id in self._at(key).passed:
                self._let_leave(key, task.asked.id)
                self._gates[key].passed[heir] = None

    def open(self, called: Iterable[tuple[GateKey, UUID | None]], put: Put, now: datetime) -> None:
        """Let those leave that do, and through whom there is room for; ordering keys come first."""
        keys = set()
        for key, leaving in called:
            keys.add(key)
            if leaving is not None and leaving in self._at(key).passed:
                self._let_leave(key, leaving)
        orders = {key for key in keys if key.is_order}
        entered = [put(task, now) for task in self._let_through(orders, now)]
        keys.update(key for key in entered if key is not None)
        for task in self._let_through(keys - orders, now):
            # It was due once, whatever the clock was set to.
            put(task, max(now, task.scheduled_for))
        self._drop_idle(keys, now)

    def _let_leave(self, key: GateKey, task_id: UUID) -> None:
        gate = self._gates[key]
        del gate.passed[task_id]
        gate.leaving.discard(task_id)
        if self._rate(key) is None:
            gate.bucket = None

    def _let_through(self, keys: set[GateKey], now: datetime) -> list[TaskEntry]:
        came: list[tuple[int, TaskEntry]] = []
        for key in sorted(keys & self._gates.keys()):
            gate = self._gates[key]
            free = max(0, self._slots(key) - len(gate.passed))
            passed = dict.fromkeys(islice(gate.line, min(free, self._tokens(key, now))))
            gate.passed |= passed
            came += [gate.line.pop(task_id) for task_id in passed]
            self._take_tokens(key, len(passed), free, now)
        return [task for _, task in sorted(came, key=lambda one: one[0])]

    def _take_tokens(self, key: GateKey, number: int, free: int, now: datetime) -> None:
        """Take one for each that was let through; call the gate for when it has more, if it lacks only these."""
        gate, rate = self._gates[key], self._rate(key)
        if rate is None:
            gate.bucket = None if number else gate.bucket
            return
        bucket = self._bucket(key, rate, now)
        is_empty = number == bucket.whole < free
        # What it let through has to be claimed first, and nobody tells of that.
        waits = 1.0 if self._most(key, rate) < 1 else None
        bucket = bucket._replace(tokens=bucket.tokens - number)
        if number or is_empty:
            gate.bucket = bucket
        again = now + timedelta(seconds=waits or bucket.more_in(*rate) or 0.0)
        if is_empty and not any(call.key == key and now < call.due <= again for call in self.calls):
            self.call(key, again)

    def _drop_idle(self, keys: Iterable[GateKey], now: datetime) -> None:
        """Forget gates at which nobody is, but not what their buckets lack."""
        for key in keys:
            gate, rate = self._at(key), self._rate(key)
            if gate.passed or gate.line:
                continue
            lacks = 0.0 if rate is None else rate[1] - self._bucket(key, rate, now).tokens
            if rate is not None and lacks > 0:
                self.call(key, now + timedelta(seconds=lacks / rate[0]))
            else:
                self._gates.pop(key, None)

    def status_of(self, task: TaskEntry, now: datetime) -> TaskState:
        """What one that waits would be if all that was called was looked at now."""
        here = self._waits_at(task)
        if task.asked.id not in islice(self._at(here).line, self._room(here, now)):
            return TaskState.BLOCKED
        if not here.is_order:
            return TaskState.PENDING
        if task.scheduled_for > now:
            return TaskState.SCHEDULED
        rest = [key for key in task.gates if not key.is_order]
        is_full = any(len(self._at(key).line) >= self._room(key, now) for key in rest)
        return TaskState.BLOCKED if is_full else TaskState.PENDING

    def states_of(self, task: TaskEntry, now: datetime) -> list[tuple[GateState, list[UUID]]]:
        """The gate at which a task waits and the next one, with some whom each has let through."""
        is_waiting = task.status is TaskState.BLOCKED
        first = task.gates.index(self._waits_at(task)) if is_waiting else 0
        return [
            (self._state_of(key, task, now), self._holders(key))
            for key in task.gates[first:]
            # What waits for its time has passed its ordering key, and leaves its value.
            if is_waiting or not key.is_order
        ]

    def _state_of(self, key: GateKey, task: TaskEntry, now: datetime) -> GateState:
        gate, rate, slots = self._at(key), self._rate(key), self._slots(key)
        line = list(gate.line)
        return GateState(
            type=key.type,
            name=key.value,
            slots=None if slots == sys.maxsize else slots,
            used=len(gate.passed) - len(gate.leaving),
            # Where it has not come yet it would be the last.
            first=min(
                COUNTED + 1, line.index(task.asked.id) if task.asked.id in line else len(line)
            ),
            rate=None if rate is None else rate[0],
            tokens=None if rate is None else self._bucket(key, rate, now).tokens,
        )

    def _holders(self, key: GateKey) -> list[UUID]:
        gate = self._at(key)
        return list(islice((one for one in gate.passed if one not in gate.leaving), HOLDERS))

    def looked_at(self, now: datetime) -> Iterator[TaskEntry]:
        """Those that wait where somebody is to look, and for nothing else: in line for a key, not for their time."""
        for key in {call.key for call in self.calls}:
            for _, task in self._at(key).line.values():
                if not key.is_order or task.scheduled_for <= now:
                    yield task

    def _room(self, key: GateKey, now: datetime) -> int:
        """How many of those that wait it would let through."""
        gate = self._at(key)
        room = self._slots(key) - len(gate.passed) + len(gate.leaving)
        return max(0, min(room, self._tokens(key, now)))

    def _at(self, key: GateKey) -> Gate:
        return self._gates.get(key) or Gate()

    def _waits_at(self, task: TaskEntry) -> GateKey:
        return next(key for key in task.gates if task.asked.id in self._at(key).line)

    def _slots(self, key: GateKey) -> int:
        if key.is_order:
            return 1
        rule = self._rule(key)
        return sys.maxsize if rule is None else rule.slots

    def _rate(self, key: GateKey) -> tuple[float, float] | None:
        """Its rate and burst, if it has one."""
        rule = self._rule(key)
        if rule is None or rule.rate is None or rule.burst is None:
            return None
        return rule.rate, rule.burst

    def _tokens(self, key: GateKey, now: datetime) -> int:
        rate = self._rate(key)
        return sys.maxsize if rate is None else self._bucket(key, rate, now).whole

    def _bucket(self, key: GateKey, rate: tuple[float, float], now: datetime) -> Bucket:
        moment = now.timestamp()
        bucket = (self._at(key).bucket or Bucket(rate[1], moment)).at(moment, *rate)
        return bucket._replace(tokens=min(bucket.tokens, self._most(key, rate)))

    def _most(self, key: GateKey, rate: tuple[float, float]) -> float:
        """What its bucket can hold: what nobody has claimed yet could begin at once, too."""
        return rate[1] - sum(map(self._is_ready, self._at(key).passed))

    def declare(self, rules: Iterable[ValueRule], types: Iterable[str], now: datetime) -> None:
        """Note what code says of these types."""
        said: dict[str, ValueRule | None] = dict.fromkeys(types) | {one.type: one for one in rules}
        for name, rule in said.items():
            if self._declared.get((name, None)) == rule:
                continue
            if rule is None:
                del self._declared[name, None]
            else:
                self._declared[name, None] = rule
            self._call_type(name, now)

    def set_rule(self, rule: ValueRule, now: datetime) -> None:
        """Let this stand instead."""
        self._set_by_operator[rule.type, rule.value] = rule
        self._call_type(rule.type, now)

    def reset_rule(self, key: ValueKey, now: datetime) -> bool:
        """Take that back."""
        if self._set_by_operator.pop(key, None) is None:
            return False
        self._call_type(key[0], now)
        return True

    def rules(self) -> list[ValueRecord]:
        """Those in force, by type and value."""
        in_force = self._declared | self._set_by_operator
        keys = sorted(in_force, key=lambda key: (key[0], key[1] is not None, key[1] or ""))
        return [ValueRecord(in_force[key], key in self._set_by_operator) for key in keys]

    def _rule(self, key: GateKey) -> ValueRule | None:
        if key.type is None:
            return None
        each = key.type, None
        own = self._set_by_operator.get((key.type, key.value))
        return own or self._set_by_operator.get(each) or self._declared.get(each)

    def _call_type(self, name: str, now: datetime) -> None:
        for key in [key for key in self._gates if key.type == name]:
            self.call(key, now)
