"""Hyper-connections."""
