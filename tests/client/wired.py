"""One engine of one rank, its daemon and its worker in one process: the four real cores, wired back to back.

Bytes are numbers: block b holds `memory[b]`, slot s holds `pool[s]`. Nothing is lost and nothing overtakes;
what the network may do is the voyages' business.
"""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.client.core import ClientCore, ClientSettings
from kvferry.client.rank_core import RankCore
from kvferry.client.types import JobEnd, LoadEnd
from kvferry.gpu_worker import api as worker_api
from kvferry.gpu_worker.core import WorkerCore
from kvferry.proto.codec import pack, unpack
from kvferry.proto.control import Attach, Attached, Hello
from kvferry.proto.hot import Cancel, Plan
from kvferry.proto.ids import BootId, LinkId, WorkerId
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind
from kvferry.proto.page import PageReader, PageWriter
from kvferry.proto.tether import Begin, CancelTickets
from kvferry.scheduler_daemon.core import api as daemon_api
from kvferry.scheduler_daemon.core.core import Core
from tests.client.fakes import KEY_BYTES, MS, chain

CLIENT, WORKER = LinkId(11), LinkId(22)
WORKER_ID = WorkerId(7)
BLOCK_BYTES = 4096
NUM_BLOCKS = 64


class Headers:
    def __init__(self, num_slots: int) -> None:
        self.words = np.zeros((2, num_slots), dtype=np.uint64)

    def open(self, slots: Any, generations: Any) -> None:
        self.words[0][slots] = generations

    def close(self, slots: Any, generations: Any) -> None:
        self.words[1][slots] = generations

    def torn(self, slots: Any, generations: Any) -> npt.NDArray[np.uint32]:
        return np.flatnonzero((self.words[:, slots] != generations).any(axis=0)).astype(np.uint32)


class Wired:
    """See the module's text. `copies_run` False: a slow rank, whose copies begin and do not end."""

    def __init__(self, num_slots: int = 8, **settings: Any) -> None:
        self.now_ns = 1_000 * MS
        self.copies_run = True
        self.memory = np.zeros(NUM_BLOCKS, dtype=np.int64)
        self.pool = np.zeros(num_slots, dtype=np.int64)
        self.client = ClientCore(ClientSettings("engine", 1, KEY_BYTES, NUM_BLOCKS, 16))
        self.rank = RankCore(5_000 * MS)
        self.daemon = Core(daemon_api.CoreSettings(boot=BootId(1), tp_size=1, **settings))
        page = memoryview(bytearray(PAGE_BYTES))
        self.page = PageWriter(page)
        bounds = worker_api.WorkerSettings(payload_bytes=(BLOCK_BYTES,), num_blocks=NUM_BLOCKS, num_slots=num_slots)
        self.headers = Headers(num_slots)
        self.worker = WorkerCore(bounds, PageReader(page), self.headers)
        self.ends: list[JobEnd] = []
        self.load_ends: list[LoadEnd] = []
        self._events: deque[tuple[str, Any]] = deque()
        self._waiting: list[worker_api.SubmitCopy] = []
        self._say(WORKER, Hello(role="worker"))
        self._say(WORKER, self._attach(num_slots))
        self.client.attach(self.now_ns)
        self.run()
        assert self.client.attached

    def later(self, ms: float) -> "Wired":
        self.now_ns += int(ms * MS)
        return self

    def run(self) -> "Wired":
        """Until nothing moves any more at this moment."""
        self.client.tick(self.now_ns)
        self.rank.tick(self.now_ns)
        self._events.append(("daemon", daemon_api.TimePassed()))
        self._events.append(("worker", worker_api.TimePassed()))
        while self._pump():
            pass
        self.daemon.check()
        self.ends += self.client.poll()
        for end in self.rank.poll().loads:
            self.load_ends.append(end)
            self.client.load_ended(end.ticket, end.ok)
        self.ends += self.client.poll()
        return self

    def step(self) -> "Wired":
        """The engine ends its step, and its rank obeys: revokes, loads, forward, stores."""
        directive = self.client.end_step(self.now_ns)
        self.page.revoke(directive.revokes)
        self.rank.begin_loads(directive, self.page.signal(), self.now_ns)
        self.rank.begin_stores(directive, self.page.signal())
        return self.run()

    def finish_copies(self) -> "Wired":
        """The slow rank's copies end now."""
        self.copies_run = True
        waiting, self._waiting = self._waiting, []
        for copy in waiting:
            self._copy(copy)
        return self.run()

    # ---- an engine's usual deeds ---------------------------------------------------------------------

    def store(self, request: str, numbers: list[int], blocks: list[int]) -> int:
        """Fill blocks with what the keys mean, and store them."""
        self.client.written(blocks)
        self.memory[blocks] = numbers
        return self.client.store(request, chain(*numbers), blocks, self.now_ns)

    def hits(self, request: str, numbers: list[int]) -> int:
        """Look up and ask."""
        self.client.lookup(request, chain(*numbers), self.now_ns)
        self.run()
        return self.client.hits(request, self.now_ns).count

    def load(self, request: str, numbers: list[int], blocks: list[int]) -> int:
        return self.client.load(request, chain(*numbers), blocks, self.now_ns)

    def end_of(self, ticket: int) -> JobEnd:
        """The one end of a ticket."""
        (end,) = [end for end in self.ends if end.ticket == ticket]
        return end

    # ---- wires ---------------------------------------------------------------------------------------

    def _pump(self) -> bool:
        for message in self.client.outgoing():
            self._say(CLIENT, message)
        for message in self.rank.outgoing():
            kinds: dict[type[Any], Any] = {Begin: worker_api.Begun, CancelTickets: worker_api.TicketsCancelled}
            self._events.append(("worker", kinds[type(message)](unpack(pack(message)))))
        if not self._events:
            return False
        whom, event = self._events.popleft()
        if whom == "worker":
            for action in self.worker.step(event, self.now_ns):
                self._do_for_worker(action)
        else:
            for action in self.daemon.step(event, self.now_ns):
                if isinstance(action, daemon_api.Send):
                    self._deliver(action)
        return True

    def _say(self, link: LinkId, message: Any) -> None:
        self._events.append(("daemon", daemon_api.Received(link, unpack(pack(message)))))

    def _deliver(self, action: daemon_api.Send) -> None:
        message = unpack(pack(action.message))
        if action.link == CLIENT:
            self.client.on_message(message, self.now_ns)
        elif isinstance(message, Attached):
            self.rank.attach(WORKER_ID)
        elif isinstance(message, Plan):
            self._events.append(("worker", worker_api.Planned(message)))
        elif isinstance(message, Cancel):
            self._events.append(("worker", worker_api.JobsCancelled(message)))

    def _do_for_worker(self, action: worker_api.Action) -> None:
        if isinstance(action, worker_api.TellDaemon):
            self._say(WORKER, action.message)
        elif isinstance(action, worker_api.TellRank):
            self.rank.on_message(unpack(pack(action.message)), WORKER_ID)
        elif self.copies_run:
            self._copy(action)
        else:
            self._waiting.append(action)

    def _copy(self, copy: worker_api.SubmitCopy) -> None:
        if copy.kind is Kind.STORE:
            self.pool[copy.slots] = self.memory[copy.blocks]
        else:
            self.memory[copy.blocks] = self.pool[copy.slots]
        self._events.append(("worker", worker_api.Copied(copy.token, True)))

    def _attach(self, num_slots: int) -> Attach:
        return Attach(
            worker=WORKER_ID,
            engine_id="engine",
            rank=0,
            world_size=1,
            layout_digest="bytes",
            payload_bytes=(BLOCK_BYTES,),
            block_tokens=(16,),
            num_blocks=NUM_BLOCKS,
            pool_bytes=num_slots * 2 * BLOCK_BYTES,
        )
