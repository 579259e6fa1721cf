"""The settings of an election: what fits is accepted, what does not is refused by name, before anything is opened."""

import asyncio
import inspect
import random
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pgleaderlock import (
    ConfigurationError,
    LeaderElection,
    LeaderLock,
    LockError,
    LockState,
    NotLeader,
    key_pair,
    key_pair_from_bigint,
)
from pgleaderlock._config.durations import SPREAD
from pgleaderlock._config.load import from_environment
from pgleaderlock._config.timing import ROLES_MAX, Timing, gate_of_interval_s, gate_under_lease_s
from pgleaderlock.config import Config
from support.elections import EVERYTHING, timing_of
from support.fakes import captured_log, limit

DSN = "postgresql://app@db.example/app"
ROOT = Path(__file__).resolve().parents[2]


def timing(**settings: Any) -> Timing:
    return timing_of(LeaderElection(DSN, "r", **settings)._setup)


# --- Defaults


def test_the_defaults_are_the_documented_ones() -> None:
    found = timing()
    assert (found.heartbeat_interval_s, found.gate_s, found.lease_s) == (3.0, 6.0, 7.0)
    assert (found.acquire_delay_s, found.standby_wait_s) == ((0.2, 0.8), 0.0)
    defaults = {name: given.default for name, given in inspect.signature(LeaderElection).parameters.items()}
    assert defaults["takeover"] == "safe"
    assert defaults["evict_stale"] is defaults["enabled"] is defaults["candidate"] is True
    assert defaults["heartbeat_thread"] is defaults["standalone"] is defaults["allow_pooler"] is False


@pytest.mark.parametrize(
    ("interval_s", "late_s", "lease_s"), [(0.1, 0.2, 1.2), (3.0, 6.0, 7.0), (5.0, 10.0, 11.0), (30.0, 60.0, 66.0)]
)
def test_g_is_twice_the_interval_and_t_is_g_plus_a_second_or_a_tenth(
    interval_s: float, late_s: float, lease_s: float
) -> None:
    found = timing(heartbeat_interval_s=interval_s)
    assert found.gate_s == pytest.approx(late_s)
    assert found.lease_s == pytest.approx(lease_s)


def test_t_follows_a_g_that_was_given() -> None:
    assert timing(late_threshold_s=20.0).lease_s == pytest.approx(22.0)
    assert timing(late_threshold_s=20.0, session_lease_s=21.0).lease_s == 21.0


# --- Relations and bad values


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"late_threshold_s": 3.0}, "late_threshold_s"),
        ({"late_threshold_s": 3.59}, "late_threshold_s"),
        ({"heartbeat_interval_s": 6.0, "late_threshold_s": 6.0}, "heartbeat_interval_s"),
        ({"session_lease_s": 6.0}, "session_lease_s"),
        ({"session_lease_s": 5.0}, "late_threshold_s"),
        ({"heartbeat_interval_s": 2e6}, "session_lease_s"),
        ({"acquire_delay_s": (0.8, 0.2)}, "acquire_delay_s"),
        ({"acquire_delay_s": (0.0, 0.2)}, "acquire_delay_s"),
        ({"acquire_delay_s": (0.2, 7.0)}, "acquire_delay_s"),
        ({"acquire_delay_s": 0.5}, "acquire_delay_s"),
        ({"acquire_delay_s": (1, 2, 3)}, "acquire_delay_s"),
        ({"acquire_delay_s": ("a", "b")}, "acquire_delay_s"),
        ({"standby_wait_s": -1.0}, "standby_wait_s"),
        ({"takeover": "later"}, "takeover"),
        ({"takeover": None}, "takeover"),
        ({"node_id": ""}, "node_id"),
        ({"node_id": "  "}, "node_id"),
        ({"hard_stop_after_s": 0}, "hard_stop_after_s"),
        ({"hard_stop_after_s": -1.0}, "hard_stop_after_s"),
        ({"listen_channel": ""}, "listen_channel"),
        ({"listen_channel": "x" * 64}, "listen_channel"),
        ({"listen_channel": "a\0b"}, "listen_channel"),
        ({"listen_channel": 5}, "listen_channel"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": 5}, "namespace"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        LeaderElection(DSN, "r", **settings)


@pytest.mark.parametrize("setting", ["heartbeat_interval_s", "late_threshold_s", "session_lease_s", "standby_wait_s"])
@pytest.mark.parametrize("value", [-1, 0.0, float("nan"), float("inf"), "3", True, [3]])
def test_a_duration_is_a_positive_number_of_seconds(setting: str, value: Any) -> None:
    if setting == "standby_wait_s" and value == 0:
        return  # off
    with pytest.raises(ConfigurationError, match=setting):
        LeaderElection(DSN, "r", **{setting: value})


def test_the_gate_never_shuts_between_two_heartbeats_of_an_accepted_setting() -> None:
    """The interval is stretched by up to a fifth; G must be longer than that, and T than G."""
    rng = random.Random(7)
    accepted = 0
    for _ in range(500):
        settings = {
            "heartbeat_interval_s": rng.uniform(0.05, 10),
            "late_threshold_s": rng.uniform(0.05, 20),
            "session_lease_s": rng.uniform(0.05, 20),
        }
        try:
            found = timing(**settings, acquire_delay_s=(0.01, 0.02))
        except ConfigurationError:
            continue
        accepted += 1
        assert found.heartbeat_interval_s * 1.2 < found.gate_s < found.lease_s
    assert accepted > 50


def test_the_longest_lease_that_an_error_names_is_accepted() -> None:
    for make in (partial(LeaderElection, DSN, "r"), partial(LeaderLock.for_name, DSN, "r")):
        with pytest.raises(ConfigurationError, match="too long") as refused:
            make(session_lease_s=3e6)
        (longest_s,) = re.findall(r"at most (\d+)", str(refused.value))
        make(session_lease_s=float(longest_s))


def test_the_relations_on_the_page_are_those_of_the_code() -> None:
    page = " ".join((ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").split())
    assert f"G must be longer than {SPREAD[1]:g} × `refresh_interval`" in page  # noqa: RUF001 - as the page has it
    assert f"With neither, G is {gate_of_interval_s(1.0):g} × `refresh_interval`" in page  # noqa: RUF001
    shown = dict(re.findall(r"\b(late_threshold|lease_duration) (\d+)s (?:follows|pgleaderlock)", page))
    assert float(shown["late_threshold"]) == gate_under_lease_s(float(shown["lease_duration"]))


@pytest.mark.parametrize(
    "settings",
    [
        {"stale_threshold_s": -1.0},
        {"stale_threshold_s": "soon"},
        {"hard_stop_after_s": "soon"},
        {"hard_stop_after_s": float("nan")},
        {"hard_stop_after_s": True},
        {"node_id": 5},
        {"evict_stale": "no"},
        {"enabled": "false"},
        {"standalone": "no"},
        {"candidate": None},
        {"heartbeat_thread": 1},
        {"allow_pooler": "yes"},
        {"standby_wait_s": False},
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        LeaderElection("host=x", "r", **settings)


@pytest.mark.parametrize("roles", [None, 5])
def test_roles_that_are_no_names_are_a_configuration_error(roles: Any) -> None:
    with pytest.raises(ConfigurationError):
        LeaderElection("host=x", roles)


def test_a_dsn_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="DSN"):
        LeaderElection("postgresql://a:p@ss@host/db:x:y", "r")


# --- Roles


def test_a_name_alone_and_several_names_are_both_roles() -> None:
    assert LeaderElection(DSN, "billing").roles == ("billing",)
    assert LeaderElection(DSN, ["billing", "mail"]).roles == ("billing", "mail")
    assert LeaderElection(DSN, (name for name in ("billing", "mail"))).roles == ("billing", "mail")


def test_a_roles_key_is_that_of_the_lock_of_the_same_name() -> None:
    """So that an election, a LeaderLock and a guard of one name exclude each other."""
    assert LeaderElection(DSN, "billing", namespace="shop")._setup.keys == {"billing": key_pair("billing", "shop")}


def test_a_mapping_gives_roles_keys_of_their_own() -> None:
    assert LeaderElection(DSN, {"billing": -42})._setup.keys == {"billing": key_pair_from_bigint(-42)}


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ([], "at least one"),
        ({}, "at least one"),
        (["a", "b", "a"], "'a' is named twice"),
        ({"a": 1, "b": 1}, "'a' and 'b' have the same key"),
        ("", "empty"),
        (["ok", ""], "empty"),
        ([5], "string"),
        ({"a": "x"}, "integer"),
        ({"a": True}, "integer"),
        ({"a": 2**63}, "out of range"),
        ({"": 1}, "empty"),
        ("x" * 513, "513"),
        ("a\0b", "NUL"),
    ],
)
def test_roles_that_cannot_be_told_apart_or_named_are_refused(roles: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        LeaderElection(DSN, roles)


def test_more_roles_than_a_server_can_lock_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"{ROLES_MAX} at most"):
        LeaderElection(DSN, [f"r{number}" for number in range(ROLES_MAX + 1)])
    assert len(LeaderElection(DSN, [f"r{number}" for number in range(ROLES_MAX)]).roles) == ROLES_MAX


def test_waiting_at_the_server_is_for_one_role_only() -> None:
    with pytest.raises(ConfigurationError, match="standby_wait_s"):
        LeaderElection(DSN, ["a", "b"], standby_wait_s=5.0)
    LeaderElection(DSN, "a", standby_wait_s=5.0)


@pytest.mark.parametrize("unknown", ["mail", "", None, 5, ["billing"]])
async def test_an_unknown_role_is_refused_by_name_wherever_it_is_asked_for(unknown: Any) -> None:
    election = LeaderElection(DSN, "billing")

    async def work(token: object) -> None:
        pytest.fail("ran for an unknown role")

    for ask in (election.gate, election.state, election.leader):
        with pytest.raises(ConfigurationError, match="billing"):
            ask(unknown)
    with pytest.raises(ConfigurationError, match="billing"):
        await election.step_down(unknown)
    with pytest.raises(ConfigurationError, match="billing"):
        await election.lead(unknown, work)


async def test_an_election_that_was_not_started_says_so() -> None:
    election = LeaderElection(DSN, "billing")

    async def work(token: object) -> None:
        pytest.fail("ran without an election")

    assert election.state("billing") is LockState.STOPPED
    assert election.leader("billing") is None
    assert not election.gate("billing").is_leader
    await election.shutdown()
    with pytest.raises(LockError, match="not running"):
        await election.lead("billing", work)
    with pytest.raises(LockError, match="not running"):
        await election.step_down("billing")
    with pytest.raises(ConfigurationError, match="async function"):
        await election.lead("billing", "work")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "registration", ["on_acquired", "on_released", "on_lost", "on_state_change", "on_error", "on_stopped"]
)
def test_every_registration_gives_the_function_back_and_refuses_what_is_none(registration: str) -> None:
    election = LeaderElection(DSN, "billing")

    def callback(*args: object) -> None: ...

    assert getattr(election, registration)(callback) is callback
    with pytest.raises(ConfigurationError, match=registration):
        getattr(election, registration)("not a function")


# --- The environment


def test_every_variable_of_the_environment_is_read() -> None:
    election = LeaderElection.from_env("sender", EVERYTHING)
    assert election._setup.dsn == DSN
    assert timing_of(election._setup) == Timing(2.0, 5.0, 6.0, (0.1, 0.3), 0.0)
    assert election._setup.stale_threshold_s == 9.0
    assert election._setup.channel == "msp_leader_change"
    assert election._setup.enabled is True
    assert election._setup.keys == {"sender": key_pair_from_bigint(-(2**63))}


def test_without_variables_the_defaults_hold() -> None:
    election = LeaderElection.from_env(environ={"PG_CONN_STRING": DSN})
    assert election.roles == ("leader",)
    assert election._setup.keys == {"leader": key_pair("leader")}
    assert timing_of(election._setup) == timing()
    assert election._setup.enabled is True
    assert from_environment({}) == {}


@pytest.mark.parametrize(
    ("key", "role"), [("7", "leader-7"), ("007", "leader-7"), (str(-(2**63)), f"leader-{-(2**63)}"), ("", "leader")]
)
def test_a_role_that_is_not_named_has_a_name_of_its_own_for_each_key(key: str, role: str) -> None:
    environ = {**EVERYTHING, "LEADER_LOCK_KEY": key}
    assert LeaderElection.from_env(environ=environ).roles == (role,)
    assert LeaderElection.from_env("leader", environ).roles == ("leader",)


def test_the_process_environment_is_what_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EVERYTHING.items():
        monkeypatch.setenv(name, value)
    assert LeaderElection.from_env()._setup.channel == "msp_leader_change"


def test_a_keyword_wins_over_the_environment() -> None:
    election = LeaderElection.from_env("sender", EVERYTHING, heartbeat_interval_s=1.0, dsn="host=other", node_id="n1")
    setup = election._setup
    assert (setup.heartbeat_interval_s, setup.dsn, setup.node_id) == (1.0, "host=other", "n1")


@pytest.mark.parametrize(
    ("given", "delays_s"), [({"MIN": "300"}, (0.3, 0.8)), ({"MAX": "250"}, (0.2, 0.25)), ({"MIN": "900"}, (0.9, 0.9))]
)
def test_one_half_of_the_backoff_keeps_the_default_of_the_other(
    given: Mapping[str, str], delays_s: tuple[float, float]
) -> None:
    environ = {"PG_CONN_STRING": DSN, **{f"ACQUIRE_BACKOFF_MS_{end}": value for end, value in given.items()}}
    assert LeaderElection.from_env(environ=environ)._setup.acquire_delay_s == delays_s


MILLISECONDS = [name for name in EVERYTHING if "_MS" in name]


@pytest.mark.parametrize("variable", MILLISECONDS)
@pytest.mark.parametrize("value", ["", "0", "-5", "abc", "nan", "inf", "3s", " "])
def test_a_wrong_number_of_milliseconds_is_refused_by_the_variables_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        LeaderElection.from_env(environ={**EVERYTHING, variable: value})


@pytest.mark.parametrize("value", ["abc", "1.5", "0x10", "1e3"])
def test_a_lock_key_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match="LEADER_LOCK_KEY"):
        LeaderElection.from_env(environ={**EVERYTHING, "LEADER_LOCK_KEY": value})


def test_a_lock_key_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="out of range"):
        LeaderElection.from_env(environ={**EVERYTHING, "LEADER_LOCK_KEY": str(2**63)})


@pytest.mark.parametrize(
    ("text", "enabled"),
    [("true", True), ("1", True), ("YES", True), ("on", True), ("false", False), ("0", False), ("No", False)],
)
def test_the_switch_in_the_environment(text: str, enabled: bool) -> None:
    assert LeaderElection.from_env(environ={**EVERYTHING, "MSP_LEADER_ENABLED": text})._setup.enabled is enabled


@pytest.mark.parametrize("text", ["", "maybe", "2"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="MSP_LEADER_ENABLED"):
        LeaderElection.from_env(environ={**EVERYTHING, "MSP_LEADER_ENABLED": text})


@pytest.mark.parametrize(
    ("environ", "dsn"),
    [
        ({"PG_DSN": "host=a"}, "host=a"),
        ({"PG_DSN": "host=a", "PG_CONN_STRING": " "}, "host=a"),
        ({"PG_DSN": "host=a", "PG_CONN_STRING": "host=b"}, "host=b"),
    ],
)
def test_the_environment_names_the_database_as_for_a_config_and_the_commands(environ: dict[str, str], dsn: str) -> None:
    assert LeaderElection.from_env(environ=environ)._setup.dsn == dsn
    assert Config.load(None, environ).dsn == dsn


def test_without_a_database_the_variable_that_names_it_is_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="PG_CONN_STRING nor PG_DSN"):
        LeaderElection.from_env(environ={})
    assert LeaderElection.from_env(environ={"MSP_LEADER_ENABLED": "false"}).roles == ("leader",)
    assert LeaderElection.from_env(environ={}, standalone=True).roles == ("leader",)


# --- The switches: neither needs a database


async def test_a_disabled_election_never_leads_and_says_so() -> None:
    election = LeaderElection("", ["a", "b"], enabled=False)
    stopped: list[str] = []
    election.on_stopped(lambda: stopped.append("stopped"))
    election.on_acquired(stopped.append)
    with captured_log() as records:
        async with limit(), election:
            with pytest.raises(NotLeader) as refused:
                election.gate("a").require_leader()
            assert refused.value.reason == "disabled"
            assert election.state("b") is LockState.STOPPED
            assert election.leader("a") is None
            assert await election.gate("b").wait_open(0.01) is False
    assert stopped == ["stopped"]
    assert any("election_disabled" in record.getMessage() for record in records)


async def test_lead_of_a_disabled_election_ends_with_it_without_running() -> None:
    async def work(token: object) -> object:
        pytest.fail("ran although it is disabled")

    election = LeaderElection("", "a", enabled=False)
    async with limit():
        await election.start()
        leading = asyncio.ensure_future(election.lead("a", work))
        await asyncio.sleep(0)
        await election.shutdown()
        assert await leading is None


async def test_a_standalone_election_leads_without_a_database_and_says_so_loudly() -> None:
    election = LeaderElection("", ["a", "b"], standalone=True, node_id="only")
    heard: list[str] = []
    election.on_acquired(lambda role: heard.append(f"acquired {role}"))
    election.on_released(lambda role: heard.append(f"released {role}"))
    election.on_stopped(lambda: heard.append("stopped"))

    async def work(token: object) -> object:
        return token

    with captured_log() as records:
        async with limit(), election:
            token = await election.lead("a", work)
            assert election.gate("b").require_leader().epoch == 0
            assert token is election.gate("a").require_leader()
            assert election.state("a") is LockState.LEADER
            leader = election.leader("b")
            assert leader is not None
            assert leader.node_id == "only"
    assert not election.gate("a").is_leader
    assert election.state("a") is LockState.STOPPED
    (warning,) = [record for record in records if vars(record)["event"] == "standalone"]
    released = [vars(record) for record in records if vars(record)["event"] == "leadership_released"]
    assert [(line["role"], line["epoch"], line["holder_identity"]) for line in released] == [
        ("a", 0, "only-standalone"),
        ("b", 0, "only-standalone"),
    ]
    assert warning.levelname == "WARNING"
    assert "WITHOUT a database" in warning.getMessage()
    assert sorted(heard[:2]) == ["acquired a", "acquired b"]
    assert heard[-1] == "stopped"


async def test_off_wins_over_standalone() -> None:
    async with limit(), LeaderElection("", "a", standalone=True, enabled=False) as election:
        assert not election.gate("a").is_leader


async def test_a_standalone_leader_can_step_down_and_leads_again() -> None:
    """There is no other node that could."""
    released: list[str] = []
    async with limit(), LeaderElection("", "r", standalone=True) as election:
        election.on_released(released.append)
        assert await election.gate("r").wait_open()
        await election.step_down("r")
        assert await election.gate("r").wait_open()
    assert released[0] == "r"
