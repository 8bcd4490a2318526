"""Keys that a test's step finds in its caches: written by the reference where kernels are interpreted."""

from __future__ import annotations

import inspect
import sys

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.contract.backend import Backend
from dsv4attn.testing.kit.random_step import StepFixture


def quick_history() -> None:
    """Let `StepFixture` write the keys from before a step with the reference, if the backend's kernel is Triton's.

    The bytes are the same: tests of cache/test_insert.py compare them. Interpreted, the kernel would take longer for a
    window of such keys than for the step. The step's own keys are written by the kernel. A backend that has an insert
    step of its own, as one with a planted bug, writes all keys itself.
    """
    by_backend, reference = StepFixture.history, ReferenceBackend()

    def history(self: StepFixture, backend: Backend, caches: LayerCaches) -> LayerCaches:
        shared = sys.modules.get("dsv4attn.backends._triton.cache.insert")
        # wrapped by the class, which leaves torch's modes
        own = inspect.unwrap(backend.qnorm_rope_kv_insert)
        is_shared = shared is not None and own is inspect.unwrap(shared.qnorm_rope_kv_insert)
        return by_backend(self, reference if is_shared else backend, caches)

    StepFixture.history = history  # type: ignore[method-assign]
