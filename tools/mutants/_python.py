"""Generates defects in Python: the small changes of one function, each a mutant.

The syntax tree gives the places. The change is made in the text, so that the rest of the file stays as it is. Imports
the standard library only.
"""

import ast
import copy
import gc
import itertools
import textwrap
from collections.abc import Iterator

from tools.mutants.model import Site

__all__ = ["parsed", "sites"]

# Calls that report to observers or the log, and decide nothing.
TELLING = (".notify(", "log.warning(", "log.error(")

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_EXTREMES = {"min": "max", "max": "min"}
_LATER_S = 60.0


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source, parsed without a garbage collection.

    In CPython 3.11, a finalizer that parses as well, as the printing of a traceback does, makes the outer call fail
    with "AST constructor recursion depth mismatch".
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


class _Text:
    """A source, with places converted from the byte columns of `ast` to characters of the text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(len(line) for line in self._lines)]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def _place(self, line: int, column_bytes: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column_bytes].decode())


def sites(source: str, function: str) -> Iterator[Site]:
    """Every change in the function of this name: `Class.method`, `function` or a constant of the module."""
    text = _Text(source)
    node = _find(parsed(source), function.split("."))
    begin, end_of_function = text.span(node)
    begin -= node.col_offset
    for place, operator, new in _changes(node, text):
        start, end = text.span(place)
        # The result must still be Python; otherwise the generator is wrong.
        parsed(textwrap.dedent(source[begin:start] + new + source[end:end_of_function]))
        yield Site(operator, start, end, new)


def _find(tree: ast.AST, path: list[str]) -> ast.stmt:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == path[0]:
            return _find(node, path[1:]) if path[1:] else node
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == path[0]:
            return node
    raise LookupError(f"there is no {path[0]!r}")


Change = tuple[ast.expr | ast.stmt, str, str]


def _changes(node: ast.AST, text: _Text) -> Iterator[Change]:
    for child in _inside(node):
        if isinstance(child, ast.stmt):
            if _only_tells(child, text):
                continue
            yield from _of_statement(child, text)
        if isinstance(child, ast.expr):
            yield from _of_expression(child, text)
        tests = [child.test] if isinstance(child, ast.If | ast.While | ast.IfExp) else getattr(child, "ifs", [])
        for test in tests:
            # Comparisons, `not`, `and` and `or` have their own changes, and `while True` is no condition.
            if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Constant):
                yield test, "negate", f"not ({text.of(test)})"
        yield from _changes(child, text)


def _only_tells(node: ast.stmt, text: _Text) -> bool:
    if isinstance(node, ast.If | ast.For):
        return all(_only_tells(inner, text) for inner in (*node.body, *node.orelse))
    return isinstance(node, ast.Expr) and any(telling in text.of(node) for telling in TELLING)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that are worth a change: no annotations, no texts, no docstrings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "args", "decorator_list") and isinstance(node, ast.stmt | ast.arg):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert | ast.cmpop):
                continue
            if isinstance(child, ast.Constant) and isinstance(node, ast.Expr | ast.While):
                continue
            yield child


def _of_statement(node: ast.stmt, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.Assign):
        targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
        if not isinstance(targets[0], ast.Name):
            yield node, "drop", "pass"
        name = ast.unparse(node.targets[-1])
        if name.endswith("_s") and not isinstance(node.value, ast.Constant):
            yield node.value, "longer", f"({text.of(node.value)}) * 10"
        if name.endswith("_at") and not isinstance(node.value, ast.Constant | ast.IfExp):
            yield node.value, "later", f"({text.of(node.value)}) + {_LATER_S}"
    elif isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise | ast.Continue):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.Constant)):
            yield node, "drop", "pass"
    elif isinstance(node, ast.Return) and node.value is None:
        yield node, "drop", "pass"


def _of_expression(node: ast.expr, text: _Text) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in _COMPARED[type(operator)]:
                    changed = copy.deepcopy(node)
                    changed.ops[place] = other()
                    yield node, "compare", ast.unparse(changed)
        case ast.BoolOp():
            for value in node.values:
                if not isinstance(value, ast.Constant | ast.Tuple):  # the `0` of `… or 0` is no condition
                    yield value, "drop-term", repr(isinstance(node.op, ast.And))
        case ast.UnaryOp(op=ast.Not()):
            yield node, "negate", f"({text.of(node.operand)})"
        case _:
            yield from _of_number(node, text)


def _of_number(node: ast.expr, text: _Text) -> Iterator[Change]:
    match node:
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            start = len(name)
            yield node, "min-max", _EXTREMES[name] + text.of(node)[start:]
        case ast.BinOp() if type(node.op) in _CALCULATED and not _of_text(node):
            calculated = copy.deepcopy(node)
            calculated.op = _CALCULATED[type(node.op)]()
            yield node, "calculate", f"({ast.unparse(calculated)})"
            for side in (node.left, node.right):
                if isinstance(side, ast.Attribute) and side.attr.endswith("_s"):
                    yield side, "longer", f"({text.of(side)} * 10)"
        case ast.Constant(value=bool() as truth):
            yield node, "constant", repr(not truth)
        case ast.Constant(value=int() | float() as number):
            yield node, "constant", repr(number * 10 or type(number)(1))


def _of_text(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))
