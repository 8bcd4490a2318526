"""Cross-compilation of kernels, and the resources that they need on the target.

A form compiles as in a launch on the target, under the same key of Triton's cache: the JIT's own binder, which needs no
driver, processes the arguments. Nothing is loaded and nothing runs. `compile_all` uses threads, of which Python's lock
lets one compile at a time for most of the work. `processes` has worker processes for a warm-up.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton
from attrs import frozen
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

from dsv4attn.backends._triton.compiling.gluon_exit import release_at_exit
from dsv4attn.backends._triton.compiling.number_tuples import bind_arguments
from dsv4attn.backends._triton.compiling.targets import MAX_THREADS, Target
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.untyped import CompiledKernel, Kernel
from dsv4attn.core.contract.problem import Reason
from dsv4attn.errors import ArgumentError

__all__ = [
    "Outcome",
    "Resources",
    "compile_all",
    "compile_for_gpu",
    "compile_near",
    "cross_compile",
    "distinctions",
    "is_cached",
    "threads",
]

_MAX_THREADS = 16


def threads() -> int:
    """Number of threads, or of processes, that compile: the cores that this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


def cross_compile(variant: Variant, target: Target, *, far: bool = False) -> CompiledKernel:
    """Compile a variant for a target; Triton's compiled kernel, with its texts in `asm`.

    far: the form for tensors beyond 2 GB, which differs on AMD only. Raises ArgumentError where kernels are
    interpreted, and for a parameter whose value would be compiled in; and whatever the compiler raises.
    """
    return compile_for_gpu(variant, target.gpu, far=far)


def compile_for_gpu(variant: Variant, gpu: GPUTarget, *, far: bool = False) -> CompiledKernel:
    """`cross_compile` for any target that Triton describes."""
    source, options = _source_and_options(variant, gpu, far=far)
    return triton.compile(source, target=gpu, options=options)


def is_cached(variant: Variant, gpu: GPUTarget, *, far: bool = False) -> bool:
    """Whether Triton's disk cache has a form, so that a launch compiles nothing. Arguments: of `compile_for_gpu`."""
    source, options = _source_and_options(variant, gpu, far=far)
    backend = make_backend(gpu)
    # what `triton.compile` does before it compiles
    parsed = backend.parse_options({**options, **source.parse_options()})
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    cached_files = get_cache_manager(hashlib.sha256(key.encode("utf-8")).hexdigest())
    name = f"{source.name[:150]}.json"
    return name in (cached_files.get_group(name) or {})


def _source_and_options(variant: Variant, gpu: GPUTarget, *, far: bool) -> tuple[Any, dict[str, Any]]:
    """What the compiler reads for a form, and its options, as in a launch."""
    _require_compiler()
    _require_unspecialised(variant)
    kernel, backend = variant.kernel, make_backend(gpu)
    bind = bind_arguments(kernel, backend)
    keywords = {**dict(variant.constants), **variant.options, **_options_of_every_launch(kernel)}
    bound, specialization, _ = bind(*variant.stand_ins(far=far), **keywords)
    packed = kernel._pack_args(backend, keywords, bound, specialization, None)  # noqa: SLF001 - no public name
    options, signature, constants, attributes = packed
    return _source_of(kernel)(kernel, signature, constants, attributes), options.__dict__


def _options_of_every_launch(kernel: Kernel) -> dict[str, Any]:
    """Options that Triton's launcher adds; Triton's environment variables set them, and they are in a form's key."""
    chosen = {"debug": kernel.debug or triton.knobs.runtime.debug}
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        # releases of Triton differ in these
        if hasattr(triton.knobs.compilation, name):
            chosen[name] = getattr(triton.knobs.compilation, name)
    return chosen


def _source_of(kernel: Kernel) -> Callable[..., object]:
    """The class of the compiler's input: Triton and Gluon have one each."""
    source: Callable[..., object] = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        release_at_exit()
        source = GluonASTSource
    return source


def _require_compiler() -> None:
    if INTERPRETED:
        raise ArgumentError(
            "TRITON_INTERPRET",
            expected="unset when Python starts, because kernels that are interpreted cannot be compiled",
            actual=os.environ.get("TRITON_INTERPRET", "set"),
            hint="start a Python without it; `dsv4attn compile` does",
        )


def _require_unspecialised(variant: Variant) -> None:
    """Check that the value of no run-time integer compiles anything."""
    parameters = {parameter.name: parameter for parameter in variant.kernel.params}
    for name in [name for name, text in variant.types if text == "int"]:
        parameter = parameters[name]
        if not (parameter.annotation_type and parameter.do_not_specialize):
            raise ArgumentError(
                f"parameter {name} of kernel {variant.name}",
                expected="an integer with a width, not specialised",
                actual="one that is specialised" if parameter.annotation_type else "one without annotation",
                hint=f"annotate it as tl.int32 or tl.int64, and list it in @triton.jit(do_not_specialize=[{name!r}])",
            )


@frozen
class Resources:
    """What one block of a compiled kernel needs.

    registers: of a thread; vector and accumulation registers on AMD. spill_stores, spill_loads: bytes of a thread (on
    AMD registers spilled, times four). stack: bytes of a thread, spills included. shared: bytes. occupancy: blocks that
    a unit of the target holds at once. wave: threads that run in step. matrix: matrix instructions in the assembly.
    products: products of 16-bit matrices in the source. serialised: the assembler's messages about matrix instructions
    that wait for each other. roles: warps, and registers of each of their threads, of a warp-specialised kernel;
    `registers` is then what all warps start with.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    threads: int
    occupancy: int
    wave: int
    matrix: int = 0
    products: int = 0
    serialised: tuple[str, ...] = ()
    roles: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, kernel: CompiledKernel, target: Target) -> Resources:
        """Read them off a compiled kernel."""
        registers, stores, loads, stack, serialised = _from_ptx(kernel) if target.is_cuda else _from_amdgcn(kernel)
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        occupancy = target.occupancy(registers, shared, warps)
        wave = target.warp_size if target.is_cuda else _largest(r"\.wavefront_size:\s+(\d+)", kernel.asm["amdgcn"])
        matrix = len(_MATRIX.findall(kernel.asm["ptx" if target.is_cuda else "amdgcn"]))
        # Gluon kernels have no such stage
        products = len(_PRODUCT.findall(kernel.asm.get("ttir", "")))
        need = registers, stores, loads, stack, shared, warps * wave, occupancy
        return cls(*need, wave, matrix, products, serialised, _role_registers(kernel))

    def reasons(self, target: Target, *, spills: int = 0) -> list[Reason]:  # noqa: C901 - one limit after the other
        """Every limit of the target that is broken; the compiler checks none of them.

        spills: bytes that a thread may store and load, see `Variant.spills`.
        """
        allowed, failures = target.shared_per_block, []
        if self.shared > allowed:
            cure = "smaller tiles, or fewer stages"
            failures.append(Reason("SHARED_MEMORY", f"{self.shared:,} bytes", f"at most {allowed:,} in a block", cure))
        if self.threads > MAX_THREADS:
            failures.append(Reason("THREADS", self.threads, f"at most {MAX_THREADS} in a block", "fewer warps"))
        if self.registers > target.registers_per_thread:
            failures.append(Reason("REGISTERS", self.registers, f"at most {target.registers_per_thread} in a thread"))
        file, used = 4 * target.warp_size * target.registers, sum(w * target.warp_size * r for w, r in self.roles)
        if used > file:
            cure = "fewer registers for one of the roles"
            failures.append(Reason("REGISTER_FILE", f"{used:,} in all roles", f"at most {file:,} in a block", cure))
        spilled = self.spill_stores + self.spill_loads
        if spilled > spills:
            actual = f"{self.spill_stores} bytes stored and {self.spill_loads} loaded per thread"
            expected = f"at most {spills} in all" if spills else "none"
            failures.append(Reason("SPILLS", actual, expected, "smaller tiles, or more warps"))
        elif self.stack and not spilled:
            failures.append(Reason("SCRATCH", f"{self.stack} bytes of a thread", "none", "no arrays in memory"))
        if self.wave != target.warp_size:
            failures.append(Reason("WAVE", f"{self.wave} threads in a wave", target.warp_size))
        if self.products and not self.matrix:
            cure = "a dtype and a tile that the matrix unit takes"
            failures.append(Reason("MATRIX", "products without matrix instructions", "at least one", cure))
        if self.serialised:
            cure = "fewer registers in flight"
            failures.append(Reason("SERIALISED", self.serialised[0], "matrix instructions that overlap", cure))
        if not self.occupancy and not failures:
            failures.append(Reason("OCCUPANCY", "no block fits", "at least one", "fewer warps, or smaller tiles"))
        return failures


_MATRIX = re.compile(
    r"^\s*(?:@\S+\s+)?(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_s?mfmac?_|v_s?wmmac?_)", re.MULTILINE
)
"""A matrix instruction, at the start of a line of assembly."""
_PRODUCT = re.compile(r"= tt\.dot .*: tensor<\w+x(?:bf|f)16> \*")
"""A product of 16-bit matrices in the first stage of the compiler, where every target is alike."""

_ptxas_flags: list[tuple[str, ...]] = [("--regAllocOptLevel=2",), ()]
"""Flags that releases of Triton pass to the assembler; those that were right last time come first."""


def _from_ptx(kernel: CompiledKernel) -> tuple[int, int, int, int, tuple[str, ...]]:
    """Assemble once more for the assembler's messages, with Triton's flags: those that give the same bytes."""
    text = ""
    for flags in list(_ptxas_flags):
        messages, same = _assemble(kernel, flags)
        if same:
            _ptxas_flags.insert(0, _ptxas_flags.pop(_ptxas_flags.index(flags)))
            text = messages
            break
        text = text or messages
    lost = "Potential Performance Loss: "
    serialised = tuple(line.partition(lost)[2].strip() for line in text.splitlines() if lost in line)
    numbers = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads", r"(\d+) bytes stack")
    registers, stores, loads, stack = (_largest(pattern, text) for pattern in numbers)
    return registers, stores, loads, stack, serialised


def _assemble(kernel: CompiledKernel, flags: Sequence[str]) -> tuple[str, bool]:
    """The assembler's messages about a kernel, and whether it produces the same bytes as Triton did."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = kernel.metadata.target.arch
    fused = () if kernel.metadata.enable_fp_fusion else ("--fmad=false",)
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.asm["ptx"], encoding="utf-8")
        name = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
        command = [get_ptxas(arch).path, "-lineinfo", *fused, "-v", *flags, name, str(source), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - Triton's own tool
        same = done.returncode == 0 and binary.read_bytes() == kernel.asm["cubin"]
    return done.stderr, same


def _role_registers(kernel: CompiledKernel) -> tuple[tuple[int, int], ...]:
    """Warps and registers of each role of a warp-specialised kernel of NVIDIA; empty for all others.

    The first role has the kernel's own warps and the registers that the other roles leave: the second number in the
    assembly, after the registers before the roles split.
    """
    text = kernel.asm.get("ttgir", "")
    requested = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", text)
    if requested is None:
        return ()
    warps = [int(n) for n in re.findall(r"^\s*partition\d+\(.*num_warps\((\d+)\)", text, re.MULTILINE)]
    registers = [int(n) for n in requested[1].split(",")]
    (first,) = re.findall(r'"ttg.num-warps" = (\d+)', text)
    _, rest, *_ = (int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", kernel.asm["ptx"]))
    return (int(first), rest), *zip(warps, registers, strict=True)


def _from_amdgcn(kernel: CompiledKernel) -> tuple[int, int, int, int, tuple[str, ...]]:
    """Read the kernel's descriptor. On CDNA `.vgpr_count` counts accumulation registers too."""
    text = kernel.asm["amdgcn"]
    registers, spilled, stack = (
        _largest(rf"\.{name}:\s+(\d+)", text)
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    )
    return registers, 4 * spilled, 4 * spilled, stack, ()


def _largest(pattern: str, text: str) -> int:
    return max(map(int, re.findall(pattern, text)), default=0)


@frozen
class Outcome:
    """A form of a kernel on a target: its resources, or why it could not be compiled."""

    variant: Variant
    far: bool
    resources: Resources | None
    reasons: tuple[Reason, ...]

    @property
    def verdict(self) -> str:
        """One word: "ok"; "spills", which runs and is slow; "limit", which may not launch; "failed" to compile."""
        codes = {reason.code for reason in self.reasons}
        if "COMPILER" in codes:
            return "failed"
        # spills cause products that wait for each other
        if codes & {"SPILLS", "SCRATCH"} and codes <= {"SPILLS", "SCRATCH", "SERIALISED"}:
            return "spills"
        return "limit" if codes else "ok"


def compile_all(
    variants: Iterable[Variant],
    target: Target,
    *,
    progress: Callable[[Outcome], None] | None = None,
    workers: int | None = None,
) -> list[Outcome]:
    """Compile variants for a target, each once, and in both forms on AMD. Errors of the compiler are in the outcomes.

    progress: called with each outcome, in the order of the result. workers: threads that compile; None: `threads()`.
    Raises ArgumentError where kernels are interpreted.
    """
    _require_compiler()
    forms = [(variant, far) for variant in dict.fromkeys(variants) for far in (False, True)[: 2 - target.is_cuda]]
    outcomes = []
    with ThreadPoolExecutor(workers or threads()) as executor:
        for outcome in executor.map(lambda form: _outcome(form[0], target, far=form[1]), forms):
            outcomes.append(outcome)
            if progress is not None:
                progress(outcome)
    return outcomes


def compile_near(variant: Variant, target: Target) -> Outcome:
    """Compile one variant, in the form for tensors below 2 GB; errors of the compiler are in the outcome."""
    return _outcome(variant, target, far=False)


def _outcome(variant: Variant, target: Target, *, far: bool) -> Outcome:
    try:
        resources = Resources.of(cross_compile(variant, target, far=far), target)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises
        return Outcome(variant, far, None, (Reason("COMPILER", _said(error), "a kernel that compiles"),))
    return Outcome(variant, far, resources, tuple(resources.reasons(target, spills=variant.spills)))


def _said(error: BaseException) -> str:
    """The compiler's error, without the source lines around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def distinctions(variants: Sequence[Variant]) -> dict[Variant, str]:
    """In a few words, how each variant differs from the others of its kernel's name; empty for an only variant."""
    by_name: dict[str, list[Variant]] = defaultdict(list)
    for variant in variants:
        by_name[variant.name].append(variant)
    labels = {}
    for alike in by_name.values():
        parts = [_parts(variant) for variant in alike]
        columns = {key: [mine.get(key, "") for mine in parts] for mine in parts for key in mine}
        # of parameters that change together, one is enough
        chosen = {tuple(map(column.index, column)): key for key, column in reversed([*columns.items()])}
        keys = [key for key, column in columns.items() if len({*column}) > 1 and key in chosen.values()]
        labels.update({variant: " ".join(columns[key][i] for key in keys) for i, variant in enumerate(alike)})
    return labels


def _parts(variant: Variant) -> dict[str, str]:
    types = {name: f"{name}:{text.replace(':1', ' unaligned')}" for name, text in variant.types}
    constants = {name: f"{name}={_word(value)}" for name, value in _fields(variant.constants)}
    return {**types, **constants, " warps": f"{variant.num_warps} warps", " stages": f"{variant.num_stages} stages"}


def _fields(constants: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, object]]:
    """Constants by name, and each field of those that are named tuples."""
    for name, value in constants:
        if hasattr(value, "_asdict"):
            yield from ((f"{name}.{field}", of_field) for field, of_field in value._asdict().items())
        else:
            yield name, value


def _word(value: object) -> str:
    return str(value).rpartition(".")[2] if type(value).__name__ == "dtype" else str(value)
