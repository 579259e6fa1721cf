"""What all commands share: exit codes, the options for the database and the lock, durations, tables and JSON.

Nothing here may print a DSN: it may hold a password, and output ends up in logs and terminals.
"""

import datetime as dt
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgleaderlock._config.durations import parse_duration_s
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import DEFAULT_NAMESPACE, check_key_pair, key_pair

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    _FloatType = click.ParamType[float]
    _MomentType = click.ParamType[dt.datetime]
else:
    # Generic for type checkers only: click 8.1 cannot be subscripted.
    _FloatType = _MomentType = click.ParamType

__all__ = [
    "DURATION",
    "EXIT_LOST",
    "EXIT_NO",
    "EXIT_NOT_WON",
    "EXIT_OK",
    "EXIT_USAGE",
    "MOMENT",
    "NAMESPACE_VARIABLE",
    "DurationType",
    "LockKey",
    "VariableOption",
    "configured",
    "database",
    "dsn_option",
    "exit_code_for_signal",
    "from_variables",
    "grouped",
    "json_option",
    "lock_key_of",
    "lock_options",
    "optional_dsn_option",
    "plain_table",
    "print_json",
    "print_table",
    "printable",
    "remembered",
    "remembered_option",
    "resolve_dsn",
    "stderr_console",
    "stdout_console",
    "without_passwords",
]

EXIT_OK = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_NOT_WON = 75
EXIT_LOST = 76

NAMESPACE_VARIABLE = "PGLEADERLOCK_NAMESPACE"
# Without any of these variables, and without a file, nothing is configured that a reading command needs.
_CONFIGURING = ("PGLEADERLOCK_CONFIG", NAMESPACE_VARIABLE, "PG_CONN_STRING", "PG_LISTEN_CHANNEL")

_FROM_VARIABLES = f"{__name__}.from_variables"

_Command = TypeVar("_Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")


def exit_code_for_signal(signum: int) -> int:
    """What a shell reports for a process that signal `signum` ended."""
    return 128 + signum


def without_passwords(text: str) -> str:
    """The text with the password of each URI and of each `password=…` in it hidden."""
    # Hide up to the last @, because a password may contain one. Without an @, the text may have been cut off before it,
    # unless a port stands there.
    text = re.sub(r"(\w://[^\s:/@]*):(?:\S*(?=@)|(?!\d{1,5}(?:[/,;.)\s]|$))[^\s@]+(?=\s|$))", r"\1:***", text)
    return re.sub(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&)]+)", r"\1***", text)


class DurationType(_FloatType):
    """A duration on the command line, converted to seconds: `5`, `5s`, `200ms`, `1m`."""

    name = "duration"

    def __init__(self, *, zero_allowed: bool = True) -> None:
        self._zero_allowed = zero_allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            duration_s = parse_duration_s(value)
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)
        if duration_s == 0 and not self._zero_allowed:
            self.fail("must be longer than zero", param, ctx)
        return duration_s


DURATION = DurationType()


class MomentType(_MomentType):
    """A moment in the past: `3h` (ago), `03:00` (the last one), `2026-11-15`, `2026-11-15 03:00`, ISO 8601.

    Without a zone, it is in this machine's time zone.
    """

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dt.datetime:
        if isinstance(value, dt.datetime):
            return value
        now, text = dt.datetime.now().astimezone(), str(value).strip()
        try:
            return now - dt.timedelta(seconds=parse_duration_s(text))
        except (ConfigurationError, OverflowError):
            pass
        try:
            if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
                clock = dt.time.fromisoformat(text.zfill(5) if text.count(":") == 1 else text.zfill(8))
                today = dt.datetime.combine(now.date(), clock)
                last = today if today.astimezone() <= now else today - dt.timedelta(days=1)
                return last.astimezone()
            return dt.datetime.fromisoformat(text).astimezone()
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is no moment: write 3h (ago), 03:00, 2026-11-15 or '2026-11-15 03:00'", param, ctx)


MOMENT = MomentType()


# --- Groups of options. Remembered ones are collected by the last option of the group: the command receives one value.


def grouped(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """These options as one decorator, in this order in `--help`."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def remembered_option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """An option that the command does not receive itself: see `remembered`."""
    return click.option(*names, expose_value=False, is_eager=True, callback=_remember, **settings)


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    ctx.meta[f"{__name__}.{param.name}"] = value


def remembered(ctx: click.Context, *names: str) -> tuple[Any, ...]:
    """The values of remembered options."""
    return tuple(ctx.meta.get(f"{__name__}.{name}") for name in names)


class VariableOption(click.Option):
    """An option that a variable may set; an error about its value then names the variable, too (`from_variables`).
    `called`: another name of the option in errors."""

    def __init__(self, *args: Any, called: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.called = called

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:
        value, source = super().consume_value(ctx, opts)
        if source is click.core.ParameterSource.ENVIRONMENT:
            ctx.meta.setdefault(_FROM_VARIABLES, {})[self.opts[0]] = (self.envvar, self.called)
        return value, source


def from_variables(meta: Mapping[str, Any], error: str) -> str:
    """The text to add to an error: for each option in it that was set by a variable, the name of the variable."""
    notes = []
    for option, (variable, called) in meta.get(_FROM_VARIABLES, {}).items():
        named = re.search(rf"(?<![\w-]){option}(?![\w-])", error) or (called and called in error)
        if named and variable not in error:
            notes.append(f"; {option} is from the variable {variable}")
    return "".join(notes)


def resolve_dsn(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The connection string to use: the given one, or "" if libpq's own variables say where to connect.

    Without either, it is a usage error. It never falls back to a private database: five hosts would get five leaders.
    """
    from pgleaderlock._pg.conninfo import LIBPQ_VARIABLES, libpq_knows_where  # noqa: PLC0415 - imports the driver.

    nowhere = (
        "no database given: use --dsn postgresql://user@host/dbname, or set PG_DSN, or libpq's variables "
        f"({', '.join(LIBPQ_VARIABLES)}), or write dsn into pgleaderlock.toml"
    )
    if given is not None:
        stripped = given.strip()
        if not stripped:
            raise click.UsageError("--dsn (or PG_DSN) is empty; " + nowhere)
        return stripped
    if libpq_knows_where(environ):
        return ""
    raise click.UsageError(nowhere)


def configured(ctx: click.Context, key: str) -> Any:
    """The value of a setting in the environment, or in the file that `config.find_file` finds; None if in neither.

    With it, a reading command uses the same database and namespace as the nodes. Called only if an option was not
    given.
    """
    (path,) = remembered(ctx, "config")  # only doctor has such an option
    if path is None and not os.path.lexists("pgleaderlock.toml") and not any(map(os.environ.get, _CONFIGURING)):
        return None
    from pgleaderlock.config import Config, ConfigFileError  # noqa: PLC0415 - imported only if it is needed.

    place = f"{__name__}.configuration"
    if place not in ctx.meta:
        try:
            ctx.meta[place] = Config.load(path, roles=())
        except ConfigFileError as error:
            raise click.UsageError("\n".join(map(str, error.problems))) from error
    found = ctx.meta[place].values[key]
    return found.value if found.is_given else None


def database(ctx: click.Context, given: str | None) -> str:
    """The connection string of a reading command: the given one, or else the configured one."""
    return resolve_dsn(configured(ctx, "dsn") if given is None else given)


def dsn_option(command: _Command) -> _Command:
    """`--dsn`, passed on as `dsn: str`, resolved."""
    return _dsn_option(command, lambda ctx, _param, value: database(ctx, value))


def optional_dsn_option(command: _Command) -> _Command:
    """`--dsn`, passed on as `dsn: str | None` as given, for commands that can do without. See `resolve_dsn`."""
    return _dsn_option(command, None)


def _dsn_option(command: _Command, callback: Callable[[click.Context, click.Parameter, Any], Any] | None) -> _Command:
    option = click.option(
        "--dsn",
        cls=VariableOption,
        called="the DSN",
        envvar="PG_DSN",
        show_envvar=True,
        metavar="DSN",
        callback=callback,
        help="Where the database is: a URI or key=value pairs. Without it, as configured, or libpq's PG* variables.",
    )
    return option(command)


@dataclass(frozen=True)
class LockKey:
    """The selected lock. `name` is None if it was given by its keys."""

    key1: int
    key2: int
    name: str | None = None
    namespace: str = DEFAULT_NAMESPACE

    def __str__(self) -> str:
        return self.name if self.name is not None else f"{self.key1}/{self.key2}"


def lock_options(*, takes_it: bool) -> Callable[[_Command], _Command]:
    """`--name` (with `--namespace`) or `--key1` and `--key2`, passed on as one `lock_key: LockKey`.

    A command that only reads uses the namespace of the file, as the nodes do. A command that `takes_it` does not, and
    neither does `exec` without --fenced: a file in the folder must not decide which lock a plain lock takes.
    """
    return grouped(
        remembered_option("--name", help="The lock's name."),
        remembered_option(
            "--namespace",
            help="Keeps equal names of different applications apart.  "
            f"[default: ${NAMESPACE_VARIABLE}{'' if takes_it else ', or as configured'}, or {DEFAULT_NAMESPACE}]",
        ),
        remembered_option("--key1", type=int, help="Instead of a name: the first key of the advisory lock."),
        click.option(
            "--key2",
            "lock_key",
            type=int,
            callback=functools.partial(_collect, takes_it=takes_it),
            help="Instead of a name: the second key.",
        ),
    )


def _collect(ctx: click.Context, _param: click.Parameter, key2: int | None, *, takes_it: bool) -> LockKey | None:
    if ctx.resilient_parsing:  # Completion in a shell asks without values.
        return None
    name, namespace, key1 = remembered(ctx, "name", "namespace", "key1")
    if name is not None and namespace is None and not takes_it:
        namespace = configured(ctx, "namespace")
    try:
        return lock_key_of(name, namespace, key1, key2)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error


def lock_key_of(name: str | None, namespace: str | None, key1: int | None, key2: int | None) -> LockKey:
    """The lock that these options select, or a usage error."""
    if name is not None:
        if key1 is not None or key2 is not None:
            raise click.UsageError("--name and --key1/--key2 exclude each other: give one or the other")
        if namespace is None:
            namespace = os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE
        return LockKey(*key_pair(name, namespace), name, namespace)
    if namespace is not None:
        raise click.UsageError("--namespace belongs to --name: keys are taken as they are")
    if key1 is None and key2 is None:
        raise click.UsageError("which lock? Give --name NAME, or --key1 and --key2")
    if key1 is None or key2 is None:
        raise click.UsageError("--key1 and --key2 belong together: give both")
    return LockKey(*check_key_pair(key1, key2))


def stdout_console() -> "Console":
    """The console for results. Colour only on a terminal and without NO_COLOR; width of the terminal, or COLUMNS."""
    return _console(stderr=False)


def stderr_console() -> "Console":
    """The console for messages that accompany the results."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console  # noqa: PLC0415 - takes longer to import than --help takes to answer.

    # No automatic highlighting, and values from a database are never interpreted as markup.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def plain_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    gap: int = 2,
    show_header: bool = True,
) -> "Table":
    """A table without lines, which reads well in a terminal and in a file; the columns in `right` hold numbers.

    Without a header, the first column is bold instead: it names what the second one shows.
    """
    from rich.table import Table  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", show_header=show_header)
    for index, column in enumerate(columns):
        numbers = column in right
        style = "bold" if index == 0 and not show_header else None
        table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold", style=style)
    for row in rows:
        # Values from a database are neither interpreted as markup nor obeyed by a terminal.
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def print_table(console: "Console", table: "RenderableType") -> None:
    """Print without the blanks with which rich fills each line up to the table's width."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def print_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value, indent=2))


def printable(text: str) -> str:
    """The text with each unprintable character escaped, because it could end the line or disguise the text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
