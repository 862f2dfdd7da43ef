"""Flags made from the settings' own fields, so that help, file and environment never disagree."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from kvferry.net.paths import RunDir
from kvferry.settings import ENV_PREFIX, SIZES, TIMES, Settings, describe_default, find_run_dir, load


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """A flag for each of these settings, and --config."""
    for name in names:
        field = Settings.model_fields[name]
        kind = field.annotation
        choices = [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else None
        if kind is bool:
            text = f"{field.description} [{ENV_PREFIX}{name.upper()}]"
            parser.add_argument("--" + name.replace("_", "-"), dest=name, action="store_true", default=None, help=text)
            continue
        default = "" if field.default is None else f" (default {describe_default(name)})"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            choices=choices,
            metavar=None if choices else _metavar(name),
            help=f"{field.description}{default} [{ENV_PREFIX}{name.upper()}]".replace("%", "%%"),
        )
    parser.add_argument("--config", metavar="FILE", help="settings file (default ./kvferry.toml) [KVFERRY_CONFIG]")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings of a parsed command line; ConfigError if they cannot be."""
    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name in Settings.model_fields and value is not None
    }
    return load(given, arguments.config)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """--run-dir and --config, for a command that needs to know no more than where."""
    add_settings(parser, ["run_dir"])


def run_dir_of(arguments: argparse.Namespace) -> RunDir:
    """The run dir of such a command; ConfigError if it cannot be. Nothing else that is set matters."""
    run_dir, told = find_run_dir(arguments.run_dir, arguments.config)
    if told:
        print(told, file=sys.stderr)
    return run_dir


def _metavar(name: str) -> str:
    kinds = {"run_dir": "DIR", "devices": "GPU,GPU", **dict.fromkeys(SIZES, "SIZE"), **dict.fromkeys(TIMES, "TIME")}
    return kinds.get(name, "N")
