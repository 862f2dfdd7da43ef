"""The CUDA driver, as both sides of kvferry use it: through ctypes, without torch, without a compiled extension.

    structs.py   the numbers and structures of cuda.h that are used here
    table.py     the entry points and their argument types: what is not in the table is never called
    library.py   the loaded library: every result checked, errors by name
    driver.py    `Driver`: the calls by what they do. Start here

Nothing here loads the driver at import. The daemon and a CPU worker import nothing of it.
"""
