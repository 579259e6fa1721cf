"""`run` and `exec` with a configuration: which roles, which settings, and what wins. Real programs on a real server."""

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pgleaderlock import key_pair
from pgleaderlock.keys import key_pair_from_bigint
from support.elections import admin, ledger_dsns, one
from support.program import command, running
from support.server_side import holders

NOWHERE = "host=127.0.0.1 port=1"
# T is ten minutes: whoever has to wait for it does not open within a test.
ELECTION = """[cluster.leader_election]
dsn = "{dsn}"
refresh_interval = "100ms"
late_threshold = "500s"
lease_duration = "600s"
node_id = "from-the-file"
"""

Writer = Callable[..., str]


@pytest.fixture
def plain(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
def written(tmp_path: Path) -> Writer:
    """Writes a file with these roles; gives its path."""

    def write(dsn: str, *roles: str, more: str = "", also: str = "") -> str:
        path = tmp_path / "node.toml"
        path.touch(mode=0o600)  # there is a password in it
        sections = "".join(f'[roles."{role}"]\n' for role in roles)
        path.write_text(f"{ELECTION.format(dsn=dsn)}{more}{sections}{also}", encoding="utf-8")
        return str(path)

    return write


def leaders(superuser: str, roles: tuple[str, ...]) -> dict[str, str]:
    """Who leads which of them now."""
    query = "SELECT role, node_id FROM pgleaderlock.terms WHERE role = ANY(%s) AND ended_at IS NULL"
    with admin(superuser) as conn:
        return {row["role"]: row["node_id"] for row in conn.execute(query, (list(roles),)).fetchall()}


# --- Which roles


def test_run_without_a_name_leads_every_role_of_the_file_and_sigterm_drains_them_all(
    plain: str, superuser: str, role: str, written: Writer
) -> None:
    roles = (f"{role}-a", f"{role}-b", f"{role}-c")
    file = written(plain, *roles)
    with running("run", "--fenced", "--config", file) as first:
        first.until("gate_open", times=3)
        with running("run", "--fenced", "--config", file, "--node-id", "second") as second:
            second.until("gate_shut reason=never_led", times=3)
            assert leaders(superuser, roles) == dict.fromkeys(roles, "from-the-file")
            first.signal(signal.SIGTERM)
            assert first.end() == 0
            second.until("gate_open", times=3)
            assert leaders(superuser, roles) == dict.fromkeys(roles, "second")
            second.signal(signal.SIGTERM)
            assert second.end() == 0
    assert "run_started roles=3" in first.err
    for name in roles:
        said = re.findall(rf"\b(on_\w+|gate_open)(?: epoch=1)?(?: holder=\S+)? lock={name}\b", first.err)
        assert sorted(said) == ["gate_open", "on_acquired", "on_released"], name
    assert first.err.count("on_stopped") == 1
    with admin(superuser) as conn:
        kinds = conn.execute(
            "SELECT kind FROM pgleaderlock.events WHERE role = %s AND node_id = 'from-the-file' ORDER BY event_id",
            (roles[0],),
        ).fetchall()
    assert [row["kind"] for row in kinds if "drain" in row["kind"]] == ["drain_began", "drain_ended"]


def test_several_names_are_several_roles_on_one_session(plain: str, superuser: str, role: str, written: Writer) -> None:
    names = (f"{role}-a", f"{role}-b")
    file = written(plain, f"{role}-not", *names)
    with running("run", "--fenced", "--config", file, "--name", names[0], "--name", names[1]) as node:
        node.until("gate_open", times=2)
        sessions = "SELECT DISTINCT session_id FROM pgleaderlock.leaders WHERE role = ANY(%s) AND NOT ended"
        with admin(superuser) as conn:
            assert len(conn.execute(sessions, (list(names),)).fetchall()) == 1
        node.signal(signal.SIGTERM)
        assert node.end() == 0
    assert f"{role}-not" not in node.err


def test_a_role_that_is_named_keeps_the_key_of_the_file(plain: str, role: str, written: Writer) -> None:
    file = written(plain, also=f'[roles."{role}"]\nkey = 4711\nenabled = false\n')
    with running("run", "--fenced", "--config", file, "--name", role) as node:
        node.until("gate_open")
        assert len(holders(plain, key_pair_from_bigint(4711))) == 1
        assert holders(plain, key_pair(role)) == []
        node.signal(signal.SIGTERM)
        assert node.end() == 0


def test_exec_takes_the_only_role_of_the_file(plain: str, superuser: str, role: str, written: Writer) -> None:
    say = "echo $PGLEADERLOCK_ROLE $PGLEADERLOCK_EPOCH $PGLEADERLOCK_KEY1"
    done = command("exec", "--fenced", "--config", written(plain, role), "--", "sh", "-c", say)
    assert (done.code, done.out, done.err) == (0, f"{role} 1 {key_pair(role)[0]}\n", "")
    term = one(superuser, "SELECT node_id, reason FROM pgleaderlock.terms WHERE role = %s", role)
    assert term == {"node_id": "from-the-file", "reason": "released"}


def test_exec_of_several_roles_asks_which(plain: str, role: str, written: Writer) -> None:
    file = written(plain, f"{role}-a", f"{role}-b")
    done = command("exec", "--fenced", "--config", file, "--", "echo", "ran")
    assert (done.code, done.out) == (2, "")
    assert f"--name: {role}-a, {role}-b" in done.err
    assert command("exec", "--fenced", "--config", file, "--name", f"{role}-b", "--", "echo", "ran").out == "ran\n"


def test_a_node_that_is_switched_off_runs_nothing_and_says_so(role: str, written: Writer) -> None:
    file = written(NOWHERE, role, more="enabled = false\n")
    done = command("exec", "--fenced", "--config", file, "--", "echo", "ran")
    assert (done.code, done.out) == (75, "")
    assert "enabled = false" in done.err


# --- What wins


@dataclass(frozen=True)
class Told:
    """In which ways the database and the node's name are told, beside the file."""

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    in_file: str = NOWHERE
    node: str = "from-the-file"


@pytest.mark.parametrize(
    "told",
    [
        Told(("--dsn", "{plain}", "--node-id", "flag"), {"PG_CONN_STRING": NOWHERE}, node="flag"),
        Told(env={"PG_CONN_STRING": "{plain}", "PG_DSN": NOWHERE}),
        Told(env={"PG_DSN": "{plain}"}),
        Told(env={"PGLEADERLOCK_CONFIG": "{file}"}, in_file="{plain}"),
    ],
)
def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    plain: str, superuser: str, role: str, written: Writer, told: Told
) -> None:
    file = written(told.in_file.format(plain=plain), role)
    args = [arg.format(plain=plain) for arg in told.args]
    env = {name: value.format(plain=plain, file=file) for name, value in told.env.items()}
    named = [] if "PGLEADERLOCK_CONFIG" in env else ["--config", file]
    done = command("exec", "--fenced", *named, *args, "--", "true", env=env)
    assert done.code == 0, done.err
    assert one(superuser, "SELECT node_id FROM pgleaderlock.terms WHERE role = %s", role) == {"node_id": told.node}


def test_the_lease_of_the_file_stands_and_without_one_the_grace_is_added(
    plain: str, superuser: str, role: str, written: Writer
) -> None:
    file = Path(written(plain, role))
    lease = "SELECT wait_t AS t FROM pgleaderlock.leaders WHERE role = %s"
    grace = ("exec", "--fenced", "--config", str(file), "--grace", "60s", "--", "true")
    assert command(*grace).code == 0
    assert one(superuser, lease, role)["t"] == 600.0
    file.write_text(file.read_text().replace('lease_duration = "600s"\n', ""), encoding="utf-8")
    assert command(*grace).code == 0
    assert one(superuser, lease, role)["t"] == 610.0


# --- What is wrong


@pytest.mark.parametrize("args", [("run",), ("exec",)])
@pytest.mark.parametrize("fenced", [("--fenced",), ()])
def test_a_file_with_mistakes_exits_2_with_each_of_them(
    tmp_path: Path, args: tuple[str, ...], fenced: tuple[str, ...]
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[cluster.leader_election]\nrefresh_interval = 3\nbalanced = true\n[roles.a]\n", encoding="utf-8")
    tail = ("--", "echo", "ran") if args[0] == "exec" else ()
    done = command(*args, *fenced, "--name", "a", "--config", str(file), *tail)
    assert (done.code, done.out) == (2, "")
    assert [line.split(": ")[1] for line in done.err.splitlines()] == [f"{file} line 2", f"{file} line 3"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "--fenced", "--dsn", NOWHERE), "which role? Give --name NAME, or a configuration"),
        (("run", "--fenced", "--name", "a"), "no database given"),
        (("run", "--name", "a", "--name", "b", "--dsn", NOWHERE), "several --name need --fenced"),
        (("run", "--fenced", "--name", "a", "--name", "a", "--dsn", NOWHERE), "named twice"),
        (("run", "--name", "a", "--node-id", "n", "--dsn", NOWHERE), "--node-id belongs to --fenced"),
        (("run", "--name", "a", "--balance", "--dsn", NOWHERE), "--balance belongs to --fenced"),
        (("run", "--name", "a", "--no-balance", "--dsn", NOWHERE), "--balance belongs to --fenced"),
        (("run", "--fenced", "--name", "a", "--balance", "--standby-wait", "5s", "--dsn", NOWHERE), "--standby-wait"),
        (("run", "--name", "a", "--config", "/nowhere/at/all.toml"), "/nowhere/at/all.toml: cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(args: tuple[str, ...], said: str) -> None:
    done = command(*args)
    assert done.code == 2
    assert said in done.err


# --- Without --fenced


def test_a_plain_lock_takes_the_dsn_alone_and_says_what_it_leaves(plain: str, role: str, written: Writer) -> None:
    file = written(plain, role)
    done = command("exec", "--name", role, "--config", file, "--", "echo", "ran")
    assert (done.code, done.out) == (0, "ran\n")
    unread = "refresh_interval, late_threshold, lease_duration, node_id, [roles]"
    assert done.err == f"warning: {file}: without --fenced only its dsn is used, and not {unread}\n"


def test_a_plain_lock_with_a_database_looks_for_no_file(
    plain: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pgleaderlock.toml").write_text("this is no TOML", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = command("exec", "--name", role, "--dsn", plain, "--", "echo", "ran")
    assert (done.code, done.out, done.err) == (0, "ran\n", "")
    assert command("exec", "--name", role, "--", "echo", "ran").code == 2
