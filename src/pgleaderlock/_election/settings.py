"""The frozen settings of one election: everything that `LeaderElection` was given, checked and completed.

`Setup` is a `Timing` with all other settings; the engine, the listener and the run read it. It decides nothing at run
time, except the name of a node that has no `node_id`.
"""

import errno
import os
import socket
import sys
import threading
from dataclasses import dataclass, replace
from typing import Literal

from pgleaderlock._base.version import VERSION
from pgleaderlock._config.schema import DEFAULT_CHANNEL, ELECTION, SWITCH
from pgleaderlock._config.timing import (
    KEYWORDS,
    Timing,
    check_channel,
    check_flags,
    check_optional_seconds,
    combination_misfits,
    one_more_role,
    refuse,
)
from pgleaderlock._election.ledger import Identity
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn, check_dsn, default_application_name
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import KeyPair

__all__ = ["DEFAULT_CHANNEL", "Hold", "Setup", "Takeover", "default_node_id"]

Takeover = Literal["safe", "instant"]
Hold = Literal["session", "lease"]

LISTEN_STATEMENT_TIMEOUT_S = 5.0
# The highest number in a default node id. Further processes of the host have their pid in the name instead.
NUMBER_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Timing):
    """Every setting of an election. The constructor checks them, so every instance is valid."""

    dsn: Dsn
    keys: dict[str, KeyPair]
    takeover: Takeover
    given_node_id: str | None
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
    hold: Hold

    def __post_init__(self) -> None:
        """Check the settings and their relations. A `ConfigurationError` names the setting and the remedy."""
        if self.takeover not in ("safe", "instant"):
            raise ConfigurationError(f"takeover={self.takeover!r} is unknown: give 'safe' or 'instant'")
        if self.hold not in ("session", "lease"):
            raise ConfigurationError(f"hold={self.hold!r} is unknown: give 'session' or 'lease'")
        if self.listen_channel is not None:
            check_channel(self.listen_channel)
        check_optional_seconds(
            stale_threshold_s=self.stale_threshold_s,
            hard_stop_after_s=self.hard_stop_after_s,
            retention_s=self.retention_s,
        )
        check_flags(**{setting.option: getattr(self, setting.option) for setting in ELECTION if setting.kind is SWITCH})
        misfits = combination_misfits(
            KEYWORDS,
            roles=len(self.keys),
            standby_wait_s=self.standby_wait_s,
            allow_pooler=self.allow_pooler,
            balance=self.balance,
            retention_s=self.retention_s,
            hold=self.hold,
        )
        refuse(misfits)
        if not self.standalone and self.enabled:
            check_dsn(self.dsn)

    def with_role(self, name: str, key: int | None) -> "Setup":
        """A copy with one more role. Raises `ConfigurationError` if the role cannot be added."""
        return replace(self, keys=one_more_role(self.keys, name, key, self.namespace))

    def without_role(self, name: str) -> "Setup":
        return replace(self, keys={known: keys for known, keys in self.keys.items() if known != name})

    @property
    def node_id(self) -> str:
        """The name of this node, determined in the process that runs the election: it may be a forked child of the one
        that made this object."""
        return self.given_node_id or default_node_id()

    @property
    def channel(self) -> str:
        """The channel on which this node notifies the other nodes, even if it does not listen itself."""
        return self.listen_channel or DEFAULT_CHANNEL

    @property
    def listens(self) -> bool:
        """Whether this node listens for notifications. LISTEN needs a session; with a lease there may be none."""
        return self.listen_channel is not None and self.hold == "session"

    @property
    def instant(self) -> bool:
        """Does the gate open as soon as the lock is won, without waiting for the predecessor's deadline?"""
        return self.takeover == "instant"

    def identity(self, instance: str) -> Identity:
        """This node in the ledger. `instance` is new with every start."""
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
        """The settings of the session that holds the locks."""
        label = next(iter(self.keys)) if len(self.keys) == 1 else f"{len(self.keys)} roles"
        return ConnectionSettings(
            application_name=default_application_name(f"{label} {self.node_id}"),
            statement_timeout_s=self.statement_timeout_s,
            lease_s=self.lease_s,
            allow_pooler=self.allow_pooler,
            idle_timeout_s=self.lease_s,
        )

    def listener_connection(self) -> ConnectionSettings:
        """The settings of the session that listens for notifications and holds no lock."""
        return ConnectionSettings(
            application_name=default_application_name(f"listen {self.node_id}"),
            statement_timeout_s=LISTEN_STATEMENT_TIMEOUT_S,
            lease_s=self.lease_s,
            allow_pooler=self.allow_pooler,
        )


# --- The default name of a node


class _OwnName:
    """The name that this process has claimed on its host, and the descriptor that holds the claim."""

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._name: str | None = None
        self._descriptor: int | None = None
        self._claiming = threading.Lock()

    def get(self) -> str:
        with self._claiming:
            if self._name is None:
                self._name, self._descriptor = _claimed(socket.gethostname())
            return self._name

    def claim_anew_in_child(self) -> None:
        """A forked child needs another name. Closing its copy of the descriptor leaves the parent's claim
        alone."""
        inherited = self._descriptor
        self._begin_anew()
        if inherited is not None:
            os.close(inherited)


def default_node_id() -> str:
    """The host's name, or, if other processes of this host have claimed that, the host's name with a number from 2 on.

    It takes the lowest free number, so processes under a process manager keep their names across restarts. A claim is a
    Unix socket in Linux's abstract namespace, which the kernel frees when the process ends, however it ends.
    """
    return _own_name.get()


def _claimed(host: str) -> tuple[str, int | None]:
    if sys.platform == "linux":
        for number in range(1, NUMBER_MAX + 1):
            name = host if number == 1 else f"{host}-{number}"
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(b"\0pgleaderlock node " + name.encode())
            except OSError as error:
                claim.close()
                if error.errno != errno.EADDRINUSE:
                    break
            else:
                return name, claim.detach()  # a bare descriptor: it stays open until the process ends
    return f"{host}-{os.getpid()}", None


_own_name = _OwnName()
os.register_at_fork(after_in_child=_own_name.claim_anew_in_child)
