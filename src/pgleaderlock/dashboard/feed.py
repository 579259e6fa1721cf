"""What has changed, told to every open page: one look at the ledger feeds them all, however many there are.

A notification of the nodes wakes the look, and every second it is taken anyway; while no page is open, not at all. A
stream that does not keep up is told to load its page again instead of being sent what it missed: nobody's slowness
costs memory.

    event: leaders   {"now_ms", "leaders": rows}   at first all roles, then those that have changed
    event: nodes     {"now_ms", "nodes": rows}     all nodes, whenever one was heard
    event: event     one event of the ledger; its number is the id
    event: stale     {"since_ms"}                  the database is away: what was told last is from then
    event: fresh     {"now_ms"}                    it is back
    event: reload    {}                            something was left out: ask for everything again
    event: end       {}                            the server stops: come back

Imports `_queries`, `_subscription`, `_listener`, `history` and `wire`. Must never wait for a reader.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

import msgspec

from pgleaderlock import history
from pgleaderlock._clock import BOOT_CLOCK
from pgleaderlock._conninfo import ConnectionSettings, Dsn
from pgleaderlock._http.answers import Refusal
from pgleaderlock._http.bodies import stopping
from pgleaderlock._jitter import JITTER
from pgleaderlock._listener import listen
from pgleaderlock._logging import get_logger
from pgleaderlock.dashboard import _queries, wire
from pgleaderlock.dashboard._reading import Ledger
from pgleaderlock.dashboard._subscription import RELOAD, Subscription, message

__all__ = ["Feed", "FeedTiming"]

PAGE = 1_000
LEADERS_MAX = 10_000
"""Roles that are followed; the others are on the pages, and change when those are loaded again."""
RING_MAX = 2_000
EVENTS_MAX = 1_000
"""More events than this at once are not told one by one."""
RESUMES_MAX = 20
"""Streams that are told from the database what they missed, in one look; the others load their pages again."""
NODES_A_SECOND = 100
END_GRACE_S = 0.5


class FeedTiming(msgspec.Struct, frozen=True):
    poll_s: float = 1.0
    pause_s: float = 0.1
    """Between two looks at least, however often the nodes notify."""
    retry_s: float = 0.5
    late_s: float = 2.0
    """How long a look may take before what was told last is called stale."""
    linger_s: float = 10.0
    """How long looks go on without a stream."""


class _Known:
    """What the looks of one run have seen."""

    def __init__(self, namespace: str) -> None:
        self.events = history.EventFeed(namespace)
        self.began = False
        self.ring: deque[wire.Event] = deque(maxlen=RING_MAX)
        """The last events, in the order in which they were told."""
        self.leaders: dict[str, wire.Leader] = {}
        self.untold: list[wire.Event] = []
        """Events of a look that has not come to its end: the next one tells them."""
        self.untold_nodes: list[bytes] = []
        """The same of the nodes."""
        self.nodes: tuple[wire.Node, ...] = ()
        self.nodes_due_at = 0.0
        self.now_ms = 0
        self.stale_since_ms: int | None = None
        self._snapshot: list[bytes] = []
        self._heard: list[object] = []

    def snapshot(self) -> list[bytes]:
        if not self._snapshot:
            nodes = wire.encode({"now_ms": self.now_ms, "nodes": self.nodes})
            self._snapshot = [*_leader_messages(self.now_ms, list(self.leaders.values())), message("nodes", nodes)]
        return self._snapshot

    def changed(self, seen: Sequence[wire.Leader]) -> list[wire.Leader]:
        """Those that differ by more than their age."""
        changed = [row for row in seen if _lasting(row) != _lasting(self.leaders.get(row.role))]
        self.leaders.update({row.role: row for row in seen})
        self._snapshot = []
        return changed

    def heard(self, seen: tuple[wire.Node, ...], now_ms: int) -> bool:
        """Whether there is anything new about the nodes."""
        before, self._heard = self._heard, [_heard(row, now_ms) for row in seen]
        self.nodes = seen
        return self._heard != before


class Feed:
    """`subscribe`, and `unsubscribe` in the end; `stop` ends all streams, `close` everything."""

    def __init__(
        self, dsn: Dsn, namespace: str, channel: str, *, streams_max: int, timing: FeedTiming | None = None
    ) -> None:
        self._dsn = dsn
        self._namespace = namespace
        self._channel = channel
        self._streams_max = streams_max
        self._timing = timing or FeedTiming()
        self._streams: set[Subscription] = set()
        self._task: asyncio.Task[None] | None = None
        self._known: _Known | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._log = get_logger("pgleaderlock.dashboard")

    def subscribe(self, *, role: str | None, node: str | None, after: int | None) -> Subscription:
        if self._stopping:
            raise stopping()
        if len(self._streams) >= self._streams_max:
            text = f"{len(self._streams)} pages are open already: raise --max-connections, or close some"
            raise Refusal(503, text, (b"retry-after", b"5"))
        stream = Subscription(role, node, after)
        self._streams.add(stream)
        known = self._known
        if known is None:
            self._known = _Known(self._namespace)
            self._task = asyncio.ensure_future(self._run(self._known))
        elif known.stale_since_ms is not None:
            stream.push(_stale(known.stale_since_ms))
        elif known.leaders and after is None:
            self._prime(stream, known, [])
        else:
            self._wake.set()
        return stream

    def unsubscribe(self, stream: Subscription) -> None:
        self._streams.discard(stream)

    def stop(self) -> None:
        """Ends every stream, by its own event; who does not read that is cut off a moment later."""
        self._stopping = True
        for stream in self._streams:
            stream.end()
        asyncio.get_running_loop().call_later(END_GRACE_S, self._cut)

    def _cut(self) -> None:
        for stream in self._streams:
            if not stream.cut.done():
                stream.cut.set_result(None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- The one who looks

    async def _run(self, known: _Known) -> None:
        loop, timing = asyncio.get_running_loop(), self._timing
        ledger = Ledger(self._dsn, connections_max=1)
        listening = asyncio.ensure_future(self._listen())
        try:
            needed_at = loop.time()
            while self._streams or loop.time() < needed_at + timing.linger_s:
                if self._streams:
                    needed_at = loop.time()
                self._wake.clear()
                wait_s = timing.poll_s
                try:
                    await self._look_in_time(ledger, known)
                except Exception as error:
                    self._lost(known, error)
                    wait_s = timing.retry_s
                await asyncio.sleep(timing.pause_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
        finally:
            self._known = self._task = None  # first: whoever comes now begins anew
            listening.cancel()
            await asyncio.wait([listening])
            await ledger.close()

    async def _listen(self) -> None:
        settings = ConnectionSettings("pgleaderlock dashboard", statement_timeout_s=5.0, lease_s=15.0)
        await listen(
            self._dsn,
            settings,
            self._channel,
            lambda _payload: self._wake.set(),
            clock=BOOT_CLOCK,
            rng=JITTER,
            log=self._log,
        )

    async def _look_in_time(self, ledger: Ledger, known: _Known) -> None:
        """A look that takes long goes on, and the pages are told that what they show is old."""
        looking = asyncio.ensure_future(self._look(ledger, known))
        try:
            done, _ = await asyncio.wait([looking], timeout=self._timing.late_s)
            if not done:
                self._lost(known, TimeoutError(f"no answer within {self._timing.late_s:g} s"))
            await looking
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    async def _look(self, ledger: Ledger, known: _Known) -> None:
        known.untold += await self._new_events(ledger, known)
        page = await _queries.leaders(ledger, self._namespace, limit=PAGE)
        now_ms, seen = page.now_ms, page.leaders
        while page.next_cursor is not None and len(seen) < LEADERS_MAX:
            page = await _queries.leaders(ledger, self._namespace, after=page.next_cursor, limit=PAGE)
            seen += page.leaders
        await self._nodes(ledger, known)
        coming = [stream for stream in self._streams if not stream.primed]
        resumed = await self._resumed(ledger, known, coming)
        # From here on nothing waits: every stream sees the same order of things.
        known.now_ms = now_ms
        fresh, known.untold = known.untold, []
        chunks = [*_leader_messages(now_ms, known.changed(seen)), *known.untold_nodes]
        known.untold_nodes = []
        back, known.stale_since_ms = known.stale_since_ms is not None, None
        if back:
            self._log.info("ledger_back")
            chunks.insert(0, message("fresh", wire.encode({"now_ms": now_ms})))
        self._tell(chunks, fresh)
        for stream in coming:  # those that have come meanwhile are told by the next look, which they have asked for
            self._prime(stream, known, chunks[:1] if back else [])
            self._resume(stream, known, resumed)

    def _tell(self, chunks: Sequence[bytes], fresh: Sequence[wire.Event]) -> None:
        together = _event_messages(fresh)
        for stream in self._streams:
            if not stream.primed:
                continue
            for chunk in chunks:
                stream.push(chunk)
            plain = stream.role is None and stream.node is None and not stream.told
            events = together if plain else _event_messages([event for event in fresh if stream.wants(event)])
            if events:
                stream.push(events)

    async def _new_events(self, ledger: Ledger, known: _Known) -> list[wire.Event]:
        if known.began:
            fresh = [_event(event) for event in await known.events.more(ledger)]
            known.ring.extend(fresh)
            return fresh
        lately = await known.events.begin(ledger, since_s=history.LATE_COMMIT_S, limit=PAGE)
        known.ring.extend(_event(event) for event in lately)
        known.began = True
        return []

    async def _nodes(self, ledger: Ledger, known: _Known) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < known.nodes_due_at:
            return
        reply = await _queries.nodes(ledger, self._namespace, limit=PAGE)
        known.nodes_due_at = loop.time() + max(self._timing.poll_s * 0.9, len(reply.nodes) / NODES_A_SECOND)
        if known.heard(tuple(reply.nodes), reply.now_ms):
            known.untold_nodes = [message("nodes", wire.encode({"now_ms": reply.now_ms, "nodes": reply.nodes}))]

    async def _resumed(
        self, ledger: Ledger, known: _Known, coming: Sequence[Subscription]
    ) -> dict[int, list[wire.Event] | None]:
        """What those missed who come back after an event that is not among the last ones; None: too much to tell."""
        told = {event.event_id for event in known.ring}
        wanted = {stream.after for stream in coming if stream.after is not None} - told
        found: dict[int, list[wire.Event] | None] = {}
        for after in sorted(wanted)[:RESUMES_MAX]:
            page = await _queries.events_after(ledger, self._namespace, after=after, limit=EVENTS_MAX)
            found[after] = page.events if page.next_cursor is None else None
        return found

    def _prime(self, stream: Subscription, known: _Known, first: Sequence[bytes]) -> None:
        stream.primed = True
        for chunk in (*first, *known.snapshot()):
            stream.push(chunk)

    def _resume(self, stream: Subscription, known: _Known, resumed: dict[int, list[wire.Event] | None]) -> None:
        if stream.after is None:
            return
        missed = resumed.get(stream.after)
        if stream.after not in resumed:
            numbers = [event.event_id for event in known.ring]
            if stream.after in numbers:
                missed = list(known.ring)[numbers.index(stream.after) + 1 :]
        if missed is None:
            stream.push(RELOAD)
            return
        wanted = _event_messages([event for event in missed if stream.wants(event)])
        stream.told = frozenset(event.event_id for event in missed)
        if wanted:
            stream.push(wanted)

    def _lost(self, known: _Known, error: Exception) -> None:
        if known.stale_since_ms is not None:
            return
        known.stale_since_ms = known.now_ms or _queries.wall_ms()
        self._log.warning("ledger_away", error=str(error) or type(error).__name__)
        for stream in self._streams:
            stream.push(_stale(known.stale_since_ms))


def _stale(since_ms: int) -> bytes:
    return message("stale", wire.encode({"since_ms": since_ms}))


def _leader_messages(now_ms: int, rows: Sequence[wire.Leader]) -> list[bytes]:
    return [
        message("leaders", wire.encode({"now_ms": now_ms, "leaders": rows[start : start + PAGE]}))
        for start in range(0, len(rows), PAGE)
    ]


def _event_messages(events: Sequence[wire.Event]) -> bytes:
    if len(events) > EVENTS_MAX:
        return message("reload", b"{}", events[-1].event_id)
    return b"".join(message("event", wire.encode(event), event.event_id) for event in events)


def _event(event: history.Event) -> wire.Event:
    return wire.Event(
        event.event_id,
        int(event.at.timestamp() * 1000),
        event.kind,
        event.role,
        event.node_id,
        event.epoch,
        event.detail,
    )


def _lasting(row: wire.Leader | None) -> object:
    return row and (
        row.leader, row.epoch, row.since_ms, row.heartbeat, row.gate, row.candidates, row.last_change
    )  # fmt: skip


def _heard(row: wire.Node, now_ms: int) -> object:
    # To a tenth of a second: both numbers have been rounded.
    beat = round((now_ms - row.heartbeat_age_ms) / 100)
    return (row.session_id, beat, row.live, row.candidate, row.draining, row.roles)
