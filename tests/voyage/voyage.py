"""One seed, one voyage: draw a world, run it, let it drain, judge it.

    draw ─▶ sail (faults on, workload on) ─▶ calm (faults off, requests finish) ─▶ rest (I6 must come to hold)
         ─▶ probe (whoever had something held hits it)

Everything random comes from the seed through one generator per party, so that a change in how often one
party draws does not reshuffle the others.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.client.core import ClientSettings
from kvferry.proto import page
from kvferry.proto.layout import Group, Handle, Layout, Region
from kvferry.proto.tether import RankRegister
from kvferry.scheduler_daemon.core import api as daemon_api

from .books import Broken
from .clock import MS, US, Clock, Party, S
from .echo import Echo
from .engine import Engine
from .faults import Faults
from .journal import Journal
from .ledger import Ledger
from .log import Log
from .memory import PoolFile, Stamps
from .net import LinkEnd, Network, Weather
from .ranks import Rank
from .requests import Habits, Keys, Request, Work
from .sidecar import Sidecar
from .table import TableBytes

PAYLOAD_BYTES = 4096
BLOCK_TOKENS = 16
# From a quiet socket to a process that seldom gets its turn.
DELAYS_NS = ((20 * US, 300 * US), (20 * US, 3 * MS), (1 * MS, 15 * MS), (10 * MS, 50 * MS))
# Simulated time within which everything must have come to an end once the faults have stopped.
CALM_NS = 30 * S
REST_NS = 20 * S


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a voyage."""

    seed: int
    failure: str  # "" if all promises held
    num_events: int
    tally: dict[str, int]
    lines: list[str]
    digest: str
    story: list[str] = field(default_factory=list)  # of the jobs that the failure names
    faults: tuple[str, ...] = ()  # kinds that this voyage has


class Voyage:
    """A world drawn from a seed. `is_held`: the same world, but that streaming engines hold their begins back."""

    def __init__(self, seed: int, *, keep_log: bool = False, is_held: bool = False) -> None:
        self.seed = seed
        self._is_held = is_held
        self.clock = Clock()
        self.log = Log(self.clock, keep_log)
        self._rng = rng = random.Random(seed)
        self.world_size = rng.choices((2, 3, 4, 6, 8), (50, 20, 18, 6, 6))[0]
        num_engines = rng.choices((1, 2, 3), (40, 45, 15))[0]
        self.ring_slots = rng.choice((256, 256, 256, 3))  # of the shared pages' revokes: a short one overruns
        self.num_slots = rng.choice((4, 6, 8, 12, 20))
        self.stamps = Stamps()
        self.keys = Keys()
        self.talks: list[list[bytes]] = [[] for _ in range(rng.randrange(1, 4))]
        self.weather = self._draw_weather()
        self.net = Network(self.clock, self._fork(), self.weather)
        self.pools = [PoolFile(self.num_slots) for _ in range(self.world_size)]
        self.journal = Journal(self.clock, keep_log)
        self.table = TableBytes(self.num_slots, self.world_size, PAYLOAD_BYTES)
        self.ledger = Ledger(self.stamps, self.pools, self.table, self.journal)
        self._echo_share = rng.choice((0.0, 0.0, 0.05, 0.3))
        self._clocks_differ = rng.random() < 0.5
        self.faults = Faults(self, self._fork())
        # What a crash may take away must first be there.
        steps = 36 if not self.faults.kinds else 80 if self.faults.are_restarts else 44
        self.num_steps = max(8, steps // (self.world_size * num_engines))
        self.ranks: dict[str, list[Rank]] = {}
        self.engines: list[Engine] = []
        self.num_launched = 0
        self._past: list[Engine] = []  # that have crashed
        self._launching = 0
        worker_settings, copier = self._draw_worker()
        self.sidecar = Sidecar(
            self.clock,
            self.log,
            self.net,
            self._fork(),
            self.ledger,
            self.pools,
            self.table,
            self._draw_daemon(),
            (worker_settings, copier),
            self._echo_share,
            self._draw_party,
            # Often enough that a hang is met within a voyage; without one, nobody waits for a beat.
            100 * MS if self.faults.are_stands else 1 * S,
        )
        self.sidecar.tears = rng.random() < 0.5
        # Drawn apart, so that seeds without it are what they were before there was such a fault.
        luck = random.Random(f"spares of {seed}")
        if self.faults.kinds and luck.random() < 0.3:
            self.sidecar.barren = luck.randrange(1, 9)
        luck = random.Random(f"daemons of {seed}")
        if self.faults.are_restarts and luck.random() < 0.3:
            self.sidecar.unborn = luck.randrange(1, 5)
        for _ in range(num_engines):
            self._launch()
        self.faults.begin(self.num_steps * num_engines)

    # ---- drawing ----------------------------------------------------------------------------------------

    def _fork(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))

    def _draw_party(self) -> Party:
        """A process, with a clock of its own."""
        if not self._clocks_differ:
            return Party(self.clock)
        rng = self._rng
        return Party(self.clock, rng.randrange(1_000_000 * S), rng.randrange(-50_000, 50_000))

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
            job_ns=rng.choice((20 * MS, 100 * MS, 3 * S)) if not self.faults.are_hangs else rng.choice((20, 100)) * MS,
            awaited_ns=10 * S if not self.faults.are_hangs else 300 * MS,
            grace_ns=10 * S if not self.faults.are_hangs else rng.choice((100, 300)) * MS,
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
        if engine.core.attached:
            self.faults.look()
        # Steps without a sidecar are cheap and show little: the workload goes on when it is back.
        if engine.num_served >= self.num_steps or step >= 10 * self.num_steps:
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

    def _launch(self, heir_of: Engine | None = None) -> None:
        rng = self._rng
        name = f"engine{self.num_launched}"
        self.num_launched += 1
        self._launching += 1
        if heir_of is not None:
            habits, facts, salt = heir_of.habits, dict(heir_of.settings.facts), heir_of.meaning[1]
        else:
            habits, facts = self._draw_habits(), {"model": rng.choice(("a", "a", "b"))}
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
                self._draw_party(),
                self.log,
                self._fork(),
                self.net,
                self.sidecar,
                RankRegister(engine_id=name, rank=number, world_size=self.world_size, layout=layout, facts=facts),
                self.stamps,
                self.ledger,
                habits.num_blocks,
                is_stream,
                self._is_held,
                forward_ns,
                load_timeout_ns,
                lambda rank, step, report: engine[0].party.run(engine[0].on_report, rank, step, report),
            )
            self.ranks[name].append(rank)
            rank.party.after(rng.randrange(1, 5 * MS), rank.knock)
        self.clock.after(rng.randrange(1, 5 * MS), lambda: engine.append(self._start_engine(name, habits, facts, salt)))

    def _start_engine(self, name: str, habits: Habits, facts: dict[str, str], salt: bytes) -> Engine:
        ranks = self.ranks[name]
        party = self._draw_party()

        def dispatch(work: Work) -> None:
            for rank in ranks:
                rank.send(work)

        def connect(on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> LinkEnd | None:
            return self.sidecar.connect(party, on_message, on_lost)

        engine = Engine(
            name,
            party,
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
        self._launching -= 1
        self.engines.append(engine)
        return engine

    # ---- faults ---------------------------------------------------------------------------------------

    @property
    def all_ranks(self) -> list[Rank]:
        """The ranks of all living engines."""
        return [rank for engine in self.engines for rank in self.ranks[engine.name]]

    def crash_engine(self, engine: Engine) -> None:
        """All processes of an engine are killed; another one with the same model is started in its place."""
        if engine.party.ended:
            return
        self.log("voyage", "{} is killed", engine.name)
        engine.die()
        for rank in self.ranks.pop(engine.name):
            rank.die()
        self.engines.remove(engine)
        self._past.append(engine)
        self._launching += 1
        self.clock.after(self._rng.randrange(1 * MS, 80 * MS), self._relaunch, engine)

    def _relaunch(self, engine: Engine) -> None:
        self._launching -= 1
        self._launch(engine)

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
        story: list[str] = []
        if failure:
            self.log("voyage", "FAILED {}", failure)
            story = self.journal.about(failure)
        return Outcome(
            self.seed,
            failure,
            self.clock.num_run,
            self._tally(),
            self.log.lines,
            self.log.digest(),
            story,
            tuple(self.faults.kinds),
        )

    def _sail(self) -> None:
        clock = self.clock
        self._until(lambda: self._all(lambda engine: engine.workload_over), CALM_NS)
        self.weather.calm()
        self.faults.end()
        self.log("voyage", "calm")
        # Who has nothing to do and stands still has not heard yet of what he lost.
        self._until(lambda: self._all(lambda engine: engine.idle and not engine.party.stopped), CALM_NS)
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
        self._probe()

    def _all(self, holds: Callable[[Engine], bool]) -> bool:
        return not self._launching and bool(self.engines) and all(holds(engine) for engine in self.engines)

    def _probe(self) -> None:
        """Every engine finds what is held under its meaning."""
        for engine in self.engines:
            held = [name[1] for name in self.ledger.ready if name[0] == engine.meaning]
            if not held:
                continue
            if not engine.core.attached:
                raise Broken(f"liveness: {engine.name} is not attached: {engine.core.describe()}")
            engine.probe(held[0])
            self._until(lambda engine=engine: engine.found is not None, REST_NS)  # type: ignore[misc]
            if not engine.found:
                raise Broken(f"liveness: {engine.name} misses {held[0].hex()}, which is held")

    def _until(self, happened: Callable[[], bool], bound_ns: int) -> None:
        ends = self.clock.now_ns + bound_ns
        run_one = self.clock.run_one
        while not happened():
            is_dry = False
            for _ in range(8):  # looking after each event would cost more than the event
                is_dry = is_dry or not run_one()  # a world at rest has no events left
            if (is_dry or self.clock.now_ns > ends) and not happened():
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
        self.sidecar.check_rest()
        self.faults.check_rest()

    def _tally(self) -> dict[str, int]:
        engines = [*self._past, *self.engines]
        sidecar = self.sidecar
        return {
            "steps": sidecar.steps + (sidecar.daemon.steps if sidecar.daemon is not None else 0),
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
            "boots": sidecar.boots,
            "deaths": sidecar.deaths,
            "kills": sidecar.kills,
            "recovered": self.ledger.num_recovered,
            "torn": self.ledger.num_torn,
            "spares_failed": sidecar.failed,
            **{f"fault.{kind}": count for kind, count in self.faults.counts.items()},
        }


def sail(seed: int, *, keep_log: bool = False, is_held: bool = False) -> Outcome:
    """Run one seed."""
    return Voyage(seed, keep_log=keep_log, is_held=is_held).run()


def story_of(seed: int) -> list[str]:
    """What became of the jobs that a failing seed's failure names, event by event."""
    return sail(seed, keep_log=True).story
