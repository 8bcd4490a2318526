"""On aligned pages kernels read V4.1's records a word at a time: values are right, and no other byte is read.

Caches hold random codes and scales, as an independent reader understands them, among bytes of 0xFF.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import keys, ptx
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import launch, observed
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout
from dsv4attn.testing.kit.tolerances import F64
from tests.backends._triton.attention.attention_trials import BF16_ROWS, OCP, Trial
from tests.backends._triton.attention.cache_reads import bytes_read, may_read
from tests.backends._triton.attention.kernels_decode_codes import ROWS, nibbles_kernel
from tests.backends._triton.attention.mutants import mutate
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.compiling.ptx import instructions, of_bf16, run
from tests.core.cache import v41_packer

SPLIT = Arrangement.SPLIT
FP8, FP8_SPLIT = KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp8(arrangement=SPLIT)
FP4, FP4_SPLIT = KVCacheLayout.v41_fp4(), KVCacheLayout.v41_fp4(arrangement=SPLIT)
PAIRS = [(FP8, FP8), (FP8, FP4), (FP8_SPLIT, FP8_SPLIT), (FP8_SPLIT, FP4_SPLIT), (FP8, FP4_SPLIT), (FP8_SPLIT, FP8)]
PAIRS += [(OCP, FP4), (BF16_ROWS, FP8)]
BY_WORD = {"v41_fp8": keys.CODE_WORDS.value, "v41_fp4": keys.NIBBLE_WORDS.value, "rows": keys.ROWS.value}
BY_BYTE = {"v41_fp8": keys.CODES.value, "v41_fp4": keys.NIBBLES.value, "rows": keys.ROWS.value}
SMALL = Tuning(heads=16, keys=32)
NVIDIA = not INTERPRETED and torch.version.cuda is not None
pairs = pytest.mark.parametrize("layouts", PAIRS, ids=lambda p: "-".join(f"{x.name}.{x.arrangement.value}" for x in p))
interpreted = pytest.mark.skipif(not INTERPRETED, reason="addresses are known in the interpreter only")


@pytest.mark.pairwise
@pairs
@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("aligned", [True, False], ids=["words", "bytes"])
@interpreted
def test_bytes_of_named_records_are_read_and_no_others(
    layouts: tuple[KVCacheLayout, ...], form: str, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for splits, reload in ((0, False), (3, True)):
        tuning = evolve(SMALL, reload=reload)
        options = {"aligned": aligned, "splits": splits, "tuning": tuning, "seed": 3 + splits}
        trial = Trial(layouts=layouts, widths=(40, 33), pages=(5, 64), tokens=2, form=form, **options)  # type: ignore[arg-type]

        with observed() as seen:
            read = bytes_read(trial, monkeypatch)

        assert np.array_equal(read, may_read(trial))
        trial.check()
        kinds = [{**dict(variant.constants)} for variant in seen if variant.name == "attention"]
        known = {"fp8_ds_mla": keys.BYTES.value, **(BY_WORD if aligned and not reload else BY_BYTE)}
        assert [(constants["WINDOW"].kind, constants["COMPRESSED"].kind) for constants in kinds] == [
            tuple(known[layout.name] for layout in layouts)
        ]


NVFP4 = KVCacheLayout.of_record("v4_nvfp4")
FOUR_BITS = [(NVFP4, NVFP4), (OCP, NVFP4), (NVFP4, FP8)]
four_bits = pytest.mark.parametrize("layouts", FOUR_BITS, ids=lambda p: "-".join(layout.name for layout in p))


@four_bits
@interpreted
def test_records_of_four_bits_are_read_without_their_padding(
    layouts: tuple[KVCacheLayout, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for aligned, reload, splits in ((True, False, 0), (True, True, 3), (False, False, 0)):
        options = {"aligned": aligned, "splits": splits, "tuning": evolve(SMALL, reload=reload), "seed": 3 + splits}
        trial = Trial(layouts=layouts, widths=(20, 33), pages=(5, 64), tokens=2, **options)  # type: ignore[arg-type]

        with observed() as seen:
            read = bytes_read(trial, monkeypatch)

        assert np.array_equal(read, may_read(trial))
        trial.check()
        (kinds,) = ({**dict(variant.constants)} for variant in seen if variant.name == "attention")
        words = aligned and not reload
        alike = words and layouts[0] == layouts[1]
        by_byte = {**dict.fromkeys(("fp8_ds_mla", "v4_nvfp4"), keys.BYTES.value)}
        by_byte["v41_fp8"] = keys.CODE_WORDS.value if words else keys.CODES.value
        expected = [keys.FP4_WORDS.value] * 2 if alike else [by_byte[layout.name] for layout in layouts]
        assert [kinds["WINDOW"].kind, kinds["COMPRESSED"].kind] == expected


@pytest.mark.parametrize("layout", [FP8, FP8_SPLIT], ids=lambda layout: layout.arrangement.value)
@pytest.mark.parametrize("form", ["dense", "ragged", "gathered", "gathered-ragged"])
def test_a_single_cache_is_read_in_every_form(layout: KVCacheLayout, form: str) -> None:
    for aligned in (True, False):
        Trial(layouts=(layout,), pages=(53,), widths=(70,), form=form, aligned=aligned, tuning=SMALL).check()  # type: ignore[arg-type]


@pairs
def test_queries_of_fp32_and_any_number_of_heads(layouts: tuple[KVCacheLayout, ...]) -> None:
    Trial(layouts=layouts, widths=(9, 40), heads=17, q_dtype=torch.float32, tuning=SMALL, seed=5).check()
    for widths in ((0, 20), (20, 0)):
        Trial(layouts=layouts, widths=widths, heads=1, splits=2, tuning=SMALL, seed=6).check()


# codes of e2m1, all under all scales

SCALES = np.arange(256, dtype=np.uint8)
CODES = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
"""[256, 256]: each pair of codes, in a row for each scale; words of eight codes are [256, 64]."""


def defined() -> F64:
    """Values [256, 512] of the codes in the row of every scale."""
    low, high = CODES & 15, CODES >> 4
    order = np.stack([low, high], -1).reshape(256, 512)
    sizes = np.array([float(value) for value in v41_packer.E2M1])
    scales = np.array([v41_packer.decode_e4m3(int(byte)) for byte in SCALES])
    values: F64 = np.where(order & 8, -1.0, 1.0) * sizes[order & 7] * scales[:, None]
    return values


def alike(got: F64, want: F64) -> bool:
    """Whether two arrays agree in values, zeros with their signs, and NaN."""
    known = ~np.isnan(want)
    return np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got)[known], np.signbit(want)[known])


@pytest.mark.parametrize(
    "assembly", [False, pytest.param(True, marks=pytest.mark.skipif(not NVIDIA, reason="PTX needs an NVIDIA GPU"))]
)
def test_every_pair_of_codes_is_exact_under_every_scale(assembly: bool) -> None:
    words = torch.from_numpy(CODES.view(np.int32)).reshape(512, 32).contiguous().to(DEVICE)
    scales = torch.from_numpy(np.repeat(SCALES, 2 * 16)).view(torch.int64).reshape(512, 2).to(DEVICE)
    out = torch.zeros(512, 128, dtype=torch.int32, device=DEVICE)

    launch(nibbles_kernel, (512 // ROWS.value,), (words, scales, out), {"W": 32, "ASM": assembly})

    assert alike(out.cpu().view(torch.bfloat16).double().numpy().reshape(256, 512), defined())


def emulated(text: str) -> F64:
    """Values [256, 512], by the assembly."""
    exact = np.array([v41_packer.decode_e4m3(int(byte)) for byte in SCALES], dtype=np.float32)
    half = np.where(np.isnan(exact), 0x7FC0, exact.view(np.uint32) >> 16).astype(np.uint32)
    words = CODES.view("<u4").astype(np.uint32)
    scale = np.broadcast_to((half | half << 16)[:, None], words.shape)
    registers = run(instructions(text), {"$4": words, "$5": scale, "$6": np.full(words.shape, 0x7E807E80, np.uint32)})
    values = [of_bf16(registers[f"${i}"] >> shift) for i in range(4) for shift in (0, 16)]
    return np.stack(values, -1).reshape(256, 512)


def test_the_assembly_of_pairs_equals_the_definition() -> None:
    assert alike(emulated(ptx.DECODE_E2M1.value), defined())
    assert "unit = 0x7E807E80 + tl.zeros_like(words)" in inspect.getsource(keys)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x5410", "0x4510"),
        ("0x7632", "0x6732"),
        ("shr.u32 high, $4, 2", "shr.u32 high, $4, 3"),
        ("shr.u32 high, $4, 6", "shr.u32 high, $4, 5"),
        ("shl.b32 low, $4, 6", "shl.b32 low, $4, 5"),
        ("0x01010101", "0x03030303"),
        ("0xc0c0c0c0", "0x80808080"),
        ("lop3.b32 high, $4, 0x80808080, high, 0xea", "lop3.b32 high, $4, 0x80808080, high, 0xc0"),
        ("fma.rn.bf16x2 $3, $3, $5", "fma.rn.bf16x2 $3, $3, $6"),
        ("mov.b32 zero, 0x80008000;\nshr.u32 high, $4", "mov.b32 zero, 0;\nshr.u32 high, $4"),
    ],
)
def test_a_wrong_instruction_is_seen(old: str, new: str) -> None:
    text = ptx.DECODE_E2M1.value
    assert old in text, f"{old!r} is gone: write the mutant anew"

    assert not alike(emulated(text.replace(old, new)), defined())


# mutants

SCALES_OF_PAGE = "page + pages.size.to(tl.int64) * DATA + row * SCALES"
MUTANTS = {
    "a scale of fp8 for 64 codes": ("keys", "scale_of(s0[:, None] >> shift,", "scale_of(s0[:, None] >> shift // 2,"),
    "scales of the first 128 dims for all": ("keys", "s3 = tl.load(scale + 3", "s3 = tl.load(scale"),
    "scales of a page of 64": ("keys", SCALES_OF_PAGE, "page + 64 * DATA + row * SCALES"),
    "right half from the left": ("keys", "data + 32, mask=mask, other=0)\n    s0", "data, mask=mask, other=0)\n    s0"),
    "codes in another order": (
        "keys",
        "tl.join(tl.join(a, c), tl.join(b, d))",
        "tl.join(tl.join(b, d), tl.join(a, c))",
    ),
    "scales of other dims": ("keys", "tl.load(scale + 2, mask=mask", "tl.load(scale, mask=mask"),
    "a tile of the compressed segment forgotten": ("attention", "tl.maximum(first, first_tiles)", "first_tiles + 1"),
    "the window's loop over all tiles": ("attention", "end = tl.minimum(last, first_tiles)", "end = last"),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trial = Trial(layouts=(FP8_SPLIT, FP4_SPLIT), widths=(20, 33), pages=(5, 53), tokens=2, tuning=SMALL, seed=8)
    assert trial.error(trial.run_it()) <= 1
    mutate(monkeypatch, tmp_path, *MUTANTS[name])

    assert trial.error(trial.run_it()) > 1


FOUR_BIT_MUTANTS = {
    "bf16 values with the last codes": ("56 + of", "48 + of"),
    "scales of other dims": ("tl.load(wide + 2, mask=ok", "tl.load(wide + 1, mask=ok"),
    "padding for scales": ("tl.load(part + 6, mask=ok", "tl.load(part + 7, mask=ok"),
    "the last codes from before": ("runtime_zero + 48 + tl.arange(0, 8)", "runtime_zero + 40 + tl.arange(0, 8)"),
    "columns in order": ("right = tl.where(left < 128, right,", "right = tl.where(left < 256, right,"),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", FOUR_BIT_MUTANTS)
def test_a_mutant_of_the_reader_of_four_bits_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial = Trial(layouts=(NVFP4, NVFP4), widths=(20, 33), pages=(5, 53), tokens=2, tuning=SMALL, seed=7)
    assert trial.error(trial.run_it()) <= 1
    mutate(monkeypatch, tmp_path, "keys", *FOUR_BIT_MUTANTS[name])

    error = trial.error(trial.run_it())
    assert not error <= 1


@interpreted
@pytest.mark.parametrize("old", ["x0 = tl.load(data, mask=mask, other=0)", "s0 = tl.load(scale, mask=ok, other=0)"])
def test_a_byte_too_many_is_seen(old: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Absent slots read as slot 0, whose values no result shows."""
    trial = Trial(layouts=(FP8,), widths=(40,), pages=(5,), tokens=2, tuning=SMALL, seed=8)
    mutate(monkeypatch, tmp_path, "keys", old, re.sub(", mask=.*", ")", old))

    assert not np.array_equal(bytes_read(trial, monkeypatch), may_read(trial))
