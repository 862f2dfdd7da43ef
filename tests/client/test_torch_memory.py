"""torch tensors shared in place: what a worker maps is what the engine's own tensors read and write."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvferry.client.memory import KVMemory  # noqa: E402
from kvferry.client.torch_memory import check_room, export_cpu  # noqa: E402
from kvferry.proto.errors import ConfigError  # noqa: E402

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 32


@pytest.fixture
def layers() -> dict[str, "torch.Tensor"]:
    """Two layers as views of one buffer, as an engine lays them out."""
    size = BLOCKS * HEADS * TOKENS * CONTENT
    buffer = torch.arange(2 * size, dtype=torch.float32)
    return {f"l{i}": buffer[i * size : (i + 1) * size].view(BLOCKS, HEADS, TOKENS, CONTENT) for i in range(2)}


@pytest.fixture
def memory(layers: dict[str, "torch.Tensor"]) -> Iterator[KVMemory]:
    made = export_cpu(layers, block_tokens=TOKENS)
    yield made
    for fd in made.fds:
        os.close(fd)


def test_both_sides_see_the_same_bytes(layers: dict[str, "torch.Tensor"], memory: KVMemory) -> None:
    """Case 71: every block through the mapping equals the block through the engine's own tensor."""
    (handle,) = memory.layout.handles
    with mmap.mmap(memory.fds[0], handle.nbytes) as seen:
        for block in range(BLOCKS):
            mapped = b"".join(
                seen[region.offset + block * region.stride :][: region.run]
                for region in memory.layout.groups[0].regions
            )
            assert mapped == b"".join(layer[block].numpy().tobytes() for layer in layers.values())
        region = memory.layout.groups[0].regions[1]
        seen[region.offset : region.offset + 4] = b"\x00\x00\x80\x3f"
        assert layers["l1"][0, 0, 0, 0].item() == 1.0


def test_views_made_before_the_sharing_follow_it(layers: dict[str, "torch.Tensor"]) -> None:
    """Layers may hold other tensor objects over the same storage: sharing moves the storage, so all follow."""
    other = layers["l0"].view(BLOCKS, -1)
    made = export_cpu(layers, block_tokens=TOKENS)
    try:
        other[3].fill_(-1)
        region = made.layout.groups[0].regions[0]
        assert os.pread(made.fds[0], 4, region.offset + 3 * region.stride) == b"\x00\x00\x80\xbf"
    finally:
        os.close(made.fds[0])


def test_probes_are_what_the_mapping_shows_and_the_block_is_restored(
    layers: dict[str, "torch.Tensor"], memory: KVMemory
) -> None:
    before = layers["l0"].clone()
    assert memory.probing is not None
    with memory.probing() as probes:
        for probe in probes:
            assert os.pread(memory.fds[probe.handle], len(probe.expect), probe.offset) == probe.expect
        assert len(probes) == 1 and len(probes[0].expect) == 64
        assert not torch.equal(layers["l0"], before)
    assert torch.equal(layers["l0"], before)


def test_a_layers_tensor_outside_the_shared_memory_is_found_before_the_worker_is(
    layers: dict[str, "torch.Tensor"],
) -> None:
    """The trap of re-pointed tensors: the reader sees nothing, and no error anywhere."""
    made = export_cpu(layers, block_tokens=TOKENS, probe_with=[torch.zeros(8, 8)])
    try:
        assert made.probing is not None
        with pytest.raises(ConfigError, match=r"layout\.probe.*outside the memory"), made.probing():
            pass
    finally:
        os.close(made.fds[0])


def test_nothing_is_left_in_shm(layers: dict[str, "torch.Tensor"]) -> None:
    """Case 32: the shared file has no name from the start."""

    def ours() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"torch_*_{os.getpid()}_*")} | {
            path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")
        }

    before = ours()
    made = export_cpu(layers, block_tokens=TOKENS)
    assert ours() == before
    os.close(made.fds[0])


def test_types_of_equal_size_have_different_digests() -> None:
    """Case 64: fp16 and bf16 must not share a cache."""
    digests = set()
    for dtype in (torch.float16, torch.bfloat16):
        made = export_cpu({"l": torch.zeros(4, 8, dtype=dtype)}, block_tokens=TOKENS)
        digests.add(made.layout.digest)
        os.close(made.fds[0])
    assert len(digests) == 2


def test_too_little_shm_is_refused_with_both_numbers() -> None:
    """Case 101: both numbers at start, never a SIGBUS later."""
    with pytest.raises(ConfigError, match=r"memory\.shm: sharing 1048576\.0GiB .* it has .*GiB"):
        check_room(1 << 50)


def test_too_little_memory_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    with pytest.raises(ConfigError, match=r"memory\.free: sharing 4\.0MiB .* 2\.0MiB of memory are free"):
        check_room(4 << 20, meminfo=str(tmp_path / "meminfo"), cgroup=str(tmp_path))


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """Case 104: the memory of the container, not of the machine."""
    (tmp_path / "memory.max").write_text("3145728\n")
    (tmp_path / "memory.current").write_text("1048576\n")
    with pytest.raises(ConfigError, match=r"2\.0MiB of memory are free"):
        check_room(4 << 20, meminfo=str(tmp_path / "none"), cgroup=str(tmp_path))
    check_room(1 << 20, meminfo=str(tmp_path / "none"), cgroup=str(tmp_path))
    (tmp_path / "memory.max").write_text("max\n")
    check_room(4 << 20, meminfo=str(tmp_path / "none"), cgroup=str(tmp_path))


def test_no_tensor_or_one_elsewhere_is_named() -> None:
    with pytest.raises(ConfigError, match=r"memory\.none"):
        export_cpu({}, block_tokens=TOKENS)
    with pytest.raises(ConfigError, match=r"memory\.device: l is on meta"):
        export_cpu({"l": torch.zeros(2, 2, device="meta")}, block_tokens=TOKENS)


def test_a_failure_to_share_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error text is kept, with the size beside it."""
    tensor = torch.zeros(2, 8)
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_fd_cpu_", lambda self: (_ for _ in ()).throw(RuntimeError("no room"))
    )
    with pytest.raises(ConfigError, match=r"memory\.share: torch cannot share 64B: no room"):
        export_cpu({"l": tensor}, block_tokens=TOKENS)
