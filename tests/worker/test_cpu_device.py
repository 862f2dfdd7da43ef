"""What the CPU device does beyond the contract: priorities, and the knobs that other tests turn."""

import select

import numpy as np
import pytest

from kvferry.gpu_worker.devices import open_device
from kvferry.gpu_worker.devices.cpu import CpuDevice, Knobs
from kvferry.proto.errors import ConfigError
from kvferry.proto.outcome import Kind
from tests.contracts.conftest import address, plan_of


def test_a_load_overtakes_the_stores_that_wait_for_a_thread(lab):
    """Case 119, in the device: a load waits for chunks that run and not for plans that wait."""
    engine = lab.engine(16 << 20)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(16 << 20)
    lab.stall()
    for token in range(2):
        lab.device.submit(Kind.STORE, plan_of(mapping.base, address(pool), 16 << 20), token)
    lab.device.submit(Kind.LOAD, plan_of(address(pool), mapping.base, 64), 9)
    lab.go()
    assert [done.token for done in lab.completions(3)] == [9, 0, 1]


def test_copies_fail_from_the_asked_one_on_and_touch_nothing(lab):
    engine = lab.engine(4096)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(4096)
    lab.knobs.fail_after = 1
    for token, dst in enumerate((0, 2048)):
        lab.device.submit(Kind.STORE, plan_of(mapping.base, address(pool) + dst, 2048), token)
    assert [done.ok for done in lab.completions(2)] == [True, False]
    assert np.array_equal(pool[:2048], engine.view[:2048]) and not pool[2048:].any()


def test_a_slow_device_takes_as_long_as_its_bandwidth_says(lab):
    engine = lab.engine(1 << 20)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(1 << 20)
    lab.knobs.bytes_per_s = 100 << 20
    lab.device.submit(Kind.STORE, plan_of(mapping.base, address(pool), 1 << 20), 1)
    (done,) = lab.completions(1)
    assert done.done_ns - done.submitted_ns >= 10_000_000


def test_closing_a_stalled_device_does_not_wait_for_ever():
    knobs = Knobs()
    knobs.going.clear()
    device = CpuDevice(knobs)
    host = np.zeros(4096, dtype=np.uint8)
    device.register_host(address(host), 4096)
    device.submit(Kind.STORE, plan_of(address(host), address(host) + 2048, 64), 1)
    device.close()


def test_devices_are_opened_by_name_and_unknown_ones_refused_with_the_fix():
    device = open_device("cpu")
    assert device.caps.kind == "cpu" and not select.select([device.fileno()], [], [], 0)[0]
    device.close()
    with pytest.raises(ConfigError) as caught:
        open_device("tpu")
    assert "tpu" in caught.value.text and "cpu" in caught.value.fix
