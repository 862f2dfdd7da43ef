"""Hard bounds of the wire. Decoding refuses what passes them before a handler sees anything.

A step of a large engine carries 64 jobs of 32 keys, about 80 KB; these bounds leave a factor of
several hundred, and keep one hostile frame from taking the daemon's memory.
"""

from typing import Final

MAX_FRAME_BYTES: Final = 64 << 20  # one frame on a link, header included
MAX_BODY_BYTES: Final = MAX_FRAME_BYTES - 28  # one message on a link
MAX_TETHER_BYTES: Final = 16 << 20  # one framed message on a tether
MAX_KEYS: Final = 1 << 20  # keys or blocks in one message
MAX_JOBS: Final = 1 << 16  # jobs, requests or tickets in one message
MIN_KEY_BYTES: Final = 1
MAX_KEY_BYTES: Final = 64
MAX_RANKS: Final = 64
MAX_GROUPS: Final = 16
MAX_REGIONS: Final = 4096  # regions of one group: layers times heads of the widest layout seen, times four
MAX_HANDLES: Final = 256
MAX_DESCRIPTORS: Final = 253  # that the kernel passes with one message (SCM_MAX_FD)
MAX_TEXT: Final = 4096  # characters of one text field
MAX_ITEMS: Final = 4096  # of one array or map within a message; columns are no arrays
MAX_FACTS: Final = 64  # entries of a fingerprint
MAX_BLOCKS: Final = 1 << 28  # blocks of one engine
PAGE_BYTES: Final = 4096
