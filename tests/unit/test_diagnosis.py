"""What the doctor makes of what it sees: from where on it speaks up, and what it says then."""

from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest

from windlass.model.examination import (
    Access,
    ClockOffset,
    Defaults,
    Due,
    Examination,
    Finding,
    Index,
    Known,
    Level,
    LostKey,
    Misplaced,
    OpenTransaction,
    OverdueClaims,
    Partition,
    PreparedTransaction,
    RegisteredWorker,
    Rights,
    SchemaState,
    Seat,
    Server,
    Slot,
    Standby,
    Table,
    Unknown,
    Waiting,
)
from windlass.policy.diagnosis import CHECKS, diagnose
from windlass.policy.diagnosis.wording import counted, lasting, listed, size

TODAY = date(2026, 3, 2)
PLAIN = Defaults(queue="mail", priority=10, max_attempts=4, retention=None)
HOUR = 3600.0

SERVER = Server(
    version="18.1",
    major=18,
    database="shop",
    encoding="UTF8",
    role="clerk",
    login="ann",
    session=7,
    is_standby=False,
    is_read_only=False,
    isolation="read committed",
    fsync=True,
    full_page_writes=True,
    synchronous_commit="on",
    synchronous_standby_names="",
    autovacuum=True,
    statement_timeout_ms=0,
    transaction_timeout_ms=0,
    idle_timeout_ms=0,
    connections=10,
    max_connections=100,
    sees_others=True,
)
WORKER = RegisteredWorker(
    id="w1",
    host="a.example",
    pid=7,
    version="0.1.0",
    types=("send",),
    queues=None,
    defaults={"send": PLAIN},
    up_for=HOUR,
    silent_for=5.0,
    lease=30.0,
)
RIGHTS = Rights(
    is_usable=True,
    unreadable=(),
    closed=(),
    not_owned=(),
    not_callable=(),
    relations=20,
    owner="clerk",
    may_create=True,
)
WAITING = Waiting(queue="mail", type="send", tasks=3, waited=2.0, is_paused=False)
TABLE = Table(name="ready", live=1000, dead=100, vacuumed_ago=60.0, autovacuum=True)
INDEX = Index(name="ready_order", bytes=1 << 20, rows=1000, is_valid=True)
OPEN = OpenTransaction(
    pid=42,
    role="clerk",
    program="a report",
    client="10.0.0.7",
    state="idle in transaction",
    open_for=5.0,
    holds_back=True,
    locked=("task",),
)
SLOT = Slot(name="copy", is_active=True, wal_status="reserved", retained_bytes=0, held_back=0)
STANDBY = Standby(name="db2", held_back=0, is_synchronous=False)


def partition(first: date, **details: Any) -> Partition:
    past = first + timedelta(days=1)
    told = {"is_attached": True, "is_pending": False, "is_ours": True} | details
    return Partition(name=f"history_{first:%Y%m%d}_{past:%Y%m%d}", first=first, past=past, **told)


PARTITIONS = [partition(TODAY + timedelta(days=ahead)) for ahead in range(12)]

HEALTHY = Examination(
    access=Access(address="db:5432", session=7),
    migrations=[(1, "0001_tables"), (2, "0002_functions")],
    server=Known(SERVER),
    clock=Known(ClockOffset(0.2, 0.001)),
    moved_clock=Known(0.0),
    schema=Known(SchemaState(owner="clerk", is_usable=True, is_begun=True)),
    applied=Known(frozenset({1, 2})),
    missing=Known([]),
    rights=Known(RIGHTS),
    workers=Known([WORKER]),
    seat=Known(Seat(holder="w1", term=3, expires_in=10.0)),
    claims=Known([]),
    types=Known({"send": PLAIN}),
    waiting=Known([WAITING]),
    due=Known(Due(tasks=0, overdue=0.0)),
    today=Known(TODAY),
    partitions=Known(PARTITIONS),
    retentions=Known([7 * 86400.0]),
    tables=Known([TABLE]),
    indexes=Known([INDEX]),
    transactions=Known([OPEN]),
    prepared=Known([]),
    slots=Known([SLOT]),
    standbys=Known([STANDBY]),
    misplaced=Known([]),
    ended=Known([]),
    lost_keys=Known([]),
)


def server(**details: Any) -> dict[str, Any]:
    return {"server": Known(replace(SERVER, **details))}


def access(**details: Any) -> dict[str, Any]:
    return {"access": replace(HEALTHY.access, **details)}


def workers(*changed: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"workers": Known([replace(WORKER, **one) for one in changed]), **more}


def one(field: str, value: Any, **details: Any) -> dict[str, Any]:
    return {field: Known([replace(value, **details)])}


def of(check: str, **seen: Any) -> list[Finding]:
    return [finding for finding in diagnose(replace(HEALTHY, **seen)) if finding.check == check]


def test_a_healthy_system_has_nothing_but_ok_and_every_check_says_something() -> None:
    findings = diagnose(HEALTHY)

    assert [one for one in findings if one.level is not Level.OK] == []
    assert [one.check for one in findings] == ["connection", *CHECKS]
    assert all(one.advice is None for one in findings)


N, W, E = Level.NOTE, Level.WARNING, Level.ERROR
CASES: list[tuple[str, dict[str, Any], Level, str]] = [
    ("connection", access(refusal="takes no writes"), E, "takes no writes"),
    ("connection", access(is_broken=True), E, "run the doctor again"),
    ("version", server(major=14, version="14.9"), E, "14.9 is too old"),
    ("version", server(is_standby=True), W, "standby"),
    ("version", server(is_read_only=True), E, "read-only"),
    ("version", server(encoding="LATIN1"), E, "LATIN1"),
    ("pooler", access(session=8), W, "pooler=True"),
    ("pooler", access(pooler=True), N, "direct_url"),
    ("pooler", access(pooler=True, has_direct=True), N, "idle_in_transaction_session_timeout"),
    ("pooler", access(has_direct=True, direct_trouble="refused"), W, "direct_url: refused"),
    ("isolation", server(isolation="serializable"), E, 'ALTER ROLE "ann" IN DATABASE "shop" SET'),
    ("durability", server(fsync=False), W, "fsync"),
    ("durability", server(full_page_writes=False), W, "full_page_writes"),
    ("durability", server(synchronous_commit="off"), W, "synchronous_commit"),
    ("limits", server(connections=80), N, "80 of 100"),
    ("limits", server(connections=95), W, "max_connections"),
    ("limits", server(statement_timeout_ms=4999), W, "statement_timeout"),
    ("limits", server(transaction_timeout_ms=1), W, "transaction_timeout"),
    ("clock", {"clock": Known(ClockOffset(1.2, 0.1))}, N, "1.2 s ahead of"),
    ("clock", {"clock": Known(ClockOffset(-62.0, 1.0))}, W, "behind"),
    ("clock", {"moved_clock": Known(86400.0)}, W, "clock() was replaced"),
    ("migrations", {"schema": Known(None)}, E, "windlass migrate"),
    ("migrations", {"applied": Known(frozenset({1}))}, E, "lacks 0002_functions"),
    ("migrations", {"applied": Known(frozenset({1, 2, 3}))}, E, "0003, newer"),
    ("migrations", {"missing": Known(["table task"])}, E, "lacks table task"),
    ("migrations", {"missing": Known(["table task"])}, E, "restore it from a backup"),
    ("migrations", {"ended": Unknown("no column id", is_absent=True)}, E, "no column id"),
    ("rights", {"rights": Known(replace(RIGHTS, is_usable=False))}, E, "GRANT USAGE"),
    ("rights", {"rights": Known(replace(RIGHTS, not_callable=["wake"]))}, E, "GRANT EXECUTE"),
    ("rights", {"rights": Known(replace(RIGHTS, may_create=False))}, E, "GRANT CREATE"),
    ("rights", {"rights": Known(replace(RIGHTS, not_owned=["lane"]))}, W, "OWNER TO"),
    ("rights", {"rights": Known(replace(RIGHTS, not_owned=["a"] * 20))}, N, 'GRANT "clerk" TO "ann"'),
    ("partitions", {"partitions": Known(PARTITIONS[:10])}, W, "2026-03-12"),
    ("partitions", {"partitions": Known([]), "workers": Known([])}, N, "start a worker"),
    (
        "partitions",
        {"partitions": Known([partition(TODAY - timedelta(days=2)), *PARTITIONS])},
        W,
        "should have been dropped",
    ),
    ("partitions", {"partitions": Known([partition(TODAY, is_pending=True), *PARTITIONS[1:]])}, N, "half detached"),
    ("workers", workers(), W, "3 tasks could run"),
    ("workers", workers({}, {"silent_for": 31.0}), N, "silent for 31 s"),
    ("workers", workers({}, {"silent_for": 121.0}), W, "still registered"),
    ("workers", workers({}, {"silent_for": -4.0}), W, "set back"),
    ("workers", workers({}, {"version": "0.2.0"}), N, "0.1.0, 0.2.0"),
    ("leader", one("workers", WORKER, up_for=61.0) | {"seat": Known(Seat(holder=None, term=1, expires_in=None))}, N, "nobody leads"),
    ("leader", {"seat": Known(Seat(holder="w1", term=1, expires_in=-61.0))}, W, "nobody leads for 61 s"),
    ("leader", {"seat": Known(Seat(holder="w0", term=1, expires_in=999.0))}, W, "set back"),
    ("types", workers({}, {"types": ("send", "sort")}), N, "sort"),
    ("types", {"waiting": Known([replace(WAITING, type="sned")])}, W, "'sned' (3 tasks"),
    ("queues", {"waiting": Known([replace(WAITING, is_paused=True)])}, N, "windlass queues resume"),
    ("queues", workers({"queues": ("bulk",)}), W, "--queue"),
    ("due", {"due": Known(Due(tasks=1, overdue=90.0))}, W, "1 scheduled task should be ready"),
    ("places", {"misplaced": Known([Misplaced(kind="nowhere", tasks=4, some=["a"])])}, E, "4 tasks (a and others)"),
    ("places", {"ended": Known([Misplaced(kind="ended", tasks=1, some=["a"])])}, E, "1 task (a)"),
    ("keys", {"lost_keys": Known([LostKey(task_id="a", type="send")])}, W, "'send', task a"),
    ("bloat", server(autovacuum=False), W, "ALTER SYSTEM"),
    ("bloat", one("tables", TABLE, autovacuum=False), W, "ALTER TABLE windlass.ready RESET"),
    ("bloat", one("tables", TABLE, dead=100_001, vacuumed_ago=601.0), W, "VACUUM windlass.ready"),
    ("bloat", one("tables", TABLE, dead=100_001, vacuumed_ago=None), W, "never vacuumed"),
    ("bloat", one("tables", TABLE, dead=1_000_001), W, "many dead rows"),
    ("bloat", one("indexes", INDEX, is_valid=False), W, "not valid"),
    ("bloat", one("indexes", INDEX, bytes=300 << 20), N, "REINDEX INDEX CONCURRENTLY windlass.ready_order"),
    ("transactions", one("transactions", OPEN, open_for=61.0), N, "session 42 (a report)"),
    ("transactions", one("transactions", OPEN, open_for=301.0), W, "pg_terminate_backend(42)"),
    ("transactions", {"prepared": Known([PreparedTransaction(gid="x", role="r", open_for=61.0)])}, W, "ROLLBACK PREPARED 'x'"),
    ("transactions", server(sees_others=False), N, "pg_read_all_stats"),
    ("locks", one("transactions", OPEN, open_for=11.0), N, "holds task"),
    ("locks", one("transactions", OPEN, open_for=61.0), W, "pg_terminate_backend(42)"),
    ("replication", one("slots", SLOT, is_active=False), W, "pg_drop_replication_slot('copy')"),
    ("replication", one("slots", SLOT, wal_status="lost"), W, "has lost"),
    ("replication", one("slots", SLOT, retained_bytes=2 << 30), N, "2 GiB"),
    ("replication", one("slots", SLOT, held_back=1_000_001), W, "holds back dead rows"),
    ("replication", one("standbys", STANDBY, held_back=1_000_001), W, "hot_standby_feedback"),
    ("replication", server(synchronous_standby_names="*"), W, "commits wait"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "seen", "level", "said"), CASES, ids=[f"{case[0]}: {case[3]}" for case in CASES]
)
def test_a_finding_has_its_level_and_says_what_to_do(
    check: str, seen: dict[str, Any], level: Level, said: str
) -> None:
    findings = of(check, **seen)

    assert level in {finding.level for finding in findings}
    assert all(finding.advice for finding in findings)
    assert said in " ".join(f"{finding.found} {finding.advice}" for finding in findings)


@pytest.mark.parametrize(
    ("check", "seen"),
    [
        ("limits", server(connections=79, statement_timeout_ms=5000)),
        ("clock", {"clock": Known(ClockOffset(70.0, 69.5))}),  # a slow answer says little
        ("workers", workers({"silent_for": 29.0})),
        ("workers", workers(waiting=Known([replace(WAITING, is_paused=True)]))),
        ("leader", one("workers", WORKER, up_for=59.0) | {"seat": Known(Seat(holder=None, term=0, expires_in=None))}),
        ("leader", {"seat": Known(Seat(holder="w1", term=1, expires_in=999.0))}),
        ("types", workers({}, {"defaults": None})),  # too old to say
        ("types", workers({}, {"silent_for": 99.0, "defaults": {"send": replace(PLAIN, priority=1)}})),
        ("types", {"workers": Known([]), "waiting": Known([WAITING])}),
        ("partitions", {"partitions": Known([partition(TODAY - timedelta(days=1)), *PARTITIONS])}),
        ("bloat", one("tables", TABLE, dead=100_000, vacuumed_ago=None)),
        ("bloat", one("tables", TABLE, live=10**6, dead=2 * 10**6, vacuumed_ago=None)),
        ("bloat", one("tables", TABLE, dead=10**6)),
        ("bloat", one("indexes", INDEX, bytes=300 << 20, rows=10**6)),
        ("transactions", one("transactions", OPEN, open_for=9999.0, holds_back=False)),
        ("locks", one("transactions", OPEN, open_for=9999.0, locked=())),
        ("locks", one("transactions", OPEN, open_for=9999.0, state="active")),
        ("replication", server(synchronous_standby_names="*") | one("standbys", STANDBY, is_synchronous=True)),
        ("replication", server(synchronous_standby_names="*", sees_others=False)),
    ],
)  # fmt: skip
def test_what_is_not_bad_enough_is_ok(check: str, seen: dict[str, Any]) -> None:
    assert [finding.level for finding in of(check, **seen)] == [Level.OK]


def test_differing_defaults_are_shown_with_who_registered_them_and_what_counts() -> None:
    other = replace(PLAIN, priority=20, retention=7200)
    seen = workers({}, {"host": "b.example", "defaults": {"send": other}})

    (finding,) = of("types", **seen, types=Known({"send": other}))

    assert finding.level is Level.WARNING
    assert finding.found == (
        "type 'send' differs between workers: priority 10, retention as the setting by a.example:7; "
        "priority 20, retention 2 h by b.example:7; what counts is queue 'mail', priority 20, "
        "max_attempts 4, retention 2 h"
    )


def test_overdue_claims_are_named_with_their_workers() -> None:
    known = OverdueClaims(worker_id="w1", host="a.example", pid=7, claims=2, tasks=9, overdue=300.0)
    gone = OverdueClaims(worker_id="w2", host=None, pid=None, claims=1, tasks=1, overdue=90.0)

    (finding,) = of("claims", claims=Known([known, gone]))

    assert finding.level is Level.WARNING
    assert "3 claims on 10 tasks expired up to 5 min ago" in finding.found
    assert "w1 at a.example:7, w2, which is gone" in finding.found


def test_what_was_not_measured_is_unknown_and_the_other_checks_go_on() -> None:
    findings = diagnose(replace(HEALTHY, workers=Unknown("the role may not look")))

    unknown = {finding.check for finding in findings if finding.level is Level.UNKNOWN}
    assert unknown == {"workers", "leader", "types", "queues"}
    assert of("workers", workers=Unknown("the role may not look"))[0].found == (
        "not checked: the role may not look"
    )
    assert [one.check for one in findings] == ["connection", *CHECKS]


@pytest.mark.parametrize("applied", [{1}, {1, 2, 3}])
def test_what_a_migration_may_explain_is_not_called_damage(applied: set[int]) -> None:
    absent = Unknown("no column id", is_absent=True)

    findings = of(
        "migrations",
        applied=Known(frozenset(applied)),
        missing=Known(["table task"]),
        ended=absent,
    )

    assert len(findings) == 1
    assert "table task" not in findings[0].found


def test_a_database_that_was_not_reached_is_one_finding() -> None:
    access = Access(address="db:5432", refusal="cannot be reached: timeout", is_connected=False)

    (finding,) = diagnose(Examination(access=access))

    assert (finding.check, finding.level) == ("connection", Level.ERROR)
    assert finding.found == "cannot be reached: timeout"


def test_numbers_are_put_for_people() -> None:
    assert [lasting(seconds) for seconds in (0.0123, 1.26, 59.0, 119.0, 120.0, 7200.0, 200_000.0)] == [
        "12 ms", "1.3 s", "59 s", "119 s", "2 min", "2 h", "2 days",
    ]  # fmt: skip
    assert [size(number) for number in (12, 5 << 10, 3 << 20, 2 << 30)] == [
        "12 B", "5 KiB", "3 MiB", "2 GiB",
    ]  # fmt: skip
    assert listed(range(7)) == "0, 1, 2, 3, 4 and 2 more"
    assert (counted(1, "task"), counted(2, "task")) == ("1 task", "2 tasks")
