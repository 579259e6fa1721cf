"""Who may ask the lock server for what: each path without a token, with a wrong one, a limited one and an admin's."""

from collections.abc import Iterator
from typing import Any

import pytest

from pgleaderlock.server.description import OPERATIONS
from support.lockserver import (
    ADMIN_TOKEN,
    OWNER,
    PREFIX_TOKEN,
    LockServerProcess,
    acquire,
    lease_of,
    lock_server,
    renews,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """One without tokens, for tests that leave it as it was. Take lock names of your own."""
    with lock_server(tmp_path_factory.mktemp("open")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    """One with tokens."""
    with lock_server(tmp_path_factory.mktemp("guarded"), tokens=True) as running:
        yield running


def every_path() -> list[tuple[str, str, bool]]:
    return [(op.method, op.path.replace("{lock}", "team%2Fx"), op.needs_token) for op in OPERATIONS]


BODIES: dict[str, Any] = {
    "acquire": OWNER,
    "renew": {"owner_id": "w", "lease_id": "l", "fencing_token": 1, "extend_by_ms": 1},
    "release": {"owner_id": "w", "lease_id": "l", "fencing_token": 1},
    "batch": {
        "operations": [{"op": "release", "lock_name": "team/x", "owner_id": "w", "lease_id": "l", "fencing_token": 1}]
    },
    "break": {},
}


@pytest.mark.parametrize(("method", "path", "needs_token"), every_path())
def test_every_path_but_the_open_ones_needs_a_known_token(
    guarded: LockServerProcess, method: str, path: str, needs_token: bool
) -> None:
    body = BODIES.get(path.rsplit("/", 1)[1])
    for authorization in ("", "Bearer wrong-token-0000000000", "Basic " + ADMIN_TOKEN, "Bearer", ADMIN_TOKEN):
        reply = guarded.ask(method, path, body, headers={"Authorization": authorization})
        if needs_token:
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        else:
            assert reply.status == 200
    assert guarded.ask(method, path, body, token=ADMIN_TOKEN).status in (200, 409)


def test_only_health_readiness_and_the_description_are_open() -> None:
    assert {path for _, path, needs_token in every_path() if not needs_token} == {
        "/healthz",
        "/readyz",
        "/openapi.json",
    }


def test_a_limited_token_works_below_its_prefix_only(guarded: LockServerProcess) -> None:
    for path in ("acquire", "renew", "release"):
        inside = guarded.ask("POST", f"/v1/locks/team%2Flimited/{path}", BODIES[path], token=PREFIX_TOKEN)
        outside = guarded.ask("POST", f"/v1/locks/other/{path}", BODIES[path], token=PREFIX_TOKEN)
        assert (inside.status in (200, 409), outside.status) == (True, 403)
    assert guarded.ask("GET", "/v1/locks/other", token=PREFIX_TOKEN).status == 403
    assert guarded.ask("GET", "/v1/locks", token=PREFIX_TOKEN).status == 403
    assert guarded.ask("GET", "/v1/locks?prefix=tea", token=PREFIX_TOKEN).status == 403
    assert guarded.ask("GET", "/v1/locks?prefix=team%2F", token=PREFIX_TOKEN).status == 200
    assert guarded.ask("GET", "/v1/locks/other", token=ADMIN_TOKEN).json()["fencing_token"] == 0


def test_in_a_batch_each_item_is_authorised_by_itself(guarded: LockServerProcess) -> None:
    operations = [{"op": "acquire", "lock_name": name, **OWNER} for name in ("foreign", "team/batch", "foreign")]
    reply = guarded.ask("POST", "/v1/batch", {"operations": operations}, token=PREFIX_TOKEN)
    assert [result["status"] for result in reply.json()["results"]] == [403, 200, 403]
    assert guarded.ask("GET", "/v1/locks/foreign").json()["held"] is False


def test_the_lease_id_is_shown_to_an_admin_only(guarded: LockServerProcess, server: LockServerProcess) -> None:
    lease = lease_of(acquire(guarded, "shown"))
    for path in ("/v1/locks/shown", "/v1/locks?prefix=shown"):
        assert lease["lease_id"].encode() not in guarded.ask("GET", path).body
        assert lease["lease_id"].encode() in guarded.ask("GET", path, token=ADMIN_TOKEN).body
    lease = lease_of(acquire(server, "shown"))
    assert lease["lease_id"].encode() not in server.ask("GET", "/v1/locks/shown").body


def test_an_admin_breaks_a_lock_and_it_is_written_down(guarded: LockServerProcess) -> None:
    granted = acquire(guarded, "broken")
    assert guarded.ask("POST", "/v1/locks/broken/break", {}).status == 403
    reply = guarded.ask("POST", "/v1/locks/broken/break", {}, token=ADMIN_TOKEN)
    assert (reply.status, reply.json()["broken"], reply.json()["was"]["owner_id"]) == (200, True, "w1")
    guarded.program.until("lock_broken lock=broken by=root")
    assert acquire(guarded, "broken", "w2").json()["fencing_token"] > granted.json()["fencing_token"]
    assert not renews(guarded, "broken", lease_of(granted))
