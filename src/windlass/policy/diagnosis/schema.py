"""The schema: its migrations, what the role may do in it, and the partitions of the history."""

from collections.abc import Sequence
from datetime import timedelta

from windlass.model.examination import (
    Examination,
    Finding,
    NotMeasured,
    Partition,
    Rights,
    Server,
    Unknown,
)
from windlass.policy.diagnosis.wording import (
    counted,
    error,
    listed,
    note,
    or_ok,
    setting,
    warning,
)
from windlass.policy.retention import Span, missing_spans

DAY = timedelta(days=1)  # what the leader does every ten minutes, or every hour, is done within


def migrations(seen: Examination) -> list[Finding]:
    """Whether the schema is the one that the code knows."""
    check, name, state = "migrations", seen.schema_name, seen.schema.get()
    how = "run: windlass migrate"
    if state is None:
        return [error(check, f"there is no schema '{name}' in this database", how)]
    if not state.is_usable:
        raise NotMeasured("the role may not use the schema")
    if not state.is_begun:
        return [error(check, f"the schema '{name}' was never migrated", how)]
    applied, newest = seen.applied.get(), seen.migrations[-1]
    found = []
    unknown = sorted(number for number in applied if number > newest[0])
    missing = [migration for number, migration in seen.migrations if number not in applied]
    if unknown:
        found.append(
            error(
                check,
                f"the schema '{name}' has migration {listed(f'{one:04d}' for one in unknown)}, newer "
                f"than this version of windlass knows ({newest[0]:04d})",
                "upgrade windlass here",
            )
        )
    if missing:
        found.append(error(check, f"the schema '{name}' lacks {listed(missing)}", how))
    # Without all of them, or with newer ones, nothing is out of order if something is not there.
    found = found or _damage(check, seen)
    return or_ok(check, found, f"schema '{name}' is up to date: {newest[1]}")


def _damage(check: str, seen: Examination) -> list[Finding]:
    missing = listed(seen.missing.get())
    trouble = f"lacks {missing}" if missing else "; ".join(seen.absences())
    if not trouble:
        return []
    return [
        error(
            check,
            f"the schema '{seen.schema_name}' has all migrations, and yet {trouble}",
            "somebody has changed the schema: undo that, or restore it from a backup; "
            "windlass migrate does not",
        )
    ]


def rights(seen: Examination) -> list[Finding]:
    """What the role may do: look, enqueue, work."""
    check, server, may = "rights", seen.server.get(), seen.rights.get()
    if may.relations == 0:
        raise NotMeasured("there is no table yet")
    if may.is_usable and not may.not_owned and may.may_create and not may.not_callable:
        return or_ok(check, (), f"role '{server.role}' may look, enqueue and work")
    return _lacking(check, server, seen.schema_name, may)


def _lacking(check: str, server: Server, schema: str, may: Rights) -> list[Finding]:
    found = []
    role = server.role
    to_role = f'TO "{role}"'
    if not may.is_usable:
        found.append(
            error(
                check,
                f"role '{role}' may not use the schema '{schema}'",
                f"GRANT USAGE ON SCHEMA {schema} {to_role}",
            )
        )
    if may.unreadable:
        found.append(
            error(
                check,
                f"role '{role}' may not read {listed(may.unreadable)}",
                f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} {to_role}",
            )
        )
    if may.not_callable:
        found.append(
            error(
                check,
                f"role '{role}' may not call {listed(may.not_callable)}",
                f"GRANT EXECUTE ON ROUTINE {schema}.{f', {schema}.'.join(may.not_callable)} {to_role}",
            )
        )
    if may.closed:
        found.append(
            warning(
                check,
                f"role '{role}' may not enqueue: it lacks INSERT on {listed(may.closed)}",
                f"GRANT INSERT ON {schema}.{f', {schema}.'.join(may.closed)} {to_role}, unless it only "
                "looks, or calls the SQL functions",
            )
        )
    if may.not_owned:
        is_partly = len(may.not_owned) < may.relations
        say = warning if is_partly else note
        found.append(
            say(
                check,
                f"role '{role}' does not own {listed(may.not_owned)}"
                + (
                    ", but the other tables"
                    if is_partly
                    else ": it may not run a worker or migrate"
                ),
                f'let one role own them all: ALTER TABLE … OWNER TO "{may.owner}"'
                if is_partly
                else f'if workers use it: GRANT "{may.owner}" TO "{server.login}", and '
                + setting(server, "role", f"'{may.owner}'"),
            )
        )
    elif not may.may_create:
        found.append(
            error(
                check,
                f"role '{role}' may not create tables in the schema '{schema}': the history gets no partitions",
                f"GRANT CREATE ON SCHEMA {schema} {to_role}",
            )
        )
    return found


def partitions(seen: Examination) -> list[Finding]:
    """Whether ended tasks find a place in the coming days, and old ones are removed."""
    check = "partitions"
    tables, today = seen.partitions.get(), seen.today.get()
    retentions = [timedelta(seconds=seconds) for seconds in seen.retentions.get()]
    spans = [
        span
        for table in tables
        if table.is_attached and not table.is_pending
        for span in _span(table)
    ]
    found = _strangers(check, tables)
    wanted_before = missing_spans(today - DAY, retentions, spans)
    missing = [one for one in missing_spans(today, retentions, spans) if one in wanted_before]
    if missing:
        workers = seen.workers
        is_worked = not isinstance(workers, Unknown) and any(one.is_alive for one in workers.get())
        days = listed(f"{span.first}" for span in missing)
        say, advice = (
            (
                warning,
                "the leader makes them every hour: look at its log, and at the finding on rights",
            )
            if is_worked
            else (note, "start a worker: its leader makes them")
        )
        found.append(
            say(check, f"no partition is there yet for tasks that may go on {days}", advice)
        )
    old = [one for one in tables if one.past is not None and one.past + DAY <= today]
    if old:
        found.append(
            warning(
                check,
                f"{listed(one.name for one in old)} should have been dropped"
                + (", and is half detached" if any(one.is_pending for one in old) else ""),
                "a leader does so every ten minutes: see that a worker runs, and that no report reads "
                "the history for days (the finding on transactions)",
            )
        )
    pending = [one for one in tables if one.is_pending and one not in old]
    if pending:
        found.append(
            note(
                check,
                f"{listed(one.name for one in pending)} is half detached: somebody still reads it",
                "the leader finishes that when its day is over, or you: ALTER TABLE "
                f"{seen.schema_name}.history DETACH PARTITION {seen.schema_name}.{pending[0].name} FINALIZE",
            )
        )
    attached = sum(table.is_attached for table in tables)
    return or_ok(check, found, f"{counted(attached, 'partition')}, and all that the next days need")


def _span(table: Partition) -> list[Span]:
    return [] if table.first is None or table.past is None else [Span(table.first, table.past)]


def _strangers(check: str, tables: Sequence[Partition]) -> list[Finding]:
    strangers = [table.name for table in tables if not table.is_ours]
    if not strangers:
        return []
    return [
        warning(
            check,
            f"{listed(strangers)} is attached to the history and not one of its partitions",
            "detach it: what lies in a default partition is never removed, and keeps out the others",
        )
    ]
