"""The pods of docker/kubernetes, as tests read them."""

from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parents[2] / "docker/kubernetes"


class Pod:
    """One file: its pod, and the sidecar and the engine in it."""

    def __init__(self, name: str) -> None:
        self.documents: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / name).read_text()))
        (pod,) = [one for one in self.documents if one["kind"] == "Pod"]
        self.spec: dict[str, Any] = pod["spec"]
        (self.sidecar,) = self.spec["initContainers"]
        (self.engine,) = self.spec["containers"]
        self.volumes = {one["name"]: one["emptyDir"] for one in self.spec["volumes"]}

    def env(self, container: dict[str, Any]) -> dict[str, str]:
        return {one["name"]: one["value"] for one in container["env"]}

    def at(self, container: dict[str, Any], place: str) -> str:
        """The volume that is mounted there."""
        (name,) = [one["name"] for one in container["volumeMounts"] if one["mountPath"] == place]
        return str(name)
