"""Conformance cases. `table` has all of them."""
