"""Memory at an address, as an array: what the runner and its children look at pools with."""

import ctypes

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def bytes_at(address: int, nbytes: int) -> Bytes:
    """A view of mapped memory; it keeps nothing alive."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memoryview(memory), dtype=np.uint8)
