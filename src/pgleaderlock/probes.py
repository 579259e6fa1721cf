"""A small HTTP endpoint for orchestrators and Prometheus: /metrics, /healthz, /readyz and /leader.

| path | 200 when |
|---|---|
| /healthz | the process lives and its election has not ended; independent of the database, which no restart repairs |
| /readyz | this node has a session, so it leads or could take over, and no work of `lead` has failed |
| /leader?role=R | this node's *gate* is open for the role. Without `role`, for the only role of the election |
| /metrics | always, if there are metrics to show |

Otherwise the status is 503; it is 404 for an unknown path or role, 400 or 405 for an invalid request. The body of
/readyz has a line, with the state, for each role that this node leads but must not act for. GET and HEAD only, one
request per connection.

It parses HTTP itself, because it must run without any extra: no web framework, no prometheus-client. It must never
change anything, wait for the database, or let a slow or greedy client delay others: the limits are below.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self
from urllib.parse import parse_qs, urlsplit

from pgleaderlock._base.aio import cancel_and_wait
from pgleaderlock._base.logging import get_logger
from pgleaderlock._election.role import standing
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.models import LockState

__all__ = ["PATHS", "ProbeServer"]

PATHS = ("/metrics", "/healthz", "/readyz", "/leader")
REQUEST_BYTES_MAX = 8_192
REQUEST_S_MAX = 5.0
ANSWER_S_MAX = 10.0
CONNECTIONS_MAX = 64
TEXT = "text/plain; charset=utf-8"
METRICS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

_log = get_logger("pgleaderlock.probes")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = TEXT
    allow: bool = False

    def raw(self, *, head: bool) -> bytes:
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",  # an answer is only valid at this moment
            "X-Content-Type-Options: nosniff",
            "Connection: close",
            *(["Allow: GET, HEAD"] if self.allow else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + (b"" if head else self.body)


def _said(status: HTTPStatus, text: str) -> _Answer:
    return _Answer(status, text.encode() + b"\n")


def _yes_or_no(yes: bool, if_yes: str, if_no: str) -> _Answer:
    return _said(HTTPStatus.OK, if_yes) if yes else _said(HTTPStatus.SERVICE_UNAVAILABLE, if_no)


class ProbeServer:
    """Serves the probes of one election between `start` and `close`, or inside `async with`.

    host, port: where it listens; port 0 takes a free one.
    metrics: returns the text for /metrics, as `ElectionMetrics(election).exposition` does. It is called in a thread,
    because the text for a thousand roles takes a quarter of a second. None: there is no /metrics.
    """

    def __init__(
        self,
        election: LeaderElection,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        metrics: Callable[[], bytes] | None = None,
    ) -> None:
        self._election = election
        self._host = host
        self._port = port
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._rendering = asyncio.Lock()
        self._ended = False
        election.on_stopped(self._note_end)

    async def start(self) -> None:
        """Listen. `ConfigurationError` if that is not possible here."""
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=REQUEST_BYTES_MAX)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigurationError(
                f"cannot listen on {self._host} port {self._port} ({reason}): choose another port, or 0 for any"
            ) from error
        _log.info("probes_listening", host=self._host, port=self.port)

    async def close(self) -> None:
        """Stop listening, and close every connection."""
        if self._server is None:
            return
        self._server.close()
        await cancel_and_wait(*self._connections)
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        assert self._server is not None, "not listening"
        port = self._server.sockets[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    # --- One connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        hopeless = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError)
        try:
            # Only `close` cancels this, and waits for its end; asyncio would log a cancelled connection as an error.
            with contextlib.suppress(*hopeless, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._connections.discard(task)
            # Not `wait_closed`: a client that does not read the response must not block us.
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_S_MAX):
            try:
                request = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                request = None
        if request is None:
            answer, head = _said(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too large"), False
        else:
            answer, head = await self._answer(request)
        async with asyncio.timeout(ANSWER_S_MAX):
            writer.write(answer.raw(head=head))
            await writer.drain()
            writer.write_eof()
            await reader.read(1)  # wait for the client: an abort now would send a RST, and could lose the response

    async def _answer(self, request: bytes) -> tuple[_Answer, bool]:
        first, *headers = request.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return _said(HTTPStatus.BAD_REQUEST, "no HTTP/1 request"), False
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            text = b"only GET and HEAD: nothing can be changed here\n"
            return _Answer(HTTPStatus.METHOD_NOT_ALLOWED, text, allow=True), False
        if not self._is_ours(headers):
            return _said(HTTPStatus.FORBIDDEN, "the Host header names another server"), method == "HEAD"
        return await self._route(target), method == "HEAD"

    def _is_ours(self, headers: list[str]) -> bool:
        """Refuses DNS rebinding: on loopback, a legitimate Host header is localhost or an address."""
        if not _is_loopback(self._host):
            return True
        named = [
            value.strip() for name, _, value in (line.partition(":") for line in headers) if name.lower() == "host"
        ]
        return len(named) <= 1 and all(_is_loopback(_without_port(name), any_address=True) for name in named)

    # --- The paths

    async def _route(self, target: str) -> _Answer:
        try:
            url = urlsplit(target)
            query = parse_qs(url.query, keep_blank_values=True, max_num_fields=8, errors="strict")
        except ValueError:
            return _said(HTTPStatus.BAD_REQUEST, "the address cannot be read")
        match url.path:
            case "/healthz":
                return _yes_or_no(not self._over(), "alive", "the election has ended")
            case "/readyz":
                return self._readiness()
            case "/leader":
                return self._leader(query.get("role", []))
            case "/metrics" if self._metrics is not None:
                async with self._rendering:  # one at a time: a second thread would not make it faster
                    return _Answer(HTTPStatus.OK, await asyncio.to_thread(self._metrics), METRICS_TEXT)
            case _:
                return _said(HTTPStatus.NOT_FOUND, f"nothing here; there is {', '.join(PATHS)}")

    def _over(self) -> bool:
        """Has the election ended without being started again? The roles of a disabled election are also stopped, but it
        has not ended."""
        election = self._election
        if self._ended and any(election.state(role) is not LockState.STOPPED for role in election.roles):
            self._ended = False
        return self._ended

    def _note_end(self) -> None:
        self._ended = True

    def _readiness(self) -> _Answer:
        """The answer of /readyz. A standalone election is ready without a session."""
        election = self._election
        failed = [role for role in election.roles if election.work_error(role) is not None]
        if failed:
            more = f" and of {len(failed) - 1} more roles" if len(failed) > 1 else ""
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, f"the work of {failed[0]!r}{more} has failed")
        ready = election.heartbeat_age_s() is not None or any(
            election.state(role) is LockState.LEADER for role in election.roles
        )
        lines = [f"{role}: {stands}" for role in election.roles if (stands := self._trouble(role)) is not None]
        return _yes_or_no(ready, "\n".join(["ready", *lines]), "no session with the database")

    def _trouble(self, role: str) -> str | None:
        """Why this node must not act for a role that it leads; None if it may act, or does not lead."""
        election, gate = self._election, self._election.gate(role)
        failed = election.work_error(role) is not None
        stands = standing(election.state(role), gate.shut_because, work_failed=failed)
        flying = f", {gate.in_flight} in flight" if stands == "draining" else ""
        return None if stands in ("acting", "follows") else f"{stands}{flying}"

    def _leader(self, named: list[str]) -> _Answer:
        roles = self._election.roles
        if len(named) > 1 or (not named and len(roles) != 1):
            return _said(HTTPStatus.BAD_REQUEST, f"which of {len(roles)} roles? Ask for /leader?role=NAME")
        role = named[0] if named else roles[0]
        if role not in roles:
            return _said(HTTPStatus.NOT_FOUND, "this node does not know that role")
        idle = self._election.work_error(role) is not None
        leads = "leader, idle: its work has failed" if idle else "leader"
        return _yes_or_no(self._election.gate(role).is_leader, leads, "not the leader")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(host: str, *, any_address: bool = False) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any_address or address.is_loopback
