"""One seed, one voyage: draw a world, run it, let it drain, judge it.

    draw ─▶ sail (faults on, workload on) ─▶ calm (faults off, requests finish) ─▶ rest (I6 must come to hold)

Everything random comes from the seed through one generator per party, so that a change in how often one
party draws does not reshuffle the others.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.client.core import ClientSettings
from kvferry.proto import page
from kvferry.proto.layout import Group, Handle, Layout, Region
from kvferry.scheduler_daemon.core import api as daemon_api

from .clock import MS, US, Clock, S
from .echo import Echo
from .engine import Engine, Habits, Keys, Request, Work
from .ledger import Broken, Ledger
from .log import Log
from .memory import PoolFile, Stamps
from .net import LinkEnd, Network, StreamEnd, Weather
from .ranks import Rank
from .sidecar import Daemon, Worker

PAYLOAD_BYTES = 4096
BLOCK_TOKENS = 16
# From a quiet socket to a process that seldom gets its turn.
DELAYS_NS = ((20 * US, 300 * US), (20 * US, 3 * MS), (1 * MS, 15 * MS), (10 * MS, 50 * MS))
# Simulated time within which everything must have come to an end once the faults have stopped.
CALM_NS = 30 * S
REST_NS = 8 * S


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a voyage."""

    seed: int
    failure: str  # "" if all promises held
    num_events: int
    tally: dict[str, int]
    lines: list[str]
    digest: str


class Voyage:
    """A world drawn from a seed."""

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        self.seed = seed
        self.clock = Clock()
        self.log = Log(self.clock, keep_log)
        self._rng = rng = random.Random(seed)
        self.world_size = rng.choices((2, 3, 4, 6, 8), (50, 20, 18, 6, 6))[0]
        num_engines = rng.choices((1, 2, 3), (40, 45, 15))[0]
        self.num_steps = max(8, 85 // (self.world_size * num_engines))
        self.ring_slots = rng.choice((256, 256, 256, 3))  # of the shared pages' revokes: a short one overruns
        self.num_slots = rng.choice((4, 6, 8, 12, 20))
        self.stamps = Stamps()
        self.keys = Keys()
        self.talks: list[list[bytes]] = [[] for _ in range(rng.randrange(1, 4))]
        self.weather = self._draw_weather()
        self.net = Network(self.clock, self._fork(), self.weather)
        self.pools = [PoolFile(self.num_slots) for _ in range(self.world_size)]
        self.ledger = Ledger(self.stamps, self.pools)
        self._echo_share = echo = rng.choice((0.0, 0.0, 0.05, 0.3))
        self.daemon = Daemon(
            self.clock, self.log, self.ledger, self._draw_daemon(), Echo(self._fork(), echo), self._kill
        )
        self.workers: list[Worker] = []
        self.ranks: dict[str, list[Rank]] = {}
        self.engines: list[Engine] = []
        worker_settings, copier = self._draw_worker()
        for number in range(num_engines):
            self._launch(f"engine{number}", worker_settings, copier, echo)

    # ---- drawing ----------------------------------------------------------------------------------------

    def _fork(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))

    def _draw_weather(self) -> Weather:
        rng = self._rng
        if rng.random() < 0.2:
            return Weather()
        return Weather(
            drop=rng.choice((0.0, 0.01, 0.05, 0.15)),
            double=rng.choice((0.0, 0.05, 0.2)),
            linger=rng.choice((0.0, 0.01, 0.05)),
            swap=rng.choice((0.0, 0.05, 0.3)),
            delays_ns=tuple(rng.sample(DELAYS_NS, rng.randrange(1, 4))),
        )

    def _draw_daemon(self) -> daemon_api.CoreSettings:
        rng = self._rng
        block = PAYLOAD_BYTES * self.world_size
        return daemon_api.CoreSettings(
            boot=rng.getrandbits(63) | 1,
            tp_size=self.world_size,
            lease_ns=rng.choice((30 * MS, 300 * MS, 10 * S)),
            lease_share=rng.choice((0.5, 0.5, 1.0, 0.0)),
            job_ns=rng.choice((20 * MS, 100 * MS, 3 * S)),
            grace_ns=10 * S,
            max_in_flight_bytes=rng.choice((2 * block, 6 * block, 1 << 30)),
        )

    def _draw_worker(self) -> tuple[dict[str, Any], dict[str, Any]]:
        rng = self._rng
        core = {
            "batch_bytes": PAYLOAD_BYTES * rng.choice((1, 2, 8)),
            "batches_in_flight": rng.choice((1, 2)),
            "begin_ns": rng.choice((20 * MS, 2 * S)),
            "unbegun_ns": rng.choice((50 * MS, 3 * S)),
            "mark_ns": rng.choice((50 * MS, 3 * S)),
            "mark_poll_ns": 2 * MS,
        }
        copier = {
            "slow_ns": rng.choice((100 * US, 2 * MS, 2 * MS, 30 * MS)),
            "fail": rng.choice((0.0, 0.0, 0.0, 0.03)),
        }
        return core, copier

    def _draw_habits(self) -> Habits:
        rng = self._rng
        return Habits(
            num_blocks=rng.choice((8, 12, 16)),
            depth=rng.choice((1, 2, 2, 3)),
            gap_ns=rng.choice(((50 * US, 1 * MS), (1 * MS, 10 * MS))),
            p_store=rng.choice((0.5, 1.0)),
            p_wait=rng.choice((0.0, 0.5, 1.0)),
            p_zero=rng.choice((0.0, 0.5)),
            p_abort=rng.choice((0.0, 0.05, 0.15)),
            p_preempt=rng.choice((0.0, 0.05, 0.15)),
            p_rotate=rng.choice((0.0, 0.0, 0.03)),
            p_cancel=rng.choice((0.0, 0.0, 0.1)),
            whole_chain=rng.random() < 0.5,
            waits=rng.random() < 0.7,
            reuses_newest=rng.random() < 0.5,
            has_cache=rng.random() < 0.4,
            tells_load_blocks=rng.random() < 0.5,
        )

    def _draw_request(self, engine: Engine, step: int) -> Request | None:
        """The shared workload: conversations that grow turn by turn, at whichever engine."""
        rng = self._rng
        if step >= self.num_steps:
            engine.workload_over = True
            return None
        if rng.random() > 0.5 or len(engine.requests) > 4:
            return None
        talk = rng.choice(self.talks)
        keys = list(talk)
        most = engine.habits.num_blocks - 5
        if len(keys) > most or rng.random() < 0.1:
            keys = keys[: rng.randrange(0, 3)]
        for _ in range(max(2 - len(keys), rng.randrange(1, 3))):
            keys.append(self.keys.child(keys[-1] if keys else b"", rng.randrange(2)))
        prompt = len(keys)
        for _ in range(rng.randrange(0, 3)):
            keys.append(self.keys.child(keys[-1], rng.randrange(2)))
        return Request(f"{engine.name}.{step}", keys, prompt, talk)

    # ---- launching --------------------------------------------------------------------------------------

    def _launch(self, name: str, worker_settings: dict[str, Any], copier: dict[str, Any], echo: float) -> None:
        rng = self._rng
        habits = self._draw_habits()
        facts = {"model": rng.choice(("a", "a", "b"))}
        salt = rng.choice((b"", b"", b"1"))
        is_stream = rng.random() < 0.5
        forward_ns = rng.choice(((100 * US, 1 * MS), (1 * MS, 12 * MS)))
        load_timeout_ns = rng.choice((20 * MS, 5 * S, 5 * S))
        self.ranks[name] = []
        engine: list[Engine] = []
        layout = Layout(
            handles=(Handle(kind="shm_fd", nbytes=habits.num_blocks * PAYLOAD_BYTES),),
            groups=(
                Group(
                    regions=(
                        Region(handle=0, offset=0, stride=PAYLOAD_BYTES, run=PAYLOAD_BYTES, blocks=habits.num_blocks),
                    ),
                    block_tokens=BLOCK_TOKENS,
                ),
            ),
        )
        for number in range(self.world_size):
            rank = Rank(
                f"{name}.rank{number}",
                number,
                self.clock,
                self.log,
                self._fork(),
                self.stamps,
                self.ledger,
                habits.num_blocks,
                is_stream,
                forward_ns,
                load_timeout_ns,
                lambda rank, step, report: engine[0].on_report(rank, step, report),
            )
            worker = Worker(
                rng.getrandbits(63) | 1,
                number,
                self.clock,
                self.log,
                self.net,
                self._fork(),
                self.ledger,
                self.pools[number],
                self.daemon,
                worker_settings,
                copier,
                Echo(self._fork(), echo),
            )
            rank.worker, worker.side = worker, rank
            rank.tether, worker.tether = StreamEnd.pair(self.net, self._fork(), rank.from_worker, worker.from_rank)
            self.ranks[name].append(rank)
            self.workers.append(worker)
            self.clock.after(rng.randrange(1, 5 * MS), rank.register, name, self.world_size, layout, facts)
        self.clock.after(rng.randrange(1, 5 * MS), lambda: engine.append(self._start_engine(name, habits, facts, salt)))

    def _start_engine(self, name: str, habits: Habits, facts: dict[str, str], salt: bytes) -> Engine:
        ranks = self.ranks[name]

        def dispatch(work: Work) -> None:
            for rank in ranks:
                rank.send(work)

        def connect(on_message: Callable[[Any], None]) -> LinkEnd:
            link = self._rng.getrandbits(63) | 1
            near, far = LinkEnd.pair(self.net, link, on_message, lambda message: self.daemon.hear(link, message))
            self.daemon.accept(far)
            return near

        engine = Engine(
            name,
            self.clock,
            self.log,
            self._fork(),
            ClientSettings(
                engine_id=name,
                world_size=self.world_size,
                key_bytes=Keys.WIDTH,
                num_blocks=habits.num_blocks,
                block_tokens=BLOCK_TOKENS,
                facts=facts,
                salt=salt,
                patience_ns=self._rng.choice((2 * MS, 20 * MS)),
            ),
            habits,
            dispatch,
            self._draw_request,
            connect,
            Echo(self._fork(), self._echo_share),
        )
        self.engines.append(engine)
        return engine

    # ---- faults ---------------------------------------------------------------------------------------

    def _kill(self, number: int) -> None:
        """The daemon wants a worker dead. In these waters every worker speaks, so this is a failure."""
        raise Broken(f"the daemon kills worker {number:x}, which was owing nothing for long")

    # ---- sailing --------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """The whole voyage."""
        failure = ""
        ring = page.REVOKE_SLOTS
        try:
            page.REVOKE_SLOTS = self.ring_slots
            self._sail()
        except Broken as broken:
            failure = str(broken)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            page.REVOKE_SLOTS = ring
        if failure:
            self.log("voyage", "FAILED {}", failure)
        return Outcome(self.seed, failure, self.clock.num_run, self._tally(), self.log.lines, self.log.digest())

    def _sail(self) -> None:
        clock = self.clock
        self._until(lambda: bool(self.engines) and all(engine.workload_over for engine in self.engines), CALM_NS)
        self.weather.calm()
        self.log("voyage", "calm")
        self._until(lambda: all(engine.idle for engine in self.engines), CALM_NS)
        self.log("voyage", "resting")
        ends = clock.now_ns + REST_NS
        while True:
            try:
                self._check_rest()
                break
            except Broken:
                if clock.now_ns > ends:
                    raise
            stop = clock.now_ns + 100 * MS
            while clock.now_ns < stop:
                if not clock.run_one():
                    clock.now_ns = stop
        self.ledger.check_ready()

    def _until(self, happened: Callable[[], bool], bound_ns: int) -> None:
        ends = self.clock.now_ns + bound_ns
        run_one = self.clock.run_one
        while not happened():
            if not run_one():
                self.clock.now_ns = ends + 1  # nothing will ever happen again
            if self.clock.now_ns > ends:
                waiting = [f"{r.name} {r.state}" for e in self.engines for r in [*e.requests, *e.zombies]]
                raise Broken(
                    f"liveness: after {bound_ns / S:.0f} s still {waiting} {[e.core.describe() for e in self.engines]}"
                )

    def _check_rest(self) -> None:
        self.ledger.check_rest()
        for engine in self.engines:
            engine.check_rest()
        for ranks in self.ranks.values():
            for rank in ranks:
                rank.check_rest()
        for worker in self.workers:
            worker.check_rest()
            if worker.link.link.in_flight:
                raise Broken(f"I6: {worker.name}'s link has unacknowledged messages")
        self.daemon.check_rest()

    def _tally(self) -> dict[str, int]:
        engines = self.engines
        return {
            "steps": self.daemon.steps,
            "frames": self.net.frames,
            "dropped": self.net.dropped,
            "jobs_ok": self.ledger.ended_ok,
            "jobs_failed": self.ledger.ended_badly,
            "refusals": self.ledger.refusals,
            "hits": self.ledger.hits,
            "done": sum(engine.num_done for engine in engines),
            "loads_ok": sum(engine.num_loaded for engine in engines),
            "loads_failed": sum(engine.num_failed_loads for engine in engines),
            "revokes": sum(engine.core.counters.revokes for engine in engines),
        }


def sail(seed: int, *, keep_log: bool = False) -> Outcome:
    """Run one seed."""
    return Voyage(seed, keep_log=keep_log).run()
