"""Bugs made by changing source code: small operators on the syntax tree, each a kind of mistake people make.

`mutants` yields every change that an operator can make to a module. A change is one expression or statement:
the rest of the file stays as it is, to the byte, so that the fix is a patch of a line or two.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A changed module."""

    kind: str
    line: int  # of the change, from 1
    source: str
    function: str  # qualified name of the function it is in


def _comparison(node: ast.AST) -> Iterator[ast.AST]:
    """Off by one at a border: < for <=, and so on."""
    swap: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in swap:
        yield _with(node, ops=[swap[type(node.ops[0])]()])


def _negation(node: ast.AST) -> Iterator[ast.AST]:
    """A condition the wrong way round: == for !=, in for not in, is for is not."""
    swap: dict[type, type] = {
        **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
        **{ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    }
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in swap:
        yield _with(node, ops=[swap[type(node.ops[0])]()])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand


def _arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """Another operator: + for -, * for //, and so on."""
    swap: dict[type, type] = {
        **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
        **{ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
    }
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in swap:
        yield _with(node, op=swap[type(node.op)]())


def _number(node: ast.AST) -> Iterator[ast.AST]:
    """A number one too large or too small."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000:
        yield _with(node, value=node.value + 1)
        if node.value > 0:
            yield _with(node, value=node.value - 1)


def _boolean(node: ast.AST) -> Iterator[ast.AST]:
    """and for or; True for False."""
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _with(node, value=not node.value)


def _arguments(node: ast.AST) -> Iterator[ast.AST]:
    """Two arguments of a call in the wrong order."""
    if isinstance(node, ast.Call):
        for i in range(len(node.args) - 1):
            one, two = node.args[i : i + 2]
            starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
            if not starred and ast.dump(one) != ast.dump(two):
                yield _with(node, args=[*node.args[:i], two, one, *node.args[i + 2 :]])


def _missing_part(node: ast.AST) -> Iterator[ast.AST]:
    """A condition that was forgotten: one part of an and, an or, or a whole if."""
    if isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield rest[0] if len(rest) == 1 else _with(node, values=rest)
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse


def _missing_statement(node: ast.AST) -> Iterator[ast.AST]:
    """A statement that was forgotten."""
    if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(
        node, ast.AugAssign | ast.Raise
    ):
        yield ast.Pass()


def _returned(node: ast.AST) -> Iterator[ast.AST]:
    """Nothing is returned."""
    if isinstance(node, ast.Return) and node.value is not None and not _is(node.value, None):
        yield _with(node, value=ast.Constant(None))


def _slice(node: ast.AST) -> Iterator[ast.AST]:
    """A slice without its beginning or end."""
    if isinstance(node, ast.Slice):
        if node.lower is not None:
            yield _with(node, lower=None)
        if node.upper is not None:
            yield _with(node, upper=None)


def _default(node: ast.AST) -> Iterator[ast.AST]:
    """A keyword argument that is not passed on."""
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield _with(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


def _loop(node: ast.AST) -> Iterator[ast.AST]:
    """break for continue."""
    if isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()


def _name(node: ast.AST) -> Iterator[ast.AST]:
    """Another method of the same use: lower for upper, left for right, min for max, any for all."""
    pairs = [("lower", "upper"), ("lstrip", "rstrip"), ("startswith", "endswith"), ("append", "extend")]
    pairs += [("min", "max"), ("any", "all"), ("find", "rfind"), ("keys", "values"), ("ljust", "rjust")]
    other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    if isinstance(node, ast.Attribute) and node.attr in other:
        yield _with(node, attr=other[node.attr])
    elif isinstance(node, ast.Name) and node.id in other and isinstance(node.ctx, ast.Load):
        yield _with(node, id=other[node.id])


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": _comparison,
    "negation": _negation,
    "arithmetic": _arithmetic,
    "number": _number,
    "boolean": _boolean,
    "arguments": _arguments,
    "missing part": _missing_part,
    "missing statement": _missing_statement,
    "returned": _returned,
    "slice": _slice,
    "default": _default,
    "loop": _loop,
    "name": _name,
}


def _with(node: Any, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its code. Raises SyntaxError.

    Only code in functions is changed, and no docstring, annotation, default or decorator.
    """
    tree = ast.parse(source)
    lines = source.encode().splitlines(keepends=True)
    for function, node in _nodes(tree, ""):
        if not hasattr(node, "lineno"):
            continue
        for kind, operator in OPERATORS.items():
            for changed in operator(node):
                text = _replaced(lines, node, changed)
                if text is not None and text != source:
                    yield Mutant(kind, node.lineno, text, function)  # type: ignore[attr-defined]


def _nodes(node: ast.AST, function: str, inside: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """The nodes inside functions, with the name of the function. `inside`: whether `node` is in one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{function}.{child.name}".lstrip(".")
            for i, statement in enumerate(child.body):
                text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if not (text and i == 0):
                    yield name, statement
                    yield from _nodes(statement, name, True)
        elif isinstance(child, ast.ClassDef):
            yield from _nodes(child, f"{function}.{child.name}".lstrip("."))
        elif not (isinstance(node, ast.AnnAssign) and child is node.annotation):
            if inside:
                yield function, child
            if not isinstance(child, ast.JoinedStr):
                yield from _nodes(child, function, inside)


def _replaced(lines: list[bytes], node: Any, changed: ast.AST) -> str | None:
    """The module with one node replaced; None if that gives no valid code."""
    first, last = node.lineno - 1, node.end_lineno - 1
    if last - first > 3:
        return None
    try:
        text = ast.unparse(ast.fix_missing_locations(changed))
    except (AttributeError, ValueError):
        return None
    if isinstance(changed, ast.expr) and isinstance(
        changed, ast.BoolOp | ast.BinOp | ast.Compare | ast.IfExp | ast.UnaryOp
    ):
        before = lines[first][: node.col_offset].rstrip()
        after = lines[last][node.end_col_offset :].lstrip()
        if not (before.endswith(b"(") and after.startswith(b")")) and not before.endswith(
            (b"if", b"return", b"while", b"=")
        ):
            text = f"({text})"
    new = lines[first][: node.col_offset] + text.encode() + lines[last][node.end_col_offset :]
    try:
        result = b"".join([*lines[:first], new, *lines[last + 1 :]]).decode()
        ast.parse(result)
    except (SyntaxError, UnicodeDecodeError):
        return None
    return result
