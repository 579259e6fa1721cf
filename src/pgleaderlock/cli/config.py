"""`pgleaderlock config check|show|schema`: checks the file, shows the settings in force, prints the file's JSON schema.

It must never connect to a database, and never print a password.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pgleaderlock.alerts import misread
from pgleaderlock.cli.output import (
    EXIT_NO,
    EXIT_OK,
    EXIT_USAGE,
    print_table,
    stderr_console,
    stdout_console,
    without_passwords,
)
from pgleaderlock.config import (
    FILE_NAME,
    AlertRule,
    Config,
    ConfigFileError,
    FileUnreadable,
    Origin,
    Problem,
    RoleSettings,
    Value,
    find_file,
    format_duration,
    json_schema,
)

__all__ = ["config"]

WIDTH_OF_FILE_NAMES = 80
_UNREAD = (
    "conditions of alerts were read for quotes, brackets and characters only; the rest of PromQL is parsed by "
    "pgleaderlock alerts export > rules.yml && promtool check rules rules.yml"
)


_config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"The file.  [default: $PGLEADERLOCK_CONFIG, or ./{FILE_NAME}]",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")


@click.group(short_help="Check and show the settings of an election.")
def config() -> None:
    """The file pgleaderlock.toml: is it right, which settings hold, and what may be written.

    The file is --config, or what PGLEADERLOCK_CONFIG names, or ./pgleaderlock.toml. A flag wins over the environment,
    that over the file, that over the default.
    """


@config.command(short_help="Find every mistake in the file.")
@_config_option
@_json_option
def check(path: Path | None, as_json: bool) -> int:
    """Find every mistake in the file and in the environment, each with its line and its remedy.

    Exit codes: 0 all is right (there may be warnings), 1 there are mistakes, 2 there is no file to check.
    """
    file = find_file(path)
    if file is None:
        raise click.UsageError(f"there is no {FILE_NAME} in this folder: give --config FILE")
    loaded: Config | None = None
    mistakes: tuple[Problem, ...] = ()
    try:
        loaded = Config.load(file)
    except FileUnreadable as error:
        raise click.UsageError(str(error)) from error
    except ConfigFileError as error:
        mistakes = error.problems
    warnings = () if loaded is None else loaded.warnings
    if loaded is not None:
        mistakes = tuple(_misread(file, loaded.alerts))
    # We cannot check the conditions: `promtool` parses PromQL, we do not.
    unread = bool(loaded and loaded.alerts and not mistakes)
    if as_json:
        verdict = {
            "file": str(file),
            "ok": not mistakes,
            "problems": [_problem_json(problem) for problem in mistakes],
            "warnings": [_problem_json(problem) for problem in warnings],
            "not_checked": [_UNREAD] if unread else [],
        }
        click.echo(json.dumps(verdict, indent=2))
    else:
        _print_problems("mistake", mistakes)
        _print_problems("warning", warnings)
        if loaded is not None and not mistakes:
            click.echo(f"{file}: all is right ({_summary(loaded)})")
        if unread:
            click.echo(f"not checked: {_UNREAD}")
    return EXIT_NO if mistakes else EXIT_OK


def _misread(file: Path, rules: Iterable[AlertRule]) -> Iterator[Problem]:
    for rule in rules:
        if mistake := misread(rule.condition):
            where = f"{file.name}" + ("" if rule.line is None else f" line {rule.line}")
            text = f"the condition of alert {rule.name!r} is no PromQL: {mistake}"
            yield Problem(where, text, "mend the condition", rule.line)


@config.command(short_help="Show what holds, and where it came from.")
@_config_option
@_json_option
def show(path: Path | None, as_json: bool) -> int:
    """Show every setting that holds, and where it came from; roles and alerts, too. Passwords are hidden.

    Exit codes: 0, or 2 when there are mistakes: `pgleaderlock config check` tells of them.
    """
    try:
        loaded = Config.load(path)
    except ConfigFileError as error:
        for problem in error.problems:
            stderr_console().print(f"error: {without_passwords(str(problem))}", soft_wrap=True)
        return EXIT_USAGE
    for warning in loaded.warnings:
        stderr_console().print(f"warning: {without_passwords(str(warning))}", soft_wrap=True)
    if as_json:
        click.echo(json.dumps(_as_json(loaded), indent=2))
    else:
        _print(loaded)
    return EXIT_OK


@config.command(short_help="Print the JSON schema of the file.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write it there instead."
)
def schema(output: Path | None) -> int:
    """Print the JSON schema of the file, for editors that check and complete while you type.

    Exit codes: 0, or 2 when it could not be written.
    """
    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return EXIT_OK
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"--output {output} cannot be written: {error.strerror}") from error
    return EXIT_OK


# --- For programs


def _problem_json(problem: Problem) -> dict[str, Any]:
    found = {"where": problem.where, "line": problem.line, "text": problem.text, "remedy": problem.remedy or None}
    return {key: without_passwords(value) if isinstance(value, str) else value for key, value in found.items()}


def _as_json(loaded: Config) -> dict[str, Any]:
    return {
        "file": None if loaded.path is None else str(loaded.path),
        "settings": {key: _value_json(value) for key, value in loaded.values.items()},
        "roles": {role.name: {"key": role.key.value, "origin": asdict(role.origin)} for role in loaded.role_settings},
        "alerts": [asdict(rule) for rule in loaded.alerts],
        "warnings": [_problem_json(problem) for problem in loaded.warnings],
    }


def _value_json(value: Value) -> dict[str, Any]:
    plain = without_passwords(value.value) if isinstance(value.value, str) else value.value
    unit = "s" if value.setting.kind.is_duration else None
    return {"value": plain, "unit": unit, "origin": asdict(value.origin)}


# --- For people


def _print_problems(what: str, problems: Iterable[Problem]) -> None:
    console = stdout_console()
    for problem in problems:
        # One line each for programs, whole words for people.
        text = _printable(f"{what}: {without_passwords(str(problem))}")
        console.print(text, soft_wrap=not console.is_terminal)


def _summary(loaded: Config) -> str:
    given = sum(value.is_given for value in loaded.values.values())
    counts = ((given, "setting"), (len(loaded.role_settings), "role"), (len(loaded.alerts), "alert"))
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)


def _print(loaded: Config) -> None:
    console = stdout_console()
    console.print(f"file: {loaded.path or 'none'}", soft_wrap=True)
    console.print()
    settings = ((key, without_passwords(value.shown), value.origin) for key, value in loaded.values.items())
    _rows("setting", "value", settings, loaded)
    if loaded.role_settings:
        console.print()
        _rows("role", "key", map(_role_row, loaded.role_settings), loaded)
    if loaded.alerts:
        console.print()
        _rows("alert", "severity, for, to", map(_alert_row, loaded.alerts), loaded)


def _role_row(role: RoleSettings) -> tuple[str, str, Origin]:
    return role.name, "derived" if role.key.value is None else str(role.key.value), role.origin


def _alert_row(rule: AlertRule) -> tuple[str, str, Origin]:
    parts = [rule.severity, format_duration(rule.for_s), *rule.notify]
    return rule.name, ", ".join(parts), Origin("file", f"line {rule.line}", rule.line)


def _rows(first: str, second: str, rows: Iterable[tuple[str, str, Origin]], loaded: Config) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.text import Text  # noqa: PLC0415

    console = stdout_console()
    narrow = console.width < WIDTH_OF_FILE_NAMES
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    table.add_column(second, overflow="fold")
    table.add_column("from", overflow="fold")
    for name, value, origin in rows:
        style = "dim" if origin.kind == "default" else ""
        cells = (_printable(name), _printable(value), _printable(_from(origin, loaded, narrow=narrow)))
        table.add_row(*(Text(cell, style) for cell in cells))
    print_table(console, table)


def _from(origin: Origin, loaded: Config, *, narrow: bool) -> str:
    """The origin without the folder, which the first line shows; on a narrow terminal, also without the file's name."""
    if origin.kind == "file" and loaded.path is not None:
        return f"line {origin.line}" if narrow else f"{loaded.path.name} line {origin.line}"
    return origin.text


def _printable(text: str) -> str:
    """The text with escapes for control characters: a name may contain escape sequences for the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
