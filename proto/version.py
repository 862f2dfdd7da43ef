"""The protocol's own version. It moves only with docs/protocol.md and its changelog.

A major number is a language: peers of different majors refuse each other by name. A minor number adds
messages or trailing fields; a peer speaks the lower of the two minors.
"""

from typing import Final

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 1
PROTOCOL: Final = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
# Older majors this build still speaks, as (lowest, highest).
SUPPORTED_MAJORS: Final = (1, 1)


def speaks(major: int) -> bool:
    """Whether this build speaks protocol `major`."""
    lowest, highest = SUPPORTED_MAJORS
    return lowest <= major <= highest
