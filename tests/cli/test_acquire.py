"""`pgleaderlock acquire`: one answer, by exit code; nothing is retried, nothing is left held."""

import signal
import time
import uuid

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import StartPooler
from pgleaderlock import key_pair
from support.program import PATIENCE_S, command, running
from support.server_side import connections_named, holders, terminate


@pytest.fixture
def name() -> str:
    """A lock that no other test knows."""
    return f"acquire-{uuid.uuid4().hex[:12]}"


def test_a_free_lock_is_acquired_and_released_again_and_both_are_said(dsn: str, name: str) -> None:
    done = command("acquire", "--name", name, "--dsn", dsn)
    assert (done.code, done.err) == (0, "")
    assert "acquired" in done.out
    assert "released again" in done.out
    assert holders(dsn, key_pair(name)) == []


def test_the_help_says_that_the_lock_is_released_again() -> None:
    assert "released again" in command("acquire", "--help").out


def test_a_held_lock_exits_1_and_says_who_holds_it(dsn: str, name: str) -> None:
    with running("acquire", "--name", name, "--dsn", dsn, "--hold") as holder:
        holder.until("held until", "out")
        (pid,) = holders(dsn, key_pair(name))
        done = command("acquire", "--name", name, "--dsn", dsn)
        assert (done.code, done.err) == (1, "")
        assert f"pid {pid}" in done.out
        assert f"pgleaderlock {name} " in done.out


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_hold_keeps_the_lock_until_a_signal_and_exits_0(dsn: str, name: str, signum: signal.Signals) -> None:
    with running("acquire", "--name", name, "--dsn", dsn, "--hold") as holder:
        holder.until("held until", "out")
        assert len(holders(dsn, key_pair(name))) == 1
        holder.signal(signum)
        assert holder.end() == 0
        assert "released" in holder.out
        assert holder.err == ""
    assert holders(dsn, key_pair(name)) == []


def test_a_loss_while_holding_exits_76_and_says_why(dsn: str, name: str) -> None:
    with running("acquire", "--name", name, "--dsn", dsn, "--hold") as holder:
        holder.until("held until", "out")
        terminate(dsn, key_pair(name))
        assert holder.end() == 76
        assert holder.err.startswith(f"lost: {name}: ")
        assert "terminating connection" in holder.err


def test_wait_gets_the_lock_when_its_holder_lets_go(dsn: str, name: str) -> None:
    with (
        running("acquire", "--name", name, "--dsn", dsn, "--hold") as holder,
    ):
        holder.until("held until", "out")
        with running("acquire", "--name", name, "--dsn", dsn, "--wait", "1h") as waiter:
            _until_connected(dsn, name, 2)
            holder.signal(signal.SIGTERM)
            assert waiter.end() == 0
            assert "acquired" in waiter.out


def test_wait_ends_with_1_when_it_is_over(dsn: str, name: str) -> None:
    with running("acquire", "--name", name, "--dsn", dsn, "--hold") as holder:
        holder.until("held until", "out")
        done = command("acquire", "--name", name, "--dsn", dsn, "--wait", "200ms")
        assert done.code == 1
        assert "not acquired" in done.out


def test_a_signal_while_waiting_exits_128_plus_n_and_leaves_no_waiter(dsn: str, name: str) -> None:
    with running("acquire", "--name", name, "--dsn", dsn, "--hold") as holder:
        holder.until("held until", "out")
        with running("acquire", "--name", name, "--dsn", dsn, "--wait", "1h") as waiter:
            _until_connected(dsn, name, 2)
            waiter.signal(signal.SIGTERM)
            assert waiter.end() == 128 + signal.SIGTERM
        _until_connected(dsn, name, 1)


def _until_connected(dsn: str, name: str, wanted: int) -> None:
    """Polls: nothing announces a change in pg_stat_activity."""
    deadline = time.monotonic() + PATIENCE_S
    while connections_named(dsn, f"pgleaderlock {name} %") != wanted:
        assert time.monotonic() < deadline, f"there are not {wanted} connections"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"port": "1"}, "nothing listens there"),
        ({"host": "no-such-host.invalid"}, "check how the host is spelled"),
        ({"password": "wrong"}, "check user and password"),
        ({"dbname": "no_such_database"}, "check the database's name"),
        ({"sslmode": "require"}, "check sslmode"),
    ],
)
def test_a_database_error_exits_2_at_once_although_there_is_time(
    dsn: str, name: str, change: dict[str, str], words: str
) -> None:
    broken = make_conninfo(dsn, **change)
    done = command("acquire", "--name", name, "--dsn", broken, "--wait", "1h", "--hold")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("error: cannot connect: ")
    assert words in line
    assert str(conninfo_to_dict(dsn)["password"]) not in done.err


def test_a_pooler_is_refused_with_the_option_that_allows_it(dsn: str, name: str, pgbouncer: StartPooler) -> None:
    through = pgbouncer(dsn, "session")
    done = command("acquire", "--name", name, "--dsn", through)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "--allow-pooler" in line
    assert command("acquire", "--name", name, "--dsn", through, "--allow-pooler").code == 0


def test_the_librarys_log_is_shown_on_request(dsn: str, name: str) -> None:
    done = command("acquire", "--name", name, "--dsn", dsn, "--log-level", "info")
    assert done.code == 0
    assert "lock_acquired" in done.err
