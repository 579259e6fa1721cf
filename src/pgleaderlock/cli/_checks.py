"""What `doctor` thinks of what it has found: pure judgements, one function a subject, from facts to findings.

Three verdicts. *unsafe*: with this, the lock would not exclude others, or could not be held or won back. *warning*: it
works, with a cost or for now. *ok*: nothing to do. Each finding that is not ok says what to do.

Imports the standard library only: no I/O, no clock, no printing.
"""

import enum
import ipaddress
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Finding", "Setting", "Timing", "Verdict", "worst"]

# A full lock table refuses new connections to everybody, so there must be room for a rush.
LOCK_SLOTS_FREE_UNSAFE, LOCK_SLOTS_FREE_WARNING = 0.10, 0.30
# One for the session, one for its successor while the server still has the old one.
CONNECTIONS_FREE_UNSAFE, CONNECTIONS_FREE_WARNING = 2, 5
# The slowest of a few round trips against the timeout that would count as a loss.
ROUND_TRIP_PART_WARNING = 0.25
# Waiting at the server goes on in slices of half of deadlock_timeout: below this, waiting is polling.
DEADLOCK_TIMEOUT_S_MIN = 0.2
VERSION_NUM_MIN = 140000

_DIRECT = "connect to PostgreSQL itself"


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


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of pg_settings."""

    setting: str
    unit: str | None
    source: str

    @property
    def milliseconds(self) -> int:
        return int(self.setting) * (1000 if self.unit == "s" else 1)


@dataclass(frozen=True, slots=True)
class Timing:
    """The settings that the database is to be judged against."""

    health_interval_s: float
    health_timeout_s: float
    lease_s: float


def worst(findings: Sequence[Finding]) -> Verdict:
    """The verdict on all of them together."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def check_version(server: Mapping[str, Any]) -> Finding:
    found = f"PostgreSQL {server['version'].split(' ')[0]}"
    if server["version_num"] < VERSION_NUM_MIN:
        remedy = "use PostgreSQL 14 or newer: older ones cannot end a silent session (idle_session_timeout)"
        return Finding("version", found, Verdict.UNSAFE, remedy)
    return Finding("version", found)


def check_primary(server: Mapping[str, Any]) -> Finding:
    if server["in_recovery"]:
        remedy = "a lock on a standby excludes nobody: connect to the primary, or list all hosts in the DSN"
        return Finding("primary", "this server is a standby", Verdict.UNSAFE, remedy)
    return Finding("primary", "yes")


def check_pooler(evidence: Sequence[str], *, shared: bool | None, allowed: bool) -> Finding:
    """`shared`: did a second client get the first one's backend? None if nobody could tell."""
    if not evidence:
        return Finding("pooler", "none: the backend is ours alone")
    found = "; ".join(evidence)
    if shared:
        remedy = (
            f"two clients get one server session, where a lock excludes nobody: {_DIRECT}, or use pool_mode=session"
        )
        return Finding("pooler", f"{found}; backends are shared", Verdict.UNSAFE, remedy)
    if shared is None:
        return Finding("pooler", found, Verdict.UNSAFE, f"the pooler's mode could not be found out: {_DIRECT}")
    if allowed:
        remedy = f"keep pool_mode=session, and server timeouts of the pooler longer than the lease; or {_DIRECT}"
        return Finding("pooler", f"{found}; backends are not shared now", Verdict.WARNING, remedy)
    remedy = f"{_DIRECT}; or, if pool_mode is session, use --allow-pooler (allow_pooler=True): it is refused otherwise"
    return Finding("pooler", f"{found}; backends are not shared now", Verdict.UNSAFE, remedy)


_OVERRIDDEN = ("idle_session_timeout", "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


def check_timeouts(plain: Mapping[str, Setting], ours: Mapping[str, Setting] | None, timing: Timing) -> list[Finding]:
    """What the DBA has set, and what of it reaches a session that brings its own settings (`ours`)."""
    findings = []
    for name in _OVERRIDDEN:
        if name in plain and plain[name].milliseconds:
            effective = ours.get(name) if ours is not None else None
            findings.append(_overridden_timeout(name, plain[name], effective, timing, known=ours is not None))
    if "transaction_timeout" in plain and plain["transaction_timeout"].milliseconds:
        findings.append(_transaction_timeout(plain["transaction_timeout"], timing))
    return findings or [Finding("timeouts", "none set by the DBA")]


def _overridden_timeout(name: str, dba: Setting, effective: Setting | None, timing: Timing, *, known: bool) -> Finding:
    limit_ms = timing.health_timeout_s * 1000
    if dba.source == "client":
        # In the DSN or PGOPTIONS: what the user says there comes last, and wins over ours.
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


def _transaction_timeout(dba: Setting, timing: Timing) -> Finding:
    found = f"{_duration(dba)}, set by {_origin(dba)}"
    if dba.milliseconds <= timing.health_timeout_s * 1000:
        remedy = (
            "it ends the session of a leader whose statement is slow, and nothing of ours overrides it: "
            "ALTER ROLE … SET transaction_timeout = 0"
        )
        return Finding("transaction_timeout", found, Verdict.UNSAFE, remedy)
    return Finding("transaction_timeout", f"{found}; longer than any statement of ours")


def check_durability(plain: Mapping[str, Setting]) -> list[Finding]:
    findings = []
    remedies = {
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
    for name, (verdict, remedy) in remedies.items():
        if (setting := plain.get(name)) is None:
            continue
        if setting.setting == "off":
            findings.append(Finding(name, f"off, set by {_origin(setting)}", verdict, remedy))
        else:
            findings.append(Finding(name, setting.setting))
    return findings


def check_privileges(row: Mapping[str, Any], role: str) -> list[Finding]:
    quoted = '"' + role.replace('"', '""') + '"'
    findings = [
        Finding("may take locks", "yes")
        if row["may_lock"]
        else Finding(
            "may take locks",
            "no",
            Verdict.UNSAFE,
            f"GRANT EXECUTE ON FUNCTION pg_try_advisory_lock(int,int), pg_advisory_lock(int,int), "
            f"pg_advisory_unlock(int,int) TO {quoted}",
        )
    ]
    findings.append(
        Finding("may end own sessions", "yes")
        if row["may_terminate"]
        else Finding(
            "may end own sessions",
            "no",
            Verdict.WARNING,
            "after a cut our own old session keeps the lock until its lease ends: "
            f"GRANT EXECUTE ON FUNCTION pg_terminate_backend(int,bigint) TO {quoted}",
        )
    )
    if not row["may_look"]:
        remedy = f"waiting at the server and `status` need them: GRANT SELECT ON pg_locks, pg_stat_activity TO {quoted}"
        findings.append(Finding("may see locks", "no", Verdict.UNSAFE, remedy))
    elif row["sees_others"]:
        findings.append(Finding("may see locks", "yes, with all details"))
    else:
        findings.append(Finding("may see locks", "yes; addresses of other roles only with pg_read_all_stats"))
    return findings


def check_lock_slots(plain: Mapping[str, Setting], used: int) -> Finding:
    per_transaction, connections, prepared = (
        int(plain[name].setting)
        for name in ("max_locks_per_transaction", "max_connections", "max_prepared_transactions")
    )
    slots = per_transaction * (connections + prepared)
    free = max(0, slots - used)
    found = f"about {free} of {slots} free"
    remedy = "raise max_locks_per_transaction (needs a restart), or hold fewer locks: a full table refuses connections"
    if free < slots * LOCK_SLOTS_FREE_UNSAFE:
        return Finding("lock slots", found, Verdict.UNSAFE, remedy)
    if free < slots * LOCK_SLOTS_FREE_WARNING:
        return Finding("lock slots", found, Verdict.WARNING, remedy)
    return Finding("lock slots", found)


def check_connections(plain: Mapping[str, Setting], row: Mapping[str, Any]) -> Finding:
    """The tightest of the three limits counts. Our own look is a connection that will be free again."""
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
    if free < CONNECTIONS_FREE_UNSAFE:
        return Finding("connections", found, Verdict.UNSAFE, remedy)
    if free < CONNECTIONS_FREE_WARNING:
        return Finding("connections", found, Verdict.WARNING, remedy)
    return Finding("connections", found)


def check_round_trip(trips_s: Sequence[float], timing: Timing) -> Finding:
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
    if setting.milliseconds < DEADLOCK_TIMEOUT_S_MIN * 1000:
        remedy = "with --standby-wait each node asks that often: set deadlock_timeout to 1s, or do without it"
        return Finding("deadlock_timeout", found, Verdict.WARNING, remedy)
    return Finding("deadlock_timeout", found)


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
    if sslmode in ("require", "verify-ca", "verify-full"):
        return Finding("encryption", found)
    remedy = "passwords and replies can be read on the way, or will be after a downgrade: set sslmode=verify-full"
    return Finding("encryption", found, Verdict.WARNING, remedy)


def check_rehearsal(refusal: str | None, took_s: float) -> Finding:
    """A lock of our own, taken, kept alive and given back exactly as a leader does."""
    if refusal is None:
        return Finding("rehearsal", f"a lock was taken, probed and released in {took_s * 1000:.0f} ms")
    return Finding("rehearsal", f"refused: {refusal}", Verdict.UNSAFE, "nothing leads until this works")


def unknown(check: str, reason: str) -> Finding:
    """A question that the server refused to answer."""
    return Finding(check, f"cannot be found out: {reason}", Verdict.WARNING, "let this role read it, or ask your DBA")


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


def _origin(setting: Setting) -> str:
    return _ORIGINS.get(setting.source, setting.source)


def _duration(setting: Setting) -> str:
    milliseconds = setting.milliseconds
    if milliseconds == 0:
        return "off"
    return f"{milliseconds / 1000:g} s" if milliseconds >= 1000 else f"{milliseconds} ms"
