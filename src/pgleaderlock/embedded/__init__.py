"""A private PostgreSQL server for first steps, demonstrations and tests.

    with EmbeddedPostgres() as server:
        lock = LeaderLock.for_name(server.dsn, "billing")

The first user of a data folder starts the server, and later ones join it. The server stops when the last user has
ended, even if that one was killed. It listens on a socket that only its owner may use and, on request, on loopback with
a password. It is not meant for production: all nodes must be on one machine, and there is no backup.

Starting blocks: do it outside of a running event loop, or in a thread. `binaries` finds PostgreSQL's programs, `folder`
creates the server's folder, `reaper` finds and stops its processes.

Must never import a database driver, never end a process that it has not recognised as the server of its own data
folder, and never put a password into a message.
"""

import contextlib
import fcntl
import os
import random
import select
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pgleaderlock.embedded import reaper
from pgleaderlock.embedded.binaries import EmbeddedError, EmbeddedUnavailable, Programs, find_binaries
from pgleaderlock.embedded.folder import (
    SOCKET_PORT,
    SUPERUSER,
    Folder,
    check_settings,
    default_folder,
    try_lock,
)
from pgleaderlock.errors import ConfigurationError

__all__ = ["EmbeddedError", "EmbeddedPostgres", "EmbeddedUnavailable", "find_binaries"]

StopMode = Literal["fast", "immediate"]

START_TIMEOUT_S = 60.0
ORPHANS_TIMEOUT_S = 15.0
TOOL_TIMEOUT_S = 60.0
REAPER_TIMEOUT_S = 10.0
PORT_TRIES_MAX = 10
# Below the kernel's range for the ports of outgoing connections, so that a stopped server's port stays free until the
# server is started again.
FREE_PORTS = range(20_000, 32_000)
LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 20
LAST_USER_TRIES_MAX = 3


class EmbeddedPostgres:
    """One user of a private server.

    `data_dir` is the server's folder (default: one in the user's data folder), `port` a port on 127.0.0.1 (0: any free
    one; None: socket only), `settings` are PostgreSQL settings for a server that this object starts (one that it joins
    keeps its own), `binaries` the folder of PostgreSQL's programs (default: `find_binaries()`).
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> None:
        if port is not None and not 0 <= port <= 65535:
            raise ConfigurationError(f"port={port} is not a port: 0 for any free one, or 1 to 65535.")
        self._settings = check_settings(settings or {})
        self._wanted_port = port
        self._programs = Programs.prepare(binaries)
        path = data_dir if data_dir is not None else default_folder(self._programs)
        # Resolve only the parent, so that a symbolic link as the last part is noticed and refused.
        self._folder = Folder(path.parent.resolve() / path.name, self._programs)
        self._users_lock: int | None = None
        self._joined_in = 0
        self._port: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- What it is

    @property
    def data_dir(self) -> Path:
        """The server's folder. PostgreSQL's own data directory is `data` in it."""
        return self._folder.path

    @property
    def log_path(self) -> Path:
        """The server's log."""
        return self._folder.log

    @property
    def version(self) -> str:
        """The version of the programs."""
        return self._programs.version

    @property
    def postmaster_pid(self) -> int:
        """The pid of the postmaster, the server's first process."""
        return self._running().pid

    @property
    def dsn(self) -> str:
        """The connection string: over TCP with a password if a port was asked for, otherwise through the socket."""
        if self._wanted_port is None:
            return self.socket_dsn
        self._require_joined()
        return (
            f"host=127.0.0.1 port={self._port} user={SUPERUSER} password={self._folder.password}"
            " dbname=postgres sslmode=disable"
        )

    @property
    def socket_dsn(self) -> str:
        """The connection string through the socket, which only the owner can use."""
        self._require_joined()
        host = str(self._folder.socket_folder()).replace("\\", "\\\\").replace("'", "\\'")
        return f"host='{host}' port={self._port or SOCKET_PORT} user={SUPERUSER} dbname=postgres"

    def _require_joined(self) -> None:
        if self._users_lock is None:
            raise EmbeddedError("The embedded server has not been started by this object. Call start(), or use `with`.")

    def _running(self) -> reaper.Postmaster:
        server = reaper.find_postmaster(self._folder.data)
        if server is None:
            raise EmbeddedError(f"The server in {self._folder.path} is not running. Call start().")
        return server

    # --- Joining and leaving

    def start(self) -> None:
        """Starts the server, or joins the running one. Returns when it is ready. May be called repeatedly."""
        self._folder.make()
        with self._folder.starting() as lock:
            joined_here = self._users_lock is None
            if self._users_lock is None:
                self._users_lock = self._folder.open_lock(reaper.USERS_LOCK)
                self._joined_in = os.getpid()
                # This waits only for a moment: a process that holds this lock exclusively also holds start.lock, or is
                # a reaper that releases it at once.
                fcntl.flock(self._users_lock, fcntl.LOCK_SH)
            try:
                self._ensure_running(lock)
            except BaseException:
                if joined_here:
                    self._leave()
                raise

    def close(self) -> None:
        """Leaves the server. If this was its last user, the server is down on return. May be called repeatedly."""
        if self._users_lock is None:
            return
        if self._joined_in != os.getpid():
            # In a forked child: only the parent counts as a user of the server.
            os.close(self._users_lock)
            self._users_lock = None
            return
        with self._folder.starting():
            self._leave()

    def _leave(self) -> None:
        """Ends this object's use of the server, and stops the server if it was the last user. Needs start.lock."""
        assert self._users_lock is not None
        try:
            for _ in range(LAST_USER_TRIES_MAX):
                if try_lock(self._users_lock, fcntl.LOCK_EX):
                    self._stop("fast")
                    reaper.forget_socket_folder(self._folder.path)
                    return
                # Another user holds it, or, for a moment, the reaper, which then waits for the start.lock that we hold.
                # Waiting for a shared lock tells the two apart: after that, only users can hold it.
                fcntl.flock(self._users_lock, fcntl.LOCK_SH)
        finally:
            os.close(self._users_lock)
            self._users_lock = None

    # --- For tests

    def stop(self, mode: StopMode = "fast") -> None:
        """Stops the server for all its users; `start()` starts it again. "immediate" is a crash with recovery."""
        self._require_joined()
        with self._folder.starting():
            self._stop(mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stops the server and starts it again, on the same port."""
        self._require_joined()
        with self._folder.starting() as lock:
            self._stop(mode)
            self._ensure_running(lock)

    def promote(self) -> None:
        """Promotes a replica to a primary."""
        self._running()
        done = self._programs.run(
            "pg_ctl", ["promote", "-w", "-s", "-t", "30", "-D", str(self._folder.data)], timeout_s=TOOL_TIMEOUT_S
        )
        if done.returncode != 0:
            raise EmbeddedError(f"The replica could not be promoted: {done.stdout.strip()}\n{self._log_tail(0)}")

    def make_replica(self, data_dir: Path) -> "EmbeddedPostgres":
        """Starts a streaming replica with its own folder and port. This server must have a port, too."""
        self._require_joined()
        if self._wanted_port is None:
            raise ConfigurationError("A replica connects over TCP: start this server with port=0.")
        replica = EmbeddedPostgres(data_dir, port=0, settings=self._settings, binaries=self._programs.binaries)
        replica._clone(self._port or 0, self._folder.password)
        replica.start()
        return replica

    def _clone(self, port: int, password: str) -> None:
        self._folder.make()
        with self._folder.starting() as lock:
            if self._folder.data.exists():
                raise EmbeddedError(f"{self._folder.path} holds a server already. Name another folder for the replica.")

            def fill(scratch: Path) -> subprocess.CompletedProcess[str]:
                source = f"host=127.0.0.1 port={port} user={SUPERUSER} sslmode=disable"
                arguments = ["-D", str(scratch), "-d", source, "-R", "-X", "stream", "-c", "fast", "--no-sync"]
                environment = {"PGPASSWORD": password}
                return self._programs.run(
                    "pg_basebackup", arguments, timeout_s=TOOL_TIMEOUT_S, pass_fds=(lock,), extra_env=environment
                )

            self._folder.fill_data(fill)
            self._folder.keep_password(password)

    # --- The server

    def _stop(self, mode: StopMode) -> None:
        if not reaper.stop_postmaster(self._folder.data, mode):
            raise EmbeddedError(f"The server in {self._folder.path} does not stop.\n{self._log_tail(0)}")

    def _ensure_running(self, lock: int) -> None:
        server = reaper.find_postmaster(self._folder.data)
        self._ensure_reaper()
        if server is None:
            self._folder.initialise(lock)
            self._clear_remains()
            server = self._launch()
        elif not _accepts(server):
            server = self._wait_until_ready(None, 0)
        if self._wanted_port is not None and (not server.address or self._wanted_port not in (0, server.port)):
            listens = f"on port {server.port}" if server.address else "on its socket only"
            raise EmbeddedError(
                f"The server in {self._folder.path} is running and listens {listens}, not as asked."
                " Ask for the same, or name another data folder."
            )
        self._port = server.port

    def _ensure_reaper(self) -> None:
        # Start the reaper before the server, so that the server is never left behind if this process ends.
        mark = self._folder.open_lock(reaper.REAPER_LOCK)
        try:
            if not try_lock(mark, fcntl.LOCK_EX):
                return
            # The lock belongs to the open file, which the reaper inherits: so it is held without a gap until the
            # reaper's end.
            command = [sys.executable, "-I", "-S", reaper.__file__, str(self._folder.path), str(mark)]
            subprocess.run(
                command,
                check=True,
                timeout=REAPER_TIMEOUT_S,
                pass_fds=(mark,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise EmbeddedError(f"The process that stops the embedded server could not be started: {error}") from error
        finally:
            os.close(mark)

    def _clear_remains(self) -> None:
        """Clears what a killed server has left, so that a new one can start."""
        # The children of a killed postmaster notice its death and end; a new server refuses to start before that.
        deadline = time.monotonic() + ORPHANS_TIMEOUT_S
        for orphan in reaper.processes_in(self._folder.data):
            if not reaper.wait_for_exit(orphan, self._folder.data, max(0.0, deadline - time.monotonic())):
                raise EmbeddedError(
                    f"Process {orphan} of a killed server in {self._folder.path} is still at work."
                    " End it and try again."
                )
        # PostgreSQL removes a pid file whose process is gone. But if the pid belongs to another process by now (after a
        # crash of the machine) or to a zombie, it refuses to start. On Linux, the loop above has shown that no process
        # works in the data directory.
        if sys.platform != "linux":
            return
        socket_locks = self._folder.socket_folder().glob(".s.PGSQL.*.lock")
        for pid_file in (self._folder.data / "postmaster.pid", *socket_locks):
            with contextlib.suppress(OSError, ValueError, IndexError):
                os.kill(int(pid_file.read_text(encoding="utf-8").splitlines()[0]), 0)
                pid_file.unlink()

    def _launch(self) -> reaper.Postmaster:
        # A restarted server keeps its port: otherwise the DSN that users already have would be wrong.
        if self._wanted_port is None or self._wanted_port > 0 or self._port:
            return self._launch_on(self._port or self._wanted_port if self._wanted_port is not None else None)
        for remaining in reversed(range(PORT_TRIES_MAX)):
            port = _free_port()
            try:
                return self._launch_on(port)
            except EmbeddedError:
                # Another process took the port between our check and the server's start.
                if remaining == 0 or not _port_taken(port):
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _launch_on(self, port: int | None) -> reaper.Postmaster:
        self._folder.configure(self._settings, port)
        launching = self._folder.path / reaper.LAUNCHING
        launching.touch(mode=0o600)
        log = self._folder.open_log()
        # Each process of the server inherits the writing end, so the reading end shows when all of them have ended.
        alive, inherited = os.pipe()
        try:
            log_begin = os.fstat(log).st_size
            options = shlex.join(["-c", f"config_file={self._folder.conf / 'postgresql.conf'}"])
            # pg_ctl starts the server in a new session, so that our Ctrl-C does not reach it. It passes -D to a shell
            # in double quotes, which a $ or a quote in the path would break: hence PGDATA.
            try:
                self._programs.run(
                    "pg_ctl",
                    ["start", "-W", "-s", "-o", options],
                    timeout_s=TOOL_TIMEOUT_S,
                    stdout=log,
                    pass_fds=(inherited,),
                    extra_env={"PGDATA": str(self._folder.data)},
                )
            finally:
                os.close(inherited)
            return self._wait_until_ready(alive, log_begin)
        finally:
            os.close(alive)
            os.close(log)
            launching.unlink(missing_ok=True)

    def _wait_until_ready(self, alive: int | None, log_begin: int) -> reaper.Postmaster:
        deadline = time.monotonic() + START_TIMEOUT_S
        poll = select.poll()
        if alive is not None:
            poll.register(alive, select.POLLIN)
        # Polling, because only a line in the pid file shows that a server is ready.
        while time.monotonic() < deadline:
            server = reaper.find_postmaster(self._folder.data)
            if server is not None and _accepts(server):
                return server
            if poll.poll(reaper.POLL_S * 1000) or (alive is None and server is None):
                raise EmbeddedError(f"The server in {self._folder.path} did not start.\n{self._log_tail(log_begin)}")
        raise EmbeddedError(
            f"The server in {self._folder.path} was not ready after {START_TIMEOUT_S:.0f} s."
            f"\n{self._log_tail(log_begin)}"
        )

    def _log_tail(self, begin: int) -> str:
        try:
            with self._folder.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(begin, end - LOG_TAIL_BYTES))
                text = log.read(LOG_TAIL_BYTES).decode(errors="replace")
        except FileNotFoundError:
            text = ""
        with contextlib.suppress(OSError):
            text = text.replace(self._folder.password, "********")
        lines = text.strip().splitlines()[-LOG_TAIL_LINES:]
        return f"The end of {self._folder.log}:\n" + "\n".join(lines or ["(empty)"])


def _accepts(server: reaper.Postmaster) -> bool:
    # "standby" is a replica that is configured not to accept connections: it is ready, too.
    return server.status in ("ready", "standby")


def _free_port() -> int:
    for port in random.sample(FREE_PORTS, k=100):
        if not _port_taken(port):
            return port
    raise EmbeddedError(f"No free port on 127.0.0.1 between {FREE_PORTS.start} and {FREE_PORTS.stop}. Name one.")


def _port_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As in PostgreSQL: old connections on this port (TIME_WAIT) do not prevent listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
