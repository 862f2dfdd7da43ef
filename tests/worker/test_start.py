"""A worker before it is a spare: it gives the pool to its device, which may take long, and is heard meanwhile."""

import gc
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.gpu_worker import pool
from kvferry.gpu_worker.devices.base import CapacityError, HostRegion, idle
from kvferry.gpu_worker.devices.cpu import CpuDevice
from kvferry.gpu_worker.spare import Options, Worker
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir

# A worker closes nothing: its process ends. Here it is only dropped.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


class Registering(CpuDevice):
    """Registers by doing what a test says, with the way to let others be heard in between."""

    def __init__(self, what: Callable[[Callable[[], None]], None]) -> None:
        super().__init__()
        self.what = what

    def register_host(self, base: int, nbytes: int, between: Callable[[], None] = idle) -> HostRegion:
        self.what(between)
        return super().register_host(base, nbytes)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Worker, Channel]]]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        run_dir = RunDir.at(Path(folder))
        pool.create(run_dir.pool(0), 1 << 20, run_dir.instance)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(run_dir.rank(0)))
        listener.listen()
        ours, theirs = Channel.pair()

        devices: list[Registering] = []

        def made(what: Callable[[Callable[[], None]], None]) -> tuple[Worker, Channel]:
            fds = os.dup(listener.fileno()), os.dup(theirs.fileno())
            devices.append(Registering(what))
            return Worker(Options(run_dir, 0, 7, *fds), devices[-1]), ours

        yield made
        for device in devices:
            device.close()
        gc.collect()
        for one in (ours, theirs, listener):
            one.close()
        pool.remove(run_dir.pool(0))


def test_the_supervisors_question_is_answered_and_its_stop_heard_while_the_pool_is_registered(start) -> None:
    """Pinning 300 GiB takes half a minute of processor time: a worker that said nothing would be taken for hung."""
    said = []

    def pin(between: Callable[[], None]) -> None:
        control.send({"event": "ping"})
        between()
        said.extend(control.receive())
        control.send({"event": "stop"})
        between()
        raise AssertionError("it was told to stop")

    worker, control = start(pin)
    assert worker.run() == 0
    assert said == [{"event": "pong"}]


def test_a_supervisor_that_is_gone_ends_the_registration(start) -> None:
    def pin(between: Callable[[], None]) -> None:
        control.close()
        between()
        raise AssertionError("nobody is left to work for")

    worker, control = start(pin)
    assert worker.run() == 0


def test_a_pool_that_cannot_be_registered_is_an_error_and_no_spare(start) -> None:
    """The process ends with the reason and a code of its own; nobody is told that it is ready."""

    def pin(between: Callable[[], None]) -> None:
        raise CapacityError("device.pin", "no")

    worker, control = start(pin)
    with pytest.raises(CapacityError):
        worker.run()
    assert control.receive() == []
