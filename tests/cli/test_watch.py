"""`pgleaderlock watch`: in a real terminal of any size, in a pipe, and while the database is away."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from pgleaderlock import LeaderElection
from pgleaderlock.cli.watch import Snapshot, picture
from pgleaderlock.history import Event, NodeView, RoleView
from support.elections import STEADY, ledger_dsns, opens
from support.program import PATIENCE_S, command, environment
from support.proxy import Proxy

ENTERED, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"


class TerminalWindow:
    """A terminal with `watch` in it: what it has drawn, and what is typed."""

    def __init__(self, dsn: str, space: str, *, columns: int = 80, lines: int = 24, **env: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self.slave)
        self.drawn = b""
        args = ["watch", "--dsn", dsn, "--namespace", space, "--interval", "100ms"]
        # The terminal becomes the process's own, as in a window: only then does Ctrl-C make a signal.
        code = (
            "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            f"from pgleaderlock.cli import main; main({args!r})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment({"TERM": "xterm-256color", **env}),
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.drawn.decode(errors="ignore"))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def until(self, pattern: str) -> None:
        """Reads until it has drawn this since the last call."""
        deadline = time.monotonic() + PATIENCE_S
        self.drawn = b""
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"{pattern!r} was not drawn, but: {self.text[-2000:]}"
            self.read(0.1)

    def read(self, timeout_s: float) -> None:
        if select.select([self.master], [], [], timeout_s)[0]:
            with contextlib.suppress(OSError):
                self.drawn += os.read(self.master, 65536)

    def end(self) -> tuple[int, str]:
        """Waits for the end; the exit code and what was said on standard error."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.text[-2000:]}"
            self.read(0.05)
        self.read(0)
        assert self.process.stderr is not None
        return self.process.returncode, self.process.stderr.read().decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def plain(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
def space() -> str:
    return f"watch-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def leading(plain: str, space: str) -> AsyncIterator[LeaderElection]:
    """A node that leads two roles."""
    election = LeaderElection(plain, ["scheduler", "billing"], namespace=space, node_id="node-a", **STEADY)
    await election.start()
    try:
        for role in ("scheduler", "billing"):
            await opens(election, role)
        yield election
    finally:
        await election.shutdown()


@contextlib.contextmanager
def window(dsn: str, space: str, **options: Any) -> Iterator[TerminalWindow]:
    shown = TerminalWindow(dsn, space, **options)
    try:
        yield shown
    finally:
        shown.close()


ENDS = {"q": "q", "Ctrl-C": "\x03", "SIGTERM": signal.SIGTERM}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_every_end_gives_the_terminal_back(
    plain: str, space: str, leading: LeaderElection, end: str | signal.Signals
) -> None:
    def story() -> None:
        with window(plain, space) as shown:
            shown.until(r"scheduler +node-a +acting +1 ")
            before = shown.drawn
            if isinstance(end, str):
                shown.type(end)
            else:
                shown.process.send_signal(end)
            assert shown.end() == (0, "")
            assert ENTERED in before
            assert LEFT in shown.drawn
            assert termios.tcgetattr(shown.slave) == shown.modes

    await asyncio.to_thread(story)


async def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(plain: str, space: str, leading: LeaderElection) -> None:
    def story() -> None:
        with window(plain, space) as shown:
            shown.until("scheduler")
            shown.process.send_signal(signal.SIGTSTP)
            _, status = os.waitpid(shown.process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert termios.tcgetattr(shown.slave) == shown.modes
            shown.process.send_signal(signal.SIGCONT)
            shown.until("scheduler")
            shown.type("q")
            assert shown.end()[0] == 0
            assert termios.tcgetattr(shown.slave) == shown.modes

    await asyncio.to_thread(story)


async def test_a_wider_terminal_shows_more(plain: str, space: str, leading: LeaderElection) -> None:
    def story() -> None:
        with window(plain, space, columns=60) as shown:
            shown.until("heartbeat")
            assert "leads since" not in shown.text
            shown.resize(200, 24)
            shown.process.send_signal(signal.SIGWINCH)
            shown.until(r"candidates +leads since")
            shown.resize(60, 24)
            shown.process.send_signal(signal.SIGWINCH)
            shown.until(r"heartbeat *\r?\n")
            shown.type("q")
            assert shown.end()[0] == 0

    await asyncio.to_thread(story)


async def test_a_change_is_shown(plain: str, space: str, leading: LeaderElection) -> None:
    with window(plain, space) as shown:
        await asyncio.to_thread(shown.until, r"nodes: node-a \(2\)")
        await leading.step_down("billing")
        await asyncio.to_thread(shown.until, r"released billing by node-a \(epoch 1, clean\)")


async def test_without_colour_where_none_is_wanted(plain: str, space: str, leading: LeaderElection) -> None:
    colour = re.compile(rb"\x1b\[[0-9;]*\b(?:3[0-7]|9[0-7]|38;5;\d+)m")

    def drawn(**env: str) -> bytes:
        with window(plain, space, **env) as shown:
            shown.until("acquired")
            return shown.drawn

    assert colour.search(await asyncio.to_thread(drawn))
    assert not colour.search(await asyncio.to_thread(drawn, NO_COLOR="1"))


async def test_while_the_database_is_away_it_says_since_when_and_then_goes_on(
    plain: str, space: str, leading: LeaderElection, proxy: Proxy
) -> None:
    with window(proxy.dsn_for(plain), space) as shown:
        await asyncio.to_thread(shown.until, "scheduler +node-a")
        proxy.refuse()
        proxy.reset()
        # The last picture stays.
        await asyncio.to_thread(
            shown.until,
            r"unknown; before: 2 roles: [^\0]*"
            r"stale since \d\d:\d\d:\d\d: cannot connect \(refused\)\s+nodes:[^\0]*scheduler +node-a",
        )
        proxy.allow()
        await asyncio.to_thread(shown.until, r"candidates: 1 +\d\d:\d\d:\d\d\s+nodes: ")
        # One that hangs is no better than one that is gone.
        proxy.cut()
        await asyncio.to_thread(shown.until, r"stale since \d\d:\d\d:\d\d: the database does not answer")
        shown.type("q")
        assert (await asyncio.to_thread(shown.end))[0] == 0
        assert termios.tcgetattr(shown.slave) == shown.modes
        proxy.heal()


async def test_in_a_pipe_it_prints_one_plain_snapshot(plain: str, space: str, leading: LeaderElection) -> None:
    done = await asyncio.to_thread(command, "watch", "--dsn", plain, "--namespace", space)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    title, nodes, heading, *rest = done.out.splitlines()
    assert title.startswith(f"{space}  2 roles: 2 acting; candidates: 1")
    assert nodes == "nodes: node-a (2)"
    assert heading.split() == [
        "role",
        "leader",
        "state",
        "epoch",
        "tenure",
        "heartbeat",
        "candidates",
        "leads",
        "since",
    ]
    assert [line.split()[:4] for line in rest[:2]] == [
        ["billing", "node-a", "acting", "1"],
        ["scheduler", "node-a", "acting", "1"],
    ]
    assert all(line == line.rstrip() for line in done.out.splitlines())


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_wrong_password_ends_it_before_the_screen_is_cleared_for_good(
    plain: str, space: str, terminal: bool
) -> None:
    wrong = plain.replace("password=plain", "password=wrong")
    assert wrong != plain
    if not terminal:
        done = await asyncio.to_thread(command, "watch", "--dsn", wrong, "--namespace", space)
        assert done.code == 2
        assert "check user and password" in done.err
        return
    with window(wrong, space) as shown:
        code, said = await asyncio.to_thread(shown.end)
        assert code == 2
        assert "check user and password" in said
        assert "wrong" not in said
        assert termios.tcgetattr(shown.slave) == shown.modes


# -- the picture ------------------------------------------------------------------------------------------------------

AT = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
LONG = "a-role-whose-name-is-as-long-as-somebody-could-think-of-for-one"


def role(name: str, state: str = "acting", node: str | None = "node-a") -> RoleView:
    led = node is not None
    return RoleView(
        namespace="n",
        role=name,
        state=state,  # type: ignore[arg-type]
        epoch=12,
        node_id=node if led else None,
        holder_identity=None,
        acquired_at=AT if led else None,
        tenure_s=7300.0 if led else None,
        last_heartbeat=AT if led else None,
        heartbeat_age_s=0.25 if led else None,
        lease_s=6.0,
        draining=False,
        candidates=2,
    )


def node(name: str, leads: int) -> NodeView:
    return NodeView(
        namespace="n",
        node_id=name,
        state="alive",
        live=True,
        requested=None,
        name_shared=False,
        leads=leads,
        candidate=True,
        draining=False,
        balance=False,
        session_id=1,
        host="h",
        os_pid=1,
        holder_identity="x",
        hold="session",
        library_version="1",
        gate_s=5.0,
        lease_s=6.0,
        beat=1,
        process_started_at=AT,
        started_at=AT,
        last_heartbeat=AT,
        heartbeat_age_s=0.25,
        ended_at=None,
    )


def drawn(
    roles: list[RoleView],
    *,
    width: int,
    height: int | None,
    nodes: Sequence[str] = ("node-a", "node-b"),
    **options: Any,
) -> list[str]:
    events = [Event(number, AT, "acquired", "n", LONG, "node-a", 12, None, 1.0) for number in range(20)]
    shot = Snapshot("n", roles, [node(name, 0) for name in nodes], events, AT)
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, markup=False, emoji=False)
    console.print(picture(shot, width=width, height=height, **options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("height", [8, 24, 60])
def test_the_picture_fits_into_every_terminal(width: int, height: int) -> None:
    roles = [role(f"role-{number:04}") for number in range(1000)] + [role(LONG), role("[bold]x[/]")]
    lines = drawn(roles, width=width, height=height, stale="stale since 12:00:00: " + 10 * "reason ", keys="q: quit")
    assert max(map(len, lines)) <= width
    assert len(lines) <= height or height == 8


def test_at_sixty_columns_nothing_of_a_role_is_lost() -> None:
    lines = drawn([role("metrics-aggregator")], width=60, height=24)
    (row,) = [line for line in lines if line.startswith("metrics")]
    assert row.split() == ["metrics-aggregator", "node-a", "acting", "12", "2", "h", "250", "ms"]


def test_a_long_state_takes_no_room_from_the_name_of_the_leader_and_the_command_is_there() -> None:
    why = "node-a gives it up: no new work, and it waits for the end of what is in flight"
    draining = dataclasses.replace(
        role("reports-of-the-quarter", "draining"), in_flight=3, state_age_s=50.0, why=why, command="pgleaderlock nodes"
    )
    for width in (60, 80):
        lines = drawn([draining, role("cron")], width=width, height=24, keys="q: quit")
        shown = [line for line in lines if line.startswith(("reports-of-the-quarte", "cron "))]
        assert [("node-a" in line, "\u2026" in line[24:]) for line in shown[:2]] == [(True, False)] * 2, shown
        assert "draining (50 s, 3 in flight)" in shown[0]
        assert "  pgleaderlock nodes" in lines
        assert why in " ".join(lines)


def test_no_line_is_blank_while_something_is_left_out() -> None:
    names = [f"eu-west-{number}" for number in range(9)]
    lines = drawn([role(f"role-{number}") for number in range(5)], width=80, height=24, keys="q: quit", nodes=names)
    assert len(lines) == 24
    assert sum(not line for line in lines) == 1, "between roles and changes"
    shown = " ".join(lines)
    assert all(f"{name} (0)" in shown for name in names), "each node, on as many lines as it takes"


def test_roles_without_a_leader_come_first_and_pages_turn() -> None:
    roles = [role(f"role-{number:02}") for number in range(40)]
    roles += [role("z-free", "nobody", None), role("y-late", "late", "node-b")]
    shown = drawn(roles, width=60, height=24)
    start = shown.index(next(line for line in shown if line.startswith("role "))) + 1
    assert [line.split()[:2] for line in shown[start : start + 3]] == [
        ["z-free", "(nobody)"],
        ["y-late", "node-b"],
        ["role-00", "node-a"],
    ]
    assert "late heartbeat" in shown[start + 1]
    turned = drawn(roles, width=60, height=24, page=1)
    assert not any(line.startswith("z-free") for line in turned)
    assert drawn(roles, width=60, height=24, page=-1)[start] != shown[start]
    assert any("of 42; n, p: more" in line for line in turned)
