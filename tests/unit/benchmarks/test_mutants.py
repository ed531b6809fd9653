"""Changes of functions are found and made; functions of two checkouts are matched by shape."""

import ast
from pathlib import Path
from types import FunctionType
from typing import Any

from benchmarks.mutants import Mutant, changes, common, functions, mutated_code

OLD = '''
class Desk:
    def free(self, most):
        """What is free."""
        self.told()
        return most if 0 < self.used + 1 <= most else None

def other(x):
    return x - 1
'''
NEW = """
def seats(row: int) -> int:
    return row * 2

class Table:
    def available(self, limit: int) -> int | None:
        self.rows.report()
        return limit if 0 < self.rows.taken + 1 <= limit else None
"""


def tree(root: Path, text: str) -> tuple[Path, list[str]]:
    (root / "core").mkdir(parents=True)
    (root / "core" / "module.py").write_text(text)
    return root, ["core"]


def result(mutant: Mutant, *arguments: Any) -> Any:
    return FunctionType(mutated_code(mutant), {})(*arguments)


def test_each_operator_is_found_once_where_it_applies() -> None:
    (_, function), _ = functions(ast.parse(OLD))
    found = [change.operator for change in changes(function)]
    assert sorted(found) == sorted(
        ["removed", "return None", "condition", "boundary", "comparison"]
        + ["boundary", "comparison", "+/-", "constant", "constant"]
    )


def test_a_renamed_function_is_matched_and_others_are_not(tmp_path: Path) -> None:
    old, new = tree(tmp_path / "old", OLD), tree(tmp_path / "new", NEW)
    here, there = common(new, old), common(old, new)
    assert {one.function for one in here} == {"Table.available"}
    assert {one.function for one in there} == {"Desk.free"}
    assert [one.operator for one in here] == [one.operator for one in there]


def test_a_change_is_made_in_the_code(tmp_path: Path) -> None:
    here = tree(tmp_path, "def f(a, b):\n    return a + b if a < b else 0\n")
    by_operator = {one.operator: result(one, 2, 2) for one in common(here, here)}
    assert by_operator == {
        "return None": None,
        "condition": 4,
        "boundary": 4,
        "comparison": 4,
        "+/-": 0,
        "constant": 1,
    }
