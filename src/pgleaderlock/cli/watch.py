"""`pgleaderlock watch`: roles, leaders, nodes and changes, live in a terminal; one plain snapshot anywhere else.

The database may go away: the last picture stays, says since when it is stale, and goes on when the database is back.

Imports click, rich (through `_watch_screen`), `history` and its neighbours. It looks, and takes no lock.
"""

import asyncio
import datetime as dt
import os
import sys
from collections import deque
from typing import TYPE_CHECKING

import click

from pgleaderlock import history
from pgleaderlock._clock import BOOT_CLOCK
from pgleaderlock._jitter import JITTER
from pgleaderlock.cli._operations import LedgerLook, channel_option, namespace_option, open_ledger, table_console
from pgleaderlock.cli._output import EXIT_OK, dsn_option
from pgleaderlock.cli._reach import Unreachable, hopeless
from pgleaderlock.cli._timing import POSITIVE
from pgleaderlock.cli._watch_screen import CHANGES_SHOWN, Snapshot, Terminal, picture
from pgleaderlock.errors import ConnectionError
from pgleaderlock.retry import reconnect_jitter_s

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["watch"]

INTERVAL_S = 1.0
RETRY_S = 1.0
TICK_S = 1.0
HANGS_S = 2.0
GAP_S_MIN = 0.1
LOOK_BACK_S = 86400.0
SILENT_SHOWN_S = 600.0
PAGE_KEYS = {"n": 1, " ": 1, "p": -1, "b": -1}


@click.command(short_help="Watch roles, leaders and changes, live.")
@dsn_option
@namespace_option
@channel_option
@click.option("--interval", type=POSITIVE, default=INTERVAL_S, help="How often to look.  [default: 1s]")
def watch(dsn: str, namespace: str, channel: str, interval: float) -> int:
    """Watch each role with its leader, epoch, tenure and the age of its heartbeat, the nodes, and the latest changes.

    Roles without a leader come first. q or Ctrl-C ends it; n and p turn the pages. A notification of the nodes shows a
    change at once. When the output is no terminal, one snapshot is printed.

    Exit codes: 0 ended as asked, 2 it could not be found out.
    """
    watcher = _Watcher(dsn, namespace, channel, interval)
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        asyncio.run(watcher.live())
    else:
        asyncio.run(watcher.once())
    return EXIT_OK


class _Watcher:
    """Looks again and again, and knows what was seen last."""

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
        """Prints what there is now."""
        async with open_ledger(self._dsn, "watch") as look:
            await self._look(look)
        with self._console.capture() as captured:
            self._console.print(picture(self._shot, width=self._console.width, height=None))
        for line in captured.get().splitlines():
            print(line.rstrip())

    async def live(self) -> None:
        """Shows it on the whole screen until somebody has had enough."""
        looking: asyncio.Future[None] | None = None
        try:
            with Terminal(self._console, self._render, self._key) as terminal:
                looking = asyncio.ensure_future(self._look_for_ever(terminal))
                ticking = asyncio.ensure_future(self._tick(terminal))
                quitting = asyncio.ensure_future(self._quit.wait())
                await asyncio.wait([looking, ticking, quitting], return_when=asyncio.FIRST_COMPLETED)
                ticking.cancel()
                quitting.cancel()
        finally:
            # After the terminal has been given back: ending a connection may take a moment.
            if looking is not None and not looking.done():
                looking.cancel()
                await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()  # it ends by an error alone

    async def _look_for_ever(self, terminal: Terminal) -> None:
        while True:
            try:
                async with open_ledger(self._dsn, "watch", listen=self._channel) as look:
                    while True:
                        await self._look(look)
                        terminal.refresh()
                        await look.woken(self._interval_s)
                        # One change comes with many notifications.
                        await asyncio.sleep(GAP_S_MIN)
            except ConnectionError as error:
                if self._shot is None and hopeless(error):
                    raise
                self._error = _in_brief(error)
                terminal.refresh()
            await asyncio.sleep(RETRY_S + reconnect_jitter_s(RETRY_S, JITTER))

    async def _look(self, look: LedgerLook) -> None:
        if self._shot is None:
            self._changes.extend(await self._feed.begin(look, since_s=LOOK_BACK_S, limit=CHANGES_SHOWN))
        else:
            self._changes.extend(await self._feed.more(look))
        roles = await history.all_roles(look, self._namespace)
        nodes = await history.nodes(look, self._namespace, heard_within_s=SILENT_SHOWN_S)
        self._shot = Snapshot(self._namespace, roles, nodes, tuple(self._changes), dt.datetime.now(dt.UTC))
        self._shot_at = BOOT_CLOCK.now()
        self._error = ""

    async def _tick(self, terminal: Terminal) -> None:
        """Whoever looks may hang: the picture must say so all the same."""
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
    """One line has little room; who wants to know more asks `status`."""
    if isinstance(error, Unreachable):
        return f"cannot connect ({error.kind})"
    return str(error).partition(":")[0]
