"""The task of one `LeaderElection`: one session, any number of roles, one tick at a time.

`Engine._tick` is the whole protocol in order. Its steps call down into `winning`, `releasing` and `balancing`; calls
upwards go through `Owner` only. A tick sends at most one heartbeat (per node, whatever the number of roles) and one
statement that tries every wanted lock and looks at the holders of the rest. A won lock is followed by a bump. That is a
later statement, because only a later snapshot is sure to show the last predecessor.

Deadlines count from before the request was sent. Any failure ends the session and shuts every gate: a statement whose
outcome is unknown is never repeated on its session.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from pgleaderlock._base.aio import first_of
from pgleaderlock._election.balancing import Balancing
from pgleaderlock._election.ledger import Beat, Ledger
from pgleaderlock._election.releasing import Ended, Releases, Requests
from pgleaderlock._election.role import NEVER, Board, Role
from pgleaderlock._election.winning import Winning
from pgleaderlock._lock.fsm import Input
from pgleaderlock.errors import LockError, PgLeaderLockError
from pgleaderlock.gate import GateRecord
from pgleaderlock.models import LockState
from pgleaderlock.observer import Attempted, Beaten, DrainEnded, FailedOver, LossReason, Lost, SessionLost
from pgleaderlock.retry import ExponentialBackoff, reconnect_jitter_s

__all__ = ["Engine", "Namesakes", "Reports", "Upkeep"]

T = TypeVar("T")
ERROR_BACK_OFF = ExponentialBackoff(base_s=0.2, max_s=3.0)
# The mean interval between prunings of the ledger's history by one node; and the pause before another step if one step
# was not enough.
EVERY_S = 600.0
AGAIN_S = 5.0
# A drain is reported to the ledger once it has lasted this long.
DRAIN_TOLD_S = 0.1
# After the ledger has refused a report (a missing grant, for example), none is sent for this long.
REFUSED_S = 5.0


class Engine:
    """Runs on one event loop. Only `wake`, `call` and the `ask_` methods may be called from another thread."""

    def __init__(self, open_ledger: Callable[[int | None], Awaitable[Ledger]], board: Board) -> None:
        self._open_ledger = open_ledger
        self._board, self._due, self._owner = board, board.due, board.owner
        self._settings, self._identity = board.settings, board.identity
        self._clock, self._rng, self._log = board.clock, board.rng, board.log
        self._loop = asyncio.get_running_loop()
        self._releases = Releases(board)
        self._requests = Requests(board, self._releases)
        self._balancing = Balancing(board)
        self._winning = Winning(board, self._balancing)
        self._reports = Reports(board)
        self._upkeep = Upkeep(board)
        self._namesakes = Namesakes(board)
        self.acked_at: float | None = None
        """The clock before the send of the last acknowledged beat; None without a session."""
        self._errors = 0
        self._last_session_id: int | None = None
        self._beats = 0

    # --- The task

    async def run(self, roles: Iterable[Role]) -> None:
        for role in roles:
            self.add(role)
        this = (self._identity.os_pid, self._identity.instance)
        _running.add(this)
        try:
            while not (self._board.stopping and self._board.nothing_held()):
                try:
                    await self._tick()
                except PgLeaderLockError as error:
                    await self._lose(error)
                except Exception as error:
                    # A bug, or an unknown failure of the driver: the node must go on competing.
                    self._log.error("unexpected_error", exc_info=error, error=error)
                    await self._lose(error)
                else:
                    self._errors = 0 if self._board.ledger is not None else self._errors
                self._releases.tell()
                self._owner.announce()
                await self._rest()
            await self._say_goodbye()
        finally:
            _running.discard(this)
            await self._end()

    async def _tick(self) -> None:
        """Beat and obey, release, try and win, report, balance: each step only if it is due.

        Releases come before tries, so that a role is never tried for in the tick that gives it up.
        """
        board, due = self._board, self._due
        if board.ledger is None:
            if board.stopping or self._clock.now() < due.connect_at:
                return
            board.tries(self._winning.wanted())
            await self._connect()
        sent_before = due.sent
        if due.beat_at <= self._clock.now():
            await self._requests.obey(await self._beat())
        if any(role.works.given_up for role in board.led()):
            await self._reports.run()  # before the term ends: the end of a term records no reason
        await self._releases.begin()
        self._requests.end_work()
        if (others_first_until := await self._releases.finish()) is not None:
            due.try_by(others_first_until)
            self._releases.tell()
        await self._requests.finish()
        if not board.stopping and due.try_at <= self._clock.now():
            due.trying()
            due.try_by(await self._winning.try_locks())
        await self._winning.begin_terms()
        board.tries()
        reported = await self._reports.run()
        # What is not urgent runs only in a tick that has sent nothing else.
        idle = due.sent == sent_before and not reported and not board.stopping
        if idle and not await self._upkeep.run() and not await self._namesakes.run() and await self._balancing.run():
            due.beat_soon()

    async def _connect(self) -> None:
        ledger = await self._open_ledger(self._last_session_id)
        sent_at = self._clock.now()
        try:
            await ledger.open(
                gate_s=self._settings.gate_s,
                lease_s=self._settings.lease_s,
                candidate=self._settings.candidate,
                draining=self._requests.draining,
                balance=self._settings.balance,
            )
        except BaseException:
            await ledger.session.close()
            raise
        self._board.opened(ledger)
        self._last_session_id = ledger.session_id
        self.acked_at = sent_at
        self._due.connected(beat_at=self._clock.now() + self._settings.heartbeat_interval_s)
        self._reports.begin()
        self._upkeep.plan()
        self._namesakes.plan()
        await self._balancing.begin()
        self._owner.attempted()

    async def _beat(self) -> Beat:
        sent_at = self._due.beating()
        led = self._board.led()
        settled = [role for role in led if not role.settled_told and role.settled_at <= sent_at]
        telling = self._requests.to_tell
        self._beats += 1
        asked_for = led[self._beats % len(led)] if led else None  # each role in turn
        held = asked_for.keys if asked_for is not None and asked_for.holds_lock else None
        beat = await self._board.open_ledger().beat([role.name for role in settled], telling, held)
        acked_at = self._clock.now()
        self._requests.told(telling)
        self.acked_at = sent_at
        self._owner.notify(Beaten(acked_at - sent_at))
        for role in settled:
            role.told_settled(role.name in beat.settled)
        self._due.beat_next_at(sent_at + self._settings.jittered_interval_s(self._rng))
        if (beat.roles, beat.epochs) != (len(led), sum(role.epoch for role in led)):
            await self._reconcile(led)
        # Only after reconciling: a node that has superseded one of our epochs counts from the beat before this one. A
        # late answer renews nothing, because its deadline has passed already.
        for role in led:
            role.gate.renew(sent_at + self._settings.gate_s)
        return beat

    async def _reconcile(self, led: list[Role]) -> None:
        """The ledger disagrees about what this session leads: an operator has advanced an epoch, or locked a row."""
        ledger = self._board.open_ledger()
        owned = await ledger.owned()
        # Roles given up while their row was locked, so that the term is still open. Nodes that balance do not try for a
        # role while the ledger says that it is led.
        given_up = {name: (epoch, False) for name, epoch in owned.items() if name not in {role.name for role in led}}
        if given_up:
            await ledger.end_terms(given_up)
        superseded = [role for role in led if owned.get(role.name) != role.epoch]
        for role in superseded:
            role.gate.close("lost")
        for role in superseded:
            error = LockError(f"epoch {role.epoch} of {role.name!r} was superseded")
            self._lose_role(role, error, "superseded")
        if superseded:
            await ledger.unlock({role.name: role.keys for role in superseded})
            for role in superseded:
                role.unlocked()
            self._due.try_soon()

    # --- Losing

    async def _lose(self, error: Exception) -> None:
        """The session is gone, and every term with it: gates first, then everything else."""
        ledger = self._board.closed()
        self.acked_at = None
        lost = self._board.led()
        for role in lost:  # close every gate before any callback or log line
            role.gate.close("lost")
        for role in lost:
            self._lose_role(role, error)
        for role in self._board.roles.values():
            role.unlocked()
        if ledger is not None:
            await ledger.session.close()
        self._errors += 1
        self._log.warning("session_lost" if ledger is not None else "connect_failed", error=error)
        if ledger is not None:
            self._owner.notify(SessionLost(error))
        for role in self._board.trying:
            self._owner.notify(Attempted(role.name, "error"))
        self._board.tries()
        self._owner.failed(error)
        self._owner.attempted()
        delay_s = ERROR_BACK_OFF.delay_s(self._errors)
        self._due.connect_after(delay_s + reconnect_jitter_s(delay_s, self._rng))

    def _lose_role(self, role: Role, error: Exception, reason: LossReason = "lost") -> None:
        releasing = role.driver.state is LockState.RELEASING
        self._releases.lost(role)
        others_first_until = self._clock.now() + self._settings.acquire_delay_s[1]
        role.lost(error, stopping=self._board.stopping, rest_until=others_first_until)
        self._owner.notify(Lost(role.name, role.epoch, reason))
        if releasing:
            self._owner.notify(DrainEnded(role.name, clean=False))

    # --- Waiting and ending

    async def _rest(self) -> None:
        """Until the next step is due, something wakes us, or the session ends."""
        now, due = self._clock.now(), self._due
        ledger = self._board.ledger
        if ledger is None:
            moments = [due.connect_at]
        elif self._board.stopping:
            # A stopping engine skips the other steps: waiting for one that stays due would spin this loop.
            moments = [due.beat_at, self._reports.due_at, self._requests.due_at]
        else:
            others = [self._upkeep.due_at, self._namesakes.due_at, self._balancing.due_at]
            moments = [due.beat_at, due.try_at, self._reports.due_at, self._requests.due_at, *others]
        due_at = min([*moments, *self._turns(now)])
        if due_at <= now or (self._board.stopping and self._board.nothing_held()):
            due.woken.clear()
            await asyncio.sleep(0)
            return
        lost = asyncio.Event().wait() if ledger is None else ledger.session.lost()
        nap = self._clock.sleep(due_at - now) if due_at < NEVER else asyncio.Event().wait()
        loss, *_ = await first_of(lost, nap, due.woken.wait())
        due.woken.clear()
        if not loss.cancelled():
            await self._lose(loss.result())
            self._releases.tell()
            self._owner.announce()

    def _turns(self, now: float) -> list[float]:
        """The times at which gates open or shut by the clock alone, so that the change is announced then."""
        gates = [role.gate for role in self._board.led()]
        return [turn for gate in gates for turn in (gate.opens_at, gate.deadline) if turn > now]

    async def _say_goodbye(self) -> None:
        if self._board.ledger is not None:
            with contextlib.suppress(PgLeaderLockError):
                await self._board.ledger.close()

    async def abandon(self) -> None:
        """The loop was closed under the engine: free its locks, from another loop."""
        if (ledger := self._board.closed()) is not None:
            await ledger.session.close()

    async def _end(self) -> None:
        ledger = self._board.closed()
        self.acked_at = None
        self._releases.end()
        ending = [(role, role.in_term) for role in self._board.roles.values()]
        for role, in_term in ending:
            role.gate.close("lost" if in_term else "released")
        for role, in_term in ending:
            role.stopped()
            if in_term:
                self._releases.lost(role)
                self._owner.notify(Lost(role.name, role.epoch, "lost"))
        if ledger is not None:
            await ledger.session.close()
        self._releases.tell(over=True)
        self._owner.attempted()
        self._owner.announce()

    # --- From outside: on any thread

    def wake(self, hint: str = "") -> None:
        """Something may have changed: try at once, or look for requests if that is the hint."""
        self._from_outside(self._due.beat_soon if hint == "requested" else self._due.try_soon)

    def ask_stop(self, *, force: bool = False) -> None:
        """Release everything and end; with `force`, without waiting for the work in flight."""
        self._from_outside(self._stop, force)

    def ask_release(self, name: str, epoch: int, *, force: bool = False) -> None:
        """Give up one role if this epoch's term still lasts; with `force`, wait no longer for its work."""
        self._from_outside(self._ask_release, name, epoch, force)

    def call(self, fn: Callable[[], T]) -> "Future[T]":
        """Run `fn` on the engine's loop, at once if called there. A caller that waits for the result must also watch
        for the end of the engine, after which nothing is run."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                result = fn()
            except Exception as error:
                with contextlib.suppress(InvalidStateError):
                    answer.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):  # the caller no longer waits for it
                    answer.set_result(result)

        if asyncio.get_running_loop() is self._loop:
            run()
        else:
            self._from_outside(run)
        return answer

    def _from_outside(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the engine has ended with it
            self._loop.call_soon_threadsafe(call, *args)

    def _stop(self, force: bool) -> None:
        self._board.stop(force=force)
        self._due.woken.set()

    def _ask_release(self, name: str, epoch: int, force: bool) -> None:
        role = self._board.roles.get(name)
        if role is None or role.epoch != epoch:
            return  # the request was for a term that is over, not for the current one
        if role.driver.state is LockState.LEADER:
            role.ask_release()
        if force:
            self._releases.stop_waiting([name])
        self._due.woken.set()

    # --- From outside: on the engine's loop, by way of `call`

    def add(self, role: Role) -> None:
        """Start to compete for one more role."""
        if self._board.roles.get(role.name) is role:
            return
        self._board.add(role)
        if self._requests.draining:
            role.drain(with_node=True)
        role.driver.feed(Input.START)
        self._due.try_soon()

    def forget(self, role: Role) -> bool:
        """Drop a role that is not held; False if it is held, or a statement that may win it is under way."""
        if not role.free or (self._board.ledger is not None and role in self._board.trying):
            return False
        self._board.drop(role)
        role.stopped()
        return True

    def drain(self, roles: Collection[Role], *, everything: bool) -> Ended:
        """Give these roles up and do not compete for them. The future resolves once none of them is held."""
        for role in roles:
            role.drain(with_node=everything)
        if everything:
            self._requests.drain_node()
            self._due.beat_soon()  # the heartbeat tells other nodes
        self._due.woken.set()
        return self._releases.tell_when_free(roles)

    def resume(self, roles: Collection[Role], *, everything: bool) -> None:
        """Compete again for roles that were drained."""
        # Evaluated on this loop, and not by the caller: an operator may have drained the node meanwhile.
        roles = [role for role in (self._board.roles.values() if everything else roles) if role.drained]
        if everything or self._requests.draining:
            self._requests.resume_node(roles)
            self._due.beat_soon()
        for role in roles:
            role.resume()
        self._releases.resumed(roles)
        self._due.try_soon()


class Reports:
    """Reports to the ledger, at each change, the state of this node's gates and the roles that it competes for.

    The reports are for people; no node decides by them. They are sent after the decisions of a tick. A report that the
    ledger has not recorded is sent again in a later tick.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: dict[str, tuple[object, ...]] = {}
        self._declared: list[str] | None = None
        self._not_before = 0.0
        self.due_at = NEVER

    def begin(self) -> None:
        """A new session: report everything again."""
        self._told = {}
        self._declared = None
        self._not_before = 0.0
        self.due_at = NEVER

    async def run(self) -> bool:
        """Called at the end of a tick; True if this has sent something."""
        ledger, now = self._board.open_ledger(), self._board.clock.now()
        self.due_at = NEVER
        if not ledger.records_gates or now < self._not_before:
            return False
        declared = await self._declare(ledger, now)
        return await self._tell_gates(ledger, now) or declared

    async def _declare(self, ledger: Ledger, now: float) -> bool:
        board = self._board
        wanted = [] if board.stopping else [role.name for role in board.roles.values() if role.competes]
        if wanted == self._declared or (board.stopping and board.nothing_held()):
            return False
        if await ledger.declare_roles(wanted):
            self._declared = wanted
        else:
            self._not_before = now + REFUSED_S
        return True

    async def _tell_gates(self, ledger: Ledger, now: float) -> bool:
        marks = {role: _mark(role) for role in self._board.led()}
        changed = [role for role, mark in marks.items() if role.gate.untold or self._told.get(role.name) != mark]
        news = {role.name: (role, marks[role], role.gate.record()) for role in changed}
        for name, (role, _, record) in list(news.items()):
            # Most drains end at once: then only their end is reported.
            ripe_at = now if record.shut_at is None else record.shut_at + DRAIN_TOLD_S
            if role.driver.state is LockState.RELEASING and now < ripe_at:
                self.due_at = min(self.due_at, ripe_at)
                del news[name]
        if not news:
            return False
        recorded = await ledger.report_gates([_report(role, record, now) for role, _, record in news.values()])
        if not recorded:
            self._not_before = now + REFUSED_S
        for name in recorded.keys() & news.keys():
            role, mark, record = news[name]
            self._told[name] = mark
            role.gate.told(record.gaps)
            if (failover_s := recorded[name]) is not None:
                self._board.owner.notify(FailedOver(name, role.epoch, max(0.0, failover_s)))
        return True


def _mark(role: Role) -> tuple[object, ...]:
    """What a report depends on: a role is reported again when this changes."""
    draining = role.driver.state is LockState.RELEASING
    return role.epoch, role.gate.shut_because, role.works.failure is not None, role.gate.in_flight if draining else None


def _report(role: Role, record: GateRecord, now: float) -> dict[str, object]:
    """The report of one role. Times are sent as ages, because the ledger has another clock."""
    gate, opens_at = role.gate.shut_because or "open", role.gate.opens_at
    return {
        "role": role.name,
        "epoch": role.epoch,
        "gate": gate,
        "in_flight": role.gate.in_flight,
        "work_failed": role.works.failure is not None,
        "opened_age_s": None if record.opened_at is None else max(0.0, now - record.opened_at),
        "opens_in_s": max(0.0, opens_at - now) if gate == "waiting" else None,
        "shut_age_s": None if record.shut_at is None else max(0.0, now - record.shut_at),
        "gaps": [(now - gap.from_at, now - gap.to_at, gap.why) for gap in record.gaps] or None,
    }


class Upkeep:
    """Deletes the ledger's oldest history in small steps. Every node does this now and then.

    It never runs in a tick that has sent something else, nor shortly before a heartbeat.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.due_at = NEVER

    def plan(self, mean_s: float | None = None) -> None:
        """Schedule the next step at a random time, so that the nodes take turns."""
        if self._board.settings.retention_s is None:
            self.due_at = NEVER
        else:
            mean_s = EVERY_S if mean_s is None else mean_s
            self.due_at = self._board.clock.now() + mean_s * self._board.rng.uniform(0.5, 1.5)

    async def run(self) -> bool:
        """Called when nothing else was sent in this tick; True if this has sent something."""
        keep_s = self._board.settings.retention_s
        if self._board.clock.now() < self.due_at or keep_s is None:
            return False
        if (later := _after_the_beat(self._board)) is not None:
            self.due_at = later
            return False
        self.plan(AGAIN_S if await self._board.open_ledger().prune(keep_s) else None)
        return True


def _after_the_beat(board: Board) -> float | None:
    """When the next heartbeat is near, the time after it at which to run what is not urgent; otherwise None."""
    now, beat_at, interval_s = board.clock.now(), board.due.beat_at, board.settings.heartbeat_interval_s
    return max(now, beat_at) + interval_s / 10 if beat_at - now < interval_s / 2 else None


_running: set[tuple[int, str]] = set()
"""The engines of this process, as pid and instance. The pid tells them from those that a forked child has copied."""


class Namesakes:
    """Warns, once per session, of other live processes with this node's name. Decides nothing.

    Each of them is a candidate, but a request that an operator makes of one is carried out by all of them.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.due_at = NEVER

    def plan(self) -> None:
        """Schedule the check after T: by then every live process has sent a heartbeat since this session began."""
        self.due_at = self._board.clock.now() + self._board.settings.lease_s

    async def run(self) -> bool:
        """Called when nothing else was sent in this tick; True if this has sent something."""
        if self._board.clock.now() < self.due_at:
            return False
        if (later := _after_the_beat(self._board)) is not None:
            self.due_at = later
            return False
        self.due_at = NEVER
        me = self._board.identity
        others = await self._board.open_ledger().namesakes([name for pid, name in list(_running) if pid == me.os_pid])
        if others:
            detail = "requests for this node_id reach all of them: give each process a node_id of its own"
            self._board.log.warning("node_id_shared", node_id=me.node_id, others=", ".join(others), detail=detail)
        return True
