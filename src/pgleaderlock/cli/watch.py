"""`pgleaderlock watch`: roles, leaders, nodes and changes, live in a terminal; one plain snapshot anywhere else.

`_Watcher` reads the ledger, `picture` draws the result for a screen of any size, `Terminal` handles the screen and the
keyboard. While the database is unreachable, the last picture stays and shows since when it is stale.

It only reads, and takes no lock. The picture depends only on a snapshot and the size of the terminal; the terminal must
be restored on every exit.
"""

import asyncio
import contextlib
import datetime as dt
import os
import signal
import sys
import termios
import textwrap
import tty
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import click

from pgleaderlock import history
from pgleaderlock._base.aio import cancel_and_wait, first_of
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._pg.explain import Unreachable, hopeless
from pgleaderlock.cli.look import KIND_COLUMNS, leader, remedies, sentence, summary
from pgleaderlock.cli.options import POSITIVE
from pgleaderlock.cli.output import EXIT_OK, dsn_option, print_table, printable
from pgleaderlock.cli.reading import (
    LedgerLook,
    channel_option,
    elsewhere,
    keep_reading,
    namespace_option,
    open_ledger,
    span,
    state,
    table_console,
)
from pgleaderlock.cli.service import ttou_blocked
from pgleaderlock.errors import ConnectionError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

__all__ = ["Snapshot", "Terminal", "picture", "watch"]

INTERVAL_S = 1.0
TICK_S = 1.0
HANGS_S = 2.0
GAP_S_MIN = 0.1
LOOK_BACK_S = 86400.0
SILENT_SHOWN_S = 600.0
PAGE_KEYS = {"n": 1, " ": 1, "p": -1, "b": -1}
WIDE_COLUMNS = 110
ROLE_COLUMNS_MIN = 24
COLUMN_GAP = 2
LINES_AROUND = 4  # title, headings, blank line, keys
CHANGES_SHOWN = 50
CHANGES_PRINTED = 8
NODES_SHOWN = 16
NODES_LINES = 3
NODES_HEIGHT_MIN = 20
REMEDIES_SHOWN = 3
_NUMBERS = ("epoch", "tenure", "heartbeat", "candidates")
_NO_BREAK = "\u00a0"  # a node and what it does stay on one line
_ORDER = list(history.STATES)
_STYLES = {"bad": "bold red", "late": "bold yellow", "well": ""}
_CHANGE_STYLES = {"acquired": "green", "lost": "red", "evicted": "red", "superseded": "yellow", "advanced": "yellow"}


@click.command(short_help="Watch roles, leaders and changes, live.")
@dsn_option
@namespace_option
@channel_option
@click.option("--interval", type=POSITIVE, default=INTERVAL_S, help="How often to look.  [default: 1s]")
def watch(dsn: str, namespace: str, channel: str, interval: float) -> int:
    """Watch each role with its leader, epoch, tenure and the age of its heartbeat, the nodes, and the latest changes.

    Roles for which nobody may act come first, with why and what to run next. q or Ctrl-C ends it; n and p turn the
    pages. A notification of the nodes shows a change at once. When the output is no terminal, one snapshot is printed.

    Exit codes: 0 ended as asked, 2 it could not be found out.
    """
    watcher = _Watcher(dsn, namespace, channel, interval)
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        asyncio.run(watcher.live())
    else:
        asyncio.run(watcher.once())
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The result of one reading of the ledger, and its time by this machine's clock."""

    namespace: str
    roles: Sequence[history.RoleView]
    nodes: Sequence[history.NodeView]
    changes: Sequence[history.Event]
    """The newest last."""
    at: dt.datetime
    elsewhere: str = ""
    """Other namespaces with roles, if this one has none."""


# --- The picture


def picture(
    shot: Snapshot | None, *, width: int, height: int | None, page: int = 0, stale: str = "", keys: str = ""
) -> "RenderableType":
    """One screenful, or everything without a height. `stale` says since when, and why, the data is out of date."""
    from rich.console import Group  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.text import Text  # noqa: PLC0415

    if shot is None:
        return Group(
            _line("pgleaderlock watch", "bold"), _line(stale or "connecting …", "bold red" if stale else "dim")
        )
    roles = sorted(shot.roles, key=lambda role: (_ORDER.index(role.state), role.role))
    nodes = _nodes(shot, width, 1 if height is not None and height < NODES_HEIGHT_MIN else NODES_LINES)
    advice = [] if stale else _advice(roles, width)
    remark, changes = "", shot.changes[-CHANGES_PRINTED:]
    if height is not None:
        around = LINES_AROUND + len(nodes) + len(advice) + bool(stale)
        # The changes get a quarter of the screen, and the lines that the roles do not need.
        changes = shot.changes[-max(1, height // 4, height - around - len(roles)) :]
        left = height - around - len(changes)
        room = max(1, left - (len(roles) > left))  # one line for the remark
        pages = max(1, -(-len(roles) // room))
        first = (page % pages) * room
        if pages > 1:
            remark = f"{first + 1} to {min(first + room, len(roles))} of {len(roles)}; n, p: more"
        roles = roles[first : first + room]
    dim = "dim" if stale else ""
    parts: list[RenderableType] = [_title(shot, width, "unknown; before: " if stale else "")]
    if stale:
        parts.append(_line(stale, "bold red"))
    parts += [*nodes, _roles(roles, width, dim)]
    if remark:
        parts.append(_line(remark, "dim"))
    parts += [_line(line, "yellow") for line in advice]
    if changes:
        parts += [Text(), *(_change(event, width, dim) for event in changes)]
    if keys:
        parts.append(_line(keys, "dim"))
    return Group(*parts)


def _advice(roles: Sequence[history.RoleView], width: int) -> list[str]:
    """Why no node may act, and the command to copy: on a separate line if it does not fit after the reason."""
    lines = []
    for why, command in remedies(roles, REMEDIES_SHOWN):
        whole = f"{why} ->{command}"
        lines += [whole] if len(whole) <= width else [*textwrap.wrap(why, width, break_on_hyphens=False), command]
    return lines


def _line(text: str, style: str = "") -> "Text":
    from rich.text import Text  # noqa: PLC0415

    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _title(shot: Snapshot, width: int, unknown: str) -> "Text":
    clock = f"{shot.at.astimezone():%H:%M:%S}"
    text = f"{shot.namespace}  {unknown}{summary(shot.roles)}{shot.elsewhere}"
    room = width - len(clock) - 2
    shown = text if len(text) <= room else text[: room - 1] + "…"
    return _line(f"{shown:<{room}}  {clock}", "bold")


def _nodes(shot: Snapshot, width: int, lines_max: int) -> "list[Text]":
    live = [node for node in shot.nodes if node.live]
    words = [
        f"{node.node_id}{_NO_BREAK}({node.leads}{'' if node.state == 'alive' else f',{_NO_BREAK}{node.state}'})"
        for node in live[:NODES_SHOWN]
    ]
    more = f" and {len(live) - NODES_SHOWN} more" if len(live) > NODES_SHOWN else ""
    gone = [f"{node.node_id}{_NO_BREAK}{node.state}" for node in shot.nodes if node.state == "silent"]
    text = f"nodes: {', '.join(words) or 'none alive'}{more}" + (f"; {', '.join(gone)}" if gone else "")
    lines = textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) if lines_max > 1 else [text]
    if len(lines) > lines_max:
        lines = [*lines[: lines_max - 1], " ".join(lines[lines_max - 1 :])]
    return [_line(line.replace(_NO_BREAK, " "), "" if live else "bold red") for line in lines]


def _roles(roles: Sequence[history.RoleView], width: int, dim: str) -> "Table":
    """The leaders and whether they may act, in full; then further columns as far as there is room, most useful
    first."""
    from rich.cells import cell_len  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    columns = {
        "role": [role.role for role in roles],
        "leader": [leader(role) for role in roles],
        "state": [state(role) for role in roles],
        "epoch": [str(role.epoch) for role in roles],
        "tenure": [span(role.tenure_s) for role in roles],
        "heartbeat": [span(role.heartbeat_age_s) for role in roles],
        "candidates": [str(role.candidates) for role in roles],
        "leads since": [
            "-" if role.acquired_at is None else f"{role.acquired_at.astimezone():%F %T}" for role in roles
        ],
    }
    needs = {heading: max(map(cell_len, (heading, *cells))) for heading, cells in columns.items()}
    # Cut a long name before leaving out other columns.
    role_max = min(needs["role"], max(ROLE_COLUMNS_MIN, width * 2 // 5))
    left = width - role_max - needs["leader"] - needs["state"] - 2 * COLUMN_GAP
    shown = {"role", "leader", "state"}
    for heading in ("heartbeat", "epoch", "tenure", "candidates", "leads since"):
        if needs[heading] + COLUMN_GAP <= left:
            shown.add(heading)
            left -= needs[heading] + COLUMN_GAP
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0), header_style="bold dim")
    for heading in columns:
        if heading in shown:
            room = max(ROLE_COLUMNS_MIN // 2, role_max + left) if heading == "role" else None
            side: Literal["left", "right"] = "right" if heading in _NUMBERS else "left"
            table.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis", max_width=room)
    for index, role in enumerate(roles):
        cells = [cells[index] for heading, cells in columns.items() if heading in shown]
        table.add_row(
            *(Text(printable(cell), overflow="ellipsis") for cell in cells),
            style=dim or _STYLES[history.STATES[role.state][1]],
        )
    return table


def _change(event: history.Event, width: int, dim: str) -> "Text":
    moment = event.at.astimezone()
    style = dim or _CHANGE_STYLES.get(event.kind, "")
    if width < WIDE_COLUMNS:
        return _line(f"{moment:%H:%M:%S} {sentence(event)}", style)
    return _line(f"{moment:%Y-%m-%d %H:%M:%S}  {sentence(event, KIND_COLUMNS)}", style)


# --- The terminal


class Terminal:
    """While entered, takes over the screen and the keyboard. Ctrl-Z restores both until the program is continued.

    `on_key` is called with each key, and with `q` for a signal that asks for the end.
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
            with ttou_blocked():
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
            with contextlib.suppress(OSError, termios.error), ttou_blocked():
                termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)

    def _suspend(self) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        # SIGCONT has come, such as by `fg`.
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


# --- The reader


class _Watcher:
    """Reads the ledger repeatedly, and keeps the last result."""

    def __init__(self, dsn: str, namespace: str, channel: str, interval_s: float) -> None:
        self._dsn = dsn
        self._namespace = namespace
        self._channel = channel
        self._interval_s = interval_s
        self._feed = history.EventFeed(namespace)
        self._changes: deque[history.Event] = deque(maxlen=CHANGES_SHOWN)
        self._shot: Snapshot | None = None
        self._shot_at = 0.0
        self._error = ""
        self._page = 0
        self._quit = asyncio.Event()
        self._console = table_console()

    async def once(self) -> None:
        """Print one snapshot."""
        async with open_ledger(self._dsn, "watch") as look:
            await self._look(look)
        print_table(self._console, picture(self._shot, width=self._console.width, height=None))

    async def live(self) -> None:
        """Show the snapshots on the whole screen until `q` or a signal."""
        looking: asyncio.Future[None] | None = None
        try:
            with Terminal(self._console, self._render, self._key) as terminal:
                looking = asyncio.ensure_future(self._keep_looking(terminal))
                await first_of(asyncio.shield(looking), self._tick(terminal), self._quit.wait())
        finally:
            # After the terminal was restored, because closing a connection may take a moment.
            if looking is not None:
                await cancel_and_wait(looking)
        if not looking.cancelled():
            looking.result()  # it only ends with an error, which this raises

    async def _keep_looking(self, terminal: Terminal) -> None:
        async def read(look: LedgerLook) -> None:
            while True:
                await self._look(look)
                terminal.refresh()
                await look.woken(self._interval_s)
                # One change comes with many notifications.
                await asyncio.sleep(GAP_S_MIN)

        def lost(error: ConnectionError) -> None:
            if self._shot is None and hopeless(error):
                raise error
            self._error = _in_brief(error)
            terminal.refresh()

        await keep_reading(self._dsn, "watch", channel=self._channel, read=read, lost=lost)

    async def _look(self, look: LedgerLook) -> None:
        if self._shot is None:
            self._changes.extend(await self._feed.begin(look, since_s=LOOK_BACK_S, limit=CHANGES_SHOWN))
        else:
            self._changes.extend(await self._feed.more(look))
        roles = await history.all_roles(look, self._namespace)
        nodes = await history.nodes(look, self._namespace, heard_within_s=SILENT_SHOWN_S)
        others = "" if roles else await elsewhere(look, self._namespace)
        self._shot = Snapshot(self._namespace, roles, nodes, tuple(self._changes), dt.datetime.now(dt.UTC), others)
        self._shot_at = BOOT_CLOCK.now()
        self._error = ""

    async def _tick(self, terminal: Terminal) -> None:
        """Redraw regularly, so that the picture is marked as stale even while a statement hangs."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._stale():
                terminal.refresh()

    def _stale(self) -> str:
        if self._shot is None:
            return self._error and f"no database yet, waiting for it: {self._error}"
        silent = BOOT_CLOCK.now() - self._shot_at > self._interval_s + HANGS_S
        if not self._error and not silent:
            return ""
        return f"stale since {self._shot.at.astimezone():%H:%M:%S}: {self._error or 'the database does not answer'}"

    def _render(self) -> "RenderableType":
        width, height = self._console.size
        return picture(self._shot, width=width, height=height, page=self._page, stale=self._stale(), keys="q: quit")

    def _key(self, key: str) -> None:
        if key == "q":
            self._quit.set()
        elif key in PAGE_KEYS:
            self._page += PAGE_KEYS[key]


def _in_brief(error: ConnectionError) -> str:
    """The error shortened for one line; `status` shows all of it."""
    if isinstance(error, Unreachable):
        return f"cannot connect ({error.kind})"
    return str(error).partition(":")[0]
