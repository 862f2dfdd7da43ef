"""Seeded voyages: the real cores of daemon, workers, clients and ranks in one process over an unkind network.

    python -m tests.voyage --seed 7 --verbose      replay one seed with its whole log
    python -m tests.voyage --seeds 0-999           run many

    clock.py     simulated time: one queue of events, ties broken by order of entry
    net.py       carriers: frames that are late, doubled, swapped or lost; streams that are only late
    memory.py    what blocks and slots hold, and a copier that takes its time over each half of a block
    echo.py      old messages said once more
    ledger.py    what was promised at the daemon's door, kept apart from the daemon's own books
    table.py     the slot table's bytes, which outlive each daemon
    daemon.py    one boot of the daemon: the real core, a simulated shell
    worker.py    one worker from spare to death: the real core, a simulated shell
    sidecar.py   the real supervisor core, a simulated shell: who is started, asked, killed, reaped, told
    faults.py    what goes wrong: crashes, stalls, cut links, resets, drains
    journal.py   the story of each job
    ranks.py     an engine's ranks: real rank cores, simulated GPUs
    engine.py    an engine's scheduler: block allocator, own prefix cache, requests, a real client core
    voyage.py    one seed: draws a world, runs it, drains it, judges it

A failing seed prints `make voyage SEED=n` and the story of the jobs that the failure names; with --verbose its log
tells who said what to whom, byte for byte the same each time. A fault is an event in the clock's queue. Each process
is a `Party` (clock.py): its clock is its own, and it may be stopped, let go on and ended at any moment.

Nothing here sleeps, reads a clock or draws from a random source but the seed's own.
"""
