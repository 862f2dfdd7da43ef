"""The run directory: where an engine and a sidecar of the same user find each other.

    daemon.sock     ZeroMQ ROUTER of the daemon: clients, workers and the CLI
    tether.sock     stream listener of the daemon: one connection beside each link, its end is a notice
    rank-<r>.sock   stream listener of rank r, shared by the workers of that rank
    kvferry.lock    locked by `kvferry up` for its life; holds its pid

The directory is private to its user (0700). Pool files lie in /dev/shm under the instance's name, which
is made of the directory's path and so stable over restarts.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.proto.errors import ConfigError

# sockaddr_un.sun_path holds 108 bytes with its end mark; the longest name below is added to the directory.
MAX_SOCKET_PATH: Final = 107
LONGEST_NAME: Final = len("/rank-63.sock")
SHM: Final = Path("/dev/shm")


def default_run_dir() -> Path:
    """`$KVFERRY_RUN_DIR`, else `$XDG_RUNTIME_DIR/kvferry`, else `kvferry-<uid>` in the temporary directory."""
    if named := os.environ.get("KVFERRY_RUN_DIR"):
        return Path(named)
    return _unnamed_run_dir()


def _unnamed_run_dir() -> Path:
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "kvferry"
    return Path(tempfile.gettempdir()) / f"kvferry-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The names within one run directory. Nothing is created here."""

    path: Path

    @classmethod
    def at(cls, path: str | Path | None = None) -> "RunDir":
        """The run directory at `path`, or the default one; ConfigError if it is "", or its sockets' names too long."""
        if path == "":  # would be the working directory, which nobody means by it
            raise ConfigError(
                "run_dir.empty",
                "the run dir '' is no directory",
                "name one, or leave it out for $KVFERRY_RUN_DIR or the default",
            )
        resolved = Path(path if path is not None else default_run_dir()).expanduser().absolute()
        longest = len(os.fsencode(resolved)) + LONGEST_NAME
        if longest > MAX_SOCKET_PATH:
            raise ConfigError(
                "run_dir.length",
                f"socket paths in {resolved} would have {longest} bytes; a unix socket allows {MAX_SOCKET_PATH}",
                f"choose a run dir of at most {MAX_SOCKET_PATH - LONGEST_NAME} bytes",
            )
        return cls(resolved)

    @property
    def is_default(self) -> bool:
        """Whether it is the one that kvferry makes where none is named."""
        return self.path == _unnamed_run_dir().absolute()

    @property
    def daemon(self) -> Path:
        return self.path / "daemon.sock"

    @property
    def daemon_endpoint(self) -> str:
        return f"ipc://{self.daemon}"

    @property
    def tether(self) -> Path:
        return self.path / "tether.sock"

    @property
    def lock(self) -> Path:
        return self.path / "kvferry.lock"

    def rank(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.sock"

    @property
    def instance(self) -> str:
        """This sidecar's name in places that all users share."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:10]

    def pool(self, rank: int) -> Path:
        """Pool file of one rank."""
        return SHM / f"kvferry-{self.instance}-r{rank}"

    @property
    def table(self) -> Path:
        """Slot table file."""
        return SHM / f"kvferry-{self.instance}-table"
