"""The stack of docker/compose.yaml as a test drives it: up, questions, restarts, down, and what is left after it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.docker.daemon import Docker

T = TypeVar("T")

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
COMPOSE: Final = ROOT / "docker" / "compose.yaml"
ENGINE_BASE: Final = "kvferry-test-vllm-base"
BLOCK_TOKENS: Final = 128
# The engine's own cache holds 23 blocks, four prompts of 1,000 tokens need 32: each has been evicted when it returns.
SERVE: Final = (
    "--enforce-eager --dtype float32 --max-model-len 2048 --block-size 128 --num-gpu-blocks-override 24"
    " --served-model-name tiny"
)


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

    def __init__(self, docker: Docker, folder: Path, profile: str) -> None:
        self.docker = docker
        self.profile = profile
        self.project = f"kvferry-test-{folder.name.lower()}".replace("_", "-")
        models = folder / "models"
        models.mkdir(mode=0o755)
        subprocess.run([sys.executable, str(HERE / "model.py"), str(models / "tiny")], check=True, timeout=120)
        self._env = {
            "COMPOSE_PROJECT_NAME": self.project,
            "KVFERRY_POOL_GIB": "1",
            "VLLM_CPU_KV_GIB": "1",
            "VLLM_CPU_IMAGE": ENGINE_BASE,
            "VLLM_MODEL": "/models/tiny",
            "VLLM_MODELS": str(models),
            "VLLM_ARGS": SERVE,
            "TEST_VLLM": sys.prefix,
            "TEST_CORE": "0",
            "TEST_TORCH_VERSION": version("torch"),
        }

    # ---- commands --------------------------------------------------------------------------------------------------

    def compose(self, *arguments: str, timeout_s: float = 300.0, check: bool = True) -> str:
        """`docker compose ARGUMENTS` with the project's files and settings."""
        files = ["-f", str(COMPOSE), "-f", str(HERE / "compose.test.yaml"), "--profile", self.profile]
        docker = self.docker
        before, docker.env = docker.env, {**docker.env, **self._env}
        try:
            return docker.run([*docker.compose_command, *files, *arguments], timeout_s=timeout_s, check=check)
        finally:
            docker.env = before

    def container(self, service: str) -> str:
        """The id of a service's container."""
        found = self.compose("ps", "-q", service)
        assert found, f"no container of {service}"
        return found.splitlines()[0]

    def look(self, service: str, form: str) -> str:
        """What `docker inspect --format` says of a service's container."""
        return self.docker("inspect", "--format", form, self.container(service))

    def health(self, service: str) -> str:
        """starting, healthy or unhealthy."""
        return self.look(service, "{{.State.Health.Status}}")

    def wait_healthy(self, service: str, timeout_s: float = 180.0) -> float:
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

    def wait_served(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until one engine is registered with all its ranks attached; the status."""

        def served() -> dict[str, Any]:
            status = self.status()
            engines = [one for one in status.get("engines", []) if one["registered"] and one["attached"]]
            return status if len(engines) == 1 and engines[0]["attached"] == engines[0]["world_size"] else {}

        return until(served, timeout_s, "the engine is attached to the sidecar")

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
