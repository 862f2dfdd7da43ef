"""vLLM's `general_plugins` entry point: makes the connector known by its name alone.

vLLM calls `register` in its front end, its engine core and every worker, unguarded and possibly more than
once in a process. So it imports nothing of ours, and nothing it meets gets out.
"""

import logging


def register() -> None:
    """Let `kv_connector="KvferryConnector"` work without a module path; never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # The registered name must be the class's: vLLM looks statistics up by it.
        KVConnectorFactory.register_connector("KvferryConnector", "kvferry.vllm", "KvferryConnector")
    except Exception as error:  # also "already registered", at a second call in one process
        logging.getLogger("vllm.kvferry").debug("kvferry: not registered: %s", error)
