"""Small changes of Python functions, and which of them exist in two checkouts alike.

For `benchmarks.mutation_score`. Functions of two checkouts are matched by their syntax trees
without names, strings, annotations and docstrings, so that a function that was moved and renamed is
still the same one. Reads source files; imports and changes nothing.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, TypeGuard

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, int]  # hash of the function, index of the change in it


@dataclass(frozen=True, slots=True)
class Change:
    """One possible change: `apply` makes it in the syntax tree it was found in."""

    operator: str
    lines: tuple[int, int]
    apply: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change by its place: `index` counts the changes of the function."""

    path: Path
    function: str
    first_line: int
    index: int
    operator: str
    lines: tuple[int, int]


def shape(node: Any) -> Any:
    """A syntax tree without names, strings, annotations and docstrings."""
    if isinstance(node, list):
        return [shape(one) for one in node]
    if not isinstance(node, ast.AST):
        return "name" if isinstance(node, str) else repr(node)
    if isinstance(node, ast.Name | ast.JoinedStr):
        return "name"
    if isinstance(node, ast.Attribute):  # `a.b.c` equals `a`: fields move between objects
        return shape(node.value)
    if isinstance(node, ast.Constant):
        return "name" if isinstance(node.value, str | bytes) else repr(node.value)
    skipped = {"annotation", "returns", "type_comment", "kind", "ctx"}
    fields = {name: value for name, value in ast.iter_fields(node) if name not in skipped}
    if isinstance(node, Function) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    return [type(node).__name__, *(shape(value) for value in fields.values())]


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions of a module and of its classes, by qualified name; not those within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")


def first_line(function: Function) -> int:
    """As in the code object: the line of the first decorator."""
    return min(node.lineno for node in (function, *function.decorator_list))


def is_none(value: ast.expr | None) -> bool:
    """Whether a `return` with this value returns None."""
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def is_removable(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Whether `pass` can stand in its place: a statement that binds no name."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue)


def changes(function: Function) -> list[Change]:
    """All changes of a function's body, in the order of its syntax tree."""
    found: list[Change] = []
    lines = (function.lineno, function.lineno)

    def add(operator: str, node: ast.AST, name: str, value: Any, index: int | None = None) -> None:
        def apply() -> None:
            if index is None:
                setattr(node, name, value)
            else:
                getattr(node, name)[index] = value

        found.append(Change(operator, lines, apply))

    def visit(node: ast.AST) -> None:
        nonlocal lines
        if isinstance(node, ast.arguments | ast.JoinedStr):  # defaults are no part of the code
            return
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = (node.lineno, max(last, node.lineno))
        elif isinstance(node, ast.expr):
            lines = (node.lineno, node.end_lineno or node.lineno)
        within = lines
        if isinstance(node, ast.Compare):
            for i, op in enumerate(node.ops):
                for operator, table in (("boundary", BOUNDARY), ("comparison", OPPOSITE)):
                    if type(op) in table:
                        add(operator, node, "ops", table[type(op)](), i)
        elif isinstance(node, ast.BoolOp):
            add("and/or", node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            add("+/-", node, "op", ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            add("constant", node, "value", node.value + 1)  # type: ignore[operator]
        elif isinstance(node, ast.If | ast.IfExp):
            add("condition", node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Return) and not is_none(node.value):
            add("return None", node, "value", ast.Constant(None))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for i, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST):
                    continue
                lines = within
                visit(child)
                if is_removable(child):
                    lines = (child.lineno, child.end_lineno or child.lineno)
                    add("removed", node, name, ast.Pass(), i)

    visit(function)
    return found


def mutated_code(mutant: Mutant) -> CodeType:
    """The function's code object, compiled from its file with the change made."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    for name, function in functions(tree):
        if (name, first_line(function)) == (mutant.function, mutant.first_line):
            changes(function)[mutant.index].apply()
    return code_of(mutant, compile(ast.fix_missing_locations(tree), str(mutant.path), "exec"))


def code_of(mutant: Mutant, code: CodeType) -> CodeType:
    """The code object of the mutant's function within that of its module."""
    waiting = [code]
    while waiting:
        code = waiting.pop()
        if (code.co_qualname, code.co_firstlineno) == (mutant.function, mutant.first_line):
            return code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    raise LookupError(f"{mutant.path}: {mutant.function} was not compiled")


def python_files(root: Path, targets: Sequence[str]) -> list[Path]:
    """Modules below the targets, which are folders or files relative to the root."""
    found = {path for one in targets for path in (root / one).rglob("*.py")}
    return sorted(found | {root / one for one in targets if one.endswith(".py")})


def catalogue(root: Path, targets: Sequence[str], *, named: bool) -> dict[str, list[Mutant]]:
    """Mutants of each function of a shape (`named`: and own name) that no other one has."""
    found: dict[str, list[list[Mutant]]] = {}
    for path in python_files(root, targets):
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            place = (path, name, first_line(function))
            mutants = [
                Mutant(*place, index, change.operator, change.lines)
                for index, change in enumerate(changes(function))
            ]
            key = repr(shape(function)) + (function.name if named else "")
            found.setdefault(hashlib.sha256(key.encode()).hexdigest(), []).append(mutants)
    return {key: places[0] for key, places in found.items() if len(places) == 1 and places[0]}


def common(here: tuple[Path, Sequence[str]], there: tuple[Path, Sequence[str]]) -> list[Mutant]:
    """Mutants here that exist there as well, in an order that both sides agree on."""
    matched: dict[tuple[Path, str, int], tuple[str, list[Mutant]]] = {}
    seen = set[tuple[Path, str, int]]()
    for named in (False, True):
        ours, theirs = (catalogue(*side, named=named) for side in (here, there))
        for key in sorted(ours.keys() & theirs.keys()):
            places = [(m.path, m.function, m.first_line) for m in (ours[key][0], theirs[key][0])]
            if seen.isdisjoint(places):  # neither is matched with another function by its shape
                seen.update(places)
                matched[places[0]] = (key, ours[key])
    return [
        mutant
        for key, mutants in sorted(matched.values(), key=lambda one: one[0])
        for mutant in mutants
    ]
