"""The chaos drill: a real vLLM under load, a real sidecar beside it, and everything killed or stopped at random.

python -m tests.chaos --minutes 10        (in the environment of `make test-vllm`; `make chaos`)

talks.py    what is asked, what must come back          sidecar.py  `kvferry up`, and how it is hurt
engine.py   an engine and its streams (child.py: inside) faults.py   the kinds of fault
crowd.py    users who talk to it without a pause         census.py   what processes hold: leaks
drill.py    the story: baseline, cycles of faults, end   report.py   the table and the verdict
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))  # the lab that starts engines
