"""Workers of the command line and their processes: what they enqueue, and that none is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from acceptance.expiry import expire_claims
from acceptance.probes import fetch
from acceptance.processes import program
from acceptance.processes.looking import WITHIN, is_alive, until
from acceptance.quick import QUICK
from faults.processes import WorkerProcess
from faults.processes import until as wait_until
from windlass import App, TaskState
from windlass.model.task import TaskFilter

PROGRAM = "acceptance.processes.program:app"
Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Start]:
    started: list[WorkerProcess] = []

    def start(*arguments: str, **settings: Any) -> WorkerProcess:
        started.append(
            WorkerProcess(
                PROGRAM,
                url=database_url,
                log=tmp_path / "log",
                folder=tmp_path,
                settings=QUICK | settings,
                arguments=arguments,
            )
        )
        return started[-1]

    yield start
    for worker in started:
        worker.end()


def processes_of(folder: Path) -> list[int]:
    """The processes in which handlers run, and what they have started."""
    return [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]


def handlers_of(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.pids")]


def children_of(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


@pytest.mark.parametrize("name", ["split", "split_by_library"])
async def test_a_handler_enqueues_from_its_process(
    database_url: str, start: Start, name: str
) -> None:
    worker = start()
    async with App(database_url) as app, asyncio.timeout(WITHIN):
        ids = await (await app.enqueue(name, {"numbers": [1, 2, 3]})).result()
        assert [await app.handle(task_id).result() for task_id in ids] == [1, 2, 3]
    assert worker.stop() == 0, worker.said()


async def test_an_enqueue_from_a_process_carries_the_fence(
    database_url: str, start: Start, tmp_path: Path
) -> None:
    start(heartbeat=300, lease=600)  # so that the process is not killed meanwhile
    async with App(database_url) as app, asyncio.timeout(WITHIN):
        handle = await app.enqueue("outlive", {"folder": str(tmp_path)})
        while (await handle.get()).status is not TaskState.RUNNING:
            await asyncio.sleep(0.02)
        await expire_claims(app)
        await (await app.store()).rescue(10)
        (tmp_path / "lost").touch()
        await until((tmp_path / "refused").exists)
        assert (await (await app.store()).tasks(TaskFilter(type="child"))).records == []


async def test_a_killed_worker_leaves_no_process_behind(
    database_url: str, start: Start, tmp_path: Path
) -> None:
    worker = start()
    async with App(database_url) as app, asyncio.timeout(WITHIN):
        for keeps_lock in (False, True):
            await app.enqueue("endless", {"folder": str(tmp_path), "keeps_lock": keeps_lock})
        await until(lambda: len(processes_of(tmp_path)) == 4)
        beside = children_of(worker.pid)
        assert len(beside) > 2  # those of the handlers, and who ends them
        worker.send(signal.SIGKILL)
        await until(lambda: not any(map(is_alive, [*processes_of(tmp_path), *beside])))


async def test_a_worker_that_is_told_to_end_twice_leaves_no_process_behind(
    database_url: str, start: Start, tmp_path: Path
) -> None:
    worker = start()
    async with App(database_url) as app, asyncio.timeout(WITHIN):
        handle = await app.enqueue("endless", {"folder": str(tmp_path)})
        await until(lambda: len(processes_of(tmp_path)) == 2)
        beside = children_of(worker.pid)
        worker.send(signal.SIGTERM)
        await until(lambda: worker.has_said("worker.stopping"))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.said()

        await until(lambda: not any(map(is_alive, [*processes_of(tmp_path), *beside])))
        record = await handle.get()
        assert (record.status, record.attempts) == (TaskState.PENDING, 0)


async def test_metrics_tell_of_processes(
    database_url: str, start: Start, tmp_path: Path, port: int
) -> None:
    worker = start(health_port=port)
    await until(lambda: worker.has_said("worker.started"))
    async with App(database_url) as app, asyncio.timeout(WITHIN):
        await app.enqueue("endless", {"folder": str(tmp_path)})
        await until(lambda: len(processes_of(tmp_path)) == 2)
        shown = (await asyncio.to_thread(fetch, port, "/metrics"))[1].decode()
        assert "windlass_processes 2.0" in shown
        assert "windlass_processes_busy 1.0" in shown

        os.kill(handlers_of(tmp_path)[0], signal.SIGKILL)
        await until(lambda: worker.has_said("process.died"))
        shown = (await asyncio.to_thread(fetch, port, "/metrics"))[1].decode()
        assert 'windlass_process_restarts_total{reason="died"} 1.0' in shown


async def test_an_application_in_a_test_does_not_reach_its_own_database_from_a_process(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nowhere")
    with program.app.kept_at(database_url):
        async with program.app as app, asyncio.timeout(WITHIN):
            handle = await program.split.enqueue([1, 2])
            await app.run_worker(until_idle=True)
            assert len(await handle.result()) == 2

    with program.app.kept_at("memory:"):
        async with program.app as app, asyncio.timeout(WITHIN):
            handle = await program.split.options(max_attempts=1).enqueue([1, 2])
            await app.run_worker(until_idle=True)
            assert "'memory:' cannot be reached" in str((await handle.get()).last_error)


def test_a_worker_without_such_tasks_pays_nothing() -> None:
    code = """
import asyncio, sys
from windlass import App
app = App("memory:")
@app.task
async def work() -> None: ...
asyncio.run(app.run_worker(until_idle=True))
assert "multiprocessing" not in sys.modules, "multiprocessing was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


MAIN = """
import asyncio, os
from windlass import App, Retry, TaskFailed

app = App("memory:", processes=1)

@app.task(run="process")
def pid() -> int:
    return os.getpid()

@app.task
async def child() -> None: ...

@app.task(run="process", retry=1)
def enqueue(detached: bool) -> None:
    child.options(detached=detached).enqueue_sync()

@app.task(run="process", retry=Retry(max_attempts=3, base=0, when=lambda error: "again" in str(error)))
def fail(text: str) -> None:
    raise OSError(text)

async def main() -> None:
    async with app.worker():
        assert await (await pid.enqueue()).result(60) != os.getpid()
        for detached in (True, False):
            try:
                await (await enqueue.enqueue(detached)).result(60)
            except TaskFailed as error:
                assert "'memory:' cannot be reached" in str(error), error
            else:
                raise AssertionError("it was enqueued to nowhere")
        for text, attempts in (("again", 3), ("never", 1)):
            handle = await fail.enqueue(text)
            try:
                await handle.result(60)
            except TaskFailed:
                assert (await handle.get()).attempts == attempts

if __name__ == "__main__":
    asyncio.run(main())
    print("done")
"""


def test_tasks_of_a_script_run_in_processes_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MAIN)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_tasks_that_were_typed_in_are_refused_with_the_way_out() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 1
    assert "put it into a module and import that" in done.stderr


LEFT = """
import asyncio, logging, sys, time
from windlass import App

app = App("memory:", processes=1, shutdown_timeout=600)

@app.task(run="process")
def hang() -> None:
    open(sys.argv[1], "w").close()
    time.sleep(600)

async def main() -> None:
    async with app.worker():
        await hang.enqueue()
        await asyncio.Event().wait()

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main())
"""


def test_a_program_that_is_interrupted_twice_does_not_wait_for_its_processes(
    tmp_path: Path,
) -> None:
    script, begun, log = (tmp_path / name for name in ("left.py", "begun", "log"))
    script.write_text(LEFT)
    with log.open("w") as said:
        left = subprocess.Popen([sys.executable, script, begun], stderr=said)
    wait_until(begun.exists)
    left.send_signal(signal.SIGINT)
    wait_until(lambda: "worker.stopping" in log.read_text())
    left.send_signal(signal.SIGINT)

    assert left.wait(WITHIN) != 0
