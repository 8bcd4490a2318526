"""What users must not see of Triton's interpreter, which computes with numpy. This file does not import torch."""

from __future__ import annotations

import sys
import warnings

MODULE = r"triton\.runtime\.interpreter"
"""The module that the warnings come from, as a regular expression."""


def ignore_interpreter_warnings() -> None:
    """Ignore what Triton's interpreter warns of, such as an overflow that a kernel masks, unless Python's -W asks."""
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=MODULE)
