"""Compiling for devices that are not here, and what a kernel needs there."""
