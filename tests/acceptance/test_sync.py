"""Synchronous callers: scripts, threads, a WSGI server that forks, a REPL, and not a notebook."""

import ast
import asyncio
import inspect
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any

import asyncpg
import pytest

import windlass
from acceptance.quick import QUICK
from windlass import App, WindlassError

STRICT = [sys.executable, "-X", "dev", "-W", "error"]
# In development mode asyncio also tells of what took long, as it may on a busy machine.
DEFINED = """
import logging
logging.getLogger("asyncio").setLevel(logging.ERROR)
from windlass import App

app = App()

@app.task
async def double(n: int) -> int:
    return 2 * n
"""


def run(
    command: list[str], url: str, *, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSTARTUP"}
    return subprocess.run(
        command,
        input=typed,
        env=environment
        | {"PYTHONPATH": str(Path(windlass.__file__).parents[1]), "WINDLASS_DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SCRIPTS = {
    "nothing closed": """
from threading import Thread
threads = [Thread(target=double.enqueue_sync, args=(n,)) for n in range(20)]
for one in threads: one.start()
for one in threads: one.join()
try:
    double.enqueue_sync(1).result_sync(timeout=0.01)
except TimeoutError:
    pass
""",
    "everything closed": """
import asyncio
with app:
    with app:
        double.enqueue_sync(1)
    double.enqueue_sync(1)
async def main():
    async with app:
        await double.enqueue(1)
for _ in range(3):
    asyncio.run(main())
double.enqueue_sync(1)
app.close_sync()
app.close_sync()
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_without_a_warning(name: str, shared_database_url: str) -> None:
    done = run([*STRICT, "-c", DEFINED + SCRIPTS[name]], shared_database_url)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_repl_is_served_by_the_twins(shared_database_url: str) -> None:
    typed = DEFINED + "\nhandle = double.enqueue_sync(4)\nhandle.get_sync().status.value\n"
    done = run([*STRICT, "-i", "-q"], shared_database_url, typed=typed)

    assert done.returncode == 0
    assert done.stdout == "'pending'\n"
    assert done.stderr.replace(">>> ", "").replace("... ", "").strip() == ""


def test_a_repl_with_an_event_loop_awaits(shared_database_url: str) -> None:
    typed = (
        DEFINED
        + "\nhandle = await double.enqueue(4)\n(await handle.get()).status.value\n"
        + "double.enqueue_sync(4)\nawait app.close()\n"
    )
    done = run([sys.executable, "-m", "asyncio"], shared_database_url, typed=typed)

    assert done.returncode == 0
    assert "'pending'" in done.stdout
    assert "would block the running event loop; use: await enqueue()" in done.stderr
    assert "Warning" not in done.stderr


class Notebook:
    """As a kernel runs cells: one event loop, in which every cell runs, with await at its top."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    async def cell(self, text: str) -> None:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(textwrap.dedent(text), "<cell>", "exec", flags, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            await FunctionType(code, self.names)()
        else:
            exec(code, self.names)


async def test_a_notebook_awaits_and_is_told_so() -> None:
    notebook = Notebook()
    await notebook.cell(DEFINED.replace("App()", 'App("memory:")'))
    await notebook.cell("handle = await double.enqueue(4)")
    for wrong, twin in {
        "double.enqueue_sync(4)": r"enqueue_sync\(\) would block .*; use: await enqueue\(\)",
        "handle.result_sync()": r"result_sync\(\) would block .*; use: await result\(\)",
        "app.close_sync()": r"use: await close\(\)",
        "with app: pass": r"with app: would block .*; use: async with app:",
    }.items():
        with pytest.raises(WindlassError, match=twin):
            await notebook.cell(wrong)
    await notebook.cell("""
        import asyncio
        async with app.worker():
            by_thread = await asyncio.to_thread(double.enqueue_sync, 5)
            results = [await handle.result(10), await by_thread.result(10)]
        """)

    assert notebook.names["results"] == [8, 10]
    assert len(await (await notebook.names["app"].store()).queues()) == 0
    await asyncio.to_thread(notebook.names["app"].close_sync)


PREFORK = (
    DEFINED
    + """
import asyncio, json, os, signal, socket, sys, threading
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

first = double.enqueue_sync(0)  # as code at the top of a module may do, before the server forks

class Quiet(WSGIRequestHandler):
    def log_message(self, *_): ...

def application(environ, start_response):
    verb, _, given = environ["PATH_INFO"].strip("/").partition("/")
    if verb == "enqueue":
        answer = double.enqueue_sync(int(given)).id
    else:
        answer = app.handle(given).result_sync(timeout=20)
    start_response("200 OK", [])
    return [json.dumps([os.getpid(), answer]).encode()]

listening = socket.create_server(("127.0.0.1", 0))
port = listening.getsockname()[1]
children = []
for _ in range(3):
    child = os.fork()
    if child:
        children.append(child)
        continue
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.alarm(50)
    server = WSGIServer(("127.0.0.1", port), Quiet, bind_and_activate=False)
    server.socket.close()
    server.socket, server.server_name, server.server_port = listening, "", port
    server.setup_environ()
    server.set_app(application)
    with listening:
        server.serve_forever()

def ask(path):
    with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as answer:
        return json.load(answer)

with ThreadPoolExecutor(6) as callers:
    enqueued = list(callers.map(lambda n: ask(f"enqueue/{n}"), range(30)))
    worker = callers.submit(asyncio.run, app.run_worker(until_idle=True))
    results = list(callers.map(lambda one: ask(f"result/{one[1]}"), enqueued))
    worker.result(30)
own = [first, double.enqueue_sync(100)]
asyncio.run(app.run_worker(until_idle=True))
assert [handle.result_sync(timeout=20) for handle in own] == [0, 200]
assert [result for _, result in results] == [2 * n for n in range(30)]
assert {pid for pid, _ in enqueued} <= set(children), "answered by a child"
for child in children:
    os.kill(child, signal.SIGTERM)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0, 0, 0], codes
listening.close()
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_server_that_forks_serves_from_every_child_and_its_parent_goes_on(
    database_url: str,
) -> None:
    done = run([*STRICT, "-c", PREFORK], database_url)
    said = [line for line in done.stderr.splitlines() if "listener.deaf" not in line]  # by a pooler

    assert (done.returncode, said) == (0, [])


@pytest.mark.needs_direct("a pooler keeps its sessions")
def test_one_app_serves_threads_loops_and_blocks_at_once(database_url: str, sql_url: str) -> None:
    app = App(database_url, **QUICK)

    def plainly(n: int) -> None:
        for _ in range(10):
            assert app.enqueue_sync("work", {"n": n}).created

    def in_blocks(n: int) -> None:
        for _ in range(5):
            with app:  # the last one out closes it, and not under those who come without a block
                assert app.enqueue_sync("work", {"n": n}).created

    def in_a_loop(n: int) -> None:
        async def enqueue() -> None:
            async with app:
                await asyncio.gather(*(app.enqueue("work", {"n": n}) for _ in range(5)))
            await app.enqueue("work", {"n": n})
            await app.close()

        for _ in range(2):
            asyncio.run(enqueue())

    with ThreadPoolExecutor(20) as threads:
        ways = [plainly] * 12 + [in_blocks] * 4 + [in_a_loop] * 4
        for done in [threads.submit(way, n) for n, way in enumerate(ways)]:
            done.result(60)
    app.close_sync()

    async def left() -> int:
        watcher = await asyncpg.connect(sql_url)
        others = (
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        async with asyncio.timeout(10):  # the server takes a moment to notice
            while await watcher.fetchval(others):
                await asyncio.sleep(0.01)
        found: int = await watcher.fetchval("SELECT count(*) FROM windlass.task")
        await watcher.close()
        return found

    assert asyncio.run(left()) == 12 * 10 + 4 * 5 + 4 * 2 * 6


def test_a_block_that_ends_leaves_alone_who_waits_in_another_thread() -> None:
    app = App("memory:")

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    async def is_waiting() -> bool:
        return bool((await app.client())._waiter._waiting)

    handle = double.enqueue_sync(4)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(handle.result_sync, 30)
        while not app.run_sync("is_waiting", is_waiting):
            pass
        with app:
            assert handle.get_sync().status == "pending"
        app.close_sync()
        asyncio.run(app.run_worker(until_idle=True))

        assert waiting.result(30) == 8


async def test_an_app_that_is_closed_in_the_middle_of_a_call_opens_again(
    shared_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(shared_database_url, **QUICK)
    store = await app.store()
    look = store.type_defaults

    async def look_and_close(name: str) -> Any:
        found = await look(name)
        await app.close()
        return found

    monkeypatch.setattr(store, "type_defaults", look_and_close)

    assert (await app.enqueue("unheard")).created
    await app.close()


def test_what_one_loop_closes_stays_open_for_the_others() -> None:
    app = App("memory:")
    handle = app.enqueue_sync("work")

    async def look() -> str:
        async with app:
            await asyncio.to_thread(asyncio.run, app.close())
            await asyncio.to_thread(app.close_sync)
            return (await handle.get()).status.value

    assert asyncio.run(look()) == "pending"
    assert handle.get_sync().status == "pending"
    app.close_sync()


def test_a_wait_that_is_interrupted_is_given_up() -> None:
    done = run(
        [
            *STRICT,
            "-c",
            DEFINED
            + """
import asyncio, os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever began this may ignore it
handle = double.enqueue_sync(1)
async def is_waiting():
    return bool((await app.client())._waiter._waiting)
def interrupt():
    while not app.run_sync("is_waiting", is_waiting):
        pass
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    handle.result_sync(timeout=30)
except KeyboardInterrupt:
    async def waiting():
        others = asyncio.all_tasks() - {asyncio.current_task()}
        names = [one.get_coro().__qualname__ for one in others]
        return [name for name in names if name != "ResultWaiter._look"]
    while app.run_sync("waiting", waiting):  # what was cancelled takes a moment
        pass
    print("given up")
""",
        ],
        "memory:",
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")


def test_a_child_closes_what_it_opened_although_its_parent_was_in_a_call() -> None:
    done = run(
        [
            *STRICT,
            "-c",
            DEFINED
            + """
import os, threading
handle = double.enqueue_sync(1)
waiting = threading.Thread(target=lambda: handle.result_sync(timeout=30), daemon=True)
waiting.start()
async def is_waiting():
    return bool((await app.client())._waiter._waiting)
while not app.run_sync("is_waiting", is_waiting):
    pass
child = os.fork()
if not child:
    double.enqueue_sync(2)
    app.close_sync()
    os._exit(len(app._database._opened))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
handle.cancel_sync()
os._exit(0)
""",
        ],
        "memory:",
    )

    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
