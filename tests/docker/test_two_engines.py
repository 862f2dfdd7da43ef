"""Profile multi-engine of docker/compose.yaml, really started: two engines, one sidecar, one pool.

The tests of this module share one stack and run in their order.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.docker.daemon import Docker
from tests.docker.stack import WHOLE_BLOCKS, WHOLE_TOKENS, Stack, built, say, until

pytestmark = pytest.mark.docker

SEEDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def pair(docker: Docker, docker_folder: Path) -> Iterator[Stack]:
    """Both engines started and attached; at the end nothing is left."""
    with built(docker, docker_folder, "multi-engine") as one:
        # One after the other: two at once are each too slow for its time on a machine of two cores.
        for service in ("vllm-a", "vllm-b"):
            one.compose("up", "-d", service, timeout_s=400)
            one.wait_healthy(service)
        assert [one.health(service) for service in ("pool", "kvferry")] == ["healthy", "healthy"]
        one.wait_served(2)
        yield one


@pytest.fixture(scope="module")
def cold(pair: Stack) -> list[str]:
    """What engine a answers to the four prompts, computed without any cache; it is all in the pool then."""
    said = pair.ask("vllm-a", SEEDS)
    assert [one["cached"] for one in said["answers"]] == [0] * len(SEEDS), said
    until(lambda: num_ready(pair) == len(SEEDS) * WHOLE_BLOCKS, 30, "engine a's blocks are stored")
    return [one["text"] for one in said["answers"]]


def num_ready(pair: Stack) -> int:
    """Blocks in the pool that can be loaded; 0 while any is being written."""
    slots = pair.status().get("slots", {"writing": 1})
    return 0 if slots["writing"] else int(slots["ready"])


def cached(said: dict[str, Any]) -> list[int]:
    """Of each prompt, how many tokens were not computed."""
    return [one["cached"] for one in said["answers"]]


def numbers(said: dict[str, Any]) -> str:
    """The same for a line of the transcript."""
    return " ".join(map(str, cached(said)))


def test_one_sidecar_serves_both_engines(pair: Stack) -> None:
    """Case 85: the numbers of their processes are the same in both containers, and nothing of one is the other's."""
    status = pair.wait_served(2)
    assert len({one["engine_id"] for one in status["engines"]}) == 2
    assert len({one["namespace"] for one in status["engines"]}) == 1, "one model: what one stores the other may load"
    assert len({rank["worker"] for one in status["engines"] for rank in one["ranks"]}) == 2, "each has its own worker"


def test_what_one_engine_has_computed_the_other_finds(pair: Stack, cold: list[str]) -> None:
    # An answer that is late, as on a crowded machine, is a miss and no fault, so the four may be asked some times.
    for times in range(1, 6):
        said = pair.ask("vllm-b", SEEDS)
        assert [one["text"] for one in said["answers"]] == cold
        again = f" (asked {times} times)" if times > 1 else ""
        found = f"cached tokens {numbers(said)}, from kvferry {said['from_outside']:.0f}{again}"
        say(f"{'computed by vllm-a, asked of vllm-b:':<38} {found}")
        if times == 1:
            assert said["from_outside"] == sum(cached(said)), "the first time all that it finds is engine a's"
        if cached(said) == [WHOLE_TOKENS] * len(SEEDS):
            break
    else:
        raise AssertionError(f"engine b never found it all\n{pair.log('vllm-b')}\n{pair.log('kvferry')}")
    assert num_ready(pair) == len(SEEDS) * WHOLE_BLOCKS, "nothing was stored twice"


def test_the_kill_of_one_engine_does_not_disturb_the_other(pair: Stack, cold: list[str]) -> None:
    """Case 99: engine b answers the same words all the while, is attached through the same worker, and hits on."""
    killed = pair.container("vllm-a")
    before = {one["engine_id"]: one["ranks"][0]["worker"] for one in pair.wait_served(2)["engines"]}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.ask, "vllm-b", SEEDS * 3)
        pair.docker("kill", killed)
        said = asked.result(300)
    assert [one["text"] for one in said["answers"]] == cold * 3
    longest = max(one["seconds"] for one in said["answers"])
    say(f"{'vllm-a killed while vllm-b is asked:':<38} cached tokens {numbers(said)}; longest answer {longest:.1f} s")
    assert WHOLE_TOKENS in cached(said)[-len(SEEDS) :], pair.log("vllm-b")
    (left,) = pair.wait_served(1, timeout_s=10)["engines"]
    assert before[left["engine_id"]] == left["ranks"][0]["worker"], "engine b was attached anew"
    assert num_ready(pair) == len(SEEDS) * WHOLE_BLOCKS, "what the dead engine stored stays"
    assert (pair.health("vllm-b"), pair.look("vllm-b", "{{.RestartCount}}")) == ("healthy", "0")


def test_down_leaves_nothing_of_two_engines(pair: Stack) -> None:
    pids = pair.pids()
    pair.compose("down", "-v")
    assert not pair.leftovers(pids)
