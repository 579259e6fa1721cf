"""Finds, watches and stops the embedded server's processes; run as a script, it is the reaper.

The reaper is a small detached process, one per server. It sleeps in `flock` until the last user of the server has
ended, by itself or killed, and then stops the server. `EmbeddedPostgres` uses the same functions.

Must never import anything of pgleaderlock: the reaper is started by the path of this file, so that it costs little
memory and does not load a database driver. Must never signal a process that it has not recognised as the postmaster of
its own data directory.
"""

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Postmaster", "find_postmaster", "forget_socket_folder", "processes_in", "stop_postmaster", "wait_for_exit"]

START_LOCK = "start.lock"
USERS_LOCK = "users.lock"
REAPER_LOCK = "reaper.lock"
LAUNCHING = "launching"
DATA = "data"
RUN = "run"
SOCKET_FOLDER = "socket-folder"

FAST_STOP_TIMEOUT_S = 30.0
IMMEDIATE_STOP_TIMEOUT_S = 10.0
# How long a server may take to write its pid file after an interrupted launch. It usually takes a few milliseconds.
LAUNCH_SHOWS_WITHIN_S = 5.0
POLL_S = 0.005

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Postmaster:
    """The contents of a running server's pid file. An empty address means that it does not use TCP."""

    pid: int
    port: int
    address: str
    status: str


def find_postmaster(data: Path) -> Postmaster | None:
    """The running server of this data directory, or None. A pid file left by a crash does not count."""
    try:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        pid = int(lines[0])
    except (FileNotFoundError, NotADirectoryError, ValueError, IndexError):
        return None
    if pid <= 1 or not _works_in(pid, data):
        return None
    lines += [""] * (8 - len(lines))
    port = int(lines[3]) if lines[3].strip().isdigit() else 0
    return Postmaster(pid=pid, port=port, address=lines[5].strip(), status=lines[7].strip())


def processes_in(data: Path) -> list[int]:
    """Every live process of the server of this data directory, the postmaster's orphans too (Linux; elsewhere none)."""
    if not _PROC.is_dir():
        return []
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and _works_in(int(entry.name), data)]


def _works_in(pid: int, data: Path) -> bool:
    # The working directory of every server process is its data directory. That distinguishes it from another process
    # with the same pid after a crash, and from a zombie, which has no working directory.
    if _PROC.is_dir():
        try:
            # The name ends in " (deleted)" if the programs were replaced while the server was running.
            program = Path(f"/proc/{pid}/exe").readlink().name.removesuffix(" (deleted)")
            return program == "postgres" and Path(f"/proc/{pid}/cwd").samefile(data)
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def wait_for_exit(pid: int, data: Path, timeout_s: float) -> bool:
    """Waits until the process has ended; False on a timeout."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(OSError, AttributeError):
        watch = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(watch, select.POLLIN)
            if _works_in(pid, data):
                poll.poll(timeout_s * 1000)
        finally:
            os.close(watch)
    # Without such a watch in the kernel, nothing signals the end of a process that is not our child: poll. With it,
    # this loop ends at its first check.
    while _works_in(pid, data):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def stop_postmaster(data: Path, mode: str = "fast", timeout_s: float = FAST_STOP_TIMEOUT_S) -> bool:
    """Stops the server and waits for its end. A fast stop that takes too long becomes an immediate one."""
    server = find_postmaster(data)
    if server is None:
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGINT if mode == "fast" else signal.SIGQUIT)
    if wait_for_exit(server.pid, data, timeout_s):
        return True
    if mode == "fast":
        return stop_postmaster(data, "immediate", IMMEDIATE_STOP_TIMEOUT_S)
    return False


def forget_socket_folder(folder: Path) -> None:
    """Removes the separate socket folder, which exists if the path of `folder` cannot be used for a socket."""
    note = folder / SOCKET_FOLDER
    # rmdir only removes an empty folder, so a wrong note does no harm.
    with contextlib.suppress(OSError):
        Path(note.read_text(encoding="utf-8")).rmdir()
    with contextlib.suppress(OSError):
        note.unlink()


def _await_launch(folder: Path) -> None:
    # A starter that was killed after launching the server, before it was ready, leaves its note: the server may still
    # be about to start.
    deadline = time.monotonic() + LAUNCH_SHOWS_WITHIN_S
    while (folder / LAUNCHING).exists() and find_postmaster(folder / DATA) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _reap(folder: Path) -> None:
    users = os.open(folder / USERS_LOCK, os.O_RDWR)
    start = os.open(folder / START_LOCK, os.O_RDWR)
    # The only loop here without a bound: it runs once for each time that the last user left and another one came before
    # we noticed, and it sleeps in the kernel in between.
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)
        # A starter takes start.lock first and users.lock second, so we must not wait for start.lock while we hold
        # users.lock.
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(start, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(start, fcntl.LOCK_UN)
            continue
        _await_launch(folder)
        stop_postmaster(folder / DATA)
        forget_socket_folder(folder)
        return


def main(folder: Path, reaper_lock: int) -> None:
    """Runs the reaper of `folder`. `reaper_lock` is the descriptor of reaper.lock, which the starter has locked."""
    # The starter waits for our first process only, so init adopts the second one, and no zombie is left.
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    try:
        _reap(folder)
    except FileNotFoundError:
        # The whole folder was removed: there is nothing left to stop.
        return
    finally:
        # Release it before start.lock, which is released at the process's end: then a starter sees a working reaper or
        # none.
        os.close(reaper_lock)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
