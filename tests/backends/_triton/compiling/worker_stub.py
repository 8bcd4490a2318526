"""A stand-in for a worker process: it compiles nothing, and answers or fails as its variables say.

DSV4ATTN_STUB: a JSON object with any of: `answer`, the text of every answer; `dies_at`, the number of the request that
the process does not survive; `silent`, whether the process never answers; `says`, what is printed to standard error.
DSV4ATTN_STUB_TURN: a file. The first process that creates the file obeys; all others answer every request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def obeys() -> bool:
    """Whether this process is the one that obeys, if only one does."""
    turn = os.environ.get("DSV4ATTN_STUB_TURN")
    if turn is None:
        return True
    try:
        Path(turn).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    """Answer each request until standard input ends."""
    orders = json.loads(os.environ["DSV4ATTN_STUB"]) if obeys() else {}
    if orders.get("environment"):
        hidden = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")}
        paths = json.loads(sys.argv[1])
        Path(orders["environment"]).write_text(json.dumps({**hidden, "paths": paths}), encoding="utf-8")
    number = 0
    # a request is smaller than a pipe's buffer, and the next one comes after the answer
    while os.read(0, 65536):
        number += 1
        if number == orders.get("dies_at"):
            print("Traceback of many lines\n" + orders.get("says", ""), file=sys.stderr)
            sys.exit(3)
        if orders.get("silent"):
            time.sleep(60)
        os.write(1, orders.get("answer", "null").encode() + b"\n")


if __name__ == "__main__":
    main()
