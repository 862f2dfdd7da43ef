"""Makes `examples/` importable, as it is when an example is run, and the fakes beside the tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "examples"), str(Path(__file__).parent)]
