"""Checks of what a backend computed, against the oracle."""
