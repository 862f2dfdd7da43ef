"""A Docker engine for tests: the one that answers here, or one of our own, started by hand and ended with nothing left.

Our own has its data in a folder of the test, no network but the containers' loopback, and its own socket: it does
not meet another engine of this machine.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

START_S: Final = 60.0
SBIN: Final = "/usr/local/sbin:/usr/sbin:/sbin"  # where dockerd and runc may lie, off a plain user's PATH


class NoDockerError(RuntimeError):
    """Docker cannot be had here; the text says why, in one line."""


class Docker:
    """The two commands, spoken to one engine."""

    def __init__(self, env: Mapping[str, str], *, own: bool) -> None:
        self.own = own  # started by us, and gone afterwards with all it holds
        self.env = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SBIN}", **env}
        if self._fails("docker", "buildx", "version"):
            self.env |= {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}
        if not self._fails("docker", "compose", "version"):
            self.compose_command = ["docker", "compose"]
        elif shutil.which("docker-compose", path=self.env["PATH"]):
            self.compose_command = ["docker-compose"]
        else:
            raise NoDockerError("there is neither `docker compose` nor docker-compose")

    def __call__(self, *arguments: str, timeout_s: float = 120.0, check: bool = True, stdin: str | None = None) -> str:
        """Run `docker ARGUMENTS`; what it prints. AssertionError with both outputs if it fails."""
        return self.run(["docker", *arguments], timeout_s=timeout_s, check=check, stdin=stdin)

    def run(
        self,
        command: list[str],
        *,
        timeout_s: float,
        check: bool = True,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command against this engine, with `env` on top of the environment."""
        done = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**self.env, **(env or {})},
            check=False,
        )
        said = f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        assert not check or done.returncode == 0, said
        return done.stdout.strip() if done.returncode == 0 else said

    def _fails(self, *command: str) -> bool:
        try:
            done = subprocess.run(command, capture_output=True, env=self.env, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return True
        return done.returncode != 0


def _answers(env: Mapping[str, str]) -> bool:
    try:
        command = ["docker", "version", "--format", "{{.Server.Version}}"]
        done = subprocess.run(command, capture_output=True, env={**os.environ, **env}, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextmanager
def running_docker(folder: Path) -> Iterator[Docker]:
    """The engine that answers here; else one of our own with its data in `folder`. NoDockerError if neither can be."""
    if not shutil.which("docker"):
        raise NoDockerError("there is no docker command")
    if _answers({}):
        yield Docker({}, own=False)
        return
    dockerd = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:{SBIN}")
    if dockerd is None:
        raise NoDockerError("no Docker engine answers, and there is no dockerd to start one")
    if os.getuid() != 0:
        raise NoDockerError("no Docker engine answers, and only root can start one")
    host = f"unix://{folder}/docker.sock"
    with _own_daemon(dockerd, folder, host):
        yield Docker({"DOCKER_HOST": host}, own=True)


@contextmanager
def _own_daemon(dockerd: str, folder: Path, host: str) -> Iterator[None]:
    log = folder / "dockerd.log"
    places = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    # No network of its own: containers of these tests speak over unix sockets and their own loopback.
    network = ["--bridge=none", "--iptables=false", "--ip6tables=false"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [dockerd, "--host", host, *places, *network],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SBIN}"},
            start_new_session=True,
        )
    try:
        end = time.monotonic() + START_S
        while not _answers({"DOCKER_HOST": host}):
            if process.poll() is not None or time.monotonic() > end:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise NoDockerError(f"dockerd does not start here: {' '.join(last)}")
            time.sleep(0.2)
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (at := line.split()[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", at], capture_output=True, check=False)
        shutil.rmtree(folder / "data", ignore_errors=True)
