"""The ways in which vLLM lays KV out in memory, recorded as strides; no vLLM needed.

Logical shape of each layer's view is (blocks, heads, tokens, content), in one buffer for all layers. The name of
a layout is the physical order of its dimensions, outermost first: LBHNC is layers, blocks, heads, tokens, content.
Small sizes: what counts is where each byte lies.
"""

from dataclasses import dataclass

import numpy as np

from kvferry.proto.layout import Group, Region

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 40  # content in bytes: 20 elements of two bytes


@dataclass(frozen=True)
class Recorded:
    """One layout: the byte strides of (layer, block, head, token, content) and the sizes of the dimensions."""

    name: str
    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]
    start: int = 0

    @property
    def nbytes(self) -> int:
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.start + last + 1

    def block_bytes(self, block: int) -> np.ndarray:
        """Every byte offset of a block, the layers' in order, by walking all indices: the dumb twin of regions."""
        layer, _, head, token, content = (
            np.arange(size) * stride for size, stride in zip(self.sizes, self.strides, strict=True)
        )
        offsets = (
            self.start
            + block * self.strides[1]
            + layer[:, None, None, None]
            + head[:, None, None]
            + token[:, None]
            + content
        )
        return np.sort(offsets.ravel())

    def group(self) -> Group:
        """Regions: what lies together inside a block is one run; the rest is walked."""
        offsets = self.block_bytes(0)
        cuts = np.flatnonzero(np.diff(offsets) != 1) + 1
        runs = np.split(offsets, cuts)
        regions = tuple(
            Region(handle=0, offset=int(run[0]), stride=self.strides[1], run=len(run), blocks=self.sizes[1])
            for run in runs
        )
        return Group(regions=regions, block_tokens=TOKENS)


def _dense(order: str, sizes: dict[str, int]) -> Recorded:
    strides, step = {}, 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= sizes[dimension]
    return Recorded(order, tuple(sizes[d] for d in "LBHNC"), tuple(strides[d] for d in "LBHNC"))


FULL = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
MLA = {**FULL, "H": 1, "C": 72}
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

RECORDED = [
    *(_dense(order, FULL) for order in ORDERS),
    Recorded("MLA", *(_dense("LBNHC", MLA).sizes, _dense("LBNHC", MLA).strides)),
    # A block padded to a larger stride, as states are that share a page size with attention: most of it is gap.
    Recorded("padded", (LAYERS, BLOCKS, 1, 1, 304), (BLOCKS * 512, 512, 304, 304, 1)),
    # Behind something else in the same allocation.
    Recorded("interior", _dense("LBHNC", FULL).sizes, _dense("LBHNC", FULL).strides, start=129),
]
