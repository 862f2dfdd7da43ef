"""A vLLM engine as a child process: commands as JSON lines on stdin, one answer a line on the descriptor given.

    argv[1]  JSON of LLM() arguments; "connector" in it is the KVTransferConfig's arguments or null
    argv[2]  number of the descriptor that answers are written to (stdout belongs to vLLM's own prints)

    {"op": "generate", "prompts": [[ids]], "max_tokens": n}         all at once; see `_answer`
    {"op": "talk", "talks": [[[ids], ...]], "max_tokens": n}        conversations side by side; each turn's prompt
                                                                  is all before it, the answers and its own ids
    {"op": "abort", "prompts": [[ids]], "max_tokens": n, "steps": k}  k engine steps, then all are aborted
    {"op": "reset", "connector": bool, "running": bool}             the engine's prefix cache (and the connector's)
    {"op": "reload"}                                                the weights, from the files that are there now
    {"op": "quit"}

Runs under `if __name__ == "__main__"`: vLLM starts its own children by spawning.
"""

import json
import os
import sys
import time
from typing import Any


def _answer(output: Any, ttft_s: float) -> dict[str, Any]:
    """Tokens, log probabilities, cached tokens and time to first token of a finished request."""
    first = output.outputs[0]
    return {
        "tokens": list(first.token_ids),
        "logprobs": [next(iter(entry.values())).logprob for entry in first.logprobs or ()],
        "cached": output.num_cached_tokens or 0,
        "prompt": len(output.prompt_token_ids or ()),
        "ttft_s": round(ttft_s, 6),
    }


class Engine:
    """The LLM and its request numbers."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = arguments.pop("connector", None)
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        self.llm = LLM(skip_tokenizer_init=True, **arguments)
        self.next_id = 0

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Queue a prompt; its request id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        self.next_id += 1
        request_id = f"r{self.next_id}"
        # vLLM gives the request an internal name; outputs and aborts speak of ours.
        self.llm.llm_engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)
        return request_id

    def run(self, talks: list[list[list[int]]], max_tokens: int) -> list[list[dict[str, Any]]]:
        """Play conversations side by side, each turn as soon as the one before it has ended."""
        engine = self.llm.llm_engine
        history: list[list[int]] = [[] for _ in talks]
        answers: list[list[dict[str, Any]]] = [[] for _ in talks]
        live: dict[str, int] = {}
        began: dict[str, float] = {}
        first: dict[str, float] = {}

        def ask(talk: int) -> None:
            history[talk] = history[talk] + talks[talk][len(answers[talk])]
            started = time.perf_counter()
            request_id = self.add(history[talk], max_tokens)
            live[request_id], began[request_id] = talk, started

        for talk in range(len(talks)):
            ask(talk)
        while live:
            for output in engine.step():
                now = time.perf_counter()
                request_id = output.request_id
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(request_id, now)
                if output.finished:
                    talk = live.pop(request_id)
                    answers[talk].append(_answer(output, first[request_id] - began[request_id]))
                    history[talk] = history[talk] + list(output.outputs[0].token_ids)
                    if len(answers[talk]) < len(talks[talk]):
                        ask(talk)
        return answers

    def abort(self, prompts: list[list[int]], max_tokens: int, steps: int) -> int:
        """Start requests, step the engine, abort them all; how many were still running."""
        engine = self.llm.llm_engine
        live = {self.add(prompt, max_tokens) for prompt in prompts}
        for _ in range(steps):
            for output in engine.step():
                if output.finished:
                    live.discard(output.request_id)
        engine.abort_request(sorted(live))
        while engine.has_unfinished_requests():
            engine.step()
        return len(live)

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry one command out."""
        operation = command["op"]
        started = time.perf_counter()
        answer: dict[str, Any] = {}
        if operation == "generate":
            talks = [[prompt] for prompt in command["prompts"]]
            answer["answers"] = [talk[0] for talk in self.run(talks, command["max_tokens"])]
        elif operation == "talk":
            answer["talks"] = self.run(command["talks"], command["max_tokens"])
        elif operation == "abort":
            answer["aborted"] = self.abort(command["prompts"], command["max_tokens"], command["steps"])
        elif operation == "reset":
            answer["ok"] = self.llm.llm_engine.reset_prefix_cache(
                reset_running_requests=command.get("running", False), reset_connector=command.get("connector", False)
            )
        elif operation == "reload":
            self.llm.collective_rpc("reload_weights")
        else:
            answer["error"] = f"unknown operation {operation!r}"
        answer["seconds"] = round(time.perf_counter() - started, 6)
        return answer


def main() -> None:
    """Serve commands until `quit` or the end of stdin."""
    answers = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": os.getpid()}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "quit":
            break
        try:
            answer = engine.obey(command)
        except Exception as error:  # the parent decides what a failed engine means
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
