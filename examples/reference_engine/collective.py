"""The sum over ranks, on plain pipes: no ports, no threads, no spinning, and a dead peer is an EOF.

    rank 1 ──partial──▶            ──sum──▶ rank 1
    rank 2 ──partial──▶   rank 0   ──sum──▶ rank 2

A real engine uses NCCL or gloo here; nothing of kvferry depends on it.
"""

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor


class StarSum:
    """One rank's end. Every rank gets the same bits: rank 0 adds in rank order and sends the sum back."""

    def __init__(self, rank: int, peers: Sequence[Connection]) -> None:
        self._is_hub = rank == 0
        self._peers = peers  # of rank 0: all others in rank order; of the others: rank 0 alone

    def __call__(self, part: Tensor) -> Tensor:
        """The sum of `part` over all ranks. EOFError or OSError if a peer is gone."""
        if not self._peers:
            return part
        part = part.contiguous()
        if not self._is_hub:
            self._peers[0].send_bytes(_view(part))
        other = torch.empty_like(part)
        if not self._is_hub:
            self._peers[0].recv_bytes_into(_view(other))
            return other
        for peer in self._peers:
            peer.recv_bytes_into(_view(other))
            part = part + other
        for peer in self._peers:
            peer.send_bytes(_view(part))
        return part


def _view(tensor: Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")
