"""`pgleaderlock doctor`: does the lock keep its promises on this database? Checks, rehearses, and prints what to do.

`_Examination` collects the facts: through a plain connection with the user's DSN, through a second one with a leader's
settings, and by rehearsing a leader's term on a lock that no other program uses. The `check_*` functions judge them,
one per subject, without I/O, clock or output. There are three verdicts. *unsafe*: the lock would not exclude other
sessions, or could not be held or won back. *warning*: it works, but at a cost or only for now. *ok*: there is nothing
to do. Each finding that is not ok says what to do.

It must leave no change behind: no setting is changed on a connection that a pooler might give to another client.
"""

import asyncio
import datetime as dt
import enum
import ipaddress
import os
import re
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import click

from pgleaderlock import history
from pgleaderlock._base.version import VERSION
from pgleaderlock._config.load import timing_of
from pgleaderlock._config.timing import LockTiming, Timing
from pgleaderlock._election.ledger import LEASES_SINCE
from pgleaderlock._pg.conninfo import ConnectionSettings, connect_params
from pgleaderlock._pg.explain import Unreachable
from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock._pg.session import VERSION_MIN, DedicatedSession
from pgleaderlock._pg.statements import statement
from pgleaderlock.cli.options import allow_pooler_option, given, load_config, make_lock, timing_options
from pgleaderlock.cli.output import (
    EXIT_NO,
    EXIT_OK,
    EXIT_USAGE,
    LockKey,
    dsn_option,
    json_option,
    print_json,
    print_table,
    remembered,
    remembered_option,
    stdout_console,
)
from pgleaderlock.config import Config
from pgleaderlock.errors import ConnectionError, LockError, SchemaError
from pgleaderlock.keys import KeyPair, key_pair
from pgleaderlock.migrate import LEDGER_VERSION

__all__ = ["Finding", "LockTiming", "Setting", "Verdict", "doctor", "worst"]

NAME = "pgleaderlock doctor"
ROUND_TRIPS = 11
# At this width remedies get a column of their own.
WIDE_COLUMNS = 130
CHECK_COLUMNS = 20

# A full lock table refuses new connections to every client, so there must be room for a peak.
LOCK_SLOTS_FREE_UNSAFE, LOCK_SLOTS_FREE_WARNING = 0.10, 0.30
# One connection for the session, one for its successor while the server still has the old one.
CONNECTIONS_FREE_UNSAFE, CONNECTIONS_FREE_WARNING = 2, 5
# The slowest of a few round trips against the timeout that would count as a loss.
ROUND_TRIP_PART_WARNING = 0.25
# A wait at the server is cut into slices of half of deadlock_timeout: below this value, waiting is mere polling.
DEADLOCK_TIMEOUT_S_MIN = 0.2
CLOCK_S_MAX = 1.0

_OVERRIDDEN = ("idle_session_timeout", "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
_DIRECT = "connect to PostgreSQL itself"
_ORIGINS: Mapping[str, str] = {
    "configuration file": "the server's configuration",
    "command line": "the server's command line",
    "global": "the server",
    "database": "ALTER DATABASE",
    "user": "ALTER ROLE",
    "database user": "ALTER ROLE … IN DATABASE",
    "client": "the DSN or PGOPTIONS",
    "session": "the pooler or an earlier client",
    "default": "default",
}


class Verdict(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    UNSAFE = "unsafe"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""

    @classmethod
    def graded(cls, check: str, found: str, remedy: str, *, unsafe: bool = False, warning: bool = False) -> Self:
        """A finding that is unsafe, or else a warning, or else ok without the remedy."""
        if not unsafe and not warning:
            return cls(check, found)
        return cls(check, found, Verdict.UNSAFE if unsafe else Verdict.WARNING, remedy)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of pg_settings."""

    setting: str
    unit: str | None
    source: str

    @property
    def milliseconds(self) -> int:
        return int(self.setting) * (1000 if self.unit == "s" else 1)


def worst(findings: Sequence[Finding]) -> Verdict:
    """The verdict on all of them together."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


@click.command(short_help="Check a database for what would break the promise.")
@remembered_option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Check for the nodes of this configuration: its database, its timing, and the ledger that they need.",
)
@dsn_option
@timing_options
@allow_pooler_option
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    *,
    dsn: str,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    allow_pooler: bool,
    as_json: bool,
) -> int:
    """Check whether this database keeps what the lock promises, and say what to do where it does not.

    Give the DSN, the role and the settings that your nodes use, or their configuration: then the ledger's version and
    grants, and the clock are checked, too. Nothing is changed; a lock that nobody else uses is taken, refused to a
    second session, and released. A clock that differs is a warning only: no promise depends on it.

    Exit codes: 0 nothing is unsafe, 1 something is, 2 the database cannot be reached, or the configuration is wrong.
    """
    # Created only to check the relations between the settings.
    make_lock(
        dsn,
        LockKey(0, 0),
        health_interval_s=health_interval,
        health_timeout_s=health_timeout,
        session_lease_s=session_lease,
    )
    timing = LockTiming.derived(health_interval, health_timeout, session_lease)
    (path,) = remembered(ctx, "config")
    config = None if path is None else load_config(path, roles=())
    if config is not None:
        for option in ("health_interval", "health_timeout", "session_lease"):
            if given(ctx, option):
                raise click.UsageError(f"--{option.replace('_', '-')} is what the configuration says: drop one of them")
        allow_pooler = allow_pooler or config["allow_pooler"]
        of_election = timing_of(config.values)
        timing = LockTiming(of_election.heartbeat_interval_s, of_election.statement_timeout_s, of_election.lease_s)
    try:
        findings = asyncio.run(_Examination(dsn, timing, allow_pooler=allow_pooler, config=config).run())
    except Unreachable as error:
        if not as_json:
            raise
        print_json({"verdict": "unreachable", "reason": error.kind, "error": str(error)})
        return EXIT_USAGE
    if as_json:
        shown = [{**asdict(finding), "remedy": finding.remedy or None} for finding in findings]
        print_json({"verdict": worst(findings), "findings": shown})
    else:
        _print(findings)
    return EXIT_NO if worst(findings) is Verdict.UNSAFE else EXIT_OK


class _Examination:
    """Collects the facts. A failed query costs one finding, not the report."""

    def __init__(self, dsn: str, timing: LockTiming, *, allow_pooler: bool, config: Config | None = None) -> None:
        self._dsn = dsn
        self._config = config
        self._timing = timing
        self._allow_pooler = allow_pooler
        self._leased = config is not None and config["hold"] == "lease"
        self._shared: bool | None = None
        """Did a second client get the first one's backend? None: there is no pooler, or it could not be found out."""
        self._findings: list[Finding] = []
        self._settings = ConnectionSettings(
            application_name=NAME, statement_timeout_s=timing.health_timeout_s, lease_s=timing.lease_s
        )

    async def run(self) -> list[Finding]:
        began = time.monotonic()
        try:
            look = await PlainConnection.open(self._dsn, NAME)
        except Unreachable as error:
            if error.kind != "pooler":
                raise
            self._add(check_pooler(["it refuses the DSN's options"], shared=None, allowed=False, leased=False))
            return self._findings
        async with look:
            took_ms = (time.monotonic() - began) * 1000
            self._add(Finding("reachable", f"connected in {took_ms:.0f} ms"))
            await self._examine(look)
        return self._findings

    async def _examine(self, look: PlainConnection) -> None:
        server = await look.row("server_facts")
        self._add(check_version(server), check_primary(server))
        plain = await _settings_of(look)
        fit = all(finding.verdict is Verdict.OK for finding in self._findings)
        ours, refusals = await self._with_our_settings() if fit else (None, [])
        pooler = await self._pooler(look, server, refusals)
        timeouts = [] if self._leased else check_timeouts(plain, ours, self._timing)
        self._add(pooler, *timeouts, *check_durability(plain))
        role = server["role"]
        await self._ask(look, "privileges", "doctor_privileges", lambda row: check_privileges(row, role))
        await self._ask(look, "lock slots", "doctor_locks", lambda row: [check_lock_slots(plain, row["used"])])
        await self._ask(look, "connections", "doctor_connections", lambda row: [check_connections(plain, row)])
        self._add(check_round_trip(await _round_trips_s(look), self._timing))
        if (finding := check_deadlock_timeout(plain)) is not None:
            self._add(finding)
        if ours is not None:
            self._add(check_connection_check(ours))
        sslmode = look.params.get("sslmode") or os.environ.get("PGSSLMODE")
        self._add(check_encryption(address=look.address, encrypted=look.encrypted, sslmode=sslmode))
        mode = ("transaction" if self._shared else "session") if refusals else None
        await self._ask(
            look, "engine", "doctor_engine", lambda row: [check_engine(row["version"], row["families"], mode)]
        )
        if self._config is not None:
            self._add(check_timing(timing_of(self._config.values)))
            ledger_serves = await self._ledger(look, role)
            await self._clock(look)
            if self._leased and fit and ledger_serves:
                await self._rehearse_lease(look)
        if not self._leased and fit and pooler.verdict is not Verdict.UNSAFE:
            await self._rehearse(pooled=pooler.verdict is Verdict.WARNING)

    def _add(self, *findings: Finding) -> None:
        self._findings += findings

    async def _with_our_settings(self) -> tuple[Mapping[str, Setting] | None, list[str]]:
        """The settings of a session with our settings, or why a pooler refuses them."""
        try:
            async with await PlainConnection.open_with(connect_params(self._dsn, self._settings)) as look:
                return await _settings_of(look), []
        except Unreachable as error:
            if error.kind == "pooler":
                return None, ["our startup options are refused"]
            self._add(Finding("our settings", f"refused: {error}", Verdict.UNSAFE, "let this role set them"))
        except ConnectionError as error:
            self._add(unknown("our settings", str(error)))
        return None, []

    async def _pooler(self, look: PlainConnection, server: Mapping[str, Any], refusals: list[str]) -> Finding:
        evidence = [*refusals]
        if server["backend_pid"] != look.protocol_pid:
            evidence.append("the protocol's pid is not the backend's")
        self._shared = await look.backend_is_shared() if evidence else None
        return check_pooler(evidence, shared=self._shared, allowed=self._allow_pooler, leased=self._leased)

    async def _ask(
        self, look: PlainConnection, check: str, statement: str, judge: Callable[[Mapping[str, Any]], list[Finding]]
    ) -> None:
        try:
            row = await look.row(statement)
        except ConnectionError as error:
            self._add(unknown(check, str(error)))
        else:
            self._add(*judge(row))

    async def _ledger(self, look: PlainConnection, role: str) -> bool:
        """Check what an election needs beyond a plain lock; False if no node could start."""
        try:
            facts = await history.ledger_facts(look)
            names = re.findall(r"pgleaderlock\.(\w+)", statement("grants").decode().partition("GRANT EXECUTE")[2])
            missing = (await look.row("doctor_grants", names=names))["missing"]
        except SchemaError as error:
            self._add(Finding("ledger", str(error), Verdict.UNSAFE, "no node of this configuration can start"))
        except ConnectionError as error:
            self._add(unknown("ledger", str(error)))
        else:
            self._add(*check_ledger(facts.version, missing, role, leased=self._leased))
            return not missing and (not self._leased or facts.version >= LEASES_SINCE)
        return False

    async def _clock(self, look: PlainConnection) -> None:
        sent_at = dt.datetime.now(dt.UTC)
        try:
            server_at = (await look.row("history_now"))["now"]
        except ConnectionError as error:
            self._add(unknown("clock", str(error)))
            return
        trip = dt.datetime.now(dt.UTC) - sent_at
        self._add(check_clock((server_at - sent_at - trip / 2).total_seconds(), trip.total_seconds() / 2))

    async def _rehearse_lease(self, look: PlainConnection) -> None:
        """One lease takes a role, and a second one must not get it; in a transaction that is rolled back."""
        role = uuid.uuid4().hex
        key1, key2 = key_pair(role, NAME)
        taking = {"roles": [role], "key1": [key1], "key2": [key2]}
        outcomes = []
        began = time.monotonic()
        try:
            async with look.rolled_back():
                for node in ("first", "second"):
                    owner = await self._open_lease(look, node)
                    await look.rows("lease_begin", **owner, number=1)
                    await look.rows("lease_lock", session_id=owner["session_id"], **taking)
                    (bump,) = await look.rows(
                        "ledger_bump", session_id=owner["session_id"], **taking, wait_ms=0, channel=NAME
                    )
                    await look.rows("lease_done", **owner)
                    outcomes.append(bump["outcome"])
        except ConnectionError as error:
            self._add(check_lease(str(error), [], 0.0))
        else:
            self._add(check_lease(None, outcomes, time.monotonic() - began))

    async def _open_lease(self, look: PlainConnection, node: str) -> dict[str, object]:
        key = str(uuid.uuid4())
        row = await look.row(
            "lease_open",
            namespace=NAME,
            instance=str(uuid.uuid4()),
            key=key,
            previous=None,
            node_id=node,
            host=node,
            os_pid=os.getpid(),
            holder_identity=f"{NAME} {node}",
            gate_s=self._timing.lease_s / 2,
            lease_s=self._timing.lease_s,
            candidate=True,
            library_version=VERSION,
            draining=False,
        )
        return {"session_id": row["session_id"], "key": key}

    async def _second_taken(self, keys: KeyPair, *, pooled: bool) -> None:
        """Can another session take the lock that is held now? On some engines it can."""
        try:
            second = await DedicatedSession.open(self._dsn, replace(self._settings, allow_pooler=pooled))
            try:
                taken = await second.take(keys)
                if taken:
                    await second.unlock(keys)
            finally:
                await second.close()
        except (ConnectionError, LockError) as error:
            self._add(unknown("exclusion", str(error)))
        else:
            self._add(check_exclusion(taken=taken))

    async def _rehearse(self, *, pooled: bool) -> None:
        """Rehearse a whole term on a lock with a random name, which a second session must not get meanwhile."""
        keys = key_pair(uuid.uuid4().hex, NAME)
        began = time.monotonic()
        try:
            session = await DedicatedSession.open(self._dsn, replace(self._settings, allow_pooler=pooled))
            try:
                taken = await session.take(keys)
                if taken:
                    await self._second_taken(keys, pooled=pooled)
                await session.probe(keys)
                await session.unlock(keys)
            finally:
                await session.close()
        except (ConnectionError, LockError) as error:
            refusal: str | None = str(error)
        else:
            refusal = None if taken else "the lock was not granted"
        self._add(check_rehearsal(refusal, time.monotonic() - began))


async def _settings_of(look: PlainConnection) -> dict[str, Setting]:
    rows = await look.rows("doctor_settings")
    return {row["name"]: Setting(row["setting"], row["unit"], row["source"]) for row in rows}


async def _round_trips_s(look: PlainConnection) -> list[float]:
    trips_s = []
    for _ in range(ROUND_TRIPS):
        sent_at = time.monotonic()
        await look.rows("doctor_round_trip")
        trips_s.append(time.monotonic() - sent_at)
    return trips_s


_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.UNSAFE: "bold red"}


def _print(findings: Sequence[Finding]) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.text import Text  # noqa: PLC0415

    console = stdout_console()
    wide = console.width >= WIDE_COLUMNS
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("verdict", no_wrap=True)
    table.add_column("check", overflow="fold", max_width=None if wide else CHECK_COLUMNS)
    table.add_column("found", overflow="fold")
    if wide:
        table.add_column("remedy", overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        found = finding.found if wide or not finding.remedy else f"{finding.found}\n-> {finding.remedy}"
        row = [verdict, Text(finding.check), Text(found)]
        table.add_row(*row, *([Text(finding.remedy)] if wide else []))
    print_table(console, table)
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    console.print(f"{counts[Verdict.UNSAFE]} unsafe, {counts[Verdict.WARNING]} warnings, {counts[Verdict.OK]} ok")


# --- Judgements


def check_version(server: Mapping[str, Any]) -> Finding:
    remedy = "use PostgreSQL 14 or newer: older ones cannot end a silent session (idle_session_timeout)"
    found = f"PostgreSQL {server['version'].split(' ')[0]}"
    return Finding.graded("version", found, remedy, unsafe=server["version_num"] < VERSION_MIN)


def check_primary(server: Mapping[str, Any]) -> Finding:
    standby = server["in_recovery"]
    remedy = "a lock on a standby excludes nobody: connect to the primary, or list all hosts in the DSN"
    return Finding.graded("primary", "this server is a standby" if standby else "yes", remedy, unsafe=standby)


def check_pooler(evidence: Sequence[str], *, shared: bool | None, allowed: bool, leased: bool) -> Finding:
    """`shared`: did a second client get the first one's backend? None: it could not be found out."""
    if not evidence:
        return Finding("pooler", "none: the backend is ours alone")
    found = "; ".join(evidence)
    if leased:
        return Finding("pooler", f"{found}; hold=lease needs no session of its own")
    if shared:
        remedy = (
            f"two clients get one server session, where a lock excludes nobody: {_DIRECT}, or use pool_mode=session; "
            "an election works through it with hold=lease"
        )
        return Finding("pooler", f"{found}; backends are shared", Verdict.UNSAFE, remedy)
    if shared is None:
        return Finding("pooler", found, Verdict.UNSAFE, f"the pooler's mode could not be found out: {_DIRECT}")
    if allowed:
        remedy = f"keep pool_mode=session, and server timeouts of the pooler longer than the lease; or {_DIRECT}"
        return Finding("pooler", f"{found}; backends are not shared now", Verdict.WARNING, remedy)
    remedy = f"{_DIRECT}; or, if pool_mode is session, use --allow-pooler (allow_pooler=True): it is refused otherwise"
    return Finding("pooler", f"{found}; backends are not shared now", Verdict.UNSAFE, remedy)


def check_timeouts(
    plain: Mapping[str, Setting], ours: Mapping[str, Setting] | None, timing: LockTiming
) -> list[Finding]:
    """Judge the timeouts that the DBA has set, and those that apply to a session with our settings (`ours`)."""
    findings = []
    for name in _OVERRIDDEN:
        if name in plain and plain[name].milliseconds:
            effective = ours.get(name) if ours is not None else None
            findings.append(_overridden_timeout(name, plain[name], effective, timing, known=ours is not None))
    if "transaction_timeout" in plain and plain["transaction_timeout"].milliseconds:
        findings.append(_transaction_timeout(plain["transaction_timeout"], timing))
    return findings or [Finding("timeouts", "none set by the DBA")]


def _overridden_timeout(
    name: str, dba: Setting, effective: Setting | None, timing: LockTiming, *, known: bool
) -> Finding:
    limit_ms = timing.health_timeout_s * 1000
    if dba.source == "client":
        # Set in the DSN or PGOPTIONS: these come last, and override ours.
        found = f"{_duration(dba)}, set in the DSN or PGOPTIONS"
        if dba.milliseconds < limit_ms:
            remedy = f"shorter than the health timeout ({timing.health_timeout_s:g} s): a slow answer becomes a loss"
            return Finding(name, found, Verdict.WARNING, f"{remedy}; remove it there")
        return Finding(name, found)
    found = f"{_duration(dba)}, set by {_origin(dba)}"
    if not known:
        return Finding(name, f"{found}; overridden by ours once a session can be opened")
    if effective is None or effective.source != "client":
        remedy = f"our own value does not reach the session: {_DIRECT}, or set {name} to 0 for this role"
        return Finding(name, f"{found}; not overridden", Verdict.UNSAFE, remedy)
    return Finding(name, f"{found}; ours overrides it")


def _transaction_timeout(dba: Setting, timing: LockTiming) -> Finding:
    found = f"{_duration(dba)}, set by {_origin(dba)}"
    if dba.milliseconds <= timing.health_timeout_s * 1000:
        remedy = (
            "it ends the session of a leader whose statement is slow, and nothing of ours overrides it: "
            "ALTER ROLE … SET transaction_timeout = 0"
        )
        return Finding("transaction_timeout", found, Verdict.UNSAFE, remedy)
    return Finding("transaction_timeout", f"{found}; longer than any statement of ours")


_DURABILITY = {
    "fsync": (
        Verdict.UNSAFE,
        "after a crash of the machine the database may be damaged or forget epochs: set fsync = on",
    ),
    "full_page_writes": (
        Verdict.WARNING,
        "a crash of the machine may damage pages: set full_page_writes = on unless the disk writes 8 kB atomically",
    ),
    "synchronous_commit": (
        Verdict.WARNING,
        "the lock does not need it, but after a crash commits are forgotten, epochs too: set it to local or more",
    ),
}


def check_durability(plain: Mapping[str, Setting]) -> list[Finding]:
    return [
        Finding(name, f"off, set by {_origin(plain[name])}", verdict, remedy)
        if plain[name].setting == "off"
        else Finding(name, plain[name].setting)
        for name, (verdict, remedy) in _DURABILITY.items()
        if name in plain
    ]


def check_privileges(row: Mapping[str, Any], role: str) -> list[Finding]:
    quoted = '"' + role.replace('"', '""') + '"'
    to_lock = (
        "GRANT EXECUTE ON FUNCTION pg_try_advisory_lock(int,int), pg_advisory_lock(int,int), "
        f"pg_advisory_unlock(int,int) TO {quoted}"
    )
    to_terminate = (
        "after a cut our own old session keeps the lock until its lease ends: "
        f"GRANT EXECUTE ON FUNCTION pg_terminate_backend(int,bigint) TO {quoted}"
    )
    to_look = f"waiting at the server and `status` need them: GRANT SELECT ON pg_locks, pg_stat_activity TO {quoted}"
    seen = (
        "yes, with all details" if row["sees_others"] else "yes; addresses of other roles only with pg_read_all_stats"
    )
    may_lock, may_terminate, may_look = row["may_lock"], row["may_terminate"], row["may_look"]
    return [
        Finding.graded("may take locks", _yes_no(may_lock), to_lock, unsafe=not may_lock),
        Finding.graded("may end own sessions", _yes_no(may_terminate), to_terminate, warning=not may_terminate),
        Finding.graded("may see locks", seen if may_look else "no", to_look, unsafe=not may_look),
    ]


def check_lock_slots(plain: Mapping[str, Setting], used: int) -> Finding:
    per_transaction, connections, prepared = (
        int(plain[name].setting)
        for name in ("max_locks_per_transaction", "max_connections", "max_prepared_transactions")
    )
    slots = per_transaction * (connections + prepared)
    free = max(0, slots - used)
    found = f"about {free} of {slots} free"
    remedy = "raise max_locks_per_transaction (needs a restart), or hold fewer locks: a full table refuses connections"
    return Finding.graded(
        "lock slots",
        found,
        remedy,
        unsafe=free < slots * LOCK_SLOTS_FREE_UNSAFE,
        warning=free < slots * LOCK_SLOTS_FREE_WARNING,
    )


def check_connections(plain: Mapping[str, Setting], row: Mapping[str, Any]) -> Finding:
    """Judge the free connections by the tightest of the three limits. The doctor's own connection counts as free (+
    1)."""
    reserved = sum(
        int(plain[name].setting)
        for name in ("superuser_reserved_connections", "reserved_connections")
        if name in plain and not row["superuser"]
    )
    limits = {"the server": int(plain["max_connections"].setting) - reserved - row["used"] + 1}
    if not row["superuser"]:
        if row["database_limit"] >= 0:
            limits["the database"] = row["database_limit"] - row["database_used"] + 1
        if row["role_limit"] >= 0:
            limits["the role"] = row["role_limit"] - row["role_used"] + 1
    where = min(limits, key=lambda name: limits[name])
    free = max(0, limits[where])
    found = f"{free} free for this role (limit of {where})"
    remedy = {
        "the server": "close connections or raise max_connections",
        "the database": "ALTER DATABASE … CONNECTION LIMIT with a higher number",
        "the role": "ALTER ROLE … CONNECTION LIMIT with a higher number",
    }[where] + ": a leader needs one, and a second one for a moment after a cut"
    return Finding.graded(
        "connections",
        found,
        remedy,
        unsafe=free < CONNECTIONS_FREE_UNSAFE,
        warning=free < CONNECTIONS_FREE_WARNING,
    )


def check_round_trip(trips_s: Sequence[float], timing: LockTiming) -> Finding:
    slowest_s = max(trips_s)
    found = (
        f"median {statistics.median(trips_s) * 1000:.1f} ms, max {slowest_s * 1000:.1f} ms of {len(trips_s)}; "
        f"health every {timing.health_interval_s:g} s, timeout {timing.health_timeout_s:g} s, "
        f"lease {timing.lease_s:g} s"
    )
    if slowest_s >= timing.health_timeout_s:
        remedy = "slower than the health timeout, so leadership is lost again and again: raise --health-timeout"
        return Finding("round trip", found, Verdict.UNSAFE, remedy)
    if slowest_s >= timing.health_timeout_s * ROUND_TRIP_PART_WARNING:
        return Finding("round trip", found, Verdict.WARNING, "close to the health timeout: raise --health-timeout")
    return Finding("round trip", found)


def check_deadlock_timeout(plain: Mapping[str, Setting]) -> Finding | None:
    if (setting := plain.get("deadlock_timeout")) is None:
        return None
    slice_ms = setting.milliseconds // 2
    found = f"{_duration(setting)}: hot standbys wait in slices of up to {slice_ms} ms"
    remedy = "a standby that waits at the server asks that often: set deadlock_timeout to 1s, or --standby-wait 0"
    return Finding.graded(
        "deadlock_timeout", found, remedy, warning=setting.milliseconds < DEADLOCK_TIMEOUT_S_MIN * 1000
    )


def check_connection_check(ours: Mapping[str, Setting]) -> Finding:
    setting = ours.get("client_connection_check_interval")
    if setting is None or setting.milliseconds == 0:
        remedy = "a dead waiter may be granted the lock and keep it for a lease: use a server on Linux"
        return Finding("dead clients", "not noticed in mid-statement", Verdict.WARNING, remedy)
    return Finding("dead clients", f"noticed within {_duration(setting)} (client_connection_check_interval)")


def check_encryption(*, address: str, encrypted: bool, sslmode: str | None) -> Finding:
    if not address or ipaddress.ip_address(address.split("%", maxsplit=1)[0]).is_loopback:
        return Finding("encryption", "not needed: the connection stays on this machine")
    found = ("TLS" if encrypted else "none") + f", sslmode {sslmode or 'not set'}"
    remedy = "passwords and replies can be read on the way, or will be after a downgrade: set sslmode=verify-full"
    return Finding.graded("encryption", found, remedy, warning=sslmode not in ("require", "verify-ca", "verify-full"))


def check_timing(timing: Timing) -> Finding:
    """Show the timing of the nodes. The relations were checked with the configuration."""
    durations = f"heartbeat every {timing.heartbeat_interval_s:g} s, G {timing.gate_s:g} s, T {timing.lease_s:g} s"
    return Finding("timing", durations)


# Names in a server's version text, and the row in docs/engines.md for each.
_SAYS = (("CockroachDB", "CockroachDB, Aurora DSQL"), ("-YB-", "YugabyteDB"))
_FAMILIES = (
    ("aurora", "Amazon Aurora PostgreSQL"),
    ("rds", "Amazon RDS for PostgreSQL"),
    ("alloydb", "Google Cloud SQL, AlloyDB"),
    ("cloudsql", "Google Cloud SQL, AlloyDB"),
    ("azure", "Azure Database for PostgreSQL"),
    ("neon", "Neon, direct address"),
    ("citus", "Citus"),
)
_TESTED_VERSIONS = (15, 18)


def check_engine(version: str, families: Sequence[str], pool_mode: str | None) -> Finding:
    """The row of docs/engines.md for this server; `pool_mode` is that of a PgBouncer in between."""
    says = next((row for word, row in _SAYS if word in version), None)
    family = next((row for name, row in _FAMILIES if name in families), None)
    major = re.match(r"PostgreSQL (\d+)", version)
    if says is not None:
        row = says
    elif family is not None:
        row = family
    elif major is None:
        return Finding("engine", f"{version[:80]}: no row of docs/engines.md is about it")
    else:
        number = int(major[1])
        row = f"PostgreSQL {number}" if number in _TESTED_VERSIONS else "PostgreSQL 14, 16, 17"
    rows = [row] if pool_mode is None else [row, f"PgBouncer, `pool_mode = {pool_mode}`"]
    return Finding("engine", f"see docs/engines.md, {' and '.join(rows)}")


def check_lease(refusal: str | None, outcomes: Sequence[str], took_s: float) -> Finding:
    """Judge the rehearsal in which two leases asked for one role; `refusal` says what failed."""
    if refusal is not None:
        return Finding("rehearsal", f"refused: {refusal}", Verdict.UNSAFE, "nothing leads until this works")
    if list(outcomes) == ["won", "not_held"]:
        took = f"{took_s * 1000:.0f} ms"
        return Finding("rehearsal", f"a lease took a role, and a second one was refused it, in {took}")
    remedy = "leases exclude nobody here, so every node would lead: use PostgreSQL itself"
    return Finding("rehearsal", f"two leases asked for one role: {', '.join(outcomes)}", Verdict.UNSAFE, remedy)


def check_ledger(version: int, missing: Sequence[str], role: str, *, leased: bool) -> list[Finding]:
    shown = ", ".join(missing)
    too_old = leased and version < LEASES_SINCE
    return [
        Finding.graded(
            "ledger",
            f"version {version}",
            f"hold=lease needs version {LEASES_SINCE}: run `pgleaderlock migrate`"
            if too_old
            else f"this library has version {LEDGER_VERSION}: run `pgleaderlock migrate` when every node is upgraded",
            unsafe=too_old,
            warning=version != LEDGER_VERSION,
        ),
        Finding.graded(
            "grants",
            f"{role} may not call {shown}" if missing else f"{role} may do what a node does",
            f"let the ledger's owner run `pgleaderlock migrate --grant-to {role}`",
            unsafe=bool(missing),
        ),
    ]


def check_clock(ahead_s: float, uncertain_s: float) -> Finding:
    """`ahead_s`: how far the server's clock is ahead."""
    found = f"the server's is {abs(ahead_s) * 1000:.0f} ms {'ahead' if ahead_s > 0 else 'behind'}"
    remedy = "no promise depends on it, but times in logs and history will not agree: let both machines use NTP"
    return Finding.graded("clock", found, remedy, warning=abs(ahead_s) - uncertain_s > CLOCK_S_MAX)


def check_exclusion(*, taken: bool) -> Finding:
    found = "a second session was granted the same lock" if taken else "a second session was refused the same lock"
    remedy = "advisory locks exclude nobody here, so every node would lead: use PostgreSQL itself"
    return Finding.graded("exclusion", found, remedy, unsafe=taken)


def check_rehearsal(refusal: str | None, took_s: float) -> Finding:
    """Judge the rehearsal of a term, in which a lock was taken, kept and released; `refusal` says what failed."""
    if refusal is None:
        return Finding("rehearsal", f"a lock was taken, probed and released in {took_s * 1000:.0f} ms")
    return Finding("rehearsal", f"refused: {refusal}", Verdict.UNSAFE, "nothing leads until this works")


def unknown(check: str, reason: str) -> Finding:
    """The finding for a fact that could not be read."""
    return Finding(check, f"cannot be found out: {reason}", Verdict.WARNING, "let this role read it, or ask your DBA")


def _origin(setting: Setting) -> str:
    return _ORIGINS.get(setting.source, setting.source)


def _duration(setting: Setting) -> str:
    milliseconds = setting.milliseconds
    if milliseconds == 0:
        return "off"
    return f"{milliseconds / 1000:g} s" if milliseconds >= 1000 else f"{milliseconds} ms"


def _yes_no(fact: bool) -> str:
    return "yes" if fact else "no"
