"""`once`: of all processes that call it in one tick, one runs the work, and the ledger records how it ended.

A lock alone is not enough: a process that comes when the lock is free again would run the work again. So each tick has
a slot in the ledger. The slot is claimed before the work, fenced by the epoch of the claimant's term, and finished
after the work.

What it does not promise, first. Effects of the work outside the database cannot be undone. With "retry" the work may
run *again* if its runner dies during the work, or cannot report the outcome: at least once. With "keep" a slot whose
runner has died stays unfinished: at most once. Exactly once is not possible.

What it does: no two processes run the work of one slot at the same time, as far as a gate can promise that. With
"retry" a slot that is done is not run again; with "keep" a slot is begun once. Ticks follow the database's clock, not
the hosts'.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, get_args

from pgleaderlock._base.aio import any_done, cancel_and_wait, settle
from pgleaderlock._base.logging import get_logger
from pgleaderlock._config.durations import format_duration, parse_duration_s
from pgleaderlock._election.run import is_loss
from pgleaderlock._pg.connect import resolved
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock._pg.explain import statement_error
from pgleaderlock._pg.reader import PlainConnection, Refused
from pgleaderlock.election import ElectionOptions, LeaderElection
from pgleaderlock.errors import ConfigurationError, ConnectionError, LockError, SchemaError
from pgleaderlock.keys import DEFAULT_NAMESPACE, check_text, slot_namespace
from pgleaderlock.models import LeaderToken

__all__ = ["OnSlotFailure", "Once", "once", "slot_namespace"]

T = TypeVar("T")
OnSlotFailure = Literal["retry", "keep"]
Outcome = Literal["done", "failed", "claimed", "missed"]
DAY_S = 86400.0
# A call this much before a tick is for that tick, because the clocks of hosts differ. At most a quarter of the tick.
EARLY_S = 5.0
# How often a follower checks whether the slot is done.
LOOK_S = 1.0
# How long to wait for an unreachable database once the competition has begun: a failover takes about that long.
AWAY_S_MAX, AGAIN_S = 30.0, 1.0
# The same when the outcome of the work is reported. A failure that is not reported leaves the slot to others anyway.
FINISH_S_MAX = {"done": AWAY_S_MAX, "failed": 5.0}
DETAIL_MAX = 500

_log = get_logger("pgleaderlock")


@dataclass(frozen=True, slots=True)
class Once(Generic[T]):
    """The outcome of a slot, as far as this call knows."""

    ran: bool
    """Whether the work ran in this call, and returned."""
    slot: str
    value: T | None = None
    """What the work returned."""
    outcome: Outcome = "done"
    """If it did not run here: its outcome elsewhere. `claimed`: it has begun, but not ended yet. `missed`: it was not
    begun, because another slot of the same name ran until the tick was over."""


async def once(
    dsn: Dsn,
    name: str,
    work: Callable[[LeaderToken], Coroutine[Any, Any, T]],
    *,
    every: str | float | None = None,
    slot: str | None = None,
    time_zone: str = "UTC",
    on_failure: OnSlotFailure = "retry",
    **options: Unpack[ElectionOptions],
) -> Once[T]:
    """Run `work(token)` if it was not run in this tick yet; of all callers, one does.

    every: the length of a tick: "15m", "1h", "1d", or seconds. A tick of one or more days begins at local midnight; a
        shorter one must divide a day.
    slot: your own name for the slot, instead of `every`: the number of a build, for example, as text.
    time_zone: the zone in which days begin, such as "Europe/Berlin".
    on_failure: "retry" runs the slot again if it has failed or its runner is gone: at least once. While another caller
        runs it, this one waits to take over. "keep" never runs a slot twice: at most once. A caller returns at once.
    options: those of `LeaderElection`.

    An exception of the work is raised here, and the slot counts as failed. Fence the work's writes with the token.
    """
    every_s = _checked(every, slot, time_zone, on_failure)
    for option, usable in (("enabled", True), ("standalone", False)):
        if options.get(option, usable) is not usable:
            raise ConfigurationError(f"{option}={not usable} does not go with once: it needs the ledger, drop it")
    options["namespace"] = where = slot_namespace(options.get("namespace", DEFAULT_NAMESPACE))
    election = LeaderElection(dsn, name, **options)
    async with _Claim(dsn, where, name, retry=on_failure == "retry") as claim:
        await claim.choose(slot, every_s, time_zone)
        if (stands := await claim.look()) is not None and claim.over(stands):
            return Once(ran=False, slot=claim.slot, outcome=stands)
        async with election:
            claim.away_s_max = AWAY_S_MAX
            return await _compete(election, claim, work)


async def _compete(
    election: LeaderElection, claim: "_Claim", work: Callable[[LeaderToken], Coroutine[Any, Any, T]]
) -> Once[T]:
    """Wait until we lead, or until there is nothing to do."""
    gate, loop = election.gate(claim.name), asyncio.get_running_loop()
    give_up_at = loop.time() + claim.left_s
    while not await gate.wait_open(LOOK_S):
        stands = await claim.look()
        if stands is not None and claim.over(stands):
            return Once(ran=False, slot=claim.slot, outcome=stands)
        if loop.time() >= give_up_at and election.leader(claim.name) is not None:
            return Once(ran=False, slot=claim.slot, outcome=stands or "missed")
    return await _lead(election, claim, work)


async def _lead(
    election: LeaderElection, claim: "_Claim", work: Callable[[LeaderToken], Coroutine[Any, Any, T]]
) -> Once[T]:
    """Claim the slot in a term of ours, run the work, and report the outcome."""
    gate = election.gate(claim.name)
    ended: asyncio.Future[tuple[LeaderToken, Once[T], Exception | None]]
    ended = asyncio.get_running_loop().create_future()

    async def run(token: LeaderToken) -> None:
        # Once the work has ended, do not run it again, even if its term was over before: `lead` would restart it.
        if ended.done():
            return
        if (stands := await claim.take(token)) is not None:
            settle(ended, (token, Once(ran=False, slot=claim.slot, outcome=stands), None))
            return
        try:
            value = await work(token)
        except Exception as error:
            if is_loss(error, gate, token):
                raise
            settle(ended, (token, Once(ran=False, slot=claim.slot, outcome="failed"), error))
        else:
            settle(ended, (token, Once(ran=True, slot=claim.slot, value=value), None))

    leading = asyncio.ensure_future(election.lead(claim.name, run))
    try:
        await any_done(leading, ended)
        if not ended.done():
            leading.result()
            raise LockError(f"the election for {claim.name!r} has ended before its work")
        token, result, error = ended.result()
        if error is not None:
            await claim.finish(token, "failed", repr(error))
            raise error
        if result.ran:
            await claim.finish(token, "done", None)
        return result
    finally:
        await cancel_and_wait(leading)  # only now: a cancelled `lead` gives up the term that the report needs


class _Claim:
    """One slot, as one caller sees it."""

    def __init__(self, dsn: Dsn, namespace: str, name: str, *, retry: bool) -> None:
        self._dsn = dsn
        self._connection: PlainConnection | None = None
        self._namespace, self.name, self.slot = namespace, name, ""
        self._retry = retry
        self._taken = False
        self.away_s_max = 0.0
        """How long to repeat a statement while the database does not answer."""
        self.left_s = float("inf")
        """The remaining time of the tick when it was chosen."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def choose(self, slot: str | None, every_s: float, time_zone: str) -> None:
        """Choose the named slot, or the one of the current tick by the database's clock."""
        if slot is not None:
            self.slot = slot
            return
        early_s = min(EARLY_S, every_s / 4)
        row = await self._row("slot_tick", every_s=every_s, time_zone=time_zone, early_s=early_s)
        self.slot, self.left_s = f"{row['slot']}/{format_duration(every_s)}", row["left_s"]

    async def look(self) -> Outcome | None:
        """The outcome of the slot so far; None if it was not begun yet."""
        outcome: Outcome | None = (await self._row("slot_look", **self._key))["outcome"]
        return outcome

    def over(self, stands: Outcome) -> bool:
        """With this outcome, is there nothing left to do for us?"""
        return stands == "done" or not self._retry

    async def take(self, token: LeaderToken) -> Outcome | None:
        """Claim the slot in this term: None if that succeeds, otherwise the outcome of the slot so far."""
        if self._taken and not self._retry:
            return "claimed"  # by this call, whose work was interrupted
        row = await self._row("slot_claim", **self._key, **_of(token), retry=self._retry)
        self._taken = self._taken or row["claimed"]
        return None if row["claimed"] else row["outcome"] or "claimed"

    async def finish(self, token: LeaderToken, outcome: Literal["done", "failed"], detail: str | None) -> None:
        """Report the outcome. If that fails, the slot stays open: with "retry" the work is run again."""
        self.away_s_max = FINISH_S_MAX[outcome]
        told = {**self._key, **_of(token), "outcome": outcome, "detail": detail and detail[:DETAIL_MAX]}
        try:
            if not (await self._row("slot_finish", **told))["finished"]:
                raise LockError(
                    f"the work of slot {self.slot} of {self.name!r} has ended, but the slot was claimed by another "
                    "node meanwhile, because our term was over: the work is run twice"
                )
        except (ConnectionError, LockError, SchemaError) as error:
            _log.error("slot_not_finished", lock=self.name, slot=self.slot, outcome=outcome, error=error)
            if outcome == "done":
                raise

    @property
    def _key(self) -> dict[str, object]:
        return {"namespace": self._namespace, "slot_name": self.name, "slot": self.slot}

    async def _row(self, statement: str, **params: object) -> dict[str, Any]:
        """Run a statement on the kept connection, or on a new one if that was lost: a work may run for hours. Each
        statement may safely be sent twice."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + self.away_s_max
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = await PlainConnection.open(await resolved(self._dsn), "pgleaderlock once")
                return await self._connection.row(statement, **params)
            except ConnectionError as error:
                answered = self._connection is not None and not self._connection.closed
                if answered and isinstance(error, Refused):
                    raise statement_error(statement, error, error.said) from None
                if answered or now() >= give_up_at:
                    raise
            await asyncio.sleep(AGAIN_S)


def _of(token: LeaderToken) -> dict[str, object]:
    return {"epoch": token.epoch, "holder": token.holder_identity}


def _checked(every: str | float | None, slot: str | None, time_zone: str, on_failure: str) -> float:
    if (every is None) == (slot is None):
        raise ConfigurationError('give either every="1h" (a tick of the clock) or slot="…" (a name of your own)')
    if on_failure not in get_args(OnSlotFailure):
        raise ConfigurationError(f'on_failure={on_failure!r} is not usable: "retry" or "keep"')
    if every is None:
        if not isinstance(slot, str) or not slot:
            raise ConfigurationError(f"slot={slot!r} is not usable: give a text that is not empty")
        check_text("slot", slot)
        return 0.0
    check_text("time_zone", time_zone)
    every_s = parse_duration_s(every)
    if not every_s >= 1:
        raise ConfigurationError(f"every={every!r} is not usable: a tick is at least one second long")
    if every_s % DAY_S if every_s >= DAY_S else DAY_S % every_s:
        raise ConfigurationError(
            f"every={every!r} is not usable: a tick must divide a day (15m, 1h, 6h), or be whole days (1d, 7d)"
        )
    return every_s
