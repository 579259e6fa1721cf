"""The task of one `LeaderElection`: one session, any number of roles, a tick at a time.

A tick sends at most a heartbeat (one a node, whatever the number of roles) and one statement that tries every lock it
wants and looks at the holders of the rest. A won lock is followed by a bump, a later statement, because only that one
sees the last predecessor. Deadlines are anchored before the send; whatever fails ends the session, and every gate.

Imports `_releases`, `_requests`, `_upkeep`, `_balancing`, `_winning`, `_board`, `_roles`, `ledger`, `_session`,
`_conninfo`, `_fsm`, `models` and `errors`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from pgleaderlock._balancing import Balancing
from pgleaderlock._board import Board
from pgleaderlock._conninfo import ConnectionSettings, Dsn
from pgleaderlock._fsm import Input
from pgleaderlock._releases import Ended, Releases
from pgleaderlock._requests import Requests
from pgleaderlock._roles import Role
from pgleaderlock._session import DedicatedSession
from pgleaderlock._upkeep import Upkeep
from pgleaderlock._winning import Winning
from pgleaderlock.errors import LockError, PgLeaderLockError
from pgleaderlock.ledger import Ledger
from pgleaderlock.models import LockState
from pgleaderlock.observer import LossReason
from pgleaderlock.retry import reconnect_jitter_s

__all__ = ["Engine"]

T = TypeVar("T")
NEVER = float("inf")
# A flood of notifications costs at most this many tries a second.
TRY_GAP_S = 0.02
BEAT_GAP_S = 0.1
ERROR_BACKOFF_S = (0.2, 0.4, 0.8, 1.6, 3.0)


class Engine:
    """Runs on one event loop; only `wake`, `call` and what asks may be called from another thread's."""

    def __init__(
        self,
        dsn: Dsn,
        connection: ConnectionSettings,
        board: Board,
        roles: Callable[[], Mapping[str, Role]],
        *,
        quiet: Callable[[Role], Awaitable[None]],
        announce: Callable[[], None],
        failed: Callable[[Exception], None],
        attempted: Callable[[], None],
    ) -> None:
        self._dsn = dsn
        self._connection = connection
        self._board = board
        self._settings, self._identity = board.settings, board.identity
        self._clock, self._rng, self._log = board.clock, board.rng, board.log
        self._first_roles = roles
        self._announce = announce
        self._failed = failed
        self._attempted = attempted
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._releases = Releases(board, quiet, self._woken.set)
        self._requests = Requests(board, self._releases)
        self._upkeep = Upkeep(board)
        self._balancing = Balancing(board)
        self._winning = Winning(board, self._balancing, self._hurry, failed)
        self.acked_at: float | None = None
        """The clock before the send of the last acknowledged beat; None without a session."""
        self._beat_due_at = 0.0
        self._beat_at = 0.0
        self._try_due_at = 0.0
        self._tried_at = 0.0
        self._connect_due_at = 0.0
        self._errors = 0

    # --- From outside

    def wake(self, hint: str = "") -> None:
        """Something may have changed: try at once, and look for requests if that is the hint. From any thread."""
        self._from_outside(self._hurry_to_beat if hint == "requested" else self._hurry)

    def ask_stop(self, *, force: bool = False) -> None:
        """Release everything and end; with `force`, without waiting for the work in flight."""
        self._from_outside(self._stop, force)

    def ask_release(self, name: str, *, force: bool = False) -> None:
        self._from_outside(self._ask_release, name, force)

    def call(self, fn: Callable[[], T]) -> "Future[T]":
        """Run it on the engine's loop: at once if this is it. Whoever waits for its answer waits for our end, too."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                result = fn()
            except Exception as error:
                with contextlib.suppress(InvalidStateError):
                    answer.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                    answer.set_result(result)

        if asyncio.get_running_loop() is self._loop:
            run()
        else:
            self._from_outside(run)
        return answer

    def _from_outside(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the engine with it
            self._loop.call_soon_threadsafe(call, *args)

    def _hurry(self) -> None:
        self._try_due_at = min(self._try_due_at, max(self._clock.now(), self._tried_at + TRY_GAP_S))
        self._woken.set()

    def _hurry_to_beat(self) -> None:
        """Requests are read with the beat; one a notification would let a flood beat us breathless."""
        self._beat_due_at = min(self._beat_due_at, max(self._clock.now(), self._beat_at + BEAT_GAP_S))
        self._woken.set()

    def _stop(self, force: bool) -> None:
        self._board.stopping = True
        self._board.forced |= force
        self._woken.set()

    def _ask_release(self, name: str, force: bool) -> None:
        role = self._board.roles.get(name)
        if role is not None and role.driver.state is LockState.LEADER:
            role.release_asked = True
        if force:
            self._releases.stop_waiting([name])
        self._woken.set()

    # --- On our own loop: by way of `call`

    def add(self, role: Role) -> None:
        """Compete for one more role from now on."""
        if self._board.roles.get(role.name) is role:
            return
        self._board.roles = {**self._board.roles, role.name: role}
        role.node_drained = self._requests.draining
        role.driver.feed(Input.START)
        self._hurry()

    def forget(self, role: Role) -> bool:
        """Drop a role that is not held; False if it is, or if it may be any moment."""
        if not role.free or (self._board.ledger is not None and role in self._board.trying):
            return False
        self._board.trying = [other for other in self._board.trying if other is not role]
        self._board.roles = {name: other for name, other in self._board.roles.items() if other is not role}
        role.walk_to_stopped()
        return True

    def drain(self, roles: Collection[Role], *, everything: bool) -> Ended:
        """Give these up and let them be; the answer comes when none of them is held any more."""
        for role in roles:
            role.drained_here |= not everything
            role.release_asked = True  # even if it is resumed before that has begun
        if everything:
            self._requests.drain_node()
            self._hurry_to_beat()  # so that others see it
        self._woken.set()
        return self._releases.tell_when_free(roles)

    def resume(self, roles: Collection[Role], *, everything: bool) -> None:
        """Roles that were drained are competed for again."""
        # Looked at here and now: an operator may have drained the node since somebody called for this.
        roles = [role for role in (self._board.roles.values() if everything else roles) if role.drained]
        if everything or self._requests.draining:
            self._requests.resume_node(roles)
            self._hurry_to_beat()
        for role in roles:
            role.drained_here = False
        self._releases.resumed(roles)
        self._hurry()

    # --- The task

    async def run(self) -> None:
        for role in self._first_roles().values():
            self.add(role)
        try:
            while not (self._board.stopping and self._board.nothing_held()):
                try:
                    await self._tick()
                except PgLeaderLockError as error:
                    await self._lose(error)
                except Exception as error:
                    # A bug, or a driver that fails in a way nobody has seen: competing must go on all the same.
                    self._log.error("unexpected_error", exc_info=error, error=error)
                    await self._lose(error)
                else:
                    self._errors = 0 if self._board.ledger is not None else self._errors
                self._releases.tell()
                self._announce()
                await self._rest()
            await self._say_goodbye()
        finally:
            await self._end()

    async def _tick(self) -> None:
        if self._board.ledger is None:
            if self._board.stopping or self._clock.now() < self._connect_due_at:
                return
            self._board.trying = self._winning.wanted()
            await self._connect()
        now = self._clock.now()
        if self._beat_due_at <= now:
            await self._beat()
        await self._releases.begin()
        if (others_first_until := await self._releases.finish()) is not None:
            self._try_due_at = min(self._try_due_at, others_first_until)
            self._releases.tell()
        await self._requests.finish()
        if not self._board.stopping and self._try_due_at <= self._clock.now():
            self._tried_at, self._try_due_at = self._clock.now(), NEVER
            due_at = await self._winning.try_locks()
            self._try_due_at = min(self._try_due_at, due_at)  # or earlier, if somebody has woken us meanwhile
        await self._winning.begin_terms()
        self._board.trying = ()
        # If nothing else was sent, there is room for what is not urgent.
        idle = max(self._beat_at, self._tried_at) < now and not self._board.stopping
        if idle and not await self._upkeep.run(self._beat_due_at) and await self._balancing.run():
            self._hurry_to_beat()

    async def _connect(self) -> None:
        session = await DedicatedSession.open(self._dsn, self._connection)
        ledger = Ledger(session, self._identity, self._settings.channel)
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
            await session.close()
            raise
        self._board.ledger = ledger
        self.acked_at = sent_at
        self._beat_due_at = self._clock.now() + self._settings.heartbeat_interval_s
        self._try_due_at = 0.0
        self._upkeep.plan()
        await self._balancing.begin()
        self._attempted()

    async def _beat(self) -> None:
        sent_at = self._beat_at = self._clock.now()
        led = self._board.led()
        settled = [role for role in led if not role.settled_told and role.settled_at <= sent_at]
        telling = self._requests.to_tell
        beat = await self._board.there().beat([role.name for role in settled], telling)
        acked_at = self._clock.now()
        self._requests.told(telling)
        self.acked_at = sent_at
        self._board.observers.tell("beaten", acked_at - sent_at)
        for role in settled:
            role.settled_told = role.name in beat.settled
        self._beat_due_at = sent_at + self._settings.heartbeat_interval_s * self._rng.uniform(0.8, 1.2)
        if (beat.roles, beat.epochs) != (len(led), sum(role.epoch or 0 for role in led)):
            await self._reconcile(led)
        # Only now: whoever took an epoch from us counts from the beat before this one. An answer that came too late
        # renews nothing: its deadline is past already.
        for role in led:
            role.gate.renew(sent_at + self._settings.gate_s)
        await self._requests.obey(beat)
        if self._requests.to_tell is not None:
            self._hurry_to_beat()  # so that others see what this node has just begun

    async def _reconcile(self, led: list[Role]) -> None:
        """The ledger does not agree about what this session leads: an operator has advanced an epoch, or held a row."""
        owned = await self._board.there().owned()
        # Given up while somebody held the row. Whoever balances leaves it alone for as long as it seems to be led.
        given_up = {name: (epoch, False) for name, epoch in owned.items() if name not in {role.name for role in led}}
        if given_up:
            await self._board.there().end_terms(given_up)
        superseded = [(role, role.epoch) for role in led if owned.get(role.name) != role.epoch]
        for role, _ in superseded:
            role.gate.close("lost")
        for role, epoch in superseded:
            self._lose_role(role, epoch, LockError(f"epoch {epoch} of {role.name!r} was superseded"), "superseded")
        if superseded:
            await self._board.there().unlock({role.name: role.keys for role, _ in superseded})
            for role, _ in superseded:
                role.holds_lock = False
            self._hurry()

    # --- Losing

    async def _lose(self, error: Exception) -> None:
        """The session is gone, and every term with it: gates first, then everything else."""
        ledger, self._board.ledger = self._board.ledger, None
        self.acked_at = None
        lost = [(role, role.epoch) for role in self._board.led()]
        for role, _ in lost:  # all of them, before anybody is told of one
            role.gate.close("lost")
        for role, epoch in lost:
            self._lose_role(role, epoch, error)
        for role in self._board.roles.values():
            role.holds_lock = False
        if ledger is not None:
            await ledger.session.close()
        self._errors += 1
        self._log.warning("session_lost" if ledger is not None else "connect_failed", error=error)
        if ledger is not None:
            self._board.observers.tell("session_lost", error)
        for role in self._board.trying:
            self._board.observers.tell("attempted", role.name, "error")
        self._board.trying = ()
        self._failed(error)
        self._attempted()
        delay_s = ERROR_BACKOFF_S[min(self._errors, len(ERROR_BACKOFF_S)) - 1]
        self._connect_due_at = self._clock.now() + delay_s + reconnect_jitter_s(delay_s, self._rng)

    def _lose_role(self, role: Role, epoch: int | None, error: Exception, reason: LossReason = "lost") -> None:
        releasing = role.driver.state is LockState.RELEASING
        role.gate.close("lost")
        self._releases.lost(role)
        if self._board.stopping:
            role.driver.request_stop()
        role.driver.feed(Input.DB_ERROR if releasing else Input.HEALTH_FAILED, error)
        self._board.observers.tell("lost", role.name, epoch, reason)
        if releasing:
            self._board.observers.tell("drain_ended", role.name, False)

    # --- Waiting and ending

    async def _rest(self) -> None:
        """Until the next thing is due, somebody wakes us, or the session ends."""
        now = self._clock.now()
        ledger = self._board.ledger
        if ledger is None:
            due = [self._connect_due_at]
        elif self._board.stopping:
            due = [self._beat_due_at]  # the rest is not done any more: due for ever, it would leave the loop to nobody
        else:
            due = [self._beat_due_at, self._try_due_at, self._upkeep.due_at, self._balancing.due_at]
        due_at = min([*due, *self._turns(now)])
        if due_at <= now or (self._board.stopping and self._board.nothing_held()):
            self._woken.clear()
            await asyncio.sleep(0)
            return
        watched = [asyncio.ensure_future(self._woken.wait())]
        if due_at < NEVER:
            watched.append(asyncio.ensure_future(self._clock.sleep(due_at - now)))  # type: ignore[arg-type]
        loss = asyncio.ensure_future(ledger.session.lost()) if ledger is not None else None
        futures = [*watched, *([loss] if loss is not None else [])]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in futures:
                future.cancel()
        self._woken.clear()
        if loss is not None and loss.done() and not loss.cancelled():
            await self._lose(loss.result())
            self._releases.tell()
            self._announce()

    def _turns(self, now: float) -> list[float]:
        """When gates open or shut by themselves, so that the change is announced then."""
        gates = [role.gate for role in self._board.led()]
        return [turn for gate in gates for turn in (gate.opens_at, gate.deadline) if turn > now]

    async def _say_goodbye(self) -> None:
        if self._board.ledger is not None:
            with contextlib.suppress(PgLeaderLockError):
                await self._board.ledger.close()

    async def _end(self) -> None:
        ledger, self._board.ledger = self._board.ledger, None
        self.acked_at = None
        self._releases.end()
        ending = [(role, role.epoch, role.in_term) for role in self._board.roles.values()]
        for role, _, in_term in ending:
            role.gate.close("lost" if in_term else "released")
        for role, epoch, in_term in ending:
            role.walk_to_stopped()
            role.holds_lock = False
            if in_term:
                self._releases.lost(role)
                self._board.observers.tell("lost", role.name, epoch, "lost")
        if ledger is not None:
            await ledger.session.close()
        self._releases.tell(over=True)
        self._attempted()
        self._announce()
