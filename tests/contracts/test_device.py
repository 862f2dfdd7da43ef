"""What every device does, whatever it copies with. `lab` says which one is on the bench."""

import json
import os
import select
import threading

import numpy as np
import pytest

from kvferry.gpu_worker.devices.base import (
    MAX_DESCRIPTORS,
    MAX_IN_FLIGHT,
    MAX_PLAN_BYTES,
    CopyPlan,
    HandleError,
    PlanError,
    WouldBlock,
)
from kvferry.gpu_worker.layout import Planner
from kvferry.gpu_worker.pool import PoolHeaders
from kvferry.proto.layout import Layout
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind
from tests.contracts.conftest import PATIENCE_S, address, plan_of
from tests.worker.layouts import RECORDED

STORE, LOAD = Kind.STORE, Kind.LOAD


# ---- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_offset", [0, 64, 4096, 5000])
def test_a_mapping_shows_the_engines_bytes_from_its_byte_0(lab, base_offset):
    engine = lab.engine(10_000, base_offset)
    mapping = lab.device.attach(engine.handle, engine.fd)
    assert mapping.nbytes == 10_000
    assert lab.device.read(mapping, 123, 50) == engine.view[123:173].tobytes()
    engine.view[123] ^= 0xFF
    assert lab.device.read(mapping, 123, 1) == engine.view[123:124].tobytes()


def test_two_handles_of_one_object_are_two_mappings(lab):
    engine = lab.engine(8192)
    mappings = [lab.device.attach(engine.part(at, 4096), engine.fd) for at in (0, 4096)]
    for mapping, at in zip(mappings, (0, 4096), strict=True):
        assert lab.device.read(mapping, 0, 8) == engine.view[at : at + 8].tobytes()
    lab.device.detach(mappings[0])
    assert lab.device.read(mappings[1], 0, 8) == engine.view[4096:4104].tobytes()


def test_one_handle_attached_twice_is_there_until_it_is_detached_twice(lab):
    engine = lab.engine(4096)
    first, second = (lab.device.attach(engine.handle, engine.fd) for _ in range(2))
    lab.device.detach(first)
    assert lab.device.read(second, 0, 4096) == engine.view.tobytes()


def test_the_descriptor_stays_the_callers(lab):
    engine = lab.engine(4096)
    if engine.fd is None:
        pytest.skip("this kind of handle has no descriptor")
    fd = os.dup(engine.fd)
    mapping = lab.device.attach(engine.handle, fd)
    os.close(fd)
    assert lab.device.read(mapping, 0, 4096) == engine.view.tobytes()


def test_memory_that_is_shorter_than_its_handle_says_is_refused(lab):
    engine = lab.engine(4096)
    beyond = engine.object_bytes - engine.handle.base_offset
    for handle in (engine.part(0, beyond + 1), engine.part(1, beyond), engine.part(beyond, 1)):
        with pytest.raises(HandleError) as caught:
            lab.device.attach(handle, engine.fd)
        assert caught.value.code == "handle.stale"
        assert caught.value.fix


def test_a_handle_without_its_descriptor_or_with_another_is_refused(lab):
    engine = lab.engine(4096)
    if engine.fd is None:
        pytest.skip("this kind of handle has no descriptor")
    with select.epoll() as other:
        for fd in (None, other.fileno()):
            with pytest.raises(HandleError) as caught:
                lab.device.attach(engine.handle, fd)
            assert caught.value.code == "handle.stale"


def test_memory_of_another_kind_than_the_devices_is_refused(lab):
    engine = lab.engine(4096)
    for kind in {"shm_fd", "cuda_ipc", "cuda_vmm_fd"} - set(lab.device.caps.handle_kinds):
        with pytest.raises(HandleError) as caught:
            lab.device.attach(engine.handle.model_copy(update={"kind": kind}), engine.fd)
        assert caught.value.code == "handle.kind"


def test_detach_and_unregister_may_be_repeated(lab):
    engine = lab.engine(4096)
    mapping = lab.device.attach(engine.handle, engine.fd)
    host = np.zeros(4096, dtype=np.uint8)
    region = lab.device.register_host(address(host), 4096)
    for _ in range(2):
        lab.device.detach(mapping)
        lab.device.unregister_host(region)
    with pytest.raises(PlanError):
        lab.device.submit(STORE, plan_of(mapping.base, address(host), 8), 1)


# ---- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", RECORDED, ids=lambda layout: layout.name)
def test_blocks_stored_wiped_and_loaded_are_the_same_and_nothing_else_moved(lab, layout):
    group = layout.group()
    engine = lab.engine(layout.nbytes)
    Layout(handles=(engine.handle,), groups=(group,)).check()
    mapping = lab.device.attach(engine.handle, engine.fd)
    num_slots = 11
    pool = lab.host(PAGE_BYTES + num_slots * group.slot_bytes)
    planner = Planner(group, [mapping.base], address(pool) + PAGE_BYTES, group.slot_bytes, num_slots)
    random = np.random.default_rng(7)
    blocks = random.permutation(layout.sizes[1])[:5].astype(np.uint32)
    slots = random.permutation(num_slots)[:5].astype(np.uint32)
    before = engine.view.copy()

    lab.run(STORE, planner.plan(blocks, slots, STORE))
    payload = group.payload_bytes
    headers = PoolHeaders(pool, group.slot_bytes, num_slots)
    headers.open(slots, np.ones(5, dtype=np.uint64))
    headers.close(slots, np.ones(5, dtype=np.uint64))
    assert not len(headers.torn(slots, np.ones(5, dtype=np.uint64)))
    for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
        start = PAGE_BYTES + slot * group.slot_bytes + PAGE_BYTES
        assert np.array_equal(pool[start : start + payload], before[layout.block_bytes(block)])
    untouched = np.setdiff1d(np.arange(num_slots), slots)
    for slot in untouched.tolist():
        start = PAGE_BYTES + slot * group.slot_bytes
        assert not pool[start : start + group.slot_bytes].any()

    wiped = np.concatenate([layout.block_bytes(block) for block in blocks.tolist()])
    engine.view[wiped] = 0
    assert not np.array_equal(engine.view, before)
    lab.run(LOAD, planner.plan(blocks, slots, LOAD))
    assert np.array_equal(engine.view, before)


def test_a_copy_may_span_two_mappings(lab):
    """Equal steps from one mapping into the next: each row still goes where it belongs."""
    engines = [lab.engine(8192) for _ in range(2)]
    mappings = [lab.device.attach(engine.handle, engine.fd) for engine in engines]
    pool = lab.host(4096)
    step = abs(mappings[1].base - mappings[0].base)
    low, high = sorted(range(2), key=lambda i: mappings[i].base)
    base = mappings[low].base
    lab.run(STORE, [plan_of([base, base + step], [address(pool), address(pool) + 100], [100, 100])])
    assert np.array_equal(pool[:100], engines[low].view[:100])
    assert np.array_equal(pool[100:200], engines[high].view[:100])


def test_plans_end_in_the_order_of_their_submission_within_a_direction(lab):
    engine = lab.engine(4 << 20)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(4 << 20)
    for round_ in range(20):
        sizes = [(3 << 20), 64]  # the second would be over first
        for token, size in enumerate(sizes):
            lab.device.submit(STORE, plan_of(mapping.base, address(pool), size), 2 * round_ + token)
        done = lab.completions(2)
        assert [d.token for d in done] == [2 * round_, 2 * round_ + 1]
        assert [d.nbytes for d in done] == sizes
        assert all(d.ok and not d.error and d.submitted_ns <= d.done_ns for d in done)


def test_room_is_two_plans_a_direction_and_more_is_refused_unchanged(lab):
    engine = lab.engine(4096)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(4096)
    lab.stall()
    for token in range(MAX_IN_FLIGHT):
        assert lab.device.room(STORE) == MAX_IN_FLIGHT - token
        lab.device.submit(STORE, plan_of(mapping.base, address(pool), 64), token)
    assert lab.device.room(STORE) == 0
    assert lab.device.room(LOAD) == MAX_IN_FLIGHT
    with pytest.raises(WouldBlock):
        lab.device.submit(STORE, plan_of(mapping.base, address(pool), 64), 9)
    lab.go()
    assert [d.token for d in lab.completions(2)] == [0, 1]
    assert lab.device.room(STORE) == MAX_IN_FLIGHT


def test_the_descriptor_is_readable_exactly_while_something_has_ended(lab):
    engine = lab.engine(4096)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(4096)
    assert lab.device.completions() == []
    assert not select.select([lab.device.fileno()], [], [], 0)[0]
    lab.stall()
    lab.device.submit(STORE, plan_of(mapping.base, address(pool), 64), 1)
    assert not select.select([lab.device.fileno()], [], [], 0)[0]
    lab.go()
    assert select.select([lab.device.fileno()], [], [], PATIENCE_S)[0]
    assert len(lab.device.completions()) == 1
    assert not select.select([lab.device.fileno()], [], [], 0)[0]


def test_drain_tells_whether_anything_is_in_flight(lab):
    engine = lab.engine(4096)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(4096)
    assert lab.device.drain(0)
    lab.stall()
    lab.device.submit(LOAD, plan_of(address(pool), mapping.base, 64), 1)
    assert not lab.device.drain(0.01)
    lab.go()
    assert lab.device.drain(PATIENCE_S)
    assert not engine.view[:64].any()


def test_a_plan_that_breaks_a_limit_is_a_bug_and_nothing_of_it_is_copied(lab):
    engine = lab.engine(1 << 20)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(1 << 20)
    src, dst = mapping.base, address(pool)
    too_many = np.arange(MAX_DESCRIPTORS + 1, dtype=np.uint64) * np.uint64(8)
    bad = [
        plan_of([], [], []),
        plan_of([src, src], [dst], [8]),
        plan_of([src, src + 8], [dst, dst + 8], [8, 0]),
        plan_of(too_many + np.uint64(src), too_many + np.uint64(dst), np.full(len(too_many), 8)),
        plan_of([src, src], [dst, dst], [MAX_PLAN_BYTES, 1]),
        plan_of(src, dst, (1 << 20) + 1),
        plan_of(src - 1, dst, 8),
        plan_of(src, 4096, 8),
        plan_of(src, dst + (1 << 20) - 4, 8),
        CopyPlan(*(np.repeat(np.array([a], dtype=np.uint64), 4)[::2] for a in (src, dst, 8))),
        CopyPlan(*(np.array([a], dtype=np.int64) for a in (src, dst, 8))),
    ]
    for plan in bad:
        with pytest.raises(PlanError):
            lab.device.submit(STORE, plan, 1)
    assert lab.device.room(STORE) == MAX_IN_FLIGHT and lab.device.drain(0)
    assert not pool.any()


def test_the_plan_lives_until_it_is_done_though_the_caller_drops_it(lab):
    engine = lab.engine(4096)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(4096)
    lab.stall()
    lab.device.submit(STORE, plan_of(mapping.base, address(pool), 4096), 1)
    lab.go()
    lab.completions(1)
    assert np.array_equal(pool, engine.view)


def test_a_long_copy_leaves_the_interpreter_to_others(lab):
    """The loop must hear cancels while 32 MiB move."""
    engine = lab.engine(32 << 20)
    mapping = lab.device.attach(engine.handle, engine.fd)
    pool = lab.host(32 << 20)
    ticks, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        started = ticks[0]
        lab.run(STORE, [plan_of(mapping.base, address(pool), 32 << 20)] * 4)
        assert ticks[0] - started > 100
    finally:
        stop.set()
        counter.join()


def test_close_may_be_repeated(lab):
    lab.device.close()
    lab.device.close()


def test_it_says_what_it_is_in_plain_words(lab):
    lab.host(1 << 20)
    told = lab.device.describe()
    assert told["kind"] == lab.device.caps.kind
    assert json.loads(json.dumps(told)) == told
