"""Sizes, times and counts as people write them, and back. Pure.

`8GiB` and `8Gi` are binary, `8GB` is decimal, a bare number is bytes. `8G` is refused: half of all programs
read it one way, half the other. Times are `500ms`, `10s`, `2m`, `1h`; a bare number is seconds.
"""

import re
from typing import Final

_NUMBER: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
_BYTES: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{p}{s}": 1 << 10 * (i + 1) for i, p in enumerate("kmgt") for s in ("ib", "i")},
    **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")},
}
_SECONDS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: object) -> int:
    """Bytes of "8GiB", "512 MiB", "1.5GB" or a plain number; ValueError saying what may be written."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _BYTES:
        raise ValueError(
            f"{text!r} is no size; write 8GiB, 512MiB, 8GB (decimal) or a plain number of bytes;"
            " units: B, KiB, MiB, GiB, TiB, and decimal KB, MB, GB, TB"
        )
    return int(float(match[1]) * _BYTES[match[2].lower()])


def parse_seconds(text: object) -> float:
    """Seconds of "500ms", "10s", "2m", "1h" or a plain number; ValueError saying what may be written."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError(
            f"{text!r} is no time; write 500ms, 10s, 2m, 1h or a plain number of seconds; units: us, ms, s, m, min, h"
        )
    return float(match[1]) * _SECONDS[match[2].lower()]


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 store", "2 stores": a count with its word."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_bytes(num_bytes: int) -> str:
    """ "4.0 GiB", "512 B": the largest binary unit with a number of at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
