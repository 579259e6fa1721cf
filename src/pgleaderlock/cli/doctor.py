"""`pgleaderlock doctor`: does this database keep what the lock promises? Asks, rehearses, and prints what to do.

The facts are collected here and judged in `_checks`. It looks through a plain connection as the DSN describes it, opens
a second one with the settings of a leader, and rehearses a leader's term on a lock that nobody else uses.

Imports click, rich, `_session`, `_conninfo` and its neighbours. It must never change anything that outlives it: no
setting is changed on a connection that a pooler might give to somebody else.
"""

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import click

from pgleaderlock._conninfo import ConnectionSettings, connect_params
from pgleaderlock._session import DedicatedSession
from pgleaderlock.cli import _checks as checks
from pgleaderlock.cli._checks import Finding, Setting, Timing, Verdict, worst
from pgleaderlock.cli._output import (
    EXIT_NO,
    EXIT_OK,
    EXIT_USAGE,
    LockKey,
    dsn_option,
    stdout_console,
)
from pgleaderlock.cli._reach import Look, Unreachable
from pgleaderlock.cli._table import print_table
from pgleaderlock.cli._timing import allow_pooler_option, lease_or_default_s, make_lock, timing_options
from pgleaderlock.errors import ConnectionError, LockError
from pgleaderlock.keys import key_pair

__all__ = ["doctor"]

NAME = "pgleaderlock doctor"
ROUND_TRIPS = 11
# At this width remedies get a column of their own.
WIDE_COLUMNS = 130
CHECK_COLUMNS = 20


@click.command(short_help="Check a database for what would break the promise.")
@dsn_option
@timing_options
@allow_pooler_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
def doctor(
    *,
    dsn: str,
    health_interval: float,
    health_timeout: float | None,
    session_lease: float | None,
    allow_pooler: bool,
    as_json: bool,
) -> int:
    """Check whether this database keeps what the lock promises, and say what to do where it does not.

    Give the DSN, the role and the settings that your nodes use. Nothing is changed; a lock that nobody else uses is
    taken and released. No clock is compared: no promise depends on one.

    Exit codes: 0 nothing is unsafe, 1 something is, 2 the database cannot be reached.
    """
    # The relations between the settings are the lock's own to check.
    make_lock(
        dsn,
        LockKey(0, 0),
        health_interval_s=health_interval,
        health_timeout_s=health_timeout,
        session_lease_s=session_lease,
    )
    timing = Timing(
        health_interval, health_timeout or health_interval, lease_or_default_s(session_lease, health_interval)
    )
    try:
        findings = asyncio.run(_Examination(dsn, timing, allow_pooler=allow_pooler).run())
    except Unreachable as error:
        if not as_json:
            raise
        click.echo(json.dumps({"verdict": "unreachable", "reason": error.kind, "error": str(error)}, indent=2))
        return EXIT_USAGE
    if as_json:
        click.echo(json.dumps(_as_json(findings), indent=2))
    else:
        _print(findings)
    return EXIT_NO if worst(findings) is Verdict.UNSAFE else EXIT_OK


class _Examination:
    """Collects the facts. A question that fails costs one finding, not the report."""

    def __init__(self, dsn: str, timing: Timing, *, allow_pooler: bool) -> None:
        self._dsn = dsn
        self._timing = timing
        self._allow_pooler = allow_pooler
        self._findings: list[Finding] = []
        self._settings = ConnectionSettings(
            application_name=NAME, statement_timeout_s=timing.health_timeout_s, lease_s=timing.lease_s
        )

    async def run(self) -> list[Finding]:
        began = time.monotonic()
        try:
            look = await Look.open(self._dsn, NAME)
        except Unreachable as error:
            if error.kind != "pooler":
                raise
            self._add(checks.check_pooler(["it refuses the DSN's options"], shared=None, allowed=False))
            return self._findings
        async with look:
            took_ms = (time.monotonic() - began) * 1000
            self._add(Finding("reachable", f"connected in {took_ms:.0f} ms"))
            await self._examine(look)
        return self._findings

    async def _examine(self, look: Look) -> None:
        server = await look.row("doctor_server")
        self._add(checks.check_version(server), checks.check_primary(server))
        plain = await _settings_of(look)
        fit = all(finding.verdict is Verdict.OK for finding in self._findings)
        ours, refusals = await self._with_our_settings() if fit else (None, [])
        pooler = await self._pooler(look, server, refusals)
        self._add(pooler)
        self._add(*checks.check_timeouts(plain, ours, self._timing))
        self._add(*checks.check_durability(plain))
        await self._privileges(look, server)
        await self._capacity(look, plain)
        self._add(checks.check_round_trip(await _round_trips_s(look), self._timing))
        if (finding := checks.check_deadlock_timeout(plain)) is not None:
            self._add(finding)
        if ours is not None:
            self._add(checks.check_connection_check(ours))
        sslmode = look.params.get("sslmode") or os.environ.get("PGSSLMODE")
        self._add(checks.check_encryption(address=look.address, encrypted=look.encrypted, sslmode=sslmode))
        if fit and pooler.verdict is not Verdict.UNSAFE:
            await self._rehearse(pooled=pooler.verdict is Verdict.WARNING)

    def _add(self, *findings: Finding) -> None:
        self._findings += findings

    async def _with_our_settings(self) -> tuple[Mapping[str, Setting] | None, list[str]]:
        """The settings of a session that brings ours along, or what a pooler has against them."""
        try:
            async with await Look.open_with(connect_params(self._dsn, self._settings)) as look:
                return await _settings_of(look), []
        except Unreachable as error:
            if error.kind == "pooler":
                return None, ["our startup options are refused"]
            self._add(Finding("our settings", f"refused: {error}", Verdict.UNSAFE, "let this role set them"))
        except ConnectionError as error:
            self._add(checks.unknown("our settings", str(error)))
        return None, []

    async def _pooler(self, look: Look, server: Mapping[str, Any], refusals: list[str]) -> Finding:
        evidence = [*refusals]
        if server["backend_pid"] != look.protocol_pid:
            evidence.append("the protocol's pid is not the backend's")
        shared = await look.backend_is_shared() if evidence else None
        return checks.check_pooler(evidence, shared=shared, allowed=self._allow_pooler)

    async def _privileges(self, look: Look, server: Mapping[str, Any]) -> None:
        try:
            row = await look.row("doctor_privileges")
        except ConnectionError as error:
            self._add(checks.unknown("privileges", str(error)))
        else:
            self._add(*checks.check_privileges(row, server["role"]))

    async def _capacity(self, look: Look, plain: Mapping[str, Setting]) -> None:
        try:
            self._add(checks.check_lock_slots(plain, (await look.row("doctor_locks"))["used"]))
        except ConnectionError as error:
            self._add(checks.unknown("lock slots", str(error)))
        try:
            self._add(checks.check_connections(plain, await look.row("doctor_connections")))
        except ConnectionError as error:
            self._add(checks.unknown("connections", str(error)))

    async def _rehearse(self, *, pooled: bool) -> None:
        """A whole term on a lock that nobody else can mean."""
        keys = key_pair(uuid.uuid4().hex, NAME)
        settings = ConnectionSettings(
            application_name=NAME,
            statement_timeout_s=self._timing.health_timeout_s,
            lease_s=self._timing.lease_s,
            allow_pooler=pooled,
        )
        began = time.monotonic()
        try:
            session = await DedicatedSession.open(self._dsn, settings)
            try:
                taken = await session.take(keys)
                await session.probe(keys)
                await session.unlock(keys)
            finally:
                await session.close()
        except (ConnectionError, LockError) as error:
            refusal: str | None = str(error)
        else:
            refusal = None if taken else "the lock was not granted"
        self._add(checks.check_rehearsal(refusal, time.monotonic() - began))


async def _settings_of(look: Look) -> dict[str, Setting]:
    rows = await look.rows("doctor_settings")
    return {row["name"]: Setting(row["setting"], row["unit"], row["source"]) for row in rows}


async def _round_trips_s(look: Look) -> list[float]:
    trips_s = []
    for _ in range(ROUND_TRIPS):
        sent_at = time.monotonic()
        await look.rows("probe")
        trips_s.append(time.monotonic() - sent_at)
    return trips_s


def _as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "verdict": worst(findings),
        "findings": [
            {
                "check": finding.check,
                "found": finding.found,
                "verdict": finding.verdict,
                "remedy": finding.remedy or None,
            }
            for finding in findings
        ],
    }


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
