"""One folder per backend. A backend imports core and errors, never another backend; selection reaches it by name."""

from __future__ import annotations
