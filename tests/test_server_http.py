"""The lock server over real sockets: what it answers, to whom, and how it ends."""

from pathlib import Path

from support.lockserver import lock_server


def test_a_lock_is_acquired_renewed_and_released(tmp_path: Path) -> None:
    with lock_server(tmp_path) as server:
        granted = server.ask("POST", "/v1/locks/job/acquire", {"owner_id": "w1", "ttl_ms": 60_000})
        assert granted.status == 200
        lease = granted.json()
        held = server.ask("POST", "/v1/locks/job/acquire", {"owner_id": "w2", "ttl_ms": 60_000})
        assert (held.status, held.json()["reason"]) == (409, "HELD")
        mine = {key: lease[key] for key in ("owner_id", "lease_id", "fencing_token")}
        assert server.ask("POST", "/v1/locks/job/renew", {**mine, "extend_by_ms": 60_000}).json()["renewed"] is True
        assert server.ask("POST", "/v1/locks/job/release", mine).json() == {"released": True}
        assert server.stop() == 0
