"""`CODINGS`: the codings of records that the kernels read and write. Imports neither torch nor triton.

A kernel gets the number of a coding, which `numerics` has as a constant. `support` refuses records of other codings.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsv4attn.core.cache.key_records import Coding

CODINGS: Mapping[Coding, int] = {Coding.FP8: 0, Coding.NVFP4: 1, Coding.MXFP4: 2}
"""The number of each coding. A new coding needs code in every kernel that compares these numbers."""
