"""`kvferry gpu-check`: one prepared run that tries on a real GPU what no test without one can show.

    runner.py     items in the order of their value, a time limit each, a result on disk after each
    results.py    how an item can end, the table, the JSON
    plan.py       the items: number, name, limit, what runs it
    stage.py      what items play on: a pool file, a daemon played by hand, the processes E and W
    daemon.py     the daemon's part, so that an item may plan what no daemon would
    talk.py       a line to a child process: question, answer, deadline
    engine.py     process E: an engine's rank with the real client library     compute*.py: what it computes with
    worker.py     process W: the real worker; slower, or with a planted fault, where a control needs it
    copier.py     process C: the worker's device alone, for what is measured   copier_*.py: its measurements
    items_*.py    the items themselves

The runner itself never calls a driver, so no GPU can hang it; its children can be killed at any time. With
`--device cpu` the same code plays on shared memory, which keeps the script itself honest.
"""
