"""`LeaderElection.from_config`: what the file says is what the election does, and a keyword wins over it."""

import asyncio
import secrets
from pathlib import Path

import pytest

from pgleaderlock import ConfigurationError, LeaderElection, key_pair
from pgleaderlock._config.timing import Timing
from pgleaderlock._pg.conninfo import resolve
from pgleaderlock.config import Config, ConfigFileError
from pgleaderlock.keys import key_pair_from_bigint
from support.elections import PATIENT, bounded, ledger_dsns, opens, timing_of

FILE = """\
[cluster.leader_election]
dsn = "host=file.example dbname=app"
refresh_interval = "2s"
lease_duration = "20s"
check_interval = ["100ms", "300ms"]
node_id = "from-the-file"
namespace = "shop"
listen_channel = false
balance = true
retention = "7d"

[roles.mail]
[roles.invoices]
key = 42
[roles.reports]
key = 43
enabled = false
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither this machine's environment nor its folders choose anything."""
    for name in ("PG_CONN_STRING", "PG_DSN", "PGLEADERLOCK_CONFIG", "PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.parametrize("given", ["path", "text", "loaded", "found"])
def test_an_election_of_a_file_has_its_roles_and_settings(
    file: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given == "found":
        monkeypatch.setenv("PGLEADERLOCK_CONFIG", str(file))
    ways: dict[str, Config | str | Path | None]
    ways = {"path": file, "text": str(file), "loaded": Config.load(file), "found": None}
    setup = LeaderElection.from_config(ways[given])._setup
    assert setup.keys == {"mail": key_pair("mail", "shop"), "invoices": key_pair_from_bigint(42)}
    assert timing_of(setup) == Timing(2.0, 18.0, 20.0, (0.1, 0.3), 0.0)
    assert (setup.dsn, setup.node_id, setup.namespace) == ("host=file.example dbname=app", "from-the-file", "shop")
    assert (setup.listen_channel, setup.balance, setup.retention_s) == (None, True, 7 * 86400.0)


def test_a_keyword_wins_over_the_file_and_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTBEAT_INTERVAL_MS", "1500")
    setup = LeaderElection.from_config(
        file, dsn="host=mine", node_id="me", heartbeat_interval_s=1.0, listen_channel="talk", balance=False
    )._setup
    assert (setup.dsn, setup.node_id, setup.listen_channel, setup.balance) == ("host=mine", "me", "talk", False)
    assert timing_of(setup) == Timing(1.0, 18.0, 20.0, (0.1, 0.3), 0.0)


def test_what_follows_follows_from_what_wins(file: Path) -> None:
    """Keys from the namespace; G from T, as in the file."""
    setup = LeaderElection.from_config(file, namespace="other", session_lease_s=30.0)._setup
    assert setup.keys == {"mail": key_pair("mail", "other"), "invoices": key_pair_from_bigint(42)}
    assert (setup.gate_s, setup.lease_s) == (27.0, 30.0)
    both = LeaderElection.from_config(file, late_threshold_s=5.0, session_lease_s=30.0)._setup
    assert (both.gate_s, both.lease_s) == (5.0, 30.0)


def test_a_role_that_is_named_has_the_key_of_the_file_also_if_it_is_off_there(file: Path) -> None:
    """With another key it would lead beside the nodes that have this one."""
    setup = LeaderElection.from_config(file, roles=["reports", "new"])._setup
    assert setup.keys == {"reports": key_pair_from_bigint(43), "new": key_pair("new", "shop")}
    assert LeaderElection.from_config(file, roles="mail")._setup.keys == {"mail": key_pair("mail", "shop")}
    assert LeaderElection.from_config(file, roles={"mail": 7})._setup.keys == {"mail": key_pair_from_bigint(7)}
    with pytest.raises(ConfigurationError, match="named twice"):
        LeaderElection.from_config(file, roles=["reports", "reports"])


def test_the_lock_timeout_of_the_file_holds_for_a_dsn_of_ones_own(file: Path) -> None:
    file.write_text(FILE.replace('node_id = "from-the-file"', 'lock_timeout = "500ms"'), encoding="utf-8")
    assert LeaderElection.from_config(file, dsn="host=mine")._setup.dsn == "host=mine options='-c lock_timeout=500'"
    asked = LeaderElection.from_config(file, dsn=lambda: "host=mine")._setup.dsn
    assert asyncio.run(resolve(asked)) == "host=mine options='-c lock_timeout=500'"


def test_without_a_role_or_a_database_it_says_where_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"\[roles\.NAME\]"):
        LeaderElection.from_config(dsn="host=mine")
    with pytest.raises(ConfigurationError, match=r"PG_CONN_STRING"):
        LeaderElection.from_config(roles="mail")
    assert LeaderElection.from_config(roles="mail", standalone=True).roles == ("mail",)
    monkeypatch.setenv("PGHOST", "db.example")
    assert LeaderElection.from_config(roles="mail")._setup.dsn == ""


def test_every_mistake_of_the_file_is_told(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[cluster.leader_election]\nrefresh_interval = 3\nbalanced = true\n", encoding="utf-8")
    with pytest.raises(ConfigFileError) as refused:
        LeaderElection.from_config(wrong)
    assert [problem.line for problem in refused.value.problems] == [2, 3]


@pytest.fixture
def node_dsn(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


async def test_it_leads_every_role_of_the_file(node_dsn: str, file: Path) -> None:
    async with LeaderElection.from_config(file, dsn=node_dsn, balance=False) as election:
        for role in ("mail", "invoices"):
            await bounded(opens(election, role))
        assert election.leader("mail") is not None


async def test_two_scopes_by_key_in_one_database_lead_side_by_side(node_dsn: str) -> None:
    keys = [secrets.randbits(62), -secrets.randbits(62) - 1]
    environments = [{"PG_CONN_STRING": node_dsn, "LEADER_LOCK_KEY": str(key)} for key in keys]
    first = LeaderElection.from_env(environ=environments[0], **PATIENT)
    second = LeaderElection.from_config(Config.load(environ=environments[1]), **PATIENT)
    async with first, second:
        for election in (first, second):
            await bounded(opens(election, *election.roles))


def test_the_environments_key_is_that_of_the_role_which_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `from_env`: nodes that are told in either way exclude each other."""
    monkeypatch.setenv("LEADER_LOCK_KEY", "77")
    assert LeaderElection.from_config(dsn="host=mine", roles="mail")._setup.keys == {"mail": key_pair_from_bigint(77)}
    with pytest.raises(ConfigFileError, match="the key is one role's"):
        LeaderElection.from_config(dsn="host=mine", roles=["mail", "sms"])


def test_one_role_of_several_may_be_waited_for_at_the_server(file: Path) -> None:
    with pytest.raises(ConfigFileError, match="one role only"):
        Config.load(file, flags={"standby_wait": 5.0, "balance": False})
    assert Config.load(file, flags={"standby_wait": 5.0, "balance": False}, roles=["mail"])["standby_wait"] == 5.0
    with pytest.raises(ConfigFileError, match="cannot be combined"):
        Config.load(file, flags={"standby_wait": 5.0}, roles=["mail"])
