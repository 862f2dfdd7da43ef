"""All messages in one place: importing this module registers every type, and `pack`/`unpack` know them all."""

from kvferry.proto import control, hot, tether
from kvferry.proto.schema import MESSAGES, describe, pack, unpack

__all__ = ["MESSAGES", "control", "describe", "hot", "pack", "tether", "unpack"]
