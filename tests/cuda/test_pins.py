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
def base() -> Iterator[int]:
    """The address of a small pool, five chunks long."""
    memory = np.frombuffer(mmap.mmap(-1, NBYTES), dtype=np.uint8)
    yield memory.ctypes.data


@pytest.fixture
def pins(driver: Driver) -> Pins:
    return Pins(driver, same_address=True, chunk_bytes=CHUNK)


def names(stub: Stub) -> list[str]:
    """Registrations in order: +1 made as the first, -1 undone."""
    found = []
    for line in stub.calls():
        if "cuMemHostRegister_v2" in line and "pin" in line:
            found.append("+" + line.rpartition("pin")[2])
        if "cuMemHostUnregister" in line:
            found.append("-" + line.rpartition("pin")[2])
    return found


def test_a_pool_is_registered_in_chunks_and_released_in_reverse(stub: Stub, pins: Pins, base: int) -> None:
    region = pins.pin(base, NBYTES)
    assert (region, pins.nbytes, pins.num_chunks) == (HostRegion(base, NBYTES), NBYTES, 5)
    assert [s.nbytes for s in pins.stretches()] == [CHUNK] * 4 + [CHUNK - 4096]
    assert pins.pin(base, NBYTES) == region  # once more is the same
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
    stub: Stub, pins: Pins, base: int, failing: int
) -> None:
    """Case 91, decided otherwise: a pool is pinned whole or refused with numbers, as nothing is half fast.

    The error is taken where it was made; no later call meets it.
    """
    stub.control(f"cuMemHostRegister_v2 fail 2 after {failing} times 1")
    with pytest.raises(CapacityError) as caught:
        pins.pin(base, NBYTES)
    error = caught.value
    assert error.code == "device.pin" and "--host-memory" in error.fix and "ulimit -l" in error.fix
    assert f"{NBYTES} bytes" in error.text and f"chunk {failing + 1} of 5" in error.text
    assert stub.leaks().count("pin") == 0 and pins.nbytes == 0 and pins.stretches() == []
    made = names(stub)
    assert made[failing:] == [name.replace("+", "-") for name in reversed(made[:failing])]
    region = pins.pin(base, NBYTES)
    pins.unpin(region)


def test_where_pinning_is_only_wanted_memory_is_used_as_it_is_with_one_warning(
    stub: Stub, pins: Pins, base: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 93: confidential mode, or a low limit. Nothing stays half pinned; copies are cut where chunks meet."""
    pins.is_required = False
    stub.control("cuMemHostRegister_v2 fail 800 after 2")
    region = pins.pin(base, NBYTES)
    assert [s.start for s in pins.stretches()] == [base + number * CHUNK for number in range(5)]
    assert sum(s.nbytes for s in pins.stretches()) == NBYTES and not any(s.shift for s in pins.stretches())
    assert (pins.nbytes, pins.num_chunks) == (0, 0) and "CUDA_ERROR_NOT_PERMITTED" in pins.refusal
    assert len(caplog.records) == 1 and "--pin wanted" in caplog.text
    pins.unpin(region)
    assert pins.stretches() == []


def test_what_is_called_between_chunks_can_end_it_and_nothing_is_left(stub: Stub, pins: Pins, base: int) -> None:
    """The supervisor's stop, while 100 GiB are pinned."""
    calls = []

    def between() -> None:
        calls.append(stub.leaks().count("pin"))
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pins.pin(base, NBYTES, between)
    assert calls == [1, 2, 3] and pins.nbytes == 0


def test_memory_that_is_registered_already_is_refused_as_the_driver_says(pins: Pins, base: int) -> None:
    others = Pins(pins.driver, same_address=True, chunk_bytes=CHUNK)
    pins.pin(base, NBYTES)
    with pytest.raises(CapacityError, match="ALREADY_REGISTERED"):
        others.pin(base, NBYTES)
    assert pins.num_chunks == 5
    pins.close()


def test_a_sticky_error_is_the_end_of_the_device(stub: Stub, pins: Pins, base: int) -> None:
    stub.control("cuMemHostRegister_v2 fail 999 after 1")
    with pytest.raises(DeviceLost):
        pins.pin(base, NBYTES)


def test_a_gpu_with_addresses_of_its_own_is_asked_for_them(stub: Stub, pins: Pins, base: int) -> None:
    """Attribute 91: not every GPU takes the host's addresses of registered memory."""
    stub.control("attr 91 0")
    pins.same_address = False
    pins.pin(base, NBYTES)
    assert {s.shift for s in pins.stretches()} == {-(1 << 46)}
    pins.close()
    stub.control("attr 91 0", "cuMemHostGetDevicePointer_v2 fail 1 after 2")
    with pytest.raises(CapacityError):
        pins.pin(base, NBYTES)


def test_a_chunk_that_cannot_be_released_is_told_and_the_rest_is(
    stub: Stub, pins: Pins, base: int, caplog: pytest.LogCaptureFixture
) -> None:
    pins.pin(base, NBYTES)
    stub.control("cuMemHostUnregister fail 1 after 2 times 1")
    pins.close()
    assert stub.leaks().count("pin") == 1 and "until this process ends" in caplog.text
    stub.control()
    pins.driver.host_unregister(base + 2 * CHUNK)
