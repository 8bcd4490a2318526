"""`PatchedModel`: runs the attention of a model of transformers on pages, one step for all layers in each call.

Importing this module imports transformers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention as TransformersAttention

from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, LayerKey
from dsv4attn.core.reprs import frozen
from dsv4attn.errors import ArgumentError, Dsv4AttnError, OutOfPagesError, UnsupportedError
from dsv4attn.integrations.transformers.new_tokens import NewTokens
from dsv4attn.integrations.transformers.paged_cache import DeepseekV4PagedCache
from dsv4attn.integrations.transformers.pages import Pages, out_of_pages
from dsv4attn.integrations.transformers.prompts import check_prompt
from dsv4attn.integrations.transformers.releases import ModelArguments
from dsv4attn.integrations.transformers.weights import WeightsWatch
from dsv4attn.serving.cache_manager import CachedSequence
from dsv4attn.serving.entry_records import EntryRecords

F = TypeVar("F", bound=Callable[..., Any])


@frozen(eq=False)
class _Step:
    """The new tokens of a call, in the order of a batch: decode requests first.

    metadata: of the batch; None without new tokens. positions: [T] int64. index: [T] int64 - the place of each among
    the [N * S] of the call; None if these are the same.
    """

    metadata: Mapping[LayerKey, AttentionMetadata] | None
    positions: Tensor
    index: Tensor | None
    requests: Sequence[tuple[CachedSequence, int]] = ()


@frozen(eq=False)
class _Call:
    """A call of the model that has begun.

    arguments: for the original forward.
    cache: the sequences of the call.
    requests, new, columns: see `DeepseekV4PagedCache.next_tokens`.
    began: whether these are the first tokens of the cache.
    stored: whether the cache is used later.
    """

    arguments: dict[str, Any]
    cache: DeepseekV4PagedCache
    requests: list[tuple[CachedSequence, int]]
    new: NewTokens
    columns: int
    began: bool
    stored: bool


def _not_compiled(function: F) -> F:
    """Leave a function out of graphs of torch.compile, with all that it calls."""
    uncompiled: F = torch.compiler.disable(function)
    return uncompiled


class PagedAttention(TransformersAttention):  # type: ignore[misc] # transformers is untyped here
    """The attention of a layer on pages, in the place of a `DeepseekV4Attention` of transformers.

    Parameters, submodules, hooks and attributes are those of `original`, the same objects.
    """

    def __init__(self, original: torch.nn.Module, attention: DeepseekV4Attention, owner: PatchedModel) -> None:
        # without super().__init__: it would make new parameters
        self.__dict__.update(original.__dict__)
        self.__dict__.update(_original=(original,), _attention=attention, _owner=owner)

    @property
    def original(self) -> torch.nn.Module:
        """The module that this one replaces."""
        (original,) = self._original
        assert isinstance(original, torch.nn.Module)
        return original

    @property
    def attention(self) -> DeepseekV4Attention:
        """The layer on pages."""
        attention: DeepseekV4Attention = self._attention
        return attention

    @_not_compiled
    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Attention of the step that the model runs: [N, S, hidden] to [N, S, hidden], zeros for padding."""
        step = self._owner.step
        if step is None:
            hint = "call the model; a layer alone has no sequences"
            raise Dsv4AttnError(f"layer {self.layer_idx} was called outside of a call of the patched model -> {hint}")
        if step.metadata is None:
            return torch.zeros_like(hidden_states), None
        rows = hidden_states.flatten(0, 1)
        records, prefix = self._owner.records, self._attention.prefix
        buffers = {} if records is None else {key: value for key, value in records.buffers.items() if key == prefix}
        with set_forward_context(step.metadata, record_entries=buffers):
            if step.index is None:
                return self._attention(rows, step.positions).view_as(hidden_states), None
            out = torch.zeros_like(rows)
            out[step.index] = self._attention(rows[step.index], step.positions)
        return out.view_as(hidden_states), None


class PatchedModel:
    """What `patch` made of a model; its attribute `dsv4attn`.

    model: the model. inner: the `DeepseekV4Model` in it, or itself. arguments: names of the arguments of `inner`.
    pages: of its layers. deterministic: whether bits of the attention of a token depend on the tokens before it alone.
    backend: its name.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - of transformers, as `inner`
        inner: Any,  # noqa: ANN401
        arguments: ModelArguments,
        pages: Pages,
        attentions: list[DeepseekV4Attention],
    ) -> None:
        self.model, self.inner, self.arguments, self.pages = model, inner, arguments, pages
        backend = attentions[0].backend
        self.backend, self.deterministic = backend.name, backend.deterministic
        self.step: _Step | None = None
        self.records: EntryRecords | None = None
        """Entries of the calls that are being recorded."""
        self._running = threading.Lock()
        self._layers = [
            PagedAttention(layer.self_attn, attention, self)
            for layer, attention in zip(inner.layers, attentions, strict=True)
        ]
        names = [f"layers.{i}.self_attn" for i in range(len(attentions))]
        self._watch = WeightsWatch([layer.self_attn for layer in inner.layers], attentions, names)
        self._replaced: list[tuple[Any, str, Callable[..., Any]]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(backend={self.backend!r}, sequences={self.num_sequences})"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError("model", expected="one that is not patched, to copy", actual="a patched one", hint=_COPY)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError("model", expected="one that is not patched, to save", actual="a patched one", hint=_COPY)

    def kv_bytes(self) -> dict[str, int]:
        """Bytes of the pages in use, of all layers, by group: window, compressed entries with index keys, states."""
        return self.pages.kv_bytes()

    def refresh(self) -> None:
        """Take the weights of the model again, after changes that a call does not see.

        A call sees in-place writes that torch counts, parameters that were replaced, and `parameter.data = other`. Call
        this after writes that torch does not count: `parameter.data.copy_`, fused optimizers, inference mode, NCCL.
        Raises UnsupportedError for weights of another shape, dtype or device than those that `patch` found.
        """
        self._watch.refresh()

    @contextmanager
    def record_entries(self) -> Iterator[EntryRecords]:
        """Record the entries that each token attends to, in calls of the model and of `generate`.

        Yields the records; `records.of(sequence)` has the entries of each of `cache.sequences`. A cache is recorded
        from its first token on, or not at all. A call with a fork is refused until `records.fork(source, fork)` gave it
        records, so beam search is refused.
        """
        before, self.records = self.records, EntryRecords([layer.attention for layer in self._layers])
        try:
            yield self.records
        finally:
            self.records = before

    @property
    def num_sequences(self) -> int:
        """Sequences of all caches that are alive."""
        return self.pages.num_sequences

    def install(self) -> None:
        """Put the layers and the calls of the model in place."""
        for layer, paged in zip(self.inner.layers, self._layers, strict=True):
            layer.self_attn = paged
        self._replace(self.inner, "forward", torch.compiler.disable(self._forward, recursive=False))
        if hasattr(self.model, "_prepare_cache_for_generation"):
            self._replace(self.model, "_prepare_cache_for_generation", self._prepare_cache)
        self.model.dsv4attn = self.inner.dsv4attn = self

    def remove(self) -> None:
        """Put the original modules and calls back.

        Raises UnsupportedError, and changes nothing, if something else has wrapped them since.
        """
        for owner, name, function in self._replaced:
            if owner.__dict__.get(name) is not function:
                hint = "undo what was done to the model after patch() first"
                raise UnsupportedError(f"model.{name}", expected="that of patch()", actual="another", hint=hint)
        for owner, name, _ in self._replaced:
            delattr(owner, name)
        for layer, paged in zip(self.inner.layers, self._layers, strict=True):
            paged.original.training = paged.training
            layer.self_attn = paged.original
        for owner in {id(module): module for module in (self.model, self.inner)}.values():
            del owner.dsv4attn
        self._watch.remove()
        # the layers refer to this object
        self._layers.clear()
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:  # noqa: ANN401
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return replacement(original, *args, **kwargs)

        # what the original calls may be compiled
        uncompiled = torch.compiler.disable(replaced, recursive=False)
        setattr(owner, name, uncompiled)
        self._replaced.append((owner, name, uncompiled))

    def _prepare_cache(
        self,
        original: Callable[..., None],
        generation_config: Any,  # noqa: ANN401
        model_kwargs: dict[str, Any],
        *arguments: object,
        **options: object,
    ) -> None:
        """Check the prompt of `generate`, and make its cache. transformers would make a DynamicCache."""
        if getattr(generation_config, "is_assistant", False):
            expected, hint = (
                "a model that is not patched",
                "unpatch(model) first: drafts are taken back further than their pages reach",
            )
            raise UnsupportedError("assistant_model", expected=expected, actual="a patched one", hint=hint)
        cache = self.arguments.renamed(model_kwargs).get(self.arguments.cache)
        past = 0 if cache is None else self._checked_cache(cache).get_seq_length()
        check_prompt(generation_config, model_kwargs.get("attention_mask"), past, self.pages.limits.max_model_len)
        if cache is not None or generation_config.use_cache is False:
            return original(generation_config, model_kwargs, *arguments, **options)
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            hint = "leave it out: the pages of patch() are the cache"
            raise UnsupportedError("cache_implementation", expected="None or 'dynamic'", actual=repr(kind), hint=hint)
        model_kwargs[self.arguments.cache] = DeepseekV4PagedCache(self.pages)
        return None

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """A call of the `DeepseekV4Model`: one step for all its layers."""
        call = self._begin(args, kwargs)
        done = False
        try:
            out = original(**call.arguments)
            done = True
            return out
        finally:
            self._end(call, done=done)

    @_not_compiled
    def _begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
        """Check a call, take its pages, and make its step the current one."""
        arguments = self.arguments.bound(args, kwargs)
        self._check_call(arguments)
        cache, use_cache = arguments.get(self.arguments.cache), arguments.get("use_cache")
        stored = cache is not None or (self.inner.config.use_cache if use_cache is None else use_cache)
        cache = DeepseekV4PagedCache(self.pages) if cache is None else self._checked_cache(cache)
        ids = arguments.get("inputs_embeds") if arguments.get("input_ids") is None else arguments["input_ids"]
        if not isinstance(ids, Tensor) or ids.ndim < 2:
            expected = "[N, S], or inputs_embeds [N, S, hidden]"
            raise ArgumentError("input_ids", expected=expected, actual=None if ids is None else "another shape")
        if not ids.shape[:2].numel():
            raise ArgumentError("input_ids", expected="at least one token", actual=f"shape {list(ids.shape)}")
        if not self._running.acquire(blocking=False):
            # all calls share the buffers of metadata
            cure = "call a patched model from one thread at a time"
            raise Dsv4AttnError(f"model: a call began while another was running -> {cure}")
        began = not cache.get_seq_length()
        try:
            self.pages.drain()
            self._watch.check()
            rows, columns = ids.shape[:2]
            requests, new = cache.next_tokens(
                rows, columns, arguments.get("attention_mask"), arguments.get("position_ids")
            )
            self.step = self._planned(requests, columns)
        except BaseException:
            if began:
                cache.reset()
            self._running.release()
            raise
        # the layers need no mask; a dict is taken as masks that are made already
        arguments |= {self.arguments.cache: cache if stored else None, "attention_mask": {"sliding_attention": None}}
        return _Call(arguments, cache, requests, new, columns, began, stored)

    @_not_compiled
    def _end(self, call: _Call, *, done: bool) -> None:
        """Count the tokens of a call that is done. Give back the pages of a cache that no later call continues."""
        step, self.step = self.step, None
        try:
            if done:
                if self.records is not None and step is not None:
                    self.records.take(step.requests)
                call.cache.completed(call.requests, call.new, call.columns)
            if not call.stored or (call.began and not done):
                call.cache.reset()
        finally:
            self._running.release()

    def _planned(self, requests: list[tuple[CachedSequence, int]], columns: int) -> _Step:
        """The step of a call; pages are taken for all of its sequences, or for none."""
        self.pages.check(requests)
        manager, device = self.pages.manager, self.pages.manager.device
        threshold = manager.limits.decode_threshold
        order = sorted((i for i, (_, n) in enumerate(requests) if n), key=lambda i: requests[i][1] > threshold)
        ordered = [requests[i] for i in order]
        if not ordered:
            return _Step(None, torch.empty(0, dtype=torch.int64, device=device), None)
        if self.records is not None:
            self.records.check(ordered)
        try:
            batch = manager.batch(ordered)
        except OutOfPagesError as error:
            raise out_of_pages(error) from error
        index = None
        if order != [*range(len(requests))] or any(n != columns for _, n in requests):
            places = [torch.arange((i + 1) * columns - requests[i][1], (i + 1) * columns, device="cpu") for i in order]
            index = torch.cat(places).to(device)
        return _Step(manager.metadata(batch), manager.positions(ordered), index, ordered)

    def _checked_cache(self, cache: object) -> DeepseekV4PagedCache:
        name = self.arguments.cache
        hint = f"pass DeepseekV4PagedCache(model), or none with use_cache=True: the outputs have it as {name}"
        if not isinstance(cache, DeepseekV4PagedCache):
            expected = "a DeepseekV4PagedCache of this model"
            raise UnsupportedError(name, expected=expected, actual=type(cache).__name__, hint=hint)
        if cache.pages is not self.pages:
            expected, actual = "a cache on the pages of this model", "one of another model, or of an earlier patch()"
            raise ArgumentError(name, expected=expected, actual=actual, hint=hint)
        return cache

    def _check_call(self, arguments: dict[str, Any]) -> None:
        """Raise UnsupportedError for what only transformers' own attention does."""
        inner, embeds = self.inner, arguments.get("inputs_embeds")
        if arguments.get("output_attentions") or getattr(inner.config, "output_attentions", False):
            expected = "False: attention weights are never in memory"
            hint = "unpatch(model) for them"
            raise UnsupportedError("output_attentions", expected=expected, actual=True, hint=hint)
        if inner.training and inner.config.attention_dropout:
            actual = f"attention_dropout={inner.config.attention_dropout} in training mode"
            raise UnsupportedError("model", expected="no dropout", actual=actual, hint="call model.eval()")
        learned = torch.is_grad_enabled() and any(p.requires_grad for p in inner.parameters())
        if learned or (torch.is_grad_enabled() and isinstance(embeds, Tensor) and embeds.requires_grad):
            hint = "call the model under torch.no_grad(), or model.generate; unpatch(model) to train"
            actual = "weights or inputs that require gradients"
            raise UnsupportedError("model", expected="no gradients", actual=actual, hint=hint)


_COPY = "unpatch(model) first; save_pretrained and state_dict() need no unpatch"
