"""The table that `kvferry status` prints."""

from kvferry.cli.status import amiss, table


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


def test_what_is_amiss_has_a_line_each_and_nothing_has_none() -> None:
    """Case 53: the state of each rank, for an alarm."""
    well = {
        "no_spare": [],
        "restarting": False,
        "engines": [{"engine_id": "e", "ranks": [{"rank": 0, "state": "attached"}]}],
    }
    assert amiss(well) == []
    ill = {
        "no_spare": [{"rank": 1, "tries": 3, "why": "exited with code 2 (device.open: no room)"}],
        "restarting": True,
        "engines": [{"engine_id": "e", "ranks": [{"rank": 0, "state": "lost"}, {"rank": 1, "state": "attached"}]}],
    }
    assert amiss(ill) == [
        "rank 1 has no spare: exited with code 2 (device.open: no room)",
        "engine 'e': rank 0 is lost",
        "a new daemon waits for workers of the old one",
    ]
