"""An engine on the stub GPU in a process of its own, so that it can be killed. Told and heard in JSON lines.

in   {"fill": [blocks], "seed": n}        out  {}
in   {"store": [blocks], "text": t}       out  {"outcome": name}
in   {"load": [blocks], "text": t}        out  {"hits": n, "ok": true | false}
in   {"bytes": [blocks]}                  out  {"digest": of their bytes}
in   {"worker": 0}                        out  {"pid": of the worker that serves it}
in   {"begin": [blocks], "text": t}       out  {}      a store whose end is not awaited
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.client.fake_gpu import FakeEngine
from tests.process.sidecar import until
from tests.process.test_cuda_engine import GpuEngine
from tests.process.tiny_engine import keys_of


class EngineProcess:
    """The process, as a test talks to it; attached when made."""

    def __init__(self, run_dir: Path, library: str, name: str, kind: str = "cuda_ipc") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.engine_process", str(run_dir), library, name, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            # What steers the workers' driver does not steer the engine's.
            env={key: value for key, value in os.environ.items() if not key.startswith("STUBCUDA_")},
        )
        self.pid = self._process.pid
        self.worker = self.ask(worker=0)["pid"]

    def ask(self, **words: Any) -> dict[str, Any]:
        """Tell and hear."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the engine's process ended"
        return dict(json.loads(line))

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def answer(engine: GpuEngine, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked."""
    match asked:
        case {"fill": blocks, "seed": seed}:
            engine.fill(blocks, seed)
        case {"store": blocks, "text": text}:
            outcome = engine.store(text, keys_of(text, len(blocks)), blocks)
            engine.client.finish(text)
            return {"outcome": outcome.name}
        case {"begin": blocks, "text": text}:
            engine.client.store(text, keys_of(text, len(blocks)), blocks)
            engine.step()
        case {"load": blocks, "text": text}:
            hits = engine.hits(f"{text} again", keys_of(text, len(blocks)))
            if hits < len(blocks):
                return {"hits": hits, "ok": False}
            (end,) = engine.load(f"{text} again", keys_of(text, len(blocks)), blocks)
            return {"hits": hits, "ok": end.ok}
        case {"bytes": blocks}:
            return {"digest": hashlib.sha256(b"".join(engine.bytes_of(blocks))).hexdigest()}
        case {"worker": _}:
            return {"pid": engine.ranks[0].worker_pid}
    return {}


def main() -> None:
    run_dir, library, name, kind = sys.argv[1:]
    gpu = FakeEngine(library)
    engine = GpuEngine(SimpleNamespace(run_dir=run_dir), gpu, kind, None, name=name)  # type: ignore[arg-type]
    assert engine.client.wait_attached(20), engine.notes
    until(lambda: engine.ranks[0].attached, 5, "the rank's own word")
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
