"""Commands that do work: up, worker, migrate, enqueue."""

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import click
import msgspec

from windlass.app import App
from windlass.cli.guessing import guess
from windlass.cli.loading import (
    app_argument,
    load_app,
    load_lasting_app,
    optional_app_argument,
)
from windlass.cli.options import (
    parse_expiry,
    parse_limits,
    parse_priority,
    parse_time,
    single_option,
)
from windlass.cli.own_process import OwnProcess, reap_left_over
from windlass.cli.running import run
from windlass.cli.systemd import notify, watchdog_told
from windlass.model.errors import ConfigurationError, StoreUnavailable
from windlass.model.limits import shown
from windlass.registry import checked_name
from windlass.service import Stop, backoff, first_of
from windlass.store.port import Store
from windlass.telemetry import emit

WAIT_FOR_DATABASE = 60.0  # seconds, when a worker starts
WAIT_IN_SILENCE = 5.0

worker_options = (
    click.option(
        "--queue",
        "queues",
        multiple=True,
        metavar="NAME[:WEIGHT]",
        help="Serve this queue only; with weights, each by its share.",
    ),
    single_option("--concurrency", type=int, help="How many tasks to run at once."),
    click.option(
        "--queue-concurrency",
        multiple=True,
        metavar="NAME=N",
        help="How many tasks of this queue to run at once.",
    ),
    single_option("--shutdown-timeout", type=float, metavar="S", help="Seconds to finish in."),
)


def _with_worker_options(function: Any) -> Any:
    for option in reversed(worker_options):
        function = option(function)
    return function


@click.command()
@app_argument
@_with_worker_options
def worker(application: str, **options: Any) -> None:
    """Run a worker. SIGTERM or Ctrl-C drains it, a second one insists."""
    reap_left_over()
    ours = threading.enumerate()
    sys.exit(run(_work(load_app(application), **options), leaves_all_but=ours))


@click.command()
@optional_app_argument
@_with_worker_options
def up(application: str | None, **options: Any) -> None:
    """Run everything for development: a database if none is configured, and a worker."""
    reap_left_over()
    ours = threading.enumerate()
    app = load_app(application)
    if application is None:
        click.echo(
            "no APP given: the worker knows no task; try: windlass up package.module:name", err=True
        )
    sys.exit(run(_work(app, **options), leaves_all_but=ours))


async def _work(
    app: App,
    *,
    queues: tuple[str, ...],
    concurrency: int | None,
    queue_concurrency: tuple[str, ...],
    shutdown_timeout: float | None,
) -> int:
    """Work until a signal; return the exit code, which tells whether everything was written."""
    stop = Stop()
    process = OwnProcess(stop.set)
    process.listen()
    with app.monitor() as monitor:
        if not await _opened(app, stop):
            return 0
        async with app:
            working = await app.new_worker(
                queues=queues or None,
                concurrency=concurrency,
                queue_concurrency=parse_limits("--queue-concurrency", queue_concurrency),
                shutdown_timeout=shutdown_timeout,
                monitor=monitor,
                process=process,
            )

            def drain() -> None:
                working.stop()
                notify("STOPPING=1", patience=0)  # a courtesy: nothing waits for it

            process.stop = drain
            if stop:
                drain()
            async with watchdog_told():
                await working.run(started=partial(notify, "READY=1"))
    if working.is_exhausted and not process.times_asked():
        process.replace()
    return 1 if working.unsettled else 0


async def _opened(app: App, stop: Stop) -> bool:
    """Wait for the database, which may start later than we do; false if asked to stop meanwhile.

    Not for ever: an address that is wrong is to be told by the exit code too.
    """
    failures = 0
    wait_until = time.monotonic() + WAIT_FOR_DATABASE
    while not stop:
        opening = asyncio.create_task(app.store())
        await first_of(_done(opening), stop.wait())
        if not opening.done():
            opening.cancel()
            return False
        try:
            opening.result()
        except StoreUnavailable as error:
            if time.monotonic() > wait_until:
                raise
            failures += 1
            emit("store.unavailable", doing="open", error=error)
            await stop.wait(backoff(failures))
        else:
            return True
    return False


async def _done(opening: asyncio.Task[Store]) -> None:
    """Wait as long as it takes, for it may be a migration, but not in silence."""
    done, _ = await asyncio.wait([opening], timeout=WAIT_IN_SILENCE)
    if not done:
        reason = f"no answer for {WAIT_IN_SILENCE:g} s, or a migration that takes long; waiting"
        emit("store.unavailable", doing="open", error=reason)
        await asyncio.wait([opening])


@click.command()
@optional_app_argument
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if something is pending.")
@click.option("--sql", is_flag=True, help="Change nothing; print the pending migrations.")
def migrate(application: str | None, check: bool, sql: bool) -> None:
    """Apply, check or print migrations; with APP, also register its task types."""
    sys.exit(run(_migrate(load_app(application), check=check, sql=sql)))


async def _migrate(app: App, *, check: bool, sql: bool) -> int:
    try:
        schema = await app.schema()
        if check or sql:
            pending = await schema.pending()
            if sql:
                click.echo(schema.script(pending) if pending else "-- nothing is pending")
                return 0
            _say("pending", pending, otherwise=schema.up_to_date)
            return 1 if pending else 0
        _say("applied", await schema.migrate(), otherwise=schema.up_to_date)
        if list(app.registry):
            store = await app.store()
            await store.register_types([one.defaults for one in app.registry])
            await store.declare_rules(
                app.registry.rules(),
                types=app.registry.names(),
                values=app.registry.value_rules(),
            )
        return 0
    finally:
        await app.close()


def _say(what: str, migrations: Sequence[object], *, otherwise: str) -> None:
    for migration in migrations:
        click.echo(f"{what}: {migration}")
    if not migrations:
        click.echo(otherwise)


@click.command()
@app_argument
@click.argument("type_name", metavar="TYPE")
@click.argument("payload", metavar="[JSON]", default="{}")
@single_option("--queue")
@single_option("--priority", help="0 to 100, or low, normal, high, critical.")
@single_option("--delay", type=float, metavar="SECONDS")
@single_option(
    "--expires",
    metavar="SECONDS|TIME",
    help="Cancel it if it has not started by then: seconds from now, or ISO 8601 with an offset.",
)
@single_option(
    "--at", metavar="TIME", help="ISO 8601 with an offset, as 2030-01-31T08:00:00+01:00."
)
@single_option("--idempotency-key")
@single_option("--ordering-key", help="Tasks of one key run one at a time, in their order.")
@single_option(
    "--on-dead", metavar="pass|hold", help="If it fails: pass its ordering key on, or hold it."
)
@single_option(
    "--unique-for",
    type=float,
    metavar="SECONDS",
    help="Print the id of a task with an equal payload instead, if one was enqueued so within this time.",
)
@single_option(
    "--throttle", type=float, metavar="SECONDS", help="The same, whatever the payload is."
)
@single_option(
    "--debounce",
    type=float,
    metavar="SECONDS",
    help="Start it after so long, unless it is enqueued so again: then the last payload counts.",
)
@single_option(
    "--dedupe-key", help="What has to be equal for that, instead of the payload or the type."
)
@single_option("--max-attempts", type=int)
@click.option("--tag", "tags", multiple=True)
def enqueue(application: str, type_name: str, payload: str, **options: Any) -> None:
    """Enqueue a task of TYPE with a JSON object of arguments; prints its id."""
    try:
        arguments = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigurationError(f"the payload is not JSON: {error}") from error
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if "at" in given:
        given["at"] = parse_time("--at", given["at"])
    if "expires" in given:
        given["expires"] = parse_expiry("--expires", given["expires"])
    if "priority" in given:
        given["priority"] = parse_priority(given["priority"])
    app = load_lasting_app(application)
    task_id, is_known = run(_enqueue(app, type_name, arguments, given))
    if not is_known:
        click.echo(
            f"windlass: no task type {shown(type_name)} is defined by {application} or registered "
            f"in its database: the task waits for a worker that knows it"
            f"{guess(type_name, app.registry.names())}",
            err=True,
        )
    click.echo(task_id)


async def _enqueue(
    app: App, type_name: str, payload: Any, options: dict[str, Any]
) -> tuple[str, bool]:
    """Enqueue by name; return the id, and whether anybody is known to define the type."""
    checked_name("task name", type_name)
    async with app:
        # Asked first: once the task is written, nothing may stand between its id and the user.
        is_known = (
            app.registry.find(type_name) is not None
            or await (await app.store()).type_defaults(type_name) is not None
        )
        return (await app.enqueue(type_name, payload, **options)).id, is_known
