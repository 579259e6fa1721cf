"""Every relation between settings, and every formula that derives one from another. Each is written here, once.

The constructors of `LeaderElection` and `LeaderLock` check their keywords here, and `load` checks a file. A relation
yields a `Misfit`, worded by `Words`: an error names what the user wrote, a keyword or a setting with its line.

G (`gate_s`) is how long an acknowledged heartbeat keeps the gate open, counted from before it was sent. It is the
keyword `late_threshold_s` and the setting `late_threshold`. T (`lease_s`) is how long the server waits for a silent
session, and the longest that a successor waits for its predecessor: `session_lease_s`, `lease_duration`.

Pure. It must never change a value that was given.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pgleaderlock._config.durations import SPREAD, positive_s
from pgleaderlock._config.schema import CHANNEL_BYTES_MAX, ELECTION
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import KeyPair, key_pair, key_pair_from_bigint

__all__ = [
    "KEYWORDS",
    "LEASE_S_MAX",
    "ROLES_MAX",
    "LockTiming",
    "Misfit",
    "Timing",
    "Words",
    "check_channel",
    "check_flags",
    "check_optional_seconds",
    "checked_node_id",
    "combination_misfits",
    "gate_under_lease_s",
    "idle_lock_timeout",
    "one_more_role",
    "refuse",
    "role_keys",
    "role_misfits",
    "timing_misfits",
]

# All sessions share the server's lock table, which has some 12,000 entries at its defaults: a full one refuses
# new connections. One node takes at most two entries per role, its lock and for a moment its fence.
ROLES_MAX = 5_000
RETENTION_S_MIN = 3600.0
# PostgreSQL keeps its timeouts as 32-bit milliseconds.
LEASE_S_MAX = (2**31 - 1) / 1000
# A lock's default lease, in health intervals.
LEASE_INTERVALS = 3


# --- Formulas


def gate_of_interval_s(interval_s: float) -> float:
    """G, where neither G nor T was given."""
    return 2 * interval_s


def gate_under_lease_s(lease_s: float) -> float:
    """G, where a file gives T alone."""
    return lease_s - max(1.0, lease_s / 10)


def lease_over_gate_s(gate_s: float) -> float:
    """T, where it was not given. T - G is the allowance for clock drift, and the time that a drain has."""
    return gate_s + max(1.0, gate_s / 10)


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations of an election, checked against each other."""

    heartbeat_interval_s: float
    gate_s: float
    """G"""
    lease_s: float
    """T"""
    acquire_delay_s: tuple[float, float]
    """The shortest and the longest time between two tries of a standby."""
    standby_wait_s: float

    @classmethod
    def derived(
        cls, interval_s: float, gate_s: float | None, lease_s: float | None, delay_s: tuple[float, float], wait_s: float
    ) -> "Timing":
        """Derive G and T where they are None. Checks nothing."""
        gate_s = gate_of_interval_s(interval_s) if gate_s is None else gate_s
        lease_s = lease_over_gate_s(gate_s) if lease_s is None else lease_s
        return cls(float(interval_s), float(gate_s), float(lease_s), delay_s, float(wait_s))

    @classmethod
    def checked(
        cls,
        heartbeat_interval_s: float,
        late_threshold_s: float | None,
        session_lease_s: float | None,
        acquire_delay_s: tuple[float, float],
        standby_wait_s: float,
    ) -> "Timing":
        """Derive and check. Raises a `ConfigurationError` that names a keyword of `LeaderElection` and the remedy."""
        positive_s("heartbeat_interval_s", heartbeat_interval_s)
        check_optional_seconds(late_threshold_s=late_threshold_s, session_lease_s=session_lease_s)
        try:
            low_s, high_s = acquire_delay_s
        except (TypeError, ValueError):
            raise ConfigurationError("acquire_delay_s must be a pair of seconds, such as (0.2, 0.8)") from None
        delay_s = positive_s("acquire_delay_s", low_s), positive_s("acquire_delay_s", high_s)
        if isinstance(standby_wait_s, bool) or standby_wait_s != 0:  # zero is off
            positive_s("standby_wait_s", standby_wait_s)
        timing = cls.derived(heartbeat_interval_s, late_threshold_s, session_lease_s, delay_s, standby_wait_s)
        given = {"late_threshold": late_threshold_s, "lease_duration": session_lease_s}
        refuse(timing_misfits(timing, Words(key for key, value in given.items() if value is not None)))
        return timing

    @property
    def statement_timeout_s(self) -> float:
        """How long a statement of the election's session may take."""
        return max(1.0, self.gate_s / 2)

    def jittered_interval_s(self, rng: random.Random) -> float:
        """The time to the next heartbeat: random, so that nodes do not beat in step."""
        return self.heartbeat_interval_s * rng.uniform(*SPREAD)


@dataclass(frozen=True, slots=True)
class LockTiming:
    """The durations of a lock, checked against each other."""

    health_interval_s: float
    health_timeout_s: float
    """How long a statement of the lock's session may take."""
    lease_s: float
    """T"""

    @classmethod
    def derived(
        cls, health_interval_s: float, health_timeout_s: float | None, session_lease_s: float | None
    ) -> "LockTiming":
        """Derive what is None. Checks nothing."""
        timeout_s = health_interval_s if health_timeout_s is None else health_timeout_s
        default_s = min(LEASE_INTERVALS * health_interval_s, LEASE_S_MAX)
        lease_s = default_s if session_lease_s is None else session_lease_s
        return cls(float(health_interval_s), float(timeout_s), float(lease_s))

    @classmethod
    def checked(
        cls, health_interval_s: float, health_timeout_s: float | None, session_lease_s: float | None
    ) -> "LockTiming":
        """Derive and check. Raises a `ConfigurationError` that names a keyword of `LeaderLock` and the remedy."""
        positive_s("health_interval_s", health_interval_s)
        check_optional_seconds(health_timeout_s=health_timeout_s, session_lease_s=session_lease_s)
        timing = cls.derived(health_interval_s, health_timeout_s, session_lease_s)
        refuse(lock_misfits(timing))
        return timing

    @property
    def trust_s(self) -> float:
        """G: how long a good probe is believed, counted from before it was sent."""
        return self.health_interval_s + self.health_timeout_s

    @property
    def margin_s(self) -> float:
        """The time to end the work: from when this node notices a lost connection until the server frees the lock."""
        return self.lease_s - self.trust_s


# --- How a broken relation is reported


@dataclass(frozen=True, slots=True)
class Misfit:
    """Settings that do not fit each other: what is wrong, and what to do."""

    at: tuple[str, ...]
    """The keys of the settings to correct, of which the first that was given is reported; or a role's name."""
    text: str
    remedy: str


_KEYWORD_OF = {setting.key: setting.option or setting.key for setting in ELECTION}


class Words:
    """The names by which the user knows the settings; this module uses their keys in the table. These are the keywords
    of a constructor, `session_lease_s=7`; `load` has the names in a file."""

    def __init__(self, given: Iterable[str] = ()) -> None:
        self._given = frozenset(given)

    def is_given(self, key: str) -> bool:
        return key in self._given

    def name(self, key: str) -> str:
        return _KEYWORD_OF[key]

    def said(self, key: str, value: object) -> str:
        """The setting and its value."""
        shown = f"({', '.join(map(self.duration, value))})" if isinstance(value, tuple) else value
        return f"{self.name(key)}={self.duration(shown) if isinstance(shown, float) else shown}"

    def told(self, key: str, value: object) -> str:
        """The same, with the place where it was given."""
        return self.said(key, value)

    def duration(self, duration_s: float) -> str:
        return f"{duration_s:g}"

    def literal(self, duration_s: float | None) -> str:
        """A duration as a value of a setting; None for no value."""
        return "None" if duration_s is None else f"{duration_s:.0f}"


KEYWORDS = Words()


def refuse(misfits: Iterable[Misfit]) -> None:
    """Raise a `ConfigurationError` for the first of them, if there is one."""
    for misfit in misfits:
        raise ConfigurationError(f"{misfit.text}: {misfit.remedy}")


# --- Relations


def lock_misfits(timing: LockTiming) -> Iterator[Misfit]:
    """A lock's settings are keywords only."""
    yield from _too_long(timing.lease_s, KEYWORDS)
    if timing.lease_s <= timing.trust_s:
        text = (
            f"session_lease_s={timing.lease_s:g} must be longer than health_interval_s + health_timeout_s = "
            f"{timing.trust_s:g}, or the server drops a healthy leader"
        )
        yield Misfit(("lease_duration",), text, "raise session_lease_s or lower the others")


def timing_misfits(timing: Timing, words: Words) -> Iterator[Misfit]:
    """1.2 times the interval < G < T, and a standby's delays < T."""
    lease = words.name("lease_duration")
    if timing.lease_s <= timing.gate_s:
        text = (
            f"{words.said('lease_duration', timing.lease_s)} must be longer than "
            f"{words.told('late_threshold', timing.gate_s)}, because a successor relies on the difference"
        )
        remedy = f"raise {lease} to {words.duration(lease_over_gate_s(timing.gate_s))}, or leave it out"
        yield Misfit(("lease_duration",), text, remedy)
    yield from _gate_misfits(timing, words)
    yield from _too_long(timing.lease_s, words)
    shortest_s, longest_s = timing.acquire_delay_s
    delays = words.said("check_interval", timing.acquire_delay_s)
    if shortest_s > longest_s:
        text = f"{delays} must be the shortest and the longest delay"
        yield Misfit(("check_interval",), text, "put the shorter one first")
    if longest_s >= timing.lease_s:
        text = (
            f"{delays} must be shorter than {lease} "
            f"({words.duration(timing.lease_s)}), or the server drops a standby that waits"
        )
        at = ("check_interval", "lease_duration", "late_threshold", "refresh_interval")
        yield Misfit(at, text, f"shorten {words.name('check_interval')}, or raise {lease}")


def _gate_misfits(timing: Timing, words: Words) -> Iterator[Misfit]:
    least_s = timing.heartbeat_interval_s * SPREAD[1]
    if timing.gate_s > least_s:
        return
    gate, lease = words.name("late_threshold"), words.name("lease_duration")
    interval = f"{words.told('refresh_interval', timing.heartbeat_interval_s)}, stretched by up to a fifth,"
    shorter = f"shorten {words.name('refresh_interval')} to {words.duration(_below_s(timing.gate_s / SPREAD[1]))}"
    if words.is_given("lease_duration") and not words.is_given("late_threshold"):  # G follows from T
        text = (
            f"{words.said('lease_duration', timing.lease_s)} keeps the gate open for "
            f"{words.duration(max(0.0, timing.gate_s))} (G) only, and {interval} is not shorter"
        )
        # The bound of T whose `gate_under_lease_s` is the bound of G.
        remedy = f"raise {lease} to {words.duration(_above_s(max(least_s + 1, least_s / 0.9)))}"
        yield Misfit(("lease_duration",), text, f"{remedy}, or {shorter}" if timing.gate_s > 0.001 else remedy)
        return
    text = (
        f"{words.said('late_threshold', timing.gate_s)} must be longer than {interval} or the gate shuts between two "
        "heartbeats"
    )
    higher_s = _above_s(least_s)
    remedy = f"raise {gate} to {words.duration(higher_s)}"
    if words.is_given("lease_duration") and timing.lease_s <= higher_s:
        remedy += f" and {lease} to {words.duration(_above_s(lease_over_gate_s(higher_s)))}"
    yield Misfit(("late_threshold",), text, f"{remedy}, or {shorter}")


def _too_long(lease_s: float, words: Words) -> Iterator[Misfit]:
    if lease_s > LEASE_S_MAX:
        at = ("lease_duration", "late_threshold", "refresh_interval")
        remedy = f"give at most {words.literal(math.floor(LEASE_S_MAX))}, which is what PostgreSQL takes"
        yield Misfit(at, f"{words.said('lease_duration', lease_s)} is too long", remedy)


def _above_s(bound_s: float) -> float:
    """A round duration above the bound."""
    step_s = 1.0 if bound_s >= 1 else 0.001
    return (math.floor(bound_s / step_s + 1e-9) + 1) * step_s


def _below_s(bound_s: float) -> float:
    """A round duration below the bound."""
    step_s = 1.0 if bound_s > 1 else 0.001
    return max(0.001, (math.ceil(bound_s / step_s - 1e-9) - 1) * step_s)


def combination_misfits(
    words: Words,
    *,
    roles: int = 1,
    standby_wait_s: float,
    allow_pooler: bool,
    lock_timeout_s: float | None = None,
    balance: bool = False,
    retention_s: float | None = None,
    hold: str = "session",
) -> Iterator[Misfit]:
    """Settings that cannot be combined, or have no effect. Of these, a lock has only `standby_wait_s` and
    `allow_pooler`."""
    waits = words.said("standby_wait", standby_wait_s)
    if standby_wait_s and roles > 1:
        text = f"{waits} waits at the server for one role only, and there are {roles}"
        yield Misfit(("standby_wait",), text, "remove it, or give each role a process of its own")
    if standby_wait_s and balance:
        text = (
            f"{waits} and {words.told('balance', balance)} cannot be combined, because a node that waits at the server "
            "leaves the role to no other"
        )
        yield Misfit(("standby_wait",), text, "remove one of the two")
    for key, duration_s in (("standby_wait", standby_wait_s), ("lock_timeout", lock_timeout_s)):
        if duration_s and allow_pooler:
            pooler = words.told("allow_pooler", allow_pooler)
            text = f"{words.name(key)} cannot be used behind a pooler, which {pooler} permits"
            yield Misfit((key,), text, "remove one of the two, or connect without a pooler")
        if duration_s and hold == "lease":
            text = f"{words.name(key)} needs a session, and {words.told('hold', hold)} has none"
            yield Misfit((key,), text, "remove one of the two")
    if balance and hold == "lease":
        text = f"{words.told('balance', balance)} cannot be combined with {words.told('hold', hold)} yet"
        yield Misfit(("balance",), text, "remove one of the two")
    if retention_s is not None and retention_s < RETENTION_S_MIN:
        text = f"{words.said('retention', retention_s)} is too short to be of any use"
        keep = f"give at least {words.literal(RETENTION_S_MIN)}, or {words.literal(None)} to keep everything"
        yield Misfit(("retention",), text, keep)


def idle_lock_timeout(lock_timeout_s: float | None, timing: Timing, words: Words) -> Iterator[Misfit]:
    """A `lock_timeout` that can never expire: a warning, not an error."""
    limit_s = timing.statement_timeout_s
    if lock_timeout_s is not None and lock_timeout_s >= limit_s:
        said = words.said("lock_timeout", lock_timeout_s)
        text = f"{said} has no effect: a statement ends after {words.duration(limit_s)} anyway"
        yield Misfit(("lock_timeout",), text, "shorten it, or leave it out")


def role_misfits(pairs: Mapping[str, KeyPair]) -> Iterator[Misfit]:
    """Too many roles, or two that exclude each other. `Misfit.at` is a role's name."""
    if len(pairs) > ROLES_MAX:
        text = f"{len(pairs)} roles are too many for one process ({ROLES_MAX} at most)"
        remedy = "the server's lock table is shared by everybody; spread them over several databases"
        yield Misfit((list(pairs)[ROLES_MAX],), text, remedy)
    seen: dict[KeyPair, str] = {}
    for name, pair in pairs.items():
        if pair in seen:
            yield Misfit((name,), f"roles {seen[pair]!r} and {name!r} have the same key", "change one of them")
        seen.setdefault(pair, name)


# --- Roles


def role_keys(roles: str | Iterable[str] | Mapping[str, int], namespace: str) -> dict[str, KeyPair]:
    """Role → its pair of keys. The values of a mapping are 64-bit keys chosen by the caller."""
    if isinstance(roles, Mapping):
        pairs = {name: key_pair_from_bigint(key) for name, key in roles.items()}
        for name in pairs:
            key_pair(name, namespace)  # only to check the name, which the ledger uses
    else:
        if not isinstance(roles, str | Iterable):
            raise ConfigurationError(f"roles must be a name or several names, not {type(roles).__name__}")
        pairs = {}
        for name in [roles] if isinstance(roles, str) else roles:
            if name in pairs:
                raise ConfigurationError(f"role {name!r} is named twice: name each role once")
            pairs[name] = key_pair(name, namespace)
    if not pairs:
        raise ConfigurationError("an election needs at least one role")
    refuse(role_misfits(pairs))
    return pairs


def one_more_role(known: Mapping[str, KeyPair], name: str, key: int | None, namespace: str) -> dict[str, KeyPair]:
    """The roles of an election and one more; `key` is a 64-bit key chosen by the caller."""
    if not isinstance(name, str):
        raise ConfigurationError(f"a role's name is a text, not {type(name).__name__}")
    pairs = role_keys(name if key is None else {name: key}, namespace)
    if name in known:
        raise ConfigurationError(f"this election has role {name!r} already: name each role once")
    together = {**known, **pairs}
    refuse(role_misfits(together))
    return together


# --- Single values that a keyword, a setting and an option share


def check_channel(channel: object) -> str:
    if not isinstance(channel, str) or not channel or "\0" in channel or len(channel.encode()) > CHANNEL_BYTES_MAX:
        raise ConfigurationError(f"listen_channel must be a name of 1 to {CHANNEL_BYTES_MAX} bytes, not {channel!r}")
    return channel


def checked_node_id(node_id: object) -> str:
    if not isinstance(node_id, str) or not node_id.strip() or "\0" in node_id:
        raise ConfigurationError(f"node_id must be a name of this node, such as its host name, not {node_id!r}")
    return node_id


def check_optional_seconds(**durations_s: object) -> None:
    for what, duration_s in durations_s.items():
        if duration_s is not None:
            positive_s(what, duration_s)


def check_flags(**flags: object) -> None:
    for what, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigurationError(f"{what} must be True or False, not {flag!r}")
