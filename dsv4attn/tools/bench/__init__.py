"""Measurements. Every speed is compared with others taken in turn, in the same run; times alone move with the machine.

`cases` says what is measured, `inputs` makes it, `reference` knows the right answer, `subjects` and `peers` are those
who are measured, `clock` and `roofline` measure, `runner` puts them together, and `report`, `compare` and `plots` show
what came out. `step` measures whole steps of `forward_mqa`.
"""

from __future__ import annotations
