"""The tasks: each live one is in exactly one place."""

from windlass.model.examination import Examination, Finding, Misplaced
from windlass.policy.diagnosis.wording import counted, error, listed, or_ok, warning

_ADVICE = (
    "this should not happen: keep the server's log and a copy of the database, and report it; "
    "then mend it as docs/operating.md shows under 'Tasks in the wrong place'"
)
_MEANING = {
    "nowhere": "live and in no place, so that nobody will run it",
    "several": "in more than one place, so that it may run twice",
    "generation": "waiting under a generation that is not its own, so that its outcome will be refused",
    "no task": "in a place although there is no such task",
    "no lane": "ready in a lane that is not listed, so that nobody will find it",
    "not held": "reported as running and held by no claim",
    "gate": "let through a gate that has another count of those, so that its limit may not hold",
    "ended": "live although it has ended, so that it may run once more",
}


def places(seen: Examination) -> list[Finding]:
    """Whether every live task is ready, scheduled or claimed, and only one of these."""
    check = "places"
    misplaced = [*seen.misplaced.get(), *seen.ended.get()]
    found = [error(check, _said(one), _ADVICE) for one in misplaced]
    return or_ok(check, found, "every live task is in exactly one place")


def _said(one: Misplaced) -> str:
    more = " and others" if one.tasks > len(one.some) else ""
    return f"{_MEANING[one.kind]}: {counted(one.tasks, 'task')} ({', '.join(one.some)}{more})"


def keys(seen: Examination) -> list[Finding]:
    """Whether idempotency keys lead to a task."""
    check, lost = "keys", seen.lost_keys.get()
    found = []
    if lost:
        some = listed(f"type '{one.type}', task {one.task_id}" for one in lost)
        found.append(
            warning(check, f"{counted(len(lost), 'key')} of a task that is gone: {some}", _ADVICE)
        )
    return or_ok(check, found, "every idempotency key leads to a task")
