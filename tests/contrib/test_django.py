"""The door for Django: `fenced` and `atomic()` in every order, the DSN of an alias, commands, and the view."""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import django
import psycopg
import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError, atomic
from django.db.utils import DataError
from django.test import RequestFactory
from psycopg.conninfo import conninfo_to_dict

from pgleaderlock.contrib.django import dsn, fenced, leader_command, leader_view
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import ConfigurationError, FenceLost, NotFenced, NotLeader, SchemaError, StaleEpoch
from pgleaderlock.models import LeaderToken
from support.elections import PATIENT
from support.fencing import Leader, database, ledger_database

POSTGRES = "django.db.backends.postgresql"
settings.configure(
    ALLOWED_HOSTS=["testserver"],
    DATABASES={
        "default": {"ENGINE": POSTGRES, "NAME": "set by the fixture"},
        "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    },
    INSTALLED_APPS=["pgleaderlock.contrib.django"],
    PGLEADERLOCK={"OPTIONS": PATIENT},
    USE_TZ=True,
)
django.setup()

Order = Callable[[LeaderToken], AbstractContextManager[None]]


@pytest.fixture
def own(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    """A database with a ledger, as the alias `default`."""
    with ledger_database(postgres.dsn) as own:
        with psycopg.connect(own, autocommit=True) as conn:
            conn.execute("CREATE TABLE written (what text PRIMARY KEY)")
        with configured(own):
            yield own


@contextlib.contextmanager
def configured(own: str, **options: object) -> Iterator[None]:
    """What DATABASES would say, for every thread."""
    parts = conninfo_to_dict(own)
    database = connections.databases["default"]
    before = dict(database)
    database.update(
        NAME=parts["dbname"],
        USER=parts["user"],
        PASSWORD=parts["password"],
        HOST=parts["host"],
        PORT=parts["port"],
        OPTIONS={"sslmode": parts["sslmode"], **options},
    )
    _forget()
    try:
        yield
    finally:
        _forget()
        database.clear()
        database.update(before)


def _forget() -> None:
    """The wrapper of this thread; the next one is made of the settings."""
    connections.close_all()
    with contextlib.suppress(AttributeError):
        del connections["default"]


@pytest.fixture
def leader(own: str) -> Iterator[Leader]:
    with Leader(own, "billing") as leading:
        yield leading


def write(what: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO written VALUES (%s)", [what])


def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def written(own: str) -> list[str]:
    with psycopg.connect(own, autocommit=True) as conn:
        return [row[0] for row in conn.execute("SELECT what FROM written ORDER BY what").fetchall()]


# --- The orders of atomic, fenced and savepoints


@contextlib.contextmanager
def fenced_alone(token: LeaderToken) -> Iterator[None]:
    with fenced(token):
        yield


@contextlib.contextmanager
def fenced_in_atomic(token: LeaderToken) -> Iterator[None]:
    with atomic():
        write("outside")
        with fenced(token):
            yield


@contextlib.contextmanager
def atomic_in_fenced(token: LeaderToken) -> Iterator[None]:
    with fenced(token):
        write("outside")
        with atomic():
            yield


@contextlib.contextmanager
def fenced_in_savepoint(token: LeaderToken) -> Iterator[None]:
    with atomic():
        write("outside")
        with atomic(), fenced(token):
            yield


@contextlib.contextmanager
def fenced_in_fenced(token: LeaderToken) -> Iterator[None]:
    with fenced(token):
        write("outside")
        with atomic(), fenced(token):
            yield


ORDERS = [fenced_alone, fenced_in_atomic, atomic_in_fenced, fenced_in_savepoint, fenced_in_fenced]


@pytest.fixture(params=ORDERS, ids=lambda order: order.__name__)
def order(request: pytest.FixtureRequest) -> Order:
    found: Order = request.param
    return found


def test_in_every_order_it_is_committed_at_the_end_of_the_outermost_block(
    own: str, leader: Leader, order: Order
) -> None:
    with order(leader.win()):
        write("inside")
        assert leader.bumped() == ("busy", None)
        assert written(own) == []
    assert "inside" in written(own)
    assert leader.bumped() == ("won", 2)
    assert connection.get_autocommit()


def test_in_every_order_an_exception_commits_nothing(own: str, leader: Leader, order: Order) -> None:
    with pytest.raises(ZeroDivisionError), order(leader.win()):  # noqa: PT012 - the story is the claim
        write("inside")
        raise ZeroDivisionError
    assert written(own) == []
    assert leader.bumped() == ("won", 2)


def test_in_every_order_a_stale_epoch_commits_nothing_and_the_connection_goes_on(
    own: str, leader: Leader, order: Order
) -> None:
    stale = leader.win()
    newer = leader.win()
    with pytest.raises(StaleEpoch, match="is stale") as caught, order(stale):
        pytest.fail("entered")
    assert isinstance(caught.value.__cause__, psycopg.Error)
    assert written(own) == []
    with order(newer):
        write("newer")
    assert "newer" in written(own)


def test_a_refusal_that_is_caught_inside_atomic_rolls_it_back_all_the_same(own: str, leader: Leader) -> None:
    stale = leader.win()
    leader.win()
    with atomic():
        write("before")
        with pytest.raises(StaleEpoch), fenced(stale):
            pytest.fail("entered")
        with pytest.raises(TransactionManagementError):
            write("after")
    assert written(own) == []


def test_an_exception_that_is_caught_inside_atomic_rolls_it_back_all_the_same(own: str, leader: Leader) -> None:
    with atomic():
        with pytest.raises(ZeroDivisionError), fenced(leader.win()):  # noqa: PT012 - the story is the claim
            write("half")
            raise ZeroDivisionError
        with pytest.raises(TransactionManagementError):
            write("after")
    assert written(own) == []


def test_a_savepoint_inside_the_block_may_fail_and_the_rest_stays_fenced(own: str, leader: Leader) -> None:
    with fenced(leader.win()):
        write("rest")
        with pytest.raises(ZeroDivisionError), atomic():  # noqa: PT012 - the story is the claim
            write("given up")
            raise ZeroDivisionError
        assert leader.bumped() == ("busy", None)
    assert written(own) == ["rest"]


def test_a_savepoint_around_the_block_limits_what_is_rolled_back(own: str, leader: Leader) -> None:
    stale = leader.win()
    leader.win()
    with atomic():
        write("before")
        with pytest.raises(StaleEpoch), atomic(), fenced(stale):
            pytest.fail("entered")
        write("after")
    assert written(own) == ["after", "before"]


def test_without_autocommit_the_caller_commits(own: str, leader: Leader) -> None:
    token = leader.win()
    transaction.set_autocommit(False)
    try:
        write("before")
        with fenced(token):
            write("inside")
        assert leader.bumped() == ("busy", None)
        assert written(own) == []
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert written(own) == ["before", "inside"]


# --- The end of the fence


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"])
@pytest.mark.parametrize("order", [fenced_alone, fenced_in_atomic], ids=lambda order: order.__name__)
def test_a_transaction_that_ends_inside_the_block_is_an_error(leader: Leader, order: Order, ending: str) -> None:
    with pytest.raises(FenceLost), order(leader.win()):
        execute(ending)
    connection.close()


def test_a_rollback_to_a_savepoint_older_than_the_fence_is_an_error_and_commits_nothing(
    own: str, leader: Leader
) -> None:
    with atomic():
        older = transaction.savepoint()
        with pytest.raises(FenceLost), fenced(leader.win()):  # noqa: PT012 - the story is the claim
            write("undone")
            transaction.savepoint_rollback(older)
            write("fenced by nothing")
    assert written(own) == []


def test_djangos_commit_is_refused_inside_the_block(leader: Leader) -> None:
    with fenced(leader.win()), pytest.raises(TransactionManagementError):
        transaction.commit()


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_above_read_committed_a_transaction_of_an_older_snapshot_is_refused(
    own: str, leader: Leader, level: str
) -> None:
    with configured(own, isolation_level=psycopg.IsolationLevel[level]):
        stale = leader.win()

        def overtaken() -> None:
            with atomic():
                execute("SELECT 1")  # takes the snapshot
                leader.win()
                with fenced(stale):
                    write("stale")

        with pytest.raises(StaleEpoch):
            overtaken()
        with fenced(leader.win()):
            write("current")
    assert written(own) == ["current"]


# --- Words for what the database refuses


def test_errors_of_your_own_statements_are_djangos(leader: Leader) -> None:
    with pytest.raises(DataError), fenced(leader.win()):
        execute("SELECT 1/0")


def test_a_fenced_table_that_refuses_inside_the_block_is_not_fenced(own: str, leader: Leader) -> None:
    with psycopg.connect(own, autocommit=True) as conn:
        conn.execute("SELECT pgleaderlock.fence_table('written', 'mail')")
    with pytest.raises(NotFenced) as caught, fenced(leader.win()):
        write("for another role")
    assert isinstance(caught.value.__cause__, django.db.DatabaseError)
    assert written(own) == []


def test_a_database_that_has_never_seen_the_role_or_has_no_ledger_says_so(own: str, postgres: EmbeddedPostgres) -> None:
    with pytest.raises(NotLeader), fenced(LeaderToken("nobody", 1, "nobody", "pgleaderlock")):
        pytest.fail("entered")
    with (
        database(postgres.dsn) as empty,
        configured(empty),
        pytest.raises(SchemaError, match="pgleaderlock migrate"),
        fenced(LeaderToken("nobody", 1, "nobody", "pgleaderlock")),
    ):
        pytest.fail("entered")


def test_another_database_than_postgresql_is_refused() -> None:
    for ask in (lambda: dsn("other"), lambda: fenced(LeaderToken("a", 1, "", ""), "other").__enter__()):
        with pytest.raises(ConfigurationError, match="is sqlite: an election needs PostgreSQL"):
            ask()


# --- The DSN of an alias


def test_the_dsn_of_an_alias_connects_where_django_connects(own: str) -> None:
    with psycopg.connect(dsn("default")) as conn:
        assert conn.info.dbname == connection.settings_dict["NAME"]
    assert conninfo_to_dict(dsn()) == conninfo_to_dict(own)


def test_options_that_libpq_does_not_know_stay_django_s(own: str) -> None:
    with configured(own, pool=True, server_side_binding=True, prepare_threshold=5, connect_timeout=7):
        found = conninfo_to_dict(dsn())
    assert found["connect_timeout"] == "7"
    assert not {"pool", "server_side_binding", "prepare_threshold", "context", "cursor_factory"} & set(found)


def test_the_role_that_django_assumes_is_the_one_of_the_election(own: str) -> None:
    with psycopg.connect(own, autocommit=True) as conn:
        conn.execute('CREATE ROLE "the app"')
    try:
        with configured(own, assume_role="the app", options="-c work_mem=1MB"), psycopg.connect(dsn()) as conn:
            assert conn.execute("SELECT current_user, current_setting('work_mem')").fetchone() == ("the app", "1MB")
    finally:
        with psycopg.connect(own, autocommit=True) as conn:
            conn.execute('DROP ROLE "the app"')


def test_a_misspelt_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "PGLEADERLOCK", {"WORK": {}})
    with pytest.raises(ConfigurationError, match="no key 'WORK': it has OPTIONS, USING, WORKS"):
        dsn()


# --- Commands


class Report(BaseCommand):
    """Runs while this process leads, as it would in `management/commands/report.py`."""

    @leader_command("report", timeout_s=30.0)
    def handle(self, *args: Any, token: LeaderToken, **options: Any) -> None:
        with fenced(token):
            write(f"epoch {token.epoch}")


class Hasty(BaseCommand):
    @leader_command("report", timeout_s=0.05)
    def handle(self, *args: Any, **options: Any) -> None:
        pytest.fail("two lead")


def test_a_leader_command_runs_with_the_token_of_a_term_of_its_own(own: str) -> None:
    for _ in range(2):
        call_command(Report())
    assert written(own) == ["epoch 1", "epoch 2"]


def test_a_leader_command_that_does_not_get_its_turn_ends_with_75(own: str) -> None:
    with Leader(own, "report", node="the-other-one") as other:
        other.win()
        with pytest.raises(CommandError) as caught:
            call_command(Hasty())
    assert caught.value.returncode == 75


@pytest.mark.parametrize(("roles", "named"), [([], "any role"), (["mail"], "mail")])
def test_run_leader_names_the_role_that_has_no_work(own: str, roles: list[str], named: str) -> None:
    with pytest.raises(CommandError, match=f"does not name a work for {named}"):
        call_command("run_leader", *roles)


# --- The view


def asked(**query: str) -> tuple[int, dict[str, Any]]:
    answer = leader_view(RequestFactory().get("/leader", query))
    assert answer["Cache-Control"] == "no-store"
    return answer.status_code, json.loads(answer.content)


def test_the_view_tells_who_leads_by_the_ledger(own: str, leader: Leader) -> None:
    assert asked() == (400, {"error": "which role? ask for ?role=NAME"})
    assert asked(role="billing") == (404, {"error": "no process has led that role yet"})
    leader.win()
    status, body = asked(role="billing")
    assert (status, body["state"], body["epoch"], body["node_id"]) == (200, "acting", 1, "node")
    leader.conn.execute("UPDATE pgleaderlock.sessions SET last_heartbeat = last_heartbeat - interval '1 hour'")
    status, body = asked(role="billing")
    assert (status, body["state"]) == (503, "nobody")


def test_the_view_without_a_ledger_is_503(postgres: EmbeddedPostgres, nothing_left: None) -> None:
    with database(postgres.dsn) as empty, configured(empty):
        assert asked(role="billing") == (503, {"error": "the ledger cannot be read"})
