"""A core decides and a shell acts: what the core may not know, it does not import."""

import ast
from pathlib import Path

import pytest

import kvferry.scheduler_daemon.core.core as core

FOLDER = Path(core.__file__).parent
FORBIDDEN = {"zmq", "torch", "asyncio", "time", "logging", "socket", "os", "threading", "random", "msgpack"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_core_knows_no_socket_no_clock_and_no_log(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & FORBIDDEN
