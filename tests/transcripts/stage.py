"""Plays a transcript: commands in, one line a reply out. Readable without Python.

    # prose
    command
    ----
    reply
    reply
    (blank line)

Commands (keys are k1,k2; blocks 7,8; T a ticket, R a request, J a job, r a rank):

    pool SLOTS [tp=N] [lease_share=X] [job_s=N] [grace_s=N]   a new world; first line of a transcript
    engine E [salt=S]              register E and attach all its ranks; says nothing
    hold E T keys                  store these and let all ranks report; says nothing
    register E / attach E r        one by one; these say what is answered
    E step [store=T:R:keys@blocks] [load=T:R:keys@blocks[:LEASE]] [end=R] [written=blocks] [revoked=T] ...
    E lookup R keys
    E done r J[,J] [OUTCOME]       the worker of rank r reports
    E gone r / lost E r / lost E client / reap E r
    E rotate SALT
    reset NAMESPACE | reset *      an operator; namespaces are called by the engine that is in it: @E
    drain [budget_ms=N] / resume
    crash [W]                      the daemon dies; the next one reads its table and hears of all workers and a spare W
    dead W                         the spare is reaped
    E back r                       the worker of rank r drains and attaches anew, on a new link
    wait SECONDS
    slots / jobs                   sums from `status`
"""

import re
from pathlib import Path
from typing import Any

from kvferry.proto.control import DrainAsk, ResetAsk
from kvferry.proto.outcome import Kind, Next, Outcome, Reason
from kvferry.proto.schema import describe
from kvferry.scheduler_daemon.core.api import Action, AtRest, CloseLink, KeepEpochs, KillWorker, Note, Send

from ..core.dummy import Engine, Job, World, come_to_rest

SECOND = 1_000_000_000
NAMES: dict[str, Any] = {"outcomes": Outcome, "reasons": Reason, "reason": Reason, "kinds": Kind, "next": Next}
FLAGS = ("end", "written", "revoked", "cancelled", "released")


def numbers(text: str) -> list[int]:
    """A comma-separated list of numbers."""
    return [int(part) for part in text.split(",") if part]


class Stage:
    """One world and the names of those in it."""

    def __init__(self) -> None:
        self.world = World()
        self.engines: dict[str, Engine] = {}

    def play(self, line: str) -> list[str]:
        """Carry out one command; the replies it brings."""
        self.world.said = []
        word, *rest = line.split()
        if word in self.engines:
            self._of_engine(self.engines[word], rest[0], rest[1:])
        else:
            command = getattr(self, f"_{word.replace('-', '_')}", None)
            if command is None:
                raise ValueError(f"no command {line!r}")
            told = command(*rest)
            if told is not None:
                return told
        return [text for action in self.world.said if (text := self._render(action))]

    def end(self) -> None:
        """Nothing may be left when all have gone."""
        come_to_rest(self.world)

    # ---- commands ------------------------------------------------------------------------------------

    def _pool(self, slots: str, *options: str) -> list[str]:
        chosen = dict(option.split("=") for option in options)
        settings: dict[str, Any] = {
            f"{name[:-2]}_ns": int(s) * SECOND for name, s in chosen.items() if name[-2:] == "_s"
        }
        if "lease_share" in chosen:
            settings["lease_share"] = float(chosen["lease_share"])
        # A boot whose low 24 bits are 0 gives job ids 1, 2, 3.
        self.world = World(tp=int(chosen.get("tp", 2)), slots=int(slots), boot=1 << 24, **settings)
        return []

    def _engine(self, name: str, *options: str) -> list[str]:
        chosen = dict(option.split("=") for option in options)
        self.engines[name] = self.world.engine(name, salt=chosen.get("salt", "").encode())
        return []

    def _hold(self, name: str, ticket: str, names: str) -> list[str]:
        self.engines[name].hold(names.split(","), int(ticket))
        return []

    def _register(self, name: str) -> None:
        self.engines.setdefault(name, Engine(self.world, name)).register()

    def _attach(self, name: str, rank: str) -> None:
        self.engines.setdefault(name, Engine(self.world, name)).attach(int(rank))

    def _reset(self, name: str) -> None:
        if name[0] == "@":
            engines = self.world.core.status()["engines"]
            [name] = [e["namespace"] for e in engines if e["engine_id"] == name[1:]]
        self.world.send(self.world.open("admin"), ResetAsk(namespace=name))

    def _drain(self, *options: str) -> None:
        chosen = {name: int(value) for name, value in (option.split("=") for option in options)}
        self.world.send(self.world.open("admin"), DrainAsk(**chosen))

    def _resume(self) -> None:
        self.world.send(self.world.open("admin"), DrainAsk(resume=True))

    def _dead(self, spare: str) -> None:
        self.world.reap(int(spare))

    def _crash(self, *spares: str) -> None:
        workers = [worker for engine in self.engines.values() for worker in engine.worker.values()]
        self.world = self.world.restart([*workers, *map(int, spares)])
        for engine in self.engines.values():
            engine.world = self.world
            engine.link, engine.worker_link = 0, {}

    def _lost(self, name: str, who: str) -> None:
        engine = self.engines[name]
        self.world.lose(engine.link if who == "client" else engine.worker_link[int(who)])

    def _reap(self, name: str, rank: str) -> None:
        self.world.reap(self.engines[name].worker[int(rank)])

    def _wait(self, seconds: str) -> None:
        self.world.wait(int(float(seconds) * SECOND))

    def _slots(self) -> list[str]:
        return [" ".join(f"{name}={count}" for name, count in self.world.sums().items())]

    def _jobs(self) -> list[str]:
        status = self.world.core.status()
        jobs = {name: count for name, count in status["jobs"].items() if name != "oldest_ms"}
        return [" ".join(f"{name}={count}" for name, count in [*jobs.items(), ("fences", status["fences"])])]

    def _of_engine(self, engine: Engine, what: str, rest: list[str]) -> None:
        if what == "step":
            self.world.send(engine.link, engine.message(**self._step(rest)))
        elif what == "lookup":
            engine.lookup(int(rest[0]), rest[1].split(","), keep=True)
        elif what == "done":
            outcome = Outcome[rest[2]] if len(rest) > 2 else Outcome.OK
            engine.done(int(rest[0]), *numbers(rest[1]), outcome=outcome)
        elif what == "gone":
            engine.rank_gone(int(rest[0]))
        elif what == "back":
            rank = int(rest[0])
            link = self.world.drained(engine.worker[rank])
            engine.attach(rank, worker=engine.worker[rank], link=link)
        elif what == "rotate":
            engine.rotate(rest[0].encode())
        else:
            raise ValueError(f"engines cannot {what!r}")

    def _step(self, parts: list[str]) -> dict[str, Any]:
        step: dict[str, Any] = {"stores": [], "loads": []}
        for part in parts:
            name, _, value = part.partition("=")
            if name in ("store", "load"):
                work, _, place = value.partition("@")
                ticket, request, names = work.split(":")
                blocks, _, lease = place.partition(":")
                job = Job(int(ticket), int(request), names.split(","), numbers(blocks), int(lease or 0))
                step[f"{name}s"].append(job)
            elif name in FLAGS:
                step["ends" if name == "end" else name] = numbers(value)
            else:
                raise ValueError(f"no part of a step: {part!r}")
        return step

    # ---- replies -------------------------------------------------------------------------------------

    def _render(self, action: Action) -> str:
        match action:
            case Send(link, message):
                return f"{self._who(link)} <- {self._plain(describe(message))}"
            case CloseLink(link):
                return f"{self._who(link)} closed"
            case KillWorker(worker, why):
                return f"kill {self._who(self._link_of(worker))}: {why}"
            case Note():
                return ""
            case KeepEpochs(epochs):
                return f"table <- epochs {','.join(str(epoch) for _, epoch in epochs)}"
            case AtRest():
                return "at rest"

    def _who(self, link: int) -> str:
        for name, engine in self.engines.items():
            if engine.link == link:
                return f"client/{name}"
            for rank, other in engine.worker_link.items():
                if other == link:
                    return f"worker/{name}/{rank}"
        return f"link/{link}"

    def _link_of(self, worker: int) -> int:
        for engine in self.engines.values():
            for rank, other in engine.worker.items():
                if other == worker:
                    return engine.worker_link[rank]
        return 0

    @staticmethod
    def _plain(text: str) -> str:
        """Names for numbers that have one; digests cut to what an eye compares."""
        text = re.sub(r"\b[0-9a-f]{64}\b", lambda hit: hit[0][:8], text)
        text = re.sub(r"incarnation=\d+", "incarnation=*", text)
        # Job ids of a later boot: boot:number.
        text = re.sub(r"(?<=[=,])(\d{13,})", lambda hit: f"{int(hit[1]) >> 40}:{int(hit[1]) & (1 << 40) - 1}", text)

        def named(hit: re.Match[str]) -> str:
            names = NAMES[hit[1]]
            return f"{hit[1]}=" + ",".join(names(int(number)).name for number in hit[2].split(","))

        return re.sub(rf"\b({'|'.join(NAMES)})=([\d,]+)", named, text)


def replay(path: Path) -> tuple[str, str]:
    """(what the file says, what it would say if it were written now)."""
    said = path.read_text()
    stage = Stage()
    written: list[str] = []
    replies: list[str] | None = None  # None: outside the replies of a stanza
    commands: list[str] = []
    for line in [*said.splitlines(), ""]:
        if replies is not None:
            if not line:
                written += ["----", *replies, ""]
                replies, commands = None, []
            continue
        if line == "----":
            replies = [reply for command in commands for reply in stage.play(command)]
        else:
            if line and not line.startswith("#"):
                commands.append(line)
            written.append(line)
    stage.end()
    return said, "\n".join(written).rstrip("\n") + "\n"
