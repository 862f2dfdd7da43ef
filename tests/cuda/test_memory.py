"""Another process's GPU memory: what is opened, what is refused and by which name, what is left."""

import os

import pytest

from kvferry.cuda.driver import Driver, pid_namespace
from kvferry.gpu_worker.devices.base import DeviceLost, HandleError
from kvferry.gpu_worker.devices.cuda_memory import Imports
from tests.cuda.exporter import Exported, Exporter
from tests.cuda.stubs import UUIDS, Stub

LEAD = 3 << 20  # the engine's memory begins behind other tensors of its allocation


@pytest.fixture
def imports(driver: Driver) -> Imports:
    return Imports(driver, 0, UUIDS[0])


def refused(imports: Imports, shown: Exported, **changes: object) -> HandleError:
    """The refusal of a handle with these changes."""
    with pytest.raises(HandleError) as caught:
        imports.attach(shown.handle.model_copy(update=changes), shown.fd if shown.fd >= 0 else None)
    assert caught.value.text
    return caught.value


# ---- refused before the driver is asked ------------------------------------------------------------


def test_memory_of_another_gpu_is_refused_with_both_uuids(stub: Stub, imports: Imports, exporter: Exporter) -> None:
    """Case 98: other visible devices in the other container. Numbers may agree; UUIDs do not."""
    error = refused(imports, exporter.export("cuda_ipc", 4096), device=UUIDS[1])
    assert error.code == "handle.other_gpu"
    assert UUIDS[0] in error.text and UUIDS[1] in error.text and "--devices" in error.fix
    assert refused(imports, exporter.export("cuda_ipc", 4096), device="").code == "handle.other_gpu"
    assert not [line for line in stub.calls() if "Ipc" in line]


@pytest.mark.parametrize("namespace", ["another", "this worker's own"])
def test_an_engine_with_our_pid_number_is_refused_before_the_driver_takes_it_for_us(
    stub: Stub, imports: Imports, exporter: Exporter, namespace: str
) -> None:
    """Case 98: two pid namespaces count alike, and the driver knows numbers only. A forged message is one more."""
    pid_ns = pid_namespace() + (namespace == "another")
    error = refused(imports, exporter.export("cuda_ipc", 4096), pid=os.getpid(), pid_ns=pid_ns)
    assert error.code == "handle.same_pid" and namespace in error.text and "pid namespace" in error.fix
    assert not [line for line in stub.calls() if "Ipc" in line]


def test_a_descriptor_needs_no_pid(imports: Imports, exporter: Exporter) -> None:
    shown = exporter.export("cuda_vmm_fd", 4096)
    mapping = imports.attach(shown.handle.model_copy(update={"pid": os.getpid()}), shown.fd)
    imports.detach(mapping)


def test_a_handle_that_is_none_is_refused(imports: Imports, exporter: Exporter) -> None:
    shown = exporter.export("cuda_ipc", 4096)
    assert refused(imports, shown, blob=b"").code == "handle.stale"
    assert refused(imports, shown, blob=bytes(63)).code == "handle.stale"
    assert refused(imports, shown, blob=bytes(64)).code == "handle.stale"  # the driver's own no
    assert refused(imports, shown, kind="shm_fd").code == "handle.kind"


# ---- opened ----------------------------------------------------------------------------------------


def test_one_allocation_is_opened_once_however_many_handles_lie_in_it(
    stub: Stub, imports: Imports, exporter: Exporter
) -> None:
    shown = exporter.export("cuda_ipc", 8192, LEAD)
    half = {"nbytes": 4096}
    first = imports.attach(shown.handle.model_copy(update=half), None)
    second = imports.attach(shown.handle.model_copy(update={**half, "base_offset": LEAD + 4096}), None)
    assert second.base - first.base == 4096
    imports.detach(first)
    assert not [line for line in stub.calls() if "Close" in line]
    imports.detach(second)
    opened = [line for line in stub.calls() if "Ipc" in line]
    assert [line.split()[1] for line in opened] == ["cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"]


def test_only_what_was_shown_of_an_allocation_may_be_copied(imports: Imports, exporter: Exporter) -> None:
    """Beside the KV cache lie the engine's other tensors."""
    shown = exporter.export("cuda_ipc", 8192, LEAD)
    mapping = imports.attach(shown.handle, None)
    assert [(s.start, s.nbytes) for s in imports.stretches()] == [(mapping.base, 8192)]
    imports.close()
    assert imports.stretches() == []


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_vmm_fd"])
def test_bytes_past_the_allocation_are_refused_and_nothing_stays_open(
    imports: Imports, exporter: Exporter, kind: str
) -> None:
    """Interior offsets: what counts is the real allocation, not the exporter's word."""
    shown = exporter.export(kind, 8192, LEAD)
    room = shown.size - LEAD
    imports.detach(imports.attach(shown.handle.model_copy(update={"nbytes": room}), shown.fd))
    error = refused(imports, shown, nbytes=room + 1)
    assert error.code == "handle.stale" and error.fix
    if kind == "cuda_ipc":
        assert str(LEAD + room + 1) in error.text and str(LEAD + room) in error.text


def test_a_driver_that_does_not_say_the_size_of_foreign_memory_is_taken_at_the_engines_word(
    stub: Stub, driver: Driver, imports: Imports, exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    stub.control("cuMemGetAddressRange_v2 fail 500")
    imports.detach(imports.attach(exporter.export("cuda_ipc", 8192, LEAD).handle, None))
    assert "its own word is taken" in caplog.text


def test_memory_of_a_killed_engine_stays_until_it_is_let_go_and_is_opened_no_more(stub: Stub, imports: Imports) -> None:
    """The kernel keeps what we map: copies under way have valid memory. A new opening finds nobody."""
    engine = Exporter(stub.path)
    shown = engine.export("cuda_ipc", 8192)
    shown.view[:] = 7
    mapping = imports.attach(shown.handle, None)
    other = engine.export("cuda_ipc", 8192)
    engine.close()
    assert imports.stretches()[0].start == mapping.base
    error = refused(imports, other)
    assert error.code == "handle.stale" and "has just ended" in error.fix
    imports.close()


# ---- the driver's noes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result, code, words",
    [
        (1, "handle.stale", "freed"),
        (400, "handle.stale", "freed"),
        (201, "handle.refused", "pid namespace"),
        (205, "handle.refused", "DRA"),
        (304, "handle.refused", "gVisor"),
        (801, "handle.refused", "whole device"),
    ],
)
def test_each_refusal_of_the_driver_names_the_setting_that_causes_it(
    stub: Stub, imports: Imports, exporter: Exporter, result: int, code: str, words: str
) -> None:
    """Case 98: the import fails, and the reason is found where it is, not deep inside a registration."""
    stub.control(f"cuIpcOpenMemHandle_v2 fail {result}")
    error = refused(imports, exporter.export("cuda_ipc", 4096))
    assert error.code == code and words in error.fix and f"({result})" in error.text


@pytest.mark.parametrize(
    "call",
    ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"],
)
def test_a_mapping_that_fails_at_any_step_is_undone(
    stub: Stub, imports: Imports, exporter: Exporter, call: str
) -> None:
    """The fixture counts what is left: nothing."""
    shown = exporter.export("cuda_vmm_fd", 4096)
    stub.control(f"{call} fail 2")
    error = refused(imports, shown)
    assert error.code == "handle.refused" and call in error.text
    stub.control()
    imports.detach(imports.attach(shown.handle, shown.fd))


def test_a_sticky_error_is_no_refusal_but_the_end_of_the_device(
    stub: Stub, imports: Imports, exporter: Exporter
) -> None:
    stub.control("cuIpcOpenMemHandle_v2 fail 719")
    with pytest.raises(DeviceLost) as caught:
        imports.attach(exporter.export("cuda_ipc", 4096).handle, None)
    assert caught.value.code == "device.lost" and "CUDA_ERROR_LAUNCH_FAILED" in caught.value.text


def test_memory_that_cannot_be_closed_is_told_and_left_to_the_processs_end(
    stub: Stub, driver: Driver, imports: Imports, exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    mapping = imports.attach(exporter.export("cuda_ipc", 4096).handle, None)
    stub.control("cuIpcCloseMemHandle fail 1 times 1")
    imports.close()
    assert "until this process ends" in caplog.text
    stub.control()
    driver.ipc_close(mapping.base)  # what the refused call would have done
