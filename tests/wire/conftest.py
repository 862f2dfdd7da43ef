"""Hypothesis for this room: no deadline, since a busy machine is no fault of what is tested."""

from hypothesis import settings

settings.register_profile("wire", deadline=None, print_blob=True)
settings.load_profile("wire")
