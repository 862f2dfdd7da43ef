"""Another connector beside ours, under vLLM's MultiConnector: it keeps prompts on a shelf and loads them itself.

Its loads are asynchronous, as most are, or come in the middle of a step, and may then fail after their blocks were
used. Imports vLLM: only tests that are marked so import this.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

BLOCK = 8
CONFIG = {"kv_connector": "Neighbour", "kv_connector_module_path": "neighbour", "kv_role": "kv_both"}


@dataclass
class Orders(KVConnectorMetadata):
    """Loads of one step: (request, its tokens, its whole table, first block)."""

    loads: list[tuple[str, list[int], list[int], int, int]] = field(default_factory=list)


@dataclass
class Shelf:
    """What all neighbours of a test share."""

    prompts: dict[tuple[int, ...], int] = field(default_factory=dict)  # prompt -> tokens that can be loaded
    is_async: bool = True
    fails: bool = False
    memories: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    loaded: int = 0


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """See the module's text."""

    shelf: ClassVar[Shelf] = Shelf()
    ranks: ClassVar[int] = 0

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.orders: list[Any] = []
        self.computed: dict[str, int] = {}
        self.finished: set[str] = set()
        self.invalid: set[int] = set()
        if role == KVConnectorRole.WORKER:
            self.rank, Neighbour.ranks = Neighbour.ranks, Neighbour.ranks + 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        found = self.shelf.prompts.get(tuple(request.prompt_token_ids), 0) - num_computed_tokens
        self.computed[request.request_id] = num_computed_tokens
        return (found, self.shelf.is_async) if found > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            first = self.computed[request.request_id] // BLOCK
            table = list(blocks.get_block_ids()[0])
            tokens = list(request.prompt_token_ids)
            last = first + num_external_tokens // BLOCK
            self.orders.append((request.request_id, tokens, table, first, last))

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, self.orders = self.orders, []
        return Orders(orders)

    def bind_connector_metadata(self, connector_metadata: Orders) -> None:
        super().bind_connector_metadata(connector_metadata)
        for name, tokens, table, first, last in connector_metadata.loads:
            chain, value = [], 0
            for token in tokens:
                value = hash((value, token))
                chain.append(value)
            for block in range(first, last):
                held = tuple(chain[block * BLOCK : (block + 1) * BLOCK])
                self.shelf.memories[self.rank][table[block]] = (-5,) * BLOCK if self.shelf.fails else held
                self.invalid.update([table[block]] if self.shelf.fails else [])
            self.finished.update([name] if self.shelf.is_async else [])
            self.shelf.loaded += 1

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished, self.finished = self.finished, set()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
