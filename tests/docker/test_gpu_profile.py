"""Profile gpu of docker/compose.yaml, as far as a machine without a GPU goes.

First what Docker is asked for; then the same containers, in the same namespaces, with their GPUs taken out: kvferry
serves memory of the CPU, and the small engine of the README attaches from the container of the real one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.daemon import Docker
from tests.docker.stack import COMPOSE, GPU, PACKAGE_HASH, ROOT, Stack, built, say, until

pytestmark = pytest.mark.docker

HELLO = (ROOT / "examples/hello.py").read_text()
# The command lines of all processes of a container's pid namespace.
PROCESSES = """
import pathlib
for one in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    print(" ".join(one.read_text().split(chr(0))))
"""


@pytest.fixture(scope="module")
def gpu(docker: Docker, docker_folder: Path) -> Iterator[Stack]:
    """The profile's three images built; nothing started."""
    with built(docker, docker_folder, "gpu") as one:
        yield one


@pytest.fixture(scope="module")
def rehearsal(gpu: Stack, docker: Docker, docker_folder: Path) -> Iterator[Stack]:
    """The profile without GPUs: kvferry serves, and the engine's container runs the README's engine."""
    document: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    sidecar, engine = (document["services"][name] for name in ("kvferry-gpu", "vllm-gpu"))
    for service in (sidecar, engine):
        del service["deploy"]
    del sidecar["ulimits"]  # a Docker that is itself limited, as in a container, cannot lift it
    sidecar["environment"] |= {"KVFERRY_DEVICE": "cpu", "KVFERRY_DEVICES": ""}
    engine |= {"entrypoint": ["python3", "-c", HELLO], "command": []}
    file = docker_folder / "rehearsal.yaml"
    file.write_text(yaml.safe_dump(document).replace("$", "$$").replace("$${", "${"))
    with built(docker, docker_folder, "gpu", file) as one:
        one.compose("up", "-d", "kvferry-gpu")
        one.wait_healthy("kvferry-gpu")
        yield one


def said_by_the_engine(stack: Stack) -> str:
    """What the engine says that is run in the engine's container."""
    return stack.compose("run", "--rm", "vllm-gpu").splitlines()[-1].strip()


def test_the_worker_image_has_torch_and_the_same_package(docker: Docker, gpu: Stack) -> None:
    name = "kvferry-worker:0.1.0"
    run = ["run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--entrypoint", "python3"]
    found = docker(*run, name, "-c", "import torch, os; print(torch.__version__, os.getuid())")
    assert found.split()[1] == "10001"
    assert docker(*run, name, "-c", PACKAGE_HASH) == docker(*run, "kvferry:0.1.0", "-c", PACKAGE_HASH)
    size = int(docker("image", "inspect", "-f", "{{.Size}}", name))
    say(f"image {name:<28} {size / 1e6:6.0f} MB, torch {found.split()[0]}")


def test_docker_is_asked_for_the_same_gpu_and_one_numbering_of_processes(gpu: Stack) -> None:
    """Case 98: by UUID for both; the sidecar has no network; neither has a right beside."""
    gpu.compose("up", "-d", "pool")  # compose 1 knows no namespaces of a container that does not run
    try:
        gpu.compose("up", "--no-start")
        pool = gpu.container("pool")
        for service in ("kvferry-gpu", "vllm-gpu"):
            host = json.loads(gpu.look(service, "{{json .HostConfig}}"))
            (asked,) = host["DeviceRequests"]
            assert (asked["Driver"], asked["DeviceIDs"], asked["Capabilities"]) == ("nvidia", [GPU], [["gpu"]])
            assert host["PidMode"] == f"container:{pool}"
            assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"]
            assert not host["Privileged"] and host["SecurityOpt"] == ["no-new-privileges:true"]
        sidecar = json.loads(gpu.look("kvferry-gpu", "{{json .HostConfig}}"))
        assert (sidecar["IpcMode"], sidecar["NetworkMode"]) == (f"container:{pool}", "none")
        assert sidecar["Ulimits"] == [{"Name": "memlock", "Hard": -1, "Soft": -1}]
        engine = json.loads(gpu.look("vllm-gpu", "{{json .HostConfig}}"))
        assert engine["IpcMode"] == "private" and engine["ShmSize"] == 8 << 30
    finally:
        gpu.compose("down", "-v")


def test_engine_and_sidecar_meet_in_the_namespaces_of_the_profile(rehearsal: Stack) -> None:
    assert said_by_the_engine(rehearsal) == "4 blocks came back, equal: True"
    in_pool = rehearsal.docker("exec", rehearsal.container("pool"), "python3", "-c", PROCESSES)
    assert "kvferry.gpu_worker" in in_pool, "one numbering: the pool's container sees the workers"
    assert rehearsal.listening("kvferry-gpu") == []
    say("profile gpu without GPUs: an engine in its container stored and loaded 4 blocks")


def test_a_killed_sidecar_leaves_no_process_in_the_shared_numbering_and_comes_back(rehearsal: Stack) -> None:
    """Its process is not the first of the namespace: nobody but kvferry and Docker end what it started."""
    rehearsal.docker("kill", rehearsal.container("kvferry-gpu"))
    pool = rehearsal.container("pool")
    until(
        lambda: "kvferry" not in rehearsal.docker("exec", pool, "python3", "-c", PROCESSES), 20, "all of it has ended"
    )
    rehearsal.docker("start", rehearsal.container("kvferry-gpu"))
    rehearsal.wait_healthy("kvferry-gpu")
    assert said_by_the_engine(rehearsal) == "4 blocks came back, equal: True"


def test_the_stack_stops_in_order_and_leaves_nothing(rehearsal: Stack) -> None:
    pids = rehearsal.pids()
    rehearsal.compose("down", "-v")
    assert not rehearsal.leftovers(pids)
