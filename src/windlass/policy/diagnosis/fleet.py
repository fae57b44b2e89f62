"""The workers: who lives and leads, what they serve, and what waits for them."""

from collections.abc import Iterable, Sequence

from windlass.model.examination import (
    Defaults,
    Examination,
    Finding,
    RegisteredWorker,
    Waiting,
)
from windlass.policy.diagnosis.wording import counted, lasting, listed, note, or_ok, warning

REMOVED_AFTER = 3  # leases without a sign of life
LEADER_WITHIN = 60.0  # seconds in which somebody has taken a seat that is free
CLOCK_STEP = (
    3.0  # seconds; a sign of life that lies further ahead was given before the clock was set
)
SEAT_AHEAD = 120.0  # seconds, beyond any usual term


def workers(seen: Examination) -> list[Finding]:
    """Whether anybody works, and nobody lies dead in the registry."""
    check, registered = "workers", seen.workers.get()
    living = [worker for worker in registered if worker.is_alive]
    silent = [worker for worker in registered if not worker.is_alive]
    lost = [one for one in silent if one.silent_for > (REMOVED_AFTER + 1) * one.lease]
    ahead = [worker for worker in registered if worker.silent_for < -CLOCK_STEP]
    versions = {worker.version for worker in living}
    waiting = sum(one.tasks for one in seen.waiting.get() if not one.is_paused)
    found = []
    if waiting and not living:
        found.append(
            warning(
                check,
                f"no worker lives, and {counted(waiting, 'task')} could run",
                "start one: windlass worker APP",
            )
        )
    if lost:
        found.append(
            warning(
                check,
                f"{listed(map(_silent, lost))}, and still registered",
                "a leader removes them after three leases: see that a worker runs and one leads",
            )
        )
    elif silent:
        found.append(
            note(
                check,
                listed(map(_silent, silent)),
                "its tasks come back when their lease has run out; if its process still runs, it is "
                "stopped, or cut off from the database: see its log",
            )
        )
    if ahead:
        found.append(
            warning(
                check,
                f"the last sign of life of {listed(ahead)} lies ahead: the server's clock was set back",
                "let the clock be slewed and not stepped; what is lost is taken over within two leases",
            )
        )
    if len(versions) > 1:
        found.append(
            note(
                check,
                f"workers of versions {listed(sorted(versions))} run side by side",
                "finish the deployment",
            )
        )
    who = (
        f"{counted(len(living), 'worker')}: {listed(living)}"
        if living
        else "none, and none is needed"
    )
    return or_ok(check, found, who)


def _silent(worker: RegisteredWorker) -> str:
    return f"worker {worker} has been silent for {lasting(worker.silent_for)}"


def leader(seen: Examination) -> list[Finding]:
    """Whether somebody does what only one may do."""
    check, seat = "leader", seen.seat.get()
    registered = seen.workers.get()
    settled = [one for one in registered if one.is_alive and one.up_for > LEADER_WITHIN]
    is_free = seat.expires_in is None or seat.expires_in < 0
    found = []
    if is_free and settled:
        # A seat that was given up may be taken in the next moment; one that ran out was not.
        is_long = seat.expires_in is not None and seat.expires_in < -LEADER_WITHIN
        say = warning if is_long else note
        since = f" for {lasting(-seat.expires_in)}" if is_long and seat.expires_in else ""
        found.append(
            say(
                check,
                f"nobody leads{since}, although {counted(len(settled), 'worker')} could",
                "if it stays so look at the logs of the workers, and restart one: lost tasks are not "
                "rescued and old ones not removed",
            )
        )
    if seat.expires_in is not None and seat.expires_in > SEAT_AHEAD:
        holder = next((one for one in registered if one.id == seat.holder), None)
        if holder is None or not holder.is_alive or holder.silent_for < -CLOCK_STEP:
            found.append(
                warning(
                    check,
                    f"the seat is taken for {lasting(seat.expires_in)} by a worker that is not there",
                    "the clock was set back: a worker takes the seat once the clock was steady for a lease",
                )
            )
    names = {worker.id: str(worker) for worker in registered}
    led = "nobody has to" if is_free else f"{names.get(seat.holder or '', seat.holder)} leads"
    return or_ok(check, found, f"{led}, term {seat.term}")


def claims(seen: Examination) -> list[Finding]:
    """Whether what lost workers held was taken back."""
    check, overdue = "claims", seen.claims.get()
    found = []
    if overdue:
        tasks = sum(one.tasks for one in overdue)
        of = listed(
            f"{one.worker_id} at {one.host}:{one.pid}"
            if one.host
            else f"{one.worker_id}, which is gone"
            for one in overdue
        )
        found.append(
            warning(
                check,
                f"{counted(sum(one.claims for one in overdue), 'claim')} on {counted(tasks, 'task')} "
                f"expired up to {lasting(overdue[0].overdue)} ago and nobody has rescued them: of worker {of}",
                "see that a worker runs and one leads, and that no transaction holds these tasks (the "
                "findings on leader, transactions and locks)",
            )
        )
    return or_ok(check, found, "none is past its expiry by more than a lease")


def types(seen: Examination) -> list[Finding]:
    """Whether workers agree on their types, and on what they registered for them."""
    check, registered = "types", seen.types.get()
    living = [worker for worker in seen.workers.get() if worker.is_alive]
    found = [
        warning(
            check,
            f"type '{name}' differs between workers: {differences}{_what_counts(registered.get(name))}",
            "run the same code everywhere; what was registered last counts for whoever enqueues by name",
        )
        for name, differences in _differing(living)
    ]
    found += _unequal_sets(check, living)
    waiting = [
        one
        for one in seen.waiting.get()
        if living and not any(one.type in worker.types for worker in living)
    ]
    if waiting:
        found.append(
            warning(
                check,
                f"no worker handles {listed(map(_waiting_type, waiting))}",
                "start a worker that defines the type, correct the name, or cancel them: "
                "windlass tasks cancel --type TYPE",
            )
        )
    return or_ok(
        check, found, f"{counted(len(registered), 'type')} registered, the same by all workers"
    )


def _waiting_type(one: Waiting) -> str:
    return f"'{one.type}' ({counted(one.tasks, 'task')}, the first for {lasting(one.waited)})"


def _differing(living: Sequence[RegisteredWorker]) -> Iterable[tuple[str, str]]:
    """Types for which workers have registered different things, with what each said."""
    names = sorted({name for worker in living for name in worker.defaults or ()})
    for name in names:
        said: dict[Defaults, list[RegisteredWorker]] = {}
        for worker in living:
            if worker.defaults is not None and name in worker.defaults:
                said.setdefault(worker.defaults[name], []).append(worker)
        if len(said) > 1:
            fields = _unequal_fields(list(said))
            yield (
                name,
                "; ".join(
                    f"{', '.join(f'{field} {_value(defaults, field)}' for field in fields)} "
                    f"by {listed(by)}"
                    for defaults, by in said.items()
                ),
            )


_FIELDS = ("queue", "priority", "max_attempts", "retention")


def _unequal_fields(said: Sequence[Defaults]) -> list[str]:
    return [field for field in _FIELDS if len({getattr(one, field) for one in said}) > 1]


def _value(defaults: Defaults, field: str) -> str:
    value = getattr(defaults, field)
    if field == "retention":
        return "as the setting" if value is None else lasting(value)
    return f"'{value}'" if isinstance(value, str) else str(value)


def _what_counts(defaults: Defaults | None) -> str:
    if defaults is None:
        return ""
    return (
        f"; what counts is {', '.join(f'{field} {_value(defaults, field)}' for field in _FIELDS)}"
    )


def _unequal_sets(check: str, living: Sequence[RegisteredWorker]) -> list[Finding]:
    sets: dict[frozenset[str], list[RegisteredWorker]] = {}
    for worker in living:
        sets.setdefault(frozenset(worker.types), []).append(worker)
    if len(sets) < 2:
        return []
    common = frozenset.intersection(*sets)
    said = "; ".join(
        f"{listed(by)} also {listed(sorted(names - common)) or 'nothing'}"
        for names, by in sets.items()
    )
    return [
        note(
            check,
            f"workers define different types: {said}",
            "fine if they are different applications; else finish the deployment",
        )
    ]


def queues(seen: Examination) -> list[Finding]:
    """Whether somebody serves every queue in which tasks wait."""
    check, waiting = "queues", seen.waiting.get()
    living = [worker for worker in seen.workers.get() if worker.is_alive]
    paused = _by_queue(one for one in waiting if one.is_paused)
    unserved = _by_queue(one for one in waiting if not one.is_paused and _is_unserved(one, living))
    found = []
    if paused:
        found.append(
            note(
                check,
                f"{listed(paused)} in a paused queue",
                "windlass queues resume NAME, when they are to run",
            )
        )
    if unserved:
        found.append(
            warning(
                check,
                f"no worker that handles them serves {listed(unserved)}",
                "start a worker with --queue NAME, or without --queue for all",
            )
        )
    total = sum(one.tasks for one in waiting)
    return or_ok(check, found, f"{counted(total, 'task')} could run")


def _is_unserved(waiting: Waiting, living: Sequence[RegisteredWorker]) -> bool:
    """Whether somebody handles its type, but not in its queue."""
    handling = [worker for worker in living if waiting.type in worker.types]
    return bool(handling) and not any(worker.serves(waiting.queue) for worker in handling)


def _by_queue(waiting: Iterable[Waiting]) -> list[str]:
    tasks: dict[str, int] = {}
    for one in waiting:
        tasks[one.queue] = tasks.get(one.queue, 0) + one.tasks
    return [f"{counted(number, 'task')} of '{queue}'" for queue, number in tasks.items()]


def due(seen: Examination) -> list[Finding]:
    """Whether scheduled tasks are made ready in time."""
    check, late = "due", seen.due.get()
    found = []
    if late.tasks:
        found.append(
            warning(
                check,
                f"{counted(late.tasks, 'scheduled task')} should be ready, the first for {lasting(late.overdue)}",
                "see that a worker runs and reaches the database (the findings on workers and leader)",
            )
        )
    return or_ok(check, found, "no scheduled task is late")
