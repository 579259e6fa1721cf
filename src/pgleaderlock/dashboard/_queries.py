"""The dashboard's questions to the ledger, and what their answers mean: who leads, and whether a gate can be open.

The functions take whoever can run a named statement (`history.Asks`). Imports `history`, `wire` and the standard
library. Must never write, and never show as certain what the ledger cannot know: only a gate itself knows whether it is
open.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pgleaderlock.dashboard.wire import (
    Event,
    EventsReply,
    LastChange,
    Leader,
    LeadersReply,
    Node,
    NodesReply,
    Term,
    TermsReply,
)
from pgleaderlock.history import LAST_ID, Asks

__all__ = ["MS_MAX", "events_after", "events_before", "leaders", "nodes", "terms"]

MS_MAX = 253_402_300_799_999
"""The end of the year 9999: later moments are nobody's question, and not every database's answer."""
HEARD_WITHIN_S = 3600.0
NO_SESSION = 0


def wall_ms() -> int:
    return int(time.time() * 1000)


async def leaders(asks: Asks, namespace: str, *, prefix: str = "", after: str = "", limit: int) -> LeadersReply:
    """One page of the roles, by name as the database sorts them."""
    rows = await asks.rows("dashboard_leaders", namespace=namespace, prefix=prefix, after=after, page_size=limit + 1)
    found = [_leader(row) for row in rows[:limit]]
    now_ms = rows[0]["now_ms"] if rows else wall_ms()
    return LeadersReply(now_ms, found, found[-1].role if len(rows) > limit else None)


def _leader(row: Mapping[str, Any]) -> Leader:
    age_s = row["heartbeat_age_s"]
    live = row["node_id"] is not None and age_s <= row["lease_s"]
    fresh = live and age_s <= row["gate_s"]
    heartbeat = "ok" if fresh else "late" if live else "none"
    gate = "shut" if not fresh or row["draining"] else "waiting" if _waits(row) else "open"
    return Leader(
        namespace=row["namespace"],
        role=row["role"],
        leader=row["node_id"] if live else None,
        epoch=row["epoch"],
        since_ms=row["began_ms"] if live else None,
        tenure_ms=_span_ms(row["now_ms"], row["began_ms"]) if live else None,
        heartbeat_age_ms=max(0, int(age_s * 1000)) if live else None,
        heartbeat=heartbeat,  # type: ignore[arg-type]  # mypy widens what the conditions above choose from
        gate=gate,  # type: ignore[arg-type]
        candidates=row["candidates"],
        last_change=_last_change(row, live=live),
    )


def _waits(row: Mapping[str, Any]) -> bool:
    """Does a leader still sit its predecessor out? It began to count when it saw the last beat of that one, and not
    before its own session began. One with `takeover="instant"` does not wait, which the ledger does not know."""
    if not row["has_prev"] or row["prev_is_self"] or row["prev_ended_age_s"] is None:
        return False
    if row["prev_reason"] == "released" and not row["prev_unclean"]:
        return False
    counted_s = min(row["prev_ended_age_s"], row["session_age_s"])
    if row["prev_reason"] == "superseded":  # by hand: there was no last beat to be seen, so it counts from its win
        counted_s = (row["now_ms"] - row["began_ms"]) / 1000
    return bool(counted_s < row["wait_t"])


def _last_change(row: Mapping[str, Any], *, live: bool) -> LastChange | None:
    if row["began_ms"] is None:  # its terms have been pruned, or none has begun
        return None
    if row["reason"] is not None:
        return LastChange(row["ended_ms"], row["reason"], None)
    if live:
        return LastChange(row["began_ms"], "acquired", row["prev_reason"])
    return LastChange(row["last_sign_ms"], "lost", None)


def _span_ms(now_ms: int, then_ms: int | None) -> int | None:
    return None if then_ms is None else max(0, now_ms - then_ms)


async def terms(
    asks: Asks, namespace: str, role: str, *, from_ms: int = 0, to_ms: int = MS_MAX, before: int = LAST_ID, limit: int
) -> TermsReply | None:
    """One page of a role's terms that touch a span of time, the newest first; None if there is no such role."""
    rows = await asks.rows(
        "dashboard_terms", namespace=namespace, role=role, before_epoch=before, to_ms=to_ms, page_size=limit + 1
    )
    if not rows and not (await asks.rows("dashboard_role_known", namespace=namespace, role=role))[0]["known"]:
        return None
    page = [_term(row) for row in rows[:limit]]
    found = [term for term in page if term.ended_ms is None or term.ended_ms >= from_ms]
    more = len(rows) > limit and len(found) == len(page)
    return TermsReply(role, found, str(page[-1].epoch) if more else None)


def _term(row: Mapping[str, Any]) -> Term:
    ended_ms, reason, gap_ms = row["ended_ms"], row["reason"], row["gap_ms"]
    if ended_ms is None and not row["live"]:
        # Without a session's record nothing is known but the beginning.
        ended_ms, reason = row["last_sign_ms"], "lost"
    gap_ms = None if gap_ms is None else max(0, gap_ms)
    return Term(row["epoch"], row["node_id"], row["began_ms"], ended_ms, reason, gap_ms)


async def events_before(
    asks: Asks, namespace: str, *, before: int = LAST_ID, role: str | None = None, node: str | None = None, limit: int
) -> EventsReply:
    """One page of events, the newest first."""
    rows = await asks.rows(
        "dashboard_events_before", namespace=namespace, before_id=before, role=role, node=node, page_size=limit + 1
    )
    return _events(rows, limit)


async def events_after(
    asks: Asks, namespace: str, *, after: int, role: str | None = None, node: str | None = None, limit: int
) -> EventsReply:
    """One page of events, the oldest first."""
    rows = await asks.rows(
        "dashboard_events_after", namespace=namespace, after_id=after, role=role, node=node, page_size=limit + 1
    )
    return _events(rows, limit)


def _events(rows: Sequence[Mapping[str, Any]], limit: int) -> EventsReply:
    found = [Event(**row) for row in rows[:limit]]
    return EventsReply(found, str(found[-1].event_id) if len(rows) > limit else None)


async def nodes(asks: Asks, namespace: str, *, after: tuple[str, int] = ("", NO_SESSION), limit: int) -> NodesReply:
    """One page of the nodes by name: those that live or lead, and those that were heard lately."""
    rows = await asks.rows(
        "dashboard_nodes",
        namespace=namespace,
        heard_within_s=HEARD_WITHIN_S,
        after_node_id=after[0],
        after_session_id=after[1],
        page_size=limit + 1,
    )
    found = [
        Node(
            node_id=row["node_id"],
            namespace=row["namespace"],
            session_id=row["session_id"],
            host=row["host"],
            version=row["library_version"],
            started_ms=row["started_ms"],
            heartbeat_age_ms=max(0, int(row["heartbeat_age_s"] * 1000)),
            live=row["live"],
            candidate=row["candidate"],
            draining=row["draining"],
            roles=row["roles"],
        )
        for row in rows[:limit]
    ]
    now_ms = rows[0]["now_ms"] if rows else wall_ms()
    last = found[-1] if len(rows) > limit else None
    return NodesReply(now_ms, found, None if last is None else f"{last.session_id}.{last.node_id}")
