"""The commands and what they share: errors, exit codes, the application they work on."""

import logging
import sys
from typing import Any, NoReturn

import click

from windlass.cli.dead import dead
from windlass.cli.doctor import doctor
from windlass.cli.errors import errors
from windlass.cli.printing import legible
from windlass.cli.queues import queues
from windlass.cli.run import enqueue, migrate, up, worker
from windlass.cli.schedules import schedules
from windlass.cli.tasks import tasks
from windlass.cli.types import types
from windlass.cli.workers import workers
from windlass.model.errors import ConfigurationError, WindlassError


class Commands(click.Group):
    """A group that turns our errors into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command: 0 done, 1 failed, 2 wrong usage."""
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            _fail(error, 2)
        except WindlassError as error:
            _fail(error, 1)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Find a command; one that is promised and not built yet says so."""
        if cmd_name in NOT_BUILT:
            raise ConfigurationError(f"windlass {cmd_name} is not built yet")
        return super().get_command(ctx, cmd_name)


NOT_BUILT = frozenset(
    {
        "server",
        "workflows",
        "keys",
        "audit",
        "autoscale",
        "backup",
        "restore",
        "drill",
    }
)


def _fail(error: Exception, code: int) -> NoReturn:
    click.echo(legible(f"windlass: {error}"), err=True)
    sys.exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="windlass")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens, to standard error.")
@click.pass_context
def main(ctx: click.Context, verbose: bool) -> None:
    """Run tasks on PostgreSQL."""
    working = ctx.invoked_subcommand in ("up", "worker")
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose or working else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )


for command in (
    *(up, worker, migrate, enqueue),
    *(tasks, dead, queues, schedules, workers, types, errors, doctor),
):
    main.add_command(command)
