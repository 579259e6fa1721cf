"""Which names a request may call this server by: the defence against DNS rebinding.

A page in somebody's browser can point a name of its own at 127.0.0.1, and is then of the same origin as whatever
listens there. It cannot change the Host header: that still carries the page's own name. So a name is accepted only if
it is ours. An IP address is always accepted, because a page that was loaded from a name never sends one.

Imports `answers` and `errors`. Must never look a name up: the answer would come from whoever is to be kept out.
"""

import ipaddress
from collections.abc import Collection

from pgleaderlock._http.answers import Refusal
from pgleaderlock.errors import ConfigurationError

__all__ = ["HostCheck"]

_ANY = "*"
_REMEMBERED_MAX = 256


class HostCheck:
    """Call it with the Host header of a request; raises `Refusal`."""

    def __init__(self, allowed: Collection[str]) -> None:
        """Raises `ConfigurationError` for what no Host header could be."""
        for name in allowed:
            if "/" in name:
                raise ConfigurationError(f"--allowed-host {name}: give the name alone, as in locks.example")
        names = {name.lower().rstrip(".") for name in allowed}
        self._any = _ANY in names
        self._names = names | {"localhost"}
        self._accepted: set[bytes] = set()
        """Headers that have passed before: nearly every request brings one of a few."""

    def __call__(self, host: bytes | None) -> None:
        if host in self._accepted:
            return
        if not host:
            raise Refusal(400, "the request has no Host header")
        if not self._any and not self._is_ours(host):
            raise Refusal(403, "the Host header names another server: if it is a name of this one, add --allowed-host")
        if len(self._accepted) < _REMEMBERED_MAX:
            self._accepted.add(host)

    def _is_ours(self, host: bytes) -> bool:
        try:
            text = host.decode("ascii").lower()
        except UnicodeDecodeError:
            return False
        if text.startswith("["):
            name, _, rest = text[1:].partition("]")
        else:
            name, colon, port = text.partition(":")
            rest = colon + port
        if rest and not (rest[0] == ":" and (rest[1:].isdigit() or rest == ":")):
            return False
        if name.rstrip(".") in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
