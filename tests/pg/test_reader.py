"""Named statements outside the dedicated session: given up in time, without a secret, and the connection with them."""

import asyncio
from collections.abc import Generator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgleaderlock._base.steps import Steps, run, run_blocking
from pgleaderlock._pg.conninfo import plain_params
from pgleaderlock._pg.explain import Unreachable, hopeless
from pgleaderlock._pg.reader import Inexpressible, PlainConnection, ReadPool, Unanswered
from pgleaderlock.errors import ConnectionError
from support.proxy import Proxy


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGOPTIONS", "PGAPPNAME", "PGCONNECT_TIMEOUT", "PGHOST", "PGTARGETSESSIONATTRS"):
        monkeypatch.delenv(name, raising=False)


def test_a_plain_connection_gets_no_option_of_ours_and_the_users_word_counts() -> None:
    params = plain_params("host=h application_name=mine options='-c work_mem=1MB'", "pgleaderlock test")
    assert (params["application_name"], params["options"]) == ("mine", "-c work_mem=1MB")
    assert plain_params("host=h", "pgleaderlock test")["application_name"] == "pgleaderlock test"
    assert "options" not in plain_params("host=h", "pgleaderlock test")


def test_options_of_a_reader_win_over_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain_params("options='-c jit=on'", "x", options="-c jit=off")["options"] == "-c jit=on -c jit=off"
    monkeypatch.setenv("PGOPTIONS", "-c jit=on")
    assert plain_params("host=h", "x", options="-c jit=off")["options"] == "-c jit=on -c jit=off"


@pytest.mark.parametrize("dsn", ["host=a,b", "hostaddr=10.0.0.1,10.0.0.2", ""])
def test_of_several_hosts_a_plain_connection_looks_for_the_primary(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "a,b")
    assert plain_params(dsn, "x")["target_session_attrs"] == "primary"
    assert plain_params("host=a", "x").get("target_session_attrs") is None


async def test_a_question_whose_caller_is_cancelled_ends_with_its_connection(dsn: str, proxy: Proxy) -> None:
    async with await PlainConnection.open(proxy.dsn_for(dsn), "reader test") as plain:
        proxy.cut()
        asking = asyncio.create_task(plain.rows("doctor_round_trip"))
        await asyncio.sleep(0)  # it has begun
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert plain.closed
        assert not [task for task in asyncio.all_tasks() if "execute" in repr(task.get_coro())]
    proxy.heal()


async def test_a_pool_asks_a_new_connection_when_the_kept_one_has_ended(dsn: str) -> None:
    pool = ReadPool(make_conninfo(dsn, application_name="reader pool"))
    try:
        assert await pool.rows("doctor_round_trip") == [{"alive": 1}]
        with psycopg.connect(dsn, autocommit=True) as admin:
            ended = admin.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'reader pool'"
            )
            assert ended.fetchall() == [(True,)]
        assert await pool.rows("doctor_round_trip") == [{"alive": 1}]
    finally:
        await pool.close()
    with pytest.raises(ConnectionError):
        await ReadPool(make_conninfo(dsn, dbname="no such database")).rows("doctor_round_trip")


async def test_a_pool_that_got_no_answer_refuses_the_next_connect_at_once(
    dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgleaderlock._pg.reader.POOL_REFUSED_FOR_S", 600.0)
    pool = ReadPool(proxy.dsn_for(dsn))
    try:
        await pool.rows("doctor_round_trip")
        ((_, kept),) = pool._idle
        kept.answer_timeout_s = 0.1
        proxy.cut()
        with pytest.raises(Unanswered):
            await pool.rows("doctor_round_trip")
        proxy.heal()
        with pytest.raises(Unanswered):  # although it would be answered now
            await pool.rows("doctor_round_trip")
    finally:
        proxy.heal()
        await pool.close()


async def test_what_cannot_be_expressed_is_no_failure_of_the_connection(dsn: str) -> None:
    async with await PlainConnection.open(dsn, "reader test") as plain:
        with pytest.raises(Inexpressible):
            await plain.rows("guard_check", classid="x", objid="\0", backend_pid=1, server_start="")
        assert await plain.rows("doctor_round_trip") == [{"alive": 1}]


async def test_a_failed_connect_says_what_to_do_without_the_password(dsn: str) -> None:
    with pytest.raises(Unreachable) as failed:
        await PlainConnection.open(make_conninfo(dsn, password="not-the-secret"), "reader test")
    assert failed.value.kind == "password"
    assert "PGPASSWORD" in str(failed.value)
    assert "not-the-secret" not in str(failed.value)
    assert hopeless(failed.value)


@pytest.mark.parametrize("kind", ["connection refused", "the database system is starting up", "never seen before"])
def test_what_may_mend_itself_is_not_hopeless(kind: str) -> None:
    assert not hopeless(ConnectionError(f"cannot connect: {kind}"))


# --- Code for both kinds of callers


class Calls:
    """A driver, async or blocking, that answers or raises."""

    def __init__(self, *, blocking: bool) -> None:
        self.blocking = blocking

    def call(self, answer: Any) -> Any:
        if self.blocking:
            return self._answered(answer)

        async def later() -> Any:
            await asyncio.sleep(0)
            return self._answered(answer)

        return later()

    def _answered(self, answer: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_step_gets_its_answer_or_its_error_where_it_was_yielded(blocking: bool) -> None:
    calls = Calls(blocking=blocking)

    def steps() -> Steps[list[Any]]:
        found = [(yield calls.call(1))]
        try:
            yield calls.call(psycopg.OperationalError("lost"))
        except psycopg.Error as error:
            found.append(str(error))
        return [*found, (yield calls.call(2))]

    assert (run_blocking(steps()) if blocking else await run(steps())) == [1, "lost", 2]


async def test_a_cancellation_is_raised_where_the_step_waits_and_what_follows_is_awaited() -> None:
    happened: list[str] = []
    waiting = asyncio.Event()

    async def for_ever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def closed() -> None:
        happened.append("closed")

    def steps() -> Generator[Any, Any, None]:
        try:
            yield for_ever()
        except asyncio.CancelledError:
            yield closed()
            raise

    running = asyncio.create_task(run(steps()))
    await waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert happened == ["closed"]
