"""From what the user typed to an application, and running its coroutines."""

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

import click

from windlass.app import App
from windlass.cli.options import single_option
from windlass.model.errors import ConfigurationError

T = TypeVar("T")

LEAVE_AFTER = 1.0  # seconds for what was cancelled to end

app_argument = click.argument("application", metavar="APP", envvar="WINDLASS_APP")
optional_app_argument = click.argument(
    "application", metavar="[APP]", envvar="WINDLASS_APP", required=False
)
app_option = single_option(
    "--app",
    "application",
    metavar="APP",
    envvar="WINDLASS_APP",
    help="package.module:name; without it, the database named by WINDLASS_DATABASE_URL.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")


def load_app(application: str | None) -> App:
    """Import `package.module:name`; None gives an app without tasks on the configured database."""
    if application is None:
        return App()
    module_name, _, name = application.partition(":")
    if not name or not all(module_name.split(".")):
        raise ConfigurationError(f"app '{application}': write it as package.module:name")
    folder = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module is there, and lacks something of its own
        raise ConfigurationError(
            f"app '{application}': there is no module '{module_name}' here; "
            "run this where it can be imported"
        ) from error
    app = getattr(module, name, None)
    if not isinstance(app, App):
        found = "nothing" if app is None else f"a {type(app).__name__}"
        raise ConfigurationError(f"app '{application}': '{name}' is {found}, not a windlass App")
    return app


def load_lasting_app(application: str | None) -> App:
    """Find an application for a command that looks or acts once: its tasks have to outlive it."""
    app = load_app(application)
    if app.url == "memory:":
        raise ConfigurationError(
            f"the database of {application or 'WINDLASS_DATABASE_URL'} is 'memory:', which is "
            "empty when a command begins and gone when it ends; use postgresql://… or embedded:, "
            "or do this in the process that holds the tasks"
        )
    return app


def run(main: Coroutine[Any, Any, T], *, leaves_threads: bool = False) -> T:
    """Run a coroutine, on uvloop where that is installed.

    A handler that ignores its cancellation cannot keep the process: it is left behind, and so are threads
    that handlers have started, where they may. A number that the coroutine returns is the exit code then.
    """
    factory = asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    loop = factory()
    before = threading.enumerate()
    try:
        result = loop.run_until_complete(main)
    except BaseException as error:
        if leaves_threads and _has_threads_left(before):  # for which the error is told first
            _leaving_soon(2 if isinstance(error, ConfigurationError) else 1).start()
        raise
    insisting = _leaving_soon(result)
    if leaves_threads:
        insisting.start()  # what is cancelled now may block the event loop
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left and loop.run_until_complete(asyncio.wait(left, timeout=LEAVE_AFTER))[1]:
        _leave(result)
    loop.run_until_complete(loop.shutdown_asyncgens())
    insisting.cancel()
    if leaves_threads and _has_threads_left(before):
        _leave(result)
    loop.close()
    return result


def _has_threads_left(before: Collection[threading.Thread]) -> bool:
    """Whether threads that handlers have started go on, for which the interpreter would wait at its end."""
    until = time.monotonic() + LEAVE_AFTER
    left = [one for one in threading.enumerate() if not one.daemon and one not in before]
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in left)


def _leaving_soon(result: object) -> threading.Timer:
    leaving = threading.Timer(2 * LEAVE_AFTER, _leave, (result,))
    leaving.daemon = True
    return leaving


def _leave(result: object) -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(result if isinstance(result, int) else 0)
