"""`pgleaderlock.toml`: what is right loads as it stands, what is wrong is told with its line and its remedy."""

import dataclasses
import inspect
import json
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import psycopg
import pytest

from pgleaderlock import LeaderElection, key_pair
from pgleaderlock._config.load import from_environment
from pgleaderlock._config.schema import ALERT, ELECTION, ROLE
from pgleaderlock._config.timing import Timing
from pgleaderlock._config.toml import FILE_BYTES_MAX, FileUnreadable, Place, read_toml, scan_lines
from pgleaderlock._pg.conninfo import connect_params
from pgleaderlock.config import (
    AlertRule,
    Config,
    ConfigFileError,
    format_duration,
    json_schema,
    parse_duration_s,
)
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import key_pair_from_bigint
from support.elections import EVERYTHING, timing_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pgleaderlock.toml"
SECRET = "s3cret-and-long"

# The fifth design's two snippets, as they stand in it.
SEED_ALERTS = """\
# forge.toml

[[alerts]]
name = "no_scheduler_leader"
condition = "sum(forge_leader_is_leader{role='scheduler'}) == 0"
for = "30s"
severity = "critical"
notify = ["pagerduty"]

[[alerts]]
name = "frequent_failovers"
condition = "rate(forge_leader_failovers_total[5m]) > 5"
severity = "warning"
notify = ["slack:#ops"]
"""
SEED_ELECTION = """\
# forge.toml

[cluster.leader_election]
# How often standbys check leader health
check_interval = "5s"

# Lease duration (leader must refresh before expiry)
lease_duration = "60s"

# Lease refresh interval
refresh_interval = "30s"

# Timeout for acquiring lock
lock_timeout = "10s"
"""
E = "[cluster.leader_election]\n"


@pytest.fixture
def written(tmp_path: Path) -> "Writer":
    return Writer(tmp_path / "pgleaderlock.toml")


class Writer:
    """Writes a file and loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(
        self, text: str, environ: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
    ) -> Config:
        self.path.write_text(text, encoding="utf-8")
        return Config.load(self.path, environ or {}, flags)

    def refused(self, text: str, **more: Any) -> ConfigFileError:
        with pytest.raises(ConfigFileError) as caught:
            self(text, **more)
        return caught.value


# --- What the seed writes


def test_the_seeds_election_loads_as_it_stands(written: Writer) -> None:
    config = written(SEED_ELECTION)
    election = LeaderElection("host=x", "scheduler", **config.election_options())
    # check_interval ± 20 %; G = 60 - max(1, 6).
    assert timing_of(election._setup) == Timing(30.0, 54.0, 60.0, (4.0, 6.0), 0.0)
    assert config["lock_timeout"] == 10.0
    assert config.warnings == ()


def test_the_seeds_alerts_load_as_they_stand(written: Writer) -> None:
    assert written(SEED_ALERTS).alerts == (
        AlertRule(
            "no_scheduler_leader",
            "sum(forge_leader_is_leader{role='scheduler'}) == 0",
            30.0,
            "critical",
            ("pagerduty",),
            3,
        ),
        AlertRule(
            "frequent_failovers", "rate(forge_leader_failovers_total[5m]) > 5", 0.0, "warning", ("slack:#ops",), 10
        ),
    )


def test_both_snippets_in_one_file_are_one_configuration(written: Writer) -> None:
    config = written(SEED_ALERTS + SEED_ELECTION)
    assert len(config.alerts) == 2
    assert config["refresh_interval"] == 30.0


# --- What is wrong: what the file says, the line, a phrase of the remedy, and whether a schema can tell, too

BROKEN = {
    "unknown key": (f'{E}takover = "instant"\n', 2, "did you mean takeover?", True),
    "a name from elsewhere": (f'{E}\n\nheartbeat_interval_ms = "3s"\n', 4, "it is refresh_interval here", True),
    "unknown section": ('[cluster.leader_elections]\nnode_id = "a"\n', 1, "write [cluster.leader_election]", True),
    "section at the top": ('[leader_election]\nnode_id = "a"\n', 1, "write it in [cluster.leader_election]", True),
    "no unit": (f"{E}refresh_interval = 3000\n", 2, 'with one, such as "3000s"', True),
    "no unit in the text": (f'{E}# seconds?\nrefresh_interval = "3"\n', 3, "one of ms, s, m, h, d", True),
    "wrong unit": (f'{E}lease_duration = "1 minute"\n', 2, "one of ms, s, m, h, d", True),
    "zero": (f'{E}lease_duration = "0s"\n', 2, "give a duration above zero", True),
    "quotes around a switch": (f'{E}candidate = "false"\n', 2, "candidate = false, without quotes", True),
    "no such choice": (f'{E}takeover = "fast"\n', 2, "give one of safe, instant", True),
    "duration without quotes": (f"{E}\nrefresh_interval = 5s\n", 3, 'put the duration in quotes: "5s"', False),
    "given twice": (f'{E}node_id = "a"\nnode_id = "b"\n', 3, "keep one of them", False),
    "G not above the heartbeat": (
        f'{E}refresh_interval = "30s"\nlate_threshold = "30s"\n', 3, "raise late_threshold to 37s", False),
    "T not above G": (
        f'{E}late_threshold = "10s"\nlease_duration = "10s"\n', 3, "raise lease_duration to 11s", False),
    "T leaves no room for G": (
        f'{E}lease_duration = "30s"\n\nrefresh_interval = "30s"\n', 2, "raise lease_duration to 41s", False),
    "a standby slower than T": (f'{E}check_interval = "10s"\n', 2, "shorten check_interval", False),
    "longest before shortest": (f'{E}check_interval = ["2s", "1s"]\n', 2, "put the shorter one first", False),
    "a setting of all roles at one": (
        '[roles.a]\n[roles.b]\nlease_duration = "9s"\n', 3, "move it to [cluster.leader_election]", True),
    "two roles with one key": ("[roles.a]\nkey = 7\n[roles.b]\nkey = 7\n", 4, "change one of them", False),
    "a key beyond 64 bits": ("[roles.a]\nkey = 9223372036854775808\n", 2, "to 9223372036854775807", True),
    "alerts in single brackets": ('\n[alerts]\nname = "a"\n', 2, "write [[alerts]]", True),
    "an alert without a condition": ('[[alerts]]\nname = "a"\n', 1, 'add condition = "…"', True),
    "two alerts of one name": (
        '[[alerts]]\nname = "a"\ncondition = "1"\n[[alerts]]\ncondition = "2"\nname = "a"\n', 6,
        "a name of its own", False),
    "one receiver without a list": (
        '[[alerts]]\nname = "a"\ncondition = "1"\nnotify = "slack:#ops"\n', 4, 'notify = ["slack:#ops"]', True),
    "a severity nobody knows": (
        '[[alerts]]\nname = "a"\ncondition = "1"\nseverity = "critcal"\n', 4, "give one of critical,", True),
    "a password that ends early": (
        f'{E}dsn = "postgresql://app:{SECRET}@x@db/app"\n', 2, "write them as %40 and %2F", False),
    "waiting at the server for two roles": (
        f'{E}standby_wait = "1s"\n[roles.a]\n[roles.b]\n', 2, "give each role a process of its own", False),
    "a history of a minute": (f'{E}retention = "1m"\n', 2, 'give at least "1h", or false', False),
    "the lock server's section": ("[server]\nport = 1\n", 1, "pgleaderlock serve --config", True),
    "a list of roles": ('roles = ["a", "b"]\n', 1, "write [roles.NAME]", True),
    "quotes not closed": (f'{E}node_id = "a\n', 2, "close the quotes", False),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_with_its_line_and_its_remedy(written: Writer, name: str) -> None:
    text, line, remedy, _ = BROKEN[name]
    error = written.refused(text)
    (problem,) = error.problems
    assert problem.line == line
    assert str(problem).startswith(f"{written.path} line {line}: ")
    assert remedy in str(problem)
    assert SECRET not in str(error) + repr(error)


def test_there_are_more_than_twenty_different_ones() -> None:
    assert len({text for text, *_ in BROKEN.values()}) >= 20


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(written: Writer) -> None:
    error = written.refused(
        f'{E}refresh_interval = "30s"\nlease_duration = "20s"\ntakover = "instant"\ncheck_interval = 5\n'
        '[roles.""]\n[roles.b]\ncolour = "red"\n[[alerts]]\nfor = "soon"\n',
        environ={"HEARTBEAT_LATE_THRESHOLD_MS": "soon"},
        flags={"namespace": ""},
    )
    assert [problem.line for problem in error.problems] == [None, None, 4, 5, 6, 8, 9, 9, 10]
    assert [problem.where for problem in error.problems[:2]] == [
        "flag --namespace",
        "environment HEARTBEAT_LATE_THRESHOLD_MS",
    ]
    assert str(error).count("\n") == 8


def test_a_value_that_is_wrong_is_not_told_again_as_a_relation(written: Writer) -> None:
    # The default of 3 s in its place would not fit T.
    (problem,) = written.refused(f'{E}lease_duration = "3s"\nrefresh_interval = "1 s"\n').problems
    assert problem.line == 3


# --- Relations: the election has them, too


def random_timing(rng: random.Random) -> dict[str, float]:
    keys = ("refresh_interval", "late_threshold", "lease_duration", "check_interval")
    return {key: round(rng.choice((rng.uniform(0.01, 3), rng.uniform(1, 30))), 3) for key in keys if rng.random() < 0.7}


def test_what_loads_is_exactly_what_an_election_accepts() -> None:
    rng = random.Random(6)
    accepted = refused = 0
    for _ in range(400):
        given = random_timing(rng)
        interval_s, gate_s, lease_s = (
            given.get("refresh_interval", 3.0), given.get("late_threshold"), given.get("lease_duration"))  # fmt: skip
        if lease_s is not None and gate_s is None:
            gate_s = lease_s - max(1.0, lease_s / 10)
        middle_s = given.get("check_interval")
        delays_s = (0.2, 0.8) if middle_s is None else (middle_s * 0.8, middle_s * 1.2)
        try:
            wanted = Timing.checked(interval_s, gate_s, lease_s, delays_s, 0.0)
        except ConfigurationError:
            refused += 1
            with pytest.raises(ConfigFileError):
                Config.load(environ={"PGLEADERLOCK_CONFIG": "/dev/null"}, flags=given)
            continue
        accepted += 1
        config = Config.load("/dev/null", {}, given)
        found = timing_of(LeaderElection("host=x", "r", **config.election_options())._setup)
        assert found.acquire_delay_s == pytest.approx(wanted.acquire_delay_s)
        assert dataclasses.replace(found, acquire_delay_s=wanted.acquire_delay_s) == wanted
    assert min(accepted, refused) > 50


def test_the_number_in_a_remedy_would_do() -> None:
    rng = random.Random(7)
    tried = 0
    for _ in range(300):
        given: dict[str, object] = {**random_timing(rng), "check_interval": 0.01}
        try:
            Config.load("/dev/null", {}, given)
        except ConfigFileError as error:
            if len(error.problems) > 1:
                continue
            for way in error.problems[0].remedy.split(", or "):
                if numbers := dict(re.findall(r"(?:raise|shorten|and) (\w+) to ([\d.]+\w+)", way)):
                    tried += 1
                    Config.load("/dev/null", {}, {**given, **numbers})
    assert tried > 50


# --- Where values come from


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(written: Writer) -> None:
    text = f'{E}node_id = "n1"\nrefresh_interval = "2s"\nlate_threshold = "7s"\ndsn = "host=file"\n'
    environ = {"HEARTBEAT_INTERVAL_MS": "1500", "PG_CONN_STRING": "host=environment"}
    config = written(text, environ, {"dsn": "host=flag", "namespace": None})
    origins = {key: (value.value, str(value.origin)) for key, value in config.values.items()}
    assert origins["dsn"] == ("host=flag", "flag --dsn")
    assert origins["refresh_interval"] == (1.5, "environment HEARTBEAT_INTERVAL_MS")
    assert origins["late_threshold"] == (7.0, f"{written.path} line 4")
    assert origins["node_id"] == ("n1", f"{written.path} line 2")
    assert origins["namespace"] == ("pgleaderlock", "default")
    assert origins["lease_duration"] == (8.0, "default")


def test_the_variables_are_read_as_an_election_reads_them() -> None:
    config = Config.load(None, EVERYTHING)
    wanted = from_environment(EVERYTHING)
    key = wanted.pop("lock_key")
    assert (config.dsn, config.roles) == (wanted.pop("dsn"), {f"leader-{key}": key})
    assert config.election_options() == wanted


def test_a_longest_delay_below_the_shortest_is_refused_by_the_variable_that_gives_it() -> None:
    """An election would refuse it, too: 200 ms is the default of the shortest."""
    with pytest.raises(ConfigFileError, match=r"environment ACQUIRE_BACKOFF_MS_MAX: .* put the shorter one first"):
        Config.load("/dev/null", {"ACQUIRE_BACKOFF_MS_MAX": "100"})


def test_an_elections_own_variable_wins_over_that_of_the_commands() -> None:
    assert Config.load(None, {"PG_DSN": "host=a"}).dsn == "host=a"
    assert Config.load(None, {"PG_DSN": "host=a", "PG_CONN_STRING": "host=b"}).dsn == "host=b"
    assert Config.load(None, {"PG_DSN": "host=a", "PG_CONN_STRING": " "}).dsn == "host=a"


def test_the_file_is_the_one_given_or_the_variables_or_the_one_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.load(environ={}).path is None
    for name in ("pgleaderlock", "other", "given"):
        (tmp_path / f"{name}.toml").write_text(f'{E}node_id = "{name}"\n')
    assert Config.load(environ={})["node_id"] == "pgleaderlock"
    named = {"PGLEADERLOCK_CONFIG": "other.toml"}
    assert Config.load(environ=named)["node_id"] == "other"
    assert Config.load("given.toml", named)["node_id"] == "given"
    assert Config.load(environ={"PGLEADERLOCK_CONFIG": ""})["node_id"] == "pgleaderlock"
    with pytest.raises(FileUnreadable, match=r"nowhere\.toml: cannot be read"):
        Config.load(environ={"PGLEADERLOCK_CONFIG": "nowhere.toml"})


# --- What becomes of it


def test_every_setting_reaches_the_election(written: Writer) -> None:
    config = written(
        f"""{E}
refresh_interval = "2s"
late_threshold = "5s"
lease_duration = "9s"
check_interval = ["100ms", "1.5s"]
standby_wait = "500ms"
takeover = "instant"
node_id = "n1"
namespace = "shop"
listen_channel = false
stale_threshold = "1m"
evict_stale = false
candidate = false
heartbeat_thread = true
hard_stop_after = "1h"
allow_pooler = false
enabled = false
standalone = true
balance = false
retention = "30d"
"""
    )
    assert config.election_options() == {
        "heartbeat_interval_s": 2.0,
        "late_threshold_s": 5.0,
        "session_lease_s": 9.0,
        "acquire_delay_s": (0.1, 1.5),
        "standby_wait_s": 0.5,
        "takeover": "instant",
        "node_id": "n1",
        "namespace": "shop",
        "listen_channel": None,
        "stale_threshold_s": 60.0,
        "evict_stale": False,
        "candidate": False,
        "heartbeat_thread": True,
        "hard_stop_after_s": 3600.0,
        "allow_pooler": False,
        "enabled": False,
        "standalone": True,
        "balance": False,
        "retention_s": 2592000.0,
    }


def test_the_table_has_every_keyword_of_the_election_with_its_default() -> None:
    parameters = dict(inspect.signature(LeaderElection).parameters)
    del parameters["roles"]  # sections of their own
    assert {setting.option for setting in ELECTION if setting.option} == set(parameters)
    for setting in ELECTION:
        if setting.option not in ("", "dsn") and setting.default is not None:
            assert setting.default == parameters[setting.option].default, setting.key


def test_roles_without_keys_are_names_and_with_one_key_all_have_theirs(written: Writer) -> None:
    assert written("[roles.mail]\n[roles.'a b']\n").roles == ("mail", "a b")
    config = written(f'{E}namespace = "shop"\n[roles.mail]\n[roles.legacy]\nkey = -42\n[roles.off]\nenabled = false\n')
    assert isinstance(config.roles, dict)
    assert {name: key_pair_from_bigint(key) for name, key in config.roles.items()} == {
        "mail": key_pair("mail", "shop"),
        "legacy": key_pair_from_bigint(-42),
    }
    assert LeaderElection("host=x", config.roles, namespace="shop").roles == ("mail", "legacy")


def test_the_environments_key_is_for_the_only_role(written: Writer) -> None:
    environ = {"LEADER_LOCK_KEY": "7"}
    assert written("[roles.a]\nkey = 6\n", environ).roles == {"a": 7}
    (problem,) = written.refused("[roles.a]\n[roles.b]\n", environ=environ).problems
    assert "LEADER_LOCK_KEY" in problem.where
    assert "[roles.NAME]" in problem.remedy


def test_the_lock_timeout_reaches_the_session_and_what_the_dsn_says_itself_wins(dsn: str, written: Writer) -> None:
    settings = LeaderElection(dsn, "r")._setup.connection()

    def shown(config: Config, name: str) -> str:
        with psycopg.connect(**connect_params(config.dsn, settings)) as conn:  # type: ignore[arg-type]
            row = conn.execute("SELECT current_setting(%s)", (name,)).fetchone()
            assert row is not None
            return str(row[0])

    text = f'{E}lock_timeout = "700ms"\n'
    assert shown(written(text, {"PG_DSN": dsn}), "lock_timeout") == "700ms"
    with_options = written(text, {"PG_DSN": dsn, "PGOPTIONS": "-c work_mem=77MB"})
    assert (shown(with_options, "lock_timeout"), shown(with_options, "work_mem")) == ("700ms", "77MB")
    own = psycopg.conninfo.make_conninfo(dsn, options="-c lock_timeout=300ms")
    assert shown(written(text, {"PG_DSN": own}), "lock_timeout") == "300ms"


def test_a_lock_timeout_without_effect_is_a_warning(written: Writer) -> None:
    (warning,) = written(f'{E}lock_timeout = "10s"\n').warnings
    assert (warning.line, "a statement ends after 3s anyway" in warning.text) == (2, True)
    for interval_s, limit_s in ((0.25, 1.0), (3.0, 3.0), (6.0, 6.0)):
        election = LeaderElection("host=x", "r", heartbeat_interval_s=interval_s)
        assert election._setup.connection().statement_timeout_s == limit_s
        warned = written(f'{E}lock_timeout = "{limit_s}s"\nrefresh_interval = "{interval_s}s"\n').warnings
        assert len(warned) == 1
        shorter = written(f'{E}lock_timeout = "{limit_s - 0.1}s"\nrefresh_interval = "{interval_s}s"\n')
        assert shorter.warnings == ()


def test_false_is_nothing_where_a_setting_is_no_switch(written: Writer) -> None:
    config = written(f"{E}listen_channel = false\nretention = false\nevict_stale = false\n")
    assert config.election_options() == {"listen_channel": None, "retention_s": None, "evict_stale": False}
    assert (config.values["retention"].shown, config.values["listen_channel"].shown) == ("false", "false")


# --- Passwords


def test_a_password_that_everybody_can_read_is_a_warning(written: Writer) -> None:
    text = f'{E}dsn = "postgresql://app:{SECRET}@db/app"\n'
    for mode, warned in ((0o644, True), (0o640, False), (0o600, False)):
        written.path.touch()
        written.path.chmod(mode)
        warnings = written(text).warnings
        assert bool(warnings) is warned
        if warned:
            assert f"chmod 640 {written.path}" in warnings[0].remedy
            assert warnings[0].line == 2
    written.path.chmod(0o644)
    assert written(f'{E}dsn = "postgresql://app@db/app"\n').warnings == ()


def test_no_text_of_a_configuration_holds_the_password(written: Writer) -> None:
    config = written(f'{E}dsn = "postgresql://app:{SECRET}@db/app"\n')
    assert SECRET in config.dsn
    assert SECRET not in repr(config) + str(config) + repr(config.values) + repr(config.warnings)
    for broken in (f'{E}dsn = ["{SECRET}"]\n', f'{E}dns = "{SECRET}"\n', f'{E}dsn = "{SECRET}\n', f"{E}dsn = {SECRET}"):
        assert SECRET not in str(written.refused(broken))


# --- Where things are

ODD = {
    "quoted and dotted keys": (
        "a.\"b.c\".'d e' = 1\n\n\"x\\u0041\" = 2\n",
        {("a",): 1, ("a", "b.c"): 1, ("a", "b.c", "d e"): 1, ("xA",): 3},
    ),
    "inline tables and arrays": (
        'a = [ # ] no end\n  1,\n  "]",\n  { b = 1, c.d = [2] },\n]\ne = {}\n',
        {("a",): 1, ("a", 0): 2, ("a", 1): 3, ("a", 2): 4, ("a", 2, "b"): 4, ("a", 2, "c"): 4, ("a", 2, "c", "d"): 4,
         ("a", 2, "c", "d", 0): 4, ("e",): 6},
    ),
    "texts over several lines": (
        'a = """\nb = 1 \\"""\n[c]\n"""""\nd = \'\'\'\n# e = 1\n\'\'\'\'\nf = "#\\\\"\ng = \'\\\'\nh = """"""\n',
        {("a",): 1, ("d",): 5, ("f",): 8, ("g",): 9, ("h",): 10},
    ),
    "arrays of tables": (
        "[[a]]\nb = 1\n[[a]]\n[a.c]\nd = 1\n[[a.e]]\n[[a.e]]\nf = 1\n",
        {("a",): 1, ("a", 0): 1, ("a", 0, "b"): 2, ("a", 1): 3, ("a", 1, "c"): 4, ("a", 1, "c", "d"): 5,
         ("a", 1, "e"): 6, ("a", 1, "e", 0): 6, ("a", 1, "e", 1): 7, ("a", 1, "e", 1, "f"): 8},
    ),
    "a section after one below it": (
        '[a.b]\nc = 1\n[ "a" ] # [x]\nd = 1\n',
        {("a",): 3, ("a", "b"): 1, ("a", "b", "c"): 2, ("a", "d"): 4},
    ),
    "ends of lines of both kinds": ("a = 1\r\n\r\n[b]\r\nc = 2 # x\r\n", {("a",): 1, ("b",): 3, ("b", "c"): 4}),
    "dates and numbers": (
        "a = 1979-05-27 07:32:00 # b = 1\nc = 0x_\nd = -inf\n".replace("0x_", "0xDEAD_beef"),
        {("a",): 1, ("c",): 2, ("d",): 3},
    ),
    "comments and blanks only": ("# a = 1\n\n   \t\n", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_the_line_of_every_key_is_known_in_odd_files_too(name: str) -> None:
    text, lines = ODD[name]
    assert scan_lines(text) == lines
    assert set(places(tomllib.loads(text))) == set(lines)


def places(value: object, place: Place = ()) -> Iterator[Place]:
    if place:
        yield place
    below: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        below = list(value.items())
    elif isinstance(value, list):
        below = list(enumerate(value))
    for key, inner in below:
        yield from places(inner, (*place, key))


def test_in_any_file_exactly_the_places_of_its_values_have_lines() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        text = "".join(random_lines(rng))
        lines = scan_lines(text)
        assert set(lines) == set(places(tomllib.loads(text))), text
        written_in = text.split("\n")
        for place, line in lines.items():
            if isinstance(place[-1], str):
                assert place[-1] in written_in[line - 1], (place, text)


def random_lines(rng: random.Random) -> Iterator[str]:
    """Valid TOML, in any style; every key is another one, so that a wrong line is seen."""
    numbers = iter(range(10_000))

    def key() -> str:
        name = f"k{next(numbers)}"
        return rng.choice((name, f'"{name}"', f"'{name}'"))

    def assignment(depth: int, *, newlines: bool = True) -> str:
        dotted = rng.choice((".", " . ")).join(key() for _ in range(rng.choice((1, 1, 1, 2))))
        return f"{dotted}{rng.choice(('=', ' = '))}{value(depth, newlines=newlines)}"

    def value(depth: int, *, newlines: bool) -> str:
        simple = ["1", "true", "1979-05-27 07:32:00", '"a # ] } = \\" "', "'\\ '", "1e3"]
        if newlines:
            simple += ['"""\n[x]\n\\""" ""a\n"""', "'''\nk = 1\n''\n'''"]
        kind = rng.random()
        if depth and kind < 0.2:
            gap = rng.choice((" ", "\n", "\n# ] ,\n")) if newlines else " "
            end = rng.choice(("", ",")) + gap
            items = [value(depth - 1, newlines=newlines) for _ in range(rng.randrange(3))]
            return f"[{gap}" + f",{gap}".join(items) + (end if items else "") + "]"
        if depth and kind < 0.4:
            return "{" + ", ".join(assignment(depth - 1, newlines=False) for _ in range(rng.randrange(3))) + "}"
        return rng.choice(simple)

    end = rng.choice(("\n", "\r\n"))
    tables: list[str] = []
    for _ in range(rng.randrange(12)):
        kind = rng.random()
        if kind < 0.2:
            tables.append(key())
            yield f"[[{tables[-1]}]]{end}"
        elif kind < 0.3 and tables:
            yield f"[[ {rng.choice(tables)} ]] # again{end}"
        elif kind < 0.4 and tables:
            yield f"[{rng.choice(tables)}.{key()}]{end}"
        elif kind < 0.5:
            yield f"[{key()}.{key()}]{end}"
        else:
            yield rng.choice(("", "  ")) + assignment(2) + rng.choice(("", " # = [")) + end
        yield rng.choice(("", "", end, f"# x{end}"))


# --- Files that are none


def test_a_byte_order_mark_is_not_part_of_the_first_key(written: Writer) -> None:
    written.path.write_bytes(b"\xef\xbb\xbf" + f'{E}node_id = "\N{LATIN SMALL LETTER A WITH DIAERESIS}"\r\n'.encode())
    assert Config.load(written.path, {})["node_id"] == "\N{LATIN SMALL LETTER A WITH DIAERESIS}"


@pytest.mark.parametrize(
    ("raw", "where", "said"),
    [
        (b'[roles.a]\n# caf\xe9\n', " line 2: ", "save the file as UTF-8"),
        ("[roles.a]\n".encode("utf-16"), " line 1: ", "save the file as UTF-8"),
        (b"\x00" * 10, " line 1: ", "not TOML"),
        (b"a = " + b"[" * 5000, ": ", "write it flat"),
        (b"[roles.a]\nkey = " + b"9" * 5000, ": ", "at most 19 digits"),
        (b"a = [1,\n2,\n", " line 2: ", "not TOML"),
        (b"# \n" * (10_000_000 // 3), ": ", "hardly the file"),
    ],
    ids=["latin-1", "utf-16", "zeros", "deep", "long number", "open end", "10 MB"],
)  # fmt: skip
def test_what_is_no_such_file_is_refused_with_a_remedy(written: Writer, raw: bytes, where: str, said: str) -> None:
    written.path.write_bytes(raw)
    with pytest.raises(ConfigFileError) as caught:
        Config.load(written.path, {})
    assert str(caught.value).startswith(f"{written.path}{where}")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(written.path))


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "it is a folder"), (tmp_path / "no", "No such file"), (Path("a\0b"), "null byte")):
        with pytest.raises(FileUnreadable, match=said):
            read_toml(path)


def test_a_file_as_large_as_allowed_is_read(written: Writer) -> None:
    text = "[roles.a]\n" + "#" * (FILE_BYTES_MAX - 11) + "\n"
    assert written(text).roles == ("a",)


def test_an_empty_file_is_all_defaults(written: Writer) -> None:
    config = written("")
    assert (config.roles, config.alerts, config.election_options()) == ((), (), {})


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.2, "200ms"), (1.2, "1.2s"), (60, "1m"), (90, "90s"), (86400, "1d"), (0, "0s"), (0.0005, "0.0005s")],
)  # fmt: skip
def test_a_duration_is_shown_as_people_write_it(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text
    assert parse_duration_s(text) == pytest.approx(duration_s)


# --- For editors


def schema_errors(text: str) -> list[str]:
    document = json.loads(json.dumps(tomllib.loads(text), default=str))
    return [error.message for error in jsonschema_rs.Draft202012Validator(json_schema()).iter_errors(document)]


def test_the_schema_is_one_and_accepts_what_loads() -> None:
    jsonschema_rs.meta.validate(json_schema())
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for text in (SEED_ALERTS, SEED_ELECTION, EXAMPLE.read_text(encoding="utf-8"), ""):
        assert schema_errors(text) == []


@pytest.mark.parametrize("name", [name for name, (*_, by_schema) in BROKEN.items() if by_schema])
def test_the_schema_refuses_what_a_schema_can(name: str) -> None:
    assert schema_errors(BROKEN[name][0]) != []


# --- The example and the page


def test_the_example_loads_and_makes_an_election() -> None:
    config = Config.load(EXAMPLE, {})
    assert config.warnings == ()
    assert [rule.name for rule in config.alerts] == ["no_scheduler_leader", "frequent_failovers"]
    election = LeaderElection(config.dsn, config.roles, **config.election_options())
    assert election.roles == ("scheduler", "mailer", "legacy")
    assert timing_of(election._setup) == Timing(3.0, 9.0, 10.0, (0.8, 1.2), 0.0)


def test_every_setting_is_on_the_page_with_unit_default_variables_and_flag() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for settings, heading in ((ELECTION, "Settings of the election"), (ROLE, "Roles"), (ALERT, "Alerts")):
        section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        rows = {}
        for line in section.splitlines():
            if found := re.match(r"\| `(\w+)` \|(.*)\|$", line):
                rows[found[1]] = [cell.strip() for cell in found[2].split("|")]
        assert list(rows) == [setting.key for setting in settings]
        for setting in settings:
            unit, default, elsewhere, meaning = rows[setting.key]
            assert unit == setting.kind.unit.replace("|", "or")
            assert default == ("required" if setting.required else setting.shown(setting.default) or "none"), (
                setting.key
            )
            names = [*setting.variables, *([setting.flag] if setting.flag else [])]
            assert re.findall(r"`([^`]+)`", elsewhere) == names, setting.key
            assert setting.meaning.rstrip(".") in meaning
            assert setting.change_when.rstrip(".") in meaning
