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
from kvferry.supervise import vitals
from kvferry.supervise.pulse import STOPPED
from kvferry.supervise.rundir import read_lock

ANSWER_S: Final = 3.0
STOPPED_S: Final = 0.5  # a process that is stopped for so long will not answer soon

Answer = TypeVar("Answer", bound=Control)


def ask_status(run_dir: RunDir, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The daemon's status."""
    return ask(run_dir, StatusAsk(), StatusAnswer, timeout_s).status


def ask(run_dir: RunDir, question: Control, kind: type[Answer], timeout_s: float = ANSWER_S) -> Answer:
    """The daemon's answer. LostError if there is no daemon or no answer in time; RefusedError if it says so."""
    try:
        return _ask(run_dir, question, kind, timeout_s)
    except LostError as error:
        # If the one who would start another daemon is stopped, that is why there is none.
        text, _, fix = stopped_up(run_dir).partition("\n  fix: ")
        if not text:
            raise
        raise LostError("daemon.lost", f"{text}, and its daemon gives no answer ({error.text})", fix) from None


def _ask(run_dir: RunDir, question: Control, kind: type[Answer], timeout_s: float) -> Answer:
    peer = Peer(run_dir, LinkId(secrets.randbits(63) | 1))
    try:
        peer.send(Hello(role="admin", software="kvferry", pid=os.getpid()))
        peer.send(question)
        now = time.monotonic()
        end, ran_at = now + timeout_s, now
        while now < end and not peer.link.lost:
            peer.tick()
            peer.wait(min(end - now, 0.05))
            for message in peer.receive():
                if isinstance(message, kind):
                    return message
                if isinstance(message, Refused):
                    raise message.error()
            if peer.refusal is not None:
                raise peer.refusal.error()
            if peer.closed:
                raise LostError("daemon.lost", f"the daemon at {run_dir.path} went away; it is restarting or stopping")
            now = time.monotonic()
            if _state(peer.pid) != STOPPED:
                ran_at = now
            elif now - ran_at > STOPPED_S:
                break  # waiting for its answer is waiting for nothing
        raise _silence(run_dir, peer.pid, timeout_s)
    finally:
        peer.close()


def stopped_up(run_dir: RunDir) -> str:
    """What is said of a `kvferry up` that is stopped, and what to do; "" if none is."""
    holder = read_lock(run_dir)
    if holder is None or _state(holder[0]) != STOPPED:
        return ""
    pid = holder[0]
    return (
        f"kvferry up (pid {pid}) at {run_dir.path} is stopped (state {STOPPED})\n"
        f"  fix: `kill -CONT {pid}` lets it go on; `kill -KILL {pid}` ends it and its children, and the pool is kept"
    )


def _state(pid: int) -> str:
    """What the daemon's thread does, as one letter; "" if that cannot be seen from here."""
    seen = vitals.look(pid) if pid > 0 else None
    return seen.state if seen is not None else ""


def _silence(run_dir: RunDir, pid: int, timeout_s: float) -> LostError:
    state = _state(pid)
    if state == STOPPED:
        text = f"the daemon at {run_dir.path} (pid {pid}) is stopped"
    else:
        who = f" (pid {pid}, state {state})" if state else ""
        text = f"the daemon at {run_dir.path}{who} gave no answer within {timeout_s:g} s"
    fix = "ask again in ten seconds: `kvferry up` kills and replaces one that hangs, and what is held stays"
    return LostError("daemon.lost", text, fix)
