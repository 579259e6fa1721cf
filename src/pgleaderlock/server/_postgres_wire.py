"""Operations as the database's function takes them, and its rows as outcomes. Pure.

Imports msgspec, `store` and the standard library.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    LockView,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Released,
    Renew,
    Renewed,
    StoreFull,
    new_lease_id,
)

__all__ = ["encoded", "outcome_of", "view_of", "waiting"]


class _Sent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    kind: str
    lock: str
    owner: str | None = None
    lease: str | None = None
    token: int | None = None
    ms: int | None = None
    key: str | None = None
    waiter: int | None = None
    ticket: int | None = None
    wait_ms: int | None = None
    waited_ms: int | None = None
    earlier: list[str] | None = None


_encode = msgspec.json.Encoder().encode


def encoded(operation: Operation) -> str:
    op = operation
    if isinstance(op, Acquire):
        sent = _Sent("acquire", op.lock_name, op.owner_id, new_lease_id(), ms=op.ttl_ms, key=op.idempotency_key)
    elif isinstance(op, Renew):
        sent = _Sent("renew", op.lock_name, op.owner_id, op.lease_id, op.fencing_token, op.extend_by_ms)
    else:
        sent = _Sent("release", op.lock_name, op.owner_id, op.lease_id, op.fencing_token)
    return _encode(sent).decode()


def waiting(kind: str, acquire: Acquire, lease_id: str | None, earlier: list[str] | None, **waiter: int | None) -> str:
    """An acquire of a waiter (`acquire`, `wait`), or its end (`abandon`)."""
    sent = _Sent(
        kind,
        acquire.lock_name,
        acquire.owner_id,
        lease_id,
        ms=acquire.ttl_ms,
        key=acquire.idempotency_key,
        earlier=earlier or None,
        **waiter,
    )
    return _encode(sent).decode()


def outcome_of(operation: Operation, row: Mapping[str, Any], locks_max: int) -> Outcome:
    match row["outcome"]:
        case "granted" | "replayed" as how:
            return Granted(
                operation.lock_name,
                operation.owner_id,
                row["lease_id"],
                row["fencing_token"],
                row["expiry_ms"],
                waited_ms=row["waited_ms"],
                replayed=how == "replayed",
            )
        case "held":
            return Held(operation.lock_name, row["owner_id"] or "", row["expiry_ms"] or 0, row["remaining_ms"] or 0)
        case "full":
            return StoreFull(locks_max)
        case "renewed":
            return Renewed(row["expiry_ms"])
        case "released":
            return Released()
        case _:
            return NotRenewed() if isinstance(operation, Renew) else NotReleased()


def view_of(row: Mapping[str, Any]) -> LockView:
    held = row["held"]
    return LockView(
        row["lock_name"],
        held,
        row["owner_id"] if held else None,
        row["lease_id"] if held else None,
        row["fencing_token"],
        row["expiry_ms"] if held else None,
        row["version"],
        row["waiters"],
    )
