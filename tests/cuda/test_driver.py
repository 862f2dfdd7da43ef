"""The ctypes table against a C compiler's view, NVIDIA's header where there is one, and a driver that is not there."""

import ast
import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cuda import table
from kvferry.cuda.driver import CudaError, Driver, same_gpu
from kvferry.cuda.structs import EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, STRUCTURES, PointerAttribute
from kvferry.proto.errors import ConfigError
from tests.cuda.stubs import UUIDS, Stub, build, compiler

ROOT = Path(__file__).parents[2]


# ---- the table -------------------------------------------------------------------------------------


def headers() -> Iterator[Path]:
    """Where NVIDIA's cuda.h may lie: a toolkit, or beside Triton in a virtual environment."""
    homes = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    homes += sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    for folder in (*sys.path, *map(str, ROOT.glob(".venv*/lib/python*/site-packages"))):
        homes.append(Path(folder) / "triton/backends/nvidia/include")
    yield from (home / "cuda.h" for home in homes if (home / "cudaTypedefs.h").is_file())


@pytest.fixture(scope="module")
def header() -> Path:
    found = next(headers(), None)
    if found is None:
        pytest.skip("needs NVIDIA's cuda.h: a CUDA toolkit, $CUDA_HOME, or Triton in a virtual environment")
    return found


# How an argument of cuda.h travels.
WIDTHS = {
    **dict.fromkeys(["int", "CUdevice", "CUresult", "CUdevice_attribute", "CUpointer_attribute"], "i32"),
    **dict.fromkeys(["CUmemAllocationHandleType", "CUmemAllocationGranularity_flags"], "i32"),
    "unsigned int": "i32",
    **dict.fromkeys(["size_t", "CUdeviceptr", "cuuint64_t", "CUmemGenericAllocationHandle"], "u64"),
    "unsigned long long": "u64",
    **dict.fromkeys(["CUcontext", "CUstream", "CUevent"], "u64"),
    "CUipcMemHandle": "by value",
}


def width_in_header(argument: str) -> str:
    """`size_t count` -> u64."""
    text = re.sub(r"\bconst\b", "", argument).strip()
    if "*" in text:
        return "u64"
    return WIDTHS[text.rpartition(" ")[0].strip().removesuffix("_v1").removesuffix("_v2")]


def width_in_table(kind: type) -> str:
    if issubclass(kind, ctypes.Structure):
        return "by value"
    return {4: "i32", 8: "u64"}[ctypes.sizeof(kind)]


def test_each_entry_of_the_table_has_the_arguments_of_nvidias_header(header: Path) -> None:
    """cudaTypedefs.h has one type for each version of each signature, named for it."""
    typedefs = (header.parent / "cudaTypedefs.h").read_text()
    wanted = {(re.sub(r"_v\d$", "", name), name, 0): arguments for name, arguments in table.TABLE.items()}
    wanted |= {(name, name, version): arguments for (name, version), arguments in table.BY_VERSION.items()}
    for (stem, exported, version), arguments in wanted.items():
        types = {
            int(found): text for found, text in re.findall(rf"\*PFN_{stem}(?:_v2)?_v(\d+)\)\((.*?)\);", typedefs, re.S)
        }
        assert types, f"cudaTypedefs.h does not have {stem}"
        # An exported name without a suffix is the oldest signature that there is, one with it the next; of both there
        # may be a later revision that the table does not use.
        in_order = [types[number] for number in sorted(types)]
        choices = [types[version]] if version else in_order
        shapes = [[width_in_header(one) for one in text.split(",")] for text in choices]
        assert [width_in_table(kind) for kind in arguments] in shapes, (exported, shapes)


def test_structures_have_the_sizes_of_nvidias_header(header: Path, tmp_path: Path) -> None:
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");')
        for field, *_ in structure._fields_:
            if field not in ("bytes", "reserved", "allocFlags"):
                offset = getattr(structure, field).offset
                lines.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");')
    source = tmp_path / "sizes.c"
    source.write_text("#include <stddef.h>\n#include <cuda.h>\n" + "\n".join(lines))
    cc = compiler()
    if cc is None:
        pytest.skip("needs a C compiler")
    done = subprocess.run([cc, "-fsyntax-only", "-I", str(header.parent), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_structures_have_the_sizes_of_a_c_compiler(stub: Stub) -> None:
    for name, structure in STRUCTURES.items():
        assert ctypes.sizeof(structure) == stub.sizeof(name), name
    assert ctypes.sizeof(STRUCTURES["CUmemcpyAttributes"]) == 24


def test_nothing_can_make_a_stream_wait_or_call_python_back() -> None:
    """What is not in the table is never called; no other file speaks to the driver."""
    forbidden = re.compile(r"cu(da)?(Stream(Wait|AddCallback|BatchMemOp)|LaunchHost|StreamCreateWithPriority)\w*")
    names = [*table.TABLE, *(name for name, _ in table.BY_VERSION)]
    assert not [name for name in names if forbidden.match(name)]
    sources = [path for room in ("service", "gpu_worker") for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 50
    for path in sources:
        assert not forbidden.search(path.read_text()), path
        if path.parent.name != "cuda":
            assert "libcuda" not in path.read_text().replace("libcuda.so.1, or ConfigError", ""), path


def test_a_worker_starts_no_process() -> None:
    """A context does not survive a fork: a child that touched it would take the parent's copies with it."""
    starts = re.compile(r"\b(subprocess|multiprocessing|os\.(fork|forkpty|posix_spawn|system|popen)|pty)\b")
    for room in ("gpu_worker", "service/cuda", "service/net", "proto"):
        for path in (ROOT / room).rglob("*.py"):
            assert not starts.search(path.read_text()), path


def test_every_call_by_name_is_in_the_table() -> None:
    """A name misspelt in driver.py would be found at the first call, on a GPU machine."""
    names = {*table.TABLE, *(name for name, _ in table.BY_VERSION)}
    used = set()
    for path in (ROOT / "service/cuda").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"cu[A-Z]\w+", node.value)
            ):
                used.add(node.value)
    assert used == names


# ---- a driver that is missing, old or dead ---------------------------------------------------------


def test_the_device_is_imported_without_a_driver_and_without_torch() -> None:
    """Its absence is found when it is opened, and said in one error with the fix."""
    code = (
        "import sys, kvferry.gpu_worker.devices.cuda, kvferry.gpu_worker.check\n"
        "from kvferry.gpu_worker.devices import open_device\n"
        "print('libcuda' in open('/proc/self/maps').read(), 'torch' in sys.modules)\n"
        "try:\n    open_device('cuda')\n"
        "except Exception as error:\n    print(type(error).__name__, error.code, bool(error.fix))"
    )
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    said = done.stdout.splitlines()
    assert said[0] == "False False"
    if not said[1:] or not said[1].startswith("ConfigError device.no_driver"):
        pytest.skip(f"this machine has a CUDA driver: {said[1:]}")
    assert said[1] == "ConfigError device.no_driver True"


def test_a_library_that_is_none_or_too_old_is_named(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    with pytest.raises(ConfigError) as caught:
        Driver.load(str(tmp_path / "libcuda.so.1"))
    assert caught.value.code == "device.no_driver"
    with pytest.raises(ConfigError) as caught:
        Driver.load("libc.so.6")
    assert caught.value.code == "device.old_driver" and "cuInit" in caught.value.text


def test_a_driver_that_does_not_start_says_its_own_words(stub: Stub) -> None:
    stub.control("cuInit fail 100")
    with pytest.raises(ConfigError) as caught:
        Driver.load(stub.path)
    assert caught.value.code == "device.no_gpu"
    assert "CUDA_ERROR_NO_DEVICE (100)" in caught.value.text and "nvidia-smi" in caught.value.fix


def test_the_batch_call_is_asked_for_by_version_and_is_never_the_one_of_13(stub: Stub) -> None:
    """cuda.h of 13.0 gives the plain name eight arguments; whoever passes nine crashes in it."""
    assert Driver.load(stub.path).has_batch
    assert [line for line in stub.calls() if "GetProcAddress" in line] == [
        "main cuGetProcAddress_v2 cuMemcpyBatchAsync 12080"
    ]
    stub.control("driver 12070")
    assert not Driver.load(stub.path).has_batch


def test_an_error_has_the_call_the_name_and_the_words_and_says_whether_it_lasts(stub: Stub) -> None:
    driver = Driver.load(stub.path)
    for result, name, is_sticky in ((2, "CUDA_ERROR_OUT_OF_MEMORY", False), (700, "CUDA_ERROR_ILLEGAL_ADDRESS", True)):
        stub.control(f"cuDeviceGetCount fail {result}")
        with pytest.raises(CudaError) as caught:
            driver.device_count()
        error = caught.value
        assert (error.call, error.result, error.name, error.is_sticky) == ("cuDeviceGetCount", result, name, is_sticky)
        assert f"cuDeviceGetCount failed: {name} ({result}): as the stub was told" in str(error)
    stub.control()
    assert driver.device_count() == 1  # nothing of it is left pending


def test_a_gpu_is_known_by_its_uuid_however_it_is_written(stub: Stub) -> None:
    driver = Driver.load(stub.path)
    assert driver.device_uuid(0) == UUIDS[0]
    bare = UUIDS[0].removeprefix("GPU-")
    assert same_gpu(UUIDS[0], bare) and same_gpu(UUIDS[0], f"MIG-{bare}") and same_gpu(UUIDS[0].upper(), bare)
    assert not same_gpu(UUIDS[0], UUIDS[1]) and not same_gpu(UUIDS[0], "")


def test_a_bool_of_one_byte_is_read_as_it_is(driver: Driver) -> None:
    """The driver writes as many bytes as the attribute has, into eight that were zero."""
    address = driver.allocate(4096)
    assert driver.pointer_attribute(PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE, address + 100) == 1
    assert driver.pointer_attribute(PointerAttribute.ALLOWED_HANDLE_TYPES, address) == 0
    assert driver.address_range(address + 100) == (address, 4096)
    driver.free(address)


def test_who_waits_in_the_driver_leaves_the_interpreter_to_others(stub: Stub, driver: Driver) -> None:
    """A waiter sleeps 0.3 s in cuEventSynchronize; the loop counts on meanwhile."""
    context = driver.current_context()
    stream = driver.stream_create()
    event = driver.event_create(EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)
    stub.control("cuEventSynchronize delay 300")
    driver.event_record(event, stream)
    results = []

    def wait() -> None:
        driver.use(context)
        results.append(driver.event_wait(event))

    waiter = threading.Thread(target=wait)
    waiter.start()
    ticks = 0
    while waiter.is_alive():
        ticks += 1
    assert results == [0] and ticks > 1000
    driver.event_destroy(event)
    driver.stream_destroy(stream)


def test_the_stub_is_built_with_no_warning() -> None:
    folder = build()
    cc = compiler()
    assert cc is not None and folder.is_dir()
    sources = [str(path) for path in sorted((Path(__file__).parent / "stub").glob("*.c"))]
    done = subprocess.run(
        [cc, "-fsyntax-only", "-Wall", "-Wextra", "-pthread", *sources], capture_output=True, text=True
    )
    assert not done.stderr
