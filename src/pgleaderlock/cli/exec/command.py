"""`pgleaderlock exec` and `pgleaderlock lock exec`: their options, checked before anything is started or taken.

The command is looked up first: a node whose command cannot run must not take the lock from a node whose command can.
`one_run` describes how leadership is won, kept and released, and what that does not promise.
"""

import asyncio
import contextlib
import os
import socket
from typing import get_args

import click

from pgleaderlock._config.timing import LockTiming
from pgleaderlock.cli.exec.one_run import (
    Job,
    SlotOptions,
    WithElection,
    WithLease,
    WithLock,
    WithSlot,
    run_once,
)
from pgleaderlock.cli.exec.supervise import find_executable
from pgleaderlock.cli.logging import LEVELS, configure
from pgleaderlock.cli.options import (
    POSITIVE,
    Contender,
    ServerOptions,
    allow_pooler_option,
    check_fenced,
    contender_options,
    fenced_config,
    fenced_options,
    lock_key_of_role,
    make_election,
    server_options,
    timing_options,
    warn,
)
from pgleaderlock.cli.output import DURATION, LockKey, optional_dsn_option, resolve_dsn
from pgleaderlock.cli.service import VARIABLES, check_probes, private_server, probe_options
from pgleaderlock.election import ElectionOptions
from pgleaderlock.keys import DEFAULT_NAMESPACE
from pgleaderlock.lock import LockOptions
from pgleaderlock.migrate import migrate
from pgleaderlock.slots import OnSlotFailure

__all__ = ["exec_", "lock_exec"]

GRACE_S = 3.0
GRACE_SHARE = 0.25
# For the election of a slot: G, and how much longer T is than the grace of the command.
SLOT_LATE_S, SLOT_LEASE_S = 5.0, 7.0


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a command only while leading.",
    epilog="Exit codes: the command's own (128+n if signal n ended it), 2 usage or database, 75 not won, 76 leadership "
    "lost, 126 and 127 as a shell.",
)
@optional_dsn_option
@contender_options(several=False)
@click.option("--wait", "wait_s", type=DURATION, default=0.0, show_default="0: one try", help="How long to compete.")
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    default=GRACE_S,
    show_default=f"{GRACE_S:g}s",
    help="How long a command that has to end has between SIGTERM and SIGKILL.",
)
@timing_options
@fenced_options
@click.option(
    "--once-per",
    type=POSITIVE,
    help="Run it once in each tick of this length, on the first host that comes: 15m, 1h, 1d. Needs the ledger.",
)
@click.option("--slot", help="Run it once for this slot, a name of your own, instead of a tick.")
@click.option("--time-zone", default="UTC", show_default=True, help="With --once-per: in which days begin.")
@click.option(
    "--on-failure",
    type=click.Choice(get_args(OnSlotFailure)),
    default="retry",
    show_default=True,
    help="With --once-per or --slot: retry runs it again if it has failed or its runner is gone (at least once), keep "
    "never does (at most once).",
)
@click.option(
    "--hold-for",
    "hold_for_s",
    type=DURATION,
    default=0.0,
    show_default="0: no longer than the command runs",
    help="Keep the lock for this long at least, from the start of a command that succeeds: for cron without a ledger.",
)
@click.option(
    "--standby-wait",
    type=DURATION,
    default=None,
    help="With --wait: wait at the server for this long per try, and win within milliseconds. 0 only tries.  "
    "[default: 10s; 0 behind a pooler and with --fenced]",
)
@allow_pooler_option
@probe_options
@click.option(
    "--embedded", is_flag=True, help="Use a private PostgreSQL of this user on this machine, started if need be."
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    show_default="ERROR, and WARNING while the command runs",
    help="What to log on standard error.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_(
    ctx: click.Context,
    *,
    dsn: str | None,
    contender: Contender,
    wait_s: float,
    grace_s: float,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    fenced: bool,
    late_threshold: float | None,
    node_id: str | None,
    hold: str | None,
    once_per: float | None,
    slot: str | None,
    time_zone: str,
    on_failure: OnSlotFailure,
    hold_for_s: float,
    standby_wait: float | None,
    allow_pooler: bool,
    metrics_port: int | None,
    metrics_host: str,
    embedded: bool,
    log_level: str | None,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND only while leading: pgleaderlock exec --name N -- COMMAND ...

    It is started when the lock is won, and stopped with its whole process group when leadership is lost. Signals are
    passed on to it. It sees PGLEADERLOCK_NAME, PGLEADERLOCK_KEY1, PGLEADERLOCK_KEY2 and PGLEADERLOCK_NODE in its
    environment; with --fenced, --once-per or --slot, also PGLEADERLOCK_ROLE, PGLEADERLOCK_EPOCH and
    PGLEADERLOCK_NAMESPACE. Durations are seconds, or 200ms, 5s, 1m.

    With --fenced a configuration counts (--config): a flag wins over the environment, that over the file.
    """
    configure(log_level or "ERROR")
    check_fenced(ctx, contender, fenced=fenced)
    check_probes(ctx, fenced=fenced, port=metrics_port)
    by_slot = _checked_slot(ctx, contender, fenced=fenced, once_per=once_per, slot=slot)
    own = {"late_threshold": late_threshold, "node_id": node_id, "hold": hold}
    config = fenced_config(ctx, contender, embedded=embedded, **own) if fenced else None
    lock_key = contender.lock_key() if config is None else lock_key_of_role(config)
    # systemd's notifications and watchdog are for this process, not for the command.
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES} | _variables(lock_key)
    find_executable(command[0], env)
    job = Job(command, env, wait_s, grace_s, log_level, hold_for_s)
    with contextlib.ExitStack() as at_end:
        private = None
        if embedded:
            private = at_end.enter_context(private_server(ctx)).dsn
            if fenced or by_slot:  # a private database, so no other program can have created the ledger
                asyncio.run(migrate(private))
        way: WithElection | WithLock | WithSlot
        if by_slot:
            given = SlotOptions(every=once_per, slot=slot, time_zone=time_zone, on_failure=on_failure)
            options = ElectionOptions(
                namespace=lock_key.namespace or DEFAULT_NAMESPACE,
                late_threshold_s=SLOT_LATE_S,
                session_lease_s=SLOT_LEASE_S + grace_s,  # a successor's gate opens after our command has had its grace
                allow_pooler=allow_pooler,
            )
            assert lock_key.name is not None
            way = WithSlot(private or resolve_dsn(contender.plain_dsn(dsn)), lock_key.name, given, options)
        elif config is not None:
            way = WithElection(
                private or config.dsn,
                lock_key,
                make_election(config, private, grace_s=grace_s, hot=wait_s > 0),
                switched_off="" if config["enabled"] else f"enabled = false: {config.values['enabled'].origin}",
                probe_host=metrics_host,
                probe_port=metrics_port,
            )
        else:
            timing = LockOptions(
                health_interval_s=health_interval,
                health_timeout_s=health_timeout,
                session_lease_s=session_lease,
                standby_wait_s=standby_wait if wait_s else 0.0,
                allow_pooler=allow_pooler,
            )
            way = WithLock(private or resolve_dsn(contender.plain_dsn(dsn)), lock_key, timing)
            _warn_of_overlap(grace_s, timing)
        return asyncio.run(run_once(job, way))


def _checked_slot(
    ctx: click.Context, contender: Contender, *, fenced: bool, once_per: float | None, slot: str | None
) -> bool:
    """Is it run by slots? What cannot be combined is refused."""
    if once_per is not None and slot is not None:
        raise click.UsageError("--once-per and --slot are two ways to say which slot is meant: give one")
    if once_per is None and slot is None:
        for name, flag in (("time_zone", "--time-zone"), ("on_failure", "--on-failure")):
            if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                raise click.UsageError(f"{flag} needs --once-per or --slot")
        return False
    if not contender.names:
        raise click.UsageError("--once-per and --slot need --name: slots belong to a name")
    if fenced:
        raise click.UsageError("--once-per and --slot are fenced by themselves: leave --fenced out")
    if slot is not None and ctx.get_parameter_source("time_zone") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--time-zone goes with --once-per, and has no effect on a --slot of your own: drop it")
    for name in ("wait_s", "standby_wait", "health_interval", "health_timeout", "session_lease"):
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            flag = next(option.opts[0] for option in ctx.command.params if option.name == name)
            raise click.UsageError(f"{flag} does not go with --once-per or --slot, where it has no effect: drop it")
    return True


def _variables(lock_key: LockKey) -> dict[str, str]:
    return {
        "PGLEADERLOCK_NAME": str(lock_key),
        "PGLEADERLOCK_KEY1": str(lock_key.key1),
        "PGLEADERLOCK_KEY2": str(lock_key.key2),
        "PGLEADERLOCK_NODE": f"{socket.gethostname()}/{os.getpid()}",
    }


def _warn_of_overlap(grace_s: float, timing: LockOptions) -> None:
    found = LockTiming.derived(timing["health_interval_s"], timing["health_timeout_s"], timing["session_lease_s"])
    margin_s = found.margin_s
    if grace_s > margin_s:
        warn(
            f"--grace {grace_s:g}s is longer than --session-lease less --health-interval and --health-timeout, "
            f"{margin_s:g}s: after a cut connection a successor may start while this command is still ending; lower "
            "--grace or raise --session-lease"
        )


@click.command(
    "exec",
    short_help="Run a command while holding a lock.",
    epilog="Exit codes: the command's own (128+n if signal n ended it), 2 usage or server, 75 not won, 76 lease lost, "
    "126 and 127 as a shell.",
)
@server_options
@click.option("--ttl", "ttl_s", type=POSITIVE, default=30.0, help="How long a lease lasts unrenewed.  [default: 30s]")
@click.option("--wait", "wait_s", type=DURATION, default=0.0, help="Wait for its turn, up to this long.  [default: 0]")
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    help="How long a command that has to end has between SIGTERM and SIGKILL.  [default: 3s, at most --ttl / 4]",
)
@click.option("--owner", help="Who we are.  [default: host, pid and a random part]")
@click.option(
    "--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="ERROR", help="What to log on stderr."
)
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def lock_exec(
    *,
    server: ServerOptions,
    ttl_s: float,
    wait_s: float,
    grace_s: float | None,
    owner: str | None,
    log_level: str,
    name: str,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND while holding the lock NAME: pgleaderlock lock exec NAME -- COMMAND ...

    The lease is renewed meanwhile. When it is lost, the command is stopped with its whole process group. Signals are
    passed on to it. It sees PGLEADERLOCK_LOCK_NAME, PGLEADERLOCK_FENCING_TOKEN, PGLEADERLOCK_OWNER_ID and
    PGLEADERLOCK_LEASE_ID in its environment, and no bearer token.
    """
    configure(log_level)
    if grace_s is None:
        grace_s = min(GRACE_S, ttl_s * GRACE_SHARE)
    if grace_s > ttl_s / 2:
        raise click.UsageError(f"--grace {grace_s:g}s is longer than half of --ttl {ttl_s:g}s: raise --ttl")
    env = {key: value for key, value in os.environ.items() if key != "PGLEADERLOCK_TOKEN"}
    find_executable(command[0], env)
    job = Job(command, env, wait_s, grace_s, log_level)
    return asyncio.run(run_once(job, WithLease(server, owner, name, ttl_s)))
