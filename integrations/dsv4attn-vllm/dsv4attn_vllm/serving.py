"""What dsv4attn reads from vLLM's configuration: the model, its limits, the layouts of its caches, its backend.

Everything that cannot be served is refused here: when vLLM has resolved its arguments, and again when it builds layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from threading import Thread
from typing import Any

import torch
from attrs import define, evolve, frozen
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from dsv4attn import (
    Backend,
    CacheFacts,
    Fp8Format,
    KVCacheLayout,
    LayerGeometry,
    LayerKind,
    Limits,
    ModelGeometry,
    Problem,
    WorkspaceManager,
    explain,
    plan_workspace,
    resolve,
    select_backend,
)
from dsv4attn.config import PHASES
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.errors import Dsv4AttnError
from dsv4attn_vllm.entries import check_entries, folder_of_entries
from dsv4attn_vllm.guard import GUARD, LOG, RefusedError, is_before_0_33
from dsv4attn_vllm.invariance import check_invariance, is_invariant
from dsv4attn_vllm.parts import COMPRESSOR, INDEXER, MHC, VARIABLE, Device, chosen, v41_parts
from dsv4attn_vllm.projection import parts_with, settings_for
from dsv4attn_vllm.records import FP4_CACHE, are_of_v41

CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")
"""Values of --kv-cache-dtype that mean records of 584 bytes."""

V41_CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla")
"""The same for DeepSeek-V4.1, where they mean records of 528 bytes on sm_100."""

_NOPE, _ROPE = 448, 64
_V41_PAGE = 32
"""Tokens of a page of V4.1's window caches."""
_V41_RECORD, _FP4_RECORD = 528, 288
"""Bytes of V4.1's own records: of 8 bits a value, and of 4."""
_KIND_OF_RATIO = {1: LayerKind.SWA, 4: LayerKind.CSA, 128: LayerKind.HCA}
_V41_KIND_OF_RATIO = {0: LayerKind.SWA, 1: LayerKind.CSA, 2: LayerKind.CSA}
_PARTS = {COMPRESSOR: ("compressor",), INDEXER: ("indexer", "selection"), MHC: ("hyper_connections",)}


@frozen
class _Facts:
    """Everything that decides the choice of a backend. It is equal for all layers of a model and for its drafts.

    model: geometry of this rank. device: type of the device. capture: whether graphs are captured. fnuz: whether vLLM's
    fp8 type is e4m3fnuz, as on gfx942. parts: see `parts.chosen`. mxfp4: whether index keys have 4 bits. records: of
    V4.1, by their bytes, those of windows and those of compressed caches; None: a model of V4. invariant: whether
    vLLM's batch-invariant mode is on, which wants a deterministic backend.
    """

    model: ModelGeometry
    limits: Limits
    device: str
    capture: bool
    fnuz: bool
    parts: frozenset[str]
    mxfp4: bool
    records: tuple[int, int] | None = None
    invariant: bool = False


@define(eq=False)
class Serving:
    """How the layers of one model are served: one object for all layers, so that they share prepared calls.

    swa_layout, compressed_layout, index_layout: of the caches. parts: those around attention that run on dsv4attn.
    inserts_entries: whether V4.1's compressed entries are stored by dsv4attn though the compressor is vLLM's.
    problems: what the backend was chosen for. warm: whether its kernels were compiled. compiling: their number, which
    another thread will know. scratch: memory of a process for which vLLM has no workspace.
    """

    model: ModelGeometry
    limits: Limits
    device: str
    backend: Backend
    swa_layout: KVCacheLayout
    compressed_layout: KVCacheLayout
    index_layout: KVCacheLayout
    parts: frozenset[str] = frozenset()
    inserts_entries: bool = False
    problems: Sequence[Problem] = ()
    warm: bool = False
    compiling: Future[int] | None = None
    scratch: WorkspaceManager | None = None

    @property
    def layer_ops(self) -> LayerOps:
        """The backend's table of ops around attention."""
        return self.backend.layer_ops

    @property
    def is_fp4(self) -> bool:
        """Whether compressed records have 4 bits a value."""
        return self.compressed_layout.record_bytes == _FP4_RECORD

    def layer(self, compress_ratio: int) -> LayerGeometry:
        """Geometry of the layers of a ratio, as vLLM's layer has it."""
        kinds = _V41_KIND_OF_RATIO if self.model.shared_latent else _KIND_OF_RATIO
        return self.model.layer_of_kind(kinds[compress_ratio], compress_ratio or None)

    def workspace(self) -> WorkspaceManager:
        """dsv4attn's scratch memory of this device and microbatch. It may grow while vLLM's own workspace may.

        vLLM's worker for CPUs has no workspace and no microbatches. There is one scratch memory then, which may always
        grow.
        """
        if not is_workspace_manager_initialized():
            if self.scratch is None:
                self.scratch = WorkspaceManager(self.device)
            return self.scratch
        manager = current_workspace_manager()
        space = manager.get_persistent_resource(self._resource, partial(WorkspaceManager, self.device))
        if space.locked is not manager.is_locked():
            (space.unlock if space.locked else space.lock)()
        return space

    @property
    def _resource(self) -> tuple[str, str]:
        """Key of the scratch memory among vLLM's resources."""
        return "dsv4attn", self.device

    def _workspaces(self) -> list[WorkspaceManager]:
        """The scratch memory of every microbatch, in the lane of this thread.

        vLLM measures memory without microbatches, and has no public way to the resources of another microbatch.
        """
        space = self.workspace()
        if not is_workspace_manager_initialized():
            return [space]
        manager = current_workspace_manager()
        lane, lanes = manager._get_workspace_id() % manager._num_lanes, manager._num_lanes  # noqa: SLF001
        slots = manager._persistent_resources[lane::lanes]  # noqa: SLF001
        return [slot.setdefault(self._resource, WorkspaceManager(space.device)) for slot in slots]

    def bounds(self) -> WarmupSpec:
        """What is compiled ahead: kernels of attention, and of the parts around it that run on dsv4attn."""
        layouts = {"swa": self.swa_layout, "compressed": self.compressed_layout, "index": self.index_layout}
        parts = self.parts | {COMPRESSOR} if self.inserts_entries else self.parts
        compiled = tuple(name for part, names in _PARTS.items() if part in parts for name in names)
        # a deterministic backend makes the inputs of compressors, whoever runs them
        around = bool(parts) or self.backend.deterministic
        return WarmupSpec.of(self.model, self.limits, aligned_rows=True, layer_parts=around, parts=compiled, **layouts)

    def start_compiling(self) -> None:
        """Compile all kernels in another thread, the first time this is called. vLLM loads weights meanwhile."""
        if self.compiling is None and not self.warm and self.device != "cpu" and torch.accelerator.is_available():
            device = torch.device(self.device, torch.accelerator.current_device_index())
            self.compiling = in_background(self._compile, device)

    def warm_up(self, layer: LayerGeometry, device: torch.device) -> None:
        """Reserve the memory of a layer's largest batch; wait until all kernels are compiled. No cache is touched.

        Raises what the compiler raised.
        """
        plan = plan_workspace(layer, self.limits, self.backend, self.swa_layout)
        for space in self._workspaces():
            space.reserve(plan, caller="profiling")
        if not self.warm and device.type != "cpu":
            begin = time.perf_counter()
            count = self._compile(device) if self.compiling is None else self.compiling.result()
            waited = time.perf_counter() - begin
            LOG.info("%d kernels of %s are compiled; start-up waited %.1f s for them", count, self.backend.name, waited)
        self.warm, self.compiling = True, None

    def _compile(self, device: torch.device) -> int:
        # it says how many kernels Triton's cache had, and where that is
        LOG.adopt("dsv4attn")
        return self.backend.warmup(self.bounds(), device)


def in_background(function: Callable[..., int], *arguments: Any) -> Future[int]:  # noqa: ANN401 - of the function
    """Call a function in another thread, which does not keep the process from ending."""
    future: Future[int] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - who waits for the result raises it
            future.set_exception(error)

    Thread(target=run, name="dsv4attn-compiles", daemon=True).start()
    return future


def serving_of(vllm_config: Any, *, v41: bool = False) -> Serving:  # noqa: ANN401 - vLLM's VllmConfig
    """How to serve the model of a configuration; the same object for equal models.

    v41: whether its layers are those of DeepSeek-V4.1.
    Raises RefusedError for what dsv4attn-vllm does not serve, and NoBackendError, with the reasons of every backend, if
    there is none for this device.
    """
    serving = _serving(_checked_facts(vllm_config, v41=v41))
    if MHC in serving.parts:
        from dsv4attn_vllm.hyper_connections import serve

        serve(serving.backend)
    return serving


def check_arguments(vllm_config: Any, *, v41: bool) -> None:  # noqa: ANN401 - as above
    """Raise what `serving_of` would raise, as far as it can be known before a device is used. Nothing is made.

    v41: whether the model is DeepSeek-V4.1. The backend is checked on CUDA and on a CPU, whose facts vLLM knows without
    a start of the device's runtime, which would not survive a fork.
    """
    facts = _checked_facts(vllm_config, v41=v41)
    device = _described(facts.device)
    if device is None:
        return
    _, _, problems = _planned(facts)
    settings = settings_for(facts.parts, problems, device)
    for phase in PHASES:
        resolve([problem for problem in problems if problem.phase == phase], device=device, settings=settings)


def _described(device: str) -> DeviceFacts | None:
    """Facts of the device of this process by what vLLM knows; None if vLLM knows too little."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if device == "cuda" else None
    if device == "cpu":
        return DeviceFacts.here("cpu")
    if capability is None or current_platform.is_rocm():
        return None
    try:
        return evolve(DeviceFacts.named(f"sm_{capability.major}{capability.minor}"), present=True)
    except Dsv4AttnError:  # a device that has no name yet
        return None


def _checked_facts(vllm_config: Any, *, v41: bool) -> _Facts:  # noqa: ANN401 - as above
    records = _v41_records(vllm_config) if v41 else None
    _check(vllm_config, v41=v41)
    return _facts(vllm_config, records)


def _v41_records(vllm_config: Any) -> tuple[int, int]:  # noqa: ANN401 - as above
    """Bytes of the records of V4.1's window caches and compressed caches: those named, else as vLLM chooses them."""
    blackwell, named = _is_blackwell(), are_of_v41(vllm_config)
    if (blackwell or named) and is_before_0_33(GUARD.installed()):
        what = f"--kv-cache-dtype {FP4_CACHE}" if named else "DeepSeek-V4.1 on sm_100"
        expected = "vLLM 0.33 or newer, whose pages are whole records of 528 bytes apart"
        cure = "install such a vLLM"
        raise RefusedError(what, expected=expected, actual=GUARD.installed(), cure=cure)
    if named:
        return _V41_RECORD, _FP4_RECORD
    return (_V41_RECORD, _V41_RECORD) if blackwell else (584, 584)


def _is_blackwell() -> bool:
    """Whether this GPU is one of sm_100, for which vLLM chooses V4.1's own records, and has kernels for them."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_device_capability_family(100))


def _check(vllm_config: Any, *, v41: bool) -> None:  # noqa: ANN401 - as above
    """Refuse what has no counterpart in dsv4attn, and a vLLM whose metadata lack what the builders read."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import backend as attention_backend

    if "positions" not in attention_backend.CommonAttentionMetadata.__dataclass_fields__:
        expected, cure = "a field of vLLM's metadata", "install a version of vLLM that was tested"
        raise RefusedError("CommonAttentionMetadata.positions", expected=expected, actual="none", cure=cure)
    dtype, served = vllm_config.cache_config.cache_dtype, V41_CACHE_DTYPES if v41 else CACHE_DTYPES
    if v41 and not current_platform.is_rocm():
        served = (*served, FP4_CACHE)
    if dtype not in served:
        cure = "leave --kv-cache-dtype out, or pass fp8"
        raise RefusedError("--kv-cache-dtype", expected=" or ".join(served), actual=dtype, cure=cure)
    if vllm_config.model_config.dtype != torch.bfloat16:
        actual = vllm_config.model_config.dtype
        raise RefusedError("--dtype", expected="bfloat16", actual=actual, cure="pass --dtype bfloat16")
    parallel, attention = vllm_config.parallel_config, vllm_config.attention_config
    for phase in ("decode", "prefill"):
        size = getattr(parallel, f"{phase}_context_parallel_size")
        if size != 1:
            # its caches may be divided over ranks; its models/deepseek_v4 exchange neither queries nor parts
            expected = "1, as vLLM's layers of DeepSeek-V4 exchange nothing among ranks that share a context"
            cure = "use tensor or data parallelism"
            raise RefusedError(f"--{phase}-context-parallel-size", expected=expected, actual=size, cure=cure)
    if getattr(attention, "hisparse_config", None) is not None:
        raise RefusedError("HiSparse", expected="off", actual="on", cure="switch it off")


def _facts(vllm_config: Any, records: tuple[int, int] | None) -> _Facts:  # noqa: ANN401 - as above
    from vllm.platforms import current_platform

    device = Device.here(vllm_config)
    model = _v4_model(vllm_config) if records is None else _v41_model(vllm_config)
    parts = chosen(device) if records is None else v41_parts(device)
    if records is not None and INDEXER in parts and vllm_config.attention_config.indexer_sparse_logits:
        cure = "leave indexer_sparse_logits out"
        raise RefusedError("indexer_sparse_logits", expected="off, for an indexer on dsv4attn", actual="on", cure=cure)
    invariant = is_invariant()
    if invariant:
        check_invariance(vllm_config, parts, device.platform, v41=records is not None)
    if folder_of_entries():
        check_entries(vllm_config, parts, v41=records is not None)
    return _Facts(
        model,
        _limits(vllm_config, model),
        vllm_config.device_config.device_type,
        capture=bool(vllm_config.compilation_config.cudagraph_mode),
        fnuz=current_platform.is_fp8_fnuz(),
        parts=parts,
        mxfp4=device.mxfp4,
        records=records,
        invariant=invariant,
    )


def _v4_model(vllm_config: Any) -> ModelGeometry:  # noqa: ANN401 - as above
    fields = vllm_config.model_config.hf_config.to_dict()
    # the model type of a draft names its purpose; sources of keys show a V4.1 model too
    if str(fields.get("model_type", "")).startswith("deepseek_v41") or fields.get("kv_source_layer_ids") is not None:
        cure = "serve it by its own architecture"
        raise RefusedError("model", expected="a DeepSeek-V4 configuration", actual="one of DeepSeek-V4.1", cure=cure)
    model = _model_of(vllm_config, fields, "deepseek_v4", "DeepSeek-V4")
    dims = model.head_dim - model.rope_dim, model.rope_dim
    ratios = {ratio for _, ratio in model.layers}
    if dims != (_NOPE, _ROPE) or not ratios <= _KIND_OF_RATIO.keys():
        expected = f"heads of {_NOPE} + {_ROPE} dims and layers of ratios 1, 4 and 128, as vLLM's caches have"
        actual = f"{dims[0]} + {dims[1]} dims, ratios {sorted(ratios)}"
        raise RefusedError("model", expected=expected, actual=actual, cure="serve a DeepSeek-V4 model")
    return model


def _v41_model(vllm_config: Any) -> ModelGeometry:  # noqa: ANN401 - as above
    model = _model_of(vllm_config, vllm_config.model_config.hf_config.to_dict(), "deepseek_v41", "DeepSeek-V4.1")
    dims = model.head_dim - model.rope_dim, model.rope_dim
    if dims != (_NOPE, _ROPE) or model.q_norm:
        expected = f"heads of {_NOPE} + {_ROPE} dims without a norm of queries, as vLLM's layers have"
        actual = f"{dims[0]} + {dims[1]} dims, {'with' if model.q_norm else 'without'} a norm"
        raise RefusedError("model", expected=expected, actual=actual, cure="serve a DeepSeek-V4.1 model")
    return model


def _model_of(vllm_config: Any, fields: dict[str, Any], model_type: str, name: str) -> ModelGeometry:  # noqa: ANN401 - as above
    """The model on this rank. A draft has the layers of its model, but another type."""
    try:
        model = ModelGeometry.from_config({**fields, "model_type": model_type}, name="the model")
        return model.tensor_parallel(vllm_config.parallel_config.tensor_parallel_size)
    except Dsv4AttnError as error:
        cure = f"serve a {name} model"
        raise RefusedError("model", expected=f"a {name} configuration", actual=error, cure=cure) from error


def _limits(vllm_config: Any, model: ModelGeometry) -> Limits:  # noqa: ANN401 - as above
    """The largest batch that vLLM's builders describe, with the padding of captured graphs."""
    from vllm.v1.attention.backend import max_decode_query_len
    from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width

    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    config, tokens = vllm_config.model_config.hf_config, scheduler.max_num_batched_tokens
    threshold = max_decode_query_len(vllm_config)
    padded = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    decode = prefill = 0
    if speculative is not None and speculative.use_dspark():
        decode = get_dspark_swa_index_width(model.window, speculative.num_speculative_tokens)
    # tokens of an image see each other in V4 alone
    if getattr(config, "vision_n_layers", 0) > 0 and not model.shared_latent:
        prefill = model.window + config.vision_max_n_token
    return Limits(
        max_num_reqs=max(scheduler.max_num_seqs, -(-min(padded, tokens) // threshold)),
        max_num_batched_tokens=tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        num_speculative_tokens=threshold - 1,
        decode_window_columns=decode,
        prefill_window_columns=prefill,
    )


def _planned(facts: _Facts) -> tuple[KVCacheLayout, KVCacheLayout, list[Problem]]:
    """The layouts of windows and compressed caches, and the problems that a backend must run."""
    swa = KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ if facts.fnuz else Fp8Format.OCP)
    # vLLM's compressor writes OCP codes on every device
    compressed = KVCacheLayout.fp8_ds_mla()
    if facts.records is not None and facts.records[0] == _V41_RECORD:
        swa = KVCacheLayout.v41_fp8()
        compressed = KVCacheLayout.v41_fp4() if facts.records[1] == _FP4_RECORD else swa
    return swa, compressed, [problem for phase in PHASES for problem in _problems(facts, phase, swa, compressed)]


@cache
def _serving(facts: _Facts) -> Serving:
    swa, compressed, problems = _planned(facts)
    # vLLM's compressor writes OCP codes of index keys too, but for their scales on sm_100
    dim = facts.model.index_head_dim
    index = KVCacheLayout.index_mxfp4(dim) if facts.mxfp4 else KVCacheLayout.index_fp8(dim)
    settings = settings_for(facts.parts, problems, facts.device)
    backend = select_backend(*problems, device=facts.device, settings=settings)
    parts = parts_with(facts.parts, backend)
    for phase in PHASES:
        verdict = explain([problem for problem in problems if problem.phase == phase], device=facts.device).verdict
        LOG.info("%s runs on %s", phase, verdict)
    if parts:
        LOG.info("%s on dsv4attn (%s)", ", ".join(sorted(parts)), VARIABLE)
    if facts.records is not None:
        LOG.info("a token has %d bytes in window caches, an entry %d in compressed ones", *facts.records)
    # vLLM's kernel for 4 bits has an instruction that other GPUs lack
    inserts = compressed.record_bytes == _FP4_RECORD and COMPRESSOR not in parts and not _is_blackwell()
    sizes, layouts = (facts.model, facts.limits, facts.device), (swa, compressed, index)
    return Serving(*sizes, backend, *layouts, parts, inserts, problems)


def _problems(facts: _Facts, phase: str, swa: KVCacheLayout, compressed: KVCacheLayout) -> list[Problem]:
    """One problem for each kind of layer, and in V4.1 for each ratio.

    Drafts are window-only, and only draft blocks are decodes with wide rows. Images widen the prefill rows of all
    layers.
    """
    limits, decode, problems = facts.limits, phase == "decode", []
    wide = limits.decode_window_columns if decode else limits.prefill_window_columns
    page, tokens = (64, 256) if facts.records is None else (_V41_PAGE, _v41_page_tokens())
    for layer in dict.fromkeys((facts.model.layer_of_kind(LayerKind.SWA), *facts.model.distinct_layers)):
        problem = Problem.of(
            layer,
            phase=phase,
            swa_page_size=page,
            max_model_len=limits.max_model_len,
            query_len=limits.decode_threshold if decode else 1,
            capture=facts.capture and decode,
            window_columns=0 if decode and layer.has_entries else wide,
            deterministic=facts.invariant,
        )
        entries = CacheFacts.of(compressed, tokens // layer.compress_ratio) if layer.has_entries else None
        problems.append(evolve(problem, swa=CacheFacts.of(swa, page), compressed=entries))
    return problems


def _v41_page_tokens() -> int:
    """Tokens of a page of V4.1's compressed caches."""
    from dsv4attn_vllm.metadata import V41Backend

    return int(min(V41Backend.get_supported_kernel_block_sizes()))
