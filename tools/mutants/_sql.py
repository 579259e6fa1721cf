"""Generates defects in SQL: the small changes of one function of the ledger, or of one named statement.

It has no grammar, and knows only the form of the package's own SQL: its tokens, with the depth of parentheses and
CASEs, the conditions behind WHERE, ON, WHEN and IF with their terms, the items of SET, and the statements of PL/pgSQL.
Imports the standard library only.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.model import Site

__all__ = ["function_sites", "latest_definition", "statement_sites"]

_TOKEN = re.compile(
    r"(?P<skip>--[^\n]*|\s+)|(?P<text>'(?:[^']|'')*')|(?P<dollar>\$\w*\$)|(?P<word>%\(\w+\)s|[A-Za-z_]\w*|\#\w+)"
    r"|(?P<number>\d+)|(?P<sign><>|<=|>=|=>|->>|->|:=|::|\|\||!~|.)"
)
_BEGINS = {"WHERE", "ON", "WHEN", "IF", "ELSIF"}
_ENDS = {
    "WHERE", "GROUP", "ORDER", "RETURNING", "LIMIT", "OFFSET", "FOR", "THEN", "LOOP", "UNION", "ON", "JOIN", "LEFT",
    "CROSS", "FROM", "SET", "INTO", "ELSE", "END", "AS",
}  # fmt: skip
_WORDS = {
    "greatest": "least",
    "least": "greatest",
    "min": "max",
    "max": "min",
    "true": "false",
    "false": "true",
    "pg_advisory_xact_lock": "pg_advisory_xact_lock_shared",
    "pg_advisory_xact_lock_shared": "pg_advisory_xact_lock",
    "pg_try_advisory_xact_lock": "pg_try_advisory_xact_lock_shared",
    "pg_advisory_lock": "pg_advisory_lock_shared",
    "pg_try_advisory_lock": "pg_try_advisory_lock_shared",
}
_SIGNS = {"<": ">=", ">": "<=", "<=": ">", ">=": "<", "<>": "=", "+": "-", "-": "+"}
# Statements of PL/pgSQL, by their first word. An assignment begins with a name.
_DROPPED = {"PERFORM", "UPDATE", "INSERT", "DELETE", "RAISE", "CONTINUE", "WITH"}
_AFTER_SET = ("FROM", "WHERE", "RETURNING", ";")
_BEFORE_A_STATEMENT = {";", "BEGIN", "THEN", "ELSE", "LOOP"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int
    depth: int


@dataclass(frozen=True)
class _Body:
    """The tokens of a text from one place to another."""

    source: str
    tokens: Sequence[_Token]

    def text(self, tokens: Sequence[_Token]) -> str:
        return self.source[tokens[0].start : tokens[-1].end]


# --- Where the function is


def latest_definition(migrations: Path, function: str) -> tuple[Path, int, int]:
    """The last migration that defines the function, and where its body is: that one replaces earlier definitions.

    A function that a later migration has renamed was defined before, under its old name.
    """
    renamed = re.compile(rf"ALTER FUNCTION pgleaderlock\.(\w+)\([^;]*\) RENAME TO {re.escape(function)};")
    for path in sorted(migrations.glob("*.sql"), reverse=True):
        source = path.read_text()
        header = re.compile(rf"CREATE (?:OR REPLACE )?FUNCTION pgleaderlock\.{re.escape(function)}\(")
        if before := renamed.search(source):
            function = before[1]
        elif found := list(header.finditer(source)):
            begin = re.compile(r"\bAS (\$\w*\$)").search(source, found[-1].end())
            assert begin is not None, f"{function} has no body"
            return path, begin.end(), source.index(begin[1], begin.end())
    raise LookupError(f"no migration defines {function}")


def function_sites(source: str, start: int, end: int) -> Iterator[Site]:
    """Every change between two places: the body of a function."""
    body = _Body(source, _tokens(source, start, end))
    yield from _of_conditions(body)
    yield from _of_tokens(body)
    yield from _of_sets(body)
    yield from _of_statements(body)


def statement_sites(source: str, name: str) -> Iterator[Site]:
    """Every change in the statement of this name, in a file of statements."""
    begin = re.search(rf"^-- name: {re.escape(name)}\n", source, re.MULTILINE)
    if begin is None:
        raise LookupError(f"there is no statement {name!r}")
    end = source.find("\n-- name: ", begin.end())
    yield from function_sites(source, begin.end(), len(source) if end < 0 else end)


def _tokens(source: str, start: int, end: int) -> list[_Token]:
    tokens: list[_Token] = []
    open_: list[str] = []
    for match in _TOKEN.finditer(source, start, end):
        kind, text = match.lastgroup or "", match.group()
        if kind == "skip":
            continue
        if text == ")" or (text == "END" and open_ and open_[-1] == "CASE"):
            open_.pop()
        tokens.append(_Token(kind, text, *match.span(), len(open_)))
        if text in ("(", "CASE"):
            open_.append(text)
    return tokens


# --- What can be wrong there


def _of_conditions(body: _Body) -> Iterator[Site]:
    for at, token in enumerate(body.tokens):
        before = body.tokens[at - 1].text if at else ""
        after = body.tokens[at + 1].text if at + 1 < len(body.tokens) else ""
        if token.text not in _BEGINS or before in ("END", "EXCEPTION") or after == "CONFLICT":
            continue
        condition = _until(body.tokens[at + 1 :], token.depth)
        if condition:
            yield from _of_terms(body, condition, token.depth, sole=token.text in ("WHERE", "ON"))


def _until(tokens: Sequence[_Token], depth: int) -> Sequence[_Token]:
    """The tokens of a condition: up to the first token that ends it."""
    cases = 0
    for place, token in enumerate(tokens):
        distinct = place > 0 and tokens[place - 1].text == "DISTINCT"
        if token.depth == depth and token.text == "CASE":
            cases += 1
        if token.depth == depth and token.text == "END" and cases:
            cases -= 1
            continue
        ended = token.depth < depth or (token.depth == depth and (token.text in _ENDS or token.text in ";,"))
        if ended and not distinct:
            return tokens[:place]
    return tokens


def _of_terms(body: _Body, condition: Sequence[_Token], depth: int, *, sole: bool) -> Iterator[Site]:
    terms: list[list[_Token]] = [[]]
    joints: list[str] = []
    between = False
    for token in condition:
        if token.depth == depth and token.text in ("AND", "OR") and not between:
            joints.append(token.text)
            terms.append([])
            continue
        if token.depth == depth:
            between = token.text == "BETWEEN" or (between and token.text != "AND")
        terms[-1].append(token)
    for place, term in enumerate(terms):
        start, end = term[0].start, term[-1].end
        near = joints[max(0, place - 1) : place + 1]
        if near:
            yield Site("drop-term", start, end, "true" if "AND" in near else "false")
        elif sole:
            yield Site("drop-condition", start, end, "true")
        else:
            yield Site("negate", start, end, f"NOT ({body.text(term)})")
        if term[0].text == "(" and term[-1].text == ")" and term[0].depth == term[-1].depth == depth:
            inner = term[1:-1]
            if any(token.depth == depth + 1 and token.text in ("AND", "OR") for token in inner):
                yield from _of_terms(body, inner, depth + 1, sole=True)


def _of_tokens(body: _Body) -> Iterator[Site]:
    for at, token in enumerate(body.tokens):
        before, after = (body.tokens[place].text if 0 <= place < len(body.tokens) else "" for place in (at - 1, at + 1))
        if token.text in _WORDS:
            yield Site("exchange", token.start, token.end, _WORDS[token.text])
        elif token.kind == "sign" and token.text in _SIGNS:
            yield Site("exchange", token.start, token.end, _SIGNS[token.text])
        elif token.text == "DISTINCT" and before == "IS":
            yield Site("negate", token.start, token.end, "NOT DISTINCT")
        elif token.text == "FOR" and after in ("UPDATE", "NO", "SHARE", "KEY"):
            yield Site("no-row-lock", token.start, _end_of_row_lock(body.tokens[at:]), "")
        elif token.text == "SKIP":
            yield Site("wait-for-row", token.start, body.tokens[at + 1].end, "")
        elif token.kind == "number" and int(token.text) > 1:
            yield Site("constant", token.start, token.end, token.text + "0")
        elif token.kind == "text" and before == "interval":
            yield Site("constant", token.start, token.end, re.sub(r"\d+", lambda n: n[0] + "0", token.text, count=1))


def _end_of_row_lock(tokens: Sequence[_Token]) -> int:
    """`FOR NO KEY UPDATE OF l SKIP LOCKED`, or less."""
    end = tokens[1].end
    for place in range(2, len(tokens)):
        if (
            tokens[place].text not in ("KEY", "UPDATE", "SHARE", "OF", "SKIP", "LOCKED")
            and tokens[place - 1].text != "OF"
        ):
            break
        end = tokens[place].end
    return end


def _of_sets(body: _Body) -> Iterator[Site]:
    """Leave out one assignment of several."""
    for at, token in enumerate(body.tokens):
        if token.text != "SET":
            continue
        items: list[list[_Token]] = [[]]
        for item in body.tokens[at + 1 :]:
            if item.depth < token.depth or (
                item.depth == token.depth and item.text in ("FROM", "WHERE", "RETURNING", ";")
            ):
                break
            if item.depth == token.depth and item.text == ",":
                items.append([])
            else:
                items[-1].append(item)
        if len(items) == 1:
            continue
        for place, dropped in enumerate(items):
            if place:
                yield Site("drop-set", items[place - 1][-1].end, dropped[-1].end, "")
            else:
                yield Site("drop-set", dropped[0].start, items[1][0].start, "")


def _of_statements(body: _Body) -> Iterator[Site]:
    """Leave out a statement of PL/pgSQL."""
    for at, token in enumerate(body.tokens[1:], 1):
        if token.depth or body.tokens[at - 1].text not in _BEFORE_A_STATEMENT:
            continue
        statement = body.tokens[at:]
        if token.text in ("END", "EXCEPTION"):
            continue
        end = next((place for place, other in enumerate(statement) if other.text == ";" and not other.depth), 0)
        # With three words before it, it is the declaration of a constant.
        assigns = ":=" in (statement[1].text, statement[min(3, end)].text) and statement[1].text != "constant"
        returns = token.text == "RETURN" and statement[1].text in (";", "QUERY")
        if token.text in _DROPPED or assigns or returns:
            yield Site("drop", token.start, statement[end - 1].end, "NULL")
