"""One request on its way through the engine.

WAITING ──admitted──▶ RUNNING ──last token──▶ (gone)
   ▲  │                 │ ▲
   │  └──▶ LOADING ─────┼─┘   its KV comes from kvferry; others run meanwhile
   └──── preempted ─────┘
"""

from dataclasses import dataclass, field
from enum import Enum, auto


class State(Enum):
    """Where a request stands."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()


@dataclass(slots=True, eq=False)
class Request:
    """Mutable, owned by the scheduler alone."""

    id: str
    prompt_tokens: int
    max_new: int
    arrived_s: float
    tokens: list[int]  # prompt, then answer
    keys: list[bytes]  # of the full blocks of `tokens`
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)  # in chain order
    num_computed: int = 0  # leading tokens whose KV is in the blocks
    num_stored: int = 0  # leading blocks that kvferry holds or was given
    own_tokens: int = 0  # found in the engine's own cache
    kvferry_tokens: int = 0  # loaded
    first_token_s: float | None = None
    aborted: bool = False

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return len(self.tokens) - self.prompt_tokens >= self.max_new


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request, with where its prompt's KV came from."""

    id: str
    tokens: tuple[int, ...]  # the answer
    prompt_tokens: int
    computed: int  # prompt tokens computed; the three kinds add up to prompt_tokens
    own: int  # prompt tokens found in the engine's own cache
    kvferry: int  # prompt tokens loaded from kvferry
    ttft_s: float  # from `add` to the first token
    total_s: float
