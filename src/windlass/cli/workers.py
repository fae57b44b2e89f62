"""Commands on workers."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click

from windlass.app import App
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.options import single_option
from windlass.cli.printing import legible, print_json, print_table
from windlass.cli.running import run
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.task import WorkerRecord

T = TypeVar("T")


@click.group()
def workers() -> None:
    """Look at workers, pause, resume and drain them."""


@workers.command("list")
@app_option
@json_option
def list_workers(application: str | None, as_json: bool) -> None:
    """List registered workers."""
    app = load_lasting_app(application)
    records = run(_within(app, app.workers.list))
    if as_json:
        print_json(records)
        return
    print_table(
        ("id", "host", "pid", "state", "running", "capacity", "heartbeat", "leader", "breakers"),
        [
            (
                record.id,
                record.host,
                str(record.pid),
                _state(record),
                str(record.running),
                str(record.capacity),
                f"{record.heartbeat_at:%Y-%m-%d %H:%M:%S}",
                "yes" if record.leader else "no",
                _shown(record.breakers),
            )
            for record in records
        ],
    )


def _state(record: WorkerRecord) -> str:
    if record.drained_at is not None:
        return "draining"
    return "working" if record.paused_at is None else "paused"


def _shown(breakers: dict[str, str]) -> str:
    """Those that hold something up."""
    return ", ".join(f"{name} {state}" for name, state in breakers.items() if state != "closed")


@workers.command("pause")
@app_option
@click.argument("worker_id", metavar="WORKER_ID")
def pause_worker(application: str | None, worker_id: str) -> None:
    """Let a worker claim nothing more; what it has goes on."""
    app = load_lasting_app(application)
    run(_within(app, lambda: app.workers.pause(worker_id)))
    click.echo(legible(f"worker {worker_id} is paused; what it has goes on"))


@workers.command("resume")
@app_option
@click.argument("worker_id", metavar="WORKER_ID")
def resume_worker(application: str | None, worker_id: str) -> None:
    """Let a worker that was paused go on."""
    app = load_lasting_app(application)
    run(_within(app, lambda: app.workers.resume(worker_id)))
    click.echo(legible(f"worker {worker_id} is resumed"))


@workers.command("drain")
@app_option
@click.argument("worker_id", metavar="[WORKER_ID]", required=False)
@click.option("--all", "everywhere", is_flag=True, help="All that are registered.")
@single_option("--host", help="Those of this host.")
def drain_workers(
    application: str | None, worker_id: str | None, everywhere: bool, host: str | None
) -> None:
    """Let workers finish what they have and end, as after SIGTERM."""
    if [worker_id is not None, everywhere, host is not None].count(True) != 1:
        raise ConfigurationError(
            "say which workers to drain: WORKER_ID, --all or --host HOST, and only one of these"
        )
    app = load_lasting_app(application)
    if worker_id is not None:
        run(_within(app, lambda: app.workers.drain(worker_id)))
        click.echo(legible(f"worker {worker_id} drains"))
        return
    drained = run(_within(app, lambda: app.workers.drain_all(host=host)))
    for record in drained:
        click.echo(legible(f"worker {record.id} drains"))
    if not drained:
        where = "" if host is None else f" of host {shown(host)}"
        click.echo(
            legible(f"no worker{where} is registered; those that are: windlass workers list")
        )


async def _within(app: App, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async with app:
        return await call()
