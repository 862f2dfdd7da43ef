"""docs/states.md holds the table of a job's turns; it must be the one that the daemon follows."""

from pathlib import Path

from kvferry.scheduler_daemon.core.jobs import NEXT
from kvferry.settings import Settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "states.md"


def table() -> list[str]:
    """The table as the document must have it."""
    rows = ["| kind | state | turn | next state | what is done, in this order |", "|---|---|---|---|---|"]
    for (kind, state, turn), (after, effects) in NEXT.items():
        done = ", ".join(effect.name for effect in effects) or "nothing"
        rows.append(f"| {kind.name} | {state.name} | {turn.name} | {after.name} | {done} |")
    return rows


def test_the_document_has_the_table_that_the_daemon_follows():
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index(table()[0])
    end = lines.index("", start)
    assert lines[start:end] == table(), "copy this:\n" + "\n".join(table())


def test_the_document_has_the_times_that_a_job_is_given_by_default():
    settings = Settings(run_dir="/tmp")
    text = DOCUMENT.read_text()
    for name in ("job_deadline", "load_deadline", "kill_grace"):
        assert f"`{name}`, {getattr(settings, name):g} s" in text
