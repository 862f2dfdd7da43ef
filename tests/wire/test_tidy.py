"""House style as a test. Each rule names what to write in place of what it refuses."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ["proto", "scheduler_daemon", "gpu_worker", "service"]
FILES = sorted(path for folder in [*LIBRARY, "examples", "tests"] for path in (ROOT / folder).rglob("*.py"))
# Where people read standard output.
MAY_PRINT = ("service/cli/", "service/supervise/", "examples/", "tests/", "gpu_worker/check", "bench/")
# Cores may assert what only their own bug can break; a message is checked before it reaches them. Elsewhere
# `assert x is not None` alone is let through: it tells the type checker what the line before has made so.
MAY_ASSERT = ("scheduler_daemon/core/", "gpu_worker/core.py", "service/client/core.py", "examples/", "tests/")
MAX_LINES = 450
MAX_TEST_LINES = 650  # many small cases of one thing read well together
OBJECT_LOADERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def narrows(here: str, node: ast.Assert) -> bool:
    """Whether an assert only says that something is there; never so in proto/."""
    test = ast.unparse(node.test)
    return test.endswith(" is not None") and " and " not in test and not here.startswith("proto/")


def faults(path: Path) -> Iterator[str]:
    """One line per fault of a file: where, what, and what to write instead."""
    here, text = name(path), path.read_text()
    library = here.startswith(tuple(f"{folder}/" for folder in LIBRARY))
    most = MAX_TEST_LINES if here.startswith("tests/") else MAX_LINES
    if (lines := text.count("\n")) > most:
        yield f"{here} has {lines} lines: split it by idea (at most {most})"
    if not text.strip():
        return
    tree = ast.parse(text)
    if library and not ast.get_docstring(tree):
        yield f"{here}:1 has no docstring: say what the module is, what it never does, and why it is as it is"
    for node in ast.walk(tree):
        at = f"{here}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{at} has a bare except: name what can be raised, or `except Exception` with the reason beside it"
        if isinstance(node, ast.Assert) and not here.startswith(MAY_ASSERT) and not narrows(here, node):
            yield f"{at} asserts: raise a named error of kvferry.proto.errors; `python -O` drops asserts"
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"{at} imports a star: name what is used"
        if isinstance(node, ast.Import | ast.ImportFrom) and library:
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if OBJECT_LOADERS & {module.split(".")[0] for module in modules}:
                yield f"{at} imports an object loader: messages are plain types, use kvferry.proto.codec"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("eval", "exec") and library:
                yield f"{at} calls {node.func.id}: look the name up in a dict of what is allowed"
            if node.func.id == "print" and not here.startswith(MAY_PRINT):
                yield f"{at} prints: return a Note from a core, log in a shell, print only in service/cli"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.time" and library:
            yield f"{at} reads the wall clock: time.monotonic_ns() never jumps"


@pytest.mark.parametrize("folder", [*LIBRARY, "examples", "tests"])
def test_the_code_keeps_the_house_style(folder: str) -> None:
    found = [fault for path in FILES if name(path).startswith(folder + "/") for fault in faults(path)]
    assert not found, "\n" + "\n".join(found)


def test_each_rule_complains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "proto" / "bad.py"
    bad.parent.mkdir()
    bad.write_text(
        "import pickle, time\nfrom os import *\n"
        "try:\n    eval('1')\nexcept:\n    print(time.time())\n    assert True\n" + "\n" * MAX_LINES
    )
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    told = "\n".join(faults(bad))
    for word in (
        "lines",
        "docstring",
        "bare except",
        "asserts",
        "star",
        "object loader",
        "eval",
        "prints",
        "wall clock",
    ):
        assert word in told
