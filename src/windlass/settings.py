"""What can be configured, with defaults, checked once at start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from windlass.model.errors import ConfigurationError
from windlass.model.limits import LONGEST_RETENTION, LONGEST_SECONDS, shown
from windlass.model.task import Retention
from windlass.store.sqlfiles import checked_schema

PREFIX = "WINDLASS_"
# Read elsewhere, so not settings: the URL and the application of the command line,
# and the interpreter that benchmark harnesses are told to use.
NOT_SETTINGS = {"WINDLASS_DATABASE_URL", "WINDLASS_APP", "WINDLASS_PYTHON"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting; durations are seconds. `WINDLASS_<NAME>` sets it from the environment."""

    schema: str = "windlass"
    auto_migrate: bool = True
    pool_size: int = 8
    direct_url: str | None = None
    pooler: bool = False

    max_payload_bytes: int = 1024 * 1024
    max_result_bytes: int = 1024 * 1024
    retention: float = 7 * 86400.0
    dead_retention: float = 30 * 86400.0
    idempotency_retention: float = 7 * 86400.0
    dead_limit: int = 0
    dead_archive: str = ""
    unknown_type_grace: float = 0.0

    concurrency: int = 100
    lease: float = 30.0
    heartbeat: float = 10.0
    leader_term: float = 15.0
    sweep: float = 5.0
    poll: float = 1.0
    ageing: float = 6.0
    shutdown_timeout: float = 30.0
    buffer: int = 1500
    buffer_bytes: int = 16 * 1024 * 1024
    buffer_seconds: float = 1.0
    processes: int = 0
    process_tasks: int = 1000
    process_age: float = 3600.0
    process_memory: int = 0
    stuck_threads: int = 20

    error_rules: str = ""
    service: str = ""

    health_port: int = 0
    health_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), field.type)
        checked_schema(self.schema)
        if self.heartbeat * 2 > self.lease:
            raise ConfigurationError(
                f"lease ({self.lease:g}s) must be at least twice heartbeat ({self.heartbeat:g}s); "
                "raise lease or lower heartbeat"
            )
        if 0 < self.unknown_type_grace < self.lease:
            # A worker that lives may be missing from the list until its next sign of life.
            raise ConfigurationError(
                f"unknown_type_grace ({self.unknown_type_grace:g}s) must be at least lease "
                f"({self.lease:g}s), or 0 to let tasks of unknown types wait; raise it"
            )

    def kept_for(self) -> Retention:
        """How long ended tasks are kept."""
        return Retention(
            ended=timedelta(seconds=self.retention),
            dead=timedelta(seconds=self.dead_retention),
            keys=timedelta(seconds=self.idempotency_retention),
        )

    @classmethod
    def load(
        cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ
    ) -> "Settings":
        """Settings from keyword arguments, else from the environment, else by default."""
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX) or variable in NOT_SETTINGS:
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in kinds:
                raise ConfigurationError(f"{variable} is not a setting; settings are: {_names()}")
            values[name] = _parse(variable, text, kinds[name])
        for name, value in given.items():
            if name not in kinds:
                raise ConfigurationError(f"'{name}' is not a setting; settings are: {_names()}")
            is_duration = isinstance(value, timedelta)
            values[name] = value.total_seconds() if is_duration else value
        return cls(**values)


def _names() -> str:
    return ", ".join(field.name for field in fields(Settings))


def _parse(variable: str, text: str, kind: str) -> Any:
    try:
        if "bool" in kind:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if "int" in kind:
            return int(text)
        if "float" in kind:
            return float(text)
    except (ValueError, KeyError):
        wanted = next(name for name in ("bool", "int", "float") if name in kind)
        raise ConfigurationError(f"{variable}={text!r} is not a valid {wanted}") from None
    return text


def _check(name: str, value: Any, kind: Any) -> None:
    text = str(kind)
    if "bool" in text:
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name}={shown(value)} must be True or False")
    elif "int" in text or "float" in text:
        whole = "int" in text
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        least = _LEAST.get(name, 0)
        most = _MOST.get(name, _LARGEST if whole else LONGEST_SECONDS)
        if not is_number or not least <= value <= most:
            unit = "an integer" if whole else "seconds"
            raise ConfigurationError(
                f"{name}={shown(value)} must be {unit}, from {least} to {most:.0f}"
            )
    elif not isinstance(value, str) and (value is not None or "None" not in text):
        # Not the value: there may be a password in it.
        raise ConfigurationError(f"{name} is of type {type(value).__name__}; give a string")


_LEAST = {
    "concurrency": 1,
    "pool_size": 2,
    "max_payload_bytes": 2,
    "max_result_bytes": 2,
    "lease": 0.5,
    "heartbeat": 0.1,
    "leader_term": 0.5,
    "sweep": 0.1,
    "poll": 0.02,
    "buffer_seconds": 0.01,
    "buffer_bytes": 1,
}

_LARGEST = 2**31 - 1  # of an integer in the database
_MONTH = 30 * 86_400.0  # the database counts how long to wait for a lock in milliseconds
_MOST = {
    "concurrency": 100_000,
    "pool_size": 1_000,
    # A number of two characters takes twelve bytes as jsonb, which holds a quarter of a gigabyte.
    "max_payload_bytes": 32 * 1024 * 1024,
    "max_result_bytes": 32 * 1024 * 1024,
    "retention": LONGEST_RETENTION,
    "dead_retention": LONGEST_RETENTION,
    "idempotency_retention": LONGEST_RETENTION,
    "lease": _MONTH,
    "heartbeat": _MONTH,
    "leader_term": _MONTH,
    "sweep": _MONTH,
    "poll": _MONTH,
    "unknown_type_grace": _MONTH,
    "ageing": _MONTH,  # for each point of priority, and there are a hundred
    "shutdown_timeout": _MONTH,
    "buffer": 100_000,
    "buffer_bytes": 2**40,
    "buffer_seconds": _MONTH,
    "processes": 1_000,
    "process_age": _MONTH,
    "process_memory": 2**50,
    "health_port": 65535,
}
