"""The connector's scheduler half without vLLM: requests are plain values, the sidecar is a fake. Runs everywhere."""

from dataclasses import dataclass, field
from typing import Any

from fake_sidecar import FakeClient, FakeSidecar

from kvferry.client.types import Hits, JobEnd
from kvferry.proto.outcome import Kind, Next, Outcome, Reason
from kvferry.vllm.guard import guarded
from kvferry.vllm.scheduler import HOLDING_NS, PIN_NS, SchedulerHalf
from kvferry.vllm.work import StepWork

BLOCK = 4


@dataclass
class Asked:
    """What the scheduler half reads of a vLLM request."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return [b"key%d" % n for n in range(self.num_tokens // BLOCK)]


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 1
    is_null: bool = False


@dataclass
class Pool:
    """vLLM's block pool, as far as it is used."""

    blocks: list[Block] = field(default_factory=lambda: [Block(n, is_null=n == 0) for n in range(64)])
    watchers: dict[int, Any] = field(default_factory=dict)

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def unpin_blocks(self, blocks: list[Block], on_reuse: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            self.watchers[block.block_id] = on_reuse

    def hand_out(self, block_id: int) -> None:
        self.blocks[block_id].ref_cnt = 1
        if watcher := self.watchers.pop(block_id, None):
            watcher(self.blocks[block_id])


class Lab:
    """A scheduler half over a fake client, and one engine step in one call."""

    def __init__(self, **options: Any) -> None:
        self.now = 0
        self.sidecar = FakeSidecar(0)
        self.client = FakeClient(self.sidecar)
        self.half = SchedulerHalf(self.client, block_tokens=BLOCK, now_ns=lambda: self.now, **options)
        self.pool = Pool()
        self.half.bind_pool(self.pool)
        self.tables: dict[str, list[int]] = {}

    def hold(self, count: int) -> None:
        """The sidecar holds the first keys."""
        for n in range(count):
            self.sidecar.held[b"key%d" % n] = [(n,)]

    def step(self, *scheduled: tuple[Asked, int], preempted: tuple[str, ...] = ()) -> StepWork:
        counts = {request.request_id: count for request, count in scheduled}
        work = self.half.step(counts, preempted, lambda name: self.tables[name])
        for request, count in scheduled:
            request.num_computed_tokens += count
        return work

    def stored(self, work: StepWork) -> list[tuple[int, ...]]:
        return [self.sidecar.jobs[ticket].blocks for ticket in work.directive.stores]


def test_a_block_is_stored_in_the_step_that_fills_it() -> None:
    lab, request = Lab(), Asked("a", 10)
    lab.half.arrived(request)
    lab.tables["a"] = [7, 8, 9]
    assert lab.stored(lab.step((request, 10))) == [(7, 8)]
    request.num_output_tokens = 1
    assert lab.stored(lab.step((request, 1))) == []
    request.num_output_tokens = 2
    assert lab.stored(lab.step((request, 1))) == [(9,)]


def test_tokens_that_are_not_known_yet_are_not_stored() -> None:
    """Case 11: with asynchronous scheduling a step counts a token whose value comes later."""
    lab, request = Lab(), Asked("a", 3)
    lab.half.arrived(request)
    lab.tables["a"] = [7, 8]
    lab.step((request, 3))
    assert lab.stored(lab.step((request, 1))) == []  # the fourth token is a placeholder
    request.num_output_tokens = 1
    assert lab.stored(lab.step((request, 1))) == [(7,)]


def test_what_is_held_is_not_offered_again() -> None:
    lab, request = Lab(), Asked("a", 14)
    lab.hold(2)
    lab.half.arrived(request)
    lab.tables["a"] = [5, 6, 7, 8]
    assert lab.half.matched(request, 8) == (0, False)  # the engine has these two itself
    request.num_computed_tokens = 8
    assert lab.stored(lab.step((request, 6))) == [(7,)]


def test_hits_never_reach_the_last_token() -> None:
    lab = Lab()
    lab.hold(5)
    for tokens, found in ((8, 4), (9, 8), (4, 0), (1, 0)):
        request = Asked(f"r{tokens}", tokens)
        lab.half.arrived(request)
        assert lab.half.matched(request, 0) == (found, found > 0)


def test_a_late_answer_is_asked_for_again_next_step() -> None:
    lab, request = Lab(), Asked("a", 9)
    lab.hold(2)
    lab.sidecar.lateness = 100
    lab.half.arrived(request)
    assert lab.half.matched(request, 0) == (None, False)
    lab.sidecar.lateness = 0
    assert lab.half.matched(request, 0) == (8, True)


def test_an_answer_is_waited_for_longer_only_if_nothing_else_could_be_computed() -> None:
    """An empty step in its place takes longer; a step that computes is never kept waiting."""
    lab, request, other = Lab(), Asked("a", 9), Asked("b", 9)
    lab.hold(2)
    lab.half.arrived(request)
    found, _ = lab.half.matched(request, 0)
    assert lab.client.idle_s > 0, "it is alone"
    lab.tables["a"] = [3, 4, 5]
    lab.half.allocated(request, lab.tables["a"], found)
    lab.step()
    lab.half.arrived(other)
    lab.half.matched(other, 0)
    assert lab.client.idle_s > 0, "the other one only waits for its load"
    lab.half.heard({"a"}, (), {})
    lab.half.matched(other, 0)
    assert lab.client.idle_s == 0, "the load is over: its request can run"
    lab.step((request, 1))
    lab.half.finished(request, lab.tables["a"], is_aborted=False)
    lab.half.matched(other, 0)
    assert lab.client.idle_s > 0, "its request has ended"


def test_a_key_on_its_way_is_waited_for_only_if_the_engine_lacks_its_block() -> None:
    """Case 114: many requests of one prefix must not queue behind the first one's store."""
    lab, request = Lab(), Asked("a", 20)
    lab.half.arrived(request)
    lab.client.hits = lambda *_, **__: Hits(False, 2, Next.PENDING, 5)  # type: ignore[method-assign]
    assert lab.half.matched(request, 8) == (None, False)
    assert lab.half.matched(request, 12) == (0, False)


def test_a_failed_load_is_not_offered_again_and_its_blocks_are_stored_anew() -> None:
    """Case 105: a failure that is asked for again would fail for ever."""
    lab, request = Lab(), Asked("a", 17)
    lab.hold(4)
    lab.half.arrived(request)
    lab.tables["a"] = [11, 12, 13, 14, 15]
    assert lab.half.matched(request, 0) == (16, True)
    lab.half.allocated(request, lab.tables["a"], 16)
    work = lab.step()
    ((ticket, blocks),) = work.directive.loads
    assert blocks == (11, 12, 13, 14) and work.names == {ticket: "a"}
    lab.half.heard((), {13, 99}, {})  # one rank, earlier than the others
    lab.half.heard({"a"}, (), {})
    assert lab.client.told == {ticket: False}
    assert lab.half.matched(request, 0) == (0, False)
    request.num_computed_tokens = 8
    assert lab.stored(lab.step((request, 9))) == [(13, 14)]


def test_words_on_requests_of_other_connectors_change_nothing() -> None:
    """Case 21."""
    lab = Lab()
    lab.half.heard({"somebody else's"}, {1, 2}, {})
    assert lab.client.told == {}


def test_a_second_allocation_after_the_load_is_no_load() -> None:
    lab, request = Lab(), Asked("a", 9)
    lab.hold(2)
    lab.half.arrived(request)
    lab.half.matched(request, 0)
    lab.half.allocated(request, [3, 4, 5], 8)
    lab.step()
    lab.half.heard({"a"}, (), {})
    lab.half.allocated(request, [3, 4, 5], 0)
    assert lab.step().directive.loads == ()


def test_a_preempted_request_is_a_new_attempt() -> None:
    """Case 23: an old store's end is not booked on the request's next life."""
    lab, request = Lab(), Asked("a", 9)
    lab.half.arrived(request)
    lab.tables["a"] = [3, 4, 5]
    lab.step((request, 9))
    request.num_preemptions, request.num_computed_tokens = 1, 0
    lab.pool.hand_out(3)
    work = lab.step(preempted=("a",))
    assert len(work.directive.revokes) == 1
    assert lab.client.asked["a"], "its prefix is asked for at once"
    lab.tables["a"] = [8, 9, 10]
    assert lab.stored(lab.step((request, 9))) == [(8, 9)]


def test_what_a_step_writes_and_stores_is_not_revoked_by_its_own_writing() -> None:
    lab, one, two = Lab(), Asked("a", 8), Asked("b", 8)
    lab.half.arrived(one)
    lab.tables |= {"a": [3, 4], "b": [4, 6]}
    first = lab.step((one, 8))
    lab.half.arrived(two)
    lab.pool.hand_out(4)
    second = lab.step((two, 8))
    assert second.directive.revokes == first.directive.stores
    assert lab.stored(second) == [(4, 6)]


def test_a_finished_requests_tail_is_pinned_until_it_is_copied() -> None:
    """Case 11: the last block is known only when the request has ended, and may have a new owner in the next step."""
    lab, request = Lab(), Asked("a", 3)
    lab.half.arrived(request)
    lab.tables["a"] = [7]
    lab.step((request, 3))
    lab.step((request, 1))
    request.num_output_tokens = 2
    lab.half.finished(request, [7], is_aborted=False)
    assert lab.pool.blocks[7].ref_cnt == 2
    assert lab.half.wants_steps()
    (ticket,) = lab.step().directive.stores
    lab.sidecar.ends.append(JobEnd(ticket, "a", Kind.STORE, Outcome.OK, accepted=1))
    assert not lab.half.wants_steps()
    assert lab.pool.blocks[7].ref_cnt == 1


def test_a_pin_ends_by_itself() -> None:
    lab, request = Lab(), Asked("a", 3)
    lab.half.arrived(request)
    lab.tables["a"] = [7]
    lab.step((request, 3))
    lab.step((request, 1))
    request.num_output_tokens = 2
    lab.half.finished(request, [7], is_aborted=False)
    lab.now += PIN_NS
    assert not lab.half.wants_steps()
    assert lab.pool.blocks[7].ref_cnt == 1
    lab.pool.hand_out(7)
    assert lab.step().directive.stores == (), "its store is withdrawn when the block goes"


def test_a_request_that_never_ran_ends_without_blocks() -> None:
    """Case 18."""
    lab, request = Lab(), Asked("a", 100)
    lab.half.arrived(request)
    lab.half.finished(request, [], is_aborted=True)
    assert lab.step().directive.stores == ()


def test_the_null_block_is_never_stored_nor_what_lies_behind_it() -> None:
    """Case 71: vLLM pads tables with block 0, whose bytes are nobody's."""
    lab, request = Lab(), Asked("a", 12)
    lab.half.arrived(request)
    lab.tables["a"] = [3, 0, 5]
    assert lab.stored(lab.step((request, 12))) == [(3,)]
    other = Asked("b", 8)
    lab.half.arrived(other)
    lab.tables["b"] = [0, 4]
    assert lab.stored(lab.step((other, 8))) == []


def test_an_idle_engine_steps_on_while_a_rank_holds_begins_back_and_no_longer_than_a_bound() -> None:
    """Case 17: a GPU that cannot write marks is asked again in a later step, which must then come."""
    lab, request = Lab(), Asked("a", 4)
    assert not lab.half.wants_steps()
    lab.half.holding(True)
    assert lab.half.wants_steps()
    lab.half.holding(False)
    assert not lab.half.wants_steps()
    lab.half.holding(True)
    lab.now = HOLDING_NS // 2
    lab.half.holding(True)
    lab.now = HOLDING_NS
    assert not lab.half.wants_steps(), "the device hangs: an idle engine does not spin for it"
    lab.half.arrived(request)
    lab.tables["a"] = [3]
    lab.step((request, 4))
    lab.half.holding(True)
    assert lab.half.wants_steps(), "a step that computes begins a new bound"


def test_a_refused_store_is_tried_again_with_the_next_block() -> None:
    """Case 60."""
    lab, request = Lab(), Asked("a", 8)
    lab.half.arrived(request)
    lab.tables["a"] = [3, 4, 5]
    (ticket,) = lab.step((request, 8)).directive.stores
    lab.sidecar.ends.append(JobEnd(ticket, "a", Kind.STORE, Outcome.OK, Reason.POOL_FULL, accepted=1))
    request.num_output_tokens = 4
    assert lab.stored(lab.step((request, 4))) == [(4, 5)]


def test_nothing_is_stored_while_there_is_no_sidecar_and_everything_once_there_is() -> None:
    """Case 46."""
    lab, request = Lab(), Asked("a", 8)
    lab.client.attached = False
    lab.half.arrived(request)
    lab.tables["a"] = [3, 4, 5]
    assert lab.step((request, 8)).directive.stores == ()
    lab.client.attached = True
    request.num_output_tokens = 1
    assert lab.stored(lab.step((request, 1))) == [(3, 4)]


def test_a_reset_stops_stores_of_what_was_computed_before_it() -> None:
    """Case 70: after new weights no old block may come back."""
    lab, old, waiting = Lab(new_salt=lambda: b"new"), Asked("old", 8), Asked("waiting", 8)
    for request in (old, waiting):
        lab.half.arrived(request)
    lab.tables |= {"old": [3, 4, 5], "waiting": [6, 7]}
    work = lab.step((old, 8))
    lab.half.reset()
    old.num_output_tokens = 4
    after = lab.step((old, 4), (waiting, 8))
    assert after.directive.revokes == work.directive.stores
    assert lab.stored(after) == [(6, 7)]
    assert lab.client.salt == b"new"


def test_after_a_failure_of_its_own_it_offers_and_stores_nothing_but_serves_what_runs() -> None:
    lab, request, other = Lab(), Asked("a", 9), Asked("b", 9)
    lab.hold(2)
    for one in (request, other):
        lab.half.arrived(one)
    lab.half.matched(request, 0)
    lab.half.allocated(request, [3, 4, 5], 8)
    lab.half.switch_off()
    work = lab.half.failed_step()
    assert work.failed == {"a": (3, 4)} and work.directive.loads == ()
    assert lab.half.matched(other, 0) == (0, False)
    lab.half.heard({"a"}, {3, 4}, {})
    assert list(lab.client.told.values()) == [False]


def test_no_exception_gets_out_of_a_guarded_method() -> None:
    class Hook:
        failures: list[str] = []

        def on_failure(self, name: str, error: Exception) -> None:
            self.failures.append(f"{name}: {error}")

        @guarded(lambda self: (0, False))
        def ask(self) -> tuple[int, bool]:
            raise RuntimeError("boom")

        @guarded(lambda self: 1 / 0)
        def worse(self) -> float:
            raise RuntimeError("boom")

    hook = Hook()
    assert hook.ask() == (0, False)
    assert hook.worse() is None
    assert [line.split(":")[0] for line in hook.failures] == ["ask", "worse", "worse, on its way out"]


def test_a_rank_whose_load_is_over_sleeps_on_while_another_ranks_is_not() -> None:
    """It would spin between empty steps otherwise, and starve the copy that the other rank waits for."""
    lab, request = Lab(), Asked("a", 9)
    lab.hold(2)
    lab.half.arrived(request)
    found, _ = lab.half.matched(request, 0)
    assert found > 0
    lab.tables["a"] = [3, 4, 5]
    lab.half.allocated(request, lab.tables["a"], found)
    lab.step()
    between = lab.step()
    assert (between.is_idle, between.is_waiting) == (True, True)
    lab.half.heard({"a"}, (), {})
    assert not lab.step().is_waiting


def test_an_empty_step_beside_one_under_way_is_not_idle() -> None:
    """A pipeline is sent empty steps while its others run: the first stage would sleep when the next one comes."""
    lab, request, running = Lab(), Asked("a", 9), Asked("b", 3)
    lab.hold(2)
    lab.half.arrived(request)
    found, _ = lab.half.matched(request, 0)
    lab.tables["a"] = [3, 4, 5]
    lab.half.allocated(request, lab.tables["a"], found)
    lab.half.arrived(running)
    lab.step((running, 3))
    assert not lab.step().is_idle
    running.num_output_tokens = 1
    assert lab.step().is_idle, "its token has come"


def test_an_engine_that_others_wait_for_in_each_step_never_pauses() -> None:
    """Data-parallel engines of one mixture of experts compute together, idle ones too."""
    lab, request = Lab(may_pause=False), Asked("a", 9)
    lab.half.arrived(request)
    lab.sidecar.lateness = 100
    lab.half.matched(request, 0)
    assert lab.client.idle_s == 0 and not lab.step().is_idle


def test_a_step_says_whether_it_is_idle_and_whether_it_waits_for_an_answer() -> None:
    lab, request = Lab(), Asked("a", 9)
    lab.half.arrived(request)
    lab.tables["a"] = [3, 4, 5]
    lab.sidecar.lateness = 100
    lab.half.matched(request, 0)
    waiting = lab.step()
    assert (waiting.is_idle, waiting.is_waiting) == (True, True)
    after = lab.step((request, 9))
    assert (after.is_idle, after.is_waiting) == (False, False)
