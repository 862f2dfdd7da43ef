"""An operator's reset: a namespace's epoch rises, and all that it held is a miss from that moment.

    index ──reset──▶ dying ── some keys a step ──▶ slots FREE (those that a load still reads: when it lets go)
      └ a new, empty one under the next epoch

The cost of the reset itself is that of the jobs and leases under way, not of the keys held: the old
index is set aside whole. Until its turn comes a key of it is like any evictable one: nobody finds it, and
whoever needs a place may have its slot.
"""

from kvferry.proto.control import Refused, ResetAnswer, ResetAsk
from kvferry.proto.errors import RefusedError
from kvferry.proto.ids import LinkId
from kvferry.proto.outcome import Outcome
from kvferry.scheduler_daemon.core.api import KeepEpochs, Note
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.ending import void
from kvferry.scheduler_daemon.core.namespaces import Namespace
from kvferry.scheduler_daemon.core.people import tell_ranks
from kvferry.units import counted

EVERYTHING = "*"
FREED_A_STEP = 1024  # keys of ended epochs: under a millisecond
MAX_NAMED = 1024


def take_reset(desk: Desk, link: LinkId, ask: ResetAsk) -> None:
    """Raise the epoch of one namespace, or of all."""
    spaces = list(desk.namespaces)
    if ask.namespace != EVERYTHING:
        # One that was recovered is known by the first half of its name until an engine tells the rest.
        name = ask.namespace.lower()
        spaces = [space for space in spaces if name and (space.name.startswith(name) or name.startswith(space.name))]
        if len(spaces) != 1:
            error = RefusedError(
                "reset.namespace",
                f"{len(spaces)} of {len(desk.namespaces)} namespaces begin with {ask.namespace!r}",
                "`kvferry status` lists them; give more digits, or --all",
            )
            desk.counters.add(f"refused.{error.code}")
            desk.send(link, Refused.of(error))
            return
    num_keys = sum(space.num_entries for space in spaces)
    if ask.namespace == EVERYTHING:
        epoch = desk.namespaces.begin_epoch_of_all()
        for space in spaces:
            _reset(desk, space, epoch)
    else:
        [space] = spaces
        _reset(desk, space, space.epoch + 1)
        while desk.dying and desk.namespaces.record_is_full:
            # An older epoch goes off the record: nothing of what it ended may be left by then.
            free_some(desk)
        desk.namespaces.keep_epochs([(space.digest, space.epoch)])
    # The epochs are on record before anybody hears of them.
    desk.out.append(KeepEpochs(desk.namespaces.epochs()))
    for engine in desk.engines.values():
        if engine.namespace in spaces:
            tell_ranks(desk, engine, always=True)
    epochs = {space.name: space.epoch for space in spaces[:MAX_NAMED]}
    desk.send(link, ResetAnswer(epochs=epochs, keys=num_keys))
    desk.counters.add("resets", len(spaces))
    desk.out.append(Note(f"reset of {counted(len(spaces), 'namespace')}: {counted(num_keys, 'key')} forgotten"))


def _reset(desk: Desk, space: Namespace, epoch: int) -> None:
    for job in list(desk.jobs):
        if job.space is space:
            void(desk, job, Outcome.CANCELLED)
    ended = {id(index) for index in space.groups}
    for lease in list(desk.leases):
        home = next((entry.home for entry in lease.entries if entry.home is not None), None)
        if id(home) in ended:
            desk.end_lease(lease)
    desk.dying.extend(index for index in space.groups if index.num)
    space.begin_epoch(epoch)


def free_some(desk: Desk) -> None:
    """Give back slots of ended epochs, a bounded number."""
    if not desk.dying:
        return
    assert desk.pool is not None
    left = FREED_A_STEP
    while desk.dying and left > 0:
        entries = desk.dying[0].take_some(left)
        left -= len(entries)
        desk.pool.forget(entries)
        if not desk.dying[0].num:
            desk.dying.popleft()
