"""The stack of docker/compose.yaml as a test drives it: up, questions, restarts, down, and what is left after it."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from tests.docker.daemon import Docker

T = TypeVar("T")

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
COMPOSE: Final = ROOT / "docker" / "compose.yaml"
ENGINE_BASE: Final = "kvferry-test-vllm-base"
GPU: Final = "GPU-00000000-1111-2222-3333-444444444444"  # there is none: what Docker is asked for is looked at
BLOCK_TOKENS: Final = 128
# Blocks of a prompt of ask.py's length that are whole, and so are stored.
WHOLE_BLOCKS: Final = 1000 // BLOCK_TOKENS
WHOLE_TOKENS: Final = WHOLE_BLOCKS * BLOCK_TOKENS
# The engine's own cache holds 23 blocks, four prompts of 1,000 tokens need 32: each has been evicted when it returns.
SERVE: Final = (
    "--enforce-eager --dtype float32 --max-model-len 2048 --block-size 128 --num-gpu-blocks-override 24"
    " --served-model-name tiny"
)

# A hash over every file of the installed package, for comparing two images.
PACKAGE_HASH: Final = """
import hashlib, pathlib, kvferry
root = pathlib.Path(kvferry.__file__).parent
files = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
print(hashlib.sha256(b"".join(str(p.relative_to(root)).encode() + p.read_bytes() for p in files)).hexdigest())
"""
# The kernel's own lists of the container's network: state 0A is LISTEN; a datagram socket has no such state.
LISTENING: Final = """
import pathlib
for kind in ("tcp", "tcp6", "udp", "udp6", "udplite", "raw", "raw6"):
    path = pathlib.Path("/proc/net", kind)
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        _, address, _, state, *_ = line.split()
        if state == "0A" or not kind.startswith("tcp"):
            print(kind, address)
"""


def say(text: str) -> None:
    """A line of the transcript."""
    print(f"  {text}", flush=True)


def until(question: Callable[[], T], timeout_s: float, what: str) -> T:
    """Ask again and again until the answer is true; that answer. AssertionError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not (answer := question()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.2)
    return answer


class Stack:
    """One project of docker compose."""

    def __init__(self, docker: Docker, folder: Path, profile: str, compose: Path = COMPOSE) -> None:
        self.docker = docker
        self.profile = profile
        self.compose_file = compose
        self.project = f"kvferry-test-{folder.name.lower()}".replace("_", "-")
        models = folder / "models"
        if not models.exists():
            models.mkdir(mode=0o755)
            subprocess.run([sys.executable, str(HERE / "model.py"), str(models / "tiny")], check=True, timeout=120)
        cores = sorted(os.sched_getaffinity(0))
        self._env = {
            "COMPOSE_PROJECT_NAME": self.project,
            "KVFERRY_POOL_GIB": "1",
            "VLLM_CPU_KV_GIB": "1",
            "VLLM_CPU_IMAGE": ENGINE_BASE,
            "VLLM_IMAGE": ENGINE_BASE,
            "KVFERRY_GPU": GPU,
            "VLLM_MODEL": "/models/tiny",
            "VLLM_MODELS": str(models),
            "VLLM_ARGS": SERVE,
            "TEST_VLLM": sys.prefix,
            "TEST_CORE": str(cores[0]),
            "TEST_CORE_B": str(cores[-1]),
            "TEST_TORCH_VERSION": version("torch"),
        }

    # ---- commands --------------------------------------------------------------------------------------------------

    def compose(self, *arguments: str, timeout_s: float = 300.0, check: bool = True) -> str:
        """`docker compose ARGUMENTS` with the project's files and settings."""
        files = ["-f", str(self.compose_file), "-f", str(HERE / "compose.test.yaml")]
        where = ["--project-directory", str(COMPOSE.parent), "--profile", self.profile]
        command = [*self.docker.compose_command, *files, *where, *arguments]
        return self.docker.run(command, timeout_s=timeout_s, check=check, env=self._env)

    def container(self, service: str) -> str:
        """The id of a service's container."""
        found = self.compose("ps", "-a", "-q", service)
        assert found, f"no container of {service}"
        return found.splitlines()[0]

    def look(self, service: str, form: str) -> str:
        """What `docker inspect --format` says of a service's container."""
        return self.docker("inspect", "--format", form, self.container(service))

    def health(self, service: str) -> str:
        """starting, healthy or unhealthy."""
        return self.look(service, "{{.State.Health.Status}}")

    def wait_healthy(self, service: str, timeout_s: float = 300.0) -> float:
        """Wait; the seconds it took. AssertionError with the container's log if it does not become so."""
        began = time.monotonic()

        def well() -> bool:
            health, restarts = self.look(service, "{{.State.Health.Status}} {{.RestartCount}}").split()
            assert int(restarts) < 2, f"{service} starts over and over"
            return health == "healthy"

        try:
            until(well, timeout_s, f"{service} is healthy")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(service)}") from None
        return time.monotonic() - began

    def log(self, service: str, lines: int = 60) -> str:
        """The end of what a container has said."""
        done = self.docker("logs", "--tail", str(lines), self.container(service), check=False)
        return done + self.docker.run(
            ["sh", "-c", f"docker logs --tail {lines} {self.container(service)} 2>&1 >/dev/null"], timeout_s=30
        )

    # ---- questions -------------------------------------------------------------------------------------------------

    def ask(self, service: str, seeds: Sequence[int]) -> dict[str, Any]:
        """The engine's answers, asked within its container."""
        command = ["exec", "-i", self.container(service), "python3", "-", *map(str, seeds)]
        said = self.docker(*command, stdin=(HERE / "ask.py").read_text(), timeout_s=300)
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    def status(self) -> dict[str, Any]:
        """`kvferry status --json` in the sidecar's container; {} while it does not serve."""
        said = self.docker("exec", self.container("kvferry"), "kvferry", "status", "--json", check=False)
        try:
            found: dict[str, Any] = json.loads(said)
        except ValueError:
            return {}
        return found if found.get("state") == "serving" else {}

    def wait_served(self, num_engines: int = 1, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until so many engines are there, each registered with all its ranks attached; the status."""

        def served() -> dict[str, Any]:
            status = self.status()
            engines = status.get("engines", [])
            whole = [one for one in engines if one["registered"] and one["attached"] == one["world_size"]]
            return status if len(whole) == len(engines) == num_engines else {}

        return until(served, timeout_s, f"{num_engines} attached to the sidecar")

    def listening(self, service: str) -> list[str]:
        """What listens on a network in a service's container, as "tcp ADDRESS:PORT" in hex; loopback counts too."""
        said = self.docker("exec", self.container(service), "python3", "-c", LISTENING)
        return said.splitlines()

    def pids(self) -> list[int]:
        """The host's numbers of all processes in the project's containers."""
        found: list[int] = []
        for container in self.compose("ps", "-q").split():
            lines = self.docker("top", container, "-eo", "pid", check=False).splitlines()
            found += [int(line) for line in lines if line.strip().isdigit()]
        return found

    def leftovers(self, pids: Sequence[int] = ()) -> list[str]:
        """What is still there of it: containers, volumes, networks, and those of `pids` that live."""
        label = ["--filter", f"label=com.docker.compose.project={self.project}"]
        left = [f"container {one}" for one in self.docker("ps", "-aq", *label).split()]
        left += [f"volume {one}" for one in self.docker("volume", "ls", "-q", *label).split()]
        left += [f"network {one}" for one in self.docker("network", "ls", "-q", *label).split()]
        left += [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
        return left


@contextmanager
def built(docker: Docker, folder: Path, profile: str, compose: Path = COMPOSE) -> Iterator[Stack]:
    """A profile's images built and nothing started; at the end it must have left nothing. Skips without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test-docker` runs this")
    if sys.version_info[:2] != (3, 11):
        pytest.skip(f"vLLM's environment is of Python {sys.version_info[0]}.{sys.version_info[1]}, the images' is 3.11")
    docker("build", "--network", "host", "-t", ENGINE_BASE, str(HERE / "engine_base"), timeout_s=300)
    one = Stack(docker, folder, profile, compose)
    print()
    one.compose("build", timeout_s=600)
    try:
        yield one
    finally:
        pids = one.pids()
        one.compose("down", "-v", "--remove-orphans", check=False)
        assert not one.leftovers(pids)
