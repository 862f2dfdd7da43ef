"""The table of a ticket's moves, and that the rooms which decide do nothing else."""

import ast
from pathlib import Path

import pytest

from kvferry.gpu_worker import core as core_module
from kvferry.gpu_worker.tickets import NEXT, RUNNING, Move, State, Transfer


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", Move)
def test_every_state_and_move_goes_as_the_table_says_or_changes_nothing(state, move):
    transfer = Transfer(1, state, 0)
    if (state, move) in NEXT:
        assert transfer.advance(move) is NEXT[state, move] is transfer.state
    else:
        with pytest.raises(KeyError):
            transfer.advance(move)
        assert transfer.state is state


def test_a_running_copy_never_ends_by_anything_but_its_last_batch():
    for (state, move), after in NEXT.items():
        if state in RUNNING and after is State.ENDED:
            assert move is Move.OVER


def test_every_state_can_reach_the_end():
    reached = {State.ENDED}
    for _ in State:
        reached |= {state for (state, _), after in NEXT.items() if after in reached}
    assert reached == set(State)


@pytest.mark.parametrize("name", ["core", "guards", "tickets", "queue", "reports", "plans", "layout"])
def test_the_rooms_that_decide_import_nothing_that_acts(name):
    path = Path(core_module.__file__).with_name(f"{name}.py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"zmq", "torch", "asyncio", "time", "logging", "socket", "os", "threading", "select"}
