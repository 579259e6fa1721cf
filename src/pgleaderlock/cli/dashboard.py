"""`pgleaderlock dashboard`: who leads, since when, and what happened last night, in a browser, until a signal.

Imports click and its neighbours; the dashboard itself only when the command runs, so that its extra may be missing. It
must never serve other machines without tokens, and never write to the database.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pgleaderlock.cli._logging import LEVELS, configure
from pgleaderlock.cli._operations import channel_option, namespace_option
from pgleaderlock.cli._output import EXIT_OK, dsn_option
from pgleaderlock.cli._reach import explained, hopeless
from pgleaderlock.cli._signals import Reloader
from pgleaderlock.cli.serve import allow_descriptors, check_extra, run_until_signal, tls_of
from pgleaderlock.errors import ConnectionError

__all__ = ["dashboard"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)


def _option(name: str, **settings: Any) -> Callable[[_Command], _Command]:
    """An option with its environment variable: --token-file is PGLEADERLOCK_DASHBOARD_TOKEN_FILE."""
    variable = "PGLEADERLOCK_DASHBOARD_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, envvar=variable, **settings)


@click.command(short_help="Show leaders and their history in a browser.")
@dsn_option
@namespace_option
@channel_option
@_option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@_option("--port", type=click.IntRange(0, 65535), default=7421, show_default=True, help="0 takes a free one.")
@_option("--token-file", type=_FILE, help="Who may look. Needed beyond this machine.")
@_option("--allowed-host", multiple=True, metavar="NAME", help="A name of this server, besides --host and addresses.")
@_option("--tls-cert", type=_FILE, help="Serve HTTPS with this certificate chain (PEM).")
@_option("--tls-key", type=_FILE, help="The certificate's key (PEM).")
@_option(
    "--max-connections", type=click.IntRange(min=32), default=1024, show_default=True, help="Open pages, and some more."
)
@_option("--access-log", is_flag=True, help="Log each request.")
@_option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@_option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="INFO", show_default=True)
def dashboard(dsn: str, namespace: str, channel: str, log_format: str, log_level: str, **options: Any) -> int:
    """Show who leads, since when, and what happened last night, in a browser, until SIGINT or SIGTERM.

    Reads the ledger and writes nothing. Listens on this machine only; beyond it, --token-file is needed.
    """
    check_extra("the dashboard")
    configure(log_level, json=log_format == "json")
    from pgleaderlock._http.serving import ServingLimits  # noqa: PLC0415 - its extra may be missing.
    from pgleaderlock.dashboard.run import DashboardServer, DashboardSettings, LedgerSettings  # noqa: PLC0415

    settings = DashboardSettings(
        LedgerSettings(dsn, namespace, channel),
        host=options["host"].strip(),
        port=options["port"],
        token_file=options["token_file"],
        allowed_hosts=tuple(options["allowed_host"]),
        tls=tls_of(options["tls_cert"], options["tls_key"]),
        access_log=options["access_log"],
        serving=ServingLimits(connections_max=options["max_connections"], header_timeout_s=30.0),
    )
    allow_descriptors(settings.serving.connections_max)
    note = "with tokens" if settings.token_file is not None else "without tokens, for this machine only"
    with Reloader() as signals:
        try:
            server = DashboardServer(settings, hopeless)
            run_until_signal(server, signals, f"(namespace {namespace}, {note})", "pgleaderlock.dashboard")
        except ConnectionError as error:
            raise explained(error) from error
    return EXIT_OK
