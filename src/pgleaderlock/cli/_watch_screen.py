"""What `watch` shows: one picture of the roles, the nodes and the latest changes, for a screen of any size.

The picture is made of a snapshot and the size of the terminal, and of nothing else. `Terminal` has the screen and the
keyboard while it is entered, and gives both back on every way out.

Imports rich (inside, for the sake of `--help`), `history` and its neighbours. It shows, and must never decide.
"""

import asyncio
import contextlib
import datetime as dt
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pgleaderlock import history
from pgleaderlock.cli._operations import span
from pgleaderlock.cli.events import KIND_COLUMNS, sentence
from pgleaderlock.cli.roles import leader, summary

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

__all__ = ["Snapshot", "Terminal", "picture"]

WIDE_COLUMNS = 100
LINES_AROUND = 6  # title, state of the nodes, headings, remark, blank line, keys
CHANGES_SHOWN = 8
NODES_SHOWN = 8
_ORDER = {"free": 0, "silent": 1, "led": 2}
_STYLES = {"free": "bold red", "silent": "bold yellow", "led": ""}
_CHANGE_STYLES = {"acquired": "green", "lost": "red", "evicted": "red", "superseded": "yellow", "advanced": "yellow"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was seen in one look, and when, on this machine's clock."""

    namespace: str
    roles: Sequence[history.RoleView]
    nodes: Sequence[history.NodeView]
    changes: Sequence[history.Event]
    """The newest last."""
    at: dt.datetime


# --- The picture


def picture(
    shot: Snapshot | None, *, width: int, height: int | None, page: int = 0, stale: str = "", keys: str = ""
) -> "RenderableType":
    """One screenful; without a height everything. `stale` says since when, and why, this is not the present."""
    from rich.console import Group  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.text import Text  # noqa: PLC0415

    if shot is None:
        return Group(
            _line("pgleaderlock watch", "bold"), _line(stale or "connecting …", "bold red" if stale else "dim")
        )
    changes = shot.changes[-CHANGES_SHOWN:]
    if height is not None:
        changes = shot.changes[-max(1, min(CHANGES_SHOWN, height // 4)) :]
    roles = sorted(shot.roles, key=lambda role: (_ORDER[role.state], role.role))
    remark = ""
    if height is not None:
        room = max(1, height - LINES_AROUND - len(changes) - bool(stale))
        pages = max(1, -(-len(roles) // room))
        first = (page % pages) * room
        if pages > 1:
            remark = f"{first + 1} to {min(first + room, len(roles))} of {len(roles)}; n, p: more"
        roles = roles[first : first + room]
    dim = "dim" if stale else ""
    parts: list[RenderableType] = [_title(shot, width)]
    if stale:
        parts.append(_line(stale, "bold red"))
    parts += [_nodes(shot), _roles(roles, width, dim)]
    if remark:
        parts.append(_line(remark, "dim"))
    if changes:
        parts += [Text(), *(_change(event, width, dim) for event in changes)]
    if keys:
        parts.append(_line(keys, "dim"))
    return Group(*parts)


def _line(text: str, style: str = "") -> "Text":
    from rich.text import Text  # noqa: PLC0415

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _title(shot: Snapshot, width: int) -> "Text":
    clock = f"{shot.at.astimezone():%H:%M:%S}"
    text = f"{shot.namespace}  {summary(list(shot.roles))}"
    room = width - len(clock) - 2
    shown = text if len(text) <= room else text[: room - 1] + "…"
    return _line(f"{shown:<{room}}  {clock}", "bold")


def _nodes(shot: Snapshot) -> "Text":
    live = [node for node in shot.nodes if node.state == "alive"]
    words = [f"{node.node_id} ({node.leads}{', drains' if node.draining else ''})" for node in live[:NODES_SHOWN]]
    more = f" and {len(live) - NODES_SHOWN} more" if len(live) > NODES_SHOWN else ""
    gone = [f"{node.node_id} {node.state}" for node in shot.nodes if node.state == "silent"]
    text = f"nodes: {', '.join(words) or 'none alive'}{more}" + (f"; {', '.join(gone)}" if gone else "")
    return _line(text, "" if live else "bold red")


def _roles(roles: Sequence[history.RoleView], width: int, dim: str) -> "Table":
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    wide = width >= WIDE_COLUMNS
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim", width=None)
    for column in ("role", "leader"):
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=None)
    for column in ("epoch", "tenure", "heartbeat", *(("candidates",) if wide else ())):
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("leads since", no_wrap=True)
    for role in roles:
        cells = [role.role, leader(role), str(role.epoch), span(role.tenure_s), span(role.heartbeat_age_s)]
        if wide:
            since = "-" if role.acquired_at is None else f"{role.acquired_at.astimezone():%Y-%m-%d %H:%M:%S}"
            cells += [str(role.candidates), since]
        table.add_row(*(Text(cell, overflow="ellipsis") for cell in cells), style=dim or _STYLES[role.state])
    return table


def _change(event: history.Event, width: int, dim: str) -> "Text":
    moment = event.at.astimezone()
    style = dim or _CHANGE_STYLES.get(event.kind, "")
    if width < WIDE_COLUMNS:
        return _line(f"{moment:%H:%M:%S} {sentence(event)}", style)
    return _line(f"{moment:%Y-%m-%d %H:%M:%S}  {sentence(event, KIND_COLUMNS)}", style)


# --- The terminal


class Terminal:
    """The whole screen and the keyboard, given back whatever ends it.

    Ctrl-Z gives both back as well, and takes them again when the program goes on. A key is handed to `on_key`; a signal
    that asks for the end is handed on as the key `q`.
    """

    ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

    def __init__(
        self, console: "Console", render: "Callable[[], RenderableType]", on_key: Callable[[str], None]
    ) -> None:
        self._console = console
        self._render = render
        self._on_key = on_key
        self._live: Live | None = None
        self._modes: list[Any] | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self.ENDING:
            loop.add_signal_handler(number, self._on_key, "q")
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        loop.add_signal_handler(signal.SIGWINCH, self.refresh)
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        loop = asyncio.get_running_loop()
        self._give_back()
        for number in (*self.ENDING, signal.SIGTSTP, signal.SIGWINCH):
            loop.remove_signal_handler(number)

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _take(self) -> None:
        from rich.live import Live  # noqa: PLC0415

        if sys.stdin.isatty():
            with _no_stop():
                self._modes = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin, termios.TCSANOW)
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)
        self._live = Live(console=self._console, get_renderable=self._render, screen=True, auto_refresh=False)
        self._live.start(refresh=True)

    def _give_back(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):  # the terminal may have hung up
                live.stop()
        if self._modes is not None:
            modes, self._modes = self._modes, None
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            with contextlib.suppress(OSError, termios.error), _no_stop():
                termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)

    def _suspend(self) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        # Here somebody has said `fg`.
        self._take()

    def _read(self) -> None:
        try:
            typed = os.read(sys.stdin.fileno(), 64)
        except OSError:
            typed = b""
        if not typed:  # the terminal has hung up
            self._on_key("q")
        for key in typed.decode(errors="ignore"):
            self._on_key(key)
        self.refresh()


@contextlib.contextmanager
def _no_stop() -> Iterator[None]:
    """Changing a terminal's modes from the background would stop us."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
