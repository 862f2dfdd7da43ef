"""The wire: ids, messages, codec, links, versions and the errors they raise. Pure, no I/O.

`docs/protocol.md` is the normative text; `tests/wire/test_document.py` holds the two together.

    ids.py       the numbers that name things
    limits.py    the hard bounds that decoding enforces
    errors.py    what can be wrong with a message, and whose doing it was
    outcome.py   refusals and outcomes: the answers that are not exceptions
    columns.py   packed little-endian columns
    schema.py    how a message type is declared, packed and checked
    hot.py       the messages of every step and every completion
    control.py   the rare messages: hello, register, attach, status
    tether.py    what a rank and its worker say to each other, and stream framing
    layout.py    how KV memory is described, in bytes only
    link.py      frames, and a numbered, acknowledged link over any lossy carrier
    page.py      the shared page of a rank: mark, revokes, ended tickets
"""
