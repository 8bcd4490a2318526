"""Record what a change of names and shape must keep, and compare two records.

    python -m tests.record_package OUTPUT_DIR [--only names,variants,help,run,public,ir,kit]
    python -m tests.record_package --compare DIR_A DIR_B [--renames FILE.json]

Each part is one JSON file of OUTPUT_DIR:

names: every case of the conformance kit, by its pytest id.
variants: what `dsv4attn compile` compiles, by model, backend and target.
help: the text of `--help` of every command.
run: the object of `dsv4attn run --json` without times, for several models.
public: `__all__` of every public module.
ir: SHA-256 of TTIR (Gluon: TTGIR) and of PTX (AMD: TTGIR) of every variant of `--targets` and `--models`.
kit: state and measure of every case on the reference, and of the cases of `--cases` on interpreted backends.

FILE.json maps old words to new words. The words are replaced in the record of DIR_A before the comparison.
The package is reached through the command line, pytest and `compiling.aot`, so that modules may move between records.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.backends.built_in import triton_backends

PARTS = ("names", "variants", "help", "run", "public", "ir", "kit")

MODELS = ("flash", "pro", "v4.1-flash")
DTYPES = ("e4m3fn", "e4m3fnuz", "bfloat16", "float32", "v41_fp8", "v41_fp4")
BACKENDS = triton_backends()
RUNS: tuple[list[str], ...] = ([], ["--model", "v4.1-flash", "--max-requests", "2"])
KITS = (*BACKENDS, "sm90 of many tokens")
CASES = (
    "decode-*,mixed-c4a,prefill-c4a,verify-*,call-holes-*,call-empty-*,sink-values-*,lse-*,"
    "indexer-*,mhc-*-bf16,insert-ocp-64"
)
TIMES = re.compile(r"second|per_s$|share|operations|threads|version|date|platform|memory|load|cores|host")
"""Keys of `run --json` whose values are times or facts of the machine."""
INTERPRETER = """
import importlib
for name in ("tests.interpreter", "tests.fast_interpreter"):
    try: importlib.import_module(name).patch_interpreter(); break
    except (ImportError, AttributeError): pass
from dsv4attn.tools.cli import main
main()
"""
"""The command line with the tests' fast interpreter where there is one."""
MANY_TOKENS = """
from dsv4attn.backends.sm90.launch import Sm90Backend
Sm90Backend.__init__.__kwdefaults__["small"] = "gluon"
"""
"""Makes `sm90` compute decodes of few tokens, too, in its kernels of many tokens."""


def call(*args: str) -> tuple[int, str]:
    """Run `dsv4attn ARGS` in this process; its exit code and standard output."""
    from dsv4attn.tools.cli import main

    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main(list(args))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue()


def names(_: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    command += ["-p", "dsv4attn.testing.plugin", "--pyargs", "dsv4attn.testing.suite"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.partition("::")[2]: True for line in listed.splitlines() if "::" in line}


def kernels(models: tuple[str, ...], targets: tuple[str, ...]) -> Iterator[tuple[str, str, str, list[Any], Any]]:
    """Model, backend and target with the variants that `dsv4attn compile` would compile."""
    from dsv4attn.backends._triton.compiling import aot

    compile_calls: list[tuple[list[Any], Any]] = []

    def keep(variants: Any, target: Any, **_: object) -> list[Any]:
        compile_calls.append(([*dict.fromkeys(variants)], target))
        return []

    aot.compile_all = keep
    for model in models:
        for backend in BACKENDS:
            for target in targets:
                dtypes = [word for dtype in DTYPES for word in ("--dtype", dtype)]
                call("compile", "--json", "--backend", backend, "--model", model, "--target", target, *dtypes)
                if compile_calls:
                    yield model, backend, target, *compile_calls.pop()


def all_targets() -> tuple[str, ...]:
    from dsv4attn.backends._triton.compiling.targets import TARGETS

    return tuple(TARGETS)


def described(variant: Any) -> str:
    types = ", ".join(f"{name}: {text}" for name, text in variant.types)
    constants = ", ".join(f"{name}={value}" for name, value in variant.constants)
    options = ", ".join(f"{name}={value}" for name, value in sorted(variant.options.items()))
    return f"{variant.name}({types}; {constants}; {options})"


def variants(_: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for model, backend, target, compiled, _target in kernels(MODELS, all_targets()):
        record[f"{model} {backend} {target}"] = dict.fromkeys(sorted(map(described, compiled)), True)
    return record


def ir(options: argparse.Namespace) -> dict[str, Any]:
    from dsv4attn.backends._triton.compiling.aot import cross_compile

    targets = all_targets() if options.targets == ["all"] else tuple(options.targets)
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        # nothing that is compiled here is a whole kernel, so no other program may find it
        os.environ["TRITON_CACHE_DIR"] = folder
        for _, _, name, compiled, target in kernels(tuple(options.models), targets):
            skip_assembler(target)
            for variant in compiled:
                key = f"{name} {described(variant)}"
                if key not in record:
                    record[key] = hashes(cross_compile(variant, target).asm, variant.name)
            print(f"  {name}: {len(record)} variants", file=sys.stderr, flush=True)
    return record


def skip_assembler(target: Any) -> None:
    """Leave out the last stage of compilation, which takes long and whose result is not hashed."""
    from triton.compiler import make_backend

    backend = type(make_backend(target.gpu))
    if hasattr(backend, "all_stages"):
        return
    backend.all_stages = backend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        self.all_stages(stages, *rest)
        stages[[*stages][-1]] = lambda *_: b""

    backend.add_stages = add_stages


def hashes(asm: Any, kernel: str) -> dict[str, str]:
    texts = {stage: asm[stage] for stage in ("ttir", "ptx") if asm.get(stage)}
    if len(texts) < 2 and asm.get("ttgir"):
        texts["ttgir"] = asm["ttgir"]
    return {s: hashlib.sha256(without_names(text, kernel).encode()).hexdigest()[:16] for s, text in texts.items()}


def without_names(text: str, kernel: str) -> str:
    """The text without source locations, and without names of the kernel, its parameters and its variables."""
    text = text.partition("\t.section\t.debug")[0].replace(kernel, "KERNEL")
    text = re.sub(r"^(#loc\d*(\(.*\))? = .*|\s*//.*|\s*\.(loc|file)\s.*|\$L__tmp\d+:)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\s*//.*", "", text)
    text = re.sub(r" loc\((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\))*\)", "", text)
    numbers: dict[str, str] = {}
    return re.sub(r"%[A-Za-z_][\w$.]*(?=\W)", lambda m: numbers.setdefault(m[0], f"%v{len(numbers)}"), text)


def help_(_: argparse.Namespace) -> dict[str, Any]:
    import click

    from dsv4attn.tools.cli import main

    record: dict[str, Any] = {}

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(command, parent, name, terminal_width=100, **command.context_settings)
        record[context.command_path] = command.get_help(context).splitlines()
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                inner = command.get_command(context, child)
                assert inner is not None
                add(inner, child, context)

    add(main, "dsv4attn", None)
    return record


def run(_: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for options in RUNS:
        code, text = call("run", "--json", *options)
        record[" ".join(["run", *options])] = {"code": code, "values": without_times(json.loads(text))}
    return record


def without_times(value: Any, *, is_time: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: without_times(v, is_time=is_time or bool(TIMES.search(key))) for key, v in value.items()}
    if isinstance(value, list):
        return {str(i): without_times(item, is_time=is_time) for i, item in enumerate(value)}
    return type(value).__name__ if is_time else value


def public(_: argparse.Namespace) -> dict[str, Any]:
    import dsv4attn

    record: dict[str, Any] = {}
    for module in pkgutil.walk_packages(dsv4attn.__path__, "dsv4attn.", onerror=lambda _: None):
        if not any(part.startswith("_") for part in module.name.split(".")):
            try:
                exported = getattr(importlib.import_module(module.name), "__all__", ())
                record[module.name] = dict.fromkeys(sorted(exported), True)
            except Exception as error:  # noqa: BLE001 - a library of an accelerator that is missing here
                record[module.name] = f"{type(error).__name__}: {error}"
    record["dsv4attn"] = dict.fromkeys(sorted(dsv4attn.__all__), True)
    return record


def kit(options: argparse.Namespace) -> dict[str, Any]:
    record = {}
    if "reference" in options.backends:
        record["reference"] = certificate(["reference"], "")
    for kit in KITS:
        backend, _, rest = kit.partition(" ")
        if backend in options.backends:
            began = time.perf_counter()
            program = (MANY_TOKENS if rest else "") + INTERPRETER
            record[kit] = certificate([backend, "--filter", options.cases], program)
            print(f"  {kit}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return record


def certificate(arguments: list[str], interpreted: str) -> dict[str, Any]:
    """What `conform` says. interpreted: the program that runs it on interpreted kernels; empty for the command."""
    environ = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0"}
    program = [sys.executable, "-c", interpreted] if interpreted else [sys.executable, "-m", "dsv4attn"]
    command = [*program, "conform", *arguments, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    try:
        values = json.loads(done.stdout)
        cases = {case["name"]: {key: case[key] for key in ("state", "error", "budget")} for case in values["cases"]}
    except (json.JSONDecodeError, KeyError) as error:
        raise RuntimeError(f"conform {arguments}: {(done.stdout + done.stderr)[-2000:]}") from error
    return {"code": done.returncode, "cases": cases}


RECORDERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "names": names, "variants": variants, "help": help_, "run": run, "public": public, "ir": ir, "kit": kit,
}  # fmt: skip


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {key: item for name, child in value.items() for key, item in flat(child, f"{path} > {name}").items()}


def compare(first: Path, second: Path, renames: dict[str, str], shown: int) -> int:
    """Print differences, part by part; their number."""
    words = re.compile(r"\b(" + "|".join(map(re.escape, sorted(renames, key=len, reverse=True))) + r")\b")
    differences = 0
    for part in PARTS:
        paths = [folder / f"{part}.json" for folder in (first, second)]
        if not all(path.exists() for path in paths):
            print(f"{part}: not recorded in {', '.join(str(p.parent) for p in paths if not p.exists())}")
            continue
        texts = [path.read_text(encoding="utf-8") for path in paths]
        if renames:
            texts[0] = words.sub(lambda match: renames[match[0]], texts[0])
        a, b = (flat(json.loads(text)) for text in texts)
        changes = [f"missing {key}" for key in a if key not in b] + [f"new {key}" for key in b if key not in a]
        changes += [f"different {key}: {a[key]!r} -> {b[key]!r}" for key in a if key in b and a[key] != b[key]]
        print(f"{part}: {len(changes)} differences, {len(a)} -> {len(b)} entries")
        for change in changes[:shown]:
            print(f"  {change[:400]}")
        differences += len(changes)
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*PARTS])
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("DIR_A", "DIR_B"))
    parser.add_argument("--renames", type=Path)
    parser.add_argument("--shown", type=int, default=20, help="differences printed for each part")
    parser.add_argument("--targets", type=lambda text: text.split(","), default=["sm_90", "sm_120", "gfx942"])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["flash"])
    parser.add_argument("--cases", default=CASES, help="cases of the kit on interpreted backends")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["reference", *BACKENDS])
    options = parser.parse_args()
    if options.compare:
        renames = json.loads(options.renames.read_text(encoding="utf-8")) if options.renames else {}
        return min(compare(options.compare[0], options.compare[1], renames, options.shown), 1)
    if options.output is None or not {*options.only} <= {*PARTS}:
        parser.error(f"give an output directory, and parts among {', '.join(PARTS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part in options.only:
            began = time.perf_counter()
            record = RECORDERS[part](options)
            text = json.dumps(record, indent=1, sort_keys=True)
            (options.output / f"{part}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
