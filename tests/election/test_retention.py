"""History cleans up after itself: in small steps, never what counts, and never at the cost of a heartbeat."""

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from pgleaderlock import ConfigurationError, LeaderElection
from pgleaderlock._election import engine, ledger
from support.elections import STEADY, admin, one, opens, until

OLD = "clock_timestamp() - interval '31 days'"
NEW = "clock_timestamp() - interval '29 days'"


@pytest.fixture
def space() -> str:
    return f"kept-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node looks every few minutes, and twice as often if there is more: here it need not wait for that."""
    monkeypatch.setattr(engine, "EVERY_S", 0.05)
    monkeypatch.setattr(engine, "AGAIN_S", 0.02)


def write_history(superuser: str, space: str) -> None:
    """Three roles: `long` with terms of all ages, `once` with one old term, `open` with an old one that is open."""
    with admin(superuser) as conn:
        for role, epoch, began, ended in (
            ("long", 1, OLD, OLD),
            ("long", 2, OLD, OLD),
            ("long", 3, OLD, NEW),
            ("long", 4, NEW, NEW),
            ("once", 1, OLD, OLD),
            ("open", 1, OLD, OLD),
            ("open", 2, OLD, "NULL"),
        ):
            conn.execute(
                f"INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity,"
                f" began_at, ended_at, reason) VALUES (%s, %s, %s, 1, 'n', 'n', {began}, {ended}, 'lost')".encode(),
                (space, role, epoch),
            )
        for when in (OLD, NEW):
            conn.execute(
                f"INSERT INTO pgleaderlock.events (kind, namespace, at) VALUES ('lost', %s, {when})".encode(), (space,)
            )
            conn.execute(
                f"INSERT INTO pgleaderlock.requests (kind, namespace, role, at, done_at, outcome)"
                f" VALUES ('step_down', %s, 'long', {when}, {when}, 'done')".encode(),
                (space,),
            )
            for leads in (False, True):
                conn.execute(
                    f"WITH s AS (INSERT INTO pgleaderlock.sessions (namespace, instance, node_id, host, os_pid,"
                    f" holder_identity, backend_pid, backend_start, database_role, gate_s, lease_s, library_version,"
                    f" last_heartbeat) VALUES (%s, gen_random_uuid(), 'n', 'h', 1, 'n', 1, now(), 'r', 1, 2, 't',"
                    f" {when}) RETURNING session_id)"
                    f" INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2, session_id)"
                    f" SELECT %s, %s, %s, %s, session_id FROM s WHERE %s".encode(),
                    (
                        space,
                        space,
                        f"led {when}",
                        uuid.uuid4().int % 2**31,
                        uuid.uuid4().int % 2**31,
                        leads,
                    ),
                )


def history(superuser: str, space: str) -> dict[str, Any]:
    with admin(superuser) as conn:
        terms = conn.execute(
            "SELECT role, epoch FROM pgleaderlock.terms WHERE namespace = %s AND node_id = 'n' ORDER BY 1, 2", (space,)
        ).fetchall()
        counts = conn.execute(
            "SELECT (SELECT count(*) FROM pgleaderlock.events WHERE namespace = %(n)s AND node_id IS NULL) AS events,"
            " (SELECT count(*) FROM pgleaderlock.requests WHERE namespace = %(n)s) AS requests,"
            " (SELECT count(*) FROM pgleaderlock.sessions WHERE namespace = %(n)s AND node_id = 'n') AS sessions",
            {"n": space},
        ).fetchone()
    assert counts is not None
    return {"terms": [(row["role"], row["epoch"]) for row in terms], **counts}


KEPT = {
    "terms": [("long", 3), ("long", 4), ("once", 1), ("open", 2)],
    "events": 1,
    "requests": 1,
    "sessions": 3,  # the new ones, and an old one that is the last leader of a role
}


@contextlib.asynccontextmanager
async def running(dsn: str, space: str, **settings: Any) -> AsyncIterator[LeaderElection]:
    options = {**STEADY, **settings}
    async with LeaderElection(dsn, "role", namespace=space, node_id="cleans", **options) as election:
        await opens(election, "role")
        yield election


async def test_what_is_older_than_the_retention_goes_and_what_counts_stays(
    node_dsn: str, superuser: str, space: str, often: None
) -> None:
    write_history(superuser, space)
    async with running(node_dsn, space) as election:
        await until(lambda: history(superuser, space) == KEPT, "the old history to go")
        assert election.gate("role").current_epoch == 1


async def test_it_goes_in_small_steps(
    node_dsn: str, superuser: str, space: str, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PRUNE_STEP", 10)
    real, steps = ledger.Ledger.prune, list[bool]()

    async def prune(self: ledger.Ledger, keep_s: float) -> bool:
        before = one(superuser, "SELECT count(*) AS n FROM pgleaderlock.events WHERE namespace = %s", space)["n"]
        more = await real(self, keep_s)
        after = one(superuser, "SELECT count(*) AS n FROM pgleaderlock.events WHERE namespace = %s", space)["n"]
        assert before - after <= 10
        steps.append(more)
        return more

    monkeypatch.setattr(ledger.Ledger, "prune", prune)
    with admin(superuser) as conn:
        conn.execute(
            f"INSERT INTO pgleaderlock.events (kind, namespace, at)"
            f" SELECT 'lost', %s, {OLD} FROM generate_series(1, 25)".encode(),
            (space,),
        )
    async with running(node_dsn, space):
        await until(lambda: steps[:3] == [True, True, False])
    left = "SELECT count(*) AS n FROM pgleaderlock.events WHERE namespace = %s AND kind = 'lost'"
    assert one(superuser, left, space)["n"] == 0


def cleanings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each cleaning from now on answers: whether there may be more."""
    real, done = ledger.Ledger.prune, list[bool]()

    async def prune(self: ledger.Ledger, keep_s: float) -> bool:
        done.append(await real(self, keep_s))
        return done[-1]

    monkeypatch.setattr(ledger.Ledger, "prune", prune)
    return done


async def test_a_table_that_somebody_holds_costs_no_heartbeat(
    node_dsn: str, superuser: str, space: str, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that waited for the table would run into its statement's deadline, and lose its session and its term."""
    done = cleanings(monkeypatch)
    write_history(superuser, space)
    with admin(superuser) as conn:
        async with running(node_dsn, space, late_threshold_s=2.0, session_lease_s=3.0) as election:
            conn.execute("BEGIN")
            conn.execute("LOCK TABLE pgleaderlock.requests, pgleaderlock.terms IN SHARE MODE")
            before = len(done)
            await until(lambda: len(done) >= before + 3)
            assert election.gate("role").require_leader().epoch == 1
            conn.execute("ROLLBACK")
            await until(lambda: history(superuser, space) == KEPT)


async def test_without_a_retention_nothing_goes(node_dsn: str, superuser: str, space: str, often: None) -> None:
    write_history(superuser, space)
    before = history(superuser, space)
    async with running(node_dsn, space, retention_s=None):
        async with running(node_dsn, f"{space}-other", retention_s=3600.0):
            beat = "SELECT beat FROM pgleaderlock.sessions WHERE namespace = %s AND node_id = 'cleans'"
            await until(lambda: one(superuser, beat, space)["beat"] > 5)
        assert history(superuser, space) == before, "nor by a node of another namespace"


async def test_a_cleaning_that_the_server_refuses_costs_no_session(
    node_dsn: str, superuser: str, space: str, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cleanings(monkeypatch)
    write_history(superuser, space)
    with admin(superuser) as conn:
        conn.execute("REVOKE EXECUTE ON FUNCTION pgleaderlock.prune FROM election_plain")
        try:
            async with running(node_dsn, space) as election:
                before = history(superuser, space)
                await until(lambda: len(done) >= 3)
                assert election.gate("role").require_leader().epoch == 1
                assert election.last_error is None
                assert history(superuser, space) == before
        finally:
            conn.execute("GRANT EXECUTE ON FUNCTION pgleaderlock.prune TO election_plain")


YOUNG = (
    ("1 minute", 10),
    ("30 days", 0),
    ("30 days", 10_001),
    ("-12 months 361 days", 10),  # is a day when it is compared, and lies in the future when it is subtracted
    (None, 10),
    ("30 days", None),
)


def test_no_hand_deletes_what_is_young(node_dsn: str, space: str) -> None:
    with psycopg.connect(node_dsn, autocommit=True) as conn:
        for keep, limit in YOUNG:
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                conn.execute("SELECT pgleaderlock.prune(%s, %s, %s)", (space, keep, limit))


@pytest.mark.parametrize("retention_s", [0, -1, 59.0, "30 days", True])
def test_a_retention_that_is_none_is_refused(retention_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="retention_s"):
        LeaderElection("postgresql://db.example/app", "r", retention_s=retention_s)
