"""A fenced table: a forgotten fence is an error and not a hole, whatever the statement and wherever the row goes."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgleaderlock._pg import statements
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import NotFenced, StaleEpoch
from pgleaderlock.fence import fenced, meaning
from support.fencing import Leader, ledger_database, plain_role

Conn = psycopg.Connection[Any]

WRITES = {
    "insert": "INSERT INTO orders VALUES (1, 'x')",
    "insert nothing": "INSERT INTO orders SELECT 1, 'x' WHERE false",
    "upsert": "INSERT INTO orders VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET what = 'y'",
    "update": "UPDATE orders SET what = 'y'",
    "delete": "DELETE FROM orders",
    "truncate": "TRUNCATE orders",
    "copy": "COPY orders FROM STDIN",
    "data in a CTE": "WITH gone AS (DELETE FROM orders RETURNING *) SELECT count(*) FROM gone",
    "through a view": "INSERT INTO orders_view VALUES (1, 'x')",
    "by a function": "SELECT write_order()",
    "by a cascade": "DELETE FROM customers",
    "merge": (
        "MERGE INTO orders o USING (SELECT 1 AS id) s ON o.id = s.id"
        " WHEN MATCHED THEN UPDATE SET what = 'z' WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'z')"
    ),
}


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    with ledger_database(postgres.dsn) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("""
                CREATE TABLE customers (id integer PRIMARY KEY);
                INSERT INTO customers VALUES (1), (2);
                CREATE TABLE orders (
                    id integer PRIMARY KEY, what text, customer integer REFERENCES customers ON DELETE CASCADE);
                INSERT INTO orders VALUES (7, 'first', 1);
                CREATE VIEW orders_view AS SELECT id, what FROM orders;
                CREATE FUNCTION write_order() RETURNS void LANGUAGE sql AS $$INSERT INTO orders VALUES (1, 'x')$$;
                CREATE TABLE log (at date, what text) PARTITION BY RANGE (at);
                CREATE TABLE log_2025 PARTITION OF log FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')
                    PARTITION BY RANGE (at);
                CREATE TABLE log_2025_a PARTITION OF log_2025 FOR VALUES FROM ('2025-01-01') TO ('2025-07-01');
                CREATE TABLE log_2026 PARTITION OF log FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
            """)
        yield dsn


@pytest.fixture
def leader(ledger: str) -> Iterator[Leader]:
    with Leader(ledger, "scheduler") as leading:
        yield leading


@pytest.fixture
def conn(ledger: str) -> Iterator[Conn]:
    with psycopg.connect(ledger, autocommit=True) as connection:
        yield connection


def fence_table(conn: Conn, table: str, role: str = "scheduler", *rest: str) -> int:
    marks = ", ".join(["%s"] * (2 + len(rest)))
    row = conn.execute(f"SELECT pgleaderlock.fence_table({marks})".encode(), (table, role, *rest)).fetchone()
    assert row is not None
    return int(row[0])


def unfence_table(conn: Conn, table: str, role: str = "scheduler") -> int:
    row = conn.execute("SELECT pgleaderlock.unfence_table(%s, %s)", (table, role)).fetchone()
    assert row is not None
    return int(row[0])


def run(conn: Conn, sql: str) -> None:
    if sql.startswith("COPY"):
        with conn.cursor().copy(sql.encode()) as copy:
            copy.write_row((1, "x", None))
    else:
        conn.execute(sql.encode())


def refused(conn: Conn, sql: str, sqlstate: str = "PGL04") -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        run(conn, sql)
    assert caught.value.sqlstate == sqlstate, caught.value
    return caught.value


def content(conn: Conn, table: str) -> list[tuple[Any, ...]]:
    return conn.execute(f"TABLE {table}".encode()).fetchall()


@pytest.mark.parametrize("kind", WRITES)
def test_every_kind_of_write_needs_a_fence_and_works_with_one(conn: Conn, leader: Leader, kind: str) -> None:
    if kind == "merge" and conn.info.server_version < 150000:
        pytest.skip("needs PostgreSQL 15 or later, for MERGE: run `make test`")
    token = leader.win()
    assert fence_table(conn, "orders") == 1
    before = content(conn, "orders")
    error = refused(conn, WRITES[kind])
    assert isinstance(meaning(error), NotFenced)
    assert "a write to public.orders must be fenced for role scheduler" in str(error)
    assert content(conn, "orders") == before
    with fenced(conn, token):
        run(conn, WRITES[kind])


def test_reading_needs_no_fence(conn: Conn, leader: Leader) -> None:
    fence_table(conn, "orders")
    assert content(conn, "orders") == [(7, "first", 1)]
    conn.execute("SELECT * FROM orders FOR UPDATE")


def test_a_stale_leader_is_refused_by_its_fence_and_an_unfenced_one_by_the_table(conn: Conn, leader: Leader) -> None:
    token = leader.win()
    fence_table(conn, "orders")
    leader.win()
    with pytest.raises(StaleEpoch), fenced(conn, token):
        pass
    refused(conn, WRITES["insert"])
    assert content(conn, "orders") == [(7, "first", 1)]


def test_a_fence_for_another_role_or_namespace_does_not_count(ledger: str, conn: Conn, leader: Leader) -> None:
    leader.win()
    fence_table(conn, "orders")
    with Leader(ledger, "other") as other, Leader(ledger, "scheduler", namespace="shop") as shop:
        for token in (other.win(), shop.win()):
            with pytest.raises(psycopg.Error, match="must be fenced for role scheduler"), fenced(conn, token):
                run(conn, WRITES["insert"])


def test_a_fence_of_the_transaction_before_does_not_count(conn: Conn, leader: Leader) -> None:
    token = leader.win()
    fence_table(conn, "orders")
    with fenced(conn, token):
        pass
    refused(conn, WRITES["insert"])


def test_before_anybody_has_led_every_write_is_refused(conn: Conn, leader: Leader) -> None:
    fence_table(conn, "orders")
    refused(conn, WRITES["insert"])


# --- What the transaction says about itself is not believed


def _setting(leader: Leader) -> str:
    key = leader.one("SELECT to_hex(pgleaderlock.fence_key(%s, %s))", "pgleaderlock", leader.role)
    return f"pgleaderlock.fenced_{key}"


def test_a_forged_setting_with_a_stale_epoch_is_refused(conn: Conn, leader: Leader) -> None:
    leader.win()
    leader.win()
    fence_table(conn, "orders")
    for forged, sqlstate in (("1", "PGL02"), ("3", "PGL02"), ("x", "PGL04"), ("", "PGL04"), ("9" * 30, "PGL04")):
        conn.execute("SELECT set_config(%s, %s, false)", (_setting(leader), forged))
        refused(conn, WRITES["insert"], sqlstate)
    assert content(conn, "orders") == [(7, "first", 1)]


def test_a_forged_setting_with_the_current_epoch_takes_the_real_fence(conn: Conn, leader: Leader) -> None:
    token = leader.win()
    fence_table(conn, "orders")
    conn.execute("SELECT set_config(%s, %s, false)", (_setting(leader), str(token.epoch)))
    with conn.transaction():
        run(conn, WRITES["insert"])
        assert leader.bumped() == ("busy", None)
    assert leader.bumped() == ("won", 2)
    refused(conn, WRITES["update"], "PGL02")


def test_after_a_rollback_to_an_older_savepoint_a_write_is_refused(conn: Conn, leader: Leader) -> None:
    token = leader.win()
    fence_table(conn, "orders")
    with pytest.raises(psycopg.Error) as caught, conn.transaction():  # noqa: PT012 - the story is the claim
        conn.execute("SAVEPOINT older")
        with fenced(conn, token):
            conn.execute("ROLLBACK TO older")
            run(conn, WRITES["insert"])
    assert caught.value.sqlstate == "PGL04"


def test_a_write_in_a_savepoint_below_the_fence_is_fenced(conn: Conn, leader: Leader) -> None:
    token = leader.win()
    fence_table(conn, "orders")
    with fenced(conn, token):
        with conn.transaction():
            run(conn, WRITES["insert"])
            raise psycopg.Rollback
        run(conn, WRITES["insert"])
    assert len(content(conn, "orders")) == 2


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel)[1:], ids=lambda level: level.name)
def test_the_trigger_holds_at_every_isolation_level(conn: Conn, leader: Leader, level: Any) -> None:
    token = leader.win()
    fence_table(conn, "orders")
    conn.isolation_level = level
    with fenced(conn, token):
        leader.settle()  # another change of the role's row, which is none of the fence's business
        run(conn, WRITES["insert"])
    conn.execute("SELECT set_config(%s, %s, false)", (_setting(leader), str(token.epoch)))
    with pytest.raises(psycopg.Error) as caught, conn.transaction():  # noqa: PT012 - the story is the claim
        conn.execute("SELECT 1")  # the snapshot is older than the bump
        leader.win()
        run(conn, WRITES["update"])
    assert caught.value.sqlstate in ("PGL02", "40001")
    assert ("y",) not in conn.execute("SELECT what FROM orders").fetchall()


# --- Partitions


def test_each_partition_is_fenced_for_itself(conn: Conn, leader: Leader) -> None:
    token = leader.win()
    assert fence_table(conn, "log") == 4
    for table in ("log", "log_2025", "log_2025_a"):
        for write in (
            "INSERT INTO {} VALUES ('2025-02-03')",
            "UPDATE {} SET what = 'x'",
            "DELETE FROM {}",
            "TRUNCATE {}",
        ):
            refused(conn, write.format(table))
            with fenced(conn, token):
                run(conn, write.format(table))


def test_a_partition_that_was_added_later_is_fenced_through_the_parent_and_itself_after_another_call(
    conn: Conn, leader: Leader
) -> None:
    leader.win()
    fence_table(conn, "log")
    conn.execute("CREATE TABLE log_2027 PARTITION OF log FOR VALUES FROM ('2027-01-01') TO ('2028-01-01')")
    refused(conn, "INSERT INTO log VALUES ('2027-02-03')")
    run(conn, "INSERT INTO log_2027 VALUES ('2027-02-03')")  # the documented gap
    assert fence_table(conn, "log") == 5
    refused(conn, "INSERT INTO log_2027 VALUES ('2027-02-03')")


def test_children_by_inheritance_are_fenced_too(conn: Conn, leader: Leader) -> None:
    leader.win()
    conn.execute("CREATE TABLE late_orders () INHERITS (orders)")
    assert fence_table(conn, "orders") == 2
    refused(conn, "INSERT INTO late_orders VALUES (1, 'x')")


def test_calling_it_again_leaves_no_moment_without_a_fence_and_blocks_no_reader(ledger: str, conn: Conn) -> None:
    fence_table(conn, "orders")
    with psycopg.connect(ledger) as again, conn.transaction():
        content(conn, "orders")  # holds its lock on the table until the end of the transaction
        again.execute("SET lock_timeout = '10s'")
        assert fence_table(again, "orders") == 1
        again.commit()
        refused(again, WRITES["insert"])


def test_a_trigger_that_was_disabled_is_enabled_by_another_call(conn: Conn) -> None:
    fence_table(conn, "orders")
    conn.execute("ALTER TABLE orders DISABLE TRIGGER USER")
    run(conn, WRITES["insert"])
    fence_table(conn, "orders")
    refused(conn, WRITES["update"])


# --- Taking it off, names, rights


def test_unfence_takes_it_off_everywhere_and_says_from_how_many(conn: Conn) -> None:
    fence_table(conn, "log")
    conn.execute("CREATE TABLE log_2027 PARTITION OF log FOR VALUES FROM ('2027-01-01') TO ('2028-01-01')")
    assert unfence_table(conn, "log") == 4
    run(conn, "INSERT INTO log_2025_a VALUES ('2025-02-03')")
    run(conn, "INSERT INTO log VALUES ('2026-02-03')")
    assert unfence_table(conn, "log") == 0


def test_two_roles_on_one_table_must_both_fence(ledger: str, conn: Conn, leader: Leader) -> None:
    with Leader(ledger, "other") as second:
        one, two = leader.win(), second.win()
        fence_table(conn, "orders")
        fence_table(conn, "orders", "other")
        for token in (one, two):
            with pytest.raises(psycopg.Error, match="must be fenced"), fenced(conn, token):
                run(conn, WRITES["insert"])
        with fenced(conn, one), fenced(conn, two):
            run(conn, WRITES["insert"])
        assert unfence_table(conn, "orders", "other") == 1
        with fenced(conn, one):
            run(conn, WRITES["update"])
        refused(conn, WRITES["update"])


@pytest.mark.parametrize("role", ["it's", 'say "x"', "back\\slash", "per%cent", "ünï", "a\nb", "x" * 500, "$1"])
def test_a_role_may_have_any_name(ledger: str, conn: Conn, role: str) -> None:
    fence_table(conn, "orders", role)
    with Leader(ledger, role) as leader:
        token = leader.win()
        refused(conn, WRITES["insert"])
        with fenced(conn, token):
            run(conn, WRITES["insert"])
    assert unfence_table(conn, "orders", role) == 1


def test_tables_of_other_schemas_and_with_quoted_names(conn: Conn, leader: Leader) -> None:
    leader.win()
    conn.execute('CREATE SCHEMA "Odd ""schema"""')
    conn.execute('CREATE TABLE "Odd ""schema"""."Or""ders%s" (id integer)')
    name = '"Odd ""schema"""."Or""ders%s"'
    assert fence_table(conn, name) == 1
    with pytest.raises(psycopg.Error, match="must be fenced"):
        conn.execute(f"INSERT INTO {name} VALUES (1)".encode())
    assert unfence_table(conn, name) == 1


def test_a_name_is_looked_up_where_the_caller_looks(conn: Conn) -> None:
    conn.execute("CREATE SCHEMA aside; CREATE TABLE aside.orders (id integer); SET search_path = aside, public")
    fence_table(conn, "orders")
    refused(conn, "INSERT INTO aside.orders VALUES (1)")
    run(conn, "INSERT INTO public.orders VALUES (1, 'x')")


def test_a_role_of_another_namespace_is_fenced_by_its_third_argument(ledger: str, conn: Conn) -> None:
    fence_table(conn, "orders", "scheduler", "shop")
    with Leader(ledger, "scheduler") as here, Leader(ledger, "scheduler", namespace="shop") as shop:
        with pytest.raises(psycopg.Error, match="must be fenced"), fenced(conn, here.win()):
            run(conn, WRITES["insert"])
        with fenced(conn, shop.win()):
            run(conn, WRITES["insert"])


@pytest.mark.parametrize("what", ["orders_view", "orders_pkey"])
def test_what_is_no_table_is_an_error_and_not_nothing(conn: Conn, what: str) -> None:
    with pytest.raises(psycopg.errors.WrongObjectType, match="is not a table"):
        fence_table(conn, what)


def test_a_table_that_does_not_exist_is_an_error(conn: Conn) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        fence_table(conn, "nothing")


def test_only_the_owner_of_a_table_can_fence_it_and_its_writers_need_no_rights_to_the_ledger(
    ledger: str, conn: Conn, leader: Leader
) -> None:
    with plain_role(ledger) as owner, plain_role(ledger) as writer:
        owner_name, writer_name = (str(psycopg.conninfo.conninfo_to_dict(dsn)["user"]) for dsn in (owner, writer))
        grants = statements.statement("grants_table_owner").decode().replace("{role}", f'"{owner_name}"')
        conn.execute(grants.encode())
        conn.execute(f'CREATE TABLE own (id integer); ALTER TABLE own OWNER TO "{owner_name}"'.encode())
        with psycopg.connect(owner, autocommit=True) as as_owner, psycopg.connect(writer, autocommit=True) as as_writer:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                fence_table(as_owner, "orders")
            assert fence_table(as_owner, "own") == 1
            as_owner.execute(f'GRANT INSERT ON own TO "{writer_name}"'.encode())
            leader.win()
            refused(as_writer, "INSERT INTO own VALUES (1)")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                fence_table(as_writer, "own")
