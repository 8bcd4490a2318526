"""Measurements. Calls that are compared run in turn, in the same run, because times alone vary with the machine.

`cases` and `layer_ops` list kernels and shapes, `inputs` makes their inputs. `contenders` and `peers` wrap the calls of
backends and of other libraries, `clock` and `roofline` measure, `runner` combines them. `report`, `compare` and `plots`
show results. `forward_step` measures whole steps of `forward_mqa`.
"""

from __future__ import annotations
