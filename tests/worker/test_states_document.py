"""docs/states.md holds the table of a ticket's moves in a worker; it must be the one that the worker follows."""

from pathlib import Path

from kvferry.gpu_worker.tickets import NEXT

DOCUMENT = Path(__file__).parents[2] / "docs" / "states.md"


def table() -> list[str]:
    """The table as the document must have it."""
    moves = [f"| {state.name} | {move.name} | {after.name} |" for (state, move), after in NEXT.items()]
    return ["| state | move | next state |", "|---|---|---|", *moves]


def test_the_document_has_the_table_that_the_worker_follows():
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index(table()[0])
    end = lines.index("", start)
    assert lines[start:end] == table(), "copy this:\n" + "\n".join(table())
