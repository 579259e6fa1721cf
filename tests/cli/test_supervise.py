"""`exec`'s promise about processes: a command never runs unguarded, and its group never outlives its supervisor.

Each test starts a real supervisor as a process of its own, on asyncio and on uvloop. The end of a process is seen as
the end of a pipe that it held open, never guessed from elapsed time.
"""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgleaderlock.cli.exec import supervise

# Not asserted anywhere: only the bound after which a test gives up instead of hanging.
PATIENCE_S = 30.0

# The supervisor under test: what `pgleaderlock exec` does with a command, without a database.
DRIVER = """
import asyncio, fcntl, json, os, signal, sys, termios
from pgleaderlock.cli.exec import supervise

plan = json.loads(sys.argv[1])

def say(text):
    os.write(2, (text + "\\n").encode())

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if "die_in" in plan:
    setattr(supervise, plan["die_in"], die)
if plan.get("report_looks"):
    def live_members(pgid, look=supervise.live_members):
        say("looks")
        return look(pgid)
    supervise.live_members = live_members
if plan.get("terminal"):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for fd in plan.get("leaks", []):
    os.dup2(2, fd)

async def main():
    loop = asyncio.get_running_loop()
    signals = asyncio.Queue()
    for signum in supervise.FORWARDED_SIGNALS:
        loop.add_signal_handler(signum, signals.put_nowait, signum)
    watch_r = -1
    if plan.get("watch_output"):
        watch_r, watch_w = os.pipe()
        os.dup2(watch_w, 1)
        os.close(watch_w)
    try:
        child = await supervise.Supervised.start(plan["cmd"], plan.get("env", dict(os.environ)))
    except supervise.CommandError as error:
        say(str(error))
        return error.exit_code
    finally:
        if watch_r >= 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if watch_r >= 0:
        await asyncio.to_thread(os.read, watch_r, 6)
    say(f"started {child.pid}")

    async def forward():
        while True:
            signum = await signals.get()
            say(f"forwards {signum.name}")
            child.forward(signum)

    if "stop_at_term" in plan:
        while await signals.get() != signal.SIGTERM:
            pass
        gone = await child.stop(plan["stop_at_term"])
        say(f"gone {gone}")
        if watch_r >= 0:
            os.set_blocking(watch_r, False)
            try:
                while os.read(watch_r, 100):
                    pass
                say("nobody left")
            except BlockingIOError:
                say("somebody left")
        return await child.wait()
    forwarding = asyncio.create_task(forward())
    code = await child.wait()
    say(f"exited {code}")
    if plan.get("hang_after_exit"):
        await asyncio.Event().wait()
    forwarding.cancel()
    await child.stop(plan.get("grace", 10))
    if plan.get("terminal"):
        say(f"foreground is ours: {os.tcgetpgrp(0) == os.getpgrp()}")
    return code

if plan["loop"] == "uvloop":
    import uvloop
    code = uvloop.run(main())
else:
    code = asyncio.run(main())
sys.exit(code)
"""

Supervisor = subprocess.Popen[bytes]
Start = Callable[..., Supervisor]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_name(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "uvloop":
        pytest.importorskip("uvloop")
    return name


@pytest.fixture
def start(loop_name: str) -> Iterator[Start]:
    """Starts a supervisor for a command; ends it at last, and its death ends the command."""
    started: list[Supervisor] = []

    def start_one(
        cmd: list[str], *, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.PIPE, **plan: object
    ) -> Supervisor:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps({"cmd": cmd, "loop": loop_name, **plan})],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=bool(plan.get("terminal")),
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait(PATIENCE_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def read_until(fd: int, wanted: bytes | None, count: int = 1) -> bytes:
    """What comes through `fd` until it held `wanted` so many times, or until its end (None)."""
    seen = b""
    deadline = time.monotonic() + PATIENCE_S
    while wanted is None or seen.count(wanted) < count:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"waited for {wanted!r}, saw only {seen!r}"
        try:
            chunk = os.read(fd, 4096)
        except OSError:  # EIO: nobody has the terminal open any more.
            chunk = b""
        if not chunk:
            assert wanted is None, f"waited for {wanted!r}, but the pipe ended after {seen!r}"
            break
        seen += chunk
    return seen


def out(process: Supervisor) -> int:
    assert process.stdout is not None
    return process.stdout.fileno()


def err(process: Supervisor) -> int:
    assert process.stderr is not None
    return process.stderr.fileno()


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", textwrap.dedent(script)]


def py(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(script)]


# A command with a child that no SIGTERM ends. A shell would not do: it may lose a signal while it forks.
STUBBORN_CHILD = """
import os, signal
ready_r, ready_w = os.pipe()
if os.fork() == 0:
    for name in ("TERM", "INT", "HUP", "USR1", "USR2"):
        signal.signal(signal.Signals["SIG" + name], signal.SIG_IGN)
    os.write(1, b"ready\\n")
    os.write(ready_w, b"r")
    while True:
        signal.pause()
os.read(ready_r, 1)
"""
WAITING_COMMAND = py(STUBBORN_CHILD + "signal.pause()")
FINISHED_COMMAND = py(STUBBORN_CHILD + "os._exit(0)")


def at_signal(name: str, said: str, code: int) -> list[str]:
    """A command that says something and exits when it gets a signal."""
    return py(f"""
        import os, signal, time
        def heard(signum, frame):
            os.write(1, b"{said}\\n")
            os._exit({code})
        signal.signal(signal.SIG{name}, heard)
        os.write(1, b"ready\\n")
        while True:
            time.sleep(0.05)  # pause() would sleep on, if the signal came just before it
    """)


# --- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_the_exit_code_is_what_a_shell_would_report(start: Start, script: str, code: int) -> None:
    assert start(sh(script)).wait(PATIENCE_S) == code


def make_file(folder: Path, content: str, mode: int) -> str:
    path = folder / "tool"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("prepare", "code", "said"),
    [
        (lambda folder: "no-such-command-anywhere", 127, b"command not found in PATH="),
        (lambda folder: str(folder / "missing"), 127, b"no such file"),
        (lambda folder: "", 127, b"empty string"),
        (str, 126, b"is a directory"),
        (lambda folder: make_file(folder, "#!/bin/sh\n", 0o644), 126, b"chmod +x"),
        (lambda folder: make_file(folder, "#!/no/such/interpreter\n", 0o755), 126, b"interpreter"),
        (lambda folder: make_file(folder, "echo no first line\n", 0o755), 126, b"#!/bin/sh"),
    ],
    ids=["unknown", "missing", "empty", "directory", "not-executable", "bad-interpreter", "no-first-line"],
)
def test_a_command_that_cannot_run_is_told_apart_as_a_shell_does(
    start: Start, tmp_path: Path, prepare: Callable[[Path], str], code: int, said: bytes
) -> None:
    process = start([prepare(tmp_path)])
    assert said in read_until(err(process), None)
    assert process.wait(PATIENCE_S) == code


def test_the_command_is_looked_up_in_its_own_path(start: Start, tmp_path: Path) -> None:
    make_file(tmp_path, "#!/bin/sh\necho found\n", 0o755)
    process = start(["tool"], env={"PATH": str(tmp_path)})
    assert read_until(out(process), None) == b"found\n"


# --- what the command gets -------------------------------------------------------------------------------------------


def test_standard_streams_are_passed_through(start: Start) -> None:
    process = start(sh("cat; echo to-err >&2"), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"through and through")
    process.stdin.close()
    assert read_until(out(process), None) == b"through and through"
    assert b"to-err\n" in read_until(err(process), None)


@pytest.mark.parametrize("locale", [{}, {"LC_CTYPE": "C"}, {"LC_ALL": "C.UTF-8"}], ids=["none", "C", "UTF-8"])
def test_the_environment_arrives_exactly_as_given(start: Start, locale: dict[str, str]) -> None:
    env = {"A.B": "a shell would drop this name", "EMPTY": "", "PYTHONSTARTUP": "x", "Ü": "ü", **locale}
    process = start(["/usr/bin/env", "-0"], env=env)
    lines = read_until(out(process), None).decode().split("\0")
    assert sorted(lines) == sorted(["", *(f"{key}={value}" for key, value in env.items())])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc: run the tests on Linux")
def test_the_command_gets_three_descriptors_and_no_more(start: Start) -> None:
    # The low numbers are taken, and inheritable, so that none of ours can hide among the first ten.
    script = """
        import os
        fds = os.listdir("/proc/self/fd")  # Among them the one that was used for listing; it is closed by now.
        print(sorted(int(fd) for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")))
    """
    process = start(py(script), leaks=[*range(3, 13), 90])
    assert read_until(out(process), None) == b"[0, 1, 2]\n"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc: run the tests on Linux")
def test_the_command_gets_the_signal_dispositions_it_would_get_without_us(start: Start) -> None:
    cmd = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    alone = subprocess.run(cmd, capture_output=True, check=True).stdout
    assert classic_signals(read_until(out(start(cmd)), None)) == classic_signals(alone)


def classic_signals(masks: bytes) -> dict[str, int]:
    # Without 32 and above: the C library keeps some of those to itself and changes them as it likes.
    pairs = (line.split(":") for line in masks.decode().splitlines())
    return {name: int(mask, 16) & 0x7FFF_FFFF for name, mask in pairs}


def test_the_command_leads_its_own_group(start: Start) -> None:
    script = "import os; print(os.getpid() == os.getpgrp())"
    assert read_until(out(start(py(script))), None) == b"True\n"


def test_signals_are_forwarded_to_the_whole_group(start: Start) -> None:
    script = """
        import os, signal
        who = "child" if os.fork() else "grandchild"
        def heard(signum, frame):
            os.write(1, f"{who} {signal.Signals(signum).name};".encode())
        for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH"):
            signal.signal(signal.Signals["SIG" + name], heard)
        os.write(1, b"ready;")
        while True:
            signal.pause()
    """
    process = start(py(script))
    read_until(out(process), b"ready;", count=2)
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH"):
        process.send_signal(signal.Signals[f"SIG{name}"])
        heard = read_until(out(process), f"SIG{name};".encode(), count=2)
        assert sorted(heard.decode().split(";")) == ["", f"child SIG{name}", f"grandchild SIG{name}"]


# --- stop ------------------------------------------------------------------------------------------------------------


def test_stop_kills_after_the_grace_and_returns_when_the_whole_group_is_gone(start: Start) -> None:
    # The command itself obeys the SIGTERM; only its child does not.
    process = start(WAITING_COMMAND, stop_at_term=0.2, watch_output=True)
    read_until(err(process), b"started")
    process.terminate()
    said = read_until(err(process), None)
    assert b"gone True\nnobody left\n" in said
    assert b"command_killed" in said
    assert process.wait(PATIENCE_S) == 143


def test_stop_lets_a_polite_command_finish_and_keeps_its_exit_code(start: Start) -> None:
    process = start(at_signal("TERM", "bye", 3), stop_at_term=PATIENCE_S)
    read_until(out(process), b"ready\n")
    process.terminate()
    assert read_until(out(process), None) == b"bye\n"
    assert process.wait(PATIENCE_S) == 3


def test_stop_gives_the_grace_to_children_that_outlive_the_command(start: Start) -> None:
    # The child sees the end of the command as the end of the pipe between them, and has still work to do then.
    script = """
        import os, signal
        held_r, held_w = os.pipe()
        ready_r, ready_w = os.pipe()
        if os.fork() == 0:
            os.close(held_w)
            def finish(signum, frame):
                os.read(held_r, 1)
                os.write(1, b"alone\\n")
                os.read(0, 1)
                os.write(1, b"cleaned\\n")
                os._exit(0)
            signal.signal(signal.SIGTERM, finish)
            os.write(ready_w, b"r")
            while True:
                signal.pause()
        os.read(ready_r, 1)
        os.write(1, b"ready\\n")
        signal.pause()
    """
    process = start(py(script), stdin=subprocess.PIPE, stop_at_term=PATIENCE_S, report_looks=True)
    assert process.stdin is not None
    read_until(out(process), b"ready\n")
    process.terminate()
    read_until(out(process), b"alone\n")
    # It looks a second time: so the first look, which found the child alive, did not make it kill.
    read_until(err(process), b"looks\n", count=2)
    process.stdin.write(b"go on")
    process.stdin.close()
    assert read_until(out(process), None) == b"cleaned\n"
    assert process.wait(PATIENCE_S) == 143


def test_stop_ends_what_a_finished_command_left_in_the_background(start: Start) -> None:
    process = start(FINISHED_COMMAND, grace=0.2)
    assert read_until(out(process), None) == b"ready\n"
    assert process.wait(PATIENCE_S) == 0


def test_a_stopped_command_blocks_nobody_and_still_obeys_stop(start: Start) -> None:
    process = start(sh("kill -STOP $$; exit 5"), stop_at_term=PATIENCE_S)
    read_until(err(process), b"command_stopped")
    process.terminate()
    assert b"gone True" in read_until(err(process), None)
    assert process.wait(PATIENCE_S) == 143


# --- death of the supervisor -----------------------------------------------------------------------------------------


def test_the_whole_group_dies_with_a_killed_supervisor(start: Start) -> None:
    process = start(WAITING_COMMAND)
    read_until(out(process), b"ready\n")
    process.kill()
    read_until(out(process), None)


def test_what_a_finished_command_left_behind_dies_with_a_killed_supervisor(start: Start) -> None:
    process = start(FINISHED_COMMAND, hang_after_exit=True)
    read_until(out(process), b"ready\n")
    read_until(err(process), b"exited 0")
    process.kill()
    read_until(out(process), None)


def test_no_signal_to_the_group_disarms_the_guardian(start: Start) -> None:
    # The command survives them all and says so after each, so we know that the group has received them.
    script = """
        import os, signal
        mortal = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT}
        for signum in mortal:
            signal.signal(signum, signal.SIG_IGN)
        for signum in mortal:
            os.killpg(0, signum)
        print("survived", flush=True)
        signal.pause()
    """
    process = start(py(script))
    read_until(out(process), b"survived\n")
    process.kill()
    read_until(out(process), None)


def test_a_suspended_group_dies_with_a_killed_supervisor(start: Start) -> None:
    process = start(sh("kill -STOP $$; exit 5"))
    read_until(err(process), b"command_stopped")
    process.kill()
    read_until(out(process), None)


@pytest.mark.parametrize("step", ["_start_guardian", "_let_go"], ids=["before-the-guardian", "before-the-go"])
def test_a_supervisor_killed_while_starting_never_ran_the_command(start: Start, step: str, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    process = start(sh(f"echo ran; : >{trace}"), die_in=step)
    # Its end comes when the last process that could still become the command has gone.
    assert read_until(out(process), None) == b""
    assert not trace.exists()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_nothing_is_left_running_after_the_end(start: Start) -> None:
    # The guardian holds neither stream of ours, so only its absence from the group shows that it has gone.
    process = start(["true"])
    said = read_until(err(process), b"exited 0").decode()
    pgid = int(said.split("started ")[1].split()[0])
    assert process.wait(PATIENCE_S) == 0
    assert not supervise.live_members(pgid)


# --- terminal --------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal: the person's, and the program's."""
    person, program = pty.openpty()
    yield person, program
    for fd in (person, program):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_the_command_reads_from_the_terminal_and_we_get_it_back(start: Start, terminal: tuple[int, int]) -> None:
    person, program = terminal
    process = start(sh('echo ready; read -r line; echo "got $line"'), stdin=program, stdout=program, terminal=True)
    read_until(person, b"ready")
    os.write(person, b"hello\n")
    read_until(person, b"got hello")
    assert b"foreground is ours: True" in read_until(err(process), None)
    assert process.wait(PATIENCE_S) == 0


def test_ctrl_c_reaches_the_command_and_not_the_supervisor(start: Start, terminal: tuple[int, int]) -> None:
    person, program = terminal
    process = start(at_signal("INT", "interrupted", 5), stdin=program, stdout=program, terminal=True)
    read_until(person, b"ready")
    os.write(person, b"\x03")
    read_until(person, b"interrupted")
    said = read_until(err(process), None)
    assert b"forwards" not in said
    assert b"foreground is ours: True" in said
    assert process.wait(PATIENCE_S) == 5


def test_ctrl_z_does_not_suspend_the_command(start: Start, terminal: tuple[int, int]) -> None:
    person, program = terminal
    process = start(at_signal("CONT", "continued", 6), stdin=program, stdout=program, terminal=True)
    read_until(person, b"ready")
    os.write(person, b"\x1a")
    read_until(person, b"continued")
    assert process.wait(PATIENCE_S) == 6


def test_in_a_pipeline_the_command_gets_the_terminal_once_it_asks(start: Start, terminal: tuple[int, int]) -> None:
    person, program = terminal
    script = 'ps -o tpgid= -p $$; read -r line; echo "got $line"'
    process = start(sh(script), stdin=program, terminal=True)
    foreground = read_until(out(process), b"\n")
    assert int(foreground) == process.pid
    os.write(person, b"hello\n")
    read_until(out(process), b"got hello")
    assert b"foreground is ours: True" in read_until(err(process), None)


def test_a_killed_command_does_not_leave_the_terminal_raw(start: Start, terminal: tuple[int, int]) -> None:
    person, program = terminal
    process = start(sh("stty raw -echo; echo ready; kill -9 $$"), stdin=program, stdout=program, terminal=True)
    read_until(person, b"ready")
    assert b"foreground is ours: True" in read_until(err(process), None)
    shown = subprocess.run(["stty", "-a"], stdin=program, capture_output=True, check=True, text=True).stdout.split()
    assert {"icanon", "echo", "isig"} <= {word.strip(";") for word in shown}


# --- who is left in a group ------------------------------------------------------------------------------------------


def test_proc_and_ps_see_the_same_live_members(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = subprocess.Popen(["sleep", "600"], process_group=0)
    dead = subprocess.Popen(["true"], process_group=leader.pid)
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # Dead, and not reaped yet.
    try:
        assert supervise.live_members(leader.pid) == frozenset({leader.pid})
        monkeypatch.setattr(supervise, "_PROC", Path("/nonexistent"))
        assert supervise.live_members(leader.pid) == frozenset({leader.pid})
        monkeypatch.setattr(supervise, "_PS", ("no-such-ps",))
        assert supervise.live_members(leader.pid) is None
    finally:
        leader.kill()
        leader.wait(PATIENCE_S)
        dead.wait(PATIENCE_S)
