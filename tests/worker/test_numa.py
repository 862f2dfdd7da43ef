"""Pages of a pool beside its GPU: asked for, looked at, and told where they are not."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from kvferry.gpu_worker import numa, pool

HERE = Path("/sys/devices/system/node/node0")

MAPS = """\
7f0000000000 default heap anon=3 dirty=3 N0=3 kernelpagesize_kB=4
7f2d6d105000 prefer:1 file=/dev/shm/pool dirty=1000 active=0 N0=250 N1=750 kernelpagesize_kB=4
"""


def bound(address: int, nbytes: int) -> str:
    """The policy of the mapping at this address, as the kernel has it."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == address:
            return line.split()[1]
    return ""


@pytest.mark.skipif(not HERE.exists(), reason="this kernel knows no NUMA nodes")
def test_a_pools_pages_are_asked_for_beside_its_gpu(tmp_path: Path) -> None:
    """Case 97: the wish stands before a page exists, and belongs to the file: whoever maps it sees it."""
    path = Path("/dev/shm") / f"kvferry-test-numa-{tmp_path.name}"
    try:
        told = pool.create(path, 1 << 20, "test", node=0)
        if "Operation not permitted" in told:
            pytest.skip(told)
        assert told == ""
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            address = view.ctypes.data
            assert view[-1] == 0
            assert bound(address, len(mapped)).startswith("prefer")
            assert numa.pages(address).keys() <= {0}
            del view
    finally:
        path.unlink(missing_ok=True)


def test_a_node_that_is_not_there_is_told_and_the_pool_is_made_all_the_same(tmp_path: Path) -> None:
    """Case 97: without the right to bind, or without the node, the start goes on with one line."""
    path = Path("/dev/shm") / f"kvferry-test-numa-{tmp_path.name}"
    try:
        told = pool.create(path, 1 << 20, "test", node=1022)
        assert "node 1022" in told and "\n" not in told
        made = pool.Pool(path)
        assert made.pool_bytes == 1 << 20
        made.close()
    finally:
        path.unlink(missing_ok=True)


def test_where_pages_came_to_lie_is_read_from_the_kernel_and_told_if_it_is_elsewhere(tmp_path: Path) -> None:
    """Case 97: a machine of two nodes, as its kernel writes it."""
    maps = tmp_path / "numa_maps"
    maps.write_text(MAPS)
    found = numa.pages(0x7F2D6D105000, maps)
    assert found == {0: 250, 1: 750}
    assert numa.pages(0x1000, maps) == {} and numa.pages(0x1000, tmp_path / "none") == {}
    assert "25 % on node 0, 75 % on node 1" in numa.told(found, 1)
    assert numa.told({1: 1000}, 1) == "" and numa.told({}, 1) == "" and numa.told({0: 5, 1: 995}, 1) == ""


def test_a_machine_without_a_number_for_the_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in numa.prefer(0, 4096, 0)
    monkeypatch.undo()
    assert numa.prefer(0, 4096, 5000)
