"""A worker put together from what an application says."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from windlass.client import new_task_id, new_task_ids
from windlass.maintenance.archive import Archive
from windlass.maintenance.chores import DeadCare, chores
from windlass.maintenance.leader import Leader
from windlass.model.dead import ReplayRule
from windlass.model.schedule import Schedule
from windlass.model.task import TaskRecord, WorkerInfo
from windlass.registry import Registry
from windlass.runtime.alarms import Alarms
from windlass.runtime.monitor import Monitor
from windlass.runtime.options import OwnProcess, WorkerOptions
from windlass.runtime.processes.options import ProcessOptions, Wear, usable_cores
from windlass.runtime.serving import Serving
from windlass.runtime.worker import Worker
from windlass.settings import Settings
from windlass.store.clock_watch import ClockWatch
from windlass.store.port import Store


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes of a worker find the application, and its store."""

    application: object
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What an application wants to have done beside running its tasks."""

    on_startup: Sequence[Callable[[], Any]]
    on_shutdown: Sequence[Callable[[], Any]]
    on_dead: Sequence[Callable[[TaskRecord], Any]]
    replay_rules: tuple[ReplayRule, ...]
    schedules: tuple[Schedule, ...]
    process: OwnProcess | None


def make_worker(
    store: Store,
    registry: Registry,
    settings: Settings,
    *,
    serving: Serving,
    place: Place,
    wishes: Wishes,
    monitor: Monitor | None,
) -> Worker:
    """Make a worker, and the leader that it may be."""
    from importlib.metadata import version  # noqa: PLC0415 - slow, and only workers need it

    processes = _processes(registry, settings, place)
    info = WorkerInfo(
        id=new_task_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        version=version("windlass"),
        capacity=_capacity(registry, settings.concurrency, processes.size),
        types=registry.names(),
        queues=serving.queues,
        defaults=tuple(one.defaults for one in registry),
    )
    clock = ClockWatch(
        lease=timedelta(seconds=settings.lease), heartbeat=timedelta(seconds=settings.heartbeat)
    )
    alarms = Alarms(store, wishes.on_dead)
    leader = Leader(
        store=store,
        candidate=info.id,
        term=timedelta(seconds=settings.leader_term),
        clock=clock,
        chores=chores(
            store,
            clock,
            sweep=settings.sweep,
            died=alarms.tell,
            care=_dead_care(settings, wishes.replay_rules),
            new_ids=new_task_ids,
            unknown_type_grace=settings.unknown_type_grace,
        ),
    )
    options = WorkerOptions(
        info=info,
        concurrency=settings.concurrency,
        lease=settings.lease,
        heartbeat=settings.heartbeat,
        poll=settings.poll,
        ageing=settings.ageing,
        shutdown_timeout=settings.shutdown_timeout,
        buffer=settings.buffer,
        buffer_bytes=settings.buffer_bytes,
        buffer_seconds=settings.buffer_seconds,
        max_result_bytes=settings.max_result_bytes,
        processes=processes,
        stuck_threads=settings.stuck_threads,
        serving=serving,
        process=wishes.process,
        on_startup=wishes.on_startup,
        on_shutdown=wishes.on_shutdown,
        schedules=wishes.schedules,
        owner=settings.service or _owner(place.application),
    )
    return Worker(
        store=store,
        registry=registry,
        companion=leader,
        clock=clock,
        alarms=alarms,
        options=options,
        monitor=monitor,
    )


def _dead_care(settings: Settings, rules: tuple[ReplayRule, ...]) -> DeadCare:
    folder = settings.dead_archive
    return DeadCare(
        most=settings.dead_limit,
        archive=Archive(Path(folder)) if folder else None,
        rules=rules,
        new_ids=new_task_ids,
    )


def _processes(registry: Registry, settings: Settings, place: Place) -> ProcessOptions:
    if all(one.run != "process" for one in registry):
        return ProcessOptions()
    return ProcessOptions(
        size=min(settings.processes or usable_cores(), settings.concurrency),
        wear=Wear(
            tasks=settings.process_tasks,
            age=settings.process_age,
            memory=settings.process_memory,
        ),
        application=_name_of(place.application),
        url=place.url,
    )


def _capacity(registry: Registry, concurrency: int, processes: int) -> int:
    """How many tasks may run at once: those in processes have slots of their own."""
    kinds = {one.run for one in registry}
    if "process" not in kinds:
        return concurrency
    return processes if kinds == {"process"} else concurrency + processes


def _owner(application: object) -> str:
    """By what name an application owns its schedules; a script is named as if it were imported."""
    module, _, name = _name_of(application).partition(":")
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else ""
    return f"{module}:{name}" if module else ""


def _name_of(application: object) -> str:
    """Where an application is, as `module:name`; empty if no module has it."""
    for module, loaded in list(sys.modules.items()):
        for name, value in list(getattr(loaded, "__dict__", {}).items()):
            if value is application:
                return f"{module}:{name}"
    return ""
