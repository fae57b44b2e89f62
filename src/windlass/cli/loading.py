"""From what the user typed to an application."""

import importlib
import os
import sys

import click

from windlass.app import App
from windlass.cli.options import single_option
from windlass.model.errors import ConfigurationError

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
