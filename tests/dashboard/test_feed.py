"""The live stream: one look feeds all, nobody's slowness costs the others, and nothing holds up a stop."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from pgleaderlock import LeaderElection
from pgleaderlock._http.answers import Refusal
from pgleaderlock.dashboard import api, feed
from pgleaderlock.dashboard.feed import Feed, FeedTiming, Subscription
from support.dashboards import SPACE, UGLY, Book, dashboard, ledger, opened
from support.elections import STEADY, opens
from support.lockserver import lock_server
from support.proxy import Proxy

WAIT_S = 20.0
NEVER_S = 3600.0
ASKED = FeedTiming(poll_s=NEVER_S, pause_s=0.0, linger_s=0.1)
"""Looks only when it is woken."""
OFTEN = FeedTiming(poll_s=0.05, pause_s=0.0, retry_s=0.05, linger_s=0.1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Book]:
    with ledger() as written:
        yield written


@pytest.fixture
def book(shared: Book) -> Book:
    """An empty ledger, but for one role that is led."""
    shared.conn.execute("TRUNCATE pgleaderlock.sessions, pgleaderlock.leaders, pgleaderlock.terms, pgleaderlock.events")
    a = shared.session("a")
    shared.led("first", a)
    shared.term("first", 2, a, "a", "-5 min")
    return shared


StartFeed = Callable[..., Feed]


@pytest.fixture
async def start(book: Book) -> AsyncIterator[StartFeed]:
    feeds: list[Feed] = []

    def begin(timing: FeedTiming = ASKED, *, dsn: str = "", streams_max: int = 1000) -> Feed:
        feeds.append(Feed(dsn or book.reader, SPACE, "pgleaderlock", streams_max=streams_max, timing=timing))
        return feeds[-1]

    yield begin
    for each in feeds:
        await each.close()


class Reader:
    """What a stream was told, in order."""

    def __init__(self, stream: Subscription) -> None:
        self.stream = stream
        self.said: list[tuple[str, Any, int | None]] = []

    async def until(self, *kinds: str) -> Any:
        """The data of the next message of one of these kinds."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for index, (kind, data, _) in enumerate(self.said):
                    if kind in kinds:
                        del self.said[: index + 1]
                        return data
                self._take(await self.stream.next(WAIT_S))

    def now(self) -> list[str]:
        """The kinds of all that is there without waiting."""
        kinds = [kind for kind, _, _ in self.said]
        while not self.stream.empty:
            self._take(self.stream._queue.popleft())
            kinds = [kind for kind, _, _ in self.said]
        return kinds

    def _take(self, chunk: bytes) -> None:
        for text in chunk.decode().split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in text.split("\n"))
            number = int(fields["id"]) if "id" in fields else None
            self.said.append((fields["event"], json.loads(fields["data"]), number))


def reading(feed: Feed, *, role: str | None = None, node: str | None = None, after: int | None = None) -> Reader:
    return Reader(feed.subscribe(role=role, node=node, after=after))


async def listened(book: Book, name: str = "pgleaderlock dashboard") -> None:
    """Until the feed listens: what was said before is not heard."""
    async with asyncio.timeout(WAIT_S):
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND query ILIKE 'listen%%'"
        while (book.conn.execute(query, (name,)).fetchone() or (0,))[0] == 0:
            await asyncio.sleep(0.01)


def roles(data: Any) -> list[str]:
    return [row["role"] for row in data["leaders"]]


async def test_a_stream_begins_with_everything_and_goes_on_with_what_changes(book: Book, start: StartFeed) -> None:
    reader = reading(start(OFTEN))
    assert roles(await reader.until("leaders")) == ["first"]
    assert [row["node_id"] for row in (await reader.until("nodes"))["nodes"]] == ["a"]
    book.led("second", None, ended=True)
    assert roles(await reader.until("leaders")) == ["second"], "what has not changed is not told again"
    book.conn.execute("UPDATE pgleaderlock.sessions SET last_heartbeat = now() - interval '4000 s'")
    (row,) = (await reader.until("leaders"))["leaders"]
    assert (row["role"], row["heartbeat"], row["gate"]) == ("first", "late", "shut")


async def test_a_heartbeat_is_told_of_the_node_and_not_of_each_of_its_roles(book: Book, start: StartFeed) -> None:
    reader = reading(start(OFTEN))
    await reader.until("nodes")
    book.conn.execute("UPDATE pgleaderlock.sessions SET last_heartbeat = now() - interval '1000 s'")
    (node,) = (await reader.until("nodes"))["nodes"]
    assert node["heartbeat_age_ms"] >= 1_000_000
    assert "leaders" not in reader.now()


async def test_a_role_that_was_forgotten_makes_the_pages_load_again(book: Book, start: StartFeed) -> None:
    book.led("second", None, ended=True)
    looking = start(OFTEN)
    reader = reading(looking)
    assert roles(await reader.until("leaders")) == ["first", "second"]
    book.conn.execute("UPDATE pgleaderlock.leaders SET forgotten_epoch = epoch WHERE role = 'second'")
    await reader.until("reload")
    assert roles(await reading(looking).until("leaders")) == ["first"], "who comes later is not told of it"


async def test_a_notification_wakes_the_look(book: Book, start: StartFeed) -> None:
    reader = reading(start(ASKED))
    await reader.until("nodes")
    await listened(book)
    number = book.event("acquired", UGLY[0], "a", epoch=3, detail=UGLY[1])
    book.notify()
    told = await reader.until("event")
    assert (told["event_id"], told["role"], told["detail"]) == (number, UGLY[0], UGLY[1])


async def test_an_election_is_seen_as_it_happens(book: Book, start: StartFeed) -> None:
    # Woken by the nodes alone: none of this would be seen by waiting for the next look.
    reader = reading(start(ASKED))
    await reader.until("nodes")
    await listened(book)

    async def next_row() -> tuple[str | None, int, str, str]:
        while True:
            for row in (await reader.until("leaders"))["leaders"]:
                if row["role"] == "real":
                    return row["leader"], row["epoch"], row["gate"], row["last_change"]["kind"]

    async with LeaderElection(book.dsn, "real", node_id="n1", **STEADY) as first:
        await opens(first, "real")
        assert await next_row() == ("n1", 1, "open", "acquired")
    assert await next_row() == (None, 1, "shut", "released")
    async with LeaderElection(book.dsn, "real", node_id="n2", **STEADY) as second:
        await opens(second, "real")
        assert await next_row() == ("n2", 2, "open", "acquired")


@pytest.mark.parametrize("role", ["real", None])
async def test_a_leader_that_is_drained_is_shown_with_its_gate_shut_while_its_work_ends(
    book: Book, start: StartFeed, role: str | None
) -> None:
    reader = reading(start(OFTEN))
    await reader.until("nodes")

    async def until_gate(gate: str) -> str | None:
        while True:
            for row in (await reader.until("leaders"))["leaders"]:
                if (row["role"], row["gate"]) == ("real", gate):
                    return cast("str | None", row["leader"])

    async with LeaderElection(book.dsn, "real", node_id="n1", **STEADY) as node:
        await opens(node, "real")
        assert await until_gate("open") == "n1"
        with node.gate("real").acting():
            draining = asyncio.ensure_future(node.drain(role, timeout_s=WAIT_S))
            assert await until_gate("shut") == "n1", "it leads still, and its gate lets nobody in"
            assert not node.gate("real").is_leader
        await draining


async def test_without_a_notification_it_is_seen_all_the_same(book: Book, start: StartFeed) -> None:
    reader = reading(start(OFTEN))
    await reader.until("nodes")
    book.event("lost", "first")
    assert (await reader.until("event"))["kind"] == "lost"


async def test_a_hundred_streams_cost_one_look(book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    asked = api.leaders

    async def counted(*args: Any, **more: Any) -> Any:
        looks.append(1)
        return await asked(*args, **more)

    monkeypatch.setattr(api, "leaders", counted)
    feed = start(ASKED)
    readers = [reading(feed) for _ in range(100)]
    for reader in readers:
        await reader.until("nodes")
    await listened(book)
    before = len(looks)
    book.event("acquired", "first")
    book.notify()
    for reader in readers:
        await reader.until("event")
    assert len(looks) - before <= 2, "one for the notification, and perhaps one for the listener's own wake-up"


async def test_a_stream_is_told_of_its_own_role_or_node_only(book: Book, start: StartFeed) -> None:
    feed = start(OFTEN)
    of_role, of_node = reading(feed, role="r"), reading(feed, node="n")
    await of_role.until("nodes")
    await of_node.until("nodes")
    for role, node in (("r", "m"), ("s", "n"), ("s", "m"), ("r", "n")):
        book.event("acquired", role, node)
    assert [(await of_role.until("event"))["node_id"] for _ in range(2)] == ["m", "n"]
    assert [(await of_node.until("event"))["role"] for _ in range(2)] == ["s", "r"]


async def test_a_slow_reader_is_told_to_load_again_and_costs_no_more_memory(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "QUEUE_MAX", 4)
    running = start(OFTEN)
    slow, quick = reading(running), reading(running)
    await quick.until("nodes")
    for number in range(6):
        book.event("acquired", str(number))
        assert (await quick.until("event"))["role"] == str(number)
        assert len(slow.stream._queue) <= 5
    assert "reload" in slow.now()
    assert "reload" not in quick.now()
    slow.said.clear()
    book.event("acquired", "afterwards")
    assert (await slow.until("event"))["role"] == "afterwards"


async def test_more_events_at_once_than_can_be_told_are_a_reload(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "EVENTS_MAX", 3)
    reader = reading(start(ASKED))
    await reader.until("nodes")
    await listened(book)
    numbers = [book.event("acquired", str(number)) for number in range(4)]
    book.notify()
    await reader.until("reload")
    assert reader.now() == []
    book.event("acquired", "one more")
    book.notify()
    assert (await reader.until("event"))["event_id"] > numbers[-1]


async def test_every_role_is_followed_also_beyond_a_page(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "PAGE", 2)
    for number in range(4):
        book.led(f"more-{number}", None, ended=True)
    reader = reading(start(OFTEN))
    told = [roles(await reader.until("leaders")) for _ in range(3)]
    assert told == [["first", "more-0"], ["more-1", "more-2"], ["more-3"]]
    book.conn.execute("UPDATE pgleaderlock.leaders SET epoch = 9 WHERE role = 'more-3'")
    assert roles(await reader.until("leaders")) == ["more-3"]


async def test_what_a_look_has_seen_is_told_though_it_fails_half_way(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reading(start(OFTEN))
    await reader.until("nodes")
    asked, fails = api.leaders, True

    async def failing(*args: Any, **more: Any) -> Any:
        if fails:
            raise RuntimeError("away, between two questions")
        return await asked(*args, **more)

    monkeypatch.setattr(api, "leaders", failing)
    number = book.event("lost", "first")
    await reader.until("stale")
    fails = False
    await reader.until("fresh")
    last = book.event("acquired", "first")
    assert [(await reader.until("event"))["event_id"] for _ in range(2)] == [number, last]


async def test_nodes_that_a_look_has_heard_are_told_though_it_fails_later(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(OFTEN)
    reader = reading(running)
    await reader.until("nodes")
    asked, failed = running._resumed, asyncio.Event()

    async def failing(*args: Any) -> Any:
        if running._known is not None and running._known.unsent_nodes and not failed.is_set():
            failed.set()
            raise RuntimeError("away, after the nodes")
        return await asked(*args)

    monkeypatch.setattr(running, "_resumed", failing)
    book.session("b")
    await reader.until("stale")
    assert [row["node_id"] for row in (await reader.until("nodes"))["nodes"]] == ["a", "b"]


# --- Coming back


async def test_whoever_comes_back_is_told_what_it_missed(book: Book, start: StartFeed) -> None:
    feed = start(OFTEN)
    reader = reading(feed)
    await reader.until("nodes")
    numbers = [book.event("acquired", str(number)) for number in range(5)]
    for _ in numbers:
        await reader.until("event")
    back = reading(feed, after=numbers[1])
    assert [(await back.until("event"))["event_id"] for _ in range(3)] == numbers[2:]
    book.event("acquired", "new")
    assert (await back.until("event"))["role"] == "new", "and nothing twice"


async def test_whoever_comes_back_to_another_server_is_told_what_it_missed(book: Book, start: StartFeed) -> None:
    numbers = [book.event("acquired", str(number)) for number in range(4)]
    book.conn.execute("UPDATE pgleaderlock.events SET at = at - interval '1 hour'")
    back = reading(start(OFTEN), after=numbers[0])
    assert [(await back.until("event"))["event_id"] for _ in range(3)] == numbers[1:]
    book.event("acquired", "new")
    assert (await back.until("event"))["role"] == "new"


async def test_what_happens_while_somebody_comes_back_is_told_once(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = book.event("acquired", "seen")
    book.conn.execute("UPDATE pgleaderlock.events SET at = at - interval '1 hour'")
    asked = api.events_after

    async def racing(*args: Any, **more: Any) -> Any:
        book.event("acquired", "meanwhile")
        return await asked(*args, **more)

    monkeypatch.setattr(api, "events_after", racing)
    back = reading(start(OFTEN), after=seen)
    assert (await back.until("event"))["role"] == "meanwhile"
    book.event("acquired", "new")
    assert (await back.until("event"))["role"] == "new"


async def test_whoever_missed_too_much_is_told_to_load_again(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "EVENTS_MAX", 3)
    numbers = [book.event("acquired", str(number)) for number in range(6)]
    book.conn.execute("UPDATE pgleaderlock.events SET at = at - interval '1 hour'")
    back = reading(start(OFTEN), after=numbers[0])
    await back.until("reload")


# --- When the database is away


async def test_a_database_that_is_away_is_said_and_its_return_too(
    book: Book, start: StartFeed, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(book.reader)
    feed = start(OFTEN, dsn=proxy.dsn_for(book.reader))
    reader = reading(feed)
    known_ms = (await reader.until("nodes"))["now_ms"]
    proxy.refuse()
    proxy.reset()
    stale = await reader.until("stale")
    assert stale["since_ms"] >= known_ms, "what was told last is from then"
    newcomer = reading(feed)
    assert await newcomer.until("stale", "leaders") == stale, "who comes now is told at once"
    book.event("lost", "meanwhile")
    proxy.allow()
    for each in (reader, newcomer):
        assert "now_ms" in await each.until("fresh")
    assert (await reader.until("event"))["role"] == "meanwhile"
    assert roles(await newcomer.until("leaders")) == ["first"]


async def test_a_database_that_hangs_makes_the_pages_stale_before_it_is_given_up(
    book: Book, start: StartFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, asked = asyncio.Event(), api.leaders
    hangs.set()

    async def hanging(*args: Any, **more: Any) -> Any:
        await hangs.wait()
        return await asked(*args, **more)

    monkeypatch.setattr(api, "leaders", hanging)
    reader = reading(start(FeedTiming(poll_s=0.05, pause_s=0.0, retry_s=0.05, late_s=0.01, linger_s=0.1)))
    known_ms = (await reader.until("nodes"))["now_ms"]
    hangs.clear()
    assert (await reader.until("stale"))["since_ms"] >= known_ms
    book.event("lost", "meanwhile")
    hangs.set()
    await reader.until("fresh")
    assert (await reader.until("event"))["role"] == "meanwhile"


async def test_no_page_no_look(book: Book, start: StartFeed) -> None:
    feed = start(OFTEN)
    reader = reading(feed)
    await reader.until("nodes")
    feed.unsubscribe(reader.stream)
    async with asyncio.timeout(WAIT_S):
        while feed._task is not None:
            await asyncio.sleep(0.01)
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgleaderlock dashboard'"
        while (book.conn.execute(query).fetchone() or (1,))[0]:
            await asyncio.sleep(0.01)
    again = reading(feed)
    assert roles(await again.until("leaders")) == ["first"]


async def test_streams_are_bounded(start: StartFeed) -> None:
    feed = start(OFTEN, streams_max=2)
    first, _ = reading(feed), reading(feed)
    with pytest.raises(Refusal) as refused:
        reading(feed)
    assert refused.value.status == 503
    feed.unsubscribe(first.stream)
    reading(feed)


# --- Over HTTP


def test_the_stream_over_http(book: Book) -> None:
    with dashboard(book.reader) as server:
        with opened(server) as stream:
            assert roles(stream.until("leaders")[1]) == ["first"]
            stream.until("nodes")
            number = book.event("acquired", UGLY[2], UGLY[3], detail=UGLY[5])
            book.notify()
            fields, told = stream.until("event")
            assert (fields["id"], told["role"], told["node_id"], told["detail"]) == (
                str(number),
                UGLY[2],
                UGLY[3],
                UGLY[5],
            )
        missed = book.event("released", "missed")
        with opened(server, Last_Event_ID=str(number)) as stream:
            assert stream.until("event")[1]["event_id"] == missed
        with opened(server, f"?after={number}&role=missed") as stream:
            assert stream.until("event")[1]["event_id"] == missed
        streaming = {"Accept": "text/event-stream"}
        for path, headers in (
            ("/v1/events?after=x", {}),
            ("/v1/events?limit=1", {}),
            ("/v1/events?since=1", {}),
            ("/v1/events", {"Last-Event-ID": "x"}),
        ):
            assert server.ask("GET", path, headers={**streaming, **headers}).status == 400


def test_it_pings(book: Book) -> None:
    quick = "from pgleaderlock.dashboard import feed; feed.PING_S = 0.01"
    with dashboard(book.reader, code=quick) as server, opened(server) as stream:
        said = b""
        while b": ping\n\n" not in said:
            said += stream.connection.recv(65536)


@pytest.mark.parametrize("kind", ["dashboard", "serve"])
def test_open_streams_do_not_hold_up_a_stop(book: Book, tmp_path: Path, kind: str) -> None:
    started = dashboard(book.reader) if kind == "dashboard" else lock_server(tmp_path, "--dsn", book.reader)
    book.conn.execute(
        "INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2) SELECT %s, repeat('x', 190) || g, g, -g"
        " FROM generate_series(1, 9000) g",
        (SPACE,),
    )
    with started as server, opened(server) as stream, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((server.host, server.port))
        deaf.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")
        deaf.recv(1)  # and it reads no further: megabytes wait for it
        stream.until("nodes")
        server.program.signal(signal.SIGTERM)
        stream.until("end")
        assert server.program.end() == 0
        assert "unanswered" not in server.program.err
