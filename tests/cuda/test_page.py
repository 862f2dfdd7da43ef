"""docs/faults.md says what each fault of the driver costs, and each row is held by a test."""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"


def test_each_row_of_the_page_names_tests_that_are_there() -> None:
    section = PAGE.read_text().partition("## Faults of the CUDA driver")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 8
    written = {
        name for path in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and set(named) <= written, row
