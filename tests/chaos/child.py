"""A vLLM engine as a child process that streams: commands as JSON lines on stdin, events as JSON lines back.

    argv[1]  JSON of engine arguments; "connector" in it is the KVTransferConfig's arguments or null
    argv[2]  number of the descriptor that events are written to (stdout belongs to vLLM's own prints)

    {"id": name, "prompt": [ids], "max_tokens": n, "top": k}   a request: greedy, `k` log probabilities a token
    ──▶ {"id", "t", "tokens", "logprobs", "gaps", "cached", "end"}   for each piece of its answer
        {"id", "error"}                                         it failed

`t` is time.monotonic() when the piece came: one clock for all processes of a machine. `gaps` are the distances
of the best two log probabilities (with top >= 2). `end` is null, or why the answer is over.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

LINE_BYTES = 1 << 22


class Child:
    """The engine and the line that it speaks over."""

    def __init__(self, arguments: dict[str, Any], events: int) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        connector = arguments.pop("connector", None)
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        given = AsyncEngineArgs(skip_tokenizer_init=True, disable_log_stats=True, **arguments)
        self.engine = AsyncLLM.from_engine_args(given)
        self.events = os.fdopen(events, "w", buffering=1)

    def tell(self, **event: Any) -> None:
        print(json.dumps(event), file=self.events)

    async def serve(self) -> None:
        """Until stdin ends."""
        stdin = asyncio.StreamReader(limit=LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        self.tell(ready=os.getpid())
        answers = set()
        while line := await stdin.readline():
            task = asyncio.create_task(self.answer(json.loads(line)))
            answers.add(task)
            task.add_done_callback(answers.discard)

    async def answer(self, command: dict[str, Any]) -> None:
        """One request, from its first token to its last."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        name = command["id"]
        wanted = SamplingParams(
            temperature=0,
            max_tokens=command["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=command["top"],
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            prompt = TokensPrompt(prompt_token_ids=command["prompt"])
            async for output in self.engine.generate(prompt, wanted, name):
                first = output.outputs[0]
                ranked = [sorted((one.logprob for one in entry.values()), reverse=True) for entry in first.logprobs]
                self.tell(
                    id=name,
                    t=time.monotonic(),
                    tokens=list(first.token_ids),
                    logprobs=[
                        entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids, strict=True)
                    ],
                    gaps=[best[0] - best[1] for best in ranked if len(best) > 1],
                    cached=output.num_cached_tokens or 0,
                    end=first.finish_reason,
                )
        except Exception as error:  # the drill counts it
            self.tell(id=name, error=repr(error))


async def main() -> None:
    """Build the engine inside the loop that it will live in, and serve."""
    await Child(json.loads(sys.argv[1]), int(sys.argv[2])).serve()


if __name__ == "__main__":
    asyncio.run(main())
