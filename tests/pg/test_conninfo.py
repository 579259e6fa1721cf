"""DSNs: completed with our settings, refused where they break a promise, and never a secret of theirs in any text."""

import asyncio
import traceback
from collections.abc import Callable, Iterator
from logging import Formatter

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgleaderlock import ConfigurationError, FixedInterval, LeaderLock
from pgleaderlock._pg.connect import resolved
from pgleaderlock._pg.conninfo import (
    ConnectionSettings,
    Dsn,
    check_dsn,
    connect_params,
    default_application_name,
    resolve,
    scrub,
)
from pgleaderlock._pg.explain import connect_error, safe_cause
from support.fakes import KEYS, FakeClock, Recorder, captured_log, limit

SETTINGS = ConnectionSettings(application_name="me", statement_timeout_s=5, lease_s=15)
SECRET = "hunter2secret"


@pytest.fixture(autouse=True)
def _no_libpq_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGOPTIONS", "PGAPPNAME", "PGCONNECT_TIMEOUT", "PGPASSWORD"):
        monkeypatch.delenv(name, raising=False)


def _options(params: dict[str, str]) -> dict[str, str]:
    words = params["options"].replace("\\ ", "_").split()
    assert words[::2] == ["-c"] * (len(words) // 2)
    return dict(word.split("=", 1) for word in words[1::2])


# --- What is added


def test_a_session_is_opened_with_the_settings_that_keep_the_promises() -> None:
    params = connect_params("host=h", SETTINGS)
    assert (params["host"], params["application_name"], params["connect_timeout"]) == ("h", "me", "10")
    assert params["keepalives"] == "1"
    assert 0 < int(params["tcp_user_timeout"]) < 15_000
    assert _options(params) == {
        "idle_session_timeout": "0",
        "default_transaction_isolation": "read_committed",
        "default_transaction_read_only": "off",
        "client_min_messages": "warning",
        "search_path": "pg_catalog",
        "statement_timeout": "5000",
        "lock_timeout": "5000",
        "idle_in_transaction_session_timeout": "15000",
        "client_connection_check_interval": "1000",
        "tcp_keepalives_idle": "5",
        "tcp_keepalives_interval": "2",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": "10000",
    }


def test_what_the_user_writes_wins() -> None:
    dsn = "host=h application_name=mine connect_timeout=3 keepalives_idle=7 options='-c statement_timeout=1234'"
    params = connect_params(dsn, SETTINGS)
    assert (params["application_name"], params["connect_timeout"], params["keepalives_idle"]) == ("mine", "3", "7")
    assert _options(params)["statement_timeout"] == "1234"  # the last one counts for the server


def test_what_our_logic_depends_on_wins_over_what_people_set_for_their_own_statements() -> None:
    theirs = "-c search_path=app -c client_min_messages=error"
    params = connect_params(f"host=h client_encoding=LATIN1 options='{theirs}'", SETTINGS)
    assert params["client_encoding"] == "UTF8"
    assert theirs in params["options"]
    assert (_options(params)["search_path"], _options(params)["client_min_messages"]) == ("pg_catalog", "warning")


def test_variables_of_libpq_win_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGAPPNAME", "from the environment")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "4")
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=1MB")
    params = connect_params("host=h", SETTINGS)
    assert (params["application_name"], params["connect_timeout"]) == ("from the environment", "4")
    assert _options(params)["work_mem"] == "1MB"


def test_behind_an_allowed_pooler_no_startup_option_is_sent() -> None:
    settings = ConnectionSettings("me", statement_timeout_s=5, lease_s=15, allow_pooler=True)
    assert "options" not in connect_params("host=h", settings)
    assert connect_params("host=h options='-c work_mem=1MB'", settings)["options"] == "-c work_mem=1MB"


@pytest.mark.parametrize(
    ("dsn", "attrs"),
    [
        ("host=a,b", "primary"),
        ("postgresql://a,b/d", "primary"),
        ("hostaddr=10.0.0.1,10.0.0.2", "primary"),
        ("host=a,b target_session_attrs=read-write", "read-write"),
        ("host=a", None),
    ],
)
def test_several_hosts_mean_the_primary_among_them(dsn: str, attrs: str | None) -> None:
    assert connect_params(dsn, SETTINGS).get("target_session_attrs") == attrs


def test_an_application_name_is_what_postgresql_can_keep() -> None:
    name = default_application_name("größe\n" + "x" * 100)
    assert name.startswith("pgleaderlock gr??e?xxx")
    assert len(name.encode()) == 63


# --- What is refused


def test_options_that_end_in_the_middle_of_an_escape_are_refused() -> None:
    """Ours come behind them, and the first one would be swallowed."""
    with pytest.raises(ConfigurationError, match="backslash"):
        check_dsn(r"host=h options='-c work_mem=1MB\\'")
    check_dsn(r"host=h options='-c search_path=a\\ b'")


@pytest.mark.parametrize(
    "dsn",
    [
        "host",
        "host=h port",
        "postgresql://h:5432:5432/d?x",
        "mysql://h/d",
        "nosuchoption=1",
        "host=h password='open",
        "postgresql://u%zz@h/d",
    ],
)
def test_a_dsn_that_cannot_be_parsed_is_refused_with_an_example(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="postgresql://user:password@host"):
        LeaderLock(dsn, 1, 2)


@pytest.mark.parametrize(
    ("dsn", "named"),
    [
        ("host=h target_session_attrs=standby", "target_session_attrs"),
        ("host=h target_session_attrs=prefer-standby", "target_session_attrs"),
        ("postgresql://a,b/d?target_session_attrs=read-only", "target_session_attrs"),
        ("host=h replication=database", "replication"),
        ("host=h replication=true", "replication"),
        ("host=h options='-c idle_session_timeout=5000'", "idle_session_timeout=5000"),
        ("host=h options=-cidle_session_timeout=1", "idle_session_timeout=1"),
        ("host=h options=--idle-session-timeout=1", "idle_session_timeout=1"),
        ("host=h options='-c IDLE_SESSION_TIMEOUT=1'", "idle_session_timeout=1"),
        ("host=h options='-c default_transaction_isolation=serializable'", "default_transaction_isolation"),
        ("host=h options='-c work_mem=1MB -c default_transaction_read_only=on'", "default_transaction_read_only=on"),
    ],
)
def test_a_dsn_that_breaks_a_promise_is_refused_and_says_which_part(dsn: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        LeaderLock(dsn, 1, 2)


def test_a_variable_of_libpq_that_breaks_a_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c idle_session_timeout=7")
    with pytest.raises(ConfigurationError, match="idle_session_timeout=7"):
        LeaderLock("host=h", 1, 2)


@pytest.mark.parametrize(
    "dsn", ["", "host=h", "postgresql://", "postgres://u:p%40ss@h:1/d?sslmode=disable", " host=h "]
)
def test_a_dsn_that_libpq_takes_is_taken(dsn: str) -> None:
    check_dsn(dsn)
    assert "options" in connect_params(dsn, SETTINGS)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql+asyncpg", "postgres+psycopg2"])
def test_a_url_of_sqlalchemys_is_told_what_to_leave_out(scheme: str) -> None:
    with pytest.raises(ConfigurationError, match=r"URL of SQLAlchemy.*write postgresql://") as refused:
        check_dsn(f"{scheme}://app:{SECRET}@db/app")
    assert SECRET not in str(refused.value)


# --- A callable


async def test_a_callable_dsn_may_be_sync_or_async() -> None:
    async def later() -> str:
        return "host=async"

    assert await resolve(lambda: "host=sync") == "host=sync"
    assert await resolve(later) == "host=async"
    assert await resolve("host=plain") == "host=plain"


async def test_a_callable_dsn_is_asked_before_every_connect(dsn: str) -> None:
    asked: list[int] = []

    def fresh() -> str:
        asked.append(1)
        return dsn

    lock = LeaderLock(fresh, 30_011, 1)
    assert asked == []
    for times in (1, 2):
        async with limit(), lock:
            assert await lock.wait_for_leadership()
        assert len(asked) == times


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_cancellation_from_a_callable_is_an_error_and_it_is_asked_again(dsn: str, is_async: bool) -> None:
    asked: list[int] = []

    def fresh() -> str:
        asked.append(1)
        if len(asked) == 1:
            raise asyncio.CancelledError
        return dsn

    async def later() -> str:
        return fresh()

    lock = LeaderLock(later if is_async else fresh, 30_011, 3, retry_strategy=FixedInterval(0.01))
    recorder = Recorder(lock)
    async with limit(), lock:
        assert await lock.lead(_done) == "done"
        await recorder.seen("on_error")
    assert "the DSN callable failed with CancelledError" in str(recorder.errors[0])


async def _done() -> str:
    return "done"


async def test_the_cancellation_of_the_caller_is_not_taken_for_the_callables() -> None:
    asked = asyncio.Event()

    async def never() -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    connecting = asyncio.create_task(resolved(never))
    async with limit():
        await asked.wait()
        connecting.cancel()
        await asyncio.wait([connecting])
    assert connecting.cancelled()


async def test_a_callable_that_returns_no_text_is_reported_and_asked_again(dsn: str) -> None:
    answers = iter([5, dsn])

    async def fresh() -> str:
        return next(answers)  # type: ignore[return-value]

    clock = FakeClock()
    lock = LeaderLock(fresh, 30_011, 2)
    lock._clock = clock
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
        assert "must return a string" in str(recorder.errors[0])
        await clock.somebody_sleeps()
        clock.advance(5)
        async with limit():
            assert await lock.wait_for_leadership()


# --- Secrets


def _texts(error: BaseException) -> Iterator[str]:
    """Everything that a traceback, a log or a person may see of an error, along its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield str(seen)
        yield repr(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    yield "".join(traceback.format_exception(error))


ODD = [
    f"postgresql://u:p@{SECRET}@h/d",
    f"postgresql://u:{SECRET}@ss@h/d",
    f"host=h password=se {SECRET}",
    f"host=h password='{SECRET}",
    f"host=h password={SECRET}' x",
    f"postgresql://u:{SECRET}%zz@h/d",
    f"postgres//u:{SECRET}@h/d",
    f"u:{SECRET}@h/d",
    f"postgresql://u:{SECRET}@h/d?{SECRET}",
    f"postgresql://u:{SECRET}@h/d?nosuch={SECRET}",
    f"postgresql://u:{SECRET}@[h/d",
    f"host=h password={SECRET} options='-c idle_session_timeout=1'",
    f"host=h password={SECRET} target_session_attrs=standby",
]


@pytest.mark.parametrize("dsn", ODD)
def test_a_refused_dsn_shows_no_secret(dsn: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LeaderLock(dsn, 1, 2)
    assert SECRET not in "\n".join(_texts(caught.value))


def _wrong_password(dsn: str) -> Dsn:
    return make_conninfo(dsn, password=SECRET)


def _refused_port(dsn: str) -> Dsn:
    return make_conninfo(dsn, password=SECRET, port="1")


def _unknown_host(dsn: str) -> Dsn:
    return make_conninfo(dsn, password=SECRET, host="nosuch.invalid")


def _unknown_database(dsn: str) -> Dsn:
    return make_conninfo(dsn, dbname="nosuch")


def _bad_port(dsn: str) -> Dsn:
    return make_conninfo(dsn, password=SECRET, port="0x")


def _bad_certificate(dsn: str) -> Dsn:
    return make_conninfo(dsn, password=SECRET, sslmode="require", sslcert="/nosuch", sslpassword=SECRET)


def _malformed_from_a_callable(dsn: str) -> Dsn:
    return lambda: f"host=h password='{SECRET}"


def _slash_in_password_from_a_callable(dsn: str) -> Dsn:
    return lambda: f"postgresql://u:pa/{SECRET}@h/d"


@pytest.mark.parametrize(
    "make",
    [
        _wrong_password,
        _refused_port,
        _unknown_host,
        _unknown_database,
        _bad_port,
        _bad_certificate,
        _malformed_from_a_callable,
        _slash_in_password_from_a_callable,
    ],
)
async def test_a_connect_that_fails_shows_no_secret(dsn: str, make: Callable[[str], Dsn]) -> None:
    lock = LeaderLock(make(dsn), 30_011, 3)
    lock._clock = FakeClock()
    recorder = Recorder(lock)
    secrets = [SECRET, next(part for part in dsn.split() if part.startswith("password=")).removeprefix("password=")]
    with captured_log() as records:
        async with lock:
            await recorder.seen("on_error")
    shown = [text for error in (*recorder.errors, lock.last_error) if error for text in _texts(error)]
    shown += [Formatter().format(record) + repr(vars(record)) for record in records]
    assert any("database_error" in text for text in shown)
    for secret in secrets:
        assert secret not in "\n".join(shown)


async def test_a_wrong_password_says_what_is_wrong(dsn: str) -> None:
    lock = LeaderLock(_wrong_password(dsn), 30_011, 4)
    lock._clock = FakeClock()
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
    assert "password authentication failed" in str(lock.last_error)


@pytest.mark.parametrize("key", ["password", "sslpassword", "oauth_client_secret"])
def test_a_secret_is_blanked_wherever_it_stands(key: str) -> None:
    text = f'could not use "{SECRET}"\n\tnor x{SECRET}y'
    assert scrub(text, {key: SECRET, "user": "use"}) == 'could not use "***" nor x***y'


def test_the_repr_of_a_lock_shows_no_dsn() -> None:
    assert SECRET not in repr(LeaderLock(f"host=h password={SECRET}", 1, 2))


async def test_a_hanging_resolver_of_the_dsn_can_be_interrupted() -> None:
    begun = asyncio.Event()

    async def hang() -> str:
        begun.set()
        await asyncio.get_running_loop().create_future()
        return ""

    lock = LeaderLock(hang, 1, 2)
    await lock.start()
    async with limit():
        await begun.wait()
        await lock.shutdown()


def test_a_secret_in_the_servers_answer_is_not_passed_on() -> None:
    params = {"password": SECRET}
    error = psycopg.OperationalError(f'FATAL:  the password "{SECRET}"\n is too old')
    assert str(connect_error(error, params)) == 'cannot connect: FATAL: the password "***" is too old'
    assert safe_cause(error, params) is None
    harmless = psycopg.OperationalError("connection refused\n")
    assert safe_cause(harmless, params) is harmless


async def test_a_callable_dsn_that_raises_shows_no_secret() -> None:
    """Its text goes into ConnectionError, the cause and the log as it is."""

    def vault() -> str:
        raise RuntimeError(f"no lease for postgresql://u:{SECRET}@h/d")

    lock = LeaderLock(vault, *KEYS)
    lock._clock = FakeClock()
    recorder = Recorder(lock)
    with captured_log() as records:
        async with lock:
            await recorder.seen("on_error")
    shown = "".join(traceback.format_exception(recorder.errors[0])) + "".join(r.getMessage() for r in records)
    assert SECRET not in shown


async def test_a_callable_dsn_that_returns_none_is_told_so() -> None:
    lock = LeaderLock(lambda: None, *KEYS)  # type: ignore[arg-type]
    lock._clock = FakeClock()
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
    assert "must return a string" in str(recorder.errors[0])


def test_a_dsn_with_a_slash_in_its_password_is_refused() -> None:
    """libpq takes the user for the host and the rest of the password for the database."""
    with pytest.raises(ConfigurationError):
        check_dsn(f"postgresql://u:pa/{SECRET}@h/d")


def test_a_dsn_that_is_no_utf_8_is_refused_and_shows_no_secret() -> None:
    """As it comes from an environment variable with other bytes in it; the repr of the error is the whole DSN."""
    with pytest.raises(ConfigurationError) as caught:
        check_dsn(f"host=h\udcff password={SECRET}")
    assert SECRET not in repr(caught.value)


def test_a_dsn_with_a_nul_is_refused() -> None:
    """libpq ends there: what follows, the password for one, is ignored without a word."""
    with pytest.raises(ConfigurationError):
        check_dsn("host=h\0 dbname=production")


def test_an_error_is_told_without_secrets_and_without_the_advice_of_libpq() -> None:
    said = "failed for s3cret: Connection refused\n\tIs the server running on that host\n\tand port?\nDETAIL:  x"
    assert scrub(said, {"password": "s3cret"}) == "failed for ***: Connection refused DETAIL: x"
    gone = "server closed the connection\n\tThis probably means the server terminated\n\tbefore the request."
    assert scrub(gone, {}) == "server closed the connection"
