"""The shell around an engine's client core: a link to whichever daemon lives, the core's messages, its time.

    reach ──▶ linked ──lost──▶ reach again, a little later            core.outgoing() ──▶ link ──▶ daemon

As `service/client/client.py` does it. What is added is a second delivery of an old message now and then, which must
change nothing (I5), and one question at the end of a voyage: is this key found?
"""

import random
from collections.abc import Callable
from typing import Any

from kvferry.client.core import ClientCore, ClientSettings
from kvferry.proto.control import Refused
from kvferry.proto.hot import JobsEnded, LookupAnswer, StepAnswer

from .books import Broken
from .clock import MS, Party
from .daemon import PASSING
from .echo import Echo
from .log import Log
from .net import LinkEnd

Connect = Callable[[Callable[[Any], None], Callable[[], None]], LinkEnd | None]


class ClientShell:
    """One engine's client. It looks for a daemon from its beginning to its death."""

    def __init__(
        self,
        name: str,
        party: Party,
        log: Log,
        rng: random.Random,
        settings: ClientSettings,
        connect: Connect,
        echo: Echo,
    ) -> None:
        self.name = name
        self.party = party
        self.settings = settings
        self.core = ClientCore(settings)
        self.link: LinkEnd | None = None
        self.found: bool | None = None  # what a probe brought
        self._log = log
        self._rng = rng
        self._connect = connect
        self._echo = echo
        self._armed_ns: int | None = None
        self._reach()

    # ---- the link -------------------------------------------------------------------------------------

    def _reach(self) -> None:
        if self.link is not None:
            return
        self.link = self._connect(self._from_daemon, self._lose_daemon)
        if self.link is None:
            self._reach_again()
            return
        self.core.attach(self.party.now_ns, software="voyage", pid=1)
        self._flush()

    def _reach_again(self) -> None:
        self.party.after(self._rng.randrange(5 * MS, 60 * MS), self._reach)

    def _lose_daemon(self) -> None:
        self._log(self.name, "has lost the daemon")
        self.link = None
        self._echo.forget()
        self.core.lost(self.party.now_ns)
        self._flush()
        self._reach_again()

    def die(self) -> None:
        """The process is gone."""
        self.party.end()
        if self.link is not None:
            self.link.sever()

    def _from_daemon(self, message: Any) -> None:
        self._log(self.name, "<- daemon: {}", message)
        if isinstance(message, Refused):
            if message.code not in PASSING:
                raise Broken(f"{self.name} was refused: {message.code} {message.text}")
            assert self.link is not None
            self.link.close()
            self.core.on_message(message, self.party.now_ns)
            self._lose_daemon()
            return
        self.core.on_message(message, self.party.now_ns)
        self._flush()
        if isinstance(message, LookupAnswer | StepAnswer | JobsEnded):
            self._echo.remember(message)
        if (old := self._echo.draw()) is not None:
            self._log(self.name, "<- daemon again: {}", old)
            before = self.core.describe()
            self.core.on_message(old, self.party.now_ns)
            self._flush()
            if self.core.describe() != before:
                raise Broken(f"I5: {self.name}: {old.TAG} again turns {before} into {self.core.describe()}")

    # ---- the core's messages and its time -------------------------------------------------------------

    def _flush(self) -> None:
        for message in self.core.outgoing():
            if self.link is None:
                continue
            self._log(self.name, "-> daemon: {}", message)
            if not self.link.send(message):
                raise Broken(f"{self.name}: the link to the daemon is full or lost")
        due = self.core.next_due_ns()
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self.party.at(due, self._tick, due)

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self.core.tick(self.party.now_ns)
            self._flush()

    # ---- after the end --------------------------------------------------------------------------------

    def probe(self, key: bytes) -> None:
        """Look one key up; `found` tells."""
        self.found = None
        self.core.lookup("probe", [key], self.party.now_ns)
        self._flush()
        self.party.after(300 * MS, self._look, 200)

    def _look(self, times: int) -> None:
        hits = self.core.hits("probe", self.party.now_ns)
        if hits.ready or not times:
            self.found = hits.count > 0
            self.core.finish("probe", self.party.now_ns)
        else:
            self.party.after(1 * MS, self._look, times - 1)
        self._flush()
