"""The task of one `LeaderElection`: one session, any number of roles, a tick at a time.

A tick sends at most a heartbeat (one a node, whatever the number of roles) and one statement that tries every lock it
wants and looks at the holders of the rest. A won lock is followed by a bump, a later statement, because only that one
sees the last predecessor. Deadlines are anchored before the send; whatever fails ends the session, and every gate.

Imports `_roles`, `_driver`, `ledger`, `_session`, `_conninfo`, `_fsm`, `models`, `errors`, `_clock`, `_logging`.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pgleaderlock._clock import Clock
from pgleaderlock._conninfo import ConnectionSettings, Dsn
from pgleaderlock._fsm import Input
from pgleaderlock._logging import StructuredLogger
from pgleaderlock._roles import Role, opens_at
from pgleaderlock._session import DedicatedSession
from pgleaderlock.errors import ConnectionError, LockError, PgLeaderLockError
from pgleaderlock.ledger import Bump, Identity, Ledger
from pgleaderlock.models import LeaderToken, LockState
from pgleaderlock.retry import reconnect_jitter_s

__all__ = ["Engine", "EngineSettings"]

NEVER = float("inf")
# A flood of notifications costs at most this many tries a second.
TRY_GAP_S = 0.02
BEAT_GAP_S = 0.1
# A fence that is held by a stuck writer may hold one bump up this long, and all of them together not much longer.
BUSY_WAIT_MS = 100
BUSY_ROLES_A_TICK = 2
ERROR_BACKOFF_S = (0.2, 0.4, 0.8, 1.6, 3.0)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    heartbeat_interval_s: float
    gate_s: float
    lease_s: float
    acquire_delay_s: tuple[float, float]
    standby_wait_s: float
    statement_timeout_s: float
    instant: bool
    evict_stale: bool
    candidate: bool
    channel: str


class Engine:
    """Runs on one event loop; only `wake`, `ask_release` and `ask_stop` may be called from another thread's."""

    def __init__(
        self,
        dsn: Dsn,
        connection: ConnectionSettings,
        settings: EngineSettings,
        identity: Identity,
        roles: Mapping[str, Role],
        *,
        clock: Clock,
        rng: random.Random,
        log: StructuredLogger,
        quiet: Callable[[Role], Awaitable[None]],
        announce: Callable[[], None],
        failed: Callable[[Exception], None],
        attempted: Callable[[], None],
    ) -> None:
        self._dsn = dsn
        self._connection = connection
        self._settings = settings
        self._identity = identity
        self._roles = roles
        self._clock = clock
        self._rng = rng
        self._log = log
        self._quiet = quiet
        self._announce = announce
        self._failed = failed
        self._attempted = attempted
        self._ledger: Ledger | None = None
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._stopping = False
        self._forced = False
        self._beat_due_at = 0.0
        self._beat_at = 0.0
        self._try_due_at = 0.0
        self._tried_at = 0.0
        self._connect_due_at = 0.0
        self._evicted: set[int] = set()
        self._errors = 0
        self._draining: dict[str, asyncio.Future[None]] = {}

    # --- From outside

    def wake(self, hint: str = "") -> None:
        """Something may have changed: try at once, and look for requests if that is the hint. From any thread."""
        self._from_outside(self._hurry_to_beat if hint == "requested" else self._hurry)

    def ask_stop(self, *, force: bool = False) -> None:
        """Release everything and end; with `force`, without waiting for the work in flight."""
        self._from_outside(self._stop, force)

    def ask_release(self, name: str, *, force: bool = False) -> None:
        self._from_outside(self._ask_release, name, force)

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
        self._stopping = True
        self._forced |= force
        self._woken.set()

    def _ask_release(self, name: str, force: bool) -> None:
        role = self._roles[name]
        if role.driver.state is LockState.LEADER:
            role.release_asked = True
        if force and name in self._draining:
            self._draining[name].cancel()
        self._woken.set()

    # --- The task

    async def run(self) -> None:
        for role in self._roles.values():
            role.driver.feed(Input.START)
        try:
            while not (self._stopping and self._nothing_held()):
                try:
                    await self._tick()
                except PgLeaderLockError as error:
                    await self._lose(error)
                except Exception as error:
                    # A bug, or a driver that fails in a way nobody has seen: competing must go on all the same.
                    self._log.error("unexpected_error", exc_info=error, error=error)
                    await self._lose(error)
                else:
                    self._errors = 0 if self._ledger is not None else self._errors
                self._announce()
                await self._rest()
            await self._say_goodbye()
        finally:
            await self._end()

    def _nothing_held(self) -> bool:
        return not any(role.holds_lock for role in self._roles.values())

    async def _tick(self) -> None:
        if self._ledger is None:
            if self._stopping or self._clock.now() < self._connect_due_at:
                return
            await self._connect()
        now = self._clock.now()
        if self._beat_due_at <= now:
            await self._beat()
        await self._begin_releases()
        await self._finish_releases()
        if not self._stopping and self._try_due_at <= self._clock.now():
            await self._try()
        await self._begin_terms()

    async def _connect(self) -> None:
        session = await DedicatedSession.open(self._dsn, self._connection)
        ledger = Ledger(session, self._identity, self._settings.channel)
        try:
            await ledger.open(
                gate_s=self._settings.gate_s, lease_s=self._settings.lease_s, candidate=self._settings.candidate
            )
        except BaseException:
            await session.close()
            raise
        self._ledger = ledger
        self._beat_due_at = self._clock.now() + self._settings.heartbeat_interval_s
        self._try_due_at = 0.0
        self._attempted()

    async def _beat(self) -> None:
        sent_at = self._beat_at = self._clock.now()
        led = [role for role in self._roles.values() if role.in_term]
        settled = [role for role in led if not role.settled_told and role.settled_at <= sent_at]
        beat = await self._there().beat([role.name for role in settled])
        if self._clock.now() < sent_at + self._settings.gate_s:
            for role in led:
                role.gate.renew(sent_at + self._settings.gate_s)
        for role in settled:
            role.settled_told = True
        self._beat_due_at = sent_at + self._settings.heartbeat_interval_s * self._rng.uniform(0.8, 1.2)
        if (beat.roles, beat.epochs) != (len(led), sum(role.epoch or 0 for role in led)):
            await self._reconcile(led)
        for request_id, name in beat.requests:
            asked = self._roles.get(name)
            if asked is not None and asked.driver.state is LockState.LEADER and request_id not in asked.requests:
                asked.requests.append(request_id)
                asked.release_asked = True

    async def _reconcile(self, led: list[Role]) -> None:
        """The ledger does not agree about what this session leads: an operator has advanced an epoch."""
        owned = await self._there().owned()
        for role in led:
            if owned.get(role.name) != role.epoch:
                self._lose_role(role, LockError(f"epoch {role.epoch} of {role.name!r} was superseded"))
                await self._there().unlock({role.name: role.keys})
                role.holds_lock = False
                self._hurry()

    async def _try(self) -> None:
        now = self._clock.now()
        followed = {name: role for name, role in self._roles.items() if not role.holds_lock}
        low_s, high_s = self._settings.acquire_delay_s
        self._try_due_at = now + self._rng.uniform(low_s, high_s)
        self._tried_at = now
        if not followed:
            self._try_due_at = NEVER
            return
        wanted = {name: self._settings.candidate and role.not_before <= now for name, role in followed.items()}
        ledger = self._there()
        looks = await ledger.try_and_look({name: role.keys for name, role in followed.items()}, wanted)
        seen_at = self._clock.now()
        for look in looks:
            role = followed[look.role]
            role.saw(look, seen_at, ledger.history)
            role.holds_lock = look.granted
        if self._settings.standby_wait_s > 0 and self._settings.candidate and not self._stopping:
            (role,) = self._roles.values()
            if not role.holds_lock and role.not_before <= now:
                role.holds_lock = await ledger.session.wait(role.keys, self._settings.standby_wait_s)
                self._try_due_at = 0.0  # parked again at once: the attempt has done its waiting at the server
        if self._settings.evict_stale:
            await self._evict_silent(list(followed.values()))

    async def _evict_silent(self, followed: list[Role]) -> None:
        """A recorded holder that has not beaten for 2 T should have been dropped by its lease: something keeps it."""
        now = self._clock.now()
        for role in followed:
            look, sight = role.look, role.sight
            if role.holds_lock or look is None or sight is None or look.ended or look.lease_s is None:
                continue
            if now - sight.first_seen > 2 * look.lease_s and look.session_id not in self._evicted:
                self._evicted.add(sight.session_id)  # once a session, whatever the number of its roles
                if await self._there().evict(look):
                    self._log.warning("silent_leader_evicted", role=role.name, pid=look.backend_pid)
                    self._hurry()

    async def _begin_terms(self) -> None:
        """The second statement of winning, for every lock that is held without a term."""
        won = {name: role for name, role in self._roles.items() if role.holds_lock and not role.in_term}
        if not won:
            return
        busy = await self._bump(won, wait_ms=0)
        # Those in front of which fenced transactions of the predecessor still run: queue up behind them, briefly.
        self._rng.shuffle(busy)  # so that those which are stuck do not stand in front of those which are only busy
        for name in busy[:BUSY_ROLES_A_TICK]:
            await self._bump({name: self._roles[name]}, wait_ms=BUSY_WAIT_MS)
        if any(role.holds_lock and not role.in_term for role in won.values()):
            self._hurry()

    async def _bump(self, won: Mapping[str, Role], *, wait_ms: int) -> list[str]:
        sent_at = self._clock.now()
        bumps = await self._there().bump({name: role.keys for name, role in won.items()}, wait_ms=wait_ms)
        won_at = self._clock.now()
        if won_at >= sent_at + self._settings.gate_s:
            raise ConnectionError("the answer to the bump came too late to lead on")
        busy = []
        for bump in bumps:
            role = won[bump.role]
            match bump.outcome:
                case "won":
                    self._begin_term(role, bump, sent_at, won_at)
                case "busy":
                    busy.append(bump.role)
                case "collision":
                    await self._there().unlock({role.name: role.keys})
                    role.holds_lock = False
                    role.not_before = NEVER
                    self._failed(
                        LockError(f"the key of role {role.name!r} belongs to another role of this database: rename it")
                    )
                case _:  # the server says that the lock is not ours after all
                    role.holds_lock = False
        return busy

    def _begin_term(self, role: Role, bump: Bump, sent_at: float, won_at: float) -> None:
        assert bump.epoch is not None
        token = LeaderToken(role.name, bump.epoch, self._identity.holder_identity, self._identity.namespace)
        # An instant takeover opens at once, but it has not waited anybody out: whoever follows it still has to.
        role.settled_at = opens_at(role, bump, won_at, own_instance=self._identity.instance)
        role.term_session_id = self._there().session_id
        opening = won_at if self._settings.instant else role.settled_at
        role.settled_told = False
        role.release_asked = False
        role.look = None  # who held it before is no longer who holds it
        # Whether there is a wait or not, the gate never outlives G from before the bump was sent.
        role.gate.open(token, opening, sent_at + self._settings.gate_s)
        role.driver.feed(Input.ACQUIRE_ATTEMPT)
        role.driver.feed(Input.ACQUIRE_SUCCEEDED)

    # --- Giving up on purpose

    async def _begin_releases(self) -> None:
        for role in self._roles.values():
            if role.driver.state is LockState.LEADER and (self._stopping or role.release_asked):
                if self._stopping:
                    role.driver.request_stop()
                role.gate.drain()
                role.driver.feed(Input.STOP_REQUESTED if self._stopping else Input.RELEASE_REQUESTED)
                draining: asyncio.Future[None] = asyncio.ensure_future(self._quiet(role))
                draining.add_done_callback(lambda _: self._woken.set())
                self._draining[role.name] = draining
            elif self._stopping and role.holds_lock and not role.in_term:
                await self._there().unlock({role.name: role.keys})  # won, but the term has not begun
                role.holds_lock = False
        if self._forced:
            for drained in self._draining.values():
                drained.cancel()
            await asyncio.sleep(0)

    async def _finish_releases(self) -> None:
        ready = {name: drained for name, drained in self._draining.items() if drained.done()}
        if not ready:
            return
        now = self._clock.now()
        terms = {}
        for name, drained in ready.items():
            role = self._roles[name]
            # Clean only if the releaser had waited its own predecessor out, and nothing of it is still at work.
            quiet = not drained.cancelled() and drained.exception() is None and not role.gate.in_flight
            terms[name] = (role.epoch or 0, quiet and role.settled_at <= now)
            del self._draining[name]
        for role in (self._roles[name] for name in ready):
            role.gate.close("released")
        ledger = self._there()
        await ledger.end_terms(terms)
        await ledger.unlock({name: self._roles[name].keys for name in ready})
        for name in ready:
            role = self._roles[name]
            role.holds_lock = False
            role.not_before = self._clock.now() + self._settings.acquire_delay_s[1]
            role.driver.feed(Input.RELEASE_SUCCEEDED)
            for request_id in role.requests:
                await ledger.finish_request(request_id)
            role.requests.clear()
        self._try_due_at = min(self._try_due_at, self._clock.now() + self._settings.acquire_delay_s[1])

    # --- Losing

    async def _lose(self, error: Exception) -> None:
        """The session is gone, and every term with it: gates first, then everything else."""
        ledger, self._ledger = self._ledger, None
        for role in self._roles.values():
            if role.in_term:
                self._lose_role(role, error)
            role.holds_lock = False
        if ledger is not None:
            await ledger.session.close()
        self._errors += 1
        self._log.warning("session_lost" if ledger is not None else "connect_failed", error=error)
        self._failed(error)
        self._attempted()
        delay_s = ERROR_BACKOFF_S[min(self._errors, len(ERROR_BACKOFF_S)) - 1]
        self._connect_due_at = self._clock.now() + delay_s + reconnect_jitter_s(delay_s, self._rng)

    def _lose_role(self, role: Role, error: Exception) -> None:
        role.gate.close("lost")
        role.requests.clear()
        if (drained := self._draining.pop(role.name, None)) is not None:
            drained.cancel()
        if self._stopping:
            role.driver.request_stop()
        releasing = role.driver.state is LockState.RELEASING
        role.driver.feed(Input.DB_ERROR if releasing else Input.HEALTH_FAILED, error)

    # --- Waiting and ending

    async def _rest(self) -> None:
        """Until the next thing is due, somebody wakes us, or the session ends."""
        now = self._clock.now()
        due_at = min(self._next_turn(role, now) for role in self._roles.values())
        due_at = min(
            due_at, *([self._connect_due_at] if self._ledger is None else [self._beat_due_at, self._try_due_at])
        )
        if due_at <= now or (self._stopping and self._nothing_held()):
            self._woken.clear()
            return
        watched = [asyncio.ensure_future(self._woken.wait())]
        if due_at < NEVER:
            watched.append(asyncio.ensure_future(self._clock.sleep(due_at - now)))  # type: ignore[arg-type]
        loss = asyncio.ensure_future(self._ledger.session.lost()) if self._ledger is not None else None
        futures = [*watched, *([loss] if loss is not None else [])]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in futures:
                future.cancel()
        self._woken.clear()
        if loss is not None and loss.done() and not loss.cancelled():
            await self._lose(loss.result())
            self._announce()

    def _next_turn(self, role: Role, now: float) -> float:
        """When the gate of this role opens or shuts by itself, so that the change is announced then."""
        if not role.in_term:
            return NEVER
        turns = [turn for turn in (role.gate.opens_at, role.gate.deadline) if turn > now]
        return min(turns, default=NEVER)

    async def _say_goodbye(self) -> None:
        if self._ledger is not None:
            with contextlib.suppress(PgLeaderLockError):
                await self._ledger.close()

    async def _end(self) -> None:
        ledger, self._ledger = self._ledger, None
        for drained in self._draining.values():
            drained.cancel()
        for role in self._roles.values():
            role.gate.close("lost" if role.in_term else "released")
            role.driver.request_stop()
            if role.driver.state not in (LockState.STOPPED, LockState.RELEASING):
                role.driver.feed(Input.STOP_REQUESTED)
            if role.driver.state is LockState.RELEASING:
                role.driver.feed(Input.RELEASE_SUCCEEDED)
            role.holds_lock = False
        if ledger is not None:
            await ledger.session.close()
        self._attempted()
        self._announce()

    def _there(self) -> Ledger:
        if self._ledger is None:
            raise ConnectionError("there is no session")
        return self._ledger
