"""Forms of the xpu backend that tests of all Triton backends try besides its default."""

from __future__ import annotations

FORMS = {"fused": {"decode": "fused"}, "gathered": {"decode": "gathered"}}
