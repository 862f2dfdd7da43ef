"""Registrations that cannot work and frames that are none: refused by name, counted, and all goes on."""

import contextlib
import os
import secrets
import socket
import struct
import subprocess
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from kvferry import Client, RankClient, shared_array
from kvferry.client.memory import from_arrays
from kvferry.net.paths import RunDir
from kvferry.net.peer import Peer
from kvferry.proto import limits
from kvferry.proto.codec import pack, unpack
from kvferry.proto.control import Hello, Refused, Welcome
from kvferry.proto.hot import Done
from kvferry.proto.ids import LinkId
from kvferry.proto.link import HEADER, MAGIC, FrameKind, pack_frame, unpack_frame
from tests.process.sidecar import KVFERRY, Sidecar, environment, kvferry, until
from tests.process.tiny_engine import TinyEngine, keys_of

pytestmark = pytest.mark.process


def register_rank(
    sidecar: Sidecar,
    engine: str,
    *,
    rank: int = 0,
    world_size: int = 2,
    block_bytes: int = 4096,
    facts: dict[str, str] | None = None,
) -> tuple[list[str], RankClient]:
    """What a rank client says when it tries once, and the client."""
    array, fd = shared_array((8, block_bytes), np.uint8)
    notes: list[str] = []
    client = RankClient(
        engine, rank, world_size=world_size, memory=from_arrays({"l": array}, array, fd, block_tokens=16),
        facts=facts, run_dir=sidecar.run_dir, on_note=notes.append,
    )  # fmt: skip
    return notes, client


def refusal_of(sidecar: Sidecar, engine: str, **kwargs: object) -> str:
    """The line in which a rank's refusal is told; the rank is closed."""
    notes, client = register_rank(sidecar, engine, **kwargs)  # type: ignore[arg-type]
    try:
        return until(lambda: next((note for note in notes if "refused" in note or ": " in note), ""), what=str(notes))
    finally:
        client.close()


# ---- registrations ---------------------------------------------------------------------------------------


def test_another_tp_size_is_refused_with_both_numbers_and_the_fix(shared: Sidecar) -> None:
    said = refusal_of(shared, "wide", world_size=1)
    print(said)
    assert "register.world_size" in said
    assert "1" in said and "2" in said
    assert "fix" in said


def test_another_tp_size_is_told_to_the_scheduler_side_too(shared: Sidecar) -> None:
    notes: list[str] = []
    with Client(
        "wide", world_size=4, key_bytes=32, num_blocks=8, block_tokens=16, run_dir=shared.run_dir, on_note=notes.append
    ):
        said = until(lambda: next((note for note in notes if "register.world_size" in note), ""), what=str(notes))
    print(said)
    assert "4" in said and "2" in said


def test_a_dtype_that_differs_between_ranks_is_refused_with_both_values(shared: Sidecar) -> None:
    first_notes, first = register_rank(shared, "mixed", rank=0, facts={"dtype": "bfloat16"})
    try:
        until(lambda: first.attached, what=str(first_notes))
        said = refusal_of(shared, "mixed", rank=1, facts={"dtype": "float16"})
    finally:
        first.close()
    print(said)
    assert "register.facts" in said
    assert "bfloat16" in said and "float16" in said


def test_another_block_size_than_the_pools_is_refused_with_both_numbers(shared: Sidecar) -> None:
    first_notes, first = register_rank(shared, "small", block_bytes=4096)
    try:
        until(lambda: first.attached, what=str(first_notes))
        said = refusal_of(shared, "large", block_bytes=65536)
        refusal_of(shared, "large", block_bytes=65536)
        alarm = kvferry("status", "--check", "--run-dir", shared.run_dir)
    finally:
        first.close()
    print(said)
    assert alarm.returncode == 1
    assert "engine 'large': its rank 0 is refused: layout.slot_bytes: rank 0 needs" in alarm.stdout
    told = [line for line in shared.lines if "layout.slot_bytes" in line]
    assert len(told) == 1 and "engine 'large' rank 0 is refused" in told[0], told
    assert "layout.slot_bytes" in said
    assert str(4096 * 2) in said and str(4096 + 65536) in said


def test_a_pool_smaller_than_one_block_is_refused_with_both_numbers(shared: Sidecar) -> None:
    said = refusal_of(shared, "huge", block_bytes=64 << 20)
    print(said)
    assert "layout.pool_too_small" in said
    assert "fix" in said


def test_a_dev_shm_smaller_than_the_pool_is_refused_at_start_with_both_numbers(tmp_path: Path) -> None:
    """Case 101: `--shm-size=16m` with a pool of 64 MiB."""
    script = "mount -t tmpfs -o size=16m none /dev/shm && exec " + " ".join(KVFERRY)
    script += f" up --run-dir {tmp_path}/run --host-memory 64MiB"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(),
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine allows no mount namespaces")
    print(done.stderr)
    assert done.returncode == 2
    assert "the pool of 64.0 MiB does not fit /dev/shm, which has 16.0 MiB free" in done.stderr
    assert "fix: set --host-memory to at most 15MiB, or enlarge /dev/shm (docker: --shm-size" in done.stderr


# ---- frames ----------------------------------------------------------------------------------------------


class Thrower:
    """A connection to daemon.sock that says what it likes."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(RunDir.at(sidecar.run_dir).daemon_endpoint)

    def throw(self, *parts: bytes) -> Refused:
        """Send, and the refusal that comes back."""
        self._socket.send_multipart(parts)
        assert self._socket.poll(10_000), "no answer"
        frame = unpack_frame(self._socket.recv())
        assert frame.kind is FrameKind.CLOSE
        refused = unpack(frame.body)
        assert isinstance(refused, Refused)
        return refused

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def random_link() -> LinkId:
    return LinkId(secrets.randbits(63) | 1)


def test_what_is_thrown_at_the_daemons_socket_is_refused_by_name_and_counted(shared: Sidecar) -> None:
    """Case 131: garbage, a pickle, another protocol, an unknown version, an oversized message."""
    before = shared.status()["bad_messages"]
    hello = pack(Hello(role="client"))
    pickle_bytes = (
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true."
    )
    thrown = [
        ("frame.magic", (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4,)),
        ("frame.magic", (pickle_bytes,)),
        ("frame.magic", (b"GET /metrics HTTP/1.1\r\n", b"Host: kvferry\r\n\r\n")),
        ("frame.size", (b"",)),
        ("frame.size", (b"kF",)),
        ("frame.size", (bytes(limits.MAX_FRAME_BYTES + 1),)),
        ("frame.version", (HEADER.pack(MAGIC, 7, 0, random_link(), 1, 0) + hello,)),
        ("frame.link", (pack_frame(FrameKind.DATA, random_link(), 5, 0, hello),)),
        ("message.malformed", (pack_frame(FrameKind.DATA, random_link(), 1, 0, pickle_bytes),)),
        ("message.unknown", (pack_frame(FrameKind.DATA, random_link(), 1, 0, msgpack.packb(["rm -rf"])),)),
        ("message.fields", (pack_frame(FrameKind.DATA, random_link(), 1, 0, msgpack.packb(["hello", {}])),)),
    ]
    thrower = Thrower(shared)
    try:
        for code, parts in thrown:
            refused = thrower.throw(*parts)
            print(f"{refused.code}: {refused.text}")
            assert refused.code == code
    finally:
        thrower.close()
    after = shared.status()["bad_messages"]
    for code in {code for code, _ in thrown}:
        assert after.get(code, 0) - before.get(code, 0) == sum(1 for c, _ in thrown if c == code), code


def test_an_unknown_protocol_version_is_refused_with_both_ranges(shared: Sidecar) -> None:
    peer = Peer(RunDir.at(shared.run_dir), random_link())
    try:
        peer.send(Hello(role="client", major_min=7, major_max=9))
        peer.flush()
        said = until(
            lambda: [m for m in peer.receive() if isinstance(m, Refused)] or ([peer.refusal] if peer.refusal else [])
        )
    finally:
        peer.close()
    print(said[0])
    assert said[0].code == "hello.version"
    assert "7..9" in said[0].text and "1..1" in said[0].text


def test_a_message_that_a_role_may_not_send_ends_its_link_by_name(shared: Sidecar) -> None:
    peer = Peer(RunDir.at(shared.run_dir), random_link())
    try:
        peer.send(Hello(role="client"))
        peer.flush()
        assert until(lambda: [m for m in peer.receive() if isinstance(m, Welcome)])
        peer.send(Done())
        peer.flush()
        heard: list[object] = []
        until(lambda: heard.extend(peer.receive()) or not peer.alive)  # type: ignore[func-returns-value]
    finally:
        peer.close()
    codes = [m.code for m in [*heard, peer.refusal] if isinstance(m, Refused)]
    assert codes == ["message.unexpected"]


def test_a_million_random_bytes_in_pieces_do_no_harm(shared: Sidecar) -> None:
    """Case 131, at random."""
    rng = np.random.default_rng(131)
    thrower = Thrower(shared)
    try:
        for size in rng.integers(0, 8192, 250):
            body = rng.bytes(int(size))
            headed = pack_frame(FrameKind(int(rng.integers(0, 3))), random_link(), int(rng.integers(0, 3)), 0, body)
            thrower.throw(headed if rng.integers(0, 2) else body)
    finally:
        thrower.close()
    assert shared.status()["state"] == "serving"


def test_garbage_on_the_streams_is_dropped_and_the_next_rank_is_served(shared: Sidecar) -> None:
    """Case 131: the ranks' sockets and the tethers' listener."""
    one = RunDir.at(shared.run_dir)
    daemon = shared.daemon()
    for path in (one.tether, one.rank(0), one.rank(1)):
        for said in (
            b"",
            b"\0",
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<I", 0xFFFF_FFFF) + b"x" * 100,
            os.urandom(4096),
        ):
            with socket.socket(socket.AF_UNIX) as stream:
                stream.connect(str(path))
                with contextlib.suppress(OSError):  # it may have had enough of us already
                    stream.sendall(said)
    with TinyEngine(shared, "after garbage", block_bytes=4096) as engine:
        assert engine.client.wait_attached(30), engine.notes
        assert engine.hits("r", keys_of("garbage", 2)) == 0
    assert shared.daemon() == daemon


def test_one_that_connects_and_says_nothing_keeps_nobody_out_for_long(shared: Sidecar) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(RunDir.at(shared.run_dir).rank(0)))
        started = time.monotonic()
        with TinyEngine(shared, "patient", block_bytes=4096) as engine:
            assert engine.client.wait_attached(30), engine.notes
        assert time.monotonic() - started < 20


def test_a_hundred_that_connect_and_say_nothing_keep_nobody_out(shared: Sidecar) -> None:
    """Each of them alone may be silent for two seconds; a rank behind them does not wait for all of these."""
    with contextlib.ExitStack() as crowd:
        for _ in range(100):
            silent = crowd.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(RunDir.at(shared.run_dir).rank(0)))
        with TinyEngine(shared, "behind the crowd", block_bytes=4096) as engine:
            assert engine.client.wait_attached(60), engine.notes


def test_hundreds_of_connections_without_a_word_do_not_stop_the_daemon(shared: Sidecar) -> None:
    crowd = []
    try:
        for _ in range(300):
            stream = socket.socket(socket.AF_UNIX)
            stream.setblocking(False)
            stream.connect(str(RunDir.at(shared.run_dir).tether))
            crowd.append(stream)
        assert shared.status()["state"] == "serving"
    finally:
        for stream in crowd:
            stream.close()
