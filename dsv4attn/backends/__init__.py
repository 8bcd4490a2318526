"""One room per device. A room imports core and errors, never another room; selection reaches it by name."""

from __future__ import annotations
