"""Derives the pair of advisory-lock keys from a name.

Pure, and it must never change: two versions of this library, and a lock, a guard and an election, must derive the same
keys from the same name. Otherwise two leaders would run side by side during an upgrade. The test vectors are frozen.
Only PostgreSQL's pairs are used: `(a, b)` and the bigint made of `a` and `b` are different locks.
"""

import hashlib
import struct
from functools import lru_cache

from pgleaderlock.errors import ConfigurationError

__all__ = [
    "DEFAULT_NAMESPACE",
    "KeyPair",
    "bigint_from_key_pair",
    "check_key_pair",
    "key_pair",
    "key_pair_from_bigint",
    "key_params",
    "slot_namespace",
]

DEFAULT_NAMESPACE = "pgleaderlock"
NAME_BYTES_MAX = 512

KEY_MIN, KEY_MAX = -(2**31), 2**31 - 1
BIGINT_MIN, BIGINT_MAX = -(2**63), 2**63 - 1

KeyPair = tuple[int, int]


def slot_namespace(namespace: str) -> str:
    """The namespace of the elections for slots (`once`), separate from that of roles, which are led permanently."""
    return f"{namespace}.once"


def key_pair(name: str, namespace: str = DEFAULT_NAMESPACE) -> KeyPair:
    """The keys of a named lock: the first eight bytes of SHA-256(namespace NUL name), as two signed 32-bit integers."""
    for what, text in (("namespace", namespace), ("name", name)):
        if not isinstance(text, str):
            raise ConfigurationError(f"{what} must be a string, not {type(text).__name__}")
    return _derived(name, namespace)


@lru_cache(maxsize=256)  # a service uses the same few names again and again
def _derived(name: str, namespace: str) -> KeyPair:
    digest = hashlib.sha256(check_text("namespace", namespace) + b"\0" + check_text("name", name)).digest()
    key1, key2 = struct.unpack(">ii", digest[:8])
    return key1, key2


def key_pair_from_bigint(key: int) -> KeyPair:
    """The high and the low half of a 64-bit key."""
    _check_integer("key", key, BIGINT_MIN, BIGINT_MAX)
    key1, key2 = struct.unpack(">ii", struct.pack(">q", key))
    return key1, key2


def bigint_from_key_pair(keys: KeyPair) -> int:
    """The 64-bit key with these halves: `scope_key` in the view `leader_state`."""
    return keys[0] * 2**32 + keys[1] % 2**32


def check_key_pair(key1: int, key2: int) -> KeyPair:
    """The pair as given, or a `ConfigurationError` that names the range."""
    _check_integer("key1", key1, KEY_MIN, KEY_MAX)
    _check_integer("key2", key2, KEY_MIN, KEY_MAX)
    return key1, key2


def key_params(keys: KeyPair) -> dict[str, int]:
    """The statements' parameters for a pair: as PostgreSQL's functions take it, and unsigned, as `pg_locks` shows
    it."""
    return {
        "key1": keys[0],
        "key2": keys[1],
        "classid": keys[0] & 0xFFFFFFFF,
        "objid": keys[1] & 0xFFFFFFFF,
    }


def _check_integer(what: str, value: object, low: int, high: int) -> None:
    # bool is an int to Python, but True as a lock key is always a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{what} must be an integer from {low} to {high}, not {type(value).__name__}")
    if not low <= value <= high:
        raise ConfigurationError(f"{what}={value} is out of range: give an integer from {low} to {high}")


def check_text(what: str, text: str) -> bytes:
    """The UTF-8 bytes of a text that names a lock or a slot; a `ConfigurationError` if it cannot be a name."""
    if not text:
        raise ConfigurationError(f"{what} must not be empty")
    if "\0" in text:
        raise ConfigurationError(f"{what} must not contain a NUL character")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} must be encodable as UTF-8: it has a lone surrogate") from None
    if len(encoded) > NAME_BYTES_MAX:
        raise ConfigurationError(
            f"{what} is {len(encoded)} bytes long; at most {NAME_BYTES_MAX} are allowed: shorten it"
        )
    return encoded
