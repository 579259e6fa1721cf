"""`pgleaderlock events`: what has happened, and, with --follow, what happens.

Following outlives the connection: after a restart of the database it goes on where it was, and leaves nothing out.

Imports click, `history` and its neighbours. It looks, and takes no lock.
"""

import asyncio
import json
import shutil
import sys

import click

from pgleaderlock import history
from pgleaderlock._jitter import JITTER
from pgleaderlock.cli._operations import channel_option, namespace_option, open_ledger
from pgleaderlock.cli._output import DURATION, EXIT_OK, dsn_option
from pgleaderlock.cli._reach import hopeless
from pgleaderlock.cli._signals import Stopper
from pgleaderlock.errors import ConnectionError, PgLeaderLockError
from pgleaderlock.retry import reconnect_jitter_s

__all__ = ["events", "sentence"]

POLL_S = 2.0
RETRY_S = 1.0
LIMIT = 100
KIND_COLUMNS = 20
NARROW_COLUMNS = 100


@click.command(short_help="List what has happened, and follow it.")
@dsn_option
@namespace_option
@channel_option
@click.option("--role", help="Only of this role.")
@click.option("--since", type=DURATION, help="Of this time up to now, such as 1h.  [default: all; with --follow, none]")
@click.option(
    "--limit", type=click.IntRange(min=1), default=LIMIT, show_default=True, help="At most the newest so many."
)
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for programs.")
def events(
    *,
    dsn: str,
    namespace: str,
    channel: str,
    role: str | None,
    since: float | None,
    limit: int,
    follow: bool,
    as_json: bool,
) -> int:
    """List what has happened in a namespace, the oldest first: terms that began and ended, requests, drains, sessions.

    With --follow it goes on: a notification of the nodes wakes it, and every 2 s it looks anyway. It waits for a
    database that is away, and then shows what happened meanwhile.

    Exit codes: 0 listed, or ended by Ctrl-C or SIGTERM; 2 it could not be found out.
    """
    if follow:
        follower = _Follower(dsn, namespace, channel, role, as_json=as_json)
        with Stopper() as stopper:
            asyncio.run(follower.run(stopper, since_s=since or 0.0, limit=limit))
        return EXIT_OK
    for event in asyncio.run(_events(dsn, namespace, role, since, limit)):
        _print(event, as_json=as_json)
    return EXIT_OK


async def _events(dsn: str, namespace: str, role: str | None, since_s: float | None, limit: int) -> list[history.Event]:
    found: list[history.Event] = []
    async with open_ledger(dsn, "events") as look:
        while len(found) < limit:
            before_id = found[-1].event_id if found else history.LAST_ID
            wanted = min(limit - len(found), history.PAGE_SIZE)
            page = await history.events(look, namespace, name=role, since_s=since_s, before_id=before_id, limit=wanted)
            found += page
            if len(page) < wanted:
                break
    return found[::-1]


class _Follower:
    """Prints every event once, through as many connections as it takes."""

    def __init__(self, dsn: str, namespace: str, channel: str, role: str | None, *, as_json: bool) -> None:
        self._dsn = dsn
        self._channel = channel
        self._as_json = as_json
        self._feed = history.EventFeed(namespace, role)
        self._began = False
        self._away = False

    async def run(self, stopper: Stopper, *, since_s: float, limit: int) -> None:
        following = asyncio.ensure_future(self._follow(since_s, limit))
        asked = asyncio.ensure_future(stopper.asked())
        await asyncio.wait([following, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not following.done():
            following.cancel()
            await asyncio.wait([following])
            return
        following.result()  # it ends by an error alone

    async def _follow(self, since_s: float, limit: int) -> None:
        while True:
            try:
                await self._follow_once(since_s, limit)
            except ConnectionError as error:
                if not self._began and hopeless(error):
                    raise
                self._lost(error)
            await asyncio.sleep(RETRY_S + reconnect_jitter_s(RETRY_S, JITTER))

    async def _follow_once(self, since_s: float, limit: int) -> None:
        async with open_ledger(self._dsn, "events", listen=self._channel) as look:
            if not self._began:
                self._show(await self._feed.begin(look, since_s=since_s, limit=limit))
                self._began = True
            self._back()
            while True:
                self._show(await self._feed.more(look))
                await look.woken(POLL_S)

    def _show(self, found: list[history.Event]) -> None:
        for event in found:
            _print(event, as_json=self._as_json)

    def _lost(self, error: PgLeaderLockError) -> None:
        if not self._away:
            click.echo(f"the database is away, waiting for it: {' '.join(str(error).split())}", err=True)
        self._away = True

    def _back(self) -> None:
        if self._away:
            click.echo("the database is back", err=True)
        self._away = False


def _print(event: history.Event, *, as_json: bool) -> None:
    if as_json:
        shown = history.as_json(event)
        del shown["age_s"]
        print(json.dumps(shown), flush=True)
    elif sys.stdout.isatty() and shutil.get_terminal_size().columns < NARROW_COLUMNS:
        print(f"{event.at.astimezone():%m-%d %H:%M:%S} {sentence(event)}", flush=True)
    else:
        at = event.at.astimezone().isoformat(sep=" ", timespec="milliseconds")
        print(f"{at}  {sentence(event, KIND_COLUMNS)}", flush=True)


def sentence(event: history.Event, kind_columns: int = 0) -> str:
    """One event in a line: what, which role, who, and what else is known."""
    epoch = "" if event.epoch is None else f"epoch {event.epoch}"
    rest = ", ".join(part for part in (epoch, event.detail) if part)
    words = [f"{event.kind.replace('_', ' '):<{kind_columns}}", event.role, event.node_id and f"by {event.node_id}"]
    return " ".join(word for word in words if word) + (f" ({rest})" if rest else "")
