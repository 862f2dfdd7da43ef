"""Registration of the pool: in chunks, whole or not at all, undone in reverse."""

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.cuda.driver import Driver
from kvferry.gpu_worker.devices.base import CapacityError, DeviceLost, HostRegion
from kvferry.gpu_worker.devices.cuda_pins import CHUNK_BYTES, Pins
from tests.cuda.stubs import Stub

CHUNK = 64 << 10
NBYTES = 5 * CHUNK - 4096


@pytest.fixture
def driver(stub: Stub) -> Iterator[Driver]:
    made = Driver.load(stub.path)
    made.use(made.retain_context(0))
    yield made
    stub.control()
    made.use(0)
    made.release_context(0)


@pytest.fixture
def memory() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, NBYTES), dtype=np.uint8)


def names(stub: Stub) -> list[str]:
    """Registrations in order: +1 made as the first, -1 undone."""
    found = []
    for line in stub.calls():
        if "cuMemHostRegister_v2" in line and "pin" in line:
            found.append("+" + line.rpartition("pin")[2])
        if "cuMemHostUnregister" in line:
            found.append("-" + line.rpartition("pin")[2])
    return found


def test_a_pool_is_registered_in_chunks_and_released_in_reverse(stub: Stub, driver: Driver, memory: np.ndarray) -> None:
    pins = Pins(driver, same_address=True, chunk_bytes=CHUNK)
    region = pins.pin(memory.ctypes.data, NBYTES)
    assert (region, pins.nbytes, pins.num_chunks) == (HostRegion(memory.ctypes.data, NBYTES), NBYTES, 5)
    assert [s.nbytes for s in pins.stretches()] == [CHUNK] * 4 + [CHUNK - 4096]
    assert pins.pin(memory.ctypes.data, NBYTES) == region  # once more is the same
    for _ in range(2):
        pins.unpin(region)
    first = int(names(stub)[0])
    up = [f"+{first + i}" for i in range(5)]
    assert names(stub) == [*up, *(name.replace("+", "-") for name in reversed(up))]
    assert pins.nbytes == 0 and pins.seconds > 0


def test_no_call_registers_more_than_a_gibibyte() -> None:
    """Case 91: calls of half a terabyte fail; case 92: long ones hold up every GPU process of the machine."""
    assert CHUNK_BYTES == 1 << 30


@pytest.mark.parametrize("failing", range(5))
def test_a_registration_that_fails_midway_leaves_nothing_registered_and_later_calls_clean(
    stub: Stub, driver: Driver, memory: np.ndarray, failing: int
) -> None:
    """Case 91, decided otherwise: a pool is pinned whole or refused with numbers, as nothing is half fast.

    The error is taken where it was made; no later call meets it.
    """
    pins = Pins(driver, same_address=True, chunk_bytes=CHUNK)
    stub.control(f"cuMemHostRegister_v2 fail 2 after {failing} times 1")
    with pytest.raises(CapacityError) as caught:
        pins.pin(memory.ctypes.data, NBYTES)
    error = caught.value
    assert error.code == "device.pin" and "--host-memory" in error.fix and "ulimit -l" in error.fix
    assert f"{NBYTES} bytes" in error.text and f"chunk {failing + 1} of 5" in error.text
    assert stub.leaks().count("pin") == 0 and pins.nbytes == 0 and pins.stretches() == []
    made = names(stub)
    assert made[failing:] == [name.replace("+", "-") for name in reversed(made[:failing])]
    region = pins.pin(memory.ctypes.data, NBYTES)
    pins.unpin(region)


def test_where_pinning_is_only_wanted_memory_is_used_as_it_is_with_one_warning(
    stub: Stub, driver: Driver, memory: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 93: confidential mode, or a low limit. Nothing stays half pinned."""
    pins = Pins(driver, same_address=True, chunk_bytes=CHUNK, is_required=False)
    stub.control("cuMemHostRegister_v2 fail 800 after 2")
    region = pins.pin(memory.ctypes.data, NBYTES)
    assert pins.stretches() == [(memory.ctypes.data, NBYTES, 0)]
    assert (pins.nbytes, pins.num_chunks) == (0, 0) and "CUDA_ERROR_NOT_PERMITTED" in pins.refusal
    assert len(caplog.records) == 1 and "--pin wanted" in caplog.text
    pins.unpin(region)
    assert pins.stretches() == []


def test_what_is_called_between_chunks_can_end_it_and_nothing_is_left(
    stub: Stub, driver: Driver, memory: np.ndarray
) -> None:
    """The supervisor's stop, while 100 GiB are pinned."""
    pins = Pins(driver, same_address=True, chunk_bytes=CHUNK)
    calls = []

    def between() -> None:
        calls.append(stub.leaks().count("pin"))
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pins.pin(memory.ctypes.data, NBYTES, between)
    assert calls == [1, 2, 3] and pins.nbytes == 0


def test_memory_that_is_registered_already_is_refused_as_the_driver_says(driver: Driver, memory: np.ndarray) -> None:
    pins, others = (Pins(driver, same_address=True, chunk_bytes=CHUNK) for _ in range(2))
    pins.pin(memory.ctypes.data, NBYTES)
    with pytest.raises(CapacityError, match="ALREADY_REGISTERED"):
        others.pin(memory.ctypes.data, NBYTES)
    assert pins.num_chunks == 5
    pins.close()


def test_a_sticky_error_is_the_end_of_the_device(stub: Stub, driver: Driver, memory: np.ndarray) -> None:
    stub.control("cuMemHostRegister_v2 fail 999 after 1")
    with pytest.raises(DeviceLost):
        Pins(driver, same_address=True, chunk_bytes=CHUNK).pin(memory.ctypes.data, NBYTES)


def test_a_gpu_with_addresses_of_its_own_is_asked_for_them(stub: Stub, driver: Driver, memory: np.ndarray) -> None:
    """Attribute 91: not every GPU takes the host's addresses of registered memory."""
    stub.control("attr 91 0")
    pins = Pins(driver, same_address=False, chunk_bytes=CHUNK)
    pins.pin(memory.ctypes.data, NBYTES)
    assert {s.shift for s in pins.stretches()} == {-(1 << 46)}
    pins.close()
    stub.control("attr 91 0", "cuMemHostGetDevicePointer_v2 fail 1 after 2")
    with pytest.raises(CapacityError):
        pins.pin(memory.ctypes.data, NBYTES)


def test_a_chunk_that_cannot_be_released_is_told_and_the_rest_is(
    stub: Stub, driver: Driver, memory: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    pins = Pins(driver, same_address=True, chunk_bytes=CHUNK)
    pins.pin(memory.ctypes.data, NBYTES)
    stub.control("cuMemHostUnregister fail 1 after 2 times 1")
    pins.close()
    assert stub.leaks().count("pin") == 1 and "until this process ends" in caplog.text
    stub.control()
    driver.host_unregister(memory.ctypes.data + 2 * CHUNK)
