"""What can be wrong with a message or a registration, and whose doing it was.

    KvferryError
    ├── ConfigError              a setting that cannot work: refused at start, with numbers and the fix
    ├── ProtocolError            a message that breaks docs/protocol.md
    │   ├── LocalProtocolError     we built it: a bug of ours
    │   └── RemoteProtocolError    a peer sent it: answered by name, counted, nothing changed
    ├── RefusedError             a registration that the other side turned down, with its reason and fix
    ├── ClosedError              you closed it
    └── LostError                it was taken from you: the peer died or went away

Full, busy, missing and pending are answers (`outcome.py`), never exceptions.
"""

from typing import Final


class KvferryError(Exception):
    """Root of all errors of kvferry; never raised itself.

    `code` is a stable dotted name for machines; the text has both values and the fix for people.
    """

    def __init__(self, code: str, text: str, fix: str = "") -> None:
        self.code = code
        self.text = text
        self.fix = fix
        super().__init__(f"{code}: {text}" + (f"\n  fix: {fix}" if fix else ""))


class ConfigError(KvferryError):
    """A setting that cannot work on this machine."""


class ProtocolError(KvferryError):
    """A message breaks docs/protocol.md; never raised itself."""


class LocalProtocolError(ProtocolError):
    """We were about to send a message that breaks the protocol: a bug here."""


class RemoteProtocolError(ProtocolError):
    """A peer sent a message that breaks the protocol."""


class RefusedError(KvferryError):
    """The other side refused a registration; the text says what disagrees and what to do."""


class ClosedError(KvferryError):
    """The object was closed by its owner."""


class LostError(KvferryError):
    """The peer died or the connection broke."""


# Every code that may travel in a `refused` message or close a link. docs/protocol.md lists them too.
CODES: Final[dict[str, str]] = {
    "frame.magic": "the frame does not begin with kvferry's magic",
    "frame.version": "the frame is of a protocol major this build does not speak",
    "frame.size": "the frame is larger than the limit or shorter than its header",
    "frame.link": "the frame belongs to no open link: say hello again",
    "message.malformed": "the body is not a message",
    "message.unknown": "no message has this tag",
    "message.fields": "a message has a wrong number of fields or a field of a wrong type",
    "message.lengths": "columns of one message disagree in length",
    "message.limit": "a count passes its limit",
    "message.unexpected": "this message may not be sent by this role, or not now",
    "hello.first": "the first message of a link must be hello",
    "hello.version": "no common protocol version",
    "register.world_size": "the engine's world size is not the sidecar's",
    "register.rank": "the rank is outside the world size",
    "register.rank_taken": "this engine's rank is served by another worker already",
    "register.engine_taken": "another live client registered this engine id",
    "register.facts": "ranks of one engine report different facts",
    "register.key_bytes": "the key width is outside the limits or not the engine's",
    "layout.groups": "more KV groups than this version serves",
    "layout.geometry": "a region does not fit its memory or overlaps another",
    "layout.slot_bytes": "the block size differs from the pool's",
    "layout.pool_too_small": "the pool holds less than one slot of this layout",
    "layout.probe": "the bytes seen through the mapping are not the engine's",
    "handle.kind": "this worker's device cannot map this kind of memory",
    "handle.stale": "the memory handle cannot be opened",
    "handle.other_gpu": "the memory is on another GPU than the one this rank's worker has opened",
    "handle.same_pid": "engine and worker have one pid number in two pid namespaces",
    "handle.refused": "the driver does not map this memory here",
    "device.lost": "the worker's GPU context is of no use any more",
    "worker.busy": "this worker already serves a rank",
    "reset.namespace": "no namespace, or more than one, has this name",
    "daemon.lost": "the daemon is gone",
}
