"""GPU tensors exported on a stub of the driver: which handle, what of the allocation, what is refused and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.client.cuda_memory import export_cuda
from kvferry.client.memory import KVMemory
from kvferry.cuda.driver import pid_namespace
from kvferry.proto.errors import ConfigError
from tests.client.fake_gpu import FakeEngine, GpuTensor
from tests.client.test_memory import LAYOUTS, bytes_of, views_of
from tests.cuda.stubs import UUIDS, Stub

LAYERS, BLOCKS, PAGE = 2, 6, 4096
SIZES = {"L": LAYERS, "B": BLOCKS, "H": 2, "N": 4, "C": 40}
MIB = 1 << 20


def layers_at(start: int, layers: int = LAYERS) -> dict[str, GpuTensor]:
    """Layers one behind the other, each [blocks, bytes]."""
    return {f"l{n}": GpuTensor(start + n * BLOCKS * PAGE, (BLOCKS, PAGE), (PAGE, 1)) for n in range(layers)}


def export(engine: FakeEngine, views: dict[str, GpuTensor], **options: object) -> KVMemory:
    made = export_cuda(views, block_tokens=4, driver=engine.driver, current_stream=engine.stream, **options)  # type: ignore[arg-type]
    return engine.keep(made)


def test_ordinary_memory_becomes_a_handle_of_64_bytes_that_shows_the_views_and_no_more(engine: FakeEngine) -> None:
    """Case 98: torch's allocator puts a tensor inside an allocation of its own, beside other tensors."""
    base = engine.allocate(16 * MIB)
    memory = export(engine, layers_at(base + 3 * MIB))
    (handle,) = memory.layout.handles
    assert (handle.kind, handle.base_offset, handle.nbytes) == ("cuda_ipc", 3 * MIB, LAYERS * BLOCKS * PAGE)
    assert len(handle.blob) == 64 and handle.device == UUIDS[0]
    assert (handle.pid, handle.pid_ns) == (os.getpid(), pid_namespace())
    assert memory.fds == ()
    assert [region.offset for region in memory.layout.groups[0].regions] == [0, BLOCKS * PAGE]


def test_one_allocation_is_one_handle_and_two_are_two(engine: FakeEngine) -> None:
    first, second = engine.allocate(MIB), engine.allocate(MIB)
    views = {**layers_at(first, 1), "l1": GpuTensor(second + 512, (BLOCKS, PAGE), (PAGE, 1))}
    memory = export(engine, views)
    assert [handle.base_offset for handle in memory.layout.handles] == [0, 512]
    assert [(region.handle, region.offset) for region in memory.layout.groups[0].regions] == [(0, 0), (1, 0)]
    again = export(engine, layers_at(first))
    assert len(again.layout.handles) == 1


def test_memory_of_a_mapped_allocation_becomes_a_descriptor_of_the_whole_of_it(engine: FakeEngine) -> None:
    """Case 98: vLLM's cumem allocator; the legacy handle fails there."""
    start = engine.map(4 * MIB)
    memory = export(engine, layers_at(start + PAGE))
    (handle,) = memory.layout.handles
    assert (handle.kind, handle.base_offset, handle.blob) == ("cuda_vmm_fd", PAGE, b"")
    assert handle.base_offset + handle.nbytes == 4 * MIB
    engine.bytes_at(start, 16)[:] = 7
    assert os.pread(memory.fds[0], 16, 0) == b"\x07" * 16


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:9, expandable_segments: true", "PYTORCH_ALLOC_CONF has"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "has backend:cudaMallocAsync"),
        ("PYTORCH_CUDA_ALLOC_CONF", "", "sleep mode"),
    ],
)
def test_what_no_other_process_can_be_shown_is_refused_with_the_setting_that_made_it_so(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, words: str
) -> None:
    """Cases 98 and 128: named at start, with the fix, and not found out deep inside a registration."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(setting, value)
    start = engine.map(4 * MIB, exportable=False)
    with pytest.raises(ConfigError, match=r"memory\.not_exportable") as caught:
        export(engine, layers_at(start))
    assert words in str(caught.value) and "fix: start the engine" in str(caught.value)


def test_a_tensor_over_several_mapped_pieces_is_refused_with_its_numbers(engine: FakeEngine) -> None:
    """Case 71: a handle maps one piece; the rest of the tensor would be somebody else's memory."""
    start = engine.map(2 * MIB)
    with pytest.raises(ConfigError, match=r"memory\.pieces: l0 needs 24576 bytes .* has 4096"):
        export(engine, layers_at(start + 2 * MIB - PAGE, 1))


def test_what_is_no_gpu_memory_is_named(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"memory\.export: l0 lies at 0x1000, which is no GPU memory"):
        export(engine, layers_at(0x1000))
    with pytest.raises(ConfigError, match=r"memory\.none"):
        export(engine, {})


def test_a_driver_that_refuses_is_quoted_and_nothing_stays_open(engine: FakeEngine, stub: Stub) -> None:
    plain, mapped = engine.allocate(MIB), engine.map(4 * MIB)
    before = len(list(Path("/proc/self/fd").iterdir()))
    stub.control("cuIpcGetMemHandle fail 801")
    views = {**layers_at(mapped, 1), "l1": GpuTensor(plain, (BLOCKS, PAGE), (PAGE, 1))}
    with pytest.raises(ConfigError, match=r"memory\.export: the memory of l1 cannot be exported: cuIpcGetMemHandle"):
        export(engine, views)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_driver_is_asked_once_and_never_again_for_a_later_worker(engine: FakeEngine, stub: Stub) -> None:
    """Case 98: a thread that only resends what is known needs no context."""
    base = engine.allocate(MIB)
    memory = export(engine, layers_at(base))
    num_calls = len(stub.calls())
    memory.layout.model_dump()
    assert len(stub.calls()) == num_calls
    assert sum("cuIpcGetMemHandle" in call for call in stub.calls()) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_regions_that_cpu_memory_gives(engine: FakeEngine, layout: str) -> None:
    views = views_of(layout, SIZES, 2)
    base = engine.allocate(MIB)
    tensors = {
        f"l{n}": GpuTensor(base + 256 + view.offset, view.sizes, view.strides, 2, "bfloat16")
        for n, view in enumerate(views)
    }
    total = 2 * LAYERS * SIZES["H"] * SIZES["N"] * SIZES["C"]
    memory = export(engine, tensors, null_block=True, block_bytes=total)
    (group,) = memory.layout.groups
    assert group.payload_bytes == total and memory.layout.null_block
    seen = {byte for block in range(BLOCKS) for byte in bytes_of(group.regions, block)}
    assert seen == set(range(total * BLOCKS)), "all of it, and each byte in one block"


def test_a_block_of_other_bytes_than_the_engine_says_is_refused(engine: FakeEngine) -> None:
    """Case 71."""
    base = engine.allocate(MIB)
    with pytest.raises(ConfigError, match=rf"layout\.geometry.*{LAYERS * PAGE} bytes.*engine says {17 * PAGE}"):
        export(engine, layers_at(base), block_bytes=17 * PAGE)


def test_probes_are_what_the_gpu_holds_while_they_are_shown_and_the_bytes_come_back(engine: FakeEngine) -> None:
    base = engine.allocate(MIB)
    seen = engine.bytes_at(base, MIB)
    seen[:] = 9
    layers = layers_at(base + 512)
    memory = export(engine, layers, probe_with=[layers["l0"], layers["l1"], layers["l0"]])
    assert memory.probing is not None
    with memory.probing() as probes:
        assert len(probes) == 2 and {len(probe.expect) for probe in probes} == {64}
        for probe in probes:
            at = memory.layout.handles[0].base_offset + probe.offset
            assert seen[at : at + 64].tobytes() == probe.expect
    assert (seen == 9).all()


def test_a_probe_writes_no_byte_behind_a_short_first_run(engine: FakeEngine) -> None:
    """Heads that lie apart: only the first one's first bytes are surely the tensor's."""
    base = engine.allocate(MIB)
    seen = engine.bytes_at(base, MIB)
    seen[:] = 9
    memory = export(engine, {"l0": GpuTensor(base, (BLOCKS, 2, 16), (64, 32, 1))})
    assert memory.probing is not None
    with memory.probing() as (probe,):
        assert len(probe.expect) == 16 and (seen[16:] == 9).all()


def test_a_layers_tensor_elsewhere_is_found_before_a_worker_is_asked(engine: FakeEngine) -> None:
    """Case 71: what is shown must be what the layers compute with."""
    base, elsewhere = engine.allocate(MIB), engine.allocate(MIB)
    memory = export(engine, layers_at(base), probe_with=[GpuTensor(elsewhere, (4, 64), (64, 1))])
    assert memory.probing is not None
    with pytest.raises(ConfigError, match=r"layout\.probe.*outside the memory"), memory.probing():
        pass


def test_a_thread_that_computes_on_another_gpu_is_told_so(stub: Stub) -> None:
    stub.control("devices 2")
    one, other = FakeEngine(stub.path), FakeEngine(stub.path, device=1)
    base = other.allocate(MIB)
    one.driver.use(one.driver.retain_context(one.device, flags=None))
    with pytest.raises(ConfigError, match=r"memory\.device: this thread has another GPU"):
        export(one, layers_at(base))
    here = one.allocate(MIB)
    with pytest.raises(ConfigError, match=r"memory\.device: .*on several GPUs: l0 on GPU 1, l1 on GPU 0"):
        export(one, {**layers_at(base, 1), "l1": GpuTensor(here, (BLOCKS, PAGE), (PAGE, 1))})
    one.driver.release_context(one.device)
    other.driver.use(other.driver.retain_context(other.device, flags=None))
    other.driver.release_context(other.device)
    other.close()
    one.driver.use(one.driver.retain_context(one.device, flags=None))
    one.driver.release_context(one.device)
    one.close()


def test_the_exporter_needs_neither_a_driver_nor_torch_to_be_imported() -> None:
    code = (
        "import sys, kvferry.client.cuda_memory as m\n"
        "assert not {'torch', 'zmq'} & set(sys.modules), sorted(sys.modules)\n"
        "try:\n    m.Driver.load('libno-such-driver.so.1')\n"
        "except m.ConfigError as error:\n    print(error.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("device.no_driver\n", "")
