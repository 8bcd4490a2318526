"""Cases of the steps that DeepSeek-V4.1 has beside those of V4."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4attn.testing.case import Area, Case, CaseInput, Check
from dsv4attn.testing.cases_compressor import index_layout
from dsv4attn.testing.cases_layer import mixing
from dsv4attn.testing.check_candidates import CandidateSelection, publishes, selects_within, selects_within_published
from dsv4attn.testing.check_delayed import runs_collapse, runs_delayed, runs_first, runs_fused_delayed, runs_no_delayed
from dsv4attn.testing.check_latents import LatentSteps, makes_latents, replaces_drafts, stores
from dsv4attn.testing.factories import flash, layout
from dsv4attn.testing.strided import each_strided

__all__ = ["v41_cases"]


def delayed_cases() -> Iterator[Case]:
    """Hyper-connections whose input has the weights of the sublayer before."""
    fp32 = {"dtype": torch.float32}
    for name, fields in (("bf16", {}), ("fp32", fp32), ("n2", {"streams": 2}), ("flash", {"hidden": 5120, "count": 3})):
        of, inputs = f"{fields.get('streams', 4)} streams of {fields.get('hidden', 96)}", mixing(**fields)
        says = f"{of} are weighed by the sublayer before, and their own weights go out"
        yield _case(f"delayed-pre-{name}", "V1 V2", says, inputs, runs_delayed)
        says = f"{of}: the first sublayer takes stream 0"
        yield _case(f"delayed-first-{name}", "V1 V2", says, inputs, runs_first)
        says = f"{of}: the fused step is post, then the delayed pre of the new streams"
        yield _case(f"delayed-fused-{name}", "V3", says, inputs, runs_fused_delayed)
        says = f"{of} are collapsed by the last weights"
        yield _case(f"delayed-collapse-{name}", "V4", says, inputs, runs_collapse)
    for name, fields in (("bf16", {}), ("fp32", fp32)):
        says = f"{name} streams: the input and the mixes are normed with an eps of 1e-20, and are small"
        normed = mixing(normed=True, size=2.0**-12, norm_eps=1e-20, rms_eps=1e-20, **fields)
        yield _case(f"delayed-norm-{name}", "V1 V2", says, normed, runs_delayed)
    says = "each eps is added where it belongs, and the sublayer's output has its own factor"
    unlike = mixing(size=0.05, rms_eps=2e-3, pre_eps=0.03, sinkhorn_eps=0.005, post_mult=1.5, repeat=3)
    yield _case("delayed-eps", "V1 V2", says, unlike, runs_delayed)
    says = "streams of 1,031 tokens in one step"
    yield _case("delayed-fused-1031", "V3", says, mixing(count=1031), runs_fused_delayed)
    says = "rows of the streams, or of a sublayer's output, lie apart"
    strided = each_strided("x residual all", runs_fused_delayed, runs_collapse)
    yield _case("delayed-apart", "V3 V4", says, mixing(), strided)
    yield _case("delayed-none", "V1 V2 V3 V4", "no tokens: empty results", mixing(), runs_no_delayed)


def latent(name: str = "ocp", **fields: object) -> LatentSteps:
    """Latents, stored to keys (ocp, bf16) or to index keys of a layout."""
    cache = layout(name) if name in ("ocp", "fnuz") else index_layout(name, 512 if name == "bf16" else 128)
    return LatentSteps(**{"geometry": flash("c4a"), "layout": cache, **fields})  # type: ignore[arg-type]


def latent_cases() -> Iterator[Case]:
    """Latents of one and of two tokens, and what is stored of them."""
    says = "latents of one token are the RMSNorm of its kv, in bf16"
    yield _case("latents-1", "V5", says, latent(ratio=1), makes_latents())
    says = "latents of two tokens are weighed by a softmax of both for each channel, whatever stands in the pages"
    yield _case("latents-2", "V5 V6", says, latent(), makes_latents((13,), (1,), (5, 2, 9)))
    says = "rings of two blocks hold the last tokens, and steps may be longer than they are"
    yield _case("latents-ring", "V6", says, latent(state_page=4, ring_blocks=2), makes_latents((3,), (20,), (1, 7)))
    says = "kv so small that an eps of 1e-6 would show"
    yield _case("latents-eps", "V5", says, latent(size=2.0**-12), makes_latents((6,)))
    says = "drafts that are replaced leave latents and rings of one pass"
    yield _case("latents-drafts", "V6", says, latent(), replaces_drafts)
    for ratio in (1, 2):
        for name in ("ocp", "bf16"):
            says = f"keys of ratio {ratio} are rotated at the first position of their window, in {name} records"
            yield _case(f"latent-keys-{name}-{ratio}", "V7", says, latent(name, ratio=ratio), stores(normed=False))
        for name in ("fp8", "mxfp4"):
            says = f"index keys of ratio {ratio} go through an RMSNorm, bf16 and RoPE to {name} records"
            yield _case(f"latent-index-{name}-{ratio}", "V7", says, latent(name, ratio=ratio), stores(normed=True))

    yield from _stale_cases()


def _stale_cases() -> Iterator[Case]:
    """Rows of padding among the tokens."""
    says = "rows of padding among the tokens have latents of zeros, and change no other"
    yield _case("no-token-latents-1", "B5", says, latent(ratio=1), makes_latents((5, 2), padded=True))
    says = "rows of padding are in no window, and leave the rings of all requests as they are"
    ring = latent(state_page=4, ring_blocks=2)
    yield _case("no-token-latents-2", "B5", says, ring, makes_latents((3,), (1,), (11, 2), padded=True))
    for ratio in (1, 2):
        says = f"rows of padding store no key of ratio {ratio}, and no position of them is looked up"
        yield _case(f"no-token-keys-{ratio}", "B5", says, latent(ratio=ratio), stores(normed=False, padded=True))
        says = f"rows of padding store no index key of ratio {ratio}, and no position of them is looked up"
        yield _case(f"no-token-index-{ratio}", "B5", says, latent("fp8", ratio=ratio), stores(normed=True, padded=True))


def narrowing(name: str = "fp8", **fields: object) -> CandidateSelection:
    """A selection with candidates, among index keys of a layout."""
    return CandidateSelection(**{"geometry": flash("c4a"), "layout": index_layout(name), **fields})  # type: ignore[arg-type]


def candidate_cases() -> Iterator[Case]:
    """Blocks that are published, and selection among their entries."""
    for name in ("fp8", "mxfp4", "bf16"):
        says = f"the blocks of {name} keys with the largest scores are published, and the newest one"
        yield _case(f"candidates-{name}", "V8", says, narrowing(name, heads=32), publishes)
        says = f"entries of {name} keys in any blocks are selected, and blocks that do not exist are none"
        yield _case(f"within-{name}", "V9", says, narrowing(name, heads=32, topk=40), selects_within)
    random = narrowing(whole=False, requests=((4000, 3), (700, 1)), topk=20, blocks=20)
    yield _case("candidates-random", "V8", "scores of any size: blocks", random, publishes)
    yield _case("within-random", "V9", "scores of any size: entries of blocks", random, selects_within)
    says = "fewer blocks are visible than are wanted: all of them, and selection among them is that among all"
    void = narrowing(requests=((0, 9), (1, 1), (40, 3), (1021, 4)), blocks=40, padding=3)
    yield _case("candidates-void", "V8", says, void, publishes)
    yield _case("within-void", "V9", says, void, selects_within_published)
    says = "more blocks are visible than are wanted: selection is among the published ones"
    yield _case("within-published", "V9", says, narrowing(blocks=5, topk=64), selects_within_published)
    for size in (1, 32):
        says = f"blocks of {size} entries"
        yield _case(f"candidates-of-{size}", "V8", says, narrowing(block_size=size), publishes)
        yield _case(f"within-of-{size}", "V9", says, narrowing(block_size=size), selects_within)
    says = "entries whose block is -1 or does not exist are absent"
    dead = narrowing(dead=True, requests=((2000, 1), (1500, 2), (1700, 1), (2500, 1)))
    yield _case("candidates-blocks", "V8", says, dead, publishes)
    yield _case("within-blocks", "V9", says, dead, selects_within)
    says = "the bound of visible entries is far above them"
    yield _case("candidates-bound", "V8", says, narrowing(more_entries=3000), publishes)
    yield _case("within-bound", "V9", says, narrowing(more_entries=3000), selects_within)


def v41_cases() -> Iterator[Case]:
    """All of them."""
    yield from candidate_cases()
    yield from latent_cases()
    yield from delayed_cases()


def _case(name: str, clauses: str, says: str, inputs: CaseInput, check: Check) -> Case:
    return Case(name=name, area=Area.LAYER, clauses=clauses, says=says, inputs=inputs, check=check)
