"""Starts and stops what an experiment with a real vLLM needs: a model, engines as child processes, a sidecar.

Used by the tests in tests/vllm, the benches beside this file and examples/vllm_demo.py. Everything it starts
ends with its context manager; everything it writes lies in the folder it is given.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class LabError(RuntimeError):
    """A child did not do what it was asked; the text ends with its log."""


def prompt(seed: int, num_tokens: int, vocabulary: int = 2048) -> list[int]:
    """A repeatable prompt."""
    rng = random.Random(seed)
    return [rng.randrange(10, vocabulary) for _ in range(num_tokens)]


def connector(run_dir: Path | str, *, by_name: bool = False, **extra: Any) -> dict[str, Any]:
    """KVTransferConfig arguments for KvferryConnector; `extra` are `kvferry.*` settings without their prefix."""
    settings = {"kvferry.run_dir": str(run_dir), **{f"kvferry.{name}": value for name, value in extra.items()}}
    made = {"kv_connector": "KvferryConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    if not by_name:
        made["kv_connector_module_path"] = "kvferry.vllm"
    return made


@dataclass
class Engine:
    """A running child engine."""

    process: "subprocess.Popen[bytes]"
    answers: int
    log: Path
    pending: bytes = b""
    pids: list[int] = field(default_factory=list)

    def ask(self, timeout_s: float = 240.0, **command: Any) -> dict[str, Any]:
        """One command, one answer; LabError if the engine fails or is silent."""
        self.send(**command)
        return self.answer(timeout_s)

    def send(self, **command: Any) -> None:
        """Send a command without waiting for its answer."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise LabError(f"the engine is gone\n{self.tail()}") from None

    def answer(self, timeout_s: float = 240.0) -> dict[str, Any]:
        """The next answer."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self.pending:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                raise LabError(f"no answer in {timeout_s} s\n{self.tail()}")
            chunk = os.read(self.answers, 1 << 20)
            if not chunk:
                raise LabError(f"the engine ended\n{self.tail()}")
            self.pending += chunk
        line, self.pending = self.pending.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise LabError(f"{found['error']}\n{self.tail()}")
        return found

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[dict[str, Any]]:
        """Answers to prompts given at once."""
        made: list[dict[str, Any]] = self.ask(op="generate", prompts=prompts, max_tokens=max_tokens)["answers"]
        return made

    def tail(self, num_bytes: int = 4000) -> str:
        """The end of the engine's log."""
        return self.log.read_text(errors="replace")[-num_bytes:]


def start_engine(
    folder: Path,
    model: Path,
    *,
    name: str,
    kv_transfer: Mapping[str, Any] | None = None,
    tp_size: int = 1,
    num_blocks: int = 100,
    block_size: int = 128,
    cores: str = "",
    env: Mapping[str, str] | None = None,
    program: Path = HERE / "vllm_engine.py",
    **arguments: Any,
) -> Engine:
    """Start an engine; `await_ready` on it before use. Several may start side by side.

    `program`: what the child runs; it takes the engine's arguments and a descriptor, as vllm_engine.py does.
    `cores`: VLLM_CPU_OMP_THREADS_BIND; by default one core for each rank, the last ones of this machine.
    """
    count = os.cpu_count() or 1
    given = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": min(8192, (num_blocks - 1) * block_size),
        "max_num_batched_tokens": 8192,
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "tensor_parallel_size": tp_size,
        "seed": 0,
        "connector": kv_transfer,
        **arguments,
    }
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": cores or "|".join(str((count - 1 - r) % count) for r in range(tp_size)),
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    log = folder / f"{name}.log"
    reading, writing = os.pipe()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(given), str(writing)],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            env=environment,
            pass_fds=(writing,),
            start_new_session=True,
        )
    os.close(writing)
    return Engine(process, reading, log)


def stop_engine(engine: Engine, kill: bool = False, timeout_s: float = 30.0) -> None:
    """End an engine and its process group."""
    process = engine.process
    if not kill and process.poll() is None and process.stdin is not None:
        with suppress(LabError, subprocess.TimeoutExpired, OSError):
            engine.send(op="quit")
            process.stdin.close()
            process.wait(timeout_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    os.close(engine.answers)


@dataclass
class Sidecar:
    """`kvferry up` as a child process."""

    process: "subprocess.Popen[str]"
    run_dir: Path
    lines: list[str]

    def status(self) -> dict[str, Any]:
        """What `kvferry status --json` says."""
        command = [sys.executable, "-m", "kvferry.cli.main", "status", "--json", "--run-dir", str(self.run_dir)]
        found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return found


@contextmanager
def running_sidecar(run_dir: Path, *, tp_size: int = 1, host_memory: str = "512MiB") -> Iterator[Sidecar]:
    """A sidecar that has said it is ready; stopped as a service manager would stop it."""
    command = [sys.executable, "-m", "kvferry.cli.main", "up", "--run-dir", str(run_dir)]
    command += ["--tp-size", str(tp_size), "--host-memory", host_memory, "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    sidecar = Sidecar(process, run_dir, [])
    ready = threading.Event()

    def read() -> None:  # its pipe must never fill
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                sidecar.lines.append(line.rstrip())
                if "ready" in line:
                    ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not ready.wait(60) or process.poll() is not None:
            raise LabError("kvferry did not come up\n" + "\n".join(sidecar.lines[-12:]))
        yield sidecar
    finally:
        process.send_signal(signal.SIGUSR1)  # as `kvferry down`: nothing is kept
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)


@contextmanager
def running_engine(folder: Path, model: Path, **options: Any) -> Iterator[Engine]:
    """An engine that has said it is ready."""
    engine = start_engine(folder, model, **options)
    try:
        engine.answer(180.0)
        yield engine
    finally:
        stop_engine(engine)
