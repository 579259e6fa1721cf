"""`pgleaderlock config`: mistakes with an exit code, values with their origin, and never a password."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import jsonschema_rs
import pytest

from pgleaderlock.cli.app import run
from pgleaderlock.config import json_schema
from support.program import command

EXAMPLE = Path(__file__).parents[2] / "examples" / "pgleaderlock.toml"
SECRET = "s3cret-and-long"
E = "[cluster.leader_election]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own as the current one, and nothing of the environment; gives the file that is looked for."""
    monkeypatch.chdir(tmp_path)
    for name in ("PGLEADERLOCK_CONFIG", "PG_CONN_STRING", "PG_DSN", "HEARTBEAT_INTERVAL_MS", "LEADER_LOCK_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path / "pgleaderlock.toml"


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


class Asked:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> Said:
        code = run(["config", *args])
        return Said(code, *self._capsys.readouterr())


@pytest.fixture
def config(capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(capsys)


def rows(text: str) -> dict[str, Sequence[str]]:
    return {cells[0]: cells[1:] for line in text.splitlines() if len(cells := re.split(r"\s{2,}", line)) == 3}


# --- check


def test_a_right_file_exits_0_and_says_what_is_in_it(config: Asked) -> None:
    said = config("check", "--config", str(EXAMPLE))
    assert (said.code, said.err) == (0, "")
    verdict, unread = said.out.splitlines()
    assert verdict == f"{EXAMPLE}: all is right (6 settings, 3 roles, 2 alerts)"
    assert unread.startswith("not checked: conditions of alerts")
    assert unread.endswith("promtool check rules rules.yml")


def test_a_condition_that_prometheus_cannot_read_is_a_mistake_with_its_line(config: Asked, here: Path) -> None:
    here.write_text('[[alerts]]\nname = "odd"\ncondition = "sum(x == 0"\nseverity = "critical"\n')
    said = config("check")
    assert (said.code, said.err) == (1, "")
    assert "pgleaderlock.toml line 1: the condition of alert 'odd' is no PromQL: ( is not closed" in said.out
    assert "all is right" not in said.out
    told = json.loads(config("check", "--json").out)
    assert (told["ok"], told["problems"][0]["line"], told["not_checked"]) == (False, 1, [])


def test_what_was_not_checked_is_said_to_programs_too(config: Asked, here: Path) -> None:
    here.write_text('[[alerts]]\nname = "fine"\ncondition = "nosuchfunction(x) > 1"\nseverity = "critical"\n')
    told = json.loads(config("check", "--json").out)
    assert told["ok"]
    assert "promtool" in told["not_checked"][0]
    here.write_text(E)
    assert json.loads(config("check", "--json").out)["not_checked"] == []


def test_mistakes_exit_1_one_a_line_in_their_order(config: Asked, here: Path) -> None:
    here.write_text(f'{E}takover = "x"\nlock_timeout = 5\n')
    said = config("check")
    assert (said.code, said.err) == (1, "")
    assert said.out.splitlines() == [
        "mistake: pgleaderlock.toml line 2: unknown setting 'takover': did you mean takeover?",
        'mistake: pgleaderlock.toml line 3: lock_timeout = 5 has no unit: write it as a text with one, such as "5s"',
    ]


def test_what_the_environment_has_wrong_is_told_too(config: Asked, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here.write_text("[roles.a]\n")
    monkeypatch.setenv("HEARTBEAT_INTERVAL_MS", "3s")
    said = config("check")
    assert said.code == 1
    assert said.out.startswith("mistake: environment HEARTBEAT_INTERVAL_MS: ")


@pytest.mark.parametrize(
    ("args", "said"),
    [([], "no pgleaderlock.toml in this folder"), (["--config", "."], "it is a folder"), (["--config", "x"], "x: ")],
)
def test_without_a_file_to_check_it_exits_2(config: Asked, here: Path, args: list[str], said: str) -> None:
    done = config("check", *args)
    assert (done.code, done.out) == (2, "")
    assert said in done.err.splitlines()[-1]


def test_a_warning_is_told_and_exits_0(config: Asked, here: Path) -> None:
    here.write_text(f'{E}dsn = "postgresql://app:{SECRET}@db/app"\n')
    here.chmod(0o644)
    said = config("check")
    assert said.code == 0
    assert said.out.startswith("warning: pgleaderlock.toml line 2: everybody on this machine can read")
    assert SECRET not in said.out + said.err


def test_check_json_has_each_problem_in_parts(config: Asked, here: Path) -> None:
    here.write_text(f'{E}takover = "x"\n')
    said = config("check", "--json")
    assert said.code == 1
    assert json.loads(said.out) == {
        "file": "pgleaderlock.toml",
        "ok": False,
        "problems": [
            {
                "where": "pgleaderlock.toml line 2",
                "line": 2,
                "text": "unknown setting 'takover'",
                "remedy": "did you mean takeover?",
            }
        ],
        "warnings": [],
        "not_checked": [],
    }


# --- show


def test_show_has_every_value_with_its_origin_and_no_password(
    config: Asked, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.write_text(f'{E}dsn = "postgresql://app:{SECRET}@db/app"\nlease_duration = "10s"\n[roles.a]\nkey = 0x2A\n')
    here.chmod(0o600)
    monkeypatch.setenv("HEARTBEAT_INTERVAL_MS", "2000")
    said = config("show")
    found = rows(said.out)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("file: pgleaderlock.toml\n")
    assert found["dsn"] == ["postgresql://app:***@db/app", "pgleaderlock.toml line 2"]
    assert found["refresh_interval"] == ["2s", "environment HEARTBEAT_INTERVAL_MS"]
    assert found["late_threshold"] == ["9s", "follows from lease_duration"]
    assert found["takeover"] == ["safe", "default"]
    assert found["a"] == ["42", "pgleaderlock.toml line 4"]
    as_json = config("show", "--json").out
    assert SECRET not in said.out + as_json
    settings = json.loads(as_json)["settings"]
    assert settings["dsn"]["value"] == "postgresql://app:***@db/app"
    assert settings["refresh_interval"] == {
        "value": 2.0,
        "unit": "s",
        "origin": {"kind": "environment", "text": "environment HEARTBEAT_INTERVAL_MS", "line": None},
    }
    assert json.loads(as_json)["roles"]["a"]["key"] == 42


def test_show_without_a_file_has_the_defaults(config: Asked, here: Path) -> None:
    said = config("show")
    assert said.code == 0
    assert said.out.startswith("file: none\n")
    assert {origin for _, origin in list(rows(said.out).values())[1:]} == {"default"}


def test_show_of_a_broken_file_exits_2_and_prints_nothing(config: Asked, here: Path) -> None:
    here.write_text(f"{E}refresh_interval = 5\n[x]\n")
    said = config("show")
    assert (said.code, said.out) == (2, "")
    assert said.err.count("error: pgleaderlock.toml line ") == 2


def test_a_name_cannot_speak_to_the_terminal(config: Asked, here: Path) -> None:
    here.write_text('[roles."a\\u001b[31mb"]\n')
    said = config("show")
    assert "\x1b" not in said.out
    assert "a\\x1b[31mb" in said.out


@pytest.mark.parametrize("columns", ["60", "120"])
def test_through_a_pipe_there_is_no_colour_and_each_line_fits(columns: str) -> None:
    done = command("config", "show", "--config", str(EXAMPLE), env={"COLUMNS": columns})
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    lines = done.out.splitlines()[1:]  # the first is the path, which is never cut
    assert max(map(len, lines)) <= int(columns)
    assert not [line for line in lines if line != line.rstrip()]
    assert ("pgleaderlock.toml line 15" in done.out) is (columns == "120")


def test_the_file_may_be_named_by_the_variable(config: Asked, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGLEADERLOCK_CONFIG", str(EXAMPLE))
    assert config("show").out.startswith(f"file: {EXAMPLE}\n")


# --- schema


def test_the_schema_is_printed_or_written_and_is_the_same(config: Asked, here: Path) -> None:
    printed = config("schema")
    assert (printed.code, json.loads(printed.out)) == (0, json_schema())
    assert config("schema", "--output", "schema.json").code == 0
    assert Path("schema.json").read_text() == printed.out
    document = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert jsonschema_rs.is_valid(json.loads(printed.out), document)
    done = config("schema", "--output", "no/such/folder.json")
    assert (done.code, "cannot be written" in done.err) == (2, True)
