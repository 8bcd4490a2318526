"""The environment variables of adapters to engines, registered with `config`, which knows no engine.

`config` imports this module by its name when the environment has a variable that is not one of its own. An adapter of
another distribution calls `config.register_variables` when it is imported.
"""

from __future__ import annotations

from dsv4attn.config import Knob, register_variables
from dsv4attn.integrations.engines import ENGINES, SGLANG, VLLM

TRANSFORMERS = "DSV4ATTN_TRANSFORMERS"
TRANSFORMERS_ANY_VERSION = f"{TRANSFORMERS}_ANY_VERSION"
VLLM_PARTS = f"{VLLM.prefix}_PARTS"
VLLM_ENTRIES = f"{VLLM.prefix}_ENTRIES"
SGLANG_PARTS = f"{SGLANG.prefix}_PARTS"
_FLAG = "`0` or `1`"

register_variables(
    "DSV4ATTN_FLASH_MLA",
    {
        "DSV4ATTN_FLASH_MLA": Knob(
            "unset", _FLAG, "0: `dsv4attn-flash-mla` does nothing. 1: it is `flash_mla` where FlashMLA is installed too"
        )
    },
)
register_variables(
    "DSV4ATTN_TOKENSPEED",
    {
        "DSV4ATTN_TOKENSPEED": Knob("1", _FLAG, "0: `dsv4attn-tokenspeed` registers no kernel"),
        "DSV4ATTN_TOKENSPEED_ANY_VERSION": Knob(
            "0", _FLAG, "1: `dsv4attn-tokenspeed` tries an untested tokenspeed_kernel"
        ),
    },
)
for _engine in ENGINES:
    _switch = Knob("1", _FLAG, f"0: `{_engine.wheel}` does nothing")
    if _engine is VLLM:
        # what it is when unset depends on the device
        meaning = f"0: `{_engine.wheel}` does nothing. 1: it is used on devices with an attention of vLLM's own too"
        _switch = Knob("unset", _FLAG, meaning)
    _variables = {
        _engine.switch: _switch,
        _engine.any_version: Knob("0", _FLAG, f"1: `{_engine.wheel}` tries an untested {_engine.name}"),
    }
    register_variables(_engine.prefix, _variables)
register_variables(
    VLLM.prefix,
    {
        VLLM_PARTS: Knob(
            "auto",
            "`auto`, `all`, `none`, or some of `indexer,compressor,projection,mhc`",
            f"parts around attention that `{VLLM.wheel}` runs",
        ),
        VLLM_ENTRIES: Knob(
            "unset", "a folder", f"`{VLLM.wheel}` writes there, for each request, the entries that its tokens selected"
        ),
    },
)
register_variables(
    SGLANG.prefix,
    {
        SGLANG_PARTS: Knob(
            "auto",
            "`auto`, `all`, `none`, or some of `indexer,gather`",
            f"parts around attention that `{SGLANG.wheel}` runs",
        )
    },
)
register_variables(
    TRANSFORMERS,
    {
        TRANSFORMERS_ANY_VERSION: Knob(
            "0", _FLAG, "1: `patch` and `register` for transformers try a version of it that was not tested"
        )
    },
)
