"""The table's file: held by one daemon, taken over by the next where it fits, else begun anew."""

import threading
from pathlib import Path

import numpy as np
import pytest

from kvferry.proto.errors import ConfigError
from kvferry.scheduler_daemon.core.api import TableShape
from kvferry.scheduler_daemon.core.header import HEADER_BYTES
from kvferry.scheduler_daemon.table import TableFile, machine_boot

MACHINE = bytes(range(16))
SHAPE = TableShape(num_slots=100, slot_bytes=(8192, 4096), pool_bytes=(8192 * 100, 4096 * 200))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def opened(path: Path, machine: bytes = MACHINE) -> TableFile:
    return TableFile(path, machine, patience_s=0)


def test_a_new_table_is_zeroed_and_an_older_view_stays_readable(path: Path) -> None:
    file = opened(path)
    assert (file.recover(SHAPE.pool_bytes), file.discarded, file.boots) == (None, "", 0)
    first = file.make(SHAPE)
    first["generation"] = 7
    second = file.make(TableShape(50, (16384, 8192), SHAPE.pool_bytes))
    assert second.shape == (50,)
    assert not second["generation"].any()
    assert first.shape == (100,)
    first["generation"].sum()
    file.close()


def test_one_daemon_holds_it(path: Path) -> None:
    file = opened(path)
    with pytest.raises(ConfigError, match=r"table\.locked"):
        opened(path)
    file.close()
    opened(path).close()


def test_a_predecessor_that_is_just_ending_is_waited_for(path: Path) -> None:
    file = opened(path)
    timer = threading.Timer(0.1, file.close)
    timer.start()
    TableFile(path, MACHINE, patience_s=10).close()
    timer.join()


def test_the_next_daemon_finds_records_shape_and_epochs_and_counts_itself(path: Path) -> None:
    """Case 45: a restart begins with what was there."""
    file = opened(path)
    file.keep_epochs(((b"n" * 16, 2),))
    file.make(SHAPE)["generation"] = np.arange(100)
    file.keep_epochs(((b"n" * 16, 3), (b"m" * 16, 1)))
    file.close()
    for boots in (2, 3):
        file = opened(path)
        found = file.recover(SHAPE.pool_bytes)
        assert found is not None
        assert found.shape == SHAPE
        assert found.epochs == ((b"n" * 16, 3), (b"m" * 16, 1))
        assert found.table["generation"].tolist() == list(range(100))
        assert file.boots == boots
        found.table["generation"][5] = 5
        file.close()


@pytest.mark.parametrize(
    ("machine", "pool_bytes", "why"),
    [
        (bytes(16), SHAPE.pool_bytes, "another boot of this machine"),
        (MACHINE, (8192 * 50, 4096 * 200), "its pool files had"),
        (MACHINE, (8192 * 100,), "its pool files had"),
        (MACHINE, (), "its pool files had"),
    ],
)
def test_what_does_not_fit_is_dropped_with_the_reason(
    path: Path, machine: bytes, pool_bytes: tuple[int, ...], why: str
) -> None:
    file = opened(path)
    file.make(SHAPE)["generation"] = 1
    file.close()
    file = opened(path, machine)
    assert file.recover(pool_bytes) is None
    assert why in file.discarded
    assert not file.make(SHAPE)["generation"].any()
    file.close()


def test_a_header_that_is_not_whole_or_a_file_cut_short_drops_the_records(path: Path) -> None:
    file = opened(path)
    file.make(SHAPE)
    file.close()
    whole = path.read_bytes()
    for broken, why in [
        (b"\x01" + whole[1:2048] + b"\x01" + whole[2049:], "its header is not whole"),
        (whole[: HEADER_BYTES + 99 * 128], "it names 100 slots"),
    ]:
        path.write_bytes(broken)
        file = opened(path)
        assert file.recover(SHAPE.pool_bytes) is None
        assert why in file.discarded
        file.close()


def test_the_machines_boot_id_is_sixteen_bytes() -> None:
    assert len(machine_boot()) == 16
    assert machine_boot() == machine_boot()
