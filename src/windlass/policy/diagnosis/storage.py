"""What keeps the server from cleaning up, and what it did not clean up."""

from windlass.model.examination import (
    Examination,
    Finding,
    OpenTransaction,
    Slot,
    Standby,
    Table,
)
from windlass.policy.diagnosis.wording import counted, lasting, listed, note, or_ok, size, warning

MANY_DEAD = 100_000  # rows; a busy table has so many between two vacuums
FAR_TOO_MANY_DEAD = 1_000_000
VACUUMED_WITHIN = 600.0  # seconds
LARGE_INDEX = 256 << 20  # bytes
BYTES_A_ROW = 64  # of an index, with room to spare
OUTGROWN = 8  # times what its rows need

OPEN_NOTE, OPEN_WARNING = 60.0, 300.0  # seconds that a transaction is open
LOCK_NOTE, LOCK_WARNING = 10.0, 60.0  # seconds that an idle one holds tables
HELD_BACK = 1_000_000  # transactions
RETAINED = 1 << 30  # bytes of the write-ahead log


def bloat(seen: Examination) -> list[Finding]:
    """Whether dead rows are removed."""
    check, tables, name = "bloat", seen.tables.get(), seen.schema_name
    found = []
    if not seen.server.get().autovacuum:
        found.append(
            warning(
                check,
                "autovacuum or track_counts is off: dead rows are never removed",
                "ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; "
                "SELECT pg_reload_conf()",
            )
        )
    switched_off = [table.name for table in tables if not table.autovacuum]
    if switched_off:
        found.append(
            warning(
                check,
                f"autovacuum is switched off for {listed(switched_off)}",
                "; ".join(
                    f"ALTER TABLE {name}.{table} RESET (autovacuum_enabled)"
                    for table in switched_off
                ),
            )
        )
    dead = [table for table in tables if _is_bloated(table)]
    if dead:
        found.append(
            warning(
                check,
                "many dead rows: "
                + listed(
                    f"{one.name} {one.dead} beside {one.live} ({_vacuumed(one)})" for one in dead
                ),
                "see what holds them back (transactions, replication); then "
                + "; ".join(f"VACUUM {name}.{one.name}" for one in dead),
            )
        )
    return or_ok(
        check,
        found + _indexes(check, seen),
        f"{sum(one.dead for one in tables)} dead rows in all tables",
    )


def _is_bloated(table: Table) -> bool:
    if table.dead > max(FAR_TOO_MANY_DEAD, 10 * table.live):
        return True
    is_neglected = table.vacuumed_ago is None or table.vacuumed_ago > VACUUMED_WITHIN
    return is_neglected and table.dead > max(MANY_DEAD, 2 * table.live)


def _vacuumed(table: Table) -> str:
    if table.vacuumed_ago is None:
        return "never vacuumed"
    return f"vacuumed {lasting(table.vacuumed_ago)} ago"


def _indexes(check: str, seen: Examination) -> list[Finding]:
    indexes, name = seen.indexes.get(), seen.schema_name
    found = []
    invalid = [index.name for index in indexes if not index.is_valid]
    if invalid:
        found.append(
            warning(
                check,
                f"{listed(invalid)} is not valid: it is written and never read",
                "; ".join(
                    f"DROP INDEX CONCURRENTLY {name}.{one}, if it ends in _ccnew or _ccold, else "
                    f"REINDEX INDEX CONCURRENTLY {name}.{one}"
                    for one in invalid
                ),
            )
        )
    outgrown = [
        index
        for index in indexes
        if index.bytes > LARGE_INDEX and index.bytes > OUTGROWN * BYTES_A_ROW * index.rows
    ]
    if outgrown:
        found.append(
            note(
                check,
                f"{listed(f'{one.name} has {size(one.bytes)} for {one.rows} rows' for one in outgrown)}",
                "; ".join(f"REINDEX INDEX CONCURRENTLY {name}.{one.name}" for one in outgrown),
            )
        )
    return found


def transactions(seen: Examination) -> list[Finding]:
    """Whether an old snapshot keeps dead rows of all tables."""
    check, server = "transactions", seen.server.get()
    found = []
    old = [one for one in seen.transactions.get() if one.holds_back and one.open_for > OPEN_NOTE]
    if old:
        say = warning if old[0].open_for > OPEN_WARNING else note
        found.append(
            say(
                check,
                f"open for long: {listed(map(_open, old))}; no dead row since can be removed",
                f"commit or roll back there, or end it: SELECT pg_terminate_backend({old[0].pid})",
            )
        )
    prepared = [one for one in seen.prepared.get() if one.open_for > OPEN_NOTE]
    if prepared:
        found.append(
            warning(
                check,
                "prepared and not ended: "
                + listed(
                    f"'{one.gid}' of role '{one.role}' for {lasting(one.open_for)}"
                    for one in prepared
                ),
                "its transaction manager has to end it, or you: COMMIT PREPARED or ROLLBACK PREPARED "
                f"'{prepared[0].gid}'",
            )
        )
    if not server.sees_others:
        found.append(
            note(
                check,
                f"role '{server.role}' does not see the transactions of other roles",
                f'GRANT pg_read_all_stats TO "{server.role}", or run the doctor as a role that has it',
            )
        )
    return or_ok(check, found, f"none is open for longer than {lasting(OPEN_NOTE)}")


def _open(one: OpenTransaction) -> str:
    return f"{one}, {one.state}, for {lasting(one.open_for)}"


def locks(seen: Examination) -> list[Finding]:
    """Whether somebody idles with our tables in hand."""
    check = "locks"
    idle = [
        one
        for one in seen.transactions.get()
        if one.locked
        and (one.state or "").startswith("idle in transaction")
        and one.open_for > LOCK_NOTE
    ]
    found = []
    if idle:
        say = warning if idle[0].open_for > LOCK_WARNING else note
        found.append(
            say(
                check,
                "; ".join(f"{_open(one)}, holds {listed(one.locked)}" for one in idle[:3]),
                f"let it commit, or end it: SELECT pg_terminate_backend({idle[0].pid}); and set "
                "idle_in_transaction_session_timeout for its role",
            )
        )
    return or_ok(check, found, "nobody idles in a transaction that holds our tables")


def replication(seen: Examination) -> list[Finding]:
    """Whether slots or standbys keep what should go, and commits wait for nobody."""
    check, server = "replication", seen.server.get()
    slots, standbys = seen.slots.get(), seen.standbys.get()
    found = []
    for slot in slots:
        drop = (
            f"let its consumer connect, or drop it: SELECT pg_drop_replication_slot('{slot.name}')"
        )
        if slot.wal_status == "lost":
            found.append(
                warning(check, f"slot '{slot.name}' has lost what its consumer needs", drop)
            )
        elif not slot.is_active:
            found.append(
                warning(
                    check,
                    f"slot '{slot.name}' has no consumer and keeps {size(slot.retained_bytes)} of the "
                    "write-ahead log" + (", and dead rows" if slot.held_back else ""),
                    f"{drop}; it grows until the disk is full",
                )
            )
        elif slot.retained_bytes > RETAINED or slot.wal_status not in ("reserved", None):
            found.append(
                note(
                    check,
                    f"slot '{slot.name}' is behind by {size(slot.retained_bytes)} ({slot.wal_status})",
                    "see why its consumer is slow",
                )
            )
    holders: list[Slot | Standby] = [*slots, *standbys]
    holding = [one for one in holders if one.held_back > HELD_BACK]
    if holding:
        found.append(
            warning(
                check,
                listed(
                    f"'{one.name}' holds back dead rows of {one.held_back} transactions"
                    for one in holding
                ),
                "end long queries on that standby, or switch off its hot_standby_feedback",
            )
        )
    names = server.synchronous_standby_names
    if names and server.sees_others and not any(one.is_synchronous for one in standbys):
        found.append(
            warning(
                check,
                f"synchronous_standby_names is '{names}', and no such standby is connected: commits wait",
                "bring the standby back, or ALTER SYSTEM SET synchronous_standby_names = '' and reload",
            )
        )
    return or_ok(
        check,
        found,
        f"{counted(len(slots), 'slot')}, {counted(len(standbys), 'standby connection')}",
    )
