"""The settings of an election: defaults, relations, environment. Pure; every error names the setting and the remedy.

G is `late_threshold_s`: how long an acknowledged heartbeat keeps the gate open, from before it was sent. T is
`session_lease_s`: how long the server waits for a silent session, and at most a successor for its predecessor.
"""

import math
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pgleaderlock._config_duration import positive_s
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import KeyPair, key_pair, key_pair_from_bigint

__all__ = [
    "ROLES_MAX",
    "Timing",
    "check_channel",
    "check_flags",
    "check_optional_seconds",
    "check_retention",
    "checked_node_id",
    "from_environment",
    "one_more_role",
    "role_keys",
    "role_of_environment",
]

# The server's lock table is shared by everybody and holds some 12,000 entries at its defaults: a full one refuses
# new connections. One node takes two entries a role at most, its lock and for a moment its fence.
ROLES_MAX = 5_000
CHANNEL_BYTES_MAX = 63
JITTER = 1.2
RETENTION_S_MIN = 3600.0
LEASE_S_MAX = (2**31 - 1) / 1000


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations that fit each other."""

    heartbeat_interval_s: float
    late_threshold_s: float
    session_lease_s: float
    acquire_delay_s: tuple[float, float]
    standby_wait_s: float

    @classmethod
    def checked(
        cls,
        heartbeat_interval_s: float,
        late_threshold_s: float | None,
        session_lease_s: float | None,
        acquire_delay_s: tuple[float, float],
        standby_wait_s: float,
    ) -> "Timing":
        interval_s = positive_s("heartbeat_interval_s", heartbeat_interval_s)
        gate_s = 2 * interval_s if late_threshold_s is None else positive_s("late_threshold_s", late_threshold_s)
        lease_s = gate_s + max(1.0, gate_s / 10)
        if session_lease_s is not None:
            lease_s = positive_s("session_lease_s", session_lease_s)
        if gate_s <= interval_s * JITTER:
            raise ConfigurationError(
                f"late_threshold_s={gate_s:g} must be longer than a jittered heartbeat_interval_s "
                f"({JITTER} times {interval_s:g}), or the gate shuts between two heartbeats: raise it"
            )
        if lease_s <= gate_s:
            raise ConfigurationError(
                f"session_lease_s={lease_s:g} must be longer than late_threshold_s={gate_s:g}, by more than clocks "
                "drift: a successor relies on the difference"
            )
        if lease_s > LEASE_S_MAX:
            raise ConfigurationError(f"session_lease_s={lease_s:g} is too long: at most {LEASE_S_MAX:.0f}")
        try:
            low_s, high_s = acquire_delay_s
        except (TypeError, ValueError):
            raise ConfigurationError("acquire_delay_s must be a pair of seconds, such as (0.2, 0.8)") from None
        positive_s("acquire_delay_s", low_s)
        if positive_s("acquire_delay_s", high_s) < low_s:
            raise ConfigurationError(f"acquire_delay_s=({low_s:g}, {high_s:g}) must be (shortest, longest)")
        if high_s >= lease_s:
            raise ConfigurationError(
                f"acquire_delay_s goes up to {high_s:g}, and a session that is silent for session_lease_s={lease_s:g} "
                "is dropped: shorten the delay"
            )
        if isinstance(standby_wait_s, bool) or standby_wait_s != 0:
            positive_s("standby_wait_s", standby_wait_s)
        return cls(interval_s, gate_s, lease_s, (float(low_s), float(high_s)), float(standby_wait_s))


def role_keys(roles: str | Iterable[str] | Mapping[str, int], namespace: str) -> dict[str, KeyPair]:
    """Role → its pair of keys. A mapping gives 64-bit keys of the caller's own."""
    if isinstance(roles, Mapping):
        pairs = {name: key_pair_from_bigint(key) for name, key in roles.items()}
        for name in pairs:
            key_pair(name, namespace)  # the name is checked all the same: it is the role's name in the ledger
    else:
        if not isinstance(roles, str | Iterable):
            raise ConfigurationError(f"roles must be a name or several names, not {type(roles).__name__}")
        names = [roles] if isinstance(roles, str) else list(roles)
        pairs = {}
        for name in names:
            if name in pairs:
                raise ConfigurationError(f"role {name!r} is named twice: name each role once")
            pairs[name] = key_pair(name, namespace)
    if not pairs:
        raise ConfigurationError("an election needs at least one role")
    return _distinct(pairs)


def one_more_role(known: Mapping[str, KeyPair], name: str, key: int | None, namespace: str) -> dict[str, KeyPair]:
    """The roles of an election and one more; `key` is a 64-bit key of the caller's own."""
    if not isinstance(name, str):
        raise ConfigurationError(f"a role's name is a text, not {type(name).__name__}")
    (pair,) = role_keys(name if key is None else {name: key}, namespace).values()
    if name in known:
        raise ConfigurationError(f"role {name!r} is one of this election's already: name each role once")
    return _distinct({**known, name: pair})


def _distinct(pairs: dict[str, KeyPair]) -> dict[str, KeyPair]:
    if len(pairs) > ROLES_MAX:
        raise ConfigurationError(
            f"{len(pairs)} roles are too many for one process ({ROLES_MAX} at most): the server's lock table is shared "
            "by everybody; spread them over several databases"
        )
    seen: dict[KeyPair, str] = {}
    for name, pair in pairs.items():
        if pair in seen:
            raise ConfigurationError(f"roles {seen[pair]!r} and {name!r} have the same key: rename one of them")
        seen[pair] = name
    return pairs


def check_channel(channel: object) -> str:
    if not isinstance(channel, str) or not channel or "\0" in channel or len(channel.encode()) > CHANNEL_BYTES_MAX:
        raise ConfigurationError(f"listen_channel must be a name of 1 to {CHANNEL_BYTES_MAX} bytes, not {channel!r}")
    return channel


def checked_node_id(node_id: object) -> str:
    """This node's name; its host's, if none is given."""
    if node_id is None:
        return socket.gethostname()
    if not isinstance(node_id, str) or not node_id.strip() or "\0" in node_id:
        raise ConfigurationError(f"node_id must be a name of this node, such as its host name, not {node_id!r}")
    return node_id


def check_optional_seconds(what: str, value: object) -> None:
    if value is not None:
        positive_s(what, value)


def check_retention(retention_s: object) -> None:
    check_optional_seconds("retention_s", retention_s)
    if isinstance(retention_s, int | float) and retention_s < RETENTION_S_MIN:
        raise ConfigurationError(
            f"retention_s={retention_s:g} is too short to be of any use: give at least {RETENTION_S_MIN:.0f}, "
            "or None to keep everything"
        )


def check_flags(**flags: object) -> None:
    for what, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigurationError(f"{what} must be True or False, not {flag!r}")


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """The variables of the third design as keyword arguments of `LeaderElection`, for those that are set."""
    env = os.environ if environ is None else environ
    found: dict[str, object] = {}
    if dsn := env.get("PG_CONN_STRING"):
        found["dsn"] = dsn
    for variable, setting in (
        ("HEARTBEAT_INTERVAL_MS", "heartbeat_interval_s"),
        ("HEARTBEAT_LATE_THRESHOLD_MS", "late_threshold_s"),
        ("EPOCH_STALE_THRESHOLD_MS", "stale_threshold_s"),
    ):
        if variable in env:
            found[setting] = _milliseconds(env, variable)
    if "ACQUIRE_BACKOFF_MS_MIN" in env or "ACQUIRE_BACKOFF_MS_MAX" in env:
        low_s = _milliseconds(env, "ACQUIRE_BACKOFF_MS_MIN") if "ACQUIRE_BACKOFF_MS_MIN" in env else 0.2
        high_s = _milliseconds(env, "ACQUIRE_BACKOFF_MS_MAX") if "ACQUIRE_BACKOFF_MS_MAX" in env else max(0.8, low_s)
        found["acquire_delay_s"] = (low_s, high_s)
    if channel := env.get("PG_LISTEN_CHANNEL"):
        found["listen_channel"] = channel
    if (enabled := env.get("MSP_LEADER_ENABLED")) is not None:
        found["enabled"] = _truth("MSP_LEADER_ENABLED", enabled)
    if key := env.get("LEADER_LOCK_KEY"):
        if not re.fullmatch(r"-?\d+", key.strip()):
            raise ConfigurationError(f"LEADER_LOCK_KEY={key!r} is no number: give a 64-bit integer, or unset it")
        found["lock_key"] = int(key)
    return found


def role_of_environment(key: int | None) -> str:
    """The role that nobody has named. The ledger knows a role by its name, so that two keys need two of them."""
    return "leader" if key is None else f"leader-{key}"


def _milliseconds(env: Mapping[str, str], variable: str) -> float:
    try:
        value = float(env[variable])
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ConfigurationError(f"{variable}={env[variable]!r} is not usable: give a number of milliseconds above 0")
    return value / 1000


def _truth(variable: str, text: str) -> bool:
    if text.strip().lower() in ("true", "1", "yes", "on"):
        return True
    if text.strip().lower() in ("false", "0", "no", "off"):
        return False
    raise ConfigurationError(f"{variable}={text!r} is neither true nor false")
