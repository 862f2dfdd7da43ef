"""Lookups and their leases: how many leading keys are held, promised for a while."""

from kvferry.proto.columns import split_keys, u64
from kvferry.proto.hot import Lookup, LookupAnswer, Renew
from kvferry.proto.outcome import Next, Reason
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.engines import Session


def take_lookup(desk: Desk, session: Session, ask: Lookup) -> None:
    """Answer with the leading hits, leased while leases hold no more than their share of the pool."""
    counters = desk.counters
    # Asking again starts afresh: what the request's last lookup held goes first.
    old = desk.leases.get(session.requests.lease_of(ask.request, ask.group))
    if old is not None:
        desk.end_lease(old)
    keys = split_keys(ask.keys, ask.key_bytes)
    counters.add("lookups")
    counters.add("lookup_keys", len(keys))
    space = session.engine.namespace
    epoch = space.epoch if space is not None else 0
    reason = _refusal(desk, session, ask)
    if reason is not Reason.NONE:
        counters.refused("lookup_keys", reason, len(keys))
        _answer(desk, session, ask, 0, Next.MISS, 0, epoch, reason)
        return
    assert space is not None and desk.pool is not None
    pool = desk.pool
    hits, stopped = space.groups[ask.group].leading(keys)
    if len(hits) == len(keys):
        following = Next.END
    else:
        following = Next.PENDING if stopped is not None else Next.MISS
        counters.add("lookup_keys_pending" if stopped is not None else "lookup_keys_missed", len(keys) - len(hits))
    counters.add("lookup_keys_hit", len(hits))
    lease_id = 0
    if hits:
        cap = int(pool.num_slots * desk.settings.lease_share)
        if pool.num_leased + pool.num_new_leases(hits) <= cap:
            pool.lease(hits)
            lease_id = desk.leases.add(session, ask.request, ask.group, hits, desk.now_ns).id
            session.requests.lease(ask.request, ask.group, lease_id)
        else:
            counters.add("lookups_unleased")
            pool.lru.touch(hits)
    _answer(desk, session, ask, len(hits), following, lease_id, epoch, Reason.NONE)


def take_renew(desk: Desk, session: Session, renew: Renew) -> None:
    """These leases begin a new term."""
    for lease_id in u64(renew.leases).tolist():
        lease = desk.lease_of(lease_id, session)
        if lease is not None:
            desk.leases.renew(lease, desk.now_ns)


def _refusal(desk: Desk, session: Session, ask: Lookup) -> Reason:
    engine = session.engine
    if desk.drain is not None:
        return Reason.DRAINING
    if not engine.is_whole or engine.namespace is None or desk.pool is None:
        return Reason.RANKS_AWAY
    if ask.epoch != engine.namespace.epoch:
        return Reason.STALE_EPOCH
    if ask.keys and ask.key_bytes != session.register.key_bytes:
        return Reason.KEY_WIDTH
    if ask.group >= len(engine.namespace.groups):
        return Reason.GROUP
    if session.requests.is_closed(ask.request):
        return Reason.REQUEST_CLOSED
    return Reason.NONE


def _answer(
    desk: Desk, session: Session, ask: Lookup, hits: int, following: Next, lease: int, epoch: int, reason: Reason
) -> None:
    answer = LookupAnswer(
        lookup=ask.lookup,
        hits=hits,
        next=int(following),
        lease=lease,
        lease_ms=desk.settings.lease_ns // 1_000_000 if lease else 0,
        retry_ms=desk.settings.retry_ms if following is Next.PENDING else 0,
        reason=int(session.spoken(reason)),
        epoch=epoch,
    )
    desk.send(session.link, answer)
