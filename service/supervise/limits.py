"""What this process may have at most: where the system gives no more, the limit is named, and not only the call.

`kvferry up` asks here with whatever the system refused it. Anything else than descriptors and memory is none of ours.
"""

import errno
import resource
from typing import Final

from kvferry.proto.errors import ConfigError
from kvferry.units import counted, format_bytes

NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
BASE_FILES: Final = 64  # descriptors of the process that needs most, the daemon, with a few engines
RANK_FILES: Final = 16  # and for each rank: its listener, workers and spares with their channels, their links
BASE_BYTES: Final = 1 << 30  # of addresses: the libraries, and the stacks and arenas of threads


def lacking(error: BaseException, tp_size: int, rank_bytes: int) -> ConfigError | None:
    """The limit that `error` ran into, with what there is, what is needed and the fix; None if it is no such error."""
    code = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    if code == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return ConfigError(
            "limit.files",
            f"this process may open {counted(most, 'file')} at once, and has no more; a sidecar of"
            f" {counted(tp_size, 'rank')} needs about {BASE_FILES + RANK_FILES * tp_size}",
            "raise the limit: `ulimit -n 1024`; systemd: LimitNOFILE=; docker: --ulimit nofile=",
        )
    if code == errno.ENFILE:
        return ConfigError(
            "limit.files",
            "all files that this machine may open at once are open (fs.file-max)",
            "end what holds them, or raise it: `sysctl fs.file-max`",
        )
    if code == errno.ENOMEM:
        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        needs = format_bytes(rank_bytes + BASE_BYTES)
        if most == resource.RLIM_INFINITY:
            return ConfigError(
                "limit.memory",
                f"the system gives this process no more memory; its addresses are not limited, it needs about {needs}",
                "give less --host-memory, or raise the container's memory limit",
            )
        return ConfigError(
            "limit.memory",
            f"this process may have {format_bytes(most)} of addresses, and gets no more memory; it needs about {needs}",
            "raise the limit (`ulimit -v unlimited`; systemd: LimitAS=infinity), or give less --host-memory",
        )
    return None
