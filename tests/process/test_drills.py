"""Longer drills with real processes: engines killed again and again, daemons too, a pool far too small.

`make faults` plays them in full; the test run plays their short forms.
"""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry import Outcome
from kvferry.cli.ask import ask_status
from kvferry.net.paths import RunDir
from tests.process.fault_table import Bench
from tests.process.sidecar import Sidecar, alive, until
from tests.process.tiny_engine import TinyEngine, keys_of

pytestmark = [pytest.mark.process, pytest.mark.slow]


def rounds(short: int, full: int) -> list[object]:
    """A count for the test run and one for `make faults`."""
    return [pytest.param(short), pytest.param(full, marks=pytest.mark.faults)]


def handles_of(pid: int) -> tuple[int, int]:
    """Open descriptors and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status.split("Threads:")[1].split()[0])


def settled(pid: int) -> tuple[int, int]:
    """`handles_of`, once links that are over have been put away: a daemon keeps their tethers for a second."""
    looks = [handles_of(pid)]

    def is_same() -> bool:
        time.sleep(0.1)
        looks.append(handles_of(pid))
        return len(looks) > 15 and len(set(looks[-15:])) == 1

    until(is_same, 15, f"descriptors and threads of {pid} settle: {looks}")
    return looks[-1]


def pool_files(run_dir: Path) -> dict[str, int]:
    """What the sidecar has in /dev/shm: names and bytes really taken."""
    one = RunDir.at(run_dir)
    found = one.table.parent.glob(f"kvferry-{one.instance}*")
    return {path.name: path.stat().st_blocks * 512 for path in found}


@pytest.mark.faults
def test_engines_killed_during_stores_and_loads_leave_no_mapping_and_the_next_one_hits(bench: Bench) -> None:
    """Case 30: within two seconds each time, on one sidecar, and nothing adds up."""
    seen = []
    for number in range(20):
        unmapped_s = bench.kill_engine("during a store" if number % 2 == 0 else "during a load")
        assert unmapped_s <= 2
        if number in (0, 19):
            seen.append((settled(bench.sidecar.daemon()), handles_of(bench.sidecar.pid)))
    assert seen[-1] == seen[0], f"descriptors and threads of supervisor and daemon grow: {seen}"


@pytest.mark.parametrize("count", rounds(2, 10))
def test_daemons_killed_under_load_again_and_again_cost_misses_and_nothing_grows(count: int, bench: Bench) -> None:
    """Case 45: the way back is the way in, ten times: all keys are there, no call of the engine is held."""
    seen, workers = [], []
    bench.be_served()
    for number in range(count):
        bench.begin_store(f"load {number}")
        bench.kill_daemon()
        bench.be_served()
        bench.come_to_rest()
        assert bench.engine.longest_s < 1
        pids = [bench.sidecar.pid, bench.sidecar.daemon(), *bench.engine.worker_pids]
        pids += [process.pid for process in bench.engine.processes]
        settled(bench.sidecar.daemon())
        workers = workers or list(bench.engine.worker_pids)
        assert bench.engine.worker_pids == workers, "the workers outlive every daemon"
        seen.append([handles_of(pid) for pid in pids] + [pool_files(bench.run_dir)])
    assert seen[-1] == seen[0], f"descriptors, threads or /dev/shm grow: {seen}"


@pytest.mark.faults
def test_any_of_its_processes_may_die_together(bench: Bench) -> None:
    """Rules 1, 4 and 10 at once: a worker may die while the daemon that awaits its word is being replaced."""
    luck = random.Random(7)
    for _ in range(25):
        bench.be_served()
        every = [bench.sidecar.daemon(), *bench.sidecar.workers(0), *bench.sidecar.workers(1)]
        victims = luck.sample(every, luck.randint(2, 4))
        print(bench.die_together(victims, luck.choice(["during a store", "during a load"])))


def test_status_names_the_rank_that_owes_a_word_and_how_old_the_oldest_job_is(bench: Bench) -> None:
    """Case 53: health is the state of each rank and the age of the oldest job, and comes back by itself."""
    bench.be_served()
    stopped = bench.engine.worker_pids[1]
    os.kill(stopped, signal.SIGSTOP)
    bench.begin_store("owed")
    ask = RunDir.at(bench.run_dir)

    def is_named() -> bool:
        status = ask_status(ask)
        owed = [rank["jobs_owed"] for engine in status["engines"] for rank in engine["ranks"]]
        return owed == [0, 1] and status["jobs"]["oldest_ms"] > 300

    until(is_named, 10, "the stopped rank alone owes a word, and the job's age is told")
    until(lambda: bench.engine.look() or not alive(stopped), 10, "killed after deadline and grace")
    bench.be_served()
    bench.come_to_rest()
    assert ask_status(ask)["jobs"]["oldest_ms"] == 0


@pytest.mark.faults
@pytest.mark.parametrize("grace", ["1s", "60s"], ids=["killed and replaced", "waking by itself"])
def test_a_worker_that_stands_still_for_half_a_minute_stops_nobody_and_publishes_nothing_wrong(grace: str) -> None:
    """Case 53: the engine serves on; jobs of that time end within their deadline; what was not OK is never found."""
    with Sidecar("--job-deadline", "1s", "--kill-grace", grace) as sidecar, TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        engine.fill([0, 1, 2], seed=1)
        assert engine.store("before", keys_of("before", 3), [0, 1, 2]) is Outcome.OK
        stopped = engine.ranks[1].worker_pid
        os.kill(stopped, signal.SIGSTOP)
        end = time.monotonic() + 30
        outcomes: list[Outcome | None] = []
        while time.monotonic() < end:
            number = len(outcomes)
            began = time.monotonic()
            # The blocks have a new owner in each round: what still reads them is given up first.
            engine.client.written([3, 4])
            engine.step()
            engine.fill([3, 4], seed=number)
            ticket = engine.client.store(f"r{number}", keys_of(f"while {number}", 2), [3, 4])
            engine.step()
            assert time.monotonic() - began < 0.5, "a step was held"
            outcomes.append(outcome_of(engine, ticket) if ticket else None)
            engine.client.finish(f"r{number}")
            assert hits_at_last(engine, f"q{number}", keys_of("before", 3), attached=False) in (0, 3)
            time.sleep(0.1)
        if grace == "60s":
            assert Outcome.OK not in outcomes
            os.kill(stopped, signal.SIGCONT)
        else:
            assert not alive(stopped)
            assert outcomes[-1] is Outcome.OK, "the rank attached to another worker and stores again"
        until(lambda: sidecar.status()["slots"]["quarantined"] == 0, 10, "nobody owes a word")
        for number, outcome in enumerate(outcomes):
            keys, is_held = keys_of(f"while {number}", 2), outcome is Outcome.OK
            found = hits_at_last(engine, f"after {number}", keys, attached=is_held)
            assert found == (2 if is_held else 0), f"round {number}: {outcome}, {found} hits"
            if found:
                assert all(end.ok for end in engine.load(f"after {number}", keys, [7, 8]))
                assert engine.bytes_of([7, 8]) == bytes_of_seed(engine, number)
            engine.client.finish(f"after {number}")
        engine.fill([0, 1, 2], seed=1)
        assert hits_at_last(engine, "l", keys_of("before", 3)) == 3
        assert all(end.ok for end in engine.load("l", keys_of("before", 3), [10, 11, 12]))
        assert engine.bytes_of([10, 11, 12]) == engine.bytes_of([0, 1, 2])


def outcome_of(engine: TinyEngine, ticket: int) -> Outcome:
    """How a store ended; at the latest a moment after its deadline."""
    ended: list[Outcome] = []

    def is_over() -> bool:
        for rank in engine.ranks:
            rank.poll()
        ended.extend(end.outcome for end in engine.client.poll() if end.ticket == ticket)
        return bool(ended)

    until(is_over, 3, "a store's answer comes by its deadline")
    return ended[0]


def hits_at_last(engine: TinyEngine, request: str, keys: list[bytes], *, attached: bool = True) -> int:
    """Hits; while the rank looks for its next worker they are misses, which `attached` waits for."""
    for _ in range(100 if attached else 1):
        if found := engine.hits(request, keys):
            return found
        time.sleep(0.05)
    return 0


def bytes_of_seed(engine: TinyEngine, seed: int) -> list[bytes]:
    """What `fill` with this seed makes of two blocks."""
    engine.fill([20, 21], seed)
    return engine.bytes_of([20, 21])


def test_a_pool_of_a_twentieth_of_the_working_set_refuses_and_evicts_and_makes_no_error() -> None:
    """Cases 54, 56, 57 and 60: full is an answer; lookups take as long at the end as at the beginning."""
    chain, prompts, rounds_ = 8, 60, 2  # 480 blocks for 24 slots
    # 24 slots of a page and 16 KiB, a rank; half of them may be pinned by leases.
    memory = f"{2 * (24 * (4096 + 16384) + 4096)}B"
    with Sidecar(host_memory=memory.removesuffix("B")) as sidecar, TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        taken: list[float] = []
        hits = stored = 0
        for turn in range(rounds_):
            # Every fourth prompt comes back at once, the others when they are long gone.
            order = [
                p for p in np.random.default_rng(turn).permutation(prompts).tolist() for _ in range(1 + (p % 4 == 0))
            ]
            for number, prompt in enumerate(order):
                keys, request = keys_of(f"prompt {prompt}", chain), f"{turn}/{number}"
                began = time.perf_counter()
                found = engine.hits(request, keys)
                taken.append(time.perf_counter() - began)
                hits += found
                if found:
                    words = engine.load(request, keys[:found], list(range(8, 8 + found)))
                    assert all(word.ok for word in words)
                    expected = [np.random.default_rng([prompt, rank]) for rank in range(2)]
                    for rank, rng in enumerate(expected):
                        rows = [rng.integers(0, 256, 16384, dtype=np.uint8) for _ in range(found)]
                        assert engine.arrays[rank][8 : 8 + found].tobytes() == b"".join(row.tobytes() for row in rows)
                engine.fill(list(range(chain)), seed=prompt)
                if engine.store(f"s{request}", keys, list(range(chain))).name == "OK":
                    stored += 1
                engine.client.finish(request)
                engine.client.finish(f"s{request}")
                engine.step()
            # A long prompt that nobody can hold: its head is kept, the rest is refused by name.
            keys = keys_of(f"long {turn}", 40)
            engine.store(f"long {turn}", keys, [block % 16 for block in range(40)])
            engine.client.finish(f"long {turn}")
            engine.step()
        status = ask_status(RunDir.at(sidecar.run_dir))
        counters = status["counters"]
        refused = sum(count for name, count in counters.items() if name.startswith("store_keys_refused."))
        failed = sum(count for name, count in counters.items() if name.startswith("store_keys_failed."))
        assert refused > 0, counters
        assert counters["keys_evicted"] > 0, counters
        assert failed == 0, counters
        assert status["slots"]["total"] == 24
        assert stored > 0 and hits > 0
        third = len(taken) // 3
        early, late = np.median(taken[:third]), np.median(taken[-third:])
        assert late < 3 * early + 0.001, f"lookups took {early * 1e3:.2f} ms, then {late * 1e3:.2f} ms"


@pytest.mark.faults
def test_hard_exits_never_add_up_in_dev_shm(bench: Bench) -> None:
    """Case 32: SIGKILL of everything, again and again: the same files, the same bytes, and a start each time."""
    files = pool_files(bench.run_dir)
    assert sum(files.values()) < 1.01 * (384 << 20)
    for _ in range(20):
        bench.kill_sidecar()
        bench.be_served()
        assert pool_files(bench.run_dir) == files
    bench.come_to_rest()
