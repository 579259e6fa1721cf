"""The table of settings: one row each, and everything else is made from it.

The reader of the file, the reader of the environment, `pgleaderlock config show`, the JSON schema for editors and the
test of the documentation all walk over this table: a setting that is not in it does not exist.

Imports the standard library, `keys`, `_config_duration` and `_config_kinds` only. Pure. What a value means for another
one is not decided here: `_config_rules` knows the relations.
"""

from dataclasses import dataclass
from typing import Any

from pgleaderlock._config_duration import DURATION_PATTERN
from pgleaderlock._config_kinds import (
    CHANNEL,
    DELAYS,
    DURATION,
    DURATION_OR_NEVER,
    DURATION_OR_ZERO,
    INTEGER,
    SWITCH,
    TEXT,
    TEXTS,
    Kind,
    choice,
)
from pgleaderlock.keys import DEFAULT_NAMESPACE

__all__ = ["ALERT", "ELECTION", "ROLE", "SECTIONS", "Setting", "json_schema"]

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    key: str
    kind: Kind
    default: object
    """As the program uses it; None where it is worked out (`default_text` says how) or where there is none."""
    meaning: str
    change_when: str
    option: str = ""
    """The keyword of `LeaderElection` that it becomes."""
    flag: str = ""
    variables: tuple[str, ...] = ()
    default_text: str = ""
    required: bool = False
    secret: bool = False
    other_names: tuple[str, ...] = ()
    """Names of the same thing elsewhere. Not accepted, but whoever writes one is told the right one."""

    def shown(self, value: Any) -> str:
        if value is None or value == ():
            return self.default_text or "none"
        return self.kind.show(value)


# --- The table

ELECTION = (
    Setting(
        "dsn", TEXT, None, option="dsn", flag="--dsn", variables=("PG_CONN_STRING", "PG_DSN"), secret=True,
        meaning="Where the database is: a URI or key=value pairs, as libpq takes them.",
        change_when="Always. A password is better kept in PGPASSWORD or a password file.",
        other_names=("database", "database_url", "connection_string", "pg_conn_string", "pg_dsn", "url"),
    ),
    Setting(
        "refresh_interval", DURATION, 3.0, option="heartbeat_interval_s", flag="--health-interval",
        variables=("HEARTBEAT_INTERVAL_MS",),
        meaning="Between two heartbeats of a node, ± 20 %.",
        change_when="A frozen leader has to be replaced sooner: shorten it, the next two follow.",
        other_names=("heartbeat_interval", "heartbeat_interval_s", "heartbeat_interval_ms", "health_interval"),
    ),
    Setting(
        "late_threshold", DURATION, None, option="late_threshold_s", flag="--late-threshold",
        variables=("HEARTBEAT_LATE_THRESHOLD_MS",),
        default_text="lease_duration less the larger of 1 s and a tenth; without one, 2 x refresh_interval",
        meaning="G: how long an acknowledged heartbeat keeps the gate open, from before it was sent.",
        change_when="Heartbeats are often late on a busy server, and the gate shuts: raise it.",
        other_names=("late_threshold_s", "heartbeat_late_threshold", "heartbeat_late_threshold_ms"),
    ),
    Setting(
        "lease_duration", DURATION, None, option="session_lease_s", flag="--session-lease",
        default_text="late_threshold and the larger of 1 s and a tenth",
        meaning="T: the server drops a session that was silent for so long; a successor waits no longer than this.",
        change_when="A drain needs longer than T - G, or clocks of hosts run at very different rates: raise it.",
        other_names=("session_lease", "session_lease_s", "lease", "lease_ttl", "ttl"),
    ),
    Setting(
        "check_interval", DELAYS, (0.2, 0.8), option="acquire_delay_s",
        variables=("ACQUIRE_BACKOFF_MS_MIN", "ACQUIRE_BACKOFF_MS_MAX"),
        meaning="Between two tries of a standby: one duration, taken ± 20 %, or the shortest and the longest.",
        change_when="A killed leader has to be replaced sooner: shorten it, at one statement a try.",
        other_names=("acquire_delay", "acquire_delay_s", "acquire_backoff", "acquire_backoff_ms_min",
                     "acquire_backoff_ms_max"),
    ),
    Setting(
        "lock_timeout", DURATION, None, default_text="half of late_threshold, and at least 1 s",
        meaning="How long a statement of the session waits for a lock at the server, such as for a fenced transaction.",
        change_when="Fenced transactions of a predecessor take long, and a takeover must not wait for them.",
        other_names=("lock_timeout_s", "acquire_timeout"),
    ),
    Setting(
        "standby_wait", DURATION_OR_ZERO, 0.0, option="standby_wait_s", flag="--standby-wait",
        meaning='Above zero, a standby waits at the server, in slices of at most this. "0s" is off. One role only.',
        change_when="A killed leader has to be replaced within milliseconds.",
        other_names=("standby_wait_s",),
    ),
    Setting(
        "takeover", choice("safe", "instant"), "safe", option="takeover",
        meaning="instant opens the gate as soon as the lock is won, without waiting for the predecessor's deadline.",
        change_when="Every act is fenced, and only then.",
    ),
    Setting(
        "node_id", TEXT, None, option="node_id", flag="--node-id", default_text="the host name",
        meaning="Who this node is, for people.", change_when="Several nodes share a host.",
        other_names=("node", "node_name", "identity"),
    ),
    Setting(
        "namespace", TEXT, DEFAULT_NAMESPACE, option="namespace", flag="--namespace",
        meaning="Keeps equal names of different applications apart.",
        change_when="Several groups of roles share a database.",
    ),
    Setting(
        "listen_channel", CHANNEL, "pgleaderlock", option="listen_channel", variables=("PG_LISTEN_CHANNEL",),
        meaning="Where releases and requests are announced (NOTIFY). false: no second connection, and a tick later.",
        change_when="Connections are scarce, or another channel is listened to already.",
        other_names=("pg_listen_channel", "channel"),
    ),
    Setting(
        "stale_threshold", DURATION, None, option="stale_threshold_s", variables=("EPOCH_STALE_THRESHOLD_MS",),
        default_text="the leader's lease_duration",
        meaning="After so long without a new heartbeat a standby reports the leader as stale. A report, no decision.",
        change_when="The report comes too early or too late for your monitoring.",
        other_names=("stale_threshold_s", "epoch_stale_threshold", "epoch_stale_threshold_ms"),
    ),
    Setting(
        "evict_stale", SWITCH, True, option="evict_stale",
        meaning="A standby ends the session of a leader that was silent for 2 T.",
        change_when="No node may end another one's session.",
    ),
    Setting(
        "candidate", SWITCH, True, option="candidate",
        meaning="false: this node watches, and never leads.", change_when="A node is there to look on.",
    ),
    Setting(
        "balance", SWITCH, False, option="balance", flag="--balance",
        meaning="Spread the roles over the live nodes, so that shares differ by one at most.",
        change_when="There are many roles, and each costs its leader something.",
        other_names=("balanced", "rebalance"),
    ),
    Setting(
        "retention", DURATION_OR_NEVER, 30 * 86400.0, option="retention_s",
        meaning="How long ended terms, events and requests are kept in the ledger. false: for ever.",
        change_when="The history has to go further back, or the tables have to stay smaller.",
        other_names=("keep", "retention_s", "history_retention"),
    ),
    Setting(
        "heartbeat_thread", SWITCH, False, option="heartbeat_thread",
        meaning="Beat from a thread of its own.", change_when="The application blocks its event loop for seconds.",
    ),
    Setting(
        "hard_stop_after", DURATION, None, option="hard_stop_after_s", default_text="never",
        meaning="End the process when work is still in flight so long after its gate has shut.",
        change_when="Work may ignore its cancellation, and must not go on.",
        other_names=("hard_stop_after_s",),
    ),
    Setting(
        "allow_pooler", SWITCH, False, option="allow_pooler", flag="--allow-pooler",
        meaning="Accept a connection pool in session mode.", change_when="There is no way around one.",
    ),
    Setting(
        "enabled", SWITCH, True, option="enabled", variables=("MSP_LEADER_ENABLED",),
        meaning="false: this node never leads, and needs no database.", change_when="A node has to be taken out.",
        other_names=("msp_leader_enabled",),
    ),
    Setting(
        "standalone", SWITCH, False, option="standalone",
        meaning="Lead every role without a database, at epoch 0.", change_when="There is one instance, for ever.",
    ),
)  # fmt: skip

ROLE = (
    Setting(
        "key", INTEGER, None, variables=("LEADER_LOCK_KEY",), default_text="derived from namespace and name",
        meaning="The role's 64-bit advisory-lock key.",
        change_when="Other programs already lock that number.",
        other_names=("lock_key", "lock_id", "leader_lock_key", "id"),
    ),
    Setting(
        "enabled", SWITCH, True,
        meaning="false: this node takes no part in the role.",
        change_when="All nodes share a file, and some do without some roles.",
        other_names=("candidate",),
    ),
)  # fmt: skip

ALERT = (
    Setting("name", TEXT, None, required=True, meaning="The alert's name.", change_when="Always; each once."),
    Setting(
        "condition", TEXT, None, required=True, meaning="The PromQL expression that is true while something is wrong.",
        change_when="Always.", other_names=("expr", "expression", "query"),
    ),
    Setting(
        "for", DURATION_OR_ZERO, 0.0, meaning="How long it must have been true before anybody is told.",
        change_when="A short moment is harmless.", other_names=("for_s", "duration"),
    ),
    Setting(
        "severity", choice("critical", "error", "warning", "info"), "warning",
        meaning="How bad it is: a label of the alert.", change_when="Somebody has to get up, or nobody has.",
        other_names=("level", "priority"),
    ),
    Setting(
        "notify", TEXTS, (), default_text="nobody in particular",
        meaning='Who is told: receivers of Alertmanager, with a target after a colon: "slack:#ops".',
        change_when="Not everybody is to be told of everything.", other_names=("receivers", "to"),
    ),
)  # fmt: skip

SECTIONS = ("cluster", "roles", "alerts")
"""At the top of the file."""


# --- For editors


def json_schema() -> dict[str, Any]:
    """What a `pgleaderlock.toml` may hold, as far as a schema can say it. Relations of settings it cannot."""
    return {
        "$schema": SCHEMA_DIALECT,
        "title": "pgleaderlock.toml",
        "description": "Settings of an election of pgleaderlock, its roles and its alerts.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "cluster": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"leader_election": _section(ELECTION, "What holds for this node's election.")},
            },
            "roles": {
                "type": "object",
                "description": "One section a role: [roles.NAME].",
                "propertyNames": {"minLength": 1},
                "additionalProperties": _section(ROLE, "One role of this node."),
            },
            "alerts": {"type": "array", "items": _section(ALERT, "One alert: [[alerts]].")},
        },
        "$defs": {
            "duration": {
                "type": "string",
                "description": "A number and a unit: 200ms, 5s, 1m, 1.5h, 2d. Above zero.",
                "pattern": DURATION_PATTERN,
                "not": {"pattern": r"^0+(\.0+)?[a-z]+$"},
            }
        },
    }


def _section(settings: tuple[Setting, ...], description: str) -> dict[str, Any]:
    section: dict[str, Any] = {
        "type": "object",
        "description": description,
        "additionalProperties": False,
        "properties": {setting.key: _property(setting) for setting in settings},
    }
    if required := [setting.key for setting in settings if setting.required]:
        section["required"] = required
    return section


def _property(setting: Setting) -> dict[str, Any]:
    default = f"Default: {setting.shown(setting.default)}." if not setting.required else "Required."
    return {**setting.kind.schema, "description": f"{setting.meaning} {default} Change it when: {setting.change_when}"}
