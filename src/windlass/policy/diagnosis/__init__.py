"""From what was seen of a database to what is to be done about it: thresholds and texts."""

from collections.abc import Callable, Iterator

from windlass.model.examination import Examination, Finding, Level, NotMeasured
from windlass.policy.diagnosis import fleet, schema, server, storage, tasks

Check = Callable[[Examination], list[Finding]]

CHECKS: dict[str, Check] = {
    "version": server.version,
    "pooler": server.pooler,
    "isolation": server.isolation,
    "durability": server.durability,
    "limits": server.limits,
    "clock": server.clock,
    "migrations": schema.migrations,
    "rights": schema.rights,
    "partitions": schema.partitions,
    "workers": fleet.workers,
    "leader": fleet.leader,
    "claims": fleet.claims,
    "types": fleet.types,
    "queues": fleet.queues,
    "due": fleet.due,
    "places": tasks.places,
    "keys": tasks.keys,
    "bloat": storage.bloat,
    "transactions": storage.transactions,
    "locks": storage.locks,
    "replication": storage.replication,
}


def diagnose(seen: Examination) -> list[Finding]:
    """Return at least one finding of each check, in their order."""
    found = server.connection(seen)
    if seen.access.is_connected:
        for name, check in CHECKS.items():
            found += _checked(name, check, seen)
    return found


def _checked(name: str, check: Check, seen: Examination) -> Iterator[Finding]:
    try:
        yield from check(seen)
    except NotMeasured as reason:
        yield Finding(name, Level.UNKNOWN, f"not checked: {reason}")
