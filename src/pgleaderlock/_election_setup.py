"""An election's settings as a whole, checked, and what the engine and the listener are built from.

Imports `_board`, `_conninfo`, `_election_settings`, `ledger` and what they stand on. Decides nothing at run time.
"""

import os
import socket
from dataclasses import dataclass, replace
from typing import Literal

from pgleaderlock._board import EngineSettings
from pgleaderlock._conninfo import ConnectionSettings, Dsn, check_dsn, default_application_name
from pgleaderlock._election_settings import (
    Timing,
    check_channel,
    check_flags,
    check_optional_seconds,
    check_retention,
    one_more_role,
)
from pgleaderlock._version import VERSION
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import KeyPair
from pgleaderlock.ledger import Identity

__all__ = ["DEFAULT_CHANNEL", "Setup", "Takeover"]

Takeover = Literal["safe", "instant"]

DEFAULT_CHANNEL = "pgleaderlock"
LISTEN_STATEMENT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What `LeaderElection` was given, with the defaults filled in. One that exists is sound."""

    dsn: Dsn
    keys: dict[str, KeyPair]
    timing: Timing
    takeover: Takeover
    node_id: str
    namespace: str
    listen_channel: str | None
    stale_threshold_s: float | None
    evict_stale: bool
    candidate: bool
    heartbeat_thread: bool
    hard_stop_after_s: float | None
    enabled: bool
    standalone: bool
    allow_pooler: bool
    retention_s: float | None
    balance: bool

    def __post_init__(self) -> None:
        """All of it fits together, or a `ConfigurationError` names the setting and the remedy."""
        if self.timing.standby_wait_s and len(self.keys) > 1:
            raise ConfigurationError("standby_wait_s waits at the server for one role only: name one role, or drop it")
        if self.takeover not in ("safe", "instant"):
            raise ConfigurationError(f"takeover={self.takeover!r} is unknown: give 'safe' or 'instant'")
        if self.listen_channel is not None:
            check_channel(self.listen_channel)
        check_optional_seconds("stale_threshold_s", self.stale_threshold_s)
        check_optional_seconds("hard_stop_after_s", self.hard_stop_after_s)
        check_retention(self.retention_s)
        check_flags(
            evict_stale=self.evict_stale,
            candidate=self.candidate,
            heartbeat_thread=self.heartbeat_thread,
            enabled=self.enabled,
            standalone=self.standalone,
            allow_pooler=self.allow_pooler,
            balance=self.balance,
        )
        if self.timing.standby_wait_s and self.balance:
            raise ConfigurationError("balance leaves roles to others, and standby_wait_s to nobody: drop one of them")
        if self.timing.standby_wait_s and self.allow_pooler:
            raise ConfigurationError("standby_wait_s cannot be used behind a pooler: drop it, or connect without one")
        if not self.standalone and self.enabled:
            check_dsn(self.dsn)

    def with_role(self, name: str, key: int | None) -> "Setup":
        """The same with one more role, or a `ConfigurationError` that says why not."""
        return replace(self, keys=one_more_role(self.keys, name, key, self.namespace))

    def without_role(self, name: str) -> "Setup":
        return replace(self, keys={known: keys for known, keys in self.keys.items() if known != name})

    @property
    def channel(self) -> str:
        """Where this node tells the others, whether it listens itself or not."""
        return self.listen_channel or DEFAULT_CHANNEL

    @property
    def statement_timeout_s(self) -> float:
        return max(1.0, self.timing.late_threshold_s / 2)

    def identity(self, instance: str) -> Identity:
        """Who this is in the ledger. `instance` is new with every start."""
        host = socket.gethostname()
        return Identity(
            namespace=self.namespace,
            instance=instance,
            node_id=self.node_id,
            host=host,
            os_pid=os.getpid(),
            holder_identity=f"{self.node_id}-{host}-{os.getpid()}-{instance}",
            library_version=VERSION,
        )

    def connection(self) -> ConnectionSettings:
        """Of the session that holds the locks."""
        label = next(iter(self.keys)) if len(self.keys) == 1 else f"{len(self.keys)} roles"
        return ConnectionSettings(
            application_name=default_application_name(f"{label} {self.node_id}"),
            statement_timeout_s=self.statement_timeout_s,
            lease_s=self.timing.session_lease_s,
            allow_pooler=self.allow_pooler,
            idle_timeout_s=self.timing.session_lease_s,
        )

    def listener_connection(self) -> ConnectionSettings:
        """Of the session that hears notifications, and holds nothing."""
        return ConnectionSettings(
            application_name=default_application_name(f"listen {self.node_id}"),
            statement_timeout_s=LISTEN_STATEMENT_TIMEOUT_S,
            lease_s=self.timing.session_lease_s,
            allow_pooler=self.allow_pooler,
        )

    def engine(self) -> EngineSettings:
        timing = self.timing
        return EngineSettings(
            heartbeat_interval_s=timing.heartbeat_interval_s,
            gate_s=timing.late_threshold_s,
            lease_s=timing.session_lease_s,
            acquire_delay_s=timing.acquire_delay_s,
            standby_wait_s=timing.standby_wait_s,
            statement_timeout_s=self.statement_timeout_s,
            instant=self.takeover == "instant",
            evict_stale=self.evict_stale,
            candidate=self.candidate,
            channel=self.channel,
            retention_s=self.retention_s,
            balance=self.balance,
        )
