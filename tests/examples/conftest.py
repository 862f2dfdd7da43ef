"""Makes `examples/` importable, as it is when an example is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
