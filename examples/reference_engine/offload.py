"""Attaching a scheduler to kvferry: every call an engine's scheduler makes, in one file. READ THIS FIRST.

What the scheduler does                      what it says to kvferry                  method here
─────────────────────────────────────────    ─────────────────────────────────────    ─────────────
a request arrives                            lookup(request, keys)                    arrived
it is about to be admitted                   hits(request): leading blocks held       held_blocks
it takes blocks for new content              written(blocks): they change owner       blocks_taken
it wants blocks filled instead of computed   load(request, keys, blocks) -> ticket    load
its next forward fills blocks to the brim    store(request, keys, blocks)             store
all ranks said how a load ended              load_ended(ticket, ok)                   load_ended
a request finishes, is aborted, preempted    finish / abort / preempt                 finished ...
the step is scheduled                        end_step() -> Directive                  end_step

The Directive goes to every rank along with the engine's own plan; `rank.py` shows what a rank does with it.

Three rules an engine must keep, and they are all:

1. Blocks of a load belong to it until every rank has said a word on it (`Scheduler._hear_loads`), whatever
   becomes of the request meanwhile.
2. `written` is told of every block that gets new content, in the step in which it is given, before `end_step`.
   A block may be given away while a store still reads it: that store then is never published.
3. A load that did not end well on every rank is computed instead.

None of these calls waits (`hits` at most for what is left of 2 ms per step) and none raises when the sidecar is
slow, gone or was never there: then nothing hits and the engine is what it was without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.client.types import Directive
from reference_engine.request import Request

if TYPE_CHECKING:
    from kvferry.client import Client


class Offload:
    """The scheduler's side of kvferry; with `client` None an engine without it, by the same calls."""

    def __init__(self, client: Client | None) -> None:
        self.client = client
        self._steps = 0

    def arrived(self, request: Request) -> None:
        """Ask how much of the prompt is held. Sent at once, so that the answer is there when it is needed."""
        if self.client:
            self.client.lookup(request.id, request.keys)

    def held_blocks(self, request: Request) -> int | None:
        """How many leading blocks kvferry holds; None: not known yet, ask in the next step.

        None comes for a bounded time only (the client's `patience_s`), then the answer is 0. (`Hits.next` tells
        whether a store of the next key is on its way; this engine rather computes than waits for it.)
        """
        if not self.client:
            return 0
        hits = self.client.hits(request.id)
        return hits.count if hits.ready else None

    def blocks_taken(self, blocks: Sequence[int]) -> None:
        """These blocks get new content from this step on. Stores that still read them are revoked: the
        engine never waits. (An engine that would rather wait looks at the tickets that `written` returns.)
        """
        if self.client and blocks:
            self.client.written(blocks)

    def load(self, request: Request, begin: int, end: int) -> int:
        """Fill the request's blocks [begin, end) from kvferry; the load's ticket."""
        assert self.client is not None  # without a client nothing is held, so nobody loads
        return self.client.load(request.id, request.keys[begin:end], request.blocks[begin:end])

    def nothing_to_load(self, request: Request) -> None:
        """The hits, if any, are not needed: give their lease back."""
        if self.client:
            self.client.forget(request.id)

    def store(self, request: Request, begin: int, end: int) -> bool:
        """Keep the request's blocks [begin, end), which this step's forward completes. False: not taken now."""
        if not self.client or begin >= end:
            return False
        return self.client.store(request.id, request.keys[begin:end], request.blocks[begin:end]) != 0

    def load_ended(self, ticket: int, ok: bool) -> None:
        """Every rank has said its word; `ok`: all of them good."""
        if self.client:
            self.client.load_ended(ticket, ok)

    def cancel(self, ticket: int) -> None:
        """Nobody wants this load any more. Its blocks stay its own until every rank's word has come."""
        if self.client:
            self.client.cancel(ticket)

    def finished(self, request: Request) -> None:
        """The answer is complete. Its stores go on by themselves."""
        if self.client:
            self.client.finish(request.id)

    def aborted(self, request: Request) -> None:
        """The caller went away."""
        if self.client:
            self.client.abort(request.id)

    def preempted(self, request: Request) -> None:
        """Its blocks are taken from it; it starts over, so ask again what is held."""
        if self.client:
            self.client.preempt(request.id)
            self.client.lookup(request.id, request.keys)

    def end_step(self) -> Directive:
        """What the ranks must do in this step."""
        self._steps += 1
        if not self.client:
            return Directive(self._steps)
        self.client.poll()  # which stores ended: this engine does not need to know
        return self.client.end_step()

    def close(self) -> None:
        """Say goodbye."""
        if self.client:
            self.client.close()
