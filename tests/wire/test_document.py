"""docs/protocol.md and the code say the same: tags, fields in order, types, limits, numbers, codes, offsets, version.

The document's tables are parsed and compared with what the code declares, in both directions.
"""

import ast
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from kvferry.cli.main import COMMANDS
from kvferry.net.paths import RunDir
from kvferry.proto import layout, limits, link, outcome, page, tether, version
from kvferry.proto.codec import MESSAGES
from kvferry.proto.control import Hello, Refused
from kvferry.proto.errors import CODES
from kvferry.proto.ids import BootId, LinkId
from kvferry.proto.schema import FieldKind, field_kinds
from kvferry.scheduler_daemon.core.api import CoreSettings, Received, Send
from kvferry.scheduler_daemon.core.core import Core

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "protocol.md").read_text()
Row = list[str]


def section(title: str, level: str = "##") -> str:
    """What stands under a heading, up to the next one of its level or above."""
    found = re.search(rf"^{level} {re.escape(title)}$(.*?)(?=^#{{2,{len(level)}}} |\Z)", TEXT, re.M | re.S)
    assert found, f"docs/protocol.md has no section {title!r}"
    return found[1]


def tables(text: str) -> list[list[Row]]:
    """All tables of a text, without their heads; cells stripped of blanks and backticks."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n?)+", text, re.M):
        rows = [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        found.append(rows[2:])
    return found


def table(text: str) -> list[Row]:
    return tables(text)[0] if tables(text) else []


def after(bold: str, text: str) -> list[Row]:
    """The table that follows a bold word."""
    assert f"**{bold}**" in text, f"docs/protocol.md does not describe {bold}"
    return table(text.split(f"**{bold}**", 1)[1])


HOT = [cls for cls in MESSAGES.values() if not hasattr(cls, "from_map")]
CONTROL = [cls for cls in MESSAGES.values() if hasattr(cls, "from_map")]


def test_every_message_has_its_section_and_every_section_its_message() -> None:
    documented = re.findall(r"^### `([a-z.]+)`$", TEXT, re.M)
    assert sorted(documented) == sorted(MESSAGES)


def test_each_message_says_who_sends_it_to_whom() -> None:
    for tag in MESSAGES:
        first = section(f"`{tag}`", "###").strip().splitlines()[0]
        assert re.search(
            r"(client|worker|admin|daemon|peer|rank)\b.* → .*(client|worker|admin|daemon|peer|rank)", first, re.I
        )


def hot_row(name: str, kind: FieldKind) -> Row:
    bound = f" ≤ {kind.maximum}" if kind.allowed else ""
    return [name, kind.name + bound, str(kind.limit if kind.width else kind.maximum)]


@pytest.mark.parametrize("cls", HOT, ids=lambda cls: cls.TAG)
def test_a_hot_message_has_the_fields_of_the_document_in_order(cls: type[Any]) -> None:
    documented = [row[:3] for row in table(section(f"`{cls.TAG}`", "###"))]
    assert documented == [hot_row(name, kind) for name, kind in field_kinds(cls)]


def model_rows(cls: type[Any]) -> list[Row]:
    return [
        [name, "required" if f.default is PydanticUndefined else repr(f.default)]
        for name, f in cls.model_fields.items()
    ]


@pytest.mark.parametrize("cls", CONTROL, ids=lambda cls: cls.TAG)
def test_a_control_message_has_the_fields_of_the_document_in_order(cls: type[Any]) -> None:
    text = section(f"`{cls.TAG}`", "###")
    assert [row[:2] for row in table(text.split("**Probe**")[0])] == model_rows(cls)


@pytest.mark.parametrize("cls", [layout.Layout, layout.Handle, layout.Region, layout.Group, tether.Probe])
def test_a_structure_within_messages_has_the_fields_of_the_document(cls: type[Any]) -> None:
    assert [row[:2] for row in after(cls.__name__, TEXT)] == model_rows(cls)


@pytest.mark.parametrize("enum", [outcome.Next, outcome.Kind, outcome.Ended, outcome.Reason, outcome.Outcome])
def test_numbers_are_those_of_the_document(enum: type[IntEnum]) -> None:
    rows = after(enum.__name__, section("Numbers"))
    assert [row[:2] for row in rows] == [[member.name, str(int(member))] for member in enum]
    assert all(row[2] for row in rows)


def test_error_codes_are_those_of_the_document() -> None:
    assert {row[0]: row[1] for row in table(section("Error codes"))} == CODES


def test_limits_are_those_of_the_document() -> None:
    declared = {name: str(getattr(limits, name)) for name in dir(limits) if name.isupper()}
    assert {row[0]: row[1] for row in table(section("Limits"))} == declared


def test_the_version_stands_in_the_title_and_in_the_changelog() -> None:
    now = f"{version.PROTOCOL_MAJOR}.{version.PROTOCOL_MINOR}"
    assert TEXT.startswith(f"# The kvferry protocol, version {now}\n")
    entries = re.findall(r"^### (\d+\.\d+)$", section("Changelog"), re.M)
    assert entries[0] == now, "the newest entry stands first"


def test_the_frame_header_is_that_of_the_document() -> None:
    text = section("Frames and links")
    header, kinds = tables(text)[:2]
    sizes = [int(row[1]) for row in header if row[1] != "–"]
    assert sum(sizes) == link.HEADER.size
    assert [int(row[0]) for row in header] == [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    assert [row[:2] for row in kinds] == [[kind.name, str(int(kind))] for kind in link.FrameKind]
    numbers = {
        "within {} ms goes alone": link.ACK_NS // 10**6,
        "at most {} messages": link.WINDOW_MESSAGES,
        "and {} MiB (one": link.WINDOW_BYTES >> 20,
        "{} ms without an acknowledgement": link.RESEND_NS // 10**6,
        "the oldest {} MiB": link.REPEAT_BYTES >> 20,
        "for {} s gives the link up": link.LOST_NS // 10**9,
        "look for longer than {} s": link.STOOD_NS // 10**9,
    }
    for sentence, number in numbers.items():
        assert sentence.format(number) in text


def test_the_shared_page_is_that_of_the_document() -> None:
    rows = {row[1]: (int(row[0]), int(row[2])) for row in table(section("The shared page"))}
    assert rows == {
        "MAGIC": (0, 1),
        "MARK": (page.MARK * 8, 1),
        "REVOKE_COUNT": (page.REVOKE_COUNT * 8, 1),
        "ENDED_COUNT": (page.ENDED_COUNT * 8, 1),
        "REVOKE_FLOOR": (page.REVOKE_FLOOR * 8, 1),
        "REVOKE_RING": (page.REVOKE_RING * 8, page.REVOKE_SLOTS),
        "ENDED_RING": (page.ENDED_RING * 8, page.ENDED_SLOTS),
    }
    assert f"0x{page.MAGIC:016x}" in section("The shared page")


def test_the_sockets_are_those_of_the_document() -> None:
    run_dir = RunDir(Path("/run/kvferry"))
    names = {row[0] for row in table(section("Who talks to whom"))}
    assert names == {run_dir.daemon.name, run_dir.tether.name, "rank-<r>.sock"}
    assert run_dir.rank(3).name == "rank-3.sock"


def sample(tag: str) -> Any:
    """A message of this tag with the plainest of values."""
    cls = MESSAGES[tag]
    if cls in HOT:
        return cls(**{name: b"" if kind.width else min(32, kind.maximum) for name, kind in field_kinds(cls)})
    engine = {"engine_id": "e", "world_size": 1}
    sizes = {"payload_bytes": (64,), "block_tokens": (16,), "num_blocks": 8, "pool_bytes": 1 << 20}
    values: dict[str, dict[str, Any]] = {
        "hello": {"role": "client"},
        "register": {**engine, "key_bytes": 32, "num_blocks": 8, "block_tokens": 16},
        "rotate": {"salt": b""},
        "drained": {"worker": 1, "boot": 1},
        "reset.ask": {"namespace": "*"},
        "attach": {**engine, "worker": 1, "rank": 0, "layout_digest": "", **sizes},
    }
    return cls(**values.get(tag, {}))


@pytest.mark.parametrize("role", ["client", "worker", "admin"])
def test_the_daemon_takes_from_each_role_what_the_document_allows_it(role: str) -> None:
    allowed = {row[0]: set(re.findall(r"`([a-z.]+)`", f"`{row[1]}`")) for row in table(section("Opening a link"))}
    assert set(allowed) == {"client", "worker", "admin"}
    for tag in sorted(set().union(*allowed.values()) | {"hello", "plan", "words"}):
        core = Core(CoreSettings(boot=BootId(1), tp_size=1))
        said = [Hello(role=role), sample("register")] if role == "client" and tag != "register" else [Hello(role=role)]
        for message in said:
            core.step(Received(LinkId(9), message), 0)
        answers = [action.message for action in core.step(Received(LinkId(9), sample(tag)), 0) if type(action) is Send]
        refused = any(isinstance(m, Refused) and m.code == "message.unexpected" for m in answers)
        assert refused == (tag not in allowed[role]), f"{tag} from a {role}"


PAGES = [*DOCS.rglob("*.md"), DOCS.parent / "CONTRIBUTING.md"]


def test_files_that_the_documents_name_are_there() -> None:
    for page_path in PAGES:
        rooms = "proto|service|scheduler_daemon|gpu_worker|tests|docs|bench|examples"
        for named in re.findall(rf"`((?:{rooms})/[\w./-]*)`", page_path.read_text()):
            assert (DOCS.parent / named).exists(), f"{page_path.name} names {named}"


def test_every_command_stands_in_the_readme() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    missing = [name for name in COMMANDS if f"`kvferry {name}" not in readme]
    assert not missing, f"README.md's table of commands lacks {missing}"


def test_links_within_the_documents_lead_somewhere() -> None:
    for path in PAGES:
        text = path.read_text()
        anchors = {
            re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-")
            for head in re.findall(r"^#+ (.*)$", text, re.M)
        }
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            if file:
                assert (path.parent / file).exists(), f"{path.name} links to {target}"
            else:
                assert anchor in anchors, f"{path.name} links to #{anchor}"


def test_every_error_code_outcome_and_reason_is_explained_with_what_to_do() -> None:
    rows = [row for block in tables((DOCS / "errors.md").read_text()) for row in block]
    explained = {row[0]: row[1:] for row in rows}
    for name in [*CODES, *outcome.Outcome.__members__, *outcome.Reason.__members__]:
        assert name in explained, f"docs/errors.md does not explain {name}"
        assert all(explained[name]), f"docs/errors.md leaves a cell of {name} empty"


def codes_in_the_code() -> list[tuple[str, str, str]]:
    """(error class, code, where) of each error that the library makes with a literal code."""
    found = []
    for folder in ("proto", "service", "scheduler_daemon", "gpu_worker"):
        for path in (DOCS.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                    continue
                cls, code = ast.unparse(node.func).split(".")[-1], node.args[0].value
                if cls.endswith("Error") and isinstance(code, str) and re.fullmatch(r"[a-z_]+\.[a-z_]+", code):
                    found.append((cls, code, f"{path.name}:{node.lineno}"))
    return found


def test_every_code_that_the_library_raises_is_explained() -> None:
    text = (DOCS / "errors.md").read_text()
    missing = [f"{code} ({where})" for _, code, where in codes_in_the_code() if f"`{code}`" not in text]
    assert not missing, f"docs/errors.md does not explain {missing}"


def test_a_code_that_travels_is_one_of_the_protocols() -> None:
    wrong = [
        (c, w) for cls, c, w in codes_in_the_code() if cls in ("RemoteProtocolError", "RefusedError") and c not in CODES
    ]
    assert not wrong, f"add them to proto/errors.py and docs/protocol.md, or raise a ConfigError: {wrong}"
