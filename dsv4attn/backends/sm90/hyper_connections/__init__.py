"""Hyper-connections of many tokens."""
