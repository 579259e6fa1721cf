"""The program `pgleaderlock`: quick help, one line for an error, and exit codes that mean something."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pgleaderlock._pg.conninfo import LIBPQ_VARIABLES
from pgleaderlock.cli import app as _app
from pgleaderlock.cli import logging, main
from pgleaderlock.cli import output as _output
from pgleaderlock.errors import ConfigurationError, LockServerRefused, PgLeaderLockError
from pgleaderlock.keys import key_pair

PATIENCE_S = 30.0


def run_program(*args: str, code: str = "", **kwargs: object) -> "subprocess.CompletedProcess[str]":
    """The program in a process of its own, after `code` has changed something in it."""
    argv = [sys.executable, "-c", f"{code}\nfrom pgleaderlock.cli import main\nmain({list(args)!r})"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **kwargs)  # type: ignore[call-overload, no-any-return]


def test_help_lists_every_command_without_importing_any() -> None:
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    done = run_program("--help", code=report)
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout and entry.help in done.stdout for name, entry in _app.COMMANDS.items())
    loaded = set(done.stderr.split())
    assert "pgleaderlock.cli.app" in loaded
    assert not loaded & {entry.target.split(":")[0] for entry in _app.COMMANDS.values()}
    assert not loaded & {"loguru", "rich.console"}


def loaded_by(*args: str) -> set[str]:
    """The modules that a command line has imported, beside those that Python and click import anyway."""
    report = (
        "import atexit, sys, click; before = {*sys.modules}\n"
        "atexit.register(lambda: print(*({*sys.modules} - before), file=sys.stderr))"
    )
    done = run_program(*args, code=report)
    assert done.returncode in (0, 1), done.stderr
    return set(done.stderr.split())


def test_help_imports_neither_the_driver_nor_the_library() -> None:
    loaded = loaded_by("--help")
    assert {name for name in loaded if name.startswith("pgleaderlock")} == {
        "pgleaderlock",
        "pgleaderlock._config",
        "pgleaderlock._config.durations",
        "pgleaderlock.cli",
        "pgleaderlock.cli.app",
        "pgleaderlock.cli.output",
        "pgleaderlock.errors",
        "pgleaderlock.keys",
    }
    assert not loaded & {"psycopg", "asyncio", "ssl", "importlib.metadata", "rich", "loguru"}


def test_status_imports_what_reads_and_nothing_that_leads_or_serves(dsn: str) -> None:
    loaded = loaded_by("status", "--name", "nobody-leads-this", "--json", "--dsn", dsn)
    assert "psycopg" in loaded
    ours = {name.removeprefix("pgleaderlock.").split(".")[0] for name in loaded if name.startswith("pgleaderlock.")}
    assert ours == {
        *("_base", "_config", "_pg", "cli", "errors", "keys", "models"),
        *("history", "migrate", "retry"),
    }
    assert {name for name in loaded if name.startswith("pgleaderlock.cli.")} == {
        "pgleaderlock.cli.app",
        "pgleaderlock.cli.output",
        "pgleaderlock.cli.reading",
        "pgleaderlock.cli.status",
    }
    assert not loaded & {"rich", "loguru", "prometheus_client"}


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgleaderlock", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("pgleaderlock ")


@pytest.mark.parametrize("missing", ["click", "loguru", "rich"])
def test_without_the_extra_the_program_says_what_to_install(missing: str) -> None:
    hide = (
        "import importlib.util as u; real = u.find_spec; "
        f"u.find_spec = lambda name, *rest: None if name == {missing!r} else real(name, *rest)"
    )
    done = run_program("--help", code=hide)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: the command line needs {missing}: pip install 'pgleaderlock[cli]'\n"


def test_importing_the_package_imports_none_of_the_extra() -> None:
    code = "import sys, pgleaderlock.cli; print({'click', 'rich', 'loguru'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("args", [["no-such-command"], ["--no-such-option"], []])
def test_a_usage_error_exits_2(args: list[str]) -> None:
    assert run_program(*args).returncode == 2


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Puts a command named `try` into the program."""

    def install(body: Callable[[], object]) -> None:
        monkeypatch.setitem(_app._group.commands, "try", click.Command("try", callback=body))

    return install


Install = Callable[[Callable[[], object]], None]


def raising(error: BaseException) -> Callable[[], object]:
    def body() -> None:
        raise error

    return body


class _Coded(PgLeaderLockError):
    exit_code = 127


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PgLeaderLockError("two\nlines"), 2, "error: two lines\n"),
        (ConfigurationError("wrong"), 2, "error: wrong\n"),
        (_Coded("not found"), 127, "error: not found\n"),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device\n"),
        (
            LockServerRefused(403, "add --allowed-host"),
            2,
            "error: add --allowed-host (an option of `pgleaderlock serve`; or give an address to --server)\n",
        ),
        (LockServerRefused(403, "in a newer server's words"), 2, "error: in a newer server's words\n"),
        (click.ClickException("click says 1 by itself"), 2, "Error: click says 1 by itself\n"),
        (SystemExit(76), 76, ""),
        (SystemExit("text"), 2, "error: text\n"),
        (BrokenPipeError(), 141, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_becomes_one_line_and_an_exit_code(
    command: Install, capfd: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    command(raising(error))
    assert _app.run(["try"]) == code
    assert capfd.readouterr() == ("", said)


def test_debug_shows_where_an_error_came_from(command: Install, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(PgLeaderLockError("deep down")))
    assert _app.run(["--debug", "try"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("error: deep down\n")


def test_a_defect_never_looks_like_the_answer_no(command: Install, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(RuntimeError("oops")))
    assert _app.run(["try"]) == 2
    assert "RuntimeError: oops" in capsys.readouterr().err


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (1, 1), (75, 75)])
def test_a_commands_return_value_is_the_exit_code(command: Install, result: object, code: int) -> None:
    command(lambda: result)
    assert _app.run(["try"]) == code


def test_main_exits_with_the_code(command: Install) -> None:
    command(lambda: 76)
    with pytest.raises(SystemExit) as caught:
        main(["try"])
    assert caught.value.code == 76


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "pgleaderlock", "--help"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


# --- options ---------------------------------------------------------------------------------------------------------


@click.command()
@_output.dsn_option
@_output.lock_options(takes_it=True)
@click.option("--wait", type=_output.DURATION, default="5s")
def _probe(dsn: str, lock_key: _output.LockKey, wait: float) -> None:
    click.echo(json.dumps([dsn, lock_key.key1, lock_key.key2, lock_key.name, wait]))


NO_DATABASE = dict.fromkeys(("PG_DSN", *LIBPQ_VARIABLES))


def probe(*args: str, env: dict[str, str] | None = None) -> "tuple[int, list[object] | str]":
    done = CliRunner().invoke(_probe, args, env={**NO_DATABASE, **(env or {})})
    return done.exit_code, json.loads(done.stdout) if done.exit_code == 0 else done.output


@pytest.mark.parametrize(
    ("args", "env", "dsn"),
    [
        (["--dsn", "dbname=x"], {}, "dbname=x"),
        (["--dsn", " dbname=x\n"], {}, "dbname=x"),
        (["--dsn", "dbname=x"], {"PG_DSN": "dbname=y", "PGHOST": "h"}, "dbname=x"),
        ([], {"PG_DSN": "dbname=y ", "PGHOST": "h"}, "dbname=y"),
        ([], {"PGHOST": "h"}, ""),
        ([], {"PGSERVICE": "s"}, ""),
        ([], {"PG_DSN": "", "PGDATABASE": "d"}, ""),
    ],
)
def test_the_database_comes_from_the_option_then_pg_dsn_then_libpq(
    args: list[str], env: dict[str, str], dsn: str
) -> None:
    assert probe(*args, "--key1", "1", "--key2", "2", env=env) == (0, [dsn, 1, 2, None, 5.0])


def test_without_a_database_it_says_what_to_do() -> None:
    code, said = probe("--name", "billing", env={"PGUSER": "u"})
    assert code == 2
    assert all(word in said for word in ("--dsn", "PG_DSN", "PGHOST"))


@pytest.mark.parametrize("args", [["--name", ""], ["--key1", "1"], ["--wait", "x"], ["--nope"]])
def test_an_error_never_shows_the_dsn(args: list[str]) -> None:
    code, said = probe("--dsn", "postgresql://u:s3cret@h/d", *args)
    assert code == 2
    assert "s3cret" not in said


def test_a_name_becomes_its_keys() -> None:
    key1, key2 = key_pair("billing")
    assert probe("--dsn", "x", "--name", "billing") == (0, ["x", key1, key2, "billing", 5.0])
    other1, other2 = key_pair("billing", "shop")
    assert probe("--name", "billing", "--namespace", "shop", "--dsn", "x") == (0, ["x", other1, other2, "billing", 5.0])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "which lock?"),
        (["--key1", "1"], "give both"),
        (["--key2", "0"], "give both"),
        (["--name", "n", "--key1", "0"], "exclude each other"),
        (["--key2", "0", "--name", "n"], "exclude each other"),
        (["--name", ""], "must not be empty"),
        (["--key1", "1", "--key2", "2", "--namespace", "n"], "--namespace belongs to --name"),
        (["--key1", "2147483648", "--key2", "2"], "out of range"),
        (["--name", "n", "--wait", "-1"], "is not a duration"),
    ],
)
def test_a_lock_is_named_in_exactly_one_way(args: list[str], said: str) -> None:
    code, output = probe("--dsn", "x", *args)
    assert code == 2
    assert said in output


def test_zero_keys_are_keys() -> None:
    assert probe("--dsn", "x", "--key1", "0", "--key2", "0", "--wait", "200ms") == (0, ["x", 0, 0, None, 0.2])


def test_consoles_are_plain_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    _output.stdout_console().print("1 [bold]x[/bold] :smile:", style="red")
    assert capsys.readouterr().out == "1 [bold]x[/bold] :smile:\n"


# --- logging ---------------------------------------------------------------------------------------------------------


LOG = """
import logging
from pgleaderlock.cli import logging as cli_logging
cli_logging.configure("{level}", json={json})
log = logging.getLogger("pgleaderlock.part")
password = "s3cret"
log.info("state_change to=leader {{x}} <red>", extra={{"to": "leader", "term": 7, "odd": object, "level": "x"}})
log.debug("hidden")
try:
    raise OSError("down" if password else "")
except OSError:
    log.exception("failed")
"""


def log_lines(level: str, *, as_json: bool) -> str:
    code = LOG.format(level=level, json=as_json)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_json_lines_keep_every_field() -> None:
    first, second = (json.loads(line) for line in log_lines("INFO", as_json=True).splitlines())
    assert first["message"] == "state_change to=leader {x} <red>"
    assert (first["to"], first["term"], first["level"], first["level_"]) == ("leader", 7, "INFO", "x")
    assert (first["logger"], first["odd"]) == ("pgleaderlock.part", "<class 'object'>")
    assert second["level"] == "ERROR"
    assert "OSError: down" in second["exception"]


def test_text_lines_add_only_what_the_message_does_not_say() -> None:
    text = log_lines("info", as_json=False)
    assert "INFO     pgleaderlock.part | state_change to=leader {x} <red> term=7" in text
    assert text.count("to=leader") == 1
    assert "OSError: down" in text
    assert "hidden" not in text
    # The values of variables in a traceback may be secrets.
    assert "s3cret" not in text


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(ValueError, match="give one of DEBUG"):
        logging.configure("loud")


def test_no_module_of_the_command_line_is_imported_by_the_library() -> None:
    package = Path(_app.__file__).parents[1]
    outside = [
        path for path in package.rglob("*.py") if package / "cli" not in path.parents and path.stem != "__main__"
    ]
    assert outside
    assert not [path for path in outside if re.search(r"\bpgleaderlock\.cli\b", path.read_text())]


@pytest.mark.parametrize(
    ("typed", "hint"), [("rolse", "Did you mean roles?"), ("hstory", "Did you mean history?"), ("xyzzy", "")]
)
def test_a_mistyped_command_gets_a_suggestion(typed: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run([typed]) == 2
    said = capsys.readouterr().err
    assert f"No such command '{typed}'." in said
    assert ("Did you mean" in said) == bool(hint)
    assert hint in said


# --- What the environment says


NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("args", "variable", "value", "says"),
    [
        ("serve", "PGLEADERLOCK_SERVE_MAX_LOCKS", "many", "--max-locks is from"),
        ("serve", "PGLEADERLOCK_SERVE_CONFIG", "/does/not/exist", "--config is from"),
        ("serve", "PGLEADERLOCK_SERVE_TLS_CERT", "/does/not/exist", "--tls-cert is from"),
        ("serve", "PGLEADERLOCK_SERVE_MAX_CONNECTIONS", "99999999", "--max-connections is from"),
        ("serve", "PGLEADERLOCK_SERVE_STORE", "locks.db", "--store is from"),
        ("dashboard --dsn host=127.0.0.1", "PGLEADERLOCK_DASHBOARD_PORT", "a", "--port is from"),
        ("lock get x", "PGLEADERLOCK_SERVER", "nonsense", "--server is from"),
        (f"lock get x --server {NOWHERE}", "PGLEADERLOCK_TOKEN", "not secret", "one word"),
        ("status --name x", "PG_DSN", "nonsense", "--dsn is from"),
        ("migrate", "PG_DSN", "nonsense", "--dsn is from"),
    ],
)
def test_what_a_variable_says_wrongly_is_told_with_its_name(
    args: str,
    variable: str,
    value: str,
    says: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert _app.run(args.split()) == 2
    said = capsys.readouterr().err
    assert said.count(variable) == 1
    assert says in said
    assert "not secret" not in said


def test_what_an_option_says_wrongly_is_not_told_of_a_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGLEADERLOCK_SERVE_MAX_LOCKS", "7")
    assert _app.run(["serve", "--max-locks", "many"]) == 2
    assert "PGLEADERLOCK_SERVE_MAX_LOCKS" not in capsys.readouterr().err


# --- Interrupted before it has begun


INTERRUPTED = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize("module", ["click", "pgleaderlock.cli.app", "pgleaderlock.errors", "pgleaderlock.cli.admin"])
def test_ctrl_c_while_the_program_is_imported_ends_it_with_130_and_without_a_traceback(module: str) -> None:
    done = run_program("keys", "x", code=INTERRUPTED.format(module=module))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == ""
