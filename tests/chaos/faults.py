"""The kinds of fault. Each hurts something, mends what does not mend itself, and says from when all should be well.

A stop lasts for a moment or for longer than deadline and grace together. What mends itself is left alone.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .sidecar import Sidecar, SidecarError

ORPHANS_S = 5.0  # children of a dead supervisor end within this


class Scene(Protocol):
    """What a fault may touch."""

    sidecar: Sidecar
    rng: random.Random

    def pause(self, seconds: float) -> None:
        """Let the load go on."""

    def restart_engine(self) -> float:
        """SIGKILL the engine and start another; the moment it is ready."""

    def complain(self, text: str) -> None:
        """Something is not as it should be, beside requests."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`inflict` returns the moment from which all should be well, or None if there was nobody to hurt."""

    name: str
    weight: int
    inflict: Callable[[Scene], float | None]
    is_return: bool = False  # the sidecar, or its daemon, comes back: the cache has to be used soon
    deaths: int = 0  # that the supervisor counts against its ceiling


def _stop(scene: Scene, pid: int | None) -> float | None:
    if not scene.sidecar.send(pid, signal.SIGSTOP):
        return None
    scene.pause(scene.rng.uniform(0.1, 1.2) if scene.rng.random() < 0.6 else scene.rng.uniform(3.0, 6.0))
    scene.sidecar.send(pid, signal.SIGCONT)
    return time.monotonic()


def _worker(scene: Scene) -> int | None:
    found = scene.sidecar.workers()
    return scene.rng.choice(found) if found else None


def kill_worker(scene: Scene) -> float | None:
    """A worker, serving or spare."""
    return time.monotonic() if scene.sidecar.send(_worker(scene), signal.SIGKILL) else None


def stop_worker(scene: Scene) -> float | None:
    return _stop(scene, _worker(scene))


def kill_daemon(scene: Scene) -> float | None:
    sidecar = scene.sidecar
    count = len(sidecar.readies)
    if not sidecar.send(sidecar.daemon(), signal.SIGKILL):
        return None
    return sidecar.wait_ready(count)


def stop_daemon(scene: Scene) -> float | None:
    return _stop(scene, scene.sidecar.daemon())


def stop_supervisor(scene: Scene) -> float | None:
    return _stop(scene, scene.sidecar.pid)


def stop_supervisor_kill_worker(scene: Scene) -> float | None:
    """Nobody reaps, nobody starts another, until the supervisor goes on."""
    sidecar = scene.sidecar
    if not sidecar.send(sidecar.pid, signal.SIGSTOP):
        return None
    scene.pause(scene.rng.uniform(0, 0.5))
    sidecar.send(_worker(scene), signal.SIGKILL)
    scene.pause(scene.rng.uniform(0.2, 3.0))
    sidecar.send(sidecar.pid, signal.SIGCONT)
    return time.monotonic()


def kill_supervisor(scene: Scene) -> float | None:
    """Its children end by themselves; then it is started again, or at once, while they are still ending."""
    sidecar = scene.sidecar
    orphans = [*sidecar.workers(), sidecar.daemon()]
    sidecar.kill_supervisor()
    if scene.rng.random() < 0.5:
        until = time.monotonic() + ORPHANS_S
        while (left := {*sidecar.workers(), sidecar.daemon()} & set(orphans) - {None}) and time.monotonic() < until:
            scene.pause(0.05)
        if left:
            scene.complain(f"{len(left)} children live {ORPHANS_S:.0f} s after their supervisor")
    return sidecar.start()


def kill_tree(scene: Scene) -> float | None:
    """Everything at one moment; soon or after a while it is started again on the same pool."""
    scene.sidecar.kill_tree()
    scene.pause(scene.rng.uniform(0, 0.3) if scene.rng.random() < 0.5 else scene.rng.uniform(1, 4))
    return scene.sidecar.start()


def terminate(scene: Scene) -> float | None:
    """As a service manager restarts it."""
    try:
        code = scene.sidecar.end(signal.SIGTERM)
    except SidecarError as error:
        scene.complain(str(error).splitlines()[0])
        scene.sidecar.kill_tree()
        code = 0
    if code:
        scene.complain(f"exit code {code} after SIGTERM")
    scene.pause(scene.rng.uniform(0, 1))
    return scene.sidecar.start()


def reset(scene: Scene) -> float | None:
    """Everything stored is forgotten."""
    done = scene.sidecar.ask("reset", "--all")
    if done.returncode:
        scene.complain(f"kvferry reset: {(done.stderr or done.stdout).strip()[-300:]}")
        return None
    return time.monotonic()


def kill_engine(scene: Scene) -> float | None:
    """The engine with all its processes, in the middle of whatever it does."""
    return scene.restart_engine()


def nothing(_scene: Scene) -> float | None:
    """For comparison: `--only nothing`."""
    return time.monotonic()


KINDS = (
    Kind("nothing", 0, nothing),
    Kind("worker SIGKILL", 3, kill_worker, deaths=1),
    Kind("worker SIGSTOP", 3, stop_worker, deaths=1),
    Kind("daemon SIGKILL", 3, kill_daemon, is_return=True, deaths=1),
    Kind("daemon SIGSTOP", 2, stop_daemon, deaths=1),
    Kind("supervisor SIGSTOP", 1, stop_supervisor),
    Kind("supervisor SIGSTOP, worker SIGKILL", 1, stop_supervisor_kill_worker, deaths=1),
    Kind("supervisor SIGKILL, up", 2, kill_supervisor, is_return=True),
    Kind("all SIGKILL, up", 3, kill_tree, is_return=True),
    Kind("SIGTERM, up", 2, terminate, is_return=True),
    Kind("reset --all", 2, reset),
    Kind("engine SIGKILL, start", 1, kill_engine),
)


class Bag:
    """Kinds in random order, each as often as its weight before any comes again.

    The supervisor gives up after five deaths in 30 s, rightly: a kind that would bring that about waits.
    """

    MOST_DEATHS, WINDOW_S = 4, 31.0

    def __init__(self, kinds: tuple[Kind, ...], rng: random.Random) -> None:
        self._kinds, self._rng = kinds, rng
        self._bag: list[Kind] = []
        self._deaths: list[float] = []

    def draw(self, now: float) -> Kind:
        """The next kind."""
        self._deaths = [moment for moment in self._deaths if now - moment < self.WINDOW_S]
        free = self.MOST_DEATHS - len(self._deaths)
        for _ in range(2):
            for at, kind in enumerate(self._bag):
                if kind.deaths <= free:
                    del self._bag[at]
                    self._deaths += [now] * kind.deaths
                    return kind
            self._bag += [kind for kind in self._kinds for _ in range(kind.weight)]
            self._rng.shuffle(self._bag)
        return self._kinds[0]
