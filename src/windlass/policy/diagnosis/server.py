"""The server: whether it can be reached, is new enough, keeps what it says, and tells the time."""

from windlass.model.examination import Examination, Finding, NotMeasured
from windlass.policy.diagnosis.wording import error, lasting, note, or_ok, setting, warning

OLDEST_SERVER = 15
ENCODING = "UTF8"
ISOLATION = "read committed"
SHORT_TIMEOUT = 5.0  # seconds; a settlement waits for locks, and some chores of a leader take long
CROWDED, FULL = 0.8, 0.95  # parts of the connections
CLOCK_NOTE, CLOCK_WARNING = 1.0, 60.0  # seconds


def connection(seen: Examination) -> list[Finding]:
    """Whether an app can open this database."""
    check, access, found = "connection", seen.access, []
    if not access.is_connected:
        advice = (
            "see that the server runs and lets this host in, and check the URL: that of "
            "WINDLASS_DATABASE_URL, or the one in the code of the app"
        )
        found.append(error(check, access.refusal or "the database cannot be reached", advice))
    elif access.refusal is not None:
        advice = "point the URL to the primary; what follows is about the server that answered"
        found.append(error(check, access.refusal, advice))
    if access.is_broken:
        lost = "the connection broke, or the server fell silent, before everything was looked at"
        found.append(error(check, lost, "see the server's log, and run the doctor again"))
    return or_ok(check, found, f"{access.address or 'the database'} answers")


def version(seen: Examination) -> list[Finding]:
    """Whether the server is new enough, and takes writes."""
    check, server, found = "version", seen.server.get(), []
    who = f"database '{server.database}', role '{server.role}'"
    if server.major < OLDEST_SERVER:
        found.append(
            error(
                check,
                f"PostgreSQL {server.version} is too old",
                f"move the database to PostgreSQL {OLDEST_SERVER} or newer",
            )
        )
    if server.encoding != ENCODING:
        found.append(
            error(
                check,
                f"the encoding of database '{server.database}' is {server.encoding}",
                f"move to another: CREATE DATABASE name ENCODING '{ENCODING}' TEMPLATE template0",
            )
        )
    if server.is_standby and seen.access.refusal is None:
        found.append(
            warning(
                check,
                f"this is a standby ({who}): it can be looked at and takes no writes",
                "run the doctor on the primary too; workers need the URL of the primary",
            )
        )
    elif server.is_read_only and not server.is_standby:
        found.append(
            error(
                check,
                f"transactions are read-only by default ({who})",
                setting(server, "default_transaction_read_only", "off")
                + ", from another database if this one is read-only for you too",
            )
        )
    return or_ok(check, found, f"PostgreSQL {server.version}, {who}")


def pooler(seen: Examination) -> list[Finding]:
    """Whether a pooler stands before the server, and there is a way around it."""
    check, access, server, found = "pooler", seen.access, seen.server.get(), []
    is_between = access.session != server.session
    if access.direct_trouble is not None:
        found.append(
            warning(
                check,
                f"direct_url: {access.direct_trouble}",
                "correct direct_url: until then workers poll, and no migration can be applied",
            )
        )
    if access.pooler and not access.has_direct:
        found.append(
            note(
                check,
                "pooler is set and direct_url is not: workers hear of new tasks by polling",
                "set direct_url to the server itself, for notifications and migrations",
            )
        )
    if is_between and not access.pooler:
        found.append(
            warning(
                check,
                "a pooler stands before the server, and the setting pooler is off",
                "set pooler=True if it is in transaction mode; in session mode this is fine",
            )
        )
    if access.pooler and server.idle_timeout_ms == 0:
        found.append(
            note(
                check,
                "idle_in_transaction_session_timeout is not set, and cannot be by us behind a pooler",
                setting(server, "idle_in_transaction_session_timeout", "'60s'")
                + ", and let the pooler reconnect",
            )
        )
    between = "through a pooler" if is_between else "none stands before the server"
    around = ", with a way around it" if access.has_direct else ""
    return or_ok(check, found, between + around)


def isolation(seen: Examination) -> list[Finding]:
    """Whether transactions that ask for nothing are isolated as our statements need it."""
    check, server, found = "isolation", seen.server.get(), []
    if server.isolation != ISOLATION:
        found.append(
            error(
                check,
                f"default_transaction_isolation is '{server.isolation}' for role '{server.login}'",
                setting(server, "default_transaction_isolation", f"'{ISOLATION}'")
                + ", and let the pooler reconnect",
            )
        )
    return or_ok(check, found, ISOLATION)


def durability(seen: Examination) -> list[Finding]:
    """Whether what was committed outlives a crash."""
    check, server, found = "durability", seen.server.get(), []
    off = [
        name
        for name, is_on in (("fsync", server.fsync), ("full_page_writes", server.full_page_writes))
        if not is_on
    ]
    if off:
        found.append(
            warning(
                check,
                f"{' and '.join(off)} off: a crash of the host can destroy the database",
                "; ".join(f"ALTER SYSTEM SET {name} = on" for name in off)
                + "; then SELECT pg_reload_conf()",
            )
        )
    if server.synchronous_commit == "off":
        found.append(
            warning(
                check,
                f"synchronous_commit is off for role '{server.login}': a crash can undo what was "
                "reported as done",
                setting(server, "synchronous_commit", "on"),
            )
        )
    return or_ok(
        check, found, f"commits are durable (synchronous_commit {server.synchronous_commit})"
    )


def limits(seen: Examination) -> list[Finding]:
    """Whether connections are left, and statements may take as long as they need."""
    check, server, found = "limits", seen.server.get(), []
    used = f"{server.connections} of {server.max_connections} connections are used"
    if server.connections >= CROWDED * server.max_connections:
        say = warning if server.connections >= FULL * server.max_connections else note
        advice = "raise max_connections, lower pool_size, or put a pooler in between"
        found.append(say(check, used, advice))
    timeouts = {
        "statement_timeout": server.statement_timeout_ms,
        "transaction_timeout": server.transaction_timeout_ms,
    }
    for name, milliseconds in timeouts.items():
        if 0 < milliseconds < SHORT_TIMEOUT * 1000:
            found.append(
                warning(
                    check,
                    f"{name} is {milliseconds} ms for role '{server.login}': it cuts off what workers do",
                    setting(server, name, "'60s'") + ", or 0 for none",
                )
            )
    return or_ok(check, found, used)


def clock(seen: Examination) -> list[Finding]:
    """Whether the server's clock, by which everything is measured, is right."""
    check, found = "clock", []
    offset, give_or_take = seen.clock.get()
    sure = max(abs(offset) - give_or_take, 0.0)
    differs = (
        f"the server's clock is {lasting(abs(offset))} {'ahead of' if offset > 0 else 'behind'} "
        f"this host's (give or take {lasting(give_or_take)})"
    )
    if sure > CLOCK_NOTE:
        say = warning if sure > CLOCK_WARNING else note
        advice = "set both by NTP, slewing the server's; it alone decides when tasks are due and leases end"
        found.append(say(check, differs, advice))
    try:
        moved = seen.moved_clock.get()
    except NotMeasured:
        moved = 0.0  # there is no schema, of which others tell
    if abs(moved) > CLOCK_NOTE:
        found.append(
            warning(
                check,
                f"the function {seen.schema_name}.clock() was replaced: it is off by {lasting(moved)}",
                "only tests do that; put back the one of the first migration: SELECT clock_timestamp()",
            )
        )
    return or_ok(check, found, differs)
