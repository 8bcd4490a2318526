"""What this machine does with special values: `python docs/numerics.py`.

Asks torch, and Triton and ml_dtypes if they are installed, and prints each answer that differs from the reports in
docs/certificates/numerics. On a GPU, torch and Triton compute there; without one, Triton is interpreted.
Device 0 is asked. `--json FILE` writes this machine's report, which has versions and the name of the device, but no
host name, path or serial number. `--table docs/numerics.md` makes the table of that page from the reports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
if __name__ == "__main__" and DEVICE == "cpu":
    # Triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
try:
    import ml_dtypes
    import numpy as np
except ImportError:
    ml_dtypes = None

REPORTS = Path(__file__).resolve().parent / "certificates" / "numerics"
BEGIN, END = "<!-- numerics: begin -->", "<!-- numerics: end -->"

INF, NAN = float("inf"), float("nan")
CASTS = {
    "float8_e4m3fn": (464.0, 464.5, 500.0, INF, NAN, 1.0625, 1.0625 + 2.0**-12, 1.97, 2.0**-10, 1.5 * 2.0**-10, -0.0),
    "float8_e5m2": (61440.0, 65536.0, INF, NAN, 1.125, 1.97),
    "float8_e4m3fnuz": (240.0, 250.0, INF, NAN, -0.0),
    "float8_e8m0fnu": (0.0, -1.0, 3.0, 1.5, 2.0**-130, INF, NAN),
    "bfloat16": (1.00390625, 3.4e38, 1e-40, NAN),
    "int8": (300.0, -300.0, 2.5, NAN),
}
"""What is cast from fp32 to each format. The answer is the bits of the result."""


def row_name(dtype: str, value: float) -> str:
    """The row of the table that casts `value` to `dtype`."""
    return f"{value:.10g} to {dtype}"


def bits(value: int, dtype: str) -> str:
    """Bits of a cast, as the table shows them."""
    return str(value) if dtype == "int8" else f"0x{value:0{4 if dtype == 'bfloat16' else 2}x}"


def number(value: float) -> str:
    """A number as the table shows it."""
    return f"{value:.9g}"


def refuse(sentence: str) -> NoReturn:
    """Say what cannot be used, and end with exit code 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def answers_of(library: str, probes: dict[str, Callable[[], str]]) -> dict[str, str]:
    """What a library answers to its probes. An error is an answer too; nothing but errors is said on stderr."""
    answers, errors = {}, list[Exception]()
    for row, probe in probes.items():
        try:
            answers[row] = probe()
        except Exception as error:  # noqa: BLE001 - whatever a library raises
            answers[row] = f"raises {type(error).__name__}"
            errors.append(error)
    if len(errors) == len(answers):
        first = f"{type(errors[0]).__name__}: {errors[0]}".splitlines()[0]
        print(f"{library} is broken here: all its answers are errors, the first one is {first}", file=sys.stderr)
    return answers


def tensor(values: list[float] | tuple[float, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor on the device of the probes."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# ---------------------------------------------------------------- torch


def torch_cast(value: float, dtype: str) -> str:
    """Bits of a cast by torch."""
    cast = tensor([value] * 2).to(getattr(torch, dtype))
    if dtype == "int8":
        return bits(cast[0].item(), dtype)
    word = cast.view(torch.int16 if dtype == "bfloat16" else torch.uint8)[0].item()
    return bits(word & 0xFFFF, dtype)


def masked_row(mask: torch.Tensor) -> str:
    """The output of attention for a query whose keys are all masked, where each value is 0.25."""
    q = torch.ones(1, 8, 16, 64, dtype=torch.bfloat16, device=DEVICE)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q * 0.25, attn_mask=mask)
    return number(out[0, 0, 0, 0].float().item())


def ties(n: int, k: int) -> str:
    """Which of n equal scores torch.topk selects."""
    found = torch.topk(torch.zeros(n, device=DEVICE), k).indices.sort().values
    return "the first" if found.equal(torch.arange(k, device=DEVICE)) else "others"


def batches() -> str:
    """How many bit patterns row 0 of a bf16 product has, by the number of rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=generator).to(torch.bfloat16).to(DEVICE)
    weight = torch.randn(1024, 256, generator=generator).to(torch.bfloat16).to(DEVICE)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    rows = {bytes(torch.mm(x[:m], weight)[0].view(torch.uint8).cpu().tolist()) for m in sizes}
    return f"{len(rows)} of {len(sizes)}"


def torch_probes() -> dict[str, Callable[[], str]]:
    """Probes of torch on the device, by row of the table."""
    rows: dict[str, Callable[[], str]] = {
        row_name(dtype, value): lambda value=value, dtype=dtype: torch_cast(value, dtype)
        for dtype, values in CASTS.items()
        for value in values
    }
    blocked = torch.ones(16, 16, dtype=torch.bool, device=DEVICE)
    blocked[0] = False
    return rows | {
        "maximum(NaN, 1)": lambda: number(torch.maximum(tensor([NAN]), tensor([1.0])).item()),
        "max of 1, NaN, 2": lambda: number(tensor([1, NAN, 2]).max().item()),
        "argmax of 1, NaN, 2": lambda: str(tensor([1, NAN, 2, 0]).argmax().item()),
        "clamp(NaN, -2, 2)": lambda: number(tensor([NAN]).clamp(-2, 2).item()),
        "exp2(-130)": lambda: number(torch.exp2(tensor([-130.0])).item()),
        "exp(-100)": lambda: number(torch.exp(tensor([-100.0])).item()),
        "rsqrt(1e-40)": lambda: number(torch.rsqrt(tensor([1e-40])).item()),
        "sqrt(1e-40)": lambda: number(torch.sqrt(tensor([1e-40])).item()),
        "log2(1e-40)": lambda: number(torch.log2(tensor([1e-40])).item()),
        "-7 // 2, int32": lambda: str((tensor([-7], torch.int32) // 2).item()),
        "bf16 sum of 256 and 255 ones": lambda: number(tensor([256.0] + [1.0] * 255, torch.bfloat16).sum().item()),
        "topk, 100 of 1,000 equal scores": lambda: ties(1000, 100),
        "topk, 8 of 1,000 equal scores": lambda: ties(1000, 8),
        "attention, row masked by booleans": lambda: masked_row(blocked),
        "attention, row masked by -inf": lambda: masked_row(
            torch.zeros(16, 16, dtype=torch.bfloat16, device=DEVICE).masked_fill(~blocked, -INF)
        ),
        "bits of row 0 of a bf16 product, M = 1 to 512": batches,
    }


# ---------------------------------------------------------------- ml_dtypes


def ml_dtypes_cast(value: float, dtype: str) -> str:
    """Bits of a cast by ml_dtypes."""
    kind = np.dtype(getattr(ml_dtypes, dtype))
    with np.errstate(all="ignore"):
        cast = np.array([value], dtype=np.float32).astype(kind)
    return bits(int(cast.view(np.uint16 if kind.itemsize == 2 else np.uint8)[0]), dtype)


def ml_dtypes_probes() -> dict[str, Callable[[], str]]:
    """Probes of ml_dtypes, by row of the table."""
    return {
        row_name(dtype, value): lambda value=value, dtype=dtype: ml_dtypes_cast(value, dtype)
        for dtype, values in CASTS.items()
        if dtype != "int8"
        for value in values
    }


# ---------------------------------------------------------------- Triton

if triton is not None:

    @triton.jit
    def cast_kernel(x, out, KIND: tl.constexpr, WORD: tl.constexpr):
        """Cast 2,048 fp32 values, several a thread as some casts want, and store their bits."""
        i = tl.arange(0, 2048)
        tl.store(out + i, tl.load(x + i).to(KIND).to(WORD, bitcast=True).to(tl.int32))

    @triton.jit
    def values_kernel(x, y, out):
        """Functions of one value each, 16 values a row of `out`."""
        i = tl.arange(0, 16)
        a, b = tl.load(x + i), tl.load(y + i)
        tl.store(out + i, tl.maximum(a, b))
        tl.store(out + 16 + i, tl.clamp(a, -2.0, 2.0))
        tl.store(out + 32 + i, tl.clamp(a, -3.0, 2.0))
        tl.store(out + 48 + i, tl.exp2(a))
        tl.store(out + 64 + i, tl.exp(a))
        tl.store(out + 80 + i, tl.math.rsqrt(a))
        tl.store(out + 96 + i, tl.sqrt(a))
        tl.store(out + 112 + i, tl.log2(a))

    @triton.jit
    def reduce_kernel(x, out):
        """The maximum of 16 values and its place."""
        a = tl.load(x + tl.arange(0, 16))
        tl.store(out, tl.max(a, 0))
        tl.store(out + 1, tl.argmax(a, 0).to(tl.float32))

    @triton.jit
    def integer_kernel(x, y, out):
        """A quotient of two integers that are known at run time only."""
        tl.store(out, (tl.load(x) // tl.load(y)).to(tl.float32))

    @triton.jit
    def sum_kernel(x, out, N: tl.constexpr):
        """The sum of N values in their own type."""
        tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), 0).to(tl.float32))

    @triton.jit
    def quotient_kernel(x, y, out, N: tl.constexpr):
        """Quotients, and x y + x."""
        i = tl.arange(0, N)
        a, b = tl.load(x + i), tl.load(y + i)
        tl.store(out + i, a / b)
        tl.store(out + N + i, a * b + a)

    @triton.jit
    def dot_kernel(a, b, start, out, K: tl.constexpr):
        """Start + a b, for [64, K], [64, K] transposed, and [64, 64] in fp32."""
        m, k = tl.arange(0, 64), tl.arange(0, K)
        left = tl.load(a + m[:, None] * K + k[None, :])
        right = tl.load(b + m[:, None] * K + k[None, :])
        place = m[:, None] * 64 + m[None, :]
        tl.store(out + place, tl.dot(left, right.T, tl.load(start + place)))


def triton_cast(value: float, dtype: str) -> str:
    """Bits of a cast by a kernel."""
    kinds = {
        "float8_e4m3fn": tl.float8e4nv,
        "float8_e5m2": tl.float8e5,
        "float8_e4m3fnuz": tl.float8e4b8,
        "bfloat16": tl.bfloat16,
        "int8": tl.int8,
    }
    word = {"bfloat16": tl.uint16, "int8": tl.int8}.get(dtype, tl.uint8)
    out = tensor([0] * 2048, torch.int32)
    cast_kernel[(1,)](tensor([value] * 2048), out, KIND=kinds[dtype], WORD=word)
    return bits(out[0].item(), dtype)


def triton_value(row: int, value: float, other: float = 1.0) -> str:
    """The answer of a row of `values_kernel`."""
    out = tensor([0.0] * 128)
    values_kernel[(1,)](tensor([value] * 16), tensor([other] * 16), out)
    return number(out[16 * row].item())


def triton_reduce(place: int) -> str:
    """The maximum of 1, NaN, 2 and zeros (0), or its index (1)."""
    out = tensor([0.0] * 2)
    reduce_kernel[(1,)](tensor([1.0, NAN, 2.0] + [0.0] * 13), out)
    return f"{out[place].item():.9g}"


def triton_integers(x: int, y: int, dtype: torch.dtype) -> str:
    """A quotient of integers, computed at run time."""
    out = tensor([0.0])
    integer_kernel[(1,)](tensor([x], dtype), tensor([y], dtype), out)
    return number(out.item())


def triton_sum() -> str:
    """The sum of 256 and 255 ones in bf16."""
    out = tensor([0.0])
    sum_kernel[(1,)](tensor([256.0] + [1.0] * 255, torch.bfloat16), out, N=256)
    return number(out.item())


def triton_inexact(*, fused: bool) -> str:
    """How many of 4,096 random pairs are not rounded as one operation after the other is."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(4096, generator=generator) + 0.5 for _ in range(2))
    out = torch.zeros(2, 4096, device=DEVICE)
    quotient_kernel[(1,)](x.to(DEVICE), y.to(DEVICE), out, N=4096)
    # a product of two fp32 numbers is exact in fp64, and so is a quotient as far as its rounding to fp32 goes.
    exact = (x.double() * y.double()).float() + x if fused else (x.double() / y.double()).float()
    return f"{(out[int(fused)].cpu() != exact).sum().item()} of 4096"


def triton_dot(dtype: torch.dtype, k: int, factors: tuple[float, float], start: float = 0.0) -> str:
    """How many of k - 1 small products a sum keeps that has one product of 1, or a start of 1."""
    a = torch.full((64, k), factors[0]).to(dtype)
    b = torch.full((64, k), factors[1]).to(dtype)
    a[:, 0] = b[:, 0] = torch.tensor(1.0 - start).to(dtype)
    out = torch.zeros(64, 64, device=DEVICE)
    dot_kernel[(1,)](a.to(DEVICE), b.to(DEVICE), torch.full((64, 64), start, device=DEVICE), out, K=k)
    return f"{(out[0, 0].double().item() - 1) / (factors[0] * factors[1]):.4g} of {k - 1}"


def triton_operand() -> str:
    """What a product by 1 leaves of 1 + 2^-12 in fp32, which tf32 does not hold."""
    a, out = torch.full((64, 16), 1 + 2.0**-12, device=DEVICE), torch.zeros(64, 64, device=DEVICE)
    dot_kernel[(1,)](a, torch.eye(64, 16, device=DEVICE), torch.zeros_like(out), out, K=16)
    return number(out[0, 0].item())


def triton_probes() -> dict[str, Callable[[], str]]:
    """Probes of Triton's kernels on the device, or interpreted, by row of the table."""
    rows: dict[str, Callable[[], str]] = {
        row_name(dtype, value): lambda value=value, dtype=dtype: triton_cast(value, dtype)
        for dtype, values in CASTS.items()
        if dtype != "float8_e8m0fnu" and not (dtype == "float8_e4m3fnuz" and arch().startswith("gfx1"))
        for value in values
    }
    rows |= {
        "maximum(NaN, 1)": lambda: triton_value(0, NAN),
        "max of 1, NaN, 2": lambda: triton_reduce(0),
        "argmax of 1, NaN, 2": lambda: triton_reduce(1),
        "clamp(NaN, -2, 2)": lambda: triton_value(1, NAN),
        "clamp(NaN, -3, 2)": lambda: triton_value(2, NAN),
        "exp2(-130)": lambda: triton_value(3, -130.0),
        "exp(-100)": lambda: triton_value(4, -100.0),
        "rsqrt(1e-40)": lambda: triton_value(5, 1e-40),
        "sqrt(1e-40)": lambda: triton_value(6, 1e-40),
        "log2(1e-40)": lambda: triton_value(7, 1e-40),
        "-7 // 2, int32": lambda: triton_integers(-7, 2, torch.int32),
        "bf16 sum of 256 and 255 ones": triton_sum,
        "x / y, not rounded correctly": lambda: triton_inexact(fused=False),
        "x y + x, rounded once": lambda: triton_inexact(fused=True),
        "bf16 dot, 1 + 15 products of 2^-24": lambda: triton_dot(torch.bfloat16, 16, (2.0**-12, 2.0**-12)),
        "bf16 dot, 1 + 15 products of 2^-25": lambda: triton_dot(torch.bfloat16, 16, (2.0**-12, 2.0**-13)),
        "fp32 dot, 1 + 15 products of 2^-22": lambda: triton_dot(torch.float32, 16, (2.0**-11, 2.0**-11)),
        "fp32 dot, (1 + 2^-12) 1": triton_operand,
    }
    # compiling fp8 products for RDNA3 takes very long.
    if torch.version.hip is None or not arch().startswith("gfx11"):
        fp8 = torch.float8_e4m3fn
        rows |= {
            "e4m3 dot, 1 + 31 products of 2^-13": lambda: triton_dot(fp8, 32, (2.0**-6, 2.0**-7)),
            "e4m3 dot, 1 + 31 products of 2^-14": lambda: triton_dot(fp8, 32, (2.0**-7, 2.0**-7)),
            "e4m3 dot, 31 products of 2^-13 added to 1": lambda: triton_dot(fp8, 32, (2.0**-6, 2.0**-7), start=1.0),
            "e4m3 dot, 31 products of 2^-14 added to 1": lambda: triton_dot(fp8, 32, (2.0**-7, 2.0**-7), start=1.0),
        }
    return rows


# ---------------------------------------------------------------- reports


def arch() -> str:
    """What the vendor calls the architecture of the device, or "cpu"."""
    if DEVICE == "cpu":
        return "cpu"
    if DEVICE == "xpu":
        return "xpu"
    properties = torch.cuda.get_device_properties(0)
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def is_interpreted() -> bool:
    """Whether Triton's kernels are interpreted."""
    return triton is not None and not isinstance(cast_kernel, triton.JITFunction)


def libraries() -> dict[str, Callable[[], dict[str, Callable[[], str]]]]:
    """The probes of each library that is installed."""
    found: dict[str, Callable[[], dict[str, Callable[[], str]]]] = {"torch": torch_probes}
    if ml_dtypes is not None:
        found["ml_dtypes"] = ml_dtypes_probes
    if triton is not None and (DEVICE != "cpu" or is_interpreted()):
        found["triton interpreter" if is_interpreted() else "triton"] = triton_probes
    return found


def left_out() -> list[str]:
    """The libraries that are not asked, each with the reason."""
    reasons = {"ml_dtypes": "not installed", "triton": "not installed"}
    if triton is not None:
        reasons["triton"] = "there is no GPU, and TRITON_INTERPRET is off"
    asked = {library.split(maxsplit=1)[0] for library in libraries()}
    return [f"{library} ({reason})" for library, reason in reasons.items() if library not in asked]


def settings() -> dict[str, str]:
    """What is set in the environment and changes answers."""
    name = "TRITON_DEFAULT_FP_FUSION"
    return {name: str(triton.knobs.language.default_fp_fusion)} if triton is not None and name in os.environ else {}


def versions() -> dict[str, str]:
    """Versions of what answers."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    if triton is not None:
        found["triton"] = triton.__version__
    if ml_dtypes is not None:
        found["ml_dtypes"] = ml_dtypes.__version__
    return found


def report() -> dict[str, Any]:
    """This machine's report: the device, versions, and the answer of each library to each probe."""
    names = {"cuda": torch.cuda.get_device_name, "xpu": torch.xpu.get_device_name}
    name = names.get(DEVICE, platform.machine)()
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "schema": 1,
        "device": {"kind": DEVICE, "arch": arch(), "name": name, "cpu_capability": capability},
        "versions": versions(),
        **({"settings": settings()} if settings() else {}),
        "answers": {library: answers_of(library, probes()) for library, probes in libraries().items()},
    }


def title(one: dict[str, Any], library: str) -> str:
    """A column's title: library, version, device."""
    version = one["versions"].get(library.split(maxsplit=1)[0], "")
    place = "" if library == "ml_dtypes" else f", {one['device']['arch']}" if "interpreter" not in library else ""
    return f"{library} {version.split('+')[0]}{place}"


def is_report(one: Any) -> bool:
    """Whether this is a report that this script can compare."""
    parts = [one.get(key) for key in ("device", "versions", "answers")] if isinstance(one, dict) else []
    return (
        bool(parts)
        and one.get("schema") == 1
        and all(isinstance(part, dict) for part in parts)
        and {"arch", "name"} <= one["device"].keys()
        and all(isinstance(rows, dict) for rows in one["answers"].values())
        and all(isinstance(answer, str) for rows in one["answers"].values() for answer in rows.values())
    )


def committed() -> list[dict[str, Any]]:
    """The reports of the repository. There are none where this file stands alone."""
    reports = []
    for path in sorted(REPORTS.glob("*.json")):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            refuse(f"{path} cannot be read ({error}): remove it, or restore it by `git checkout`.")
        if not is_report(one):
            refuse(f"{path} is no report of schema 1: remove it, or write it by `--json` of this script.")
        reports.append(one)
    return reports


def compared(here: dict[str, Any], reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports that a report is compared with: those of its architecture if there are any, else all."""
    return [one for one in reports if one["device"]["arch"] == here["device"]["arch"]] or reports


def differences(here: dict[str, Any], reports: list[dict[str, Any]]) -> list[str]:
    """Lines that say where a report differs from others."""
    return [
        f"{library}: {row}: {known[row]} in {title(one, library)} ({one['device']['name']}), {answer} here"
        for one in reports
        for library, rows in here["answers"].items()
        for known in [one["answers"].get(library, {})]
        for row, answer in rows.items()
        if row in known and known[row] != answer
    ]


def table(reports: list[dict[str, Any]]) -> str:
    """The table of docs/numerics.md: a row for each probe, a column for each library of each report.

    Columns with one title are one column where their answers agree; otherwise the later one has its device's name.
    """
    columns: dict[str, dict[str, str]] = {}
    for one in reports:
        for library, rows in one["answers"].items():
            short = title(one, library)
            for name in (short, f"{short}, {one['device']['name']}"):
                known = columns.get(name, {})
                if all(known.get(row, answer) == answer for row, answer in rows.items()):
                    columns[name] = known | rows
                    break
            else:
                refuse(f"Two reports in {REPORTS} are called {name!r} and have other answers: remove one of them.")
    names = list(dict.fromkeys(row for rows in columns.values() for row in rows))
    lines = ["| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(rows.get(name, "") for rows in columns.values()) + " |" for name in names]
    devices = dict.fromkeys(f"{one['device']['name']} ({one['device']['arch']})" for one in reports)
    return "\n".join(lines) + "\n\nReports of: " + ", ".join(devices) + "."


def with_table(page: str, reports: list[dict[str, Any]]) -> str:
    """A page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(reports)}\n\n{END}{rest.split(END)[1]}"


def page_of(path: Path) -> str:
    """The text of a page that has the two marks of the table."""
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        refuse(f"{path} cannot be read ({error}): name a page, such as docs/numerics.md, after --table.")
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        refuse(f"{path} does not have the lines {BEGIN!r} and {END!r}, once and in this order: add them.")
    return page


def main() -> None:
    """Run the probes, and print or write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write this machine's report")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="make the table of a page; alone it asks nothing")
    arguments = parser.parse_args()
    reports = committed()
    page = page_of(arguments.table) if arguments.table is not None else ""
    if arguments.json is None and page and not reports:
        refuse(f"{REPORTS} has no reports: run this script in a clone, or write a report there by --json.")
    if arguments.json is not None and (arguments.json.is_dir() or not os.access(arguments.json.parent, os.W_OK)):
        refuse(f"{arguments.json} cannot be written: name a file in a folder that exists, after --json.")
    if arguments.json is not None or not page:
        # numpy warns of overflows, which are asked for.
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        tell(report(), reports, arguments.json)
    if page:
        arguments.table.write_text(with_table(page, committed()), encoding="utf-8")


def tell(here: dict[str, Any], reports: list[dict[str, Any]], file: Path | None) -> None:
    """Write a report, if a file is named, and print where it differs from others."""
    print(f"{here['device']['name']} ({here['device']['arch']}), {here['versions']}")
    if missing := left_out():
        print("Left out:", ", ".join(missing))
    if file is not None:
        file.write_text(json.dumps(here, indent=1) + "\n", encoding="utf-8")
    if not reports:
        print(table([here]))
        return
    others = compared(here, reports)
    lines = differences(here, others)
    print("\n".join(lines))
    answers = sum(len(rows) for rows in here["answers"].values())
    print(f"{answers} answers, {len(lines)} differences from {len(others)} reports")


if __name__ == "__main__":
    main()
