"""`pgleaderlock serve`: the lock server as a program, until a signal.

It must never serve other machines without tokens, whatever the settings say.
"""

import asyncio
import contextlib
import functools
import gc
import importlib.util
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from pgleaderlock._base.aio import first_of
from pgleaderlock._base.logging import StructuredLogger, get_logger
from pgleaderlock._config.schema import DEFAULT_CHANNEL
from pgleaderlock._config.timing import check_channel
from pgleaderlock._pg.explain import explained, hopeless
from pgleaderlock.cli.logging import LEVELS, configure
from pgleaderlock.cli.options import read_config
from pgleaderlock.cli.output import EXIT_NO, EXIT_OK, DurationType, VariableOption, dsn_option, without_passwords
from pgleaderlock.cli.reading import channel_option, namespace_option
from pgleaderlock.cli.service import Reloader
from pgleaderlock.errors import ConfigurationError, ConnectionError
from pgleaderlock.keys import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from pgleaderlock._http.server import Tls
    from pgleaderlock.dashboard.run import LedgerSettings
    from pgleaderlock.server.run import ServerSettings
    from pgleaderlock.server.store import Store

__all__ = ["allow_descriptors", "check_extra", "dashboard", "run_until_signal", "serve", "tls_of"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_NEEDED = ("httptools", "msgspec", "prometheus_client", "uvloop")
_POSITIVE = DurationType(zero_allowed=False)
_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)
# Descriptors in addition to the clients' connections: the store's files or connections, the loop's, standard streams.
_OTHER_DESCRIPTORS = 128


class Server(Protocol):
    """A server that can be run until a signal."""

    url: str

    async def start(self) -> None: ...

    async def reload(self) -> None: ...

    async def ended(self) -> None: ...

    async def stop(self) -> None: ...


def _load_config(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = read_config(path, ctx.command.params)


def _option(name: str, command: str = "SERVE", **settings: Any) -> Callable[[_Command], _Command]:
    """An option with its environment variable: --max-locks is PGLEADERLOCK_SERVE_MAX_LOCKS."""
    variable = name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, cls=VariableOption, envvar=f"PGLEADERLOCK_{command}_{variable}", **settings)


@click.command(short_help="Serve leases with fencing tokens over HTTP.")
@_option(
    "--config",
    type=_FILE,
    is_eager=True,
    expose_value=False,
    callback=_load_config,
    help="A TOML file with any of the other options.",
)
@_option("--store", default="sqlite:///locks.db", show_default=True, help="sqlite:///FILE or postgresql://…")
@_option("--import-go", type=_FILE, help="Take over locks and tokens of the Go LockServer's database.")
@_option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@_option("--port", type=click.IntRange(0, 65535), default=7420, show_default=True, help="0 takes a free one.")
@_option("--token-file", type=_FILE, help="Who may ask. Needed beyond this machine.")
@_option("--allowed-host", multiple=True, metavar="NAME", help="A name of this server, besides --host and addresses.")
@_option("--tls-cert", type=_FILE, help="Serve HTTPS with this certificate chain (PEM).")
@_option("--tls-key", type=_FILE, help="The certificate's key (PEM).")
@_option("--max-connections", type=_COUNT, default=1024, show_default=True, help="Beyond that, the idlest end.")
@_option("--max-connections-per-address", type=_COUNT, help="Of one client address.  [default: no limit]")
@_option("--max-waiters", type=_COUNT, help="Requests that wait for locks.  [default: 512, or 1/2 of the connections]")
@_option("--max-waiters-share", type=_COUNT, help="For one lock, or with one token.  [default: 3/4 of --max-waiters]")
@_option("--max-wait", type=_POSITIVE, default=60.0, help="The longest wait for a lock.  [default: 60s]")
@_option("--max-locks", type=_COUNT, default=1_000_000, show_default=True, help="Locks the store may hold.")
@_option("--strict-names", is_flag=True, help="Grant no lock whose name looks like another one's.")
@_option("--sweep-interval", type=_POSITIVE, default=1.0, help="Between two looks for expired leases.  [default: 1s]")
@_option("--header-timeout", type=_POSITIVE, default=30.0, help="For a header, and between requests.  [default: 30s]")
@_option("--body-timeout", type=_POSITIVE, default=10.0, help="For a body to arrive.  [default: 10s]")
@_option("--dsn", metavar="DSN", help="The ledger whose leaders the dashboard shows.  [default: a PostgreSQL --store]")
@_option("--namespace", default=DEFAULT_NAMESPACE, show_default=True, help="Of those leaders.")
@_option("--channel", default=DEFAULT_CHANNEL, show_default=True, help="Where their nodes notify (listen_channel).")
@_option("--access-log", is_flag=True, help="Log each request, and each operation on a lock.")
@click.option("--check", is_flag=True, help="Examine the store, change nothing, and exit.")
@_option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@_option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="INFO", show_default=True)
def serve(store: str, max_locks: int, check: bool, log_format: str, log_level: str, **options: Any) -> int:
    """Serve leases with fencing tokens over HTTP, and the dashboard at /, until SIGINT or SIGTERM.

    Listens on this machine only; beyond it, --token-file is needed.
    """
    check_extra("the lock server", "apsw", *_NEEDED)
    configure(log_level, json=log_format == "json")
    from pgleaderlock.dashboard.run import Mounted  # noqa: PLC0415 - its extra may be missing.
    from pgleaderlock.server.run import LockServer, store_from_url  # noqa: PLC0415 - as above.

    store = store.strip()
    if check:
        return asyncio.run(_check(store_from_url(store)))
    settings = _settings(options)
    allow_descriptors(settings.serving.connections_max)
    with Reloader() as signals:
        server = LockServer(
            store_from_url(store, locks_max=max_locks, waiters_max=settings.service.waiters_max),
            settings,
            Mounted(_ledger(store, options)),
            import_go=options["import_go"],
        )
        note = "with tokens" if settings.token_file is not None else "without tokens, for this machine only"
        run_until_signal(server, signals, f"(store {without_passwords(store)}, {note})")
    return EXIT_OK


async def _check(store: "Store") -> int:
    from pgleaderlock.server.run import ServerError  # noqa: PLC0415 - as above.
    from pgleaderlock.server.store import StoreError  # noqa: PLC0415

    try:
        found = await store.examine()
    except StoreError as error:
        raise ServerError(str(error)) from error
    if found.lost is not None:
        click.echo(f"store {found.store_id} is damaged: {found.lost}. Leases may be forgotten; tokens go on above them")
        return EXIT_NO
    end = "the last run did not end in order, so tokens will jump" if found.unclean else "the last run ended in order"
    click.echo(f"store {found.store_id} is sound; {end}")
    return EXIT_OK


def _ledger(store: str, options: dict[str, Any]) -> "LedgerSettings | None":
    """The database of the ledger: the given one, or else that of the locks, if that is PostgreSQL."""
    from pgleaderlock.dashboard.run import LedgerSettings  # noqa: PLC0415 - as above.

    try:
        channel = check_channel(options["channel"])
    except ConfigurationError as error:
        raise click.UsageError(str(error).replace("listen_channel", "--channel")) from error
    dsn = options["dsn"]
    if dsn is None and not store.startswith("postgres"):
        return None
    found = store if dsn is None else dsn.strip()
    return LedgerSettings(found, options["namespace"], channel, required=dsn is not None)


def run_until_signal(server: Server, signals: Reloader, said: str, log_name: str = "pgleaderlock.server") -> None:
    """Starts a server, says where it listens, and reloads or stops it when a signal asks for it."""
    import uvloop  # noqa: PLC0415 - belongs to the extra.

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server, signals, said, get_logger(log_name)))


async def _serve(server: Server, signals: Reloader, said: str, log: StructuredLogger) -> None:
    from pgleaderlock.server.run import ServerError  # noqa: PLC0415 - as above.

    # A signal must end the start even while a database does not answer.
    starting, _ = await first_of(server.start(), signals.asked())
    if starting.cancelled():
        return
    # Everything loaded by now stays: exempt it from garbage collection.
    gc.collect()
    gc.freeze()
    click.echo(f"listening on {server.url} {said}")
    log.info("server_started", url=server.url)
    await first_of(signals.asked(), server.ended(), _reload_when_asked(server, signals, log))
    if signals.signum is not None:
        log.info("stopping", signal=signal.Signals(signals.signum).name)
    await server.stop()
    log.info("server_stopped")
    if signals.signum is None:
        raise ServerError("the server has ended by itself: the log above says why")


async def _reload_when_asked(server: Server, signals: Reloader, log: StructuredLogger) -> None:
    while True:
        await signals.asked_again()
        try:
            await server.reload()
        except Exception as error:  # a running server goes on, even after a bug in the reload
            shown = str(error) if isinstance(error, ConfigurationError) else repr(error)
            log.warning("reload_failed", error=shown, remedy="all is as before: mend it and send SIGHUP again")
        else:
            log.info("reloaded")


def check_extra(what: str, *needed: str) -> None:
    missing = [name for name in needed or _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{what} needs {', '.join(missing)}: pip install 'pgleaderlock[server]'")


def tls_of(cert: Path | None, key: Path | None) -> "Tls | None":
    from pgleaderlock._http.server import Tls  # noqa: PLC0415 - as above.

    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise click.UsageError("--tls-cert and --tls-key belong together: give both")
    return Tls(cert, key)


def _settings(options: dict[str, Any]) -> "ServerSettings":
    from pgleaderlock._http.server import ServingLimits  # noqa: PLC0415 - as above.
    from pgleaderlock.server.run import ServerSettings  # noqa: PLC0415
    from pgleaderlock.server.service import ServiceLimits  # noqa: PLC0415

    return ServerSettings(
        host=options["host"].strip(),
        port=options["port"],
        token_file=options["token_file"],
        allowed_hosts=tuple(options["allowed_host"]),
        tls=tls_of(options["tls_cert"], options["tls_key"]),
        body_timeout_s=options["body_timeout"],
        access_log=options["access_log"],
        serving=ServingLimits(
            connections_max=options["max_connections"],
            connections_per_address_max=options["max_connections_per_address"],
            header_timeout_s=options["header_timeout"],
        ),
        service=ServiceLimits(
            waiters_max=options["max_waiters"]
            or max(1, min(ServiceLimits.waiters_max, options["max_connections"] // 2)),
            waiters_share=options["max_waiters_share"],
            wait_ms_max=int(options["max_wait"] * 1000),
            sweep_interval_s=options["sweep_interval"],
            strict_names=options["strict_names"],
        ),
    )


def allow_descriptors(connections_max: int) -> None:
    """Raises the process's limit of descriptors as far as allowed, and refuses a connection limit that it cannot
    serve."""
    wanted = connections_max + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
            raise ConfigurationError(
                f"--max-connections {connections_max} needs {wanted} file descriptors, and {hard} are allowed: "
                "raise the limit (ulimit -n) or lower --max-connections"
            )


# --- `pgleaderlock dashboard`: who leads, since when, and what happened last night, in a browser, until a signal.
#
# It must never serve other machines without tokens, and never write to the database.


_dashboard_option = functools.partial(_option, command="DASHBOARD")


@click.command(short_help="Show leaders and their history in a browser.")
@dsn_option
@namespace_option
@channel_option
@_dashboard_option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@_dashboard_option("--port", type=click.IntRange(0, 65535), default=7421, show_default=True, help="0 takes a free one.")
@_dashboard_option("--token-file", type=_FILE, help="Who may look. Needed beyond this machine.")
@_dashboard_option(
    "--allowed-host", multiple=True, metavar="NAME", help="A name of this server, besides --host and addresses."
)
@_dashboard_option("--tls-cert", type=_FILE, help="Serve HTTPS with this certificate chain (PEM).")
@_dashboard_option("--tls-key", type=_FILE, help="The certificate's key (PEM).")
@_dashboard_option(
    "--max-connections", type=click.IntRange(min=32), default=1024, show_default=True, help="Open pages, and some more."
)
@_dashboard_option("--access-log", is_flag=True, help="Log each request.")
@_dashboard_option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@_dashboard_option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="INFO", show_default=True)
def dashboard(dsn: str, namespace: str, channel: str, log_format: str, log_level: str, **options: Any) -> int:
    """Show who leads, since when, and what happened last night, in a browser, until SIGINT or SIGTERM.

    Reads the ledger and writes nothing. Listens on this machine only; beyond it, --token-file is needed.
    """
    check_extra("the dashboard")
    configure(log_level, json=log_format == "json")
    from pgleaderlock._http.server import ServingLimits  # noqa: PLC0415 - its extra may be missing.
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
