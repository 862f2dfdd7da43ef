"""Start a sidecar and watch it: one daemon, a ready worker for each rank, and the pool in /dev/shm.

It stays in the foreground and says one line when it is ready. Ctrl-C stops everything and leaves nothing behind;
SIGTERM stops everything and keeps the pool, so that the next start is warm. Settings come from flags, then the
environment, then a TOML file, then defaults.
"""

import argparse
import logging
import os

from kvferry import logs
from kvferry.cli.flags import add_settings, settings_of
from kvferry.settings import Settings, unknown_environment
from kvferry.supervise.limits import lacking
from kvferry.supervise.shell import Sidecar

HELP = "start a sidecar and watch it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings."""
    add_settings(parser, Settings.model_fields)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    logs.wait_for_no_reader()
    settings = settings_of(arguments)
    logs.set_up(settings.log_level)
    for name in unknown_environment(os.environ):
        logging.getLogger("kvferry.up").warning("the environment has %s: no such setting, ignored", name)
    try:
        return Sidecar(settings).run()
    except (OSError, MemoryError) as error:
        limit = lacking(error, settings.tp_size, settings.rank_bytes)
        if limit is None:
            raise
        raise limit from None
