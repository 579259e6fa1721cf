"""The JSON API of the dashboard: a path and a query become a question to the ledger, and its answer JSON.

Imports `_queries` and what `_http` shares. Must never answer with a list that has no bound, nor overlook a field of a
query that it does not know: a misspelt filter would show everything.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from pgleaderlock._http.answers import Refusal
from pgleaderlock.dashboard import _queries
from pgleaderlock.dashboard._reading import Crowded, Ledger, Unspeakable
from pgleaderlock.errors import ConnectionError
from pgleaderlock.history import LAST_ID

__all__ = ["LIMIT_DEFAULT", "LIMIT_MAX", "NODE_CURSOR", "Api", "number_of", "query_of"]

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
NODE_CURSOR = r"^([0-9]{1,18}\.[^\u0000]+)?$"

_FIELDS_MAX = 8
_DIGITS_MAX = 19
_NUL = "\0"
_NODE_CURSOR = re.compile(NODE_CURSOR.removesuffix("$") + r"\Z")

Query = Mapping[str, str]


class Api:
    """The questions, each with the fields of its query. Raises `Refusal`."""

    def __init__(self, ledger: Ledger, namespace: str) -> None:
        self._ledger = ledger
        self._namespace = namespace

    async def answer(self, path: bytes, query: bytes) -> msgspec.Struct:
        """The reply to a GET of a path below /v1/, without its first part."""
        match path.split(b"/"):
            case [b"leaders"]:
                question = self.leaders(query_of(query, ("prefix", "cursor", "limit")))
            case [b"leaders", role, b"terms"]:
                question = self.terms(text_of(role), query_of(query, ("from_ms", "to_ms", "cursor", "limit")))
            case [b"leaders", b"terms"]:
                given = query_of(query, ("role", "from_ms", "to_ms", "cursor", "limit"))
                if not given.get("role"):
                    raise Refusal(400, "say of which role: /v1/leaders/terms?role=NAME")
                question = self.terms(given["role"], given)
            case [b"events"]:
                question = self.events(query_of(query, ("after", "cursor", "limit", "role", "node")))
            case [b"nodes"]:
                question = self.nodes(query_of(query, ("cursor", "limit")))
            case _:
                raise Refusal(404, "there is nothing at this path")
        try:
            return await question
        except Unspeakable:
            raise Refusal(400, "the database cannot express a name in this request") from None
        except Crowded:
            raise Refusal(503, "too many questions wait for the database: try again", (b"retry-after", b"1")) from None
        except ConnectionError:
            text = "the database of the ledger is away: the server's log says why"
            raise Refusal(503, text, (b"retry-after", b"1")) from None

    async def leaders(self, query: Query) -> msgspec.Struct:
        return await _queries.leaders(
            self._ledger,
            self._namespace,
            prefix=query.get("prefix", ""),
            after=query.get("cursor", ""),
            limit=limit_of(query),
        )

    async def terms(self, role: str, query: Query) -> msgspec.Struct:
        from_ms = number_of(query, "from_ms", 0, _queries.MS_MAX, 0)
        to_ms = number_of(query, "to_ms", 0, _queries.MS_MAX, _queries.MS_MAX)
        before = number_of(query, "cursor", 0, LAST_ID, LAST_ID)
        found = await _queries.terms(
            self._ledger, self._namespace, role, from_ms=from_ms, to_ms=to_ms, before=before, limit=limit_of(query)
        )
        if found is None:
            raise Refusal(404, "nobody has ever led a role of this name here")
        return found

    async def events(self, query: Query) -> msgspec.Struct:
        role, node, limit = query.get("role") or None, query.get("node") or None, limit_of(query)
        if "after" in query:
            # A page of those ends with the event after which the next one begins.
            after = max(number_of(query, name, 0, LAST_ID, 0) for name in ("after", "cursor"))
            return await _queries.events_after(
                self._ledger, self._namespace, after=after, role=role, node=node, limit=limit
            )
        before = number_of(query, "cursor", 0, LAST_ID, LAST_ID)
        return await _queries.events_before(
            self._ledger, self._namespace, before=before, role=role, node=node, limit=limit
        )

    async def nodes(self, query: Query) -> msgspec.Struct:
        after = ("", _queries.NO_SESSION)
        if cursor := query.get("cursor"):
            if not _NODE_CURSOR.match(cursor):
                raise Refusal(400, "cursor must be next_cursor of the page before")
            session_id, _, node_id = cursor.partition(".")
            after = (node_id, int(session_id))
        return await _queries.nodes(self._ledger, self._namespace, after=after, limit=limit_of(query, LIMIT_MAX))


def query_of(raw: bytes, known: Sequence[str]) -> dict[str, str]:
    """The fields of a query, each known and given once."""
    try:
        text = raw.decode("ascii")
        if re.search(r"%(?![0-9A-Fa-f]{2})", text):
            raise ValueError
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX)
    except ValueError:  # UnicodeDecodeError is one
        raise Refusal(400, "the query is not percent-encoded UTF-8, or has too many fields") from None
    given = dict(pairs)
    if len(given) != len(pairs):
        raise Refusal(400, "each field of the query may be given once")
    for name, value in pairs:
        if name not in known:
            raise Refusal(400, f"unknown field in the query: known are {', '.join(known)}")
        if _NUL in value:
            raise Refusal(400, f"{name} has a NUL character in it")
    return given


def text_of(segment: bytes) -> str:
    """A name from its segment of the path, percent-decoded once."""
    if re.search(rb"%(?![0-9A-Fa-f]{2})", segment):
        raise Refusal(400, "the name in the path has a % that begins no escape: write %25")
    try:
        text = unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise Refusal(400, "the name in the path is not UTF-8") from None
    if not text or _NUL in text:
        raise Refusal(400, "the name in the path is empty or has a NUL character in it")
    return text


def number_of(query: Query, name: str, low: int, high: int, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and low <= int(text) <= high):
        raise Refusal(400, f"{name} must be an integer from {low} to {high}")
    return int(text)


def limit_of(query: Query, default: int = LIMIT_DEFAULT) -> int:
    return number_of(query, "limit", 1, LIMIT_MAX, default)
