"""Forms of the sm90 backend that tests of all Triton backends try besides its default."""

from __future__ import annotations

FORMS = {"gathered": {"prefill": "gathered"}}
