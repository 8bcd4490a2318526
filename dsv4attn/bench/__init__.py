"""Measurements. Every speed is a ratio of two times taken in turn, in one run; absolute times move with the machine."""

from __future__ import annotations
