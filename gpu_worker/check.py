"""`python -m kvferry.gpu_worker.check GPU...`: whether these GPUs can be used here, as one line of JSON.

    {"gpus": [{"uuid": ..., "name": ..., "numa_node": ..., "driver": ...}, ...]}      in the order asked for
    {"code": ..., "text": ..., "fix": ...}                                            what is wrong, and what to do

A process of its own, because whoever has started the driver holds on to GPUs until it ends, and the launcher
lives long and starts others. Opens no context and takes no GPU memory.
"""

import json
import sys
from typing import Any

from kvferry.cuda.driver import Driver
from kvferry.gpu_worker.devices.cuda_gpu import check_usable, find
from kvferry.proto.errors import ConfigError


def look(names: list[str]) -> list[dict[str, Any]]:
    """Each GPU by its UUID. ConfigError if one is not there, may not be used, or two names are one GPU."""
    driver = Driver.load()
    gpus = [find(driver, name) for name in names]
    for rank, gpu in enumerate(gpus):
        check_usable(gpu)
        if gpu in gpus[:rank]:
            raise ConfigError(
                "settings.devices",
                f"{names[rank]} and {names[gpus.index(gpu)]} are one GPU, {gpu.uuid}",
                "name a GPU of its own for each rank",
            )
    return [{"uuid": g.uuid, "name": g.name, "numa_node": g.numa_node, "driver": driver.version()} for g in gpus]


def main() -> None:
    """Print the answer; the exit code says nothing."""
    try:
        answer: dict[str, Any] = {"gpus": look(sys.argv[1:])}
    except ConfigError as error:
        answer = {"code": error.code, "text": error.text, "fix": error.fix}
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main()
