"""What an engine works on: a tree of keys, requests that grow along it, and the work of one step. And its habits."""

from dataclasses import dataclass, field

from kvferry.client.types import Directive

from .books import Meaning

WAITING, LOADING, RUNNING, DONE = "waiting", "loading", "running", "done"


class Keys:
    """The tree of all prefixes: a key names the whole path to it, as a chained hash would."""

    WIDTH = 8

    def __init__(self) -> None:
        self._children: dict[tuple[bytes, int], bytes] = {}

    def child(self, parent: bytes, token: int) -> bytes:
        """The key of `parent`'s prefix with one more block."""
        found = self._children.get((parent, token))
        if found is None:
            found = self._children[parent, token] = (len(self._children) + 1).to_bytes(self.WIDTH, "big")
        return found


@dataclass(slots=True)
class Request:
    """One request: the keys of its prompt and of what it will say."""

    name: str
    keys: list[bytes]
    num_prompt: int
    talk: list[bytes]  # the conversation it belongs to
    state: str = WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading blocks that the engine believes valid
    stored: int = 0  # leading blocks that need no store
    asked_from: int = -1  # first key of the lookup that runs; -1: none
    patience: int = 0
    ticket: int = 0
    load_blocks: list[int] = field(default_factory=list)
    load_to: int = 0
    is_void: bool = False  # aborted or rotated while loading: its load's result counts for nothing
    last_step: int = 0
    needs_all: bool = False  # was preempted: comes back only when all its blocks are free, or two would thrash


@dataclass(frozen=True, slots=True)
class Part:
    """What one request does in a step: the (block, key) pairs it reads and those it computes."""

    reads: list[tuple[int, bytes]]
    writes: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Work:
    """What one step asks of every rank."""

    step: int
    meaning: Meaning
    zeros: tuple[int, ...]
    reads: tuple[tuple[int, bytes], ...]
    writes: tuple[tuple[int, bytes], ...]
    loading: dict[int, tuple[Meaning, tuple[tuple[int, bytes], ...]]]  # ticket -> what its blocks must hold
    directive: Directive


@dataclass(slots=True)
class Habits:
    """How this engine behaves: drawn once a voyage."""

    num_blocks: int
    depth: int  # steps under way at once
    gap_ns: tuple[int, int]
    p_store: float  # of a full block being stored at once
    p_wait: float  # of passing over blocks that a store still reads
    p_zero: float
    p_abort: float
    p_preempt: float
    p_rotate: float
    p_cancel: float
    whole_chain: bool  # look up the whole prompt, or only what the own cache lacks
    waits: bool  # for all ranks to be attached before the first step
    reuses_newest: bool  # gives blocks out again that have just been freed
    has_cache: bool  # keeps computed blocks for later requests, as far as they are not given away
    tells_load_blocks: bool  # names a load's blocks in `written` too
    max_running: int = 3
