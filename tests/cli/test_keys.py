"""`pgleaderlock keys`: the pair of a name, and a query that finds its holder and nobody else."""

import contextlib
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgleaderlock import key_pair
from pgleaderlock.keys import NAME_BYTES_MAX
from pgleaderlock.sync import acquire_leadership
from support.program import command

WIDTH = 60


@pytest.fixture
def name() -> str:
    """A lock that no other test knows."""
    return f"keys-{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def led(dsn: str, name: str, namespace: str = "pgleaderlock") -> Iterator[int]:
    """Somebody leads; gives the backend's pid."""
    with (
        psycopg.connect(dsn, autocommit=True, application_name="the holder") as conn,
        acquire_leadership(conn, name, namespace=namespace),
    ):
        yield conn.info.backend_pid


def queries(*args: str) -> list[str]:
    done = command("keys", "--json", *args)
    assert (done.code, done.err) == (0, "")
    return [lock["query"] for lock in json.loads(done.out)["locks"]]


def found(dsn: str, sql: str) -> list[list[int]]:
    """The pids that each statement of a pasted text finds, run as psql would run it: as one text."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        cursor = conn.execute(sql.encode())
        results = [[row[0] for row in cursor.fetchall()]]
        while cursor.nextset():
            results.append([row[0] for row in cursor.fetchall()])
    return results


def test_the_printed_query_finds_exactly_the_session_that_holds_the_name(dsn: str, name: str) -> None:
    # Many names, so that keys with and without the highest bit are among them.
    names = [f"{name}-{number}" for number in range(20)]
    for one, query in zip(names, queries(*names), strict=True):
        with led(dsn, one) as pid, led(dsn, f"{one}-other"):
            assert found(dsn, query) == [[pid]]
        assert found(dsn, query) == [[]]


def test_a_holder_in_another_namespace_key_space_or_database_is_not_found(dsn: str, name: str) -> None:
    (query,) = queries(name)
    (elsewhere,) = queries(name, "--namespace", "shop")
    key1, key2 = key_pair(name)
    with (
        psycopg.connect(dsn, autocommit=True) as bigint,
        psycopg.connect(dsn, autocommit=True, dbname="template1") as db,
    ):
        bigint.execute("SELECT pg_advisory_lock((%s::bigint << 32) | %s)", (key1, key2 & 0xFFFFFFFF))
        db.execute("SELECT pg_advisory_lock(%s, %s)", (key1, key2))
        with led(dsn, name, "shop") as pid:
            assert found(dsn, query) == [[]]
            assert found(dsn, elsewhere) == [[pid]]


def test_everything_that_is_printed_may_be_pasted_whatever_the_name(dsn: str, name: str) -> None:
    nasty = f"{name}\n'; SELECT 1; --"
    done = command("keys", name, nasty, f"{name} nobody")
    with led(dsn, name) as first, led(dsn, nasty) as second:
        assert found(dsn, done.out) == [[first], [second], []]


@pytest.mark.parametrize("columns", ["60", "200"])
def test_the_table_has_one_line_for_each_name_and_fits_60_columns(columns: str) -> None:
    done = command("keys", "billing", "nightly", env={"COLUMNS": columns})
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    for one in ("billing", "nightly"):
        assert ["--", *map(str, key_pair(one)), one] in [line.split() for line in lines]
    assert max(map(len, lines)) <= WIDTH
    assert not [line for line in lines if line != line.rstrip()]
    assert "\x1b" not in done.out


def test_json_is_one_object_with_both_forms_of_the_keys() -> None:
    done = command("keys", "billing", "--namespace", "shop", "--json")
    (lock,) = json.loads(done.out)["locks"]
    key1, key2 = key_pair("billing", "shop")
    assert (lock["name"], lock["namespace"], lock["key1"], lock["key2"]) == ("billing", "shop", key1, key2)
    assert (lock["classid"], lock["objid"]) == (key1 % 2**32, key2 % 2**32)
    assert f"l.classid::bigint = {lock['classid']}\n" in lock["query"]
    assert f"l.objid::bigint = {lock['objid']}\n" in lock["query"]


def test_no_database_is_needed_and_none_is_asked() -> None:
    # Port 1 answers nobody.
    assert command("keys", "billing", env={"PG_DSN": "host=127.0.0.1 port=1"}).code == 0


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "Missing argument 'NAME...'"),
        ([""], "name must not be empty"),
        (
            ["x" * (NAME_BYTES_MAX + 1)],
            f"name is {NAME_BYTES_MAX + 1} bytes long; at most {NAME_BYTES_MAX} are allowed",
        ),
        (["\u00e4" * NAME_BYTES_MAX], f"name is {2 * NAME_BYTES_MAX} bytes long"),
        (["billing", ""], "name must not be empty (NAME 2 of 2)"),
        (["--namespace", "", "billing"], "namespace must not be empty"),
        (["--namespace", "x" * (NAME_BYTES_MAX + 1), "billing"], "namespace is 513 bytes long"),
        (["\udcff"], "name must be encodable as UTF-8"),
    ],
)
def test_a_bad_name_exits_2_with_one_line_that_says_why_and_prints_no_keys(args: list[str], complaint: str) -> None:
    done = command("keys", *args)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_the_page_names_every_option_and_shows_what_is_really_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = page.split("\n## keys\n")[1].split("\n## ")[0]
    options = set(re.findall(r"--[a-z]+", command("keys", "--help").out)) - {"--help"}
    assert {option for option in options if f"`{option}`" not in section} == set()
    shown = section.split("```")[3].strip("\n").removesuffix("\n...")
    assert command("keys", "billing").out.startswith(shown)
