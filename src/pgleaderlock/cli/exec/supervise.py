"""Runs one command in its own process group, and makes sure that the group never outlives us.

    pgleaderlock ────────── go pipe ─────▶ starter, becomes CMD    the leader of the group
        │  └───────────── guard pipe ────▶ guardian                a member of the same group
        └── waits in a thread, sends signals to the group

- **Guardian.** A small shell that ignores every signal and reads from a pipe whose other end only we hold. When our
  process ends for any reason, including SIGKILL, the guardian reads the end of the pipe and kills its own group with
  `kill -KILL 0`, which needs no group number. Until we have reaped the guardian, the kernel cannot reuse the number of
  the group, so our own signals cannot hit another group either.
- **Starter.** CMD must not run before the guardian does. So the leader starts as a short Python program that waits for
  one byte from us and then executes CMD; if its pipe ends before that, it exits. It is not a shell, because a shell
  drops variables such as `A.B` from the environment and adds its own, and because Python can report the errno of exec.
- **CMD is the leader of its group**, not merely a member: `timeout`, and every other program that calls
  `setpgid(0, 0)`, would leave any other group, and would escape us.
- **Waiting** is `waitpid` in a thread: uvloop cannot start a process in a new group, asyncio cannot report a stopped
  one, and pidfds exist on Linux only. A thread works in all these cases. PR_SET_PDEATHSIG is not used: it needs code
  between fork and exec, and it fires when the *thread* that started the child ends.
- **Terminal.** Only the foreground process group of a terminal may read from it, and only that group gets Ctrl-C. So
  CMD's group is made the foreground group, or an interactive command would be stopped at its first read.

What it does not do: a process that leaves the group (`setsid`, an interactive shell's jobs) is out of reach, and so is
a process that runs as another user. If the guardian is killed, the group may outlive us.

It must never run CMD through a shell, give it a descriptor beyond 0, 1 and 2, signal a group after its guardian has
been reaped, or take the terminal away from another group: each change first looks at which group has it.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pgleaderlock._base.logging import get_logger
from pgleaderlock.cli.service import ttou_blocked
from pgleaderlock.errors import PgLeaderLockError

__all__ = [
    "FORWARDED_SIGNALS",
    "CommandError",
    "CommandNotExecutable",
    "CommandNotFound",
    "LentTerminal",
    "Supervised",
    "exec_failure",
    "find_executable",
    "live_members",
]

FORWARDED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)

# Bounds. Starting takes some 15 ms, but a starved machine may take seconds.
START_TIMEOUT_S = 30.0
# SIGKILL works at once, except on a process that waits inside the kernel, for a dead network disk for example.
KILL_TIMEOUT_S = 10.0
REAP_TIMEOUT_S = 5.0
POLL_DELAY_S_MIN, POLL_DELAY_S_MAX = 0.005, 0.1

# Bytes; the starter writes an errno, the guardian one word.
_SAID_BYTES_MAX = 64

# The guardian ignores every signal that can be ignored, so that no signal to the group ends it. SIGCHLD and SIGCONT are
# left out: they do no harm, and ignoring SIGCHLD would change how a shell waits.
_GUARDIAN_IGNORES = sorted(
    signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT},
)
_GUARDIAN = """\
trap '' "$@"
echo armed
exec >/dev/null
while read -r _; do :; done
kill -KILL 0
"""

# Python changes two things at its start that CMD must not see: LC_CTYPE in the C locale, and ignored SIGPIPE/SIGXFSZ.
_STARTER = """\
import os, signal, sys
go, report, lc_ctype, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
os.set_inheritable(go, False)
os.set_inheritable(report, False)
if os.read(go, 1) != b"g":
    os._exit(126)
os.environ.pop("LC_CTYPE", None)
if lc_ctype:
    os.environ["LC_CTYPE"] = lc_ctype[1:]
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.execv(path, sys.argv[5:])
except OSError as error:
    os.write(report, str(error.errno).encode())
os._exit(126)
"""

_STDIN, _STDOUT = 0, 1
_PROC = Path("/proc")
_PS = ("ps", "-A", "-o", "pid=,pgid=,stat=")
_PS_TIMEOUT_S = 5.0
_DEAD = frozenset("ZX")

_log = get_logger("pgleaderlock")


class Supervised:
    """A running command and its process group. Made by `start`; ended by `stop`, or at once by `close`.

    Call all methods on the event loop's thread. `close` (or `stop`, which calls it) must be called in any case: also
    after CMD has ended by itself, because processes that it left in the background would go on without the lock.

    A CMD that is **stopped** never blocks us: we go on running, heartbeats included. If Ctrl-Z stops CMD at a terminal
    that we lent, CMD gets a SIGCONT, because a suspended leader does no work and keeps every standby waiting. It also
    gets one if it was stopped for using the terminal in the background, once the terminal could be lent. A SIGSTOP is
    respected and logged. `stop` sends a SIGCONT, so that a stopped group can handle its SIGTERM.
    """

    def __init__(self, leader: "subprocess.Popen[bytes]") -> None:
        self._loop = asyncio.get_running_loop()
        self._leader = leader
        self._guardian: subprocess.Popen[bytes] | None = None
        self._guard_fd = -1
        self._waiter: threading.Thread | None = None
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._terminal = LentTerminal(leader.pid)
        self._kill_sent = False
        self._closed = False

    @classmethod
    async def start(cls, cmd: Sequence[str], env: Mapping[str, str]) -> "Supervised":
        """Runs `cmd` with exactly the environment `env`, and our standard input, output and error.

        Returns once the kernel has accepted it. Raises `CommandNotFound` (127) or `CommandNotExecutable` (126), and
        then nothing is left running.
        """
        if not cmd:
            raise CommandNotFound("no command given: write it after `--`")
        path = find_executable(cmd[0], env)
        _allow_waiting()
        go_r, go_w = os.pipe()
        report_r, report_w = os.pipe()
        try:
            try:
                self = cls(_start_starter(path, cmd, env, go_r, report_w))
            finally:
                # From here on, only the starter holds these two ends: they are closed when it executes CMD or ends.
                os.close(go_r)
                os.close(report_w)
            try:
                await self._arm()
                self._terminal.lend_at_start()
                _let_go(go_w)
                report = await _read_pipe(report_r, until_eof=True)
            except BaseException:
                self.close()
                raise
        finally:
            os.close(go_w)
            os.close(report_r)
        if report:
            self.close()
            raise exec_failure(path, int(report))
        return self

    @property
    def pid(self) -> int:
        """The pid of CMD, which is the number of its group too."""
        return self._leader.pid

    async def wait(self) -> int:
        """The exit code as a shell gives it: CMD's own, or 128 + n if signal n ended it. Many tasks may wait."""
        return await asyncio.shield(self._exited)

    def forward(self, signum: int) -> None:
        """Sends a signal to the whole group. After `close`: nothing. SIGCONT also lends the terminal again (`fg`)."""
        if signum == signal.SIGCONT:
            self._terminal.lend()
        self._signal_group(signum)

    async def stop(self, grace_s: float) -> bool:
        """Asks the whole group to end (SIGTERM), kills it after `grace_s`, and returns when no process of it lives.

        False if a process still lives `KILL_TIMEOUT_S` after the SIGKILL: it may still act. If this call is cancelled,
        call `close`.
        """
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)  # A stopped process would not see the SIGTERM.
        gone = await self._gone_within(grace_s)
        if not gone:
            _log.warning("command_killed", pid=self.pid, grace_s=grace_s)
            self._kill()
            gone = await self._gone_within(KILL_TIMEOUT_S)
            if not gone:
                _log.error("command_survived_kill", pid=self.pid)
        self.close()
        return gone

    def close(self) -> None:
        """Kills whatever is left of the group, guardian included, and takes the terminal back. May be repeated."""
        if self._closed:
            return
        killed = self._kill_sent or self._leader.returncode is None or self._leader.returncode > 128
        if self._guardian is None:
            # There is no waiting thread either, so Popen still knows whether the pid is that of its child.
            self._leader.kill()
            _reap(self._leader)
        else:
            self._kill()
            if self._waiter is not None:
                self._waiter.join(REAP_TIMEOUT_S)
        # From here on the kernel may reuse the number of the group.
        self._closed = True
        if self._guardian is not None:
            _reap(self._guardian)
        if self._guard_fd >= 0:
            os.close(self._guard_fd)
        self._terminal.take_back(restore_modes=killed)

    async def _arm(self) -> None:
        """Starts the guardian and waits until it is ready to do its work."""
        guard_r, self._guard_fd = os.pipe()
        armed_r, armed_w = os.pipe()
        try:
            try:
                self._guardian = _start_guardian(self.pid, guard_r, armed_w)
            finally:
                os.close(guard_r)
                os.close(armed_w)
            # Not earlier: the thread may reap CMD, and from then on only the guardian keeps the group's number in use.
            self._waiter = threading.Thread(target=self._wait_in_thread, name=f"wait-{self.pid}", daemon=True)
            self._waiter.start()
            if not await _read_pipe(armed_r, until_eof=False):
                raise CommandError("the guardian of the command ended before it was ready; is /bin/sh a POSIX shell?")
        finally:
            os.close(armed_r)

    def _wait_in_thread(self) -> None:
        while True:
            try:
                _, status = os.waitpid(self.pid, os.WUNTRACED)
            except ChildProcessError:
                # Other code of this process has reaped CMD: CMD has ended, but its exit code is lost.
                self._tell_loop(255)
                return
            if os.WIFSTOPPED(status):
                self._tell_loop(-os.WSTOPSIG(status))
                continue
            code = os.waitstatus_to_exitcode(status)
            self._tell_loop(128 - code if code < 0 else code)
            return

    def _tell_loop(self, news: int) -> None:
        """Called in the thread, with an exit code or the negative number of the signal that stopped CMD."""
        if news >= 0:
            self._leader.returncode = news
        # A closed loop raises RuntimeError: there is no task left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_news, news)

    def _on_news(self, news: int) -> None:
        if news >= 0:
            if not self._exited.done():
                self._exited.set_result(news)
            return
        stopped_by = -news
        if (stopped_by == signal.SIGTSTP and self._terminal.lent) or (
            stopped_by in (signal.SIGTTIN, signal.SIGTTOU) and self._terminal.lend()
        ):
            self._signal_group(signal.SIGCONT)
        else:
            _log.warning("command_stopped", pid=self.pid, signal=signal.Signals(stopped_by).name)

    async def _gone_within(self, limit_s: float) -> bool:
        if self._closed:
            return True
        try:
            async with asyncio.timeout(limit_s):
                # While CMD lives, the group cannot be empty: do not search for members.
                await asyncio.shield(self._exited)
                delay_s = POLL_DELAY_S_MIN
                while not await self._nobody_left():
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, POLL_DELAY_S_MAX)
        except TimeoutError:
            return False
        return True

    async def _nobody_left(self) -> bool:
        members = await asyncio.to_thread(live_members, self.pid)
        if members is None:
            # The members are unknown. Only SIGKILL makes sure: no process can ignore it, or fork away from it.
            return self._kill_sent
        assert self._guardian is not None
        return members <= {self._guardian.pid}

    def _kill(self) -> None:
        self._kill_sent = True
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, signum: int) -> None:
        if self._closed:
            return
        try:
            os.killpg(self.pid, signum)
        except OSError as error:
            _log.warning("signal_failed", pid=self.pid, signal=signum, error=error.strerror)


def _start_starter(
    path: str, cmd: Sequence[str], env: Mapping[str, str], go_r: int, report_w: int
) -> "subprocess.Popen[bytes]":
    lc_ctype = "=" + env["LC_CTYPE"] if "LC_CTYPE" in env else ""
    # -I and -S: neither CMD's PYTHON* variables nor anything installed may change what the starter does.
    argv = [sys.executable, "-I", "-S", "-c", _STARTER, str(go_r), str(report_w), lc_ctype, path, *cmd]
    try:
        return subprocess.Popen(argv, env=dict(env), process_group=0, pass_fds=(go_r, report_w))
    except OSError as error:
        raise CommandNotExecutable(f"{path}: cannot be started: {error.strerror}") from error


def _start_guardian(pgid: int, guard_r: int, armed_w: int) -> "subprocess.Popen[bytes]":
    argv = ["/bin/sh", "-c", _GUARDIAN, "pgleaderlock-guardian", *(str(int(signum)) for signum in _GUARDIAN_IGNORES)]
    try:
        return subprocess.Popen(
            argv,
            stdin=guard_r,
            stdout=armed_w,
            stderr=subprocess.DEVNULL,
            process_group=pgid,
            # The guardian keeps none of our outputs or folders open, and needs no environment variable.
            cwd="/",
            env={},
        )
    except OSError as error:
        raise CommandError(f"cannot start the guardian of the command (/bin/sh): {error.strerror}") from error


def _let_go(go_w: int) -> None:
    # The starter may have been killed meanwhile: its exit code shows that.
    with contextlib.suppress(BrokenPipeError):
        os.write(go_w, b"g")


async def _read_pipe(fd: int, *, until_eof: bool) -> bytes:
    """Reads the first bytes from a pipe, or all bytes. Raises `CommandError` after `START_TIMEOUT_S`."""
    loop = asyncio.get_running_loop()
    said = bytearray()
    complete: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        try:
            chunk = os.read(fd, _SAID_BYTES_MAX)
        except BlockingIOError:
            return
        said.extend(chunk)
        if not complete.done() and (not chunk or not until_eof or len(said) >= _SAID_BYTES_MAX):
            complete.set_result(None)

    os.set_blocking(fd, False)
    loop.add_reader(fd, on_readable)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await complete
    except TimeoutError:
        raise CommandError(f"the command could not be started within {START_TIMEOUT_S:g} s") from None
    finally:
        loop.remove_reader(fd)
    return bytes(said)


def _allow_waiting() -> None:
    # A parent may have left SIGCHLD ignored for us. The kernel would then reap our children by itself, and with them
    # exit codes and the number of the group would be lost.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """Waits for a process that has been killed."""
    try:
        process.wait(REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _log.error("process_survived_kill", pid=process.pid)


# --- The command's file


class CommandError(PgLeaderLockError):
    """The command was not run. `exit_code` is what a shell would exit with."""

    exit_code = 126


class CommandNotFound(CommandError):
    """There is no such command."""

    exit_code = 127


class CommandNotExecutable(CommandError):
    """There is such a file, but it cannot be executed."""


def find_executable(name: str, env: Mapping[str, str]) -> str:
    """The path to execute for `name`, looked up as a shell would: in the PATH that the command itself will see."""
    if not name:
        raise CommandNotFound("the command is an empty string: write the program to run after `--`")
    search_path = env.get("PATH", os.defpath)
    found = shutil.which(name, path=search_path)
    if found is not None:
        return found
    for candidate in _candidates(name, search_path):
        # Report the first file of that name, as a shell does.
        if candidate.is_dir():
            if os.path.dirname(name):  # noqa: PTH120 - pathlib drops the "./" that makes the difference.
                raise CommandNotExecutable(f"{name}: is a directory, not a program")
        elif candidate.exists():
            raise CommandNotExecutable(f"{candidate}: permission denied (make it executable: chmod +x {candidate})")
    if os.path.dirname(name):  # noqa: PTH120 - as above.
        raise CommandNotFound(f"{name}: no such file")
    raise CommandNotFound(f"{name}: command not found in PATH={search_path}")


def exec_failure(path: str, errno_given: int) -> CommandError:
    """The error for the errno with which the kernel refused to execute `path`."""
    if errno_given == errno.ENOENT:
        if Path(path).exists():
            return CommandNotExecutable(f"{path}: the interpreter named in its first line does not exist")
        return CommandNotFound(f"{path}: no such file any more")
    if errno_given == errno.ENOEXEC:
        return CommandNotExecutable(
            f"{path}: not a program for this machine (a script needs a first line such as #!/bin/sh)"
        )
    return CommandNotExecutable(f"{path}: {os.strerror(errno_given)}")


def _candidates(name: str, search_path: str) -> Iterator[Path]:
    if os.path.dirname(name):  # noqa: PTH120 - as above.
        yield Path(name)
        return
    for folder in search_path.split(os.pathsep):
        yield Path(folder) / name


# --- The members of the group


def live_members(pgid: int) -> frozenset[int] | None:
    """The pids of the live processes in group `pgid`; None where the system offers no way to find out.

    `kill(-pgid, 0)` cannot tell: it also succeeds for dead processes that are not reaped yet, and in a container whose
    first process reaps none, they stay. A dead process can do no harm, so only live ones are returned.

    May block for some milliseconds on a machine with thousands of processes: call it from a thread.
    """
    rows = _rows_from_proc() if (_PROC / "self" / "stat").exists() else _rows_from_ps()
    if rows is None:
        return None
    return frozenset(pid for pid, group, state in rows if group == pgid and state not in _DEAD)


def _rows_from_proc() -> Iterator[tuple[int, int, str]]:
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue  # It ended between the listing and the reading.
        # The name in parentheses may itself contain spaces and parentheses: what follows its last one is regular.
        state, _parent, group = stat.rpartition(b")")[2].split()[:3]
        yield int(entry.name), int(group), state.decode()


def _rows_from_ps() -> list[tuple[int, int, str]] | None:
    """For systems without /proc, such as macOS."""
    try:
        listing = subprocess.run(_PS, capture_output=True, timeout=_PS_TIMEOUT_S, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = (line.split() for line in listing.stdout.splitlines())
    return [(int(row[0]), int(row[1]), row[2][0]) for row in rows if len(row) == 3]


# --- The terminal


class LentTerminal:
    """The terminal at our standard input, if there is one, on behalf of one process group."""

    def __init__(self, pgid: int) -> None:
        self._pgid = pgid
        self._lent = False
        self._modes: list[Any] | None = None
        self._ttou_before: Any = None

    @property
    def lent(self) -> bool:
        return self._lent

    def lend_at_start(self) -> None:
        """Lends before the command runs, unless our output is a pipe.

        In `pgleaderlock exec … | less` the reader of the pipe is in our group and needs the keyboard. There the
        command gets the terminal only when it asks for it (see `lend`).
        """
        with contextlib.suppress(OSError):
            if not stat.S_ISFIFO(os.fstat(_STDOUT).st_mode):
                self.lend()

    def lend(self) -> bool:
        """Makes the command's group the foreground group if ours is that now. True if the command has the terminal."""
        try:
            if not os.isatty(_STDIN):
                return False
            foreground = os.tcgetpgrp(_STDIN)
            if foreground == self._pgid:
                return True
            if foreground != os.getpgrp():
                return False  # We run in the background: another group has the terminal.
            if self._modes is None:
                self._modes = termios.tcgetattr(_STDIN)
            with ttou_blocked():
                os.tcsetpgrp(_STDIN, self._pgid)
        except (OSError, termios.error):
            return False  # No controlling terminal, or it has hung up: there is nothing to lend.
        if not self._lent:
            self._ignore_ttou()
        self._lent = True
        return True

    def take_back(self, *, restore_modes: bool) -> None:
        """Makes our group the foreground group again, if the foreground group is the command's or no longer exists.

        `restore_modes` is for a command that was killed and could not leave raw mode by itself.
        """
        if not self._lent:
            return
        self._lent = False
        with contextlib.suppress(OSError, termios.error), ttou_blocked():
            foreground = os.tcgetpgrp(_STDIN)
            # Another group may have the terminal by now, such as the shell's after we were put into the background.
            if foreground == self._pgid or not _group_exists(foreground):
                os.tcsetpgrp(_STDIN, os.getpgrp())
                if restore_modes and self._modes is not None:
                    # NOW, not DRAIN: output held back by Ctrl-S would block us until Ctrl-Q.
                    termios.tcsetattr(_STDIN, termios.TCSANOW, self._modes)
        self._restore_ttou()

    def _ignore_ttou(self) -> None:
        # While the command has the terminal we are in the background. With `stty tostop` our own log lines would
        # then stop us, and a stopped supervisor loses the lock. Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._ttou_before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def _restore_ttou(self) -> None:
        if self._ttou_before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTTOU, self._ttou_before)
            self._ttou_before = None


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
