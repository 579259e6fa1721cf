"""The dashboard as an ASGI application: pages, the JSON API behind them, the live stream and the sign-in.

It stands in front of the lock server's application, or alone. What is not its own it passes on as it came: the requests
for locks of programs are not slowed down. A browser's cookie opens pages, and everything that can be asked with GET;
with it alone nothing can be changed.

Imports `api`, `feed`, `sessions`, `pages` and what `_http` shares. Must never show a page or a figure to somebody who
could not have it from the API.
"""

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from pgleaderlock._http.answers import (
    Answer,
    Message,
    Receive,
    Refusal,
    Scope,
    Send,
    answer_of,
    defect,
    echoed_request_id,
    send_answer,
)
from pgleaderlock._http.bodies import ClientGone, Waits, read_body
from pgleaderlock._http.connections import App
from pgleaderlock._http.hosts import HostCheck
from pgleaderlock._http.in_flight import InFlight
from pgleaderlock._http.tokens import ANYONE, Caller, Tokens
from pgleaderlock._logging import get_logger
from pgleaderlock.dashboard import pages, wire
from pgleaderlock.dashboard._queries import wall_ms
from pgleaderlock.dashboard._streaming import STREAM, stream
from pgleaderlock.dashboard._subscription import Subscription
from pgleaderlock.dashboard.api import Api, number_of, query_of
from pgleaderlock.dashboard.feed import Feed
from pgleaderlock.dashboard.sessions import (
    LASTS_S,
    Session,
    Sessions,
    check_same_origin,
    cookie_name,
    secure_origin,
)
from pgleaderlock.history import LAST_ID

__all__ = ["DashboardApp", "Rules"]

FORM_BYTES_MAX = 4 * 1024
FORM_FIELDS_MAX = 4

_PAGES = {b"/": "leaders", b"/history": "history", b"/events": "events", b"/locks": "locks", b"/nodes": "nodes"}
_FIELDS = {
    "leaders": ("prefix", "cursor"),
    "history": ("role", "node", "cursor"),
    "events": ("role", "node", "cursor"),
    "locks": ("prefix", "cursor"),
    "nodes": ("cursor",),
}
_LISTS = {"leaders": "leaders", "history": "leaders", "events": "events", "locks": "locks", "nodes": "nodes"}
_DATA = (b"leaders", b"events", b"nodes")
_HTML = b"text/html; charset=utf-8"
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Not no-referrer: with that a browser says of its own forms that they come from nowhere.
_PAGE_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
_LOCKS_PATH = b"/v1/locks"
_LIMITED = "this token is limited to some locks: leaders, events and nodes are not among them"


@dataclass(frozen=True)
class Rules:
    """Who may ask, by which name, and for how long one may take to ask."""

    hosts: HostCheck
    tokens: Tokens | None
    waits: Waits
    access_log: bool = False


@dataclass(frozen=True)
class _Visitor:
    """Who asks, and by which session, if it was by one."""

    caller: Caller
    session: Session | None = None


class DashboardApp:
    """Call it with ASGI's three. `api` and `feed` are None where there is no ledger, `inner` where there are no locks;
    `alone` has then the open paths that the lock server would answer."""

    def __init__(
        self,
        rules: Rules,
        *,
        api: Api | None,
        feed: Feed | None,
        inner: App | None,
        alone: Mapping[bytes, Callable[[], Awaitable[Answer]]] | None = None,
    ) -> None:
        self._rules = rules
        self._api = api
        self._feed = feed
        self._inner = inner
        self._alone = alone or {}
        self._sessions = Sessions()
        self._render = pages.render
        self._static = {b"/static/" + name.encode(): file for name, file in pages.static_files().items()}
        self._log = get_logger("pgleaderlock.dashboard")
        self.in_flight = InFlight()
        """Our own requests only; open streams are among them."""

    def stop(self) -> None:
        """Ends the streams, and whoever still sends."""
        self._rules.waits.stop()
        if self._feed is not None:
            self._feed.stop()
        self.in_flight.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._inner is not None and not self._is_ours(scope):
            await self._inner(scope, receive, send)
            return
        began = time.perf_counter()
        self.in_flight.begin()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = echoed_request_id(headers.get(b"x-request-id"))
        status = 200
        try:
            answer = await self._answer(scope, headers, receive)
            if isinstance(answer, Answer):
                status = answer.status
                await send_answer(send, answer, request_id)
            else:
                assert self._feed is not None
                await stream(self._feed, *answer, receive, send)
        finally:
            self.in_flight.end()
            if self._rules.access_log:
                self._log_request(scope, status, request_id, began)

    def _is_ours(self, scope: Scope) -> bool:
        path: bytes = scope["raw_path"]
        if path.startswith(_LOCKS_PATH):
            self._lend_token(scope)
            return False
        if path.startswith(b"/v1/"):
            return self._api is not None and path.split(b"/", 3)[2] in _DATA
        return path in _PAGES or path in (b"/sign-in", b"/sign-out") or path.startswith(b"/static/")

    def _lend_token(self, scope: Scope) -> None:
        """Lets a page ask for locks: a GET with a session is a GET with its token. Nothing else is."""
        if self._rules.tokens is None or scope["method"] != "GET":
            return
        headers = dict(scope["headers"])
        if b"cookie" in headers and b"authorization" not in headers:
            session = self._sessions.find(headers)
            if session is not None:
                scope["headers"] = [*scope["headers"], (b"authorization", session.authorization)]

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Answer | tuple[Subscription, Session | None]:
        try:
            return await self._route(scope, headers, receive)
        except Refusal as refusal:
            return answer_of(refusal)
        except ClientGone:
            text = "the connection ended before the request was complete"
            return answer_of(Refusal(400, text, (b"connection", b"close")))
        except Exception as error:
            self._log.error("request_failed", error, path=scope["path"], method=scope["method"])
            return answer_of(defect())

    async def _route(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Answer | tuple[Subscription, Session | None]:
        self._rules.hosts(headers.get(b"host"))
        path: bytes = scope["raw_path"]
        method: str = scope["method"]
        if path in self._static:
            _only(method, "GET")
            content_type, body = self._static[path]
            return Answer(200, body, _PAGE_HEADERS, content_type)
        if path == b"/sign-in":
            _only(method, "GET", "POST")
            return await self._sign_in(scope, headers, receive)
        if path == b"/sign-out":
            _only(method, "POST")
            check_same_origin(headers)
            self._sessions.close(headers)
            return _elsewhere("/sign-in", (b"set-cookie", _cookie("", 0, scope, headers)))
        if path in self._alone:
            _only(method, "GET")
            return await self._alone[path]()
        if path in _PAGES:
            _only(method, "GET")
            return await self._page(_PAGES[path], scope, headers)
        visitor = self._visitor(headers)
        if self._api is None or not path.startswith(b"/v1/"):
            raise Refusal(404, "there is nothing at this path")
        return await self._data(path, scope, headers, visitor)

    # --- Who asks

    def _visitor(self, headers: Mapping[bytes, bytes]) -> _Visitor:
        tokens = self._rules.tokens
        if tokens is None:
            return _Visitor(ANYONE)
        if b"authorization" not in headers:
            session = self._sessions.find(headers)
            if session is not None:
                return _Visitor(session.caller, session)
        return _Visitor(tokens.caller(headers.get(b"authorization")))

    def _leave_of(self, visitor: _Visitor, headers: Mapping[bytes, bytes]) -> Session | None:
        """What a stream lasts as long as: the session, or the token itself. None: nothing is asked for here."""
        if visitor.session is not None or self._rules.tokens is None:
            return visitor.session
        return Session(visitor.caller, headers[b"authorization"], float("inf"), self._rules.tokens)

    async def _sign_in(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        tokens = self._rules.tokens
        if tokens is None:
            return _elsewhere("/")
        if scope["method"] == "GET":
            return self._html("sign-in", {}, None)
        check_same_origin(headers)
        if headers.get(b"content-type", b"").partition(b";")[0].strip() != b"application/x-www-form-urlencoded":
            raise Refusal(415, "the form must be sent as application/x-www-form-urlencoded")
        body = await read_body(receive, self._rules.waits, FORM_BYTES_MAX)
        with contextlib.suppress(ValueError, Refusal):
            given = dict(parse_qsl(body.decode("ascii"), errors="strict", max_num_fields=FORM_FIELDS_MAX))
            authorization = b"Bearer " + given.get("token", "").strip().encode()
            caller = tokens.caller(authorization)
            self._sessions.close(headers)  # whoever signs in anew has no use for the old one
            secret = self._sessions.open(caller, authorization, tokens)
            self._log.info("signed_in", name=caller.name, client=_client(scope))
            return _elsewhere("/", (b"set-cookie", _cookie(secret, int(LASTS_S), scope, headers)))
        self._log.warning("sign_in_refused", client=_client(scope))
        return self._html("sign-in", {"error": "This token is unknown here."}, None, status=403)

    # --- Data

    async def _data(
        self, path: bytes, scope: Scope, headers: Mapping[bytes, bytes], visitor: _Visitor
    ) -> Answer | tuple[Subscription, Session | None]:
        assert self._api is not None
        if visitor.caller.prefix:
            raise Refusal(403, _LIMITED)
        if scope["method"] != "GET":
            await self._check_path(path)
            _only(scope["method"], "GET")
        query: bytes = scope["query_string"]
        if path == b"/v1/events" and STREAM in headers.get(b"accept", b"").lower():
            assert self._feed is not None
            given = query_of(query, ("after", "role", "node"))
            after = given if "after" in given else _resumed(headers)
            number = number_of(after, "after", 0, LAST_ID, 0) if after else None
            wanted = {name: given.get(name) or None for name in ("role", "node")}
            return self._feed.subscribe(**wanted, after=number), self._leave_of(visitor, headers)
        return Answer(200, wire.encode(await self._api.answer(path.removeprefix(b"/v1/"), query)))

    async def _check_path(self, path: bytes) -> None:
        parts = path.removeprefix(b"/v1/").split(b"/")
        if len(parts) > 3 or (len(parts) > 1 and (parts[0], parts[-1]) != (b"leaders", b"terms")):
            raise Refusal(404, "there is nothing at this path")

    # --- Pages

    async def _page(self, page: str, scope: Scope, headers: Mapping[bytes, bytes]) -> Answer:
        try:
            visitor = self._visitor(headers)
        except Refusal:
            return _elsewhere("/sign-in")
        leaders = self._api is not None and not visitor.caller.prefix
        if page == "leaders" and not leaders and self._inner is not None:
            return _elsewhere("/locks")
        if visitor.caller.prefix and self._api is not None and not (page == "locks" and self._inner is not None):
            return self._html("refused", {"error": f"{_LIMITED[0].upper()}{_LIMITED[1:]}."}, visitor, status=403)
        if self._inner is None if page == "locks" else not leaders:
            raise Refusal(404, "there is no such page on this server")
        status, data = 200, {"now_ms": wall_ms(), _LISTS[page]: [], "next_cursor": None}
        query: dict[str, str] = {}
        try:
            query = {name: text for name, text in query_of(scope["query_string"], _FIELDS[page]).items() if text}
            if page == "locks" and visitor.caller.prefix:
                query.setdefault("prefix", visitor.caller.prefix)  # the rest is refused to this token
            data |= await self._page_data(page, query, scope, visitor)
        except Refusal as refusal:
            status = refusal.status
            data["error"] = refusal.error
            if query.get("role") and page == "history":
                data |= {"role": query["role"], "terms": []}
        return self._html(page, {**data, "query": query}, visitor, status=status)

    async def _page_data(self, page: str, query: Mapping[str, str], scope: Scope, visitor: _Visitor) -> dict[str, Any]:
        if page == "locks":
            return await self._locks(query, scope, visitor)
        assert self._api is not None
        path = page
        asked = {name: text for name, text in query.items() if page != "history" or name == "cursor"}
        if page == "history":
            path = f"leaders/{quote(query['role'], safe='')}/terms" if "role" in query else "leaders"
        reply = await self._api.answer(path.encode(), urlencode(asked).encode())
        found: dict[str, Any] = msgspec.to_builtins(reply)
        return found

    async def _locks(self, query: Mapping[str, str], scope: Scope, visitor: _Visitor) -> dict[str, Any]:
        """What the lock API answers to the same visitor."""
        assert self._inner is not None
        fields = {"prefix": visitor.caller.prefix, **query}
        inside: Scope = {
            **scope,
            "path": "/v1/locks",
            "raw_path": _LOCKS_PATH,
            "query_string": urlencode(fields).encode(),
        }
        if visitor.session is not None:
            inside["headers"] = [*scope["headers"], (b"authorization", visitor.session.authorization)]
        said: list[Message] = []

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def hear(message: Message) -> None:
            said.append(message)

        await self._inner(inside, nothing, hear)
        reply: dict[str, Any] = msgspec.json.decode(said[1]["body"])
        if said[0]["status"] != 200:
            raise Refusal(said[0]["status"], reply["error"])
        return reply

    def _html(self, page: str, data: Mapping[str, Any], visitor: _Visitor | None, *, status: int = 200) -> Answer:
        limited = visitor is not None and bool(visitor.caller.prefix)
        body = self._render(
            page,
            data,
            signed_in=visitor is not None and visitor.session is not None,
            locks=self._inner is not None,
            leaders=self._api is not None and not limited,
        )
        return Answer(status, body, _PAGE_HEADERS, _HTML)

    def _log_request(self, scope: Scope, status: int, request_id: bytes | None, began: float) -> None:
        self._log.info(
            "request",
            method=scope["method"],
            path=scope["raw_path"].decode("latin-1"),
            status=status,
            latency_ms=(time.perf_counter() - began) * 1000,
            client=_client(scope),
            request_id=request_id.decode() if request_id is not None else "-",
        )


def _client(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "-"


def _cookie(secret: str, age_s: int, scope: Scope, headers: Mapping[bytes, bytes]) -> bytes:
    secure = "; Secure" if scope["scheme"] == "https" or secure_origin(headers) else ""
    return f"{cookie_name(headers)}={secret}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}".encode()


def _resumed(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    given = headers.get(b"last-event-id", b"")
    return {"after": given.decode("latin-1")} if given else {}


def _only(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise Refusal(405, "not with this method", (b"allow", ", ".join(allowed).encode()))


def _elsewhere(path: str, *headers: tuple[bytes, bytes]) -> Answer:
    return Answer(303, b"", ((b"location", path.encode()), *headers), _HTML)
