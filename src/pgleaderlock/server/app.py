"""The lock server as an ASGI application.

Four routes are hot: acquire, renew, release and batch. They are found by splitting the path, decoded and encoded by
msgspec, and answered with headers that are built once; everything else goes through Starlette's router. Whatever a
handler raises becomes an answer here: what gets past it would end the connection without one.

Imports `service`, `wire`, Starlette's router and what `_http` shares. Must never decide anything about
locks.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from pgleaderlock._http.answers import (
    Answer,
    Receive,
    Refusal,
    Scope,
    Send,
    answer_of,
    defect,
    echoed_request_id,
    send_answer,
)
from pgleaderlock._http.bodies import ClientGone, Waits, check_json, read_body
from pgleaderlock._http.exchange import Exchange
from pgleaderlock._http.hosts import HostCheck
from pgleaderlock._http.in_flight import InFlight
from pgleaderlock._http.tokens import ANYONE, Caller, Tokens
from pgleaderlock._logging import get_logger
from pgleaderlock.server import wire
from pgleaderlock.server.metrics import CONTENT_TYPE, Metrics
from pgleaderlock.server.service import Service
from pgleaderlock.server.store import Acquire, Operation, Release, Renew

__all__ = ["BATCH_BYTES_MAX", "BODY_BYTES_MAX", "LockApp"]

BODY_BYTES_MAX = 16 * 1024
BATCH_BYTES_MAX = 2 * 1024 * 1024

# For probes and tools that have no token: they tell nothing about any lock.
_OPEN_PATHS = frozenset({b"/healthz", b"/readyz", b"/openapi.json"})

_acquire_decoder = msgspec.json.Decoder(wire.AcquireRequest)
_renew_decoder = msgspec.json.Decoder(wire.RenewRequest)
_release_decoder = msgspec.json.Decoder(wire.ReleaseRequest)
_break_decoder = msgspec.json.Decoder(wire.BreakRequest)
_batch_decoder = msgspec.json.Decoder(wire.BatchRequest)

_Read = Callable[[str, bytes | bytearray, Mapping[bytes, bytes]], tuple[Operation, int]]
"""Lock name, body and headers become an operation, and how long it may wait."""


def _read_acquire(name: str, body: bytes | bytearray, headers: Mapping[bytes, bytes]) -> tuple[Operation, int]:
    asked = wire.decode(_acquire_decoder, body)
    key = wire.idempotency_key_of(headers.get(b"idempotency-key"))
    return Acquire(name, asked.owner_id, asked.ttl_ms, key), asked.wait_ms


def _read_renew(name: str, body: bytes | bytearray, _headers: Mapping[bytes, bytes]) -> tuple[Operation, int]:
    asked = wire.decode(_renew_decoder, body)
    return Renew(name, asked.owner_id, asked.lease_id, asked.fencing_token, asked.extend_by_ms), 0


def _read_release(name: str, body: bytes | bytearray, _headers: Mapping[bytes, bytes]) -> tuple[Operation, int]:
    asked = wire.decode(_release_decoder, body)
    return Release(name, asked.owner_id, asked.lease_id, asked.fencing_token), 0


_READS: dict[bytes, _Read] = {b"acquire": _read_acquire, b"renew": _read_renew, b"release": _read_release}


class LockApp:
    """Call it with ASGI's three. `stop()` is for the end, and then `in_flight` tells when it has come."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        waits: Waits,
        *,
        hosts: HostCheck,
        tokens: Tokens | None,
        openapi: bytes,
        access_log: bool = False,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._waits = waits
        self._check_host = hosts
        self._tokens = tokens
        self._openapi = openapi
        self._log = get_logger("pgleaderlock.server")
        self._log_each = access_log
        self.in_flight = InFlight()
        self._router = Router(self._cold_routes(), redirect_slashes=False)

    def stop(self) -> None:
        """Interrupts everyone who waits: for a lock, or for the rest of a body."""
        self._service.stop()
        self._waits.stop()
        self.in_flight.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.perf_counter() if self._log_each else 0.0
        self.in_flight.begin()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id")
        if request_id is not None:
            request_id = echoed_request_id(request_id)
        try:
            answer = await self._answer(scope, headers, receive)
            await send_answer(send, answer, request_id)
            if self._log_each:
                self._log_request(scope, answer, request_id, began)
        finally:
            self.in_flight.end()

    async def _answer(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        try:
            return await self._route(scope, headers, receive)
        except Refusal as refusal:
            return answer_of(refusal)
        except HTTPException as error:  # Starlette's router: no such path, or not with this method
            more = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
            text = "there is nothing at this path" if error.status_code == 404 else "not with this method"
            return answer_of(Refusal(error.status_code, text, *more))
        except ClientGone:
            # Perhaps it only sends no more, and still listens.
            text = "the connection ended before the request was complete or its turn had come"
            return answer_of(Refusal(400, text, (b"connection", b"close")))
        except Exception as error:
            self._log.error("request_failed", error, path=scope["path"], method=scope["method"])
            return answer_of(defect())

    async def _route(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        path: bytes = scope["raw_path"]
        caller = self._admit(path, headers)
        if scope["method"] == "POST":
            asked = self._hot(path)
            if asked is not None:
                read, raw_name = asked
                lock_name = self._admit_lock(caller, raw_name, headers)
                body = await read_body(receive, self._waits, BODY_BYTES_MAX)
                operation, wait_ms = read(lock_name, body, headers)
                return await self._carry_out(operation, wait_ms, receive)
            if path == b"/v1/batch":
                check_json(headers, BATCH_BYTES_MAX)
                batch = wire.decode(_batch_decoder, await read_body(receive, self._waits, BATCH_BYTES_MAX))
                return await self._service.batch(caller, batch.operations)
        return await self._cold(scope, receive, caller)

    def _admit(self, path: bytes, headers: Mapping[bytes, bytes]) -> Caller:
        self._check_host(headers.get(b"host"))
        if self._tokens is None or path in _OPEN_PATHS:
            return ANYONE
        return self._tokens.caller(headers.get(b"authorization"))

    # --- Hot

    def at_once(self, exchange: Exchange) -> bool:
        """One acquire, renewal or release that does not wait, without a task; False for everything else."""
        if self._log_each or self._waits.stopping or exchange.method != b"POST" or not self._service.can_begin:
            return False
        asked = self._hot(exchange.path)
        if asked is None or len(exchange.body) > BODY_BYTES_MAX:
            return False
        read, raw_name = asked
        headers = exchange.named
        request_id = echoed_request_id(headers.get(b"x-request-id"))
        try:
            caller = self._admit(exchange.path, headers)
            lock_name = self._admit_lock(caller, raw_name, headers)
            operation, wait_ms = read(lock_name, exchange.body, headers)
        except Refusal as refusal:
            exchange.answer(answer_of(refusal), request_id)
            return True
        except Exception as error:
            self._log.error("request_failed", error, path=exchange.path.decode("latin-1"), method="POST")
            exchange.answer(answer_of(defect()), request_id)
            return True
        if wait_ms:
            return False
        self.in_flight.begin()

        def told(answer: Answer) -> None:
            try:
                exchange.answer(answer, request_id)
            finally:
                self.in_flight.end()

        self._service.begin(operation, told)
        return True

    def _hot(self, path: bytes) -> tuple[_Read, bytes] | None:
        """How the body of an acquire, a renewal or a release is read, and the lock's name as it was sent."""
        parts = path.split(b"/", 5)
        if len(parts) != 5 or parts[2] != b"locks" or parts[1] != b"v1":
            return None
        read = _READS.get(parts[4])
        return None if read is None else (read, parts[3])

    def _admit_lock(self, caller: Caller, raw_name: bytes, headers: Mapping[bytes, bytes]) -> str:
        lock_name = wire.lock_name_of(raw_name)
        self._service.check_allowed(caller, lock_name)
        check_json(headers, BODY_BYTES_MAX)
        return lock_name

    async def _carry_out(self, operation: Operation, wait_ms: int, receive: Receive) -> Answer:
        if not isinstance(operation, Acquire) or wait_ms == 0:
            return await self._service.one(operation)

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        return await self._service.acquire_waiting(operation, wait_ms, gone)

    # --- Cold

    def _cold_routes(self) -> list[Route]:
        def route(path: str, method: str, endpoint: Callable[[Request], Awaitable[Answer]]) -> Route:
            async def respond(request: Request) -> Response:
                request.scope["answer"] = await endpoint(request)
                return Response()

            made = Route(path, respond, methods=[method])
            made.methods = {method}  # Starlette adds HEAD to every GET, which we do not promise
            return made

        hot = [f"/v1/locks/{{lock}}/{verb.decode()}" for verb in _READS]
        return [
            route("/v1/locks", "GET", self._list),
            route("/v1/locks/{lock}", "GET", self._get),
            route("/v1/locks/{lock}/break", "POST", self._break),
            route("/healthz", "GET", self._health),
            route("/readyz", "GET", self._readiness),
            route("/metrics", "GET", self._show_metrics),
            route("/openapi.json", "GET", self._describe),
            # Answered before they come here: these two know the method that is right.
            *(route(path, "POST", self._nothing) for path in (*hot, "/v1/batch")),
        ]

    async def _cold(self, scope: Scope, receive: Receive, caller: Caller) -> Answer:
        # The path is still percent-encoded: in a decoded one, %2F would have become a slash.
        scope["caller"] = caller
        scope["app"] = self  # with it, the router raises for a wrong path or method instead of answering in plain text

        async def unsent(_message: Mapping[str, Any]) -> None:
            pass

        await self._router(scope, receive, unsent)
        answer: Answer = scope["answer"]
        return answer

    async def _list(self, request: Request) -> Answer:
        prefix, cursor, limit = _list_query(request.scope["query_string"])
        return await self._service.list_locks(request.scope["caller"], prefix, cursor, limit)

    async def _get(self, request: Request) -> Answer:
        return await self._service.get(request.scope["caller"], _lock_of(request))

    async def _break(self, request: Request) -> Answer:
        check_json(dict(request.scope["headers"]), BODY_BYTES_MAX)
        wire.decode(_break_decoder, await read_body(request.receive, self._waits, BODY_BYTES_MAX))
        return await self._service.break_lock(request.scope["caller"], _lock_of(request))

    async def _health(self, _request: Request) -> Answer:
        return Answer(200, wire.encode(wire.StatusReply("ok")))

    async def _readiness(self, _request: Request) -> Answer:
        await self._service.check_ready()
        return Answer(200, wire.encode(wire.StatusReply("ready")))

    async def _show_metrics(self, _request: Request) -> Answer:
        return Answer(200, self._metrics.exposition(), content_type=CONTENT_TYPE)

    async def _describe(self, _request: Request) -> Answer:
        return Answer(200, self._openapi)

    async def _nothing(self, _request: Request) -> Answer:
        raise HTTPException(404)

    def _log_request(self, scope: Scope, answer: Answer, request_id: bytes | None, began: float) -> None:
        self._log.info(
            "request",
            method=scope["method"],
            path=scope["raw_path"].decode("latin-1"),
            status=answer.status,
            latency_ms=(time.perf_counter() - began) * 1000,
            client=scope["client"][0] if scope.get("client") else "-",
            request_id=request_id.decode() if request_id is not None else "-",
        )


def _lock_of(request: Request) -> str:
    return wire.lock_name_of(request.path_params["lock"].encode("latin-1"))


def _list_query(query: bytes) -> tuple[str, str | None, int]:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=8)
    except ValueError:  # UnicodeDecodeError is one
        raise Refusal(400, "the query is not percent-encoded UTF-8, or has too many fields") from None
    given = dict(pairs)
    if len(given) != len(pairs):
        raise Refusal(400, "each field of the query may be given once")
    for name in given:
        if name not in ("prefix", "cursor", "limit"):
            raise Refusal(400, "unknown field in the query: known are prefix, cursor and limit")
    prefix = given.get("prefix", "")
    cursor = given.get("cursor")
    for text in (prefix, cursor):  # a cursor is a name too: the last one of the page before
        if text:
            wire.checked_name(text)
    limit = given.get("limit", str(wire.LIST_LIMIT_DEFAULT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= wire.LIST_LIMIT_MAX):
        raise Refusal(400, f"limit must be an integer from 1 to {wire.LIST_LIMIT_MAX}")
    return prefix, cursor or None, int(limit)
