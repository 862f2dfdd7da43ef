"""A pool that cannot fit is refused before anything is reserved, with the numbers and a size that would fit."""

from pathlib import Path

import pytest

from kvferry.proto.errors import ConfigError
from kvferry.supervise.memory import Machine, check, read_machine, table_bytes
from kvferry.units import parse_bytes

G = 1 << 30


@pytest.mark.parametrize(
    ("machine", "code", "words"),
    [
        (Machine(4 * G, 64 * G, None), "host_memory.shm", ["8.0 GiB", "4.0 GiB", "/dev/shm", "--shm-size"]),
        (Machine(64 * G, 4 * G, None), "host_memory.ram", ["8.0 GiB", "4.0 GiB", "this machine"]),
        (Machine(64 * G, 64 * G, 2 * G), "host_memory.cgroup", ["8.0 GiB", "2.0 GiB", "container"]),
        (Machine(4 * G, 3 * G, 2 * G), "host_memory.shm", ["8.0 GiB", "4.0 GiB"]),
    ],
)
def test_what_does_not_fit_is_refused_and_the_size_in_the_fix_fits(
    machine: Machine, code: str, words: list[str]
) -> None:
    """Case 101, case 104."""
    with pytest.raises(ConfigError) as error:
        check(8 * G, machine)
    assert error.value.code == code
    assert all(word in str(error.value) for word in words), str(error.value)
    size = error.value.fix.split("at most ")[1].split(",")[0]
    check(parse_bytes(size), machine)
    assert parse_bytes(size) > 0.9 * min(n for n in (machine.shm_free, machine.available, machine.cgroup_free) if n)


def test_what_fits_passes_also_where_nothing_is_known_but_dev_shm() -> None:
    check(8 * G, Machine(8 * G + table_bytes(8 * G), 9 * G, 9 * G))
    check(8 * G, Machine(8 * G + table_bytes(8 * G), None, None))


@pytest.mark.parametrize("host_memory", [1 << 20, 64 << 20, 8 * G, 512 * G])
def test_a_pool_that_just_fits_without_its_slot_table_is_refused_with_a_size_that_fits(host_memory: int) -> None:
    """The daemon makes the table beside the pool: it would find no room there."""
    machine = Machine(host_memory + table_bytes(host_memory) - 1, 1024 * G, None)
    with pytest.raises(ConfigError, match=r"host_memory\.shm: .* \(its slot table may take ") as error:
        check(host_memory, machine)
    size = error.value.fix.split("at most ")[1].split(",")[0]
    check(parse_bytes(size), machine)
    assert table_bytes(host_memory) == 4096 + 128 * (host_memory // (64 << 10))


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_container_with_a_limit_of_its_own_or_of_a_parent_is_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal: 100 kB\nMemAvailable:   2048 kB\n",
        proc__self__cgroup="0::/pod/box\n",
        sys__fs__cgroup__pod__memory_DOT_max="1000000\n",
        sys__fs__cgroup__pod__memory_DOT_current="400000\n",
        sys__fs__cgroup__pod__box__memory_DOT_max="max\n",
        sys__fs__cgroup__pod__box__memory_DOT_current="300000\n",
    )
    machine = read_machine(tmp_path, tmp_path)
    assert (machine.available, machine.cgroup_free) == (2048 * 1024, 600_000)
    assert machine.shm_free > 0


def test_the_older_cgroup_files_are_read_and_their_no_limit_is_none(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="5:cpu:/x\n4:memory:/box\n0::/\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=f"{(1 << 63) - 4096}\n",
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes="5\n",
        sys__fs__cgroup__memory__box__memory_DOT_limit_in_bytes="500\n",
        sys__fs__cgroup__memory__box__memory_DOT_usage_in_bytes="600\n",
    )
    assert read_machine(tmp_path, tmp_path).cgroup_free == 0


def test_a_machine_that_tells_nothing_sets_no_bound(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, tmp_path)
    assert (machine.available, machine.cgroup_free) == (None, None)
