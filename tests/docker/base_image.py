"""The image that ours are built on, where it cannot be pulled: made of Debian's packages, under the very same name.

The Dockerfile stays the one that users build. What this machine's pip needs to reach its index (certificates, where
else wheels lie) goes into the base image; local folders of wheels are served to the builds over loopback.
"""

import configparser
import io
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tests.docker.daemon import Docker, NoDockerError

NAME: Final = "python:3.11-slim-bookworm"
PACKAGES: Final = "python3,python3-venv,python3-pip,ca-certificates"
# pip's settings that say where packages come from.
SOURCES: Final = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "timeout")


@contextmanager
def base_image(docker: Docker, folder: Path) -> Iterator[None]:
    """`NAME` is there, and its pip works within builds that use the host's network."""
    with ExitStack() as stack:
        # An engine of our own knows no image and reaches no registry; another one may.
        if not docker.own and not _is_there(docker):
            docker("pull", "--quiet", NAME, timeout_s=600, check=False)
        if not _is_there(docker):
            _import(docker, folder, _pip_settings(stack))
        yield


def _is_there(docker: Docker) -> bool:
    return docker("image", "inspect", "--format", "{{.Id}}", NAME, check=False).startswith("sha256:")


def _import(docker: Docker, folder: Path, settings: dict[str, str]) -> None:
    debootstrap = shutil.which("debootstrap", path=docker.env["PATH"])
    if debootstrap is None:
        raise NoDockerError(f"there is no {NAME}, and no debootstrap to make one")
    root = folder / "rootfs"
    command = [debootstrap, "--variant=minbase", f"--include={PACKAGES},libnuma1", "bookworm", str(root), _mirror()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise NoDockerError(f"debootstrap cannot make a base image: {(done.stdout + done.stderr).strip()[-300:]}")
    try:
        for pattern in ("var/cache/apt/archives/*.deb", "var/cache/apt/*.bin", "var/lib/apt/lists/*_*"):
            for path in root.glob(pattern):
                path.unlink()
        if cert := settings.get("cert"):
            (root / cert.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cert, root / cert.lstrip("/"))
        config = configparser.RawConfigParser()
        config["global"] = settings
        text = io.StringIO()
        config.write(text)
        (root / "etc/pip.conf").write_text(text.getvalue())
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            imported = ["docker", "import", "-", NAME]
            subprocess.run(imported, stdin=tar.stdout, env=docker.env, check=True, capture_output=True, timeout=300)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _mirror() -> str:
    """Where this machine's apt has Debian from; the well-known name if it does not say."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for path in files:
        if not path.is_file():
            continue
        text = "\n".join(line for line in path.read_text(errors="replace").splitlines() if not line.startswith("#"))
        for found in re.findall(r"^(?:deb\s+(?:\[.*?\]\s+)?|URIs:\s*)(https?://\S+)", text, re.M):
            if found.rstrip("/").endswith("/debian"):
                return str(found)
    return "http://deb.debian.org/debian"


def _pip_settings(stack: ExitStack) -> dict[str, str]:
    """What this machine's pip is told, as a build can use it: folders of wheels become addresses on loopback."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        name = name.split(".", 1)[-1].lstrip(".").replace("_", "-")
        if name in SOURCES:
            found[name] = value.strip().strip("'\"")
    for name in ("find-links", "extra-index-url"):
        kept = []
        for place in found.pop(name, "").split():
            if place.startswith("file:"):
                continue  # an index as a folder may be many gigabytes; what is needed of it, the real one has
            kept.append(stack.enter_context(_served(Path(place))) if place.startswith("/") else place)
        if kept:
            found[name] = "\n".join(kept)
    return found


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The folder's files at an address on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
