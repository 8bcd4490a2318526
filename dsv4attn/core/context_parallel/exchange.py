"""`RankExchange`: the ranks that share the compressed entries of every sequence, and what they send each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from attrs import field, frozen, validators
from torch import Tensor, distributed

from dsv4attn.core.argument_checks import at_least
from dsv4attn.core.attention.exchange import Exchange
from dsv4attn.core.attention.rank_sum import check_group, start_all_gather
from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.rank_buffers import piece_rows
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.errors import ArgumentError, ContextParallelError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RankExchange", "agreed"]

_Object = TypeVar("_Object")
_P = ParamSpec("_P")


@frozen(eq=False, slots=False)
class RankExchange(Exchange):
    """Exchanges and checks of a process group; users make a `ContextParallel`, which describes the fields."""

    group: ProcessGroup
    interleave: int = field(default=1, validator=at_least(1))
    divides_heads: bool = field(default=False, validator=validators.instance_of(bool))
    prefill_keys: bool = field(default=True, validator=validators.instance_of(bool))

    def __attrs_post_init__(self) -> None:
        check_group("group", self.group)

    @cached_property
    def ownership(self) -> Ownership:
        """Which entries this rank holds."""
        return Ownership(self.group.rank(), self.group.size(), self.interleave)

    @cached_property
    def label(self) -> str:
        """This rank in errors: `rank 1 of 2`."""
        return f"rank {self.ownership.rank} of {self.ownership.size}"

    def gather(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Tensor:
        """[ranks, ...] a contiguous tensor of every rank, in the order of ranks; all have the same shape and dtype.

        what: names the tensor in errors. out: [ranks * n, ...] for tensors [n, ...], written and returned; None: a new
        one. Raises ContextParallelError if a rank is gone, or does not send in the time that the group was made with.
        """
        return self.start(mine, what, out=out)()

    def start(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin a `gather`. What is returned ends it: it waits, and returns the tensor of `gather`.

        Until then `mine` may not be written, and `out` neither read nor written. On a GPU begin and end are work of the
        current stream, and the host does not wait. All ranks begin the same gathers in the same order.
        """
        ranks = self.ownership.size
        gathered = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:]) if out is None else out
        with self._explained(what):
            work = start_all_gather(gathered, mine, group=self.group)

        def finish() -> Tensor:
            with self._explained(what):
                work.wait()
            return gathered.view(ranks, *mine.shape)

        return finish

    def start_all_to_all(self, mine: Tensor, what: str, *, out: Tensor) -> Callable[[], Tensor]:
        """Begin to send mine[i] to rank i. What is returned ends it: [ranks, ...] what each rank has sent to this one.

        mine: [ranks, ...], contiguous, of the same shape and dtype on all ranks. out: as many elements, written and
        returned. Otherwise as `start`.
        """
        received = out.view(mine.shape)
        with self._explained(what):
            work = distributed.all_to_all_single(received, mine, group=self.group, async_op=True)

        def finish() -> Tensor:
            with self._explained(what):
                work.wait()
            return received

        return finish

    def gather_objects(self, mine: _Object, what: str) -> list[_Object]:
        """The object of every rank, in the order of ranks: for checks and reports. They are pickled.

        what: as in `gather`, with the same errors.
        """
        objects = [mine] * self.ownership.size
        with self._explained(what):
            distributed.all_gather_object(objects, mine, group=self.group)
        return objects

    def pieces(self, rows: int, row_bytes: int, *, first: int = 0) -> Iterator[slice]:
        """Cut rows of a tensor, from the first to `rows`, into pieces of `piece_rows`."""
        step = piece_rows(self.ownership.size, row_bytes)
        return (slice(start, min(start + step, rows)) for start in range(first, rows, step))

    def plan(
        self,
        layer: LayerGeometry,
        limits: Limits,
        backend: Backend,
        layout: KVCacheLayout,
        q_dtype: torch.dtype | None = None,
    ) -> WorkspacePlan:
        """`plan_workspace` of a layer on these ranks."""
        return plan_workspace(
            *(layer, limits, backend, layout),
            ranks=self.ownership.size,
            divides_heads=self.divides_heads,
            prefill_keys=self.prefill_keys,
            q_dtype=q_dtype,
        )

    def check_same(self, what: str, facts: Mapping[str, object]) -> None:
        """Raise ArgumentError on every rank, with the first rank that differs, unless all ranks have the same facts.

        what: the thing that the facts are about; a layer, say. Every rank must call it, in the same order.
        """
        ours = {name: getattr(self, name) for name in ("interleave", "divides_heads", "prefill_keys")}
        mine = {"group size": self.ownership.size, **ours, **facts}
        (first, first_facts), *others = self.gather_objects((what, mine), f"the fingerprint of {what}")
        for rank, (name, rank_facts) in enumerate(others, 1):
            named = [("layer", first, name)] if name != first else []
            for key, first_value, rank_value in [
                *named,
                *((key, first_facts.get(key), rank_facts.get(key)) for key in {**first_facts, **rank_facts}),
            ]:
                if first_value != rank_value:
                    expected, hint = f"{first_value}, as rank 0 has", "give all ranks of the group the same"
                    raise ArgumentError(
                        f"{first}: {key}", expected=expected, actual=f"{rank_value} on rank {rank}", hint=hint
                    )

    def check_caches(self, what: str, caches: DeepseekV4Caches, **facts: object) -> None:
        """`check_same` of all caches of a layer, which there are and their layouts, and of further facts."""
        layouts = {f"layout of {name}": cache.layout.fingerprint for name, cache in caches.present.items()}
        self.check_same(what, {**layouts, **facts})

    def check_bound(
        self, prefix: str, layer: LayerGeometry, limits: Limits, caches: LayerCaches, **further_facts: object
    ) -> None:
        """`check_same` of a layer that is bound to its caches, and of further facts."""
        facts: dict[str, object] = {"geometry": repr(layer), "limits": repr(limits), **further_facts}
        for name, cache in (("window", caches.swa), ("compressed", caches.compressed)):
            if cache is not None:
                facts[f"layout of the {name} cache"] = cache.layout.fingerprint
                facts[f"records in a page of the {name} cache"] = cache.block_size
        if caches.compressed is not None:
            facts["pages of the compressed cache"] = caches.compressed.num_blocks
        self.check_same(prefix, facts)

    def check_workspace(self, prefix: str, workspace: WorkspaceManager, plan: WorkspacePlan) -> None:
        """`check_same` of whether the workspace holds, or may grow to, the plan of a layer.

        So no rank refuses a step for which the others wait.
        """
        missing = [(arena, size) for arena, size in plan.arenas.items() if workspace.size(arena) < size]
        lacks = [f"{size} bytes in arena {arena!r}" for arena, size in missing]
        short = f"locked without {lacks[0]}" if lacks and workspace.locked else "room for the plan"
        self.check_same(prefix, {"workspace": short})

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that fails on every rank if it fails on one, so that no rank waits for another that has refused.

        The rank that refuses keeps its error; the others raise ArgumentError with its number and text. what: names the
        block in errors. Every rank must enter it, in the same order.
        """
        refused: Exception | None = None
        try:
            yield
        except ContextParallelError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            refused = error
        said = self.gather_objects(None if refused is None else str(refused), f"whether all ranks accept {what}")
        if refused is not None:
            raise refused
        for rank, text in enumerate(said):
            if text is not None:
                actual = f"rank {rank} refuses: {text}"
                raise ArgumentError(what, expected="what every rank of the group accepts", actual=actual)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn an error of torch.distributed into one that says which exchange failed, and where."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise ContextParallelError(self.ownership.rank, self.ownership.size, what, str(error)) from error


def agreed(what: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Decorate a constructor with a keyword `context_parallel`, so that it fails on every rank if it fails on one."""

    def decorate(constructor: Callable[_P, None]) -> Callable[_P, None]:
        @wraps(constructor)
        def run(*args: _P.args, **options: _P.kwargs) -> None:
            context = options.get("context_parallel")
            with context.together(what) if isinstance(context, RankExchange) else nullcontext():
                constructor(*args, **options)

        return run

    return decorate
