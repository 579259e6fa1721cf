"""The lock server's JSON, without a socket: what is accepted, what is refused, and what is published about it."""

import contextlib
import itertools
import json
import re
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgleaderlock._http.access import HostCheck
from pgleaderlock._http.answers import Refusal, echoed_request_id
from pgleaderlock.server import wire
from pgleaderlock.server.description import OPERATIONS, openapi_document
from pgleaderlock.server.store import Granted, Held, LockView, NotReleased, NotRenewed, Released, Renewed

ACQUIRE = wire.decoder(wire.AcquireRequest)
RENEW = wire.decoder(wire.RenewRequest)
BATCH = wire.decoder(wire.BatchRequest)
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


def test_a_number_that_is_written_as_a_text_is_no_number() -> None:
    for body in (b'{"owner_id": "w", "ttl_ms": "5"}', b'{"owner_id": "w", "wait_ms": 1.0, "ttl_ms": "5"}'):
        assert refused(lambda body=body: wire.decode(ACQUIRE, body)).status == 400


def batch_of(*more: str) -> str:
    """A batch of acquires, each with more fields."""
    items = ['{"op": "acquire", "lock_name": "a", "owner_id": "w", "ttl_ms": 1' + fields + "}" for fields in more]
    return '{"operations": [' + ", ".join(items) + "]}"


@pytest.mark.parametrize(
    ("decoder", "body"),
    [
        (ACQUIRE, '{"owner_id": "w", "ttl_ms": 1, "ttl_ms": 1}'),
        (ACQUIRE, '{"owner_id": "w", "ttl_ms": 1, "wait_ms": 0, "wait_ms": 0}'),
        (ACQUIRE, '{"owner_id": "w", "ttl_ms": 1, "ttl\\u005fms": 1}'),
        (ACQUIRE, '{"owner_id": "\\"", "owner_id": "\\u0022", "ttl_ms": 1}'),
        (ACQUIRE, '{"owner_id": "\\\\", "ttl_ms": 2, "ttl_ms": 1}'),
        (RENEW, '{"owner_id": "w", "lease_id": "l", "fencing_token": 1, "extend_by_ms": 1, "fencing_token": 2}'),
        (BATCH, batch_of("")[:-1] + "," + batch_of("")[1:]),
        (BATCH, batch_of("", ', "ttl_ms": 2')),
        (BATCH, batch_of(', "op": "acquire"')),
        (BATCH, batch_of(', "idempotency_key": null, "idempotency_key": null')),
    ],
)
def test_a_field_that_is_given_twice_is_refused(decoder: Any, body: str) -> None:
    refusal = refused(lambda: wire.decode(decoder, body.encode()))
    assert (refusal.status, "twice" in refusal.error) == (400, True)


@pytest.mark.parametrize(
    ("decoder", "body"),
    [
        (ACQUIRE, '{"owner_id": "\\"a\\\\\\"", "ttl_ms": 1, "wait_ms": 0}'),
        (ACQUIRE, '{"owner_id": "ttl_ms", "ttl_ms": 1.0, "wait_ms": 1}'),
        (BATCH, batch_of(', "idempotency_key": null', ', "idempotency_key": "k"', "")),
    ],
)
def test_a_field_that_is_given_once_is_not_taken_for_two(decoder: Any, body: str) -> None:
    wire.decode(decoder, body.encode())


# --- Hostile bodies: how long one takes is measured by `bench`. What makes it bounded is shown here.

MIB = 2**20


@pytest.mark.parametrize(
    "bomb",
    [
        b'{"operations": [1.0, ' + b"[]," * (MIB // 3) + b"[]]}",
        b'{"operations": [{"op": "acquire", "ttl_ms": 1.5, "x": [' + b"1.0," * (MIB // 4) + b"1]}]}",
        b'{"operations": [{"x": ' + b'{"a": 1.0},' * (MIB // 11) + b'1, "op": "acquire"}]}',
    ],
)
def test_no_line_of_python_runs_for_each_element_of_a_body(bomb: bytes) -> None:
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        with contextlib.suppress(Refusal):
            wire.decode(BATCH, bomb)
    finally:
        sys.setprofile(None)
    assert calls < 100


class Never:
    def decode(self, _body: bytes) -> Any:
        raise AssertionError("this one must be refused before it is decoded")


NEVER: Any = Never()


def test_a_body_of_more_strings_than_500_operations_can_have_is_not_decoded() -> None:
    item = b'"owner_id": "a",' * (wire.STRINGS_MAX // 2 + 1)
    body = b'{"operations": [{' + item + b"}," + b"{}," * 10 + b"{}]}"
    assert "more strings" in refused(lambda: wire.decode(NEVER, body)).error


@pytest.mark.parametrize("filling", [rb"\u00e4", rb"\\", b"9", b" ", b"[]", b"x"])
def test_a_body_that_is_longer_than_its_operations_can_be_is_not_decoded(filling: bytes) -> None:
    body = b'{"operations": [{"op": "release", "lock_name": "' + filling * (MIB // len(filling)) + b'"}]}'
    assert "for each operation" in refused(lambda: wire.decode(NEVER, body)).error


@pytest.mark.parametrize("count", [1, wire.BATCH_MAX])
def test_the_longest_operations_are_not_too_long(count: int) -> None:
    name = "\U0001f512" * wire.NAME_CHARS_MAX  # twelve bytes each, as json escapes it
    item = {"op": "renew", "lock_name": name, "owner_id": name, "lease_id": name, "fencing_token": 1, "extend_by_ms": 1}
    body = json.dumps({"operations": [item] * count}, indent=8).encode()
    assert len(wire.decode(BATCH, body).operations) == count


def test_many_quotes_inside_of_names_are_not_too_many_strings() -> None:
    name = '"' * wire.NAME_CHARS_MAX
    item = {"op": "renew", "lock_name": name, "owner_id": name, "lease_id": name, "fencing_token": 1, "extend_by_ms": 1}
    body = json.dumps({"operations": [item] * wire.BATCH_MAX}).encode()
    assert len(wire.decode(BATCH, body).operations) == wire.BATCH_MAX


@given(body=st.lists(st.sampled_from([b"{", b'"', b"\\", b"a"])).map(b"".join), cuts=st.lists(st.integers(0, 40)))
@example(body=rb'"\"', cuts=[2])
@example(body=rb'"\\"', cuts=[2, 2, 3])
def test_however_a_body_is_cut_its_strings_are_counted_alike(body: bytes, cuts: list[int]) -> None:
    whole, in_parts = wire.Scan(), wire.Scan()
    whole.take(body)
    ends = sorted(min(cut, len(body)) for cut in cuts)
    for begin, end in itertools.pairwise([0, *ends, len(body)]):
        in_parts.take(body[begin:end])
    assert in_parts.quotes == whole.quotes


@pytest.mark.parametrize("filling", [rb"\u00e4", rb"\\", b"9", b" ", b"[]", b"x", b'"owner_id":"a",'])
def test_a_body_that_is_too_expensive_is_refused_before_all_of_it_has_come(filling: bytes) -> None:
    scan = wire.Scan()
    scan.take(b'{"operations": [{"op": "release", "lock_name": "')
    assert refused(lambda: scan.take(filling * (64 * 1024 // len(filling)))).status == 400


@pytest.mark.parametrize("text", ["x" * MIB, "matching regex '" * 1000])
def test_a_refusal_does_not_repeat_a_long_body(text: str) -> None:
    unknown = json.dumps({"owner_id": "w", "ttl_ms": 1, text: 1}).encode()
    assert len(refused(lambda: wire.decode(ACQUIRE, unknown)).error) < 500
    untold = json.dumps({"operations": [{"op": text}]}).encode()
    assert len(refused(lambda: wire.decode(BATCH, untold)).error) < 500


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    decoders: list[Any] = [ACQUIRE, RENEW, BATCH]
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
        Granted("a", "w", "l", 7, 1000, 30_000, 20_000),
        Renewed(1000, 30_000),
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
                "ttl_ms": 30_000,
                "remaining_ms": 20_000,
                "waited_ms": 0,
                "replayed": False,
            },
        ),
        "Renewed": (200, {"renewed": True, "lease_expiry_ms": 1000, "ttl_ms": 30_000, "remaining_ms": 30_000}),
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
    assert 10 <= retry_ms <= 600
    if remaining_ms <= 400:
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


def test_the_document_names_the_store_on_every_answer_and_what_any_request_may_be_refused_with() -> None:
    for path, operations in openapi_document()["paths"].items():
        for operation in operations.values():
            assert {"400", "403", "421", "501"} <= set(operation["responses"]), path
            assert "X-Lock-Store" in {field["name"] for field in operation["parameters"]}, path
            assert all("X-Lock-Store" in answer["headers"] for answer in operation["responses"].values()), path


def test_the_document_has_the_time_that_is_left_and_the_refusal_of_a_key() -> None:
    document = openapi_document()
    for name in ("AcquireReply", "RenewReply"):
        assert {"ttl_ms", "remaining_ms"} <= set(document["components"]["schemas"][name]["properties"])
    assert "422" in document["paths"]["/v1/locks/{lock}/acquire"]["post"]["responses"]


def test_the_published_patterns_are_of_ecmascript() -> None:
    text = json.dumps(openapi_document())
    assert r"\\Z" not in text
    assert "(?" not in text
