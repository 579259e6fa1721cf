"""The dashboard as an ASGI application: pages, the JSON API behind them, the live stream and the sign-in.

It runs in front of the lock server's application, or alone. It passes requests that are not its own on unchanged, so it
does not slow down the clients of the lock server. A browser's cookie gives access to pages and to everything that can
be read with GET; with the cookie alone, nothing can be changed.

Must never show a page or a figure to a visitor who could not get it from the API.
"""

import contextlib
import datetime as dt
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from pgleaderlock._base.logging import Seldom, get_logger
from pgleaderlock._http.access import ANYONE, Caller, HostCheck, Tokens
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
from pgleaderlock._http.protocol import App
from pgleaderlock._http.server import ClientGone, InFlight, Waits, read_body
from pgleaderlock.dashboard.api import MS_MAX, Api, encode, number_of, query_of, wall_ms
from pgleaderlock.dashboard.feed import STREAM, Feed, Subscription, stream
from pgleaderlock.dashboard.logins import LASTS_S, Login, Logins, check_same_origin, cookie_name, secure_origin
from pgleaderlock.dashboard.pages import PAGES, render, static_files
from pgleaderlock.history import LAST_ID

__all__ = ["DashboardApp", "Rules"]

FORM_BYTES_MAX = 4 * 1024
FORM_FIELDS_MAX = 4
ADDRESS_CHARS_MAX = 1024

_PATHS = {page.address.encode(): name for name, page in PAGES.items()}
_STATIC = {b"/static/" + name.encode(): file for name, file in static_files().items()}
# Paths of the lock server that people may open in a browser, too.
_OPEN = (b"/metrics", b"/healthz", b"/readyz", b"/openapi.json")
_DATA = (b"leaders", b"events", b"incidents", b"slots", b"nodes")
_HTML = b"text/html; charset=utf-8"
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Not no-referrer: with that, a browser sends `Origin: null` with our own forms.
_PAGE_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
_LOCKS_PATH = b"/v1/locks"
_LIMITED = "this token is limited to some locks: leaders, events and nodes are not among them"


@dataclass(frozen=True)
class Rules:
    """The access rules: allowed hosts, tokens, and the time limits for clients."""

    hosts: HostCheck
    tokens: Tokens | None
    waits: Waits
    access_log: bool = False


@dataclass(frozen=True)
class _Visitor:
    """The authenticated caller, and its login if it has one."""

    caller: Caller
    login: Login | None = None


_Opened = tuple[Subscription, Login | None]
"""A stream, and the login with which it ends."""


class DashboardApp:
    """The ASGI application. `api` and `feed` are None if there is no ledger, `inner` is None if there are no locks;
    then `alone` has the open paths that the lock server would answer."""

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
        self._logins = Logins()
        self._log = get_logger("pgleaderlock.dashboard")
        self._warn_seldom = Seldom(self._log.warning)
        self.in_flight = InFlight()
        """Counts only the dashboard's own requests, including open streams."""

    def stop(self) -> None:
        """Ends the streams, and the requests whose bodies are still being sent."""
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
        if path in _PATHS or path in (b"/sign-in", b"/sign-out") or path.startswith(b"/static/"):
            return True
        # For an unknown path, a browser gets a page. Programs get the lock server's own answer.
        return path not in _OPEN and _reads_pages(scope["method"], dict(scope["headers"]))

    def _lend_token(self, scope: Scope) -> None:
        """Lets a page read locks: adds the login's token to a GET with its cookie, and to nothing else."""
        if self._rules.tokens is None or scope["method"] != "GET":
            return
        headers = dict(scope["headers"])
        if b"cookie" in headers and b"authorization" not in headers:
            login = self._logins.find(headers)
            if login is not None:
                scope["headers"] = [*scope["headers"], (b"authorization", login.authorization)]

    async def _answer(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> Answer | _Opened:
        try:
            return await self._route(scope, headers, receive)
        except Refusal as refusal:
            path: bytes = scope["raw_path"]
            shown = _reads_pages(scope["method"], headers) and not path.startswith((b"/v1/", b"/static/"))
            if shown and refusal.status in (401, 404):
                return self._lost(path, refusal, headers)
            return answer_of(refusal)
        except ClientGone:
            text = "the connection ended before the request was complete"
            return answer_of(Refusal(400, text, (b"connection", b"close")))
        except Exception as error:
            self._log.error("request_failed", error, path=scope["path"], method=scope["method"])
            return answer_of(defect())

    async def _route(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> Answer | _Opened:
        self._rules.hosts(headers.get(b"host"))
        path: bytes = scope["raw_path"]
        method: str = scope["method"]
        if path in _STATIC:
            _only(method, "GET")
            content_type, body = _STATIC[path]
            return Answer(200, body, _PAGE_HEADERS, content_type)
        if path == b"/sign-in":
            _only(method, "GET", "POST")
            return await self._sign_in(scope, headers, receive)
        if path == b"/sign-out":
            _only(method, "POST")
            check_same_origin(headers)
            self._logins.close(headers)
            return _elsewhere("/sign-in", (b"set-cookie", _cookie("", 0, scope, headers)))
        if path in self._alone:
            _only(method, "GET")
            return await self._alone[path]()
        if path in _PATHS:
            _only(method, "GET")
            return await self._page(_PATHS[path], scope, headers)
        visitor = self._visitor(headers)
        if self._api is None or not path.startswith(b"/v1/"):
            raise Refusal(404, "there is nothing at this path")
        return await self._data(path, scope, headers, visitor)

    # --- Authentication

    def _visitor(self, headers: Mapping[bytes, bytes]) -> _Visitor:
        tokens = self._rules.tokens
        if tokens is None:
            return _Visitor(ANYONE)
        if b"authorization" not in headers:
            login = self._logins.find(headers)
            if login is not None:
                return _Visitor(login.caller, login)
        return _Visitor(tokens.caller(headers.get(b"authorization")))

    def _login_of(self, visitor: _Visitor, headers: Mapping[bytes, bytes]) -> Login | None:
        """The login with which a stream ends: the visitor's, or one for its token. None: this server has no tokens."""
        if visitor.login is not None or self._rules.tokens is None:
            return visitor.login
        return Login(visitor.caller, headers[b"authorization"], float("inf"), self._rules.tokens)

    async def _sign_in(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        tokens = self._rules.tokens
        if tokens is None:
            return _elsewhere("/")
        if scope["method"] == "GET":
            with contextlib.suppress(ValueError):
                asked = dict(parse_qsl(scope["query_string"].decode("ascii"), max_num_fields=FORM_FIELDS_MAX))
                return self._html("sign-in", {"to": _page_at(asked.get("to", "/"))}, None)
            return self._html("sign-in", {}, None)
        check_same_origin(headers)
        if headers.get(b"content-type", b"").partition(b";")[0].strip() != b"application/x-www-form-urlencoded":
            raise Refusal(415, "the form must be sent as application/x-www-form-urlencoded")
        body = await read_body(receive, self._rules.waits, FORM_BYTES_MAX)
        to = "/"
        with contextlib.suppress(ValueError, Refusal):
            given = dict(parse_qsl(body.decode("ascii"), errors="strict", max_num_fields=FORM_FIELDS_MAX))
            to = _page_at(given.get("to", "/"))
            authorization = b"Bearer " + given.get("token", "").strip().encode()
            caller = tokens.caller(authorization)
            self._logins.close(headers)  # a browser that signs in again no longer needs its old login
            secret = self._logins.open(caller, authorization, tokens)
            self._log.info("signed_in", name=caller.name, client=_client(scope))
            return _elsewhere(to, (b"set-cookie", _cookie(secret, int(LASTS_S), scope, headers)))
        self._warn_seldom("sign_in_refused", client=_client(scope))
        return self._html("sign-in", {"error": "This token is unknown here.", "to": to}, None, status=403)

    # --- Data

    async def _data(
        self, path: bytes, scope: Scope, headers: Mapping[bytes, bytes], visitor: _Visitor
    ) -> Answer | _Opened:
        assert self._api is not None
        if visitor.caller.prefix:
            raise Refusal(403, _LIMITED)
        if scope["method"] != "GET":
            _check_path(path)
            _only(scope["method"], "GET")
        query: bytes = scope["query_string"]
        if path == b"/v1/events" and STREAM in headers.get(b"accept", b"").lower():
            assert self._feed is not None
            given = query_of(query, ("after", "role", "node"))
            after = given if "after" in given else _resumed(headers)
            number = number_of(after, "after", 0, LAST_ID, 0) if after else None
            wanted = {name: given.get(name) or None for name in ("role", "node")}
            return self._feed.subscribe(**wanted, after=number), self._login_of(visitor, headers)
        return Answer(200, encode(await self._api.answer(path.removeprefix(b"/v1/"), query)))

    # --- Pages

    def _lost(self, path: bytes, refusal: Refusal, headers: Mapping[bytes, bytes]) -> Answer:
        """The answer to a browser at an unknown path. Without a login, it does not reveal that the path is unknown."""
        if refusal.status == 401:
            return _elsewhere("/sign-in")
        text = f"{refusal.error[0].upper()}{refusal.error[1:]}: {path.decode('latin-1')}"
        return self._html("missing", {"error": text}, self._visitor(headers), status=404)

    async def _page(self, page: str, scope: Scope, headers: Mapping[bytes, bytes]) -> Answer:
        try:
            visitor = self._visitor(headers)
        except Refusal:
            asked = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            to = _page_at(asked.decode("latin-1"))
            return _elsewhere("/sign-in" if to == "/" else f"/sign-in?{urlencode({'to': to})}")
        leaders = self._api is not None and not visitor.caller.prefix
        if page == "leaders" and not leaders and self._inner is not None:
            return _elsewhere("/locks")
        if visitor.caller.prefix and self._api is not None and not (page == "locks" and self._inner is not None):
            return self._html("refused", {"error": f"{_LIMITED[0].upper()}{_LIMITED[1:]}."}, visitor, status=403)
        if self._inner is None if page == "locks" else not leaders:
            raise Refusal(404, "there is no such page on this server")
        status, data = 200, {"now_ms": wall_ms(), PAGES[page].shows: [], "next_cursor": None}
        query: dict[str, str] = {}
        try:
            query = {name: text for name, text in query_of(scope["query_string"], PAGES[page].fields).items() if text}
            if page == "locks" and visitor.caller.prefix:
                query.setdefault("prefix", visitor.caller.prefix)  # this token may see only these
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
        # Only the script reads the parameters for the time that the timeline shows.
        known = ("cursor",) if page == "history" else ("prefix", "role", "node", "name", "cursor")
        asked = {name: text for name, text in query.items() if name in known}
        span: dict[str, int] = {}
        if page != "leaders":
            span = {f"{name}_ms": _moment_ms(name, query[name]) for name in ("from", "to") if name in query}
        if page == "history":
            path = f"leaders/{quote(query['role'], safe='')}/terms" if "role" in query else "leaders"
        if path != "leaders":
            asked |= {name: str(at_ms) for name, at_ms in span.items()}
        found: dict[str, Any] = msgspec.to_builtins(await self._api.answer(path.encode(), urlencode(asked).encode()))
        if page == "history" and path == "leaders" and span:
            first, last = span.get("from_ms", 0), span.get("to_ms", MS_MAX)
            changes = ((row, row["last_change"] or {}) for row in found["leaders"])
            found["leaders"] = [row for row, change in changes if first <= change.get("at_ms", -1) <= last]
        return found

    async def _locks(self, query: Mapping[str, str], scope: Scope, visitor: _Visitor) -> dict[str, Any]:
        """The lock API's answer to the same visitor."""
        assert self._inner is not None
        fields = {"prefix": visitor.caller.prefix, **query}
        inside: Scope = {
            **scope,
            "path": "/v1/locks",
            "raw_path": _LOCKS_PATH,
            "query_string": urlencode(fields).encode(),
        }
        if visitor.login is not None:
            inside["headers"] = [*scope["headers"], (b"authorization", visitor.login.authorization)]
        said: list[Message] = []

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def hear(message: Message) -> None:
            said.append(message)

        await self._inner(inside, nothing, hear)
        answer: dict[str, Any] = msgspec.json.decode(said[1]["body"])
        if said[0]["status"] != 200:
            raise Refusal(said[0]["status"], answer["error"])
        return answer

    def _html(self, page: str, data: Mapping[str, Any], visitor: _Visitor | None, *, status: int = 200) -> Answer:
        limited = visitor is not None and bool(visitor.caller.prefix)
        body = render(
            page,
            data,
            signed_in=visitor is not None and visitor.login is not None,
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


def _check_path(path: bytes) -> None:
    """Raise 404 for an unknown path, whatever the method."""
    parts = path.removeprefix(b"/v1/").split(b"/")
    if len(parts) > 3 or (len(parts) > 1 and (parts[0], parts[-1]) != (b"leaders", b"terms")):
        raise Refusal(404, "there is nothing at this path")


def _client(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "-"


def _cookie(secret: str, age_s: int, scope: Scope, headers: Mapping[bytes, bytes]) -> bytes:
    secure = "; Secure" if scope["scheme"] == "https" or secure_origin(headers) else ""
    return f"{cookie_name(headers)}={secret}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}".encode()


def _reads_pages(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser loads this as a page, and not a program or a script."""
    return method == "GET" and b"text/html" in headers.get(b"accept", b"")


def _page_at(wanted: str) -> str:
    """The target of a sign-in: one of our pages, with its query. Any other target would be an open redirect."""
    ours = wanted.partition("?")[0].encode() in _PATHS
    plain = wanted.isascii() and wanted.isprintable() and " " not in wanted and len(wanted) <= ADDRESS_CHARS_MAX
    return wanted if ours and plain else "/"


def _resumed(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    given = headers.get(b"last-event-id", b"")
    return {"after": given.decode("latin-1")} if given else {}


def _only(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise Refusal(405, "not with this method", (b"allow", ", ".join(allowed).encode()))


def _elsewhere(path: str, *headers: tuple[bytes, bytes]) -> Answer:
    return Answer(303, b"", ((b"location", path.encode()), *headers), _HTML)


def _moment_ms(name: str, text: str) -> int:
    """A time in the address of a page; in UTC if it has no zone, as the page shows times without its script."""
    try:
        moment = dt.datetime.fromisoformat(text)
        ms = int((moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        ms = -1
    if not 0 <= ms <= MS_MAX:
        raise Refusal(400, f"{name} must be a time such as 2026-11-15T03:00Z")
    return ms
