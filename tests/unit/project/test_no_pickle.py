"""Nothing that is read can run: no pickle, no eval, no tensors of torch's own file form."""

import ast

import pytest

from support.tree import FOLDERS, ROOT, modules

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile"}
# Of torch and torch.distributed: what reads or sends pickles.
METHODS = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}


def dangers(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {one.name for one in names if one.name.split(".")[0] in MODULES}
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.add(module)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.add(name)
            case ast.Attribute(attr=name) if name in METHODS:
                found.add(name)
            case ast.Attribute(value=ast.Name(id="torch"), attr=("load" | "save") as name):
                found.add(f"torch.{name}")
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.add("allow_pickle")
    return found


@pytest.mark.parametrize(
    "path", [p for p in modules() if p.split("/")[0] in (*FOLDERS, "examples")]
)
def test_nothing_that_is_read_can_run(path: str) -> None:
    assert dangers(ast.parse((ROOT / path).read_text())) == set()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "eval('1')",
        "torch.load('x')",
        "dist.all_gather_object(a, b)",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_what_could_run_is_seen(code: str) -> None:
    assert dangers(ast.parse(code))
