"""The lock server's JSON, without a socket: what is accepted, what is refused, and what is published about it."""

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgleaderlock._http.answers import Refusal, echoed_request_id
from pgleaderlock._http.hosts import HostCheck
from pgleaderlock.server import wire
from pgleaderlock.server.description import OPERATIONS, openapi_document
from pgleaderlock.server.store import Granted, Held, LockView, NotReleased, NotRenewed, Released, Renewed

ACQUIRE = msgspec.json.Decoder(wire.AcquireRequest)
RENEW = msgspec.json.Decoder(wire.RenewRequest)
BATCH = msgspec.json.Decoder(wire.BatchRequest)
LEASE = {"owner_id": "w", "lease_id": "l", "fencing_token": 7}


def acquire(**changed: Any) -> bytes:
    return json.dumps({"owner_id": "w", "ttl_ms": 1000, **changed}).encode()


def refused(call: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


# --- What may be asked


def test_an_integral_float_is_an_integer() -> None:
    assert wire.decode(ACQUIRE, b'{"owner_id": "w", "ttl_ms": 5713.0, "wait_ms": 1e3}') == wire.AcquireRequest(
        "w", 5713, 1000
    )
    item = {"op": "renew", "lock_name": "a", **LEASE, "fencing_token": 3.0, "extend_by_ms": 5.0}
    (renewal,) = wire.decode(BATCH, json.dumps({"operations": [item]}).encode()).operations
    assert isinstance(renewal, wire.BatchRenew)
    assert (renewal.fencing_token, renewal.extend_by_ms) == (3, 5)


@pytest.mark.parametrize(
    "body",
    [
        acquire(ttl_ms=5713.5),
        acquire(ttl_ms=0),
        acquire(ttl_ms=-1.0),
        acquire(ttl_ms=600_001),
        acquire(ttl_ms=600_001.0),
        acquire(ttl_ms="1000"),
        acquire(ttl_ms=True),
        acquire(ttl_ms=None),
        acquire(wait_ms=-1),
        acquire(wait_ms=60_001),
        acquire(unknown=1),
        acquire(unknown=1.0),
        acquire(owner_id=""),
        acquire(owner_id="x" * 201),
        acquire(owner_id="a\n"),
        acquire(owner_id="a\x00b"),
        acquire(owner_id="a\u2028b"),
        acquire(owner_id="a\x85b"),
        b'{"owner_id": "\\ud800", "ttl_ms": 1}',
        b'{"owner_id": "\xff", "ttl_ms": 1}',
        b'{"owner_id": "w", "ttl_ms": 1e400}',
        b'{"owner_id": "w", "ttl_ms": ' + b"9" * 5000 + b"}",
        b'{"owner_id": "w", "ttl_ms": 1.0, "x": ' + b"[" * 5000,
        b"[" * 5000,
        b"",
        b"null",
        b"{}",
    ],
)
def test_what_is_not_valid_is_refused_with_400_and_a_sentence(body: bytes) -> None:
    refusal = refused(lambda: wire.decode(ACQUIRE, body))
    assert refusal.status == 400
    assert refusal.error
    assert "\\u0000" not in refusal.error  # no regular expression in a sentence for people


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    decoders: list[msgspec.json.Decoder[Any]] = [ACQUIRE, RENEW, BATCH]
    for decoder in decoders:
        with contextlib.suppress(Refusal):  # and nothing else
            wire.decode(decoder, body)


def test_the_highest_token_is_the_highest_of_the_store_and_no_higher() -> None:
    body = {**LEASE, "extend_by_ms": 1}
    at_most = json.dumps({**body, "fencing_token": 2**63 - 1}).encode()
    assert wire.decode(RENEW, at_most).fencing_token == 2**63 - 1
    for beyond in (2**63, 2.0**63, 0, -1):
        assert (
            refused(lambda n=beyond: wire.decode(RENEW, json.dumps({**body, "fencing_token": n}).encode())).status
            == 400
        )


def test_a_batch_holds_1_to_500_operations() -> None:
    item = {"op": "release", "lock_name": "a", **LEASE}
    assert len(wire.decode(BATCH, json.dumps({"operations": [item] * 500}).encode()).operations) == 500
    for count in (0, 501):
        assert (
            refused(lambda n=count: wire.decode(BATCH, json.dumps({"operations": [item] * n}).encode())).status == 400
        )


# --- Names in the path


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        (b"job", "job"),
        (b"a%2Fb", "a/b"),
        (b"%C3%A4", "ä"),
        (b"a+b", "a+b"),
        (b"%2541", "%41"),  # decoded once, not twice
        (b"%F0%9F%94%92", "🔒"),
        (b"..", ".."),
    ],
)
def test_a_name_in_the_path_is_percent_decoded_once(segment: bytes, name: str) -> None:
    assert wire.lock_name_of(segment) == name


@pytest.mark.parametrize(
    "segment", [b"", b"%", b"%4", b"%zz", b"%FF", b"%00", b"%0A", b"a%0a", b"%ED%A0%80", b"x" * 201]
)
def test_a_name_that_is_no_name_is_refused(segment: bytes) -> None:
    assert refused(lambda: wire.lock_name_of(segment)).status == 400


@pytest.mark.parametrize("key", [b"", b"a b", b"\xff", b"x" * 201, b"a\n"])
def test_an_idempotency_key_is_printable_ascii(key: bytes) -> None:
    assert refused(lambda: wire.idempotency_key_of(key)).status == 400
    assert wire.idempotency_key_of(b"7f1c-9") == "7f1c-9"


def test_a_request_id_is_echoed_only_if_it_is_harmless() -> None:
    assert echoed_request_id(b"req-1.2:3") == b"req-1.2:3"
    for given_id in (b"", b"a b", b"a\r\nset-cookie: x", b"x" * 129, b"\xff"):
        assert echoed_request_id(given_id) is None


# --- Host names


def test_an_address_is_always_a_name_of_ours_and_a_foreign_name_never() -> None:
    check = HostCheck(["locks.example", "127.0.0.1"])
    for ours in (b"127.0.0.1:7420", b"localhost", b"LOCALHOST:80", b"[::1]:7420", b"10.1.2.3", b"locks.example.:1"):
        check(ours)
    for foreign in (b"evil.example", b"evil.example:7420", b"127.0.0.1.evil.example", b"[::1].evil.example", b"\xff"):
        assert refused(lambda host=foreign: check(host)).status == 403
    assert refused(lambda: check(None)).status == 400


# --- Replies


def test_each_outcome_has_the_reply_that_the_clients_know() -> None:
    shown = {type(outcome): wire.reply_of(outcome) for outcome in (
        Granted("a", "w", "l", 7, 1000),
        Renewed(1000),
        NotRenewed(),
        Released(),
        NotReleased(),
    )}  # fmt: skip
    assert {kind.__name__: (status, json.loads(wire.encode(reply))) for kind, (status, reply) in shown.items()} == {
        "Granted": (
            200,
            {
                "acquired": True,
                "lock_name": "a",
                "owner_id": "w",
                "lease_id": "l",
                "fencing_token": 7,
                "lease_expiry_ms": 1000,
                "waited_ms": 0,
                "replayed": False,
            },
        ),
        "Renewed": (200, {"renewed": True, "lease_expiry_ms": 1000}),
        "NotRenewed": (409, {"renewed": False, "reason": "NOT_OWNER_OR_EXPIRED"}),
        "Released": (200, {"released": True}),
        "NotReleased": (200, {"released": False, "reason": "NOT_OWNER"}),
    }


def test_a_refused_acquire_says_who_until_when_and_when_to_come_back() -> None:
    status, reply = wire.reply_of(Held("a", "w", 5000, 300))
    shown = json.loads(wire.encode(reply))
    assert status == 409
    assert 300 <= shown.pop("recommended_retry_ms") <= 450
    expected = {
        "acquired": False,
        "lock_name": "a",
        "current_owner_id": "w",
        "current_expiry_ms": 5000,
        "reason": "HELD",
    }
    assert shown == expected


@given(st.integers(min_value=-10, max_value=10**9))
def test_the_recommended_retry_is_bounded_and_not_before_a_near_expiry(remaining_ms: int) -> None:
    retry_ms = wire.recommended_retry_ms(remaining_ms)
    assert 10 <= retry_ms <= 3000
    if remaining_ms <= 2000:
        assert retry_ms >= remaining_ms


def test_those_who_were_refused_together_do_not_come_back_together() -> None:
    assert len({wire.recommended_retry_ms(10_000) for _ in range(200)}) > 50


def test_a_lease_id_is_shown_only_when_asked_for() -> None:
    view = LockView("a", True, "w", "secret-lease", 7, 1000, 3)
    assert b"secret-lease" not in wire.encode(wire.lock_reply(view, show_lease_id=False))
    assert b"secret-lease" in wire.encode(wire.lock_reply(view, show_lease_id=True))


# --- The document


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = openapi_document()
    text = json.dumps(document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"], name
    assert document["openapi"].startswith("3.1")


def test_the_document_chains_acquire_to_renew_and_release() -> None:
    granted = openapi_document()["paths"]["/v1/locks/{lock}/acquire"]["post"]["responses"]["200"]
    assert {"renew", "release"} <= set(granted["links"])
    names = {operation.name for operation in OPERATIONS}
    assert all(link["operationId"] in names for link in granted["links"].values())


def test_the_published_patterns_are_of_ecmascript() -> None:
    text = json.dumps(openapi_document())
    assert r"\\Z" not in text
    assert "(?" not in text
