"""One question to the daemon, as an admin."""

import os
import secrets
import time
from typing import Any, Final, TypeVar

from kvferry.net.paths import RunDir
from kvferry.net.peer import Peer
from kvferry.proto.control import Control, Hello, Refused, StatusAnswer, StatusAsk
from kvferry.proto.errors import LostError
from kvferry.proto.ids import LinkId

ANSWER_S: Final = 3.0

Answer = TypeVar("Answer", bound=Control)


def ask_status(run_dir: RunDir, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The daemon's status."""
    return ask(run_dir, StatusAsk(), StatusAnswer, timeout_s).status


def ask(run_dir: RunDir, question: Control, kind: type[Answer], timeout_s: float = ANSWER_S) -> Answer:
    """The daemon's answer. LostError if there is no daemon or no answer in time; RefusedError if it says so."""
    peer = Peer(run_dir, LinkId(secrets.randbits(63) | 1))
    try:
        peer.send(Hello(role="admin", software="kvferry", pid=os.getpid()))
        peer.send(question)
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            peer.tick()
            peer.wait(min(left, 0.05))
            for message in peer.receive():
                if isinstance(message, kind):
                    return message
                if isinstance(message, Refused):
                    raise message.error()
            if peer.refusal is not None:
                raise peer.refusal.error()
            if not peer.alive:
                raise LostError("daemon.lost", f"the daemon at {run_dir.path} went away; it is restarting or stopping")
    finally:
        peer.close()
    raise LostError("daemon.lost", f"the daemon at {run_dir.path} gave no answer within {timeout_s:g} s")
