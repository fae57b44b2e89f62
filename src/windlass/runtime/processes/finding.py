"""Where the function of a task is found again in another process: by its module and its name."""

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from windlass.model.errors import ConfigurationError
from windlass.registry import TaskDefinition, TaskOptions, define

MAIN = "__main__"


class Place(NamedTuple):
    """Where a function is."""

    module: str
    qualname: str


class Program(NamedTuple):
    """What a process imports before it is asked for anything."""

    application: str  # module:name, if it can be found
    url: str  # of the database that the worker uses
    modules: tuple[str, ...]  # those of its handlers

    def load(self) -> None:
        """Import all of it. What cannot be imported is told by each task that needs it."""
        for module in (self.application.partition(":")[0], *self.modules):
            with suppress(BaseException):  # also an exit
                import_module(module)

    def app(self) -> Any:
        """The application, if it is there."""
        module, _, name = self.application.partition(":")
        return getattr(sys.modules.get(module), name, None)


class Found(NamedTuple):
    """A task in the process that runs it."""

    definition: TaskDefinition
    app: Any  # the application that it belongs to, if that is known


def place_of(definition: TaskDefinition) -> Place:
    """Return where the function of a task is; ConfigurationError if no other process would find it."""
    function = definition.function
    place = Place(str(function.__module__), function.__qualname__)
    said = f"task '{definition.name}': run='process' needs a function that is found by its name"
    if "<" in place.qualname:  # <locals>, <lambda>
        raise ConfigurationError(
            f"{said}, and {place.module}.{place.qualname} is made while another one runs; "
            "define it at the top of a module"
        )
    if place.module == MAIN and not _has_file(sys.modules[MAIN]):
        raise ConfigurationError(
            f"{said}, and {place.qualname} was typed into a program without a file; "
            "put it into a module and import that"
        )
    try:
        found = _look(place)
    except (ImportError, AttributeError):
        found = None
    if found is not function and getattr(found, "definition", None) is not definition:
        raise ConfigurationError(
            f"{said}, and {place.module}.{place.qualname} is something else; "
            "give the function a name of its own at the top of its module"
        )
    return place


def _has_file(module: ModuleType) -> bool:
    return getattr(module, "__spec__", None) is not None or hasattr(module, "__file__")


def find(place: Place, name: str, app: Any) -> Found:
    """Return a task of an application, or what its module has under its name."""
    registry = getattr(app, "registry", None)
    definition = None if registry is None else registry.find(name)
    if definition is not None:
        return Found(definition, app)
    found = _look(place)
    if isinstance(getattr(found, "definition", None), TaskDefinition):
        return Found(found.definition, found.outlet)
    # Only its arguments matter here: what follows its end is the worker's.
    return Found(define(found, TaskOptions(name=name), lambda *_: None), None)


def _look(place: Place) -> Any:
    found: Any = import_module(place.module)
    for name in place.qualname.split("."):
        found = getattr(found, name)
    return found
