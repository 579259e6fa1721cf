"""`pgleaderlock step-down ROLE` and `drain NODE`: ask a node for something, and wait for the outcome; `roles forget`.

A request is a row in the ledger, so it is carried out even if this command ends first. The command must never end
the session of another node: it asks, and the node itself gives up its roles.
"""

import asyncio
import contextlib
import difflib
import json
import shlex
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from pgleaderlock import history
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.cli.options import POSITIVE
from pgleaderlock.cli.output import EXIT_NO, EXIT_OK, EXIT_USAGE, dsn_option, exit_code_for_signal, json_option
from pgleaderlock.cli.reading import (
    LedgerLook,
    channel_option,
    complete_node,
    complete_role,
    counted,
    elsewhere,
    namespace_option,
    open_ledger,
    span,
)
from pgleaderlock.errors import ConnectionError, PgLeaderLockError, SchemaError

__all__ = ["drain", "forget", "step_down"]

TIMEOUT_S = 60.0
POLL_S = 0.5
SUCCESSORS_S = 10.0
"""How long `drain` waits for successors. The node is drained by then, but a role may have no other candidate."""
WORK_TIMEOUT_S_MAX = 240.0
ENDED_WITHIN_S = 10.0
"""The longest time that a drain takes after its work was cancelled."""
NAMES_SHOWN = 10
SAID_AFTER_S = 1.0
SAID_EVERY_S = 10.0
NOBODY_YET = "nobody yet"

_Answer = TypeVar("_Answer")


class Refused(PgLeaderLockError):
    """The request was not made, or not carried out."""

    def __init__(self, text: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


# --- step-down


@click.command("step-down", short_help="Ask a role's leader to give it up.")
@dsn_option
@namespace_option
@channel_option
@click.option(
    "--to",
    "to_node",
    metavar="NODE",
    shell_complete=complete_node,
    help="Who should lead next; the others leave it a head start.",
)
@click.option("--timeout", type=POSITIVE, default=TIMEOUT_S, help="How long to wait for the outcome.  [default: 1m]")
@click.argument("role", shell_complete=complete_role)
def step_down(*, dsn: str, namespace: str, channel: str, to_node: str | None, timeout: float, role: str) -> int:
    """Ask the leader of ROLE to step down, wait for the outcome, and print who leads now.

    The leader ends its work first, as in a drain. The request is kept in the ledger for 5 minutes: Ctrl-C ends the wait
    and not the request.

    Exit codes: 0 it stepped down and the role is led again, 1 nobody leads, or not in time, or it was refused; 2 it
    could not be asked.
    """
    asking = _Asking(dsn, namespace, channel, timeout)
    return asking.run(_step_down(asking, role, to_node))


async def _step_down(asking: "_Asking", name: str, to_node: str | None) -> int:
    async with asking.open("step-down") as look:
        before = await _leader(look, asking.namespace, name)
        if to_node is not None:
            if before.node_id == to_node:
                click.echo(f"{name}: {to_node} leads already (epoch {before.epoch})")
                return EXIT_OK
            await _check_successor(look, asking.namespace, name, to_node)
        if not await asking.ask(look, "history_ask_step_down", role=name, to_node_id=to_node):
            raise Refused(f"{name}: nobody leads it any more, so nobody was asked", EXIT_NO)
        click.echo(f"{name}: asked {before.node_id} to step down (request {asking.number})", err=True)

        async def led_again() -> bool:
            now = await history.role(look, asking.namespace, name)
            return now is not None and now.state not in ("nobody", "waiting") and now.epoch > before.epoch

        done = await asking.outcome(look, name, led_again)
        now = await history.role(look, asking.namespace, name)
        if now is not None and now.node_id is None:
            raise Refused(
                f"{name}: {before.node_id} has stepped down, and nobody leads after {span(asking.timeout_s)}", EXIT_NO
            )
        if done is None or now is None:
            raise Refused(
                f"{name}: {before.node_id} has not stepped down within {span(asking.timeout_s)}; the request stays, "
                "and is carried out when its work has ended",
                EXIT_NO,
            )
        return await _successor(look, before, now, to_node)


async def _role(look: LedgerLook, namespace: str, name: str) -> history.RoleView:
    found = await history.role(look, namespace, name)
    if found is None:
        known = [role.role for role in await history.roles(look, namespace)]
        similar = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "`pgleaderlock roles` lists what there is"
        others = "" if known else await elsewhere(look, namespace)
        raise Refused(f"role {name!r} has never been led in namespace {namespace!r}: {hint}{others}")
    return found


async def _leader(look: LedgerLook, namespace: str, name: str) -> history.RoleView:
    found = await _role(look, namespace, name)
    if found.node_id is None:
        raise Refused(f"{name}: nobody leads it now, so there is nobody to step down", EXIT_NO)
    if found.heartbeat_age_s is not None and found.lease_s is not None and found.heartbeat_age_s > found.lease_s:
        successor = (
            "one of the candidates that live takes over without being asked"
            if found.candidates
            else "no candidate is alive to take over: start a node"
        )
        raise Refused(
            f"{name}: its leader {found.node_id} was last heard {span(found.heartbeat_age_s)} ago, longer than its "
            f"lease of {span(found.lease_s)}: there is nobody to ask; {successor}",
            EXIT_NO,
        )
    return found


async def _check_successor(look: LedgerLook, namespace: str, name: str, to_node: str) -> None:
    live = [row["node_id"] for row in await look.rows("live_candidates", namespace=namespace, role=name)]
    if to_node in live:
        return
    candidates = f"the candidates that live are {_some(live)}" if live else "no candidate is alive"
    raise Refused(f"node {to_node!r} would not lead {name}: {candidates}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (" and others" if len(names) > NAMES_SHOWN else "")


async def _successor(look: LedgerLook, before: history.RoleView, now: history.RoleView, to_node: str | None) -> int:
    """Print who leads now; the exit code says whether that is `to_node`."""
    (term,) = await history.terms(look, before.namespace, before.role, limit=1)
    again = " again: there is no other candidate" if now.node_id == before.node_id and now.candidates < 2 else ""
    click.echo(
        f"{before.role}: {before.node_id} -> {now.node_id}{again}, epoch {before.epoch} -> {now.epoch}, "
        f"{span(term.failover_s)} in which nobody could act"
    )
    if to_node is not None and now.node_id != to_node:
        click.echo(f"{to_node} was not the one who won it", err=True)
        return EXIT_NO
    return EXIT_OK


# --- drain


@click.command(short_help="Ask a node to give up all its roles.")
@dsn_option
@namespace_option
@channel_option
@click.option("--resume", is_flag=True, help="Let it compete again instead.")
@click.option("--force", is_flag=True, help="Also if no other candidate is alive: its roles will have no leader.")
@click.option(
    "--work-timeout",
    type=POSITIVE,
    help="After this time cancel the work that has not ended, and give its roles up.  [default: wait for it]",
)
@click.option(
    "--timeout",
    type=POSITIVE,
    help="How long to wait for the outcome.  [default: 1m, or the work timeout and 10s more]",
)
@json_option
@click.argument("node", shell_complete=complete_node)
def drain(
    *,
    dsn: str,
    namespace: str,
    channel: str,
    resume: bool,
    force: bool,
    work_timeout: float | None,
    timeout: float | None,
    as_json: bool,
    node: str,
) -> int:
    """Ask NODE to end its work, give up its roles and compete for none: before it is shut down or repaired.

    With --resume it competes again; so it does when it is started again. The request is kept in the ledger for 5
    minutes: Ctrl-C ends the wait and not the request. While it waits, it says which roles the node still leads. With
    --work-timeout the node cancels its work when the time is over, also what an earlier drain waits for; work that
    cannot be cancelled is left running behind its shut gate, and the successor waits as after a loss.

    Exit codes: 0 done, 1 the node does not live, or is the last candidate, or not in time, or it was refused; 2 it
    could not be asked.
    """
    if work_timeout is not None and resume:
        raise click.UsageError("--work-timeout is for a drain: drop it, or --resume")
    if work_timeout is not None and work_timeout > WORK_TIMEOUT_S_MAX:
        raise click.UsageError(f"--work-timeout is at most {span(WORK_TIMEOUT_S_MAX)}: a request lasts for 5 min")
    asking = _Asking(dsn, namespace, channel, timeout or max(TIMEOUT_S, (work_timeout or 0.0) + ENDED_WITHIN_S))
    return asking.run(_drain(asking, node, resume=resume, force=force, work_timeout_s=work_timeout, as_json=as_json))


async def _drain(
    asking: "_Asking", node_id: str, *, resume: bool, force: bool, work_timeout_s: float | None, as_json: bool
) -> int:
    async with asking.open("drain") as look:
        await _check_node(look, asking.namespace, node_id)
        led = [role.role for role in await history.all_roles(look, asking.namespace) if role.node_id == node_id]
        if not resume and not force:
            await _check_others(look, asking.namespace, node_id)
        if work_timeout_s is not None:
            asked = asking.ask(look, "history_ask_drain_within", node_id=node_id, work_timeout_s=work_timeout_s)
        else:
            asked = asking.ask(look, "history_ask_resume" if resume else "history_ask_drain", node_id=node_id)
        if not await asked:
            raise Refused(f"{node_id} does not live any more, so nobody was asked", EXIT_NO)
        what = "compete again" if resume else f"drain {counted(led, 'role')}"
        click.echo(f"{node_id}: asked to {what} (request {asking.number})", err=True)

        async def leads_nothing() -> bool:
            nodes = await history.nodes(look, asking.namespace)
            return sum(node.leads for node in nodes if node.node_id == node_id) == 0

        left = _Left(look, asking.namespace, node_id)
        done = await asking.outcome(look, node_id, None if resume else leads_nothing, None if resume else left.say)
        if done is None:
            raise Refused(
                f"{node_id}: not done within {span(asking.timeout_s)}; the request stays"
                + ("" if resume else f", and ends when the work of the node has. {_ending(node_id, work_timeout_s)}"),
                EXIT_NO,
            )
        asking.number = None  # the request was carried out, so a Ctrl-C from here on leaves none behind
        leaders = {} if resume else await _leaders_or_none(look, asking.namespace, led)
        if as_json:
            view = {"namespace": asking.namespace, "node_id": node_id, "request": done, "roles": leaders}
            click.echo(json.dumps(view, indent=2, default=history.as_json))
        else:
            click.echo(f"{node_id}: " + ("competes again" if resume else _drained(led, leaders, done)))
        return EXIT_OK


def _ending(node_id: str, work_timeout_s: float | None) -> str:
    """Advice for work that does not end."""
    if work_timeout_s is not None:
        return "What is in flight cannot be cancelled: restart the node"
    return f"`pgleaderlock drain --work-timeout 30s {shlex.quote(node_id)}` would end the work"


async def _check_others(look: LedgerLook, namespace: str, node_id: str) -> None:
    """Refuse to drain the last candidate of a role, according to the ledger at this moment: two concurrent drains do
    not notice each other."""
    live = await look.rows("live_candidates", namespace=namespace, role=None)

    def wanted(name: str, *, by_it: bool) -> bool:
        return any(row["wants"] is None or name in row["wants"] for row in live if (row["node_id"] == node_id) is by_it)

    roles = [role.role for role in await history.all_roles(look, namespace)]
    alone = [name for name in roles if wanted(name, by_it=True) and not wanted(name, by_it=False)]
    if alone:
        raise Refused(
            f"{node_id} is the last candidate of {_some(alone)}: without it {counted(alone, 'role')} would have no "
            "leader; start another node first, or use --force",
            EXIT_NO,
        )


class _Left:
    """Prints which roles a node still leads: at each change, and from time to time without one."""

    def __init__(self, look: LedgerLook, namespace: str, node_id: str) -> None:
        self._look, self._namespace, self._node_id = look, namespace, node_id
        self._began_at = self._said_at = BOOT_CLOCK.now()
        self._said: list[str] | None = None

    async def say(self) -> None:
        now = BOOT_CLOCK.now()
        if now - self._began_at < SAID_AFTER_S:
            return  # most drains are over by then
        roles = await history.all_roles(self._look, self._namespace)
        left = [role.role for role in roles if role.node_id == self._node_id]
        if not left or (left == self._said and now - self._said_at < SAID_EVERY_S):
            return
        self._said, self._said_at = left, now
        waited = span(now - self._began_at)
        click.echo(
            f"{self._node_id}: waits for the work of {counted(left, 'role')} since {waited}: {_some(left)}", err=True
        )


async def _check_node(look: LedgerLook, namespace: str, node_id: str) -> None:
    known = await history.nodes(look, namespace, heard_within_s=history.EVER_S)
    of_name = [node for node in known if node.node_id == node_id]
    if not of_name:
        live = sorted({node.node_id for node in known if node.live})
        others = "" if known else await elsewhere(look, namespace)
        raise Refused(
            f"node {node_id!r} is not known in namespace {namespace!r}: alive are {', '.join(live) or 'none'}{others}"
        )
    if not any(node.live for node in of_name):
        last = of_name[-1]
        raise Refused(
            f"{node_id}: not alive ({last.state}, last heard {span(last.heartbeat_age_s)} ago): nobody to ask", EXIT_NO
        )


def _drained(led: list[str], leaders: Mapping[str, str | None] | None, done: history.RequestView) -> str:
    """The new leaders of the roles that the node had led."""
    if not led:
        return "drained; it led nothing"
    unclean = f" ({done.detail})" if done.detail else ""
    drained = f"drained{unclean}; {counted(led, 'role')}"
    if leaders is None:
        return f"{drained}; who leads now is not known"
    now = Counter(leader or NOBODY_YET for leader in leaders.values())
    return f"{drained}, led now: " + ", ".join(f"{count} by {leader}" for leader, count in sorted(now.items()))


async def _leaders_or_none(look: LedgerLook, namespace: str, names: list[str]) -> dict[str, str | None] | None:
    """Like `_leaders`, but None after an error: the node is drained in any case."""
    try:
        return await _leaders(look, namespace, names)
    except ConnectionError as error:
        click.echo(str(error), err=True)
        return None


async def _leaders(look: LedgerLook, namespace: str, names: list[str]) -> dict[str, str | None]:
    """The leaders of these roles once all are led again, or those so far after `SUCCESSORS_S`."""
    leaders: dict[str, str | None] = {}

    async def all_led() -> bool | None:
        if not names:
            return True
        views = {role.role: role for role in await history.all_roles(look, namespace)}
        leaders.update((name, views[name].node_id) for name in names)
        no_candidate = all(views[name].candidates == 0 for name in names)
        return True if None not in leaders.values() or no_candidate else None

    await _until(look, SUCCESSORS_S, all_led)
    return leaders


# --- roles forget


@click.command(short_help="Take a role out of every list until it is led again.")
@dsn_option
@namespace_option
@click.option("--force", is_flag=True, help="Also if live nodes still want it.")
@click.argument("role", shell_complete=complete_role)
def forget(*, dsn: str, namespace: str, force: bool, role: str) -> int:
    """Forget ROLE, which nobody wants any more: lists, incidents and exit codes leave it out.

    A node that leads it again brings it back. Its epoch and its history stay, so that a fence goes on
    refusing what is stale.

    Exit codes: 0 forgotten, 1 live nodes still want it, or it was led meanwhile; 2 it could not be found out.
    """
    return asyncio.run(_forget(dsn, namespace, role, force=force))


async def _forget(dsn: str, namespace: str, name: str, *, force: bool) -> int:
    async with open_ledger(dsn, "roles forget", to_write=True) as look:
        found = await _role(look, namespace, name)
        live = sorted({row["node_id"] for row in await look.rows("live_candidates", namespace=namespace, role=name)})
        if live and not force:
            raise Refused(
                f"{name}: {_some(live)} still {'want' if len(live) > 1 else 'wants'} it: take it out of their roles "
                "first, or use --force",
                EXIT_NO,
            )
        if not (await _called(look, "history_forget_role", role=name, namespace=namespace, epoch=found.epoch))[
            "forgotten"
        ]:
            raise Refused(f"{name}: led again since it was looked at: not forgotten", EXIT_NO)
        led = f"; {found.node_id} leads it, and it is shown until that ends" if found.node_id is not None else ""
        click.echo(f"{name}: forgotten, until a node leads it again{led}")
        return EXIT_OK


async def _called(look: LedgerLook, statement: str, **params: object) -> dict[str, Any]:
    """The row of a statement that calls a function of the ledger."""
    try:
        return await look.row(statement, **params)
    except ConnectionError as error:
        if "permission denied" in str(error):
            raise SchemaError(f"{error}; let the ledger's owner run `pgleaderlock migrate --grant-to ROLE`") from error
        if "does not exist" in str(error):
            raise SchemaError(f"{error}; the ledger is older than this command: run `pgleaderlock migrate`") from error
        raise


# --- One request, from asking to its outcome


@dataclass
class _Asking:
    dsn: str
    namespace: str
    channel: str
    timeout_s: float
    number: int | None = None
    """The request's number, from when it was made until it is known to be carried out."""

    def run(self, course: Coroutine[Any, Any, int]) -> int:
        """Run the course; returns the exit code. Ctrl-C ends the wait, and prints that the request stays."""
        try:
            return asyncio.run(course)
        except ConnectionError as error:
            if self.number is None:
                raise
            raise Refused(
                f"{error}. Request {self.number} was made and stays: `pgleaderlock roles` and `pgleaderlock nodes` "
                "show what becomes of it",
                EXIT_NO,
            ) from error
        except KeyboardInterrupt:
            if self.number is not None:
                click.echo(f"\nstopped waiting; request {self.number} stays, and will be carried out", err=True)
            return exit_code_for_signal(signal.SIGINT)

    def open(self, command: str) -> contextlib.AbstractAsyncContextManager[LedgerLook]:
        return open_ledger(self.dsn, command, listen=self.channel, to_write=True)

    async def ask(self, look: LedgerLook, statement: str, **params: object) -> bool:
        """Make the request. False if there is no node to ask."""
        row = await _called(look, statement, namespace=self.namespace, channel=self.channel, **params)
        self.number = row["request_id"]
        with contextlib.suppress(ConnectionError):  # only a hint: without it, the next heartbeat reads the request
            await look.rows("ledger_hint", channel=self.channel, hint="requested")
        return self.number is not None

    async def outcome(
        self,
        look: LedgerLook,
        who: str,
        visible: Callable[[], Awaitable[bool]] | None,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
    ) -> history.RequestView | None:
        """The request once it is carried out and its effect is `visible`; None on a timeout."""

        async def answer() -> history.RequestView | None:
            assert self.number is not None
            asked = await history.request(look, self.number)
            if asked is None or asked.done_at is None:
                if meanwhile is not None:
                    await meanwhile()
                return None
            if asked.outcome in ("refused", "expired"):
                raise Refused(f"{who}: {asked.outcome}" + (f": {asked.detail}" if asked.detail else ""), EXIT_NO)
            return asked if visible is None or await visible() else None

        return await _until(look, self.timeout_s, answer)


async def _until(look: LedgerLook, timeout_s: float, answer: Callable[[], Awaitable[_Answer | None]]) -> _Answer | None:
    """The first answer that is not None; None on a timeout. Asks after each notification, and every `POLL_S`."""
    until_at = BOOT_CLOCK.now() + timeout_s
    while True:
        found = await answer()
        left_s = until_at - BOOT_CLOCK.now()
        if found is not None or left_s <= 0:
            return found
        await look.woken(min(POLL_S, left_s))
