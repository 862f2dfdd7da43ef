"""What travels between the scheduler and its ranks in one engine step: one plan out, one result back per rank.

These are the engine's own messages, over the engine's own pipes. kvferry adds two fields to them: the
`Directive` on the way out and the `RankReport` on the way back.
"""

from dataclasses import dataclass

from kvferry.client.types import Directive, RankReport


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens [start, start + len(tokens)) of one request."""

    request: str
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]  # the request's block table
    sample: bool  # whether the last token's successor is wanted

    @property
    def end(self) -> int:
        """Tokens of the request whose KV is in its blocks after this."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler -> every rank, the same for all."""

    work: tuple[Work, ...]
    directive: Directive


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rank -> scheduler."""

    tokens: tuple[int | None, ...]  # one per work; None where none was wanted
    report: RankReport


@dataclass(frozen=True, slots=True)
class RankReady:
    """Rank -> scheduler, once: weights made, memory allocated, kvferry attached or given up for now."""

    rank: int
    pid: int
    kv_bytes: int
    attached: bool


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Rank -> scheduler, last word: what went wrong, as text."""

    rank: int
    error: str
