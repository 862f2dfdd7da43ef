"""Work without end for played engines, and the book of what each slot and each block must hold then.

    plan + begin ─▶ worker ─▶ words (rank), dones (daemon)
         └──────────── book ◀──┘     a slot is known only while both said OK; a load's bytes are compared

Blocks and slots of jobs that run are used by no other job, as the daemon and the engine would have it.
"""

import random

import numpy as np

from kvferry.proto.columns import u8, u32, u64
from kvferry.proto.hot import Done
from kvferry.proto.ids import JobId, job_is_of_boot
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import Words
from tests.worker.sidecar import FakeRank, Sidecar, rows_of, wait_for


class Job:
    """One ticket that was begun."""

    def __init__(self, kind: Kind, blocks: list[int], slots: list[int], wanted: list[np.ndarray]) -> None:
        self.kind, self.blocks, self.slots, self.wanted = kind, blocks, slots, wanted
        self.word: Outcome | None = None
        self.done: Outcome | None = None


class Traffic:
    """One engine rank's work with one worker."""

    def __init__(self, sidecar: Sidecar, rank: FakeRank, link: int, num_slots: int, seed: int = 0) -> None:
        self.sidecar, self.rank, self.link = sidecar, rank, link
        self.random = random.Random(seed)
        self.num_slots = num_slots
        self.known: dict[int, tuple[int, np.ndarray]] = {}  # slot -> generation, bytes
        self.generation = 0
        self.ticket = 0
        self.running: dict[int, Job] = {}
        self.ended = dict.fromkeys(Outcome, 0)
        self.loads_ok = 0
        self.stale: set[int] = set()  # tickets whose daemon is gone: no done will come

    def begin_some(self) -> None:
        """Plan and begin up to three more jobs; with its marks either given or two begins late."""
        tickets = []
        for _ in range(3):
            blocks = self._free(self.rank.num_blocks, {b for job in self.running.values() for b in job.blocks})
            slots = self._free(self.num_slots, {s for job in self.running.values() for s in job.slots})
            known = [slot for slot in slots if slot in self.known]
            count = self.random.randint(1, 2)
            if known and self.random.random() < 0.5:
                made = self._load(blocks[:count], known[:count])
            else:
                made = self._store(blocks[:count], slots[:count])
            if made:
                tickets.append(self.ticket)
        if tickets:
            self.rank.begin(*tickets, ahead=self.random.randint(0, 1))

    def _free(self, count: int, taken: set[int]) -> list[int]:
        free = [number for number in range(count) if number not in taken]
        self.random.shuffle(free)
        return free

    def _load(self, blocks: list[int], slots: list[int]) -> bool:
        # A plan of the test names one generation.
        generation = self.known[slots[0]][0]
        slots = [slot for slot in slots if self.known[slot][0] == generation][: len(blocks)]
        blocks = blocks[: len(slots)]
        if not blocks:
            return False
        for block in blocks:
            self.rank.kv[:, block] = 0
        return self._start(Kind.LOAD, blocks, slots, generation, [self.known[slot][1] for slot in slots])

    def _store(self, blocks: list[int], slots: list[int]) -> bool:
        count = min(len(blocks), len(slots))
        if not count:
            return False
        self.generation += 1
        for slot in slots[:count]:
            self.known.pop(slot, None)
        wanted = [self.rank.stamp(block, self.random.getrandbits(32)) for block in blocks[:count]]
        return self._start(Kind.STORE, blocks[:count], slots[:count], self.generation, wanted)

    def _start(self, kind: Kind, blocks: list[int], slots: list[int], generation: int, wanted: list) -> bool:
        self.ticket += 1
        self.running[self.ticket] = Job(kind, blocks, slots, wanted)
        self.running[self.ticket].generation = generation
        self.sidecar.daemon.link = self.link
        self.sidecar.plan(self.ticket, kind, blocks, slots, generation)
        return True

    # ---- what comes back ---------------------------------------------------------------------------

    def take_word(self, ticket: int, outcome: Outcome) -> None:
        """From the worker to the rank: exactly one a ticket, and the bytes are there when it says so."""
        job = self.running[ticket]
        assert job.word is None, f"a second word about ticket {ticket}"
        job.word = outcome
        if job.kind is Kind.LOAD and outcome is Outcome.OK:
            for block, wanted in zip(job.blocks, job.wanted, strict=True):
                assert np.array_equal(self.rank.kv[:, block], wanted), f"ticket {ticket}: wrong bytes"
            self.loads_ok += 1
        self._end(ticket, job)

    def take_done(self, job_id: int, outcome: Outcome) -> None:
        """From the worker to the daemon."""
        boot = self.sidecar.daemon.boot
        assert job_is_of_boot(JobId(job_id), boot), f"boot {boot} was told of job {job_id:x}"
        ticket = job_id & ((1 << 40) - 1)
        job = self.running[ticket]
        assert job.done is None and ticket not in self.stale
        job.done = outcome
        self._end(ticket, job)

    def _end(self, ticket: int, job: Job) -> None:
        if job.word is None or (job.done is None and ticket not in self.stale):
            return
        if job.done is not None:
            assert job.done is job.word
            if job.kind is Kind.STORE and job.done is Outcome.OK:
                for slot, wanted in zip(job.slots, job.wanted, strict=True):
                    self.known[slot] = (job.generation, wanted)
        self.ended[job.word] += 1
        del self.running[ticket]
        self.stale.discard(ticket)

    def listen(self) -> None:
        """Take what the rank has been told by now."""
        for words in self.rank.hear():
            assert isinstance(words, Words), words
            for ticket, outcome in rows_of(words):
                self.take_word(ticket, outcome)

    def daemon_is_gone(self) -> None:
        """No done will come for what runs; a slot that was being stored is known to nobody."""
        self.stale |= set(self.running)
        for ticket, job in list(self.running.items()):
            self._end(ticket, job)


def hear_all(daemon, traffic: list[Traffic]) -> None:
    """One turn of everybody; dones go to the engines of their links."""
    daemon.turn()
    by_link = {each.link: each for each in traffic}
    for message in [entry for entry in daemon.inbox if isinstance(entry[1], Done)]:
        daemon.inbox.remove(message)
        link, done = message
        for job, outcome in zip(u64(done.jobs).tolist(), u8(done.outcomes).tolist(), strict=True):
            by_link[link].take_done(job, Outcome(outcome))
        assert len(u32(done.copy_us)) == len(u64(done.jobs))
    for each in traffic:
        each.listen()


def bring_to_rest(daemon, traffic: list[Traffic]) -> None:
    """Give the marks that are still awaited; every ticket gets its word."""
    for each in traffic:
        each.rank.page.signal()

    def ask():
        hear_all(daemon, traffic)
        return not any(each.running for each in traffic)

    try:
        wait_for(ask, "end of all jobs")
    except AssertionError as error:
        left = {t: (j.kind, j.word, j.done, t in each.stale) for each in traffic for t, j in each.running.items()}
        raise AssertionError(f"{error}: {left}") from None
