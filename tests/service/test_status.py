"""The table that `kvferry status` prints."""

from kvferry.cli.status import table


def test_plain_values_come_first_then_one_block_for_each_map_and_list() -> None:
    lines = table(
        {
            "slots": {"total": 1638, "free": 0},
            "state": "serving",
            "pid": 12345,
            "engines": [
                {"engine_id": "e", "registered": True, "namespace": "a" * 64, "ranks": [{"rank": 0, "state": "lost"}]}
            ],
            "counters": {},
            "namespaces": [],
        }
    )
    assert lines == [
        "state  serving",
        "pid    12345",
        "",
        "slots",
        "  total  1,638",
        "  free   0",
        "",
        "engines",
        "  engine_id  registered  namespace     ranks",
        "  e          yes         aaaaaaaaaaaa  rank=0 state=lost",
        "",
        "counters: none",
        "",
        "namespaces: none",
    ]
