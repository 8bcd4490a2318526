"""Measurements. Calls that are compared run in turn, in the same run, because times alone vary with the machine.

`cases` lists kernels and shapes, `inputs` makes their inputs, `reference` computes the expected results. `subjects` and
`peers` wrap the calls of backends and of other libraries, `clock` and `roofline` measure, `runner` combines them.
`report`, `compare` and `plots` show results. `step` measures whole steps of `forward_mqa`.
"""

from __future__ import annotations
