"""A small real inference engine, to learn from and to demonstrate with: a paged-attention decoder in torch.

config.py      sizes
model.py       the decoder and its paged KV cache           nothing of kvferry
blocks.py      block allocator with prefix cache            nothing of kvferry
collective.py  the sum over ranks                           nothing of kvferry
request.py     one request's state
scheduler.py   admission, chunked prefill, decode
offload.py     what a scheduler says to kvferry             ◀── read these two
rank.py        what a rank says to kvferry                  ◀── to attach an engine of yours
messages.py    what scheduler and ranks send each other
engine.py      processes and the step loop
"""

from reference_engine.config import EngineConfig, KvferryConfig, ModelConfig
from reference_engine.engine import Engine, EngineDeadError
from reference_engine.request import Completion

__all__ = ["Completion", "Engine", "EngineConfig", "EngineDeadError", "KvferryConfig", "ModelConfig"]
