"""The dashboard's API with figures that a test has written by hand, served by our own HTTP layer in a thread.

    with stand_in() as board:
        board.leaders = [leader("mailer", "node-a", epoch=3)]
        board.terms["mailer"] = [term(3, "node-a", began_ms=…)]
        … open board.url in a browser …
        board.tell("leaders", {"now_ms": …, "leaders": […]})     # to every open stream
        board.cut()                                              # the server is gone; board.come_back()

A stream begins as a real one does, with all leaders and nodes; `muted`, it says nothing at all. `failing` paths are
answered 503, and to whoever is `signed_out` everything 401.

Only what the pages ask is there, in the words of `dashboard/api.py`, whose types the answers must fit. The pages are
the real ones, with the real Content-Security-Policy. Imports `pgleaderlock.dashboard` and `_http`.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from pgleaderlock._http.answers import Answer, Message, Receive, Scope, Send, send_answer
from pgleaderlock._http.server import HttpServer, listen
from pgleaderlock.dashboard import api, pages
from pgleaderlock.history import STATES
from support.background import Background

__all__ = ["StandIn", "event", "incident", "leader", "lock", "node", "now_ms", "slot", "stand_in", "term"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PING_S = 5.0
_PAGES = {
    "/": "leaders",
    "/history": "history",
    "/events": "events",
    "/incidents": "incidents",
    "/slots": "slots",
    "/locks": "locks",
    "/nodes": "nodes",
}

Row = dict[str, Any]


def now_ms() -> int:
    return int(time.time() * 1000)


def leader(role: str, node_id: str | None, *, epoch: int = 1, tenure_ms: int = 60_000, **more: Any) -> Row:
    """A row of `/v1/leaders`: led and well, or without a leader."""
    led = node_id is not None
    state = more.get("state") or ("nobody" if not led else "late" if more.get("heartbeat") == "late" else "acting")
    label, mood = STATES[state]
    fine = state == "acting"
    row = {
        "namespace": "pgleaderlock",
        "role": role,
        "leader": node_id,
        "hold": "session" if led else None,
        "epoch": epoch,
        "since_ms": now_ms() - tenure_ms if led else None,
        "tenure_ms": tenure_ms if led else None,
        "heartbeat_age_ms": 300 if led else None,
        "heartbeat": "ok" if led else "none",
        "gate": "open" if fine else "shut",
        "state": state,
        "label": label,
        "mood": mood,
        "rank": list(STATES).index(state),
        "state_since_ms": now_ms() - 30_000,
        "opens_ms": now_ms() + 4000 if state == "waiting" else None,
        "in_flight": 3 if state == "draining" else None,
        "why": None if fine else "node-x was lost; no node that would lead is alive",
        "command": None if fine else "pgleaderlock nodes",
        "candidates": 3,
        "last_change": {"at_ms": now_ms() - tenure_ms, "kind": "acquired" if led else "lost", "reason": None},
    }
    return {**row, **more}


def term(epoch: int, node_id: str, began_ms: int, ended_ms: int | None = None, **more: Any) -> Row:
    reason = None if ended_ms is None else "lost"
    row = {"epoch": epoch, "node_id": node_id, "began_ms": began_ms, "ended_ms": ended_ms, "reason": reason}
    return {**row, "gap_ms": None, "opened_ms": began_ms, "shut_ms": None, "gaps": [], **more}


def node(node_id: str, session_id: int = 1, **more: Any) -> Row:
    row = {
        "node_id": node_id,
        "namespace": "pgleaderlock",
        "session_id": session_id,
        "hold": "session",
        "host": "host-1",
        "version": "0.1.0",
        "state": "alive" if more.get("live", True) else "silent",
        "process_started_ms": now_ms() - 7_200_000,
        "started_ms": now_ms() - 3_600_000,
        "heartbeat_age_ms": 300,
        "live": True,
        "name_shared": False,
        "candidate": True,
        "draining": False,
        "roles": 0,
        "wants": 0,
    }
    return {**row, **more}


def incident(node_id: str, *roles: str, **more: Any) -> Row:
    row = {"node_id": node_id, "reason": "lost", "began_ms": now_ms() - 600_000, "ended_ms": now_ms() - 595_000}
    return {**row, "roles": list(roles), "without_leader": [], "longest_ms": 4200, "taken_over_by": ["node-b"], **more}


def slot(name: str, **more: Any) -> Row:
    row = {"name": name, "slot": "2026-11-16T15:00:00Z/1h", "state": "failed", "attempts": 2, "node_id": "node-a"}
    return {**row, "began_ms": now_ms() - 5000, "ended_ms": now_ms(), "took_ms": 5000, "detail": name, **more}


def event(event_id: int, kind: str, role: str | None, node_id: str | None, **more: Any) -> Row:
    row = {"event_id": event_id, "at_ms": now_ms(), "kind": kind, "role": role, "node_id": node_id}
    return {**row, "epoch": 1, "detail": None, **more}


def lock(name: str, owner: str | None, *, token: int = 1, left_ms: int = 30_000, waiters: int = 0) -> Row:
    held = owner is not None
    return {
        "lock_name": name,
        "held": held,
        "owner_id": owner,
        "lease_id": None,
        "fencing_token": token,
        "lease_expiry_ms": now_ms() + left_ms if held else None,
        "version": 1,
        "waiters": waiters,
    }


class StandIn:
    """What the server would know, and the server."""

    def __init__(self) -> None:
        self.leaders: list[Row] = []
        self.terms: dict[str, list[Row]] = {}
        self.nodes: list[Row] = []
        self.incidents: list[Row] = []
        self.slots: list[Row] = []
        self.events: list[Row] = []
        self.locks: list[Row] = []
        self.asked: list[str] = []
        """The paths that were asked for, with their queries."""
        self.resumed: list[str] = []
        """What each stream gave as its last event."""
        self.failing: tuple[str, ...] = ()
        self.muted = False
        self.signed_in = False
        self.signed_out = False
        self._streams: set[asyncio.Queue[bytes | None]] = set()
        self._background = Background()
        self._server: HttpServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- From the test's thread

    def come_back(self) -> None:
        async def serve() -> None:
            listening = listen("127.0.0.1", self.port)
            self.port = listening.getsockname()[1]
            self._server = HttpServer(self._app, listening)
            self._server.start()

        self._background.do(serve())

    def cut(self) -> None:
        """Ends the server as a crash would: every connection breaks."""

        async def end() -> None:
            for stream in self._streams:
                stream.put_nowait(None)

            async def nobody() -> None:
                """Nobody waits for answers."""

            assert self._server is not None
            await self._server.stop(nobody)
            self._server = None

        self._background.do(end())

    def tell(self, kind: str, data: Any, number: int | None = None) -> None:
        head = "" if number is None else f"id: {number}\n"
        message = f"{head}event: {kind}\n".encode() + _data_line(data)

        async def push() -> None:
            for stream in self._streams:
                stream.put_nowait(message)

        self._background.do(push())

    def close(self) -> None:
        if self._server is not None:
            self.cut()
        self._background.close()

    # --- On the server's loop

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, query = scope["path"], dict(parse_qsl(scope["query_string"].decode()))
        self.asked.append(f"{path}?{scope['query_string'].decode()}")
        headers = dict(scope["headers"])
        if path.startswith("/v1/") and self.signed_out:
            await send_answer(send, Answer(401, b'{"error": "a token is needed"}'), None)
            return
        if path == "/v1/events" and b"text/event-stream" in headers.get(b"accept", b""):
            self.resumed.append(headers.get(b"last-event-id", b"").decode())
            await self._stream(receive, send)
            return
        if self.failing and path.startswith(self.failing):
            await send_answer(send, Answer(503, b'{"error": "the database of the ledger is away"}'), None)
            return
        await send_answer(send, self._answer(path, query), None)

    def _answer(self, path: str, query: dict[str, str]) -> Answer:
        policy = ((b"content-security-policy", POLICY.encode()),)
        if path.removeprefix("/static/") in pages.static_files():
            content_type, body = pages.static_files()[path.removeprefix("/static/")]
            return Answer(200, body, policy, content_type)
        if path == "/sign-in":
            body = pages.render("sign-in", {}, signed_in=False, locks=True, leaders=True)
            return Answer(200, body, policy, b"text/html; charset=utf-8")
        if path in _PAGES:
            name = _PAGES[path]
            inside = "/v1/leaders/terms" if path == "/history" and "role" in query else f"/v1/{name}"
            data = self._data("/v1/leaders" if inside == "/v1/history" else inside, query) or {}
            body = pages.render(name, {**data, "query": query}, signed_in=self.signed_in, locks=True, leaders=True)
            return Answer(200, body, policy, b"text/html; charset=utf-8")
        found = self._data(path, query)
        if found is None:
            return Answer(404, b'{"error": "there is nothing at this path"}')
        return Answer(200, json.dumps(found).encode())

    def _data(self, path: str, query: Mapping[str, str]) -> Row | None:  # noqa: PLR0911 - a route each
        match path.split("/")[2:]:
            case ["leaders"]:
                rows = [row for row in self.leaders if row["role"].startswith(query.get("prefix", ""))]
                return self._page(api.LeadersReply, "leaders", rows, "role", query)
            case ["leaders", "terms"]:
                role = query["role"]
                if role not in self.terms:
                    return None
                began, ended = int(query.get("from_ms", 0)), int(query.get("to_ms", 2**53))
                rows = [
                    row
                    for row in self.terms[role]
                    if row["began_ms"] <= ended and (row["ended_ms"] is None or row["ended_ms"] >= began)
                ]
                return self._page(api.TermsReply, "terms", rows, "epoch", query, role=role)
            case ["events"]:
                rows = [
                    row
                    for row in self.events
                    if query.get("role") in (None, row["role"])
                    and query.get("node") in (None, row["node_id"])
                    and int(query.get("from_ms", 0)) <= row["at_ms"] <= int(query.get("to_ms", 2**53))
                ]
                return self._page(api.EventsReply, "events", rows, "event_id", query)
            case ["incidents"]:
                return {"now_ms": now_ms(), "incidents": self.incidents, "more": False}
            case ["slots"]:
                return {"now_ms": now_ms(), "slots": self.slots, "more": False}
            case ["nodes"]:
                return self._page(api.NodesReply, "nodes", self.nodes, "session_id", query)
            case ["locks"]:
                rows = [row for row in self.locks if row["lock_name"].startswith(query.get("prefix", ""))]
                return self._page(None, "locks", rows, "lock_name", query, now_ms=now_ms())
        return None

    def _page(self, kind: Any, name: str, rows: list[Row], key: str, query: Mapping[str, str], **more: Any) -> Row:
        limit, cursor = int(query.get("limit", 100)), query.get("cursor")
        keys = [str(row[key]) for row in rows]
        start = 0 if cursor is None else keys.index(cursor) + 1
        page = rows[start : start + limit]
        following = str(page[-1][key]) if start + limit < len(rows) else None
        reply = {name: page, "next_cursor": following, **more}
        if kind is not None:
            if "now_ms" in kind.__struct_fields__:
                reply["now_ms"] = now_ms()
            msgspec.convert(reply, kind)  # what the real API could not answer is no test of a page
        return reply

    def _everything(self) -> bytes:
        if self.muted:
            return b""
        leaders = _data_line({"now_ms": now_ms(), "leaders": self.leaders})
        return b"event: leaders\n" + leaders + b"event: nodes\n" + _data_line({"now_ms": now_ms(), "nodes": self.nodes})

    async def _stream(self, receive: Receive, send: Send) -> None:
        news: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams.add(news)
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunk: bytes | None = self._everything()
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            while chunk is not None and not leaving.done():
                message: Message = {"type": "http.response.body", "body": chunk, "more_body": True}
                await send(message)
                with contextlib.suppress(TimeoutError):
                    chunk = b"" if self.muted else b": ping\n\n"
                    async with asyncio.timeout(PING_S):
                        chunk = await news.get()
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._streams.discard(news)
            leaving.cancel()


def _data_line(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    board = StandIn()
    board.come_back()
    try:
        yield board
    finally:
        board.close()
