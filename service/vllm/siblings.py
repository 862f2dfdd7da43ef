"""Beside other connectors, as a child of vLLM's MultiConnector: what a child must know and is not told.

    kv_transfer_config (outer)     what vLLM's scheduler reads: role, failure policy
      └─ MultiConnector ─▶ child's config: a copy of its own   ── changing it changes nothing

A child is given a configuration in which only its own kv_transfer_config stands, so it looks at who builds it.
Imports no vLLM.
"""

import sys
from typing import Any, Final

MULTI: Final = "MultiConnector"
MAX_FRAMES: Final = 32


def outer_transfer_config() -> Any | None:
    """The kv_transfer_config that vLLM itself reads, if a MultiConnector is building us now; else None."""
    frame, found = sys._getframe(1), None
    for _ in range(MAX_FRAMES):
        builder: Any = frame.f_locals.get("self")
        if type(builder).__name__ == MULTI and hasattr(builder, "_vllm_config"):
            found = builder._vllm_config.kv_transfer_config  # go on: the outermost of several counts
        if frame.f_back is None:
            break
        frame = frame.f_back
    return found


def why_off_beside(outer: Any, *, tells_of_sync_loads: bool) -> str | None:
    """Why caching must stay off beside these siblings, in one line; None if it can be served.

    `tells_of_sync_loads`: whether this vLLM says in which steps a sibling loads before the forward.
    """
    if outer.kv_role != "kv_both":
        return f"the outer kv_role is {outer.kv_role!r}: kvferry stores and loads; set 'kv_both' beside {MULTI} too"
    if outer.kv_load_failure_policy != "recompute":
        return (
            f"a failed load would fail its request: set kv_load_failure_policy to 'recompute' beside {MULTI}"
            " (a child cannot change it)"
        )
    if not tells_of_sync_loads:
        return f"this vLLM does not tell a child of {MULTI} when a sibling loads; use vLLM 0.32 or later"
    return None
