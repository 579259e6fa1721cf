"""The `pgleaderlock` program: its commands by name, and what becomes of an error.

A command is imported only when it is called, so `--help` answers without loading a database driver. The return value of
a command is its exit code (None is 0).

No exception may leave `run`: each becomes one line on standard error and an exit code, because 1 means "no" here and
must never mean "crashed".
"""

import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

import click

from pgleaderlock.cli.output import EXIT_OK, EXIT_USAGE, exit_code_for_signal, from_variables, without_passwords
from pgleaderlock.errors import LockServerRefused, PgLeaderLockError

__all__ = ["COMMANDS", "LazyCommand", "run"]


@dataclass(frozen=True)
class LazyCommand:
    """The place of a command (`module:attribute`), and its line in the list of commands."""

    target: str
    help: str


COMMANDS = {
    "run": LazyCommand("pgleaderlock.cli.run:run", "Take part in an election and log what happens."),
    "exec": LazyCommand("pgleaderlock.cli.exec.command:exec_", "Run a command only while leading."),
    "acquire": LazyCommand("pgleaderlock.cli.acquire:acquire", "Try once to take a lock."),
    "status": LazyCommand("pgleaderlock.cli.status:status", "Show who holds a lock."),
    "watch": LazyCommand("pgleaderlock.cli.watch:watch", "Watch roles, leaders and changes, live."),
    "roles": LazyCommand("pgleaderlock.cli.look:roles", "List the roles and who leads each."),
    "nodes": LazyCommand("pgleaderlock.cli.look:nodes", "List the nodes and what they do."),
    "history": LazyCommand("pgleaderlock.cli.look:history", "Show who led a role, and how long nobody did."),
    "events": LazyCommand("pgleaderlock.cli.look:events", "List what has happened, and follow it."),
    "step-down": LazyCommand("pgleaderlock.cli.ask:step_down", "Ask a role's leader to give it up."),
    "drain": LazyCommand("pgleaderlock.cli.ask:drain", "Ask a node to give up all its roles."),
    "keys": LazyCommand("pgleaderlock.cli.admin:keys", "Show the keys of a name, and the query for them."),
    "doctor": LazyCommand("pgleaderlock.cli.doctor:doctor", "Check a database for what would break the promise."),
    "migrate": LazyCommand("pgleaderlock.cli.admin:migrate", "Create or upgrade the ledger's tables."),
    "epoch": LazyCommand("pgleaderlock.cli.admin:epoch", "Move a role's epoch ahead after a restore."),
    "config": LazyCommand("pgleaderlock.cli.config:config", "Check and show the settings of an election."),
    "alerts": LazyCommand("pgleaderlock.cli.alerts:alerts", "Write alerting rules for Prometheus."),
    "serve": LazyCommand("pgleaderlock.cli.serve:serve", "Serve leases with fencing tokens over HTTP."),
    "dashboard": LazyCommand("pgleaderlock.cli.serve:dashboard", "Show leaders and their history in a browser."),
    "lock": LazyCommand("pgleaderlock.cli.lock:lock", "Take, keep and look at locks of a lock server."),
    "load": LazyCommand(
        "pgleaderlock.cli.load.command:load", "Put a lock server under load, and check what it promises."
    ),
    "demo": LazyCommand(
        "pgleaderlock.cli.demo.command:demo", "Watch three nodes elect a leader and survive its death."
    ),
}


_GIVE_ONE = "--token-file FILE, or the variable PGLEADERLOCK_TOKEN"
# What to do about a lock server's 403, by a part of its error text. The first match counts.
_FORBIDDEN = (
    ("?prefix=", f"here: give --prefix with that beginning, or another token: {_GIVE_ONE}"),
    ("limited to locks", f"here: give a name that begins so, or another token: {_GIVE_ONE}"),
    ("admin token", f"here: give an admin's token: {_GIVE_ONE}"),
    ("--allowed-host", "an option of `pgleaderlock serve`; or give an address to --server"),
)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = entry.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{entry.target} is no click command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click itself would search only commands that are loaded, and makes suggestions only since version 8.2.
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            similar = difflib.get_close_matches(name, COMMANDS, n=3)
            hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own method would import each command for its help text.
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


@dataclass
class _Invocation:
    """The values of the options before the command's name."""

    debug: bool = False
    meta: Mapping[str, object] = field(default_factory=dict)
    """click's `meta`, with the values of the command's options that an error may need: see `from_variables`."""


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from pgleaderlock._base.version import VERSION  # noqa: PLC0415 - reading it takes as long as all of --help.

    click.echo(f"pgleaderlock {VERSION}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show where an error came from.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show version."
)
@click.pass_context
def _group(ctx: click.Context, debug: bool) -> None:
    """Leader election on PostgreSQL.

    Exit codes: 0 yes, 1 no, 2 usage or database, 75 not won, 76 lost, 126 and 127 as a shell, 128+n by signal n.
    """
    invocation = ctx.ensure_object(_Invocation)
    invocation.debug, invocation.meta = debug, ctx.meta


def run(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    invocation = _Invocation()
    stdout, stderr = sys.stdout, sys.stderr
    try:
        result = _group.main(
            args=None if argv is None else list(argv),
            prog_name="pgleaderlock",
            standalone_mode=False,
            obj=invocation,
        )
        sys.stdout.flush()
    except BaseException as error:  # this is the last place that can turn an error into an exit code
        if sys.stdout is not stdout:
            # The only trace of a broken pipe in click: it wraps the streams and exits with 1, which means "no" here.
            sys.stdout, sys.stderr = stdout, stderr
            return _exit_code_of(BrokenPipeError(), invocation)
        return _exit_code_of(error, invocation)
    return result if isinstance(result, int) else EXIT_OK


def _exit_code_of(error: BaseException, invocation: _Invocation) -> int:
    if isinstance(error, BrokenPipeError):
        # The reader of our output has closed the pipe, which is not an error.
        _discard_output()
        return exit_code_for_signal(signal.SIGPIPE)
    if isinstance(error, SystemExit):
        return _code_of_system_exit(error)
    if isinstance(error, click.ClickException):
        # Always 2: click's own 1 would mean "no". Its texts quote what was typed, which may be a DSN in the wrong
        # place.
        shown = io.StringIO()
        error.show(shown)
        told = without_passwords(shown.getvalue()).rstrip("\n")
        print(told + from_variables(invocation.meta, told), file=sys.stderr)
        return EXIT_USAGE
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return exit_code_for_signal(signal.SIGINT)
    # An OSError comes from the machine, such as a full disk behind our output: it is not a bug.
    if isinstance(error, PgLeaderLockError | OSError):
        if invocation.debug:
            _print_traceback(error)
        told = " ".join(str(error).split()) + _hint(error)
        print("error:", told + from_variables(invocation.meta, told), file=sys.stderr)
        code = getattr(error, "exit_code", EXIT_USAGE)
        return code if isinstance(code, int) else EXIT_USAGE
    _print_traceback(error)
    print("error: this is a defect of pgleaderlock, please report it with the lines above", file=sys.stderr)
    return EXIT_USAGE


def _hint(error: BaseException) -> str:
    """Advice for the command line, for errors whose text is written for programs."""
    if not isinstance(error, LockServerRefused):
        return ""
    if error.status == HTTPStatus.UNAUTHORIZED:
        return f" (here: {_GIVE_ONE})"
    if error.status == HTTPStatus.FORBIDDEN:
        return next((f" ({remedy})" for words, remedy in _FORBIDDEN if words in str(error)), "")
    return ""


def _code_of_system_exit(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or EXIT_OK
    print("error:", error.code, file=sys.stderr)
    return EXIT_USAGE


def _print_traceback(error: BaseException) -> None:
    traceback.print_exception(error, file=sys.stderr)


def _discard_output() -> None:
    # Python flushes once more when it exits, and would complain then.
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
