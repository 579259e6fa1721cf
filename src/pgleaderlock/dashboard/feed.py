"""The live stream: one query of the ledger feeds all open pages, however many there are.

The feed reads the ledger ("looks") at a notification from a node, and otherwise once per second; without a stream, it
does not look. A stream that cannot keep up gets `reload` instead of the messages that it missed, so a slow reader costs
no memory.

    event: leaders   {"now_ms", "leaders": rows}   at first all roles, then those that have changed
    event: nodes     {"now_ms", "nodes": rows}     all nodes, whenever one was heard
    event: event     one event of the ledger; its number is the id
    event: stale     {"since_ms"}                  the database is unreachable: the data is from this time
    event: fresh     {"now_ms"}                    the database answers again
    event: reload    {}                            messages were left out: load everything again
    event: end       {}                            the server is stopping: reconnect

Must never wait for a reader while it looks, nor queue more than `QUEUE_MAX` messages for one.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from pgleaderlock import history
from pgleaderlock._base.aio import cancel_and_wait, first_of, settle, within
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._base.logging import get_logger
from pgleaderlock._http.answers import Receive, Refusal, Send
from pgleaderlock._http.server import stopping
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn
from pgleaderlock._pg.listener import listen
from pgleaderlock._pg.reader import ReadPool
from pgleaderlock.dashboard import api
from pgleaderlock.dashboard.logins import Login
from pgleaderlock.retry import JITTER

__all__ = ["STREAM", "Feed", "FeedTiming", "Subscription", "stream"]

STREAM = b"text/event-stream"
PAGE = 1_000
LEADERS_MAX = 10_000
"""The most roles that the feed follows. The others are on the pages, and change when a page is loaded again."""
RING_MAX = 2_000
EVENTS_MAX = 1_000
"""If there are more events than this at once, the streams get `reload` instead."""
RESUMES_MAX = 20
"""The most resumed streams whose missed events one look reads from the database; the others get `reload`."""
NODES_PER_SECOND = 100
QUEUE_MAX = 32
PING_S = 5.0
PIECE_BYTES = 64 * 1024
"""The most bytes written at once: more could cost memory for a slow reader."""
END_GRACE_S = 0.5

_HEADERS = [
    (b"content-type", STREAM),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),  # a buffering proxy would delay every message
]


class FeedTiming(msgspec.Struct, frozen=True):
    poll_s: float = 1.0
    pause_s: float = 0.1
    """The shortest time between two looks, however often the nodes notify."""
    retry_s: float = 0.5
    late_s: float = 2.0
    """How long a look may take before the data on the pages is reported as stale."""
    linger_s: float = 10.0
    """How long the feed goes on looking without a stream."""


class Feed:
    """Call `subscribe`, and `unsubscribe` at the end; `stop` ends all streams, `close` everything."""

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

    def subscribe(self, *, role: str | None, node: str | None, after: int | None) -> "Subscription":
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
            stream.prime(known.snapshot())
        else:
            self._wake.set()
        return stream

    def unsubscribe(self, stream: "Subscription") -> None:
        self._streams.discard(stream)

    def stop(self) -> None:
        """Ends every stream with an `end` event. If a reader does not take it, its stream is cut a moment later."""
        self._stopping = True
        for stream in self._streams:
            stream.end()
        asyncio.get_running_loop().call_later(END_GRACE_S, self._cut)

    def _cut(self) -> None:
        for stream in self._streams:
            settle(stream.cut)

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def _run(self, known: "_Known") -> None:
        loop, timing = asyncio.get_running_loop(), self._timing
        ledger = ReadPool(self._dsn, connections_max=1)
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
                await within(wait_s, self._wake.wait())
        finally:
            self._known = self._task = None  # do this first: a stream that subscribes now then starts a new run
            await cancel_and_wait(listening)
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

    async def _look_in_time(self, ledger: ReadPool, known: "_Known") -> None:
        """Look at the ledger. If that takes too long, report the data as stale, and go on waiting."""
        looking = asyncio.ensure_future(self._look(ledger, known))
        try:
            done, _ = await asyncio.wait([looking], timeout=self._timing.late_s)
            if not done:
                self._lost(known, TimeoutError(f"no answer within {self._timing.late_s:g} s"))
            await looking
        finally:
            await cancel_and_wait(looking)

    async def _look(self, ledger: ReadPool, known: "_Known") -> None:
        known.unsent += await self._new_events(ledger, known)
        page = await api.leaders(ledger, self._namespace, limit=PAGE)
        now_ms, seen = page.now_ms, page.leaders
        while page.next_cursor is not None and len(seen) < LEADERS_MAX:
            page = await api.leaders(ledger, self._namespace, after=page.next_cursor, limit=PAGE)
            seen += page.leaders
        await self._nodes(ledger, known)
        coming = [stream for stream in self._streams if not stream.primed]
        resumed = await self._resumed(ledger, known, coming)
        # No await from here on, so that every stream gets the messages in the same order.
        known.now_ms = now_ms
        complete = page.next_cursor is None
        gone = [_message("reload", b"{}")] if complete and known.leaders.keys() - {row.role for row in seen} else []
        chunks = [*_leader_messages(now_ms, known.changed(seen, complete=complete)), *gone, *known.unsent_nodes]
        fresh, known.unsent, known.unsent_nodes = known.unsent, [], []
        back = []
        if known.stale_since_ms is not None:
            known.stale_since_ms = None
            self._log.info("ledger_back")
            back = [_message("fresh", api.encode({"now_ms": now_ms}))]
        self._send([*back, *chunks], fresh)
        for stream in coming:  # a stream that has subscribed meanwhile has requested another look, which primes it
            stream.prime([*back, *known.snapshot()])
            if stream.after is not None:
                stream.resume(resumed[stream.after] if stream.after in resumed else known.since(stream.after))

    def _send(self, chunks: Sequence[bytes], fresh: Sequence[api.Event]) -> None:
        together = _event_messages(fresh)
        for stream in self._streams:
            if stream.primed:
                plain = stream.role is None and stream.node is None and not stream.sent
                events = together if plain else _event_messages([event for event in fresh if stream.wants(event)])
                for chunk in (*chunks, *events):
                    stream.push(chunk)

    async def _new_events(self, ledger: ReadPool, known: "_Known") -> list[api.Event]:
        if known.began:
            fresh = [_event(event) for event in await known.events.more(ledger)]
            known.ring.extend(fresh)
            return fresh
        lately = await known.events.begin(ledger, since_s=history.LATE_COMMIT_S, limit=PAGE)
        known.ring.extend(_event(event) for event in lately)
        known.began = True
        return []

    async def _nodes(self, ledger: ReadPool, known: "_Known") -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < known.nodes_due_at:
            return
        page = await api.nodes(ledger, self._namespace, limit=PAGE)
        known.nodes_due_at = loop.time() + max(self._timing.poll_s * 0.9, len(page.nodes) / NODES_PER_SECOND)
        if known.heard(page):
            known.unsent_nodes = [_node_message(page.now_ms, page.nodes)]

    async def _resumed(
        self, ledger: ReadPool, known: "_Known", coming: Sequence["Subscription"]
    ) -> dict[int, list[api.Event] | None]:
        """The missed events of streams that resume after an event older than the ring, by that event; None: too
        many."""
        kept = {event.event_id for event in known.ring}
        wanted = {stream.after for stream in coming if stream.after is not None} - kept
        found: dict[int, list[api.Event] | None] = {}
        for after in sorted(wanted)[:RESUMES_MAX]:
            page = await api.events_after(ledger, self._namespace, after=after, limit=EVENTS_MAX)
            found[after] = page.events if page.next_cursor is None else None
        return found

    def _lost(self, known: "_Known", error: Exception) -> None:
        if known.stale_since_ms is not None:
            return
        known.stale_since_ms = known.now_ms or api.wall_ms()
        self._log.warning("ledger_away", error=str(error) or type(error).__name__)
        for stream in self._streams:
            stream.push(_stale(known.stale_since_ms))


class _Known:
    """The results of the looks of one run."""

    def __init__(self, namespace: str) -> None:
        self.events = history.EventFeed(namespace)
        self.began = False
        self.ring: deque[api.Event] = deque(maxlen=RING_MAX)
        """The latest events, in the order in which they were sent."""
        self.leaders: dict[str, api.Leader] = {}
        self.unsent: list[api.Event] = []
        """Events of a look that failed half-way: the next look sends them."""
        self.unsent_nodes: list[bytes] = []
        """The same for messages about the nodes."""
        self.nodes_due_at = 0.0
        self.now_ms = 0
        self.stale_since_ms: int | None = None
        self._nodes: Sequence[api.Node] = ()
        self._signs: list[object] = []
        self._snapshot: list[bytes] = []

    def snapshot(self) -> list[bytes]:
        if not self._snapshot:
            leaders = _leader_messages(self.now_ms, list(self.leaders.values()))
            self._snapshot = [*leaders, _node_message(self.now_ms, self._nodes)]
        return self._snapshot

    def changed(self, seen: Sequence[api.Leader], *, complete: bool) -> list[api.Leader]:
        """The roles that differ by more than their age. In a `complete` look, missing roles were forgotten."""
        changed = [row for row in seen if _lasting(row) != _lasting(self.leaders.get(row.role))]
        self.leaders = {**({} if complete else self.leaders), **{row.role: row for row in seen}}
        self._snapshot = []
        return changed

    def heard(self, page: api.NodesReply) -> bool:
        """Whether there is anything new about the nodes."""
        before, self._signs = self._signs, [_signs_of(row, page.now_ms) for row in page.nodes]
        self._nodes = page.nodes
        return self._signs != before

    def since(self, event_id: int) -> list[api.Event] | None:
        """The events after this one; None if it is no longer among the latest."""
        numbers = [event.event_id for event in self.ring]
        return list(self.ring)[numbers.index(event_id) + 1 :] if event_id in numbers else None


class Subscription:
    """One stream in the feed, with the queue of at most `QUEUE_MAX` messages for its reader."""

    def __init__(self, role: str | None, node: str | None, after: int | None) -> None:
        self.role = role
        self.node = node
        self.after = after
        self.primed = False
        """The stream was sent the full state; from then on it gets changes."""
        self.sent: frozenset[int] = frozenset()
        """The events that it was sent when it resumed."""
        self.ending = False
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that is done when the server no longer waits for the reader."""
        self._queue: deque[bytes] = deque()
        self._grown = asyncio.Event()

    def push(self, chunk: bytes) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self._queue.clear()
            self._queue.append(_RELOAD)
        self._queue.append(chunk)
        self._grown.set()

    def prime(self, chunks: Sequence[bytes]) -> None:
        self.primed = True
        for chunk in chunks:
            self.push(chunk)

    def resume(self, missed: Sequence[api.Event] | None) -> None:
        if missed is None:
            self.push(_RELOAD)
            return
        for chunk in _event_messages([event for event in missed if self.wants(event)]):
            self.push(chunk)
        self.sent = frozenset(event.event_id for event in missed)

    def wants(self, event: api.Event) -> bool:
        return (
            (self.role is None or event.role == self.role)
            and (self.node is None or event.node_id == self.node)
            and event.event_id not in self.sent
        )

    def end(self) -> None:
        self.ending = True
        self._queue.append(_END)
        self._grown.set()

    async def next(self, timeout_s: float) -> bytes:
        """The bytes to write next; empty on a timeout."""
        if not self._queue:
            self._grown.clear()
            await within(timeout_s, self._grown.wait())
        return self._queue.popleft() if self._queue else b""

    @property
    def empty(self) -> bool:
        return not self._queue


async def stream(feed: Feed, subscription: Subscription, login: Login | None, receive: Receive, send: Send) -> None:
    """Writes a stream until it ends, its reader leaves, or its login has ended.

    When the server stops, waiting for the reader is interrupted, so that a reader that does not read delays nothing.
    """
    try:
        await first_of(_write(send, subscription, login), _gone(receive), subscription.cut)
    finally:
        feed.unsubscribe(subscription)


async def _write(send: Send, subscription: Subscription, login: Login | None) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    chunk = b"retry: 1000\n\n"
    while login is None or not login.over:
        for start in range(0, len(chunk), PIECE_BYTES):
            piece = chunk[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if subscription.ending and subscription.empty:
            break
        chunk = await subscription.next(PING_S) or b": ping\n\n"
    await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- Messages


def _message(kind: str, data: bytes, number: int | None = None) -> bytes:
    """A server-sent event. The JSON of msgspec never contains a line feed, so it is one line."""
    head = b"" if number is None else b"id: %d\n" % number
    return b"%sevent: %s\ndata: %s\n\n" % (head, kind.encode(), data)


_RELOAD = _message("reload", b"{}")
_END = _message("end", b"{}")


def _stale(since_ms: int) -> bytes:
    return _message("stale", api.encode({"since_ms": since_ms}))


def _leader_messages(now_ms: int, rows: Sequence[api.Leader]) -> list[bytes]:
    return [
        _message("leaders", api.encode({"now_ms": now_ms, "leaders": rows[start : start + PAGE]}))
        for start in range(0, len(rows), PAGE)
    ]


def _node_message(now_ms: int, rows: Sequence[api.Node]) -> bytes:
    return _message("nodes", api.encode({"now_ms": now_ms, "nodes": rows}))


def _event_messages(events: Sequence[api.Event]) -> list[bytes]:
    """All events in one chunk, so that they count as one message in a queue; no chunk without events."""
    if not events:
        return []
    if len(events) > EVENTS_MAX:
        return [_message("reload", b"{}", events[-1].event_id)]
    return [b"".join(_message("event", api.encode(event), event.event_id) for event in events)]


def _event(event: history.Event) -> api.Event:
    at_ms = int(event.at.timestamp() * 1000)
    return api.Event(event.event_id, at_ms, event.kind, event.role, event.node_id, event.epoch, event.detail)


def _lasting(row: api.Leader | None) -> object:
    return row and (
        row.leader,
        row.epoch,
        row.since_ms,
        row.state,
        row.in_flight,
        row.why,
        row.command,
        row.candidates,
        row.last_change,
    )


def _signs_of(row: api.Node, now_ms: int) -> object:
    # Compare in tenths of a second, because both numbers were rounded.
    heard = round((now_ms - row.heartbeat_age_ms) / 100)
    return (row.session_id, heard, row.state, row.live, row.candidate, row.draining, row.roles, row.wants)
