"""make demo: conversations come back after their KV was evicted, without kvferry and with it.

    act 1   the engine alone: what was evicted is computed again
    act 2   the same conversations with kvferry beside it: what was evicted is loaded
    act 3   the engine is stopped and started anew: its first turns hit as well

Ends with a table of every turn, and with exit code 1 if any token differs or nothing came from kvferry. Nothing is
left running, in the run dir or in /dev/shm, whether it ends by itself or by Ctrl-C.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from reference_engine import Completion, Engine, EngineConfig, EngineDeadError, KvferryConfig
from sidecar import Sidecar, SidecarError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Story:
    """The workload: who talks for how long. All counts are tokens but the first two."""

    conversations: int = 4
    turns: int = 4  # of each conversation, before the restart; one more follows it
    system: int = 256  # the system prompt, the same for all
    document: int = 1500  # what the first message of a conversation brings along
    message: int = 40
    answer: int = 32


@dataclass(slots=True)
class Conversation:
    """The tokens said so far, on both sides."""

    name: str
    tokens: list[int]
    draw: random.Random
    vocab: int

    def say(self, count: int) -> None:
        """The user's next message: random words, the same in each act."""
        self.tokens += [self.draw.randrange(self.vocab) for _ in range(count)]


@dataclass(slots=True)
class Act:
    """One run of the whole story: the completion of each (turn, conversation)."""

    turns: dict[tuple[int, str], Completion] = field(default_factory=dict)
    seconds: float = 0.0


def say(text: str = "", end: str = "\n") -> None:
    """To the person watching, at once."""
    print(text, end=end, flush=True)


def begin(story: Story, vocab: int) -> list[Conversation]:
    """The conversations before their first turn."""
    draw = random.Random(0)
    system = [draw.randrange(vocab) for _ in range(story.system)]
    names = [chr(ord("A") + i) for i in range(story.conversations)]
    talks = [Conversation(name, list(system), random.Random(name), vocab) for name in names]
    for talk in talks:
        talk.say(story.document)
    return talks


def play(engine: Engine, story: Story, talks: list[Conversation], turns: range, act: Act) -> None:
    """Play these turns, all conversations by turns: each comes back when the others have used its blocks."""
    began = time.perf_counter()
    for turn in turns:
        say(f"    turn {turn}  ", end="")
        for talk in talks:
            talk.say(story.message)
            done = engine.generate(talk.tokens, story.answer)
            talk.tokens += done.tokens
            act.turns[turn, talk.name] = done
            say(f"  {talk.name} {done.ttft_s * 1e3:6.0f} ms", end="")
        say()
    act.seconds += time.perf_counter() - began


def tell_the_story(story: Story, config: EngineConfig, host_memory: str) -> int:
    """All acts and the table; the exit code."""
    last = story.turns + 1
    longest = story.system + story.document + last * story.message + story.turns * story.answer
    say("kvferry demo: conversations that come back after their KV was evicted\n")
    say(f"  engine     a small Llama in torch, {config.tp} ranks (tensor parallel), room for the KV of")
    say(f"             {config.num_blocks * config.block_tokens:,} tokens ({config.num_blocks} blocks)")
    say(f"  workload   {story.conversations} conversations take turns; prompts of up to {longest:,} tokens,", end=" ")
    say(f"the first {story.system}")
    say("             the same for all; by the time one returns, the others have taken its blocks\n")

    say("[1/3] the engine alone; time to first token (TTFT) of each turn")
    alone, talks = Act(), begin(story, config.model.vocab)
    with Engine(config) as engine:
        play(engine, story, talks, range(1, last), alone)
    with Engine(config) as engine:
        say("    restarted")
        play(engine, story, talks, range(last, last + 1), alone)

    say(f"\n[2/3] the same with kvferry: kvferry up --tp-size {config.tp} --host-memory {host_memory} --device cpu")
    ferried, talks = Act(), begin(story, config.model.vocab)
    sidecar = Sidecar(config.tp, host_memory)
    try:
        say(f"    {sidecar.ready_line}")
        with attached(config, sidecar, "demo-1") as engine:
            play(engine, story, talks, range(1, last), ferried)
        say("\n[3/3] the engine is stopped and started anew; kvferry stayed")
        with attached(config, sidecar, "demo-2") as engine:
            play(engine, story, talks, range(last, last + 1), ferried)
    finally:
        left = sidecar.close()
    say()
    show_table(alone, ferried, last)
    return verdict(alone, ferried, last, left)


@contextlib.contextmanager
def attached(config: EngineConfig, sidecar: Sidecar, engine_id: str) -> Iterator[Engine]:
    """An engine that kvferry serves."""
    began = time.perf_counter()
    with Engine(config, KvferryConfig(engine_id, sidecar.run_dir)) as engine:
        # An engine need not wait for this, it would only miss until then; a demonstration would rather not.
        if not engine.wait_attached(30.0):
            raise SidecarError(
                f"engine {engine_id} is not attached after 30 s: {engine.client and engine.client.describe()}"
            )
        mib = engine.kv_bytes >> 20
        say(
            f"    engine {engine_id} attached: {config.tp} ranks, {mib} MiB of KV ({time.perf_counter() - began:.1f} s)"
        )
        yield engine


def show_table(alone: Act, ferried: Act, last: int) -> None:
    """Every turn: where its prompt's KV came from, how long it took with and without, and whether tokens are equal."""
    say("              ┌───── prompt tokens, with kvferry ─────┐  ┌───────── TTFT ──────────┐")
    say("  turn  who     prompt  computed  own cache  kvferry    without      with   ratio   tokens equal")
    for (turn, name), ferry in ferried.turns.items():
        without = alone.turns[turn, name]
        if turn == last and name == "A":
            say("  ── engine restarted " + "─" * 76)
        cold_ms, ms = without.ttft_s * 1e3, ferry.ttft_s * 1e3
        equal = "yes" if ferry.tokens == without.tokens else "NO"
        say(
            f"  {turn:>4}   {name}   {ferry.prompt_tokens:>8,}  {ferry.computed:>8,}  {ferry.own:>9,}"
            f"  {ferry.kvferry:>7,}   {cold_ms:>5.0f} ms  {ms:>5.0f} ms   {ms / cold_ms:>5.3f}   {equal}"
        )
    say()


def verdict(alone: Act, ferried: Act, last: int, left: list[str]) -> int:
    """The sums, and the exit code."""
    differ = [
        f"{name}{turn}" for (turn, name), c in ferried.turns.items() if c.tokens != alone.turns[turn, name].tokens
    ]
    restarted = sum(c.kvferry for (turn, _), c in ferried.turns.items() if turn == last)
    returned = [key for key in ferried.turns if key[0] > 1]
    without = statistics.median(alone.turns[key].ttft_s for key in returned)
    with_it = statistics.median(ferried.turns[key].ttft_s for key in returned)
    computed = [sum(c.computed for c in act.turns.values()) for act in (alone, ferried)]
    loaded = sum(c.kvferry for c in ferried.turns.values())
    say(f"  prompt tokens computed    {computed[0]:>8,} without   {computed[1]:>8,} with kvferry")
    say(f"  TTFT of returning turns   {without * 1e3:>5.0f} ms without   {with_it * 1e3:>5.0f} ms with   (medians)")
    say(f"  all turns together        {alone.seconds:>6.1f} s without   {ferried.seconds:>6.1f} s with\n")
    faults = []
    if differ:
        faults.append(f"tokens differ in {', '.join(differ)}")
    if not loaded:
        faults.append("nothing came from kvferry")
    elif not restarted:
        faults.append("nothing came from kvferry after the restart")
    if left:
        faults.append(f"left behind: {', '.join(left)}")
    if faults:
        say("  FAILED: " + "; ".join(faults))
        return 1
    say(f"  All answers are equal; {loaded:,} prompt tokens came from kvferry; no socket or memory file is left.")
    return 0


def stop(*_: object) -> None:
    """Ctrl-C, a plain `kill`, a closed terminal: once is enough, and cleaning up is not to be interrupted."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short conversations of two turns each")
    parser.add_argument("--host-memory", default="512MiB", help="host memory of the sidecar (default: %(default)s)")
    options = parser.parse_args()
    story, config = Story(), EngineConfig(num_blocks=288)
    if options.quick:
        story, config = Story(conversations=2, turns=2, system=64, document=200), EngineConfig(num_blocks=36)
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        return tell_the_story(story, config, options.host_memory)
    except KeyboardInterrupt:
        say("\n  stopped; nothing is left running")
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SidecarError, EngineDeadError) as error:
        say(f"\n  FAILED: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
