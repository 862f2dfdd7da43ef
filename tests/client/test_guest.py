"""The client as a guest in the engine's process: light to import, one thread that ends with it, callable by any."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

from kvferry import Client
from kvferry.client import client as shell
from tests.client.fakes import chain


def test_importing_opens_nothing_and_loads_neither_torch_nor_zmq() -> None:
    code = (
        "import sys, threading, os; fds = len(os.listdir('/proc/self/fd'));"
        "import kvferry, kvferry.client; kvferry.Hits;"
        "assert not [m for m in ('torch', 'zmq', 'numpy') if m in sys.modules], sys.modules.keys();"
        "assert threading.active_count() == 1 and len(os.listdir('/proc/self/fd')) == fds;"
        "from kvferry import Client, RankClient;"
        "assert not [m for m in ('torch', 'zmq') if m in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_an_engine_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    code = (
        "from kvferry import Client;"
        f"c = Client('e', world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir={str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forgotten_client_takes_its_thread_with_it(tmp_path: Path) -> None:
    client = Client("e", world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir=tmp_path)
    thread = client._thread
    del client
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_many_threads_may_call_at_once(tmp_path: Path) -> None:
    with Client("e", world_size=1, key_bytes=8, num_blocks=100, block_tokens=1, run_dir=tmp_path) as client:
        errors: list[BaseException] = []

        def call() -> None:
            try:
                for _ in range(50):
                    client.lookup("r", chain(1, 2))
                    client.hits("r")
                    client.end_step()
                    client.poll()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not errors


def test_waiting_for_a_sidecar_that_is_not_there_ends_at_its_timeout(tmp_path: Path) -> None:
    with Client("e", world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir=tmp_path) as client:
        begin = time.monotonic()
        assert not client.wait_attached(0.1)
        assert time.monotonic() - begin < 2
        assert shell.RETRY_S <= 0.1 <= shell.RETRY_MAX_S <= 1, "a restarted daemon is found within a second"
