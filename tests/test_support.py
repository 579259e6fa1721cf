"""What the other tests stand on: counts, the pooler, and the look for leftovers."""

import psycopg
import pytest

from conftest import StartPooler
from servers import left_behind, wait_until_nothing_left
from support.counts import count
from support.pgbouncer import PoolMode


def test_the_count_is_full_only_when_proof_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGLEADERLOCK_PROOF", raising=False)
    assert count(3, 1000) == 3
    monkeypatch.setenv("PGLEADERLOCK_PROOF", "1")
    assert count(3, 1000) == 1000


@pytest.mark.parametrize("pool_mode", ["session", "transaction", "statement"])
def test_the_pooler_leads_to_the_server_in_each_mode(pgbouncer: StartPooler, dsn: str, pool_mode: PoolMode) -> None:
    with psycopg.connect(pgbouncer(dsn, pool_mode), autocommit=True) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        assert row[0] != connection.info.backend_pid


def test_a_session_and_its_lock_left_behind_are_found(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, application_name="forgotten") as connection:
        connection.execute("SELECT pg_advisory_lock(1, 2)")
        left = "\n".join(left_behind(dsn))
        assert "forgotten" in left
        assert "advisory lock 1/2" in left
        assert wait_until_nothing_left(dsn, timeout_s=0.05)
