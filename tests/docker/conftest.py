"""Tests of docker/: the files everywhere, the running stack where a Docker engine can be had (`make test-docker`)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.base_image import base_image
from tests.docker.daemon import Docker, NoDockerError, running_docker


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Building images takes minutes and is for `make test-docker`: without asking for it (-m docker) it is left out."""
    if "docker" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("docker")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def docker_folder() -> Iterator[Path]:
    """Short, because it is in a socket's path."""
    with tempfile.TemporaryDirectory(prefix="kvf-docker-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def docker(docker_folder: Path) -> Iterator[Docker]:
    """An engine with the base image that the Dockerfile names."""
    try:
        with running_docker(docker_folder) as one, base_image(one, docker_folder):
            yield one
    except NoDockerError as error:
        pytest.skip(str(error))
