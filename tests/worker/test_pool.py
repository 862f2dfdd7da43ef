"""The pool file: reserved at creation, told from a stranger's at opening, generations word by word."""

import errno
import fcntl
import os
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvferry.gpu_worker import pool
from kvferry.gpu_worker.pool import FILE_HEADER, Pool, create, remove
from kvferry.proto.errors import ConfigError
from kvferry.proto.limits import PAGE_BYTES

SLOT_BYTES = 3 * PAGE_BYTES
MIB = 1 << 20


@pytest.fixture
def shm():
    """A name in /dev/shm of our own, gone afterwards."""
    path = Path(f"/dev/shm/kvferry-test-{os.getpid()}")
    remove(path)
    yield path
    remove(path)


def u32s(*values):
    return np.array(values, dtype=np.uint32)


def u64s(*values):
    return np.array(values, dtype=np.uint64)


def test_a_created_pool_has_all_its_memory_and_is_private(shm):
    create(shm, MIB, "instance")
    info = shm.stat()
    assert info.st_size == MIB + PAGE_BYTES
    assert info.st_blocks * 512 >= info.st_size
    assert info.st_mode & 0o777 == 0o600
    opened = Pool(shm)
    assert (opened.pool_bytes, opened.instance) == (MIB, "instance")
    assert opened.num_slots(SLOT_BYTES) == MIB // SLOT_BYTES
    assert opened.slots_base == opened.base + PAGE_BYTES
    opened.close()
    opened.close()


def test_progress_rises_to_all_of_it(shm, monkeypatch):
    """Case 50: starting is a state with numbers."""
    monkeypatch.setattr(pool, "STEP_BYTES", MIB)
    monkeypatch.setattr(pool, "POPULATE_BYTES", MIB)
    seen = []
    create(shm, 4 * MIB, "i", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and len(seen) == 10
    assert seen[-1] == (4 * MIB + PAGE_BYTES,) * 2


def test_a_pool_larger_than_the_free_room_is_refused_with_both_numbers_and_no_file(shm):
    """Case 101: found by asking, before anything is made."""
    free = shutil.disk_usage("/dev/shm").free
    with pytest.raises(ConfigError) as caught:
        create(shm, 4 * free, "i")
    assert caught.value.code == "pool.shm_too_small"
    assert str(4 * free + PAGE_BYTES) in caught.value.text
    assert "free" in caught.value.text and "--host-memory" in caught.value.fix
    assert not shm.exists()


def test_a_limit_on_the_size_of_files_is_named_with_both_numbers_and_not_taken_for_a_full_file_system(shm, monkeypatch):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10 * 1024, hard))
    with pytest.raises(ConfigError) as caught:
        create(shm, MIB, "i")
    assert caught.value.code == "limit.file_size" and not shm.exists()
    assert str(MIB + PAGE_BYTES) in caught.value.text and "10240 bytes" in caught.value.text
    assert "ulimit -f" in caught.value.fix and "LimitFSIZE=" in caught.value.fix


def test_room_that_goes_while_the_pool_is_made_is_refused_too(shm, monkeypatch):
    """Case 101: no SIGBUS and no file, when another user of /dev/shm was faster than we."""

    def refuse(fd, start, length):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError) as caught:
        create(shm, MIB, "i")
    assert caught.value.code == "pool.shm_too_small" and not shm.exists()


@pytest.mark.slow
def test_a_small_tmpfs_refuses_without_sigbus(tmp_path, monkeypatch):
    """Case 101, on a real tmpfs of 16 MiB; the question about free room is skipped, so the kernel must say it."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        monkeypatch.setattr(pool, "_check_room", lambda path, total: None)
        with pytest.raises(ConfigError) as caught:
            create(tmp_path / "pool", 64 * MIB, "i")
        assert str(64 * MIB + PAGE_BYTES) in caught.value.text and str(16 * MIB) in caught.value.text
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_interrupted_creation_leaves_no_file(shm):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create(shm, MIB, "i", interrupt)
    assert not shm.exists()


def test_an_existing_file_is_never_taken_over(shm):
    create(shm, MIB, "first")
    with pytest.raises(ConfigError) as caught:
        create(shm, MIB, "second")
    assert caught.value.code == "pool.exists"
    assert Pool(shm).instance == "first"


def test_a_file_of_another_size_than_its_header_says_is_refused(shm):
    create(shm, MIB, "i")
    os.truncate(shm, MIB)
    with pytest.raises(ConfigError) as caught:
        Pool(shm)
    assert caught.value.code == "pool.size" and str(MIB) in caught.value.text


@pytest.mark.parametrize("content", [b"", b"x" * 10_000, FILE_HEADER.pack(pool.FILE_MAGIC, 99, 0, b"")])
def test_a_file_that_is_no_pool_is_refused(shm, content):
    shm.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Pool(shm)
    assert caught.value.code == "pool.format"


def test_a_missing_file_is_refused_by_name(shm):
    with pytest.raises(ConfigError) as caught:
        Pool(shm)
    assert str(shm) in caught.value.text


def test_whoever_maps_the_file_keeps_others_from_locking_it_alone(shm):
    create(shm, MIB, "i")
    first, second = Pool(shm), Pool(shm)
    fd = os.open(shm, os.O_RDWR)
    for opened in (first, second):
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened.close()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(ConfigError) as caught:
        Pool(shm)
    assert caught.value.code == "pool.locked"
    os.close(fd)


def test_two_mappings_of_one_file_see_each_others_bytes_and_generations(shm):
    """All workers of a rank share one pool file."""
    create(shm, MIB, "i")
    one, two = Pool(shm), Pool(shm)
    headers = [opened.headers(SLOT_BYTES, 80) for opened in (one, two)]
    headers[0].open(u32s(3, 79), u64s(7, 8))
    headers[0].close(u32s(3, 79), u64s(7, 8))
    assert not len(headers[1].torn(u32s(79, 3), u64s(8, 7)))


def test_a_slot_is_whole_only_between_close_and_the_next_open(shm):
    create(shm, MIB, "i")
    headers = Pool(shm).headers(SLOT_BYTES, 10)
    slots, old, new = u32s(0, 9), u64s(1, 1), u64s(2, 2)
    assert headers.torn(slots, old).tolist() == [0, 1]
    headers.open(slots, old)
    assert headers.torn(slots, old).tolist() == [0, 1]
    headers.close(slots, old)
    assert headers.torn(slots, old).tolist() == []
    headers.open(slots[1:], new[1:])
    assert headers.torn(slots, old).tolist() == [1]
    assert headers.torn(slots, new).tolist() == [0, 1]


@pytest.mark.parametrize("word", [0, 1, 2])
def test_a_flipped_bit_in_any_header_word_shows_as_torn(shm, word):
    """Case 26, as the worker sees it: a damaged header is a result, not an error."""
    create(shm, MIB, "i")
    headers = Pool(shm).headers(SLOT_BYTES, 10)
    headers.open(u32s(4, 5), u64s(9, 9))
    headers.close(u32s(4, 5), u64s(9, 9))
    with shm.open("r+b") as file:
        file.seek(PAGE_BYTES + 5 * SLOT_BYTES + 8 * word)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert headers.torn(u32s(4, 5), u64s(9, 9)).tolist() == [1]


def test_headers_write_their_own_page_alone(shm):
    create(shm, MIB, "i")
    headers = Pool(shm).headers(SLOT_BYTES, 10)
    headers.open(u32s(2), u64s(0xFFFF_FFFF_FFFF_FFFF))
    headers.close(u32s(2), u64s(0xFFFF_FFFF_FFFF_FFFF))
    content = np.fromfile(shm, dtype=np.uint8)
    content[: FILE_HEADER.size] = 0
    start = PAGE_BYTES + 2 * SLOT_BYTES
    assert np.flatnonzero(content).min() >= start and np.flatnonzero(content).max() < start + 24
