"""The stack of docker/compose.yaml, really started: images, start order, reuse over restarts, and nothing left.

The tests of this module share one stack and run in their order: each leaves it serving.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import Docker
from tests.docker.pod import Pod
from tests.docker.stack import PACKAGE_HASH, WHOLE_TOKENS, Stack, built, say, until

pytestmark = pytest.mark.docker

IMAGES = {"kvferry": "kvferry:0.1.0", "vllm-cpu": "kvferry-vllm-cpu:0.1.0"}
SEEDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def stack(docker: Docker, docker_folder: Path) -> Iterator[Stack]:
    """Profile cpu: built, not yet started; at the end it must have left nothing."""
    with built(docker, docker_folder, "cpu") as one:
        yield one


@pytest.fixture(scope="module")
def serving(stack: Stack) -> Stack:
    """Started, and healthy in order."""
    stack.compose("up", "-d", timeout_s=400)
    for service in ("pool", "kvferry", "vllm-cpu"):
        stack.wait_healthy(service)
    return stack


@pytest.fixture(scope="module")
def cold(serving: Stack) -> list[str]:
    """The first answers to the four prompts, computed without any cache."""
    said = serving.ask("vllm-cpu", SEEDS)
    assert [one["cached"] for one in said["answers"]] == [0] * len(SEEDS), said
    say(f"{'prompts of 1,000 tokens, cold:':<38} cached tokens 0 0 0 0")
    return [one["text"] for one in said["answers"]]


def warm(stack: Stack, cold: list[str], after: str) -> None:
    """Ask again: always the same answers; and what was evicted or lost comes from kvferry.

    An answer that is late, as on a crowded machine, is a miss and no fault, so the four may be asked some times.
    """
    stack.wait_served()
    for times in range(1, 5):
        said = stack.ask("vllm-cpu", SEEDS)
        assert [one["text"] for one in said["answers"]] == cold
        cached = [one["cached"] for one in said["answers"]]
        found = f"cached tokens {' '.join(map(str, cached))}, from kvferry {said['from_outside']:.0f}"
        say(f"{after + ':':<38} {found}{'' if times == 1 else f' (asked {times} times)'}")
        if cached == [WHOLE_TOKENS] * len(SEEDS):
            # The last prompt may still lie in the engine's own cache; the others cannot.
            assert said["from_outside"] >= (len(SEEDS) - 1) * WHOLE_TOKENS
            return
    raise AssertionError(f"{after}: not all was found again\n{stack.log('vllm-cpu')}\n{stack.log('kvferry')}")


def test_the_images_are_small_unprivileged_and_of_one_wheel(docker: Docker, stack: Stack) -> None:
    sizes = {name: int(docker("image", "inspect", "-f", "{{.Size}}", name)) for name in ("python:3.11-slim-bookworm",)}
    hashes = set()
    for service in ("kvferry", "vllm-cpu"):
        name = IMAGES[service]
        sizes[name] = int(docker("image", "inspect", "-f", "{{.Size}}", name))
        config = json.loads(docker("image", "inspect", "-f", "{{json .Config}}", name))
        assert config["User"] == "kvferry" and config["StopSignal"] == "SIGTERM" and config["Healthcheck"]["Test"]
        run = ["run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--entrypoint", "python3", name]
        hashes.add(docker(*run, "-c", PACKAGE_HASH))
        assert docker(*run, "-c", "import os; print(os.getuid())") == "10001"
    for name, size in sizes.items():
        say(f"image {name:<28} {size / 1e6:6.0f} MB")
    assert len(hashes) == 1, "engine and sidecar have different kvferrys"
    run = ["run", "--rm", "--network", "none", "--entrypoint", "python3", IMAGES["kvferry"], "-c"]
    assert docker(*run, "import importlib.util as u; print(u.find_spec('torch'))") == "None"
    assert sizes["kvferry:0.1.0"] - sizes["python:3.11-slim-bookworm"] < 200e6


def test_a_pool_larger_than_dev_shm_is_refused_with_both_numbers(docker: Docker, stack: Stack) -> None:
    """Case 101: 64 MiB of /dev/shm, which is Docker's default, and a pool of 1 GiB."""
    run = ["run", "--rm", "--network", "none", "--cap-drop", "ALL", IMAGES["kvferry"], "up", "--host-memory", "1GiB"]
    said = docker(*run, check=False)
    say("1 GiB in Docker's own /dev/shm: " + next(line for line in said.splitlines() if "does not fit" in line))
    assert "ended with 2" in said
    assert "1.0 GiB does not fit /dev/shm, which has 64.0 MiB free" in said
    assert "--shm-size" in said


def test_a_run_dir_of_another_user_is_refused_in_one_line(docker: Docker, stack: Stack) -> None:
    """Of a container that runs as somebody else: the directory above may not even be entered."""
    run = ["run", "--rm", "--network", "none", "--cap-drop", "ALL", "--user", "10002:10002"]
    said = docker(*run, "--env", "KVFERRY_RUN_DIR=/run/kvferry/own", IMAGES["kvferry"], "up", check=False)
    assert "ended with 2" in said and "cannot write in the run dir /run/kvferry/own: Permission denied" in said
    assert "Traceback" not in said


def test_kvferry_serves_on_the_volumes_of_the_pod_of_kubernetes(docker: Docker, stack: Stack) -> None:
    """As its container is there: user, rights and environment of pod.yaml, and volumes that are open to everybody."""
    pod = Pod("pod.yaml")
    user = pod.spec["securityContext"]
    rights = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none"]
    rights += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
    # Volumes, as there: a tmpfs of Docker's own takes owner and mode of what the image has at that place.
    kind = "type=volume,volume-nocopy,volume-driver=local,volume-opt=type=tmpfs,volume-opt=device=tmpfs"
    kind += ",volume-opt=o=mode=0777,destination="
    volumes = [word for mount in pod.sidecar["volumeMounts"] for word in ("--mount", kind + mount["mountPath"])]
    env = pod.env(pod.sidecar) | {"KVFERRY_HOST_MEMORY": "64MiB"}
    given = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    probe = pod.sidecar["startupProbe"]["exec"]["command"]
    container = docker("run", "--detach", *rights, *volumes, *given, pod.sidecar["image"])
    try:
        until(lambda: "ended with" not in docker("exec", container, *probe, check=False), 60, "its probe is answered")
        docker("stop", container)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    finally:
        docker("rm", "--force", "--volumes", container)


def test_the_engine_starts_when_the_sidecar_is_healthy(serving: Stack) -> None:
    """Case 99: no common ipc or pid namespace, no capability, a user that is not root, a read-only root."""
    assert {service: serving.health(service) for service in ("pool", "kvferry", "vllm-cpu")} == dict.fromkeys(
        ("pool", "kvferry", "vllm-cpu"), "healthy"
    )
    say("health: pool healthy, kvferry healthy, vllm-cpu healthy (started in this order)")
    for service in ("pool", "kvferry", "vllm-cpu"):
        host = json.loads(serving.look(service, "{{json .HostConfig}}"))
        assert not host["Privileged"] and host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"]
        assert host["NetworkMode"] == "none" and host["PidMode"] == ""
        assert host["IpcMode"] != "host"
    shm = serving.docker("exec", serving.container("kvferry"), "df", "-B1", "--output=size", "/dev/shm")
    assert int(shm.split()[-1]) == 3 << 29, "a pool of 1 GiB and half a GiB for its table"


def test_the_sidecar_listens_on_no_network_at_all(serving: Stack) -> None:
    """Case 132: no port for control, health or metrics that could be left open; unix sockets, for one user, alone."""
    assert any(one.endswith(":1F40") for one in serving.listening("vllm-cpu")), "the engine's own port 8000 is seen"
    for service in ("pool", "kvferry"):
        assert serving.listening(service) == []
        assert json.loads(serving.look(service, "{{json .NetworkSettings.Ports}}")) in ({}, None)
        image = json.loads(serving.docker("image", "inspect", "-f", "{{json .Config}}", IMAGES["kvferry"]))
        assert not image.get("ExposedPorts")
    say("ports: none is listened on in the containers of kvferry and pool")


def test_what_was_evicted_comes_back(serving: Stack, cold: list[str]) -> None:
    warm(serving, cold, "asked again")


def test_what_an_engine_stored_outlives_its_container(serving: Stack, cold: list[str]) -> None:
    serving.compose("restart", "vllm-cpu")
    serving.wait_healthy("vllm-cpu")
    warm(serving, cold, "engine container restarted")


def test_the_cache_outlives_the_sidecars_container(serving: Stack, cold: list[str]) -> None:
    began = serving.look("kvferry", "{{.State.StartedAt}}")
    serving.compose("restart", "kvferry")
    serving.wait_healthy("kvferry")
    assert serving.look("kvferry", "{{.State.StartedAt}}") != began
    warm(serving, cold, "sidecar container restarted")


def test_the_cache_outlives_a_killed_sidecar_container(serving: Stack, cold: list[str]) -> None:
    serving.docker("kill", serving.container("kvferry"))
    serving.docker("start", serving.container("kvferry"))
    serving.wait_healthy("kvferry")
    warm(serving, cold, "sidecar container killed, started")


def test_the_cache_outlives_a_new_sidecar_container(serving: Stack, cold: list[str]) -> None:
    """As after an upgrade: the container is another one, the pool is the one that `pool` holds."""
    before = serving.container("kvferry")
    serving.compose("up", "-d", "--force-recreate", "--no-deps", "kvferry")
    assert serving.container("kvferry") != before
    serving.wait_healthy("kvferry")
    warm(serving, cold, "sidecar container made anew")


def test_a_rank_proves_its_workers_death_from_another_pid_namespace(serving: Stack, cold: list[str]) -> None:
    """Case 85: the number of a process means nothing across containers; the descriptor that the worker passed does."""
    status = serving.wait_served()
    (worker,) = [one for one in status["workers"] if one["state"] == "taken"]
    kill = f"import os; os.kill({worker['pid']}, 9)"  # the image has no `kill`
    serving.docker("exec", serving.container("kvferry"), "python3", "-c", kill)
    until(lambda: serving.wait_served()["engines"][0]["ranks"][0]["worker"] != worker["worker"], 30, "a new worker")
    warm(serving, cold, "worker killed under the engine")


def test_a_killed_engine_is_seen_by_the_end_of_its_tether_alone(serving: Stack, cold: list[str]) -> None:
    """Case 99: worker and engine see no process of each other, and the memory is let go all the same."""
    status = serving.wait_served()
    (worker,) = [one for one in status["workers"] if one["state"] == "taken"]
    serving.docker("kill", serving.container("vllm-cpu"))

    def gone() -> bool:
        found = serving.status()
        return bool(found) and not any(one["worker"] == worker["worker"] for one in found["workers"])

    began = time.monotonic()
    until(gone, 10, "the worker of the killed engine has ended")
    say(f"engine container killed: its worker was gone within {time.monotonic() - began:.1f} s")
    serving.docker("start", serving.container("vllm-cpu"))
    serving.wait_healthy("vllm-cpu")
    warm(serving, cold, "engine container killed, started")


def test_down_leaves_nothing(serving: Stack) -> None:
    pids = serving.pids()
    assert len(pids) > 5
    serving.compose("down", "-v")
    left = serving.leftovers(pids)
    assert not left
    say(f"down: {len(pids)} processes, all containers, volumes and networks are gone")
