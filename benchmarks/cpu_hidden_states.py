"""vLLM's connector that writes hidden states to files, for a CPU; loaded by vLLM, by the name of this file.

`ExampleHiddenStatesConnector` of vLLM 0.32.0 copies them through pinned memory on a CUDA stream, and so ends its
engine where there is none: "pin_memory=True requires a CUDA or other accelerator backend". Here they are in host memory
already. All else, the files and locks included, is vLLM's own. On a GPU this is not needed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Done:
    """An event that has happened."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """`ExampleHiddenStatesConnector` without its copy from a device."""

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a finished request's states out of the cache, whose blocks are free then, and have them written."""
        blocks = torch.tensor(pending.block_ids)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        self._req_copy_events[pending.req_id] = done = Done()
        lock = self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
