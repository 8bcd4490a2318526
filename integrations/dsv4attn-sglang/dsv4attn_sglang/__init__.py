"""The plugin that SGLang loads: its DeepSeek-V4 layers attend on dsv4attn.

`register` is the entry point. SGLang calls it in every process, for every model, so it imports neither
torch nor SGLang: it asks to be called when a scheduler, the process that runs a model, builds the attention of
DeepSeek-V4.

    guard      which versions of SGLang are served, refusals, the log
    internals  the names of SGLang that this package relies on, and their check
    functions  the functions of SGLang that are replaced
    hooks      when they are replaced
    serving    whether dsv4attn can run a model's attention, before its first token
    attention  FlashMLA's two functions on dsv4attn
    parts      which parts around attention run on dsv4attn too
    indexer    SGLang's indexer without DeepGEMM
    gather     the keys of a prompt, on GPUs on which SGLang cannot read them
    records    V4.1's own records on Hopper
"""

from __future__ import annotations

from dsv4attn_sglang.guard import GUARD

__all__ = ["__version__", "register"]

__version__ = "0.1.0"


def register() -> None:
    """Ask SGLang to be called before it builds attention, unless `DSV4ATTN_SGLANG=0`. May be called many times.

    Raises nothing about versions: other models must still be served. An untested SGLang is refused when it builds the
    attention of a DeepSeek-V4 model.
    """
    if GUARD.is_off():
        return
    from dsv4attn_sglang import hooks

    hooks.watch_scheduler()
