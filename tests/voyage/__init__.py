"""Seeded voyages: the real cores of daemon, workers, clients and ranks in one process over an unkind network.

    python -m tests.voyage --seed 7 --verbose      replay one seed with its whole log
    python -m tests.voyage --seeds 0-999           run many

    clock.py     simulated time: one queue of events, ties broken by order of entry
    net.py       carriers: frames that are late, doubled, swapped or lost; streams that are only late
    memory.py    what blocks and slots hold, and a copier that takes its time over each half of a block
    echo.py      old messages said once more
    ledger.py    what was promised at the daemon's door, kept apart from the daemon's own books
    sidecar.py   the daemon and its workers: real cores, simulated shells
    ranks.py     an engine's ranks: real rank cores, simulated GPUs
    engine.py    an engine's scheduler: block allocator, own prefix cache, requests, a real client core
    voyage.py    one seed: draws a world, runs it, drains it, judges it

A failing seed prints `make voyage SEED=n`; with --verbose its log tells who said what to whom, byte for byte the
same each time. A fault is an event in the clock's queue (`clock.at(when, deed)`): `Worker.die` stops a worker in
mid-copy, `Daemon.step(WorkerReaped(...))` brings the proof, `LinkEnd.cut` and `StreamEnd.cut` end a connection.

Nothing here sleeps, reads a clock or draws from a random source but the seed's own.
"""
