"""Show the versions of kvferry and of its protocol."""

import argparse

import kvferry
from kvferry.proto.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

HELP = "show versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(_arguments: argparse.Namespace) -> int:
    """One line."""
    print(text())
    return 0


def text() -> str:
    """The line, which `kvferry --version` prints too."""
    return f"kvferry {kvferry.__version__}, protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
