"""A core decides and a shell acts: no core, and nothing a core imports, knows sockets, clocks, threads or devices.

Modules are found by glob, so a new core is held to this from its first line.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Import name -> folder; `pyproject.toml` maps them so.
PACKAGES = {
    "kvferry.proto": "proto",
    "kvferry.scheduler_daemon": "scheduler_daemon",
    "kvferry.gpu_worker": "gpu_worker",
    "kvferry": "service",
}
CORES = [
    "proto/*.py",
    "scheduler_daemon/core/**/*.py",
    "gpu_worker/core.py",
    "gpu_worker/layout.py",
    "service/client/core.py",
    "service/client/*_core.py",
    "service/supervise/core.py",
    "service/supervise/daemons.py",
    "service/supervise/spares.py",
]
IMPURE = {
    "zmq": "give the core an event, and let it return an action",
    "torch": "pass addresses and numbers; tensors stay in devices/ and in modules of their own",
    "asyncio": "return actions; the loop is the shell's",
    "time": "take now_ns as an argument",
    "logging": "return a Note",
    "socket": "take messages, return messages",
    "os": "the shell reads files and the environment; pass what it found",
    "threading": "one owner drives the core; the shell holds the lock",
    "multiprocessing": "processes are the supervisor's",
    "subprocess": "processes are the supervisor's",
    "random": "take a number or a generator as an argument",
    "secrets": "the shell draws ids; pass them in",
    "datetime": "take now_ns as an argument",
}


@cache
def file_of(module: str) -> Path | None:
    """The file of a kvferry module in this tree; None for anything else."""
    for package, folder in PACKAGES.items():
        if module == package or module.startswith(package + "."):
            path = ROOT / folder / module.removeprefix(package).lstrip(".").replace(".", "/")
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    return candidate
            return None
    return None


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, module) of each import in a file; `from a import b` gives a and a.b."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide where things come from; name the package"
            found.append((node.lineno, node.module or ""))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def closure(start: Path) -> dict[Path, Path | None]:
    """Each file of ours that `start` loads, with the file that imports it. Empty packages on the way count too."""
    seen: dict[Path, Path | None] = {start: None}
    todo = [start]
    while todo:
        path = todo.pop()
        for _, module in imports_of(path):
            found = file_of(module)
            if found is not None and found not in seen:
                seen[found] = path
                todo.append(found)
    return seen


CORE_FILES = sorted({path for pattern in CORES for path in ROOT.glob(pattern)})


def test_there_are_cores_to_look_at() -> None:
    assert len(CORE_FILES) >= 15


@pytest.mark.parametrize("core", CORE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_core_and_what_it_imports_are_pure(core: Path) -> None:
    for path, importer in closure(core).items():
        for line, module in imports_of(path):
            better = IMPURE.get(module.split(".")[0])
            via = f" (imported by {importer.relative_to(ROOT)})" if importer else ""
            assert better is None, f"{path.relative_to(ROOT)}:{line}{via} imports {module}: {better}"


def test_the_daemon_and_the_wire_never_load_torch() -> None:
    for start in [*ROOT.glob("scheduler_daemon/**/*.py"), *ROOT.glob("proto/*.py"), *ROOT.glob("service/net/*.py")]:
        for path in closure(start):
            names = {module.split(".")[0] for _, module in imports_of(path)}
            assert "torch" not in names, f"{path.relative_to(ROOT)}, loaded by {start.relative_to(ROOT)}"
