"""The log of an election's transitions: a term begins, a term ends, a gate opens, a gate closes. One line for each.

Each line says which role and scope key, who holds it, in which epoch, and why. Terms are told by the election as to any
observer; gates turn with the time alone, so they are looked at whenever the election announces changes.
Imports `observer`, `gate`, `keys` and `_logging` only.
"""

from collections.abc import Callable, Mapping

from pgleaderlock._logging import StructuredLogger
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import KeyPair, bigint_from_key_pair
from pgleaderlock.observer import ElectionObserver, LossReason

__all__ = ["TransitionLog"]

# Why a gate opens again in the same term, by what had shut it.
_REOPENED = {"late_heartbeat": "heartbeat_resumed", "vetoed": "veto_lifted"}
_LOUD = ("late_heartbeat", "lost", "superseded")


class TransitionLog(ElectionObserver):
    def __init__(self, log: StructuredLogger, keys: Callable[[], Mapping[str, KeyPair]]) -> None:
        self._log = log
        self._keys = keys
        self.begin("")

    def begin(self, holder_identity: str) -> None:
        """A new run of the election, under this identity."""
        self._holder_identity = holder_identity
        self._open: dict[str, tuple[int | None, int]] = {}
        self._closed: dict[str, tuple[int | None, str]] = {}

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        self._write("leadership_acquired", role, epoch, "failover" if from_other else "free")

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        self._write("leadership_released" if reason == "released" else "leadership_lost", role, epoch, reason)

    def role_removed(self, role: str) -> None:
        """After its release; the gate may not have been looked at since."""
        if (was := self._open.pop(role, None)) is not None:
            self._write("gate_closed", role, was[0], "released")
        self._closed.pop(role, None)

    def look_at(self, gate: LeaderGate) -> None:
        """Write down what has become of the gate since the last look, if anything has."""
        role, epoch, shut_because = gate.role, gate.current_epoch, gate.shut_because
        was, now = self._open.get(role), (epoch, gate.lapses)
        if was is not None and (shut_because is not None or was != now):
            # Shut and open again between two looks: by its deadline, or because the term is another one.
            reason = shut_because or ("late_heartbeat" if was[0] == epoch else "lost")
            del self._open[role]
            self._closed[role] = (was[0], reason)
            self._write("gate_closed", role, was[0], reason)
        if shut_because is None and role not in self._open:
            closed_epoch, why = self._closed.pop(role, (None, ""))
            self._open[role] = now
            self._write("gate_opened", role, epoch, _REOPENED.get(why, why) if closed_epoch == epoch else "term_began")

    def _write(self, event: str, role: str, epoch: int | None, reason: str) -> None:
        keys = self._keys().get(role)
        write = self._log.warning if reason in _LOUD else self._log.info
        write(
            event,
            role=role,
            scope_key=None if keys is None else bigint_from_key_pair(keys),
            holder_identity=self._holder_identity,
            epoch=epoch,
            reason=reason,
        )
