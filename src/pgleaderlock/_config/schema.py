"""The table of settings: one row per setting, with its key, its kind, its default and its names elsewhere.

The reader of the file, the reader of the environment, `pgleaderlock config show`, the JSON schema for editors and the
test of the documentation all walk over this table: a setting that is not in it does not exist. A `Kind` says what a
value may be. What a value means for another one is decided in `timing`.

Pure. It must never guess: a number without a unit may be seconds or milliseconds, and is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pgleaderlock._config.durations import DURATION_PATTERN, SPREAD, format_duration, parse_duration_s
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import BIGINT_MAX, BIGINT_MIN, DEFAULT_NAMESPACE

__all__ = [
    "ALERT",
    "CHANNEL_BYTES_MAX",
    "DEFAULT_CHANNEL",
    "DEFAULT_DELAYS_S",
    "DELAYS",
    "DURATION",
    "ELECTION",
    "INTEGER",
    "ROLE",
    "SECTIONS",
    "SWITCH",
    "Kind",
    "Mistake",
    "Setting",
    "json_schema",
]

DEFAULT_DELAYS_S = (0.2, 0.8)
DEFAULT_CHANNEL = "pgleaderlock"
CHANNEL_BYTES_MAX = 63
SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
SHOWN_CHARS_MAX = 40


class Mistake(Exception):
    """A value cannot be used: what is wrong, and what to do. The reader adds the place and makes it a `Problem`."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.text = text
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be: how it is read, how an editor checks it, and how it is shown."""

    unit: str
    read: Callable[[str, object], Any]
    """Converts the key and the value in the file to the value that the program uses. Raises `Mistake`."""
    schema: Mapping[str, Any]
    show: Callable[[Any], str] = str

    @property
    def is_duration(self) -> bool:
        """Programs use it in seconds."""
        return self.unit.startswith("duration")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    key: str
    kind: Kind
    default: object
    """As the program uses it; None where it is derived (`default_text` says how) or where there is none."""
    meaning: str
    change_when: str
    option: str = ""
    """The keyword of `LeaderElection` that it becomes."""
    flag: str = ""
    variables: tuple[str, ...] = ()
    default_text: str = ""
    required: bool = False
    other_names: tuple[str, ...] = ()
    """Names of this setting in other products. The reader refuses them and suggests the right one."""

    def shown(self, value: Any) -> str:
        if value is None or value == ():
            return self.default_text or "none"
        return self.kind.show(value)


# --- Reading a value


def _given(value: object) -> str:
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    if isinstance(value, bool):
        shown = shown.lower()
    return shown if len(shown) <= SHOWN_CHARS_MAX else shown[:SHOWN_CHARS_MAX] + "…"


def _duration(key: str, value: object, *, zero_allowed: bool = False) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # 5000 may be meant as milliseconds.
        raise Mistake(f"{key} = {_given(value)} has no unit", f'write it as a text with one, such as "{value}s"')
    if not isinstance(value, str):
        raise Mistake(f"{key} must be a duration, not {_type(value)}", 'write a text with a unit, such as "5s"')
    remedy = 'write a number and one of ms, s, m, h, d, such as "200ms", "5s", "1m"'
    if value[-1:].isdigit():
        raise Mistake(f"{key} = {_given(value)} has no unit", remedy)
    try:
        duration_s = parse_duration_s(value)
    except ConfigurationError:
        raise Mistake(f"{key} = {_given(value)} is no duration", remedy) from None
    if duration_s == 0 and not zero_allowed:
        raise Mistake(f"{key} = {_given(value)} is no time at all", 'give a duration above zero, such as "5s"')
    return duration_s


def _duration_or_never(key: str, value: object) -> float | bool:
    return False if value is False else _duration(key, value)


def _delays(key: str, value: object) -> tuple[float, float]:
    if not isinstance(value, list):
        middle_s = _duration(key, value)
        return middle_s * SPREAD[0], middle_s * SPREAD[1]
    if len(value) != 2:
        raise Mistake(f"{key} has {len(value)} durations", 'give one ("5s") or two, shortest and longest ["4s", "6s"]')
    return _duration(key, value[0]), _duration(key, value[1])


def _switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise Mistake(f"{key} = {_given(value)} is no switch", f"write {key} = true or {key} = false, without quotes")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise Mistake(f"{key} must be a text, not {_type(value)}", f'write {key} = "…"')
    if not value.strip():
        raise Mistake(f"{key} is empty", "give it a value, or remove the line")
    return value


def _channel(key: str, value: object) -> str | bool:
    if value is False:
        return False
    if not isinstance(value, str):
        raise Mistake(f"{key} must be a text, not {_type(value)}", f'write {key} = "…", or false to do without')
    return _text(key, value)


def _integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Mistake(f"{key} must be a whole number, not {_type(value)}", "write it without quotes: 42 or 0x2A")
    if not BIGINT_MIN <= value <= BIGINT_MAX:
        raise Mistake(f"{key} does not fit into 64 bits", f"give a number from {BIGINT_MIN} to {BIGINT_MAX}")
    return value


def _texts(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise Mistake(f"{key} must be a list", f"write {key} = [{_given(value)}]")
    if not isinstance(value, list):
        raise Mistake(f"{key} must be a list of texts, not {_type(value)}", f'write {key} = ["one", "two"]')
    return tuple(_text(key, one) for one in value)


def _one_of(*words: str) -> Callable[[str, object], str]:
    def read(key: str, value: object) -> str:
        if value not in words:
            text = f"{key} = {_given(value)} is unknown" if isinstance(value, str) else f"{key} must be a text"
            raise Mistake(text, f"give one of {', '.join(words)}")
        return str(value)

    return read


def _type(value: object) -> str:
    names = {
        dict: "a section",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "a date or time")


# --- Kinds

_DURATION_SCHEMA = {"$ref": "#/$defs/duration"}


def _show_delays(delays_s: tuple[float, float]) -> str:
    return " to ".join(format_duration(round(delay_s, 6)) for delay_s in delays_s)


def choice(*words: str) -> Kind:
    return Kind(" or ".join(f'"{word}"' for word in words), _one_of(*words), {"enum": list(words)})


_TEXT_SCHEMA = {"type": "string", "pattern": r"\S"}
DURATION = Kind("duration", _duration, _DURATION_SCHEMA, format_duration)
DURATION_OR_ZERO = Kind(
    "duration",
    partial(_duration, zero_allowed=True),
    {"type": "string", "pattern": DURATION_PATTERN},
    format_duration,
)
DURATION_OR_NEVER = Kind(
    "duration, or false",
    _duration_or_never,
    {"anyOf": [_DURATION_SCHEMA, {"const": False}]},
    lambda value: "false" if value is False else format_duration(value),
)
DELAYS = Kind(
    "duration, or two",
    _delays,
    {"anyOf": [_DURATION_SCHEMA, {"type": "array", "items": _DURATION_SCHEMA, "minItems": 2, "maxItems": 2}]},
    _show_delays,
)
SWITCH = Kind("true or false", _switch, {"type": "boolean"}, lambda value: str(value).lower())
TEXT = Kind("text", _text, _TEXT_SCHEMA)
CHANNEL = Kind(
    "text, or false",
    _channel,
    {"anyOf": [_TEXT_SCHEMA | {"maxLength": CHANNEL_BYTES_MAX}, {"const": False}]},
    lambda value: value or "false",
)
INTEGER = Kind("64-bit number", _integer, {"type": "integer", "minimum": BIGINT_MIN, "maximum": BIGINT_MAX})
TEXTS = Kind("list of texts", _texts, {"type": "array", "items": _TEXT_SCHEMA}, ", ".join)


# --- The table

ELECTION = (
    Setting(
        "dsn", TEXT, None, option="dsn", flag="--dsn", variables=("PG_CONN_STRING", "PG_DSN"),
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
        meaning="T: the server drops a session that has been silent for this long; no successor waits for longer.",
        change_when="A drain needs longer than T - G, or clocks of hosts run at very different rates: raise it.",
        other_names=("session_lease", "session_lease_s", "lease", "lease_ttl", "ttl"),
    ),
    Setting(
        "check_interval", DELAYS, DEFAULT_DELAYS_S, option="acquire_delay_s",
        variables=("ACQUIRE_BACKOFF_MS_MIN", "ACQUIRE_BACKOFF_MS_MAX"),
        meaning="Between two tries of a standby: one duration, taken ± 20 %, or the shortest and the longest.",
        change_when="A killed leader has to be replaced sooner: shorten it; each try costs one statement.",
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
        "node_id", TEXT, None, option="node_id", flag="--node-id", default_text="the host name, numbered if taken",
        meaning="Who this node is, for people.", change_when="Names have to outlast restarts in any order.",
        other_names=("node", "node_name", "identity"),
    ),
    Setting(
        "namespace", TEXT, DEFAULT_NAMESPACE, option="namespace", flag="--namespace",
        variables=("PGLEADERLOCK_NAMESPACE",),
        meaning="Keeps equal names of different applications apart.",
        change_when="Several groups of roles share a database.",
    ),
    Setting(
        "listen_channel", CHANNEL, DEFAULT_CHANNEL, option="listen_channel", variables=("PG_LISTEN_CHANNEL",),
        meaning="Where releases and requests are announced (NOTIFY). false: no second connection, and a tick later.",
        change_when="Connections are scarce, or another channel is listened to already.",
        other_names=("pg_listen_channel", "channel"),
    ),
    Setting(
        "stale_threshold", DURATION, None, option="stale_threshold_s", variables=("EPOCH_STALE_THRESHOLD_MS",),
        default_text="the leader's lease_duration",
        meaning="After this long without a new heartbeat a standby reports the leader as stale. A report, no decision.",
        change_when="The report comes too early or too late for your monitoring.",
        other_names=("stale_threshold_s", "epoch_stale_threshold", "epoch_stale_threshold_ms"),
    ),
    Setting(
        "evict_stale", SWITCH, True, option="evict_stale",
        meaning="A standby ends the session of a leader that has been silent for 2 T.",
        change_when="No node may end another one's session.",
    ),
    Setting(
        "candidate", SWITCH, True, option="candidate",
        meaning="false: this node watches, and never leads.", change_when="A node is there to observe.",
    ),
    Setting(
        "balance", SWITCH, False, option="balance", flag="--balance",
        meaning="Spread the roles over the live nodes, so that shares differ by one at most.",
        change_when="There are many roles, and each costs its leader something.",
        other_names=("balanced", "rebalance"),
    ),
    Setting(
        "retention", DURATION_OR_NEVER, 30 * 86400.0, option="retention_s",
        meaning="How long ended terms, events and requests are kept in the ledger. false: they are never deleted.",
        change_when="The history has to go further back, or the tables have to stay smaller.",
        other_names=("keep", "retention_s", "history_retention"),
    ),
    Setting(
        "heartbeat_thread", SWITCH, False, option="heartbeat_thread",
        meaning="Send heartbeats from a separate thread.",
        change_when="The application blocks its event loop for seconds.",
    ),
    Setting(
        "hard_stop_after", DURATION, None, option="hard_stop_after_s", default_text="never",
        meaning="End the process when work is still in flight this long after its gate has shut.",
        change_when="Work may ignore its cancellation, and must not go on.",
        other_names=("hard_stop_after_s",),
    ),
    Setting(
        "hold", choice("session", "lease"), "session", option="hold", flag="--hold", variables=("LEADER_HOLD",),
        meaning="lease holds roles by a row that is renewed, through any pooler, and not by locks of a session.",
        change_when="A pooler in transaction mode is in between, or standbys must not cost a backend each.",
    ),
    Setting(
        "allow_pooler", SWITCH, False, option="allow_pooler", flag="--allow-pooler",
        meaning="Accept a connection pool in session mode.",
        change_when="The database can only be reached through one.",
    ),
    Setting(
        "enabled", SWITCH, True, option="enabled", variables=("MSP_LEADER_ENABLED",),
        meaning="false: this node never leads, and needs no database.", change_when="A node has to be taken out.",
        other_names=("msp_leader_enabled",),
    ),
    Setting(
        "standalone", SWITCH, False, option="standalone",
        meaning="Lead every role without a database, at epoch 0.", change_when="There will only ever be one instance.",
    ),
)  # fmt: skip

ROLE = (
    Setting(
        "key", INTEGER, None, variables=("LEADER_LOCK_KEY",), default_text="derived from namespace and name",
        meaning="The role's 64-bit advisory-lock key.",
        change_when="Other programs already lock that key.",
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
        "for", DURATION_OR_ZERO, 0.0, meaning="How long it must have been true before the alert fires.",
        change_when="A short moment is harmless.", other_names=("for_s", "duration"),
    ),
    Setting(
        "severity", choice("critical", "error", "warning", "info"), "warning",
        meaning="How bad it is: a label of the alert.", change_when="The alert has to be handled at once, or can wait.",
        other_names=("level", "priority"),
    ),
    Setting(
        "notify", TEXTS, (), default_text="nobody in particular",
        meaning='Who is notified: receivers of Alertmanager, with a target after a colon: "slack:#ops".',
        change_when="Different alerts go to different receivers.", other_names=("receivers", "to"),
    ),
)  # fmt: skip

SECTIONS = ("cluster", "roles", "alerts")
"""At the top of the file."""


# --- For editors


def json_schema() -> dict[str, Any]:
    """The JSON schema of `pgleaderlock.toml`. It cannot express relations between settings."""
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
                "description": "One section per role: [roles.NAME].",
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
