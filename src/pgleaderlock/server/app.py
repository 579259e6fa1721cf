"""The lock server as an ASGI application: admits a request, decodes it, hands it to the service, answers it.

An acquire, a renewal or a release has one path: `at_once` takes a request that has arrived completely, `Service.begin`
submits it to the store, and a callback writes the store's reply. If the body has not arrived completely, a task waits
for it, as usual in ASGI, and the request then takes the same path.

Must never decide anything about locks.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from pgleaderlock._base.aio import settle
from pgleaderlock._base.logging import get_logger
from pgleaderlock._http.access import ANYONE, Caller, HostCheck, Tokens
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
from pgleaderlock._http.protocol import Exchange
from pgleaderlock._http.server import (
    ClientGone,
    InFlight,
    Waits,
    check_json,
    left,
    read_body,
    stopping,
    too_long,
)
from pgleaderlock.server import wire
from pgleaderlock.server.metrics import CONTENT_TYPE, Metrics
from pgleaderlock.server.service import Service
from pgleaderlock.server.store import Acquire, Operation, Release, Renew

__all__ = ["BATCH_BYTES_MAX", "BODY_BYTES_MAX", "LockApp"]

BODY_BYTES_MAX = 16 * 1024
BATCH_BYTES_MAX = 2 * 1024 * 1024

# Open to probes and tools without a token: these paths reveal nothing about any lock.
_OPEN_PATHS = frozenset({b"/healthz", b"/readyz", b"/openapi.json"})

_acquire_decoder = wire.decoder(wire.AcquireRequest)
_renew_decoder = wire.decoder(wire.RenewRequest)
_release_decoder = wire.decoder(wire.ReleaseRequest)
_break_decoder = wire.decoder(wire.BreakRequest)
_batch_decoder = wire.decoder(wire.BatchRequest)

_Read = Callable[[str, bytes | bytearray, Mapping[bytes, bytes]], tuple[Operation, int]]
"""Reads an operation, and how long it may wait, from lock name, body and headers."""


def _read_acquire(name: str, body: bytes | bytearray, headers: Mapping[bytes, bytes]) -> tuple[Operation, int]:
    asked = wire.decode(_acquire_decoder, body)
    key = wire.idempotency_key_of(headers.get(b"idempotency-key"))
    return Acquire(name, asked.owner_id, asked.ttl_ms, key), asked.wait_ms or 0


def _read_renew(name: str, body: bytes | bytearray, _headers: Mapping[bytes, bytes]) -> tuple[Operation, int]:
    asked = wire.decode(_renew_decoder, body)
    return Renew(name, asked.owner_id, asked.lease_id, asked.fencing_token, asked.extend_by_ms), 0


def _read_release(name: str, body: bytes | bytearray, _headers: Mapping[bytes, bytes]) -> tuple[Operation, int]:
    asked = wire.decode(_release_decoder, body)
    return Release(name, asked.owner_id, asked.lease_id, asked.fencing_token), 0


_READS: dict[bytes, _Read] = {b"acquire": _read_acquire, b"renew": _read_renew, b"release": _read_release}


class LockApp:
    """The ASGI application. At the end, call `stop()` and then wait for `in_flight` to be answered."""

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
        self._store_id = service.store_id.encode()
        self._metrics = metrics
        self._waits = waits
        self._check_host = hosts
        self._tokens = tokens
        self._openapi = openapi
        self._log = get_logger("pgleaderlock.server")
        self._log_each = access_log
        self.in_flight = InFlight()

    def stop(self) -> None:
        """Interrupts all requests that wait, for a lock or for the rest of a body."""
        self._service.stop()
        self._waits.stop()
        self.in_flight.stop()

    # --- An acquire, a renewal or a release: one path, with or without a task that waits for the body

    def at_once(self, exchange: Exchange) -> bool:
        """Handles an acquire, a renewal or a release that has arrived completely, without a task; False for every other
        request."""
        found = _operation_at(exchange.path) if exchange.method == b"POST" else None
        if found is None:
            return False
        read, raw_name = found
        headers = exchange.named
        request_id = echoed_request_id(headers.get(b"x-request-id"))
        began = time.perf_counter()
        self.in_flight.begin()

        def told(answer: Answer) -> None:
            try:
                exchange.answer(answer, request_id)
                if self._log_each:
                    self._log_request(
                        "POST", exchange.path, exchange.client, answer, request_id=request_id, began=began
                    )
            finally:
                self.in_flight.end()

        try:
            caller = self._admit(exchange.path, headers)
            lock_name = self._admit_lock(caller, raw_name, headers)
            if self._waits.stopping:
                raise stopping()
            if len(exchange.body) > BODY_BYTES_MAX:
                raise too_long(BODY_BYTES_MAX)
            operation, wait_ms = read(lock_name, exchange.body, headers)
        except Exception as error:
            told(self._answer_to_failure(error, "POST", exchange.path))
        else:
            asked = self._service.begin(operation, wait_ms, told, caller)
            if wait_ms:
                exchange.when_gone(asked.client_left)
        return True

    async def _operate(
        self, read: _Read, caller: Caller, lock_name: str, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Answer:
        """The same for a request whose body has not arrived completely, or that comes from another ASGI server."""
        operation, wait_ms = read(lock_name, await read_body(receive, self._waits, BODY_BYTES_MAX), headers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked = self._service.begin(operation, wait_ms, functools.partial(settle, answer), caller)
        if wait_ms:
            watching = asyncio.ensure_future(_when_gone(receive, asked.client_left))
            answer.add_done_callback(lambda _: watching.cancel())
        return await answer

    def _admit(self, path: bytes, headers: Mapping[bytes, bytes]) -> Caller:
        self._check_host(headers.get(b"host"))
        wanted = headers.get(wire.STORE_HEADER)
        if wanted is not None and wanted != self._store_id:
            raise Refusal(421, "this server has another store than the one that is asked for: nothing was done")
        if self._tokens is None or path in _OPEN_PATHS:
            return ANYONE
        return self._tokens.caller(headers.get(b"authorization"))

    def _admit_lock(self, caller: Caller, raw_name: bytes, headers: Mapping[bytes, bytes]) -> str:
        lock_name = wire.lock_name_of(raw_name)
        self._service.check_allowed(caller, lock_name)
        check_json(headers, BODY_BYTES_MAX)
        return lock_name

    # --- Every other request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        self.in_flight.begin()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = echoed_request_id(headers.get(b"x-request-id"))
        try:
            try:
                answer = await self._route(scope, headers, receive)
            except Exception as error:
                answer = self._answer_to_failure(error, scope["method"], scope["raw_path"])
            await send_answer(send, answer, request_id)
            if self._log_each:
                self._log_request(
                    scope["method"], scope["raw_path"], scope.get("client"), answer, request_id=request_id, began=began
                )
        finally:
            self.in_flight.end()

    async def _route(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        path: bytes = scope["raw_path"]
        if path != b"/v1/locks/":  # this is a lock with an empty name, not the list
            path = path.removesuffix(b"/")  # the Go LockServer accepts both forms
        method: str = scope["method"]
        caller = self._admit(path, headers)
        # Split the encoded path: in a decoded one, %2F would have become a slash.
        match path.split(b"/")[1:]:
            case [b"v1", b"locks", *rest]:
                return await self._about_locks(rest, caller, scope, headers, receive)
            case [b"v1", b"batch"]:
                _only(method, "POST")
                check_json(headers, BATCH_BYTES_MAX)
                scan = wire.Scan()
                body = await read_body(receive, self._waits, BATCH_BYTES_MAX, scan.take)
                batch = wire.decode(_batch_decoder, body, scan)
                return await self._service.batch(caller, batch.operations)
            case [b"healthz"]:
                _only(method, "GET")
                return Answer(200, wire.encode(wire.StatusReply("ok")))
            case [b"readyz"]:
                _only(method, "GET")
                await self._service.check_ready()
                return Answer(200, wire.encode(wire.StatusReply("ready")))
            case [b"metrics"]:
                _only(method, "GET")
                return Answer(200, self._metrics.exposition(), content_type=CONTENT_TYPE)
            case [b"openapi.json"]:
                _only(method, "GET")
                return Answer(200, self._openapi)
        raise _nothing_here()

    async def _about_locks(
        self, rest: list[bytes], caller: Caller, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Answer:
        method: str = scope["method"]
        match rest:
            case []:
                _only(method, "GET")
                return await self._service.list_locks(caller, *_list_query(scope["query_string"]))
            case [raw_name, verb] if verb in _READS and (raw_name or method == "POST"):
                _only(method, "POST")
                lock_name = self._admit_lock(caller, raw_name, headers)
                return await self._operate(_READS[verb], caller, lock_name, headers, receive)
            case [raw_name] if raw_name:
                _only(method, "GET")
                return await self._service.get(caller, wire.lock_name_of(raw_name))
            case [raw_name, b"break"] if raw_name:
                _only(method, "POST")
                check_json(headers, BODY_BYTES_MAX)
                wire.decode(_break_decoder, await read_body(receive, self._waits, BODY_BYTES_MAX))
                return await self._service.break_lock(caller, wire.lock_name_of(raw_name))
        raise _nothing_here()

    def _answer_to_failure(self, error: Exception, method: str, path: bytes) -> Answer:
        """The answer to a failure. There is one for every exception, because an exception that leaves the application
        would end the connection without an answer."""
        if isinstance(error, ClientGone):
            error = left()
        elif not isinstance(error, Refusal):
            self._log.error("request_failed", error, path=path.decode("latin-1"), method=method)
            error = defect()
        return answer_of(error)

    def _log_request(
        self,
        method: str,
        path: bytes,
        client: Sequence[Any] | None,
        answer: Answer,
        *,
        request_id: bytes | None,
        began: float,
    ) -> None:
        self._log.info(
            "request",
            method=method,
            path=path.decode("latin-1"),
            status=answer.status,
            latency_ms=(time.perf_counter() - began) * 1000,
            client=client[0] if client else "-",
            request_id=request_id.decode() if request_id is not None else "-",
        )


def _operation_at(path: bytes) -> tuple[_Read, bytes] | None:
    """For an acquire, a renewal or a release: the function that reads its body, and the lock's name as it was sent."""
    parts = path.removesuffix(b"/").split(b"/", 5)
    if len(parts) != 5 or parts[2] != b"locks" or parts[1] != b"v1":
        return None
    read = _READS.get(parts[4])
    return None if read is None else (read, parts[3])


def _nothing_here() -> Refusal:
    return Refusal(404, "there is nothing at this path")


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise Refusal(405, "not with this method", (b"allow", allowed.encode()))


async def _when_gone(receive: Receive, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


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
    for text in (prefix, cursor):  # a cursor is a name too: the last one on the page before
        if text:
            wire.checked_name(text)
    limit = given.get("limit", str(wire.LIST_LIMIT_DEFAULT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= wire.LIST_LIMIT_MAX):
        raise Refusal(400, f"limit must be an integer from 1 to {wire.LIST_LIMIT_MAX}")
    return prefix, cursor or None, int(limit)
