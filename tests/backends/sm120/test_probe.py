"""Looking for FlashInfer: whatever is wrong with it is an answer, and what it says of itself decides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest

from dsv4attn.backends.sm120.probe import InstalledFlashInfer, find, forget
from dsv4attn.backends.sm120.served import reasons
from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from tests.backends.sm120.decode_calls import installed_flashinfer
from tests.backends.sm120.fake_flashinfer import Config, RecordingWrapper
from tests.forked_programs import run_forked

FLASH = ModelGeometry.preset("flash")


@pytest.fixture(autouse=True)
def _looks_again() -> Iterator[None]:
    forget()
    yield
    forget()


class Package(ModuleType):
    """`flashinfer.mla` as it may be. fails: raised when anything is looked up in it."""

    def __init__(self, fails: Exception | None = None, **contents: Any) -> None:
        super().__init__("flashinfer.mla")
        self.__dict__.update(contents, _fails=fails)

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["_fails"] or AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, version: str = "0.7.2.post1") -> None:
    parent = ModuleType("flashinfer")
    parent.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "flashinfer", parent)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)


def working(**changes: Any) -> Package:
    contents = {
        "SparseMLASm120Wrapper": RecordingWrapper,
        "supported_sparse_mla_sm120_configs": lambda: {"dsv4": Config()},
    }
    return Package(**{name: value for name, value in {**contents, **changes}.items() if value is not None})


def refusal(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, version: str = "0.7.2.post1") -> str:
    install(monkeypatch, module, version)
    answer = find()
    assert isinstance(answer, Reason)
    assert answer.code == "FLASHINFER"
    assert answer.cure
    return answer.text


def test_a_whole_package_is_found_once_and_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_versions: list[int] = []

    def configs() -> dict[str, Config]:
        asked_versions.append(1)
        return {"dsv4": Config()}

    install(monkeypatch, working(supported_sparse_mla_sm120_configs=configs))
    answer = find()

    assert find() is answer
    assert asked_versions == [1]
    assert isinstance(answer, InstalledFlashInfer)
    assert answer.version == "0.7.2.post1"
    assert answer.wrapper is RecordingWrapper
    assert answer.heads == {*range(1, 129)}
    assert answer.head_counts(65) == {8, 16, 32, 64, 128}
    assert answer.topks is answer.page_sizes is None
    forget()
    find()
    assert asked_versions == [1, 1]


def test_no_package_is_a_reason_and_not_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ModuleNotFoundError: import of flashinfer.mla halted" in refusal(monkeypatch, None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ImportError("libtvm_ffi.so: undefined symbol"), "ImportError: libtvm_ffi.so: undefined symbol"),
        (OSError("libcudart.so.13: cannot open"), "OSError: libcudart.so.13: cannot open"),
        (AttributeError("module 'torch' has no float4"), "AttributeError: module 'torch' has no float4"),
        (RuntimeError("no driver"), "RuntimeError: no driver"),
    ],
)
def test_a_package_that_breaks_when_it_is_loaded_is_a_reason_in_its_own_words(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking:
        def find_spec(self, name: str, *rest: Any) -> None:
            if name.startswith("flashinfer"):
                raise error

    for name in [module for module in sys.modules if module.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Breaking(), *sys.meta_path])
    answer = find()

    assert isinstance(answer, Reason)
    assert text in answer.text
    forget()
    monkeypatch.undo()
    assert text in refusal(monkeypatch, Package(fails=error))


def raising(error: Exception) -> Callable[[], None]:
    def ask() -> None:
        raise error

    return ask


class OldWrapper:
    def run(self, q: object, kv_cache: object, indices: object, output: object, sm_scale: float) -> None:
        """Knows no second cache."""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"SparseMLASm120Wrapper": None}, "has no attribute 'SparseMLASm120Wrapper'"),
        ({"supported_sparse_mla_sm120_configs": None}, "has no attribute 'supported_sparse_mla_sm120_configs'"),
        ({"SparseMLASm120Wrapper": OldWrapper}, "has no topk_length, attn_sink, extra_kv_cache"),
        ({"SparseMLASm120Wrapper": object()}, "AttributeError: 'object' object has no attribute 'run'"),
        ({"supported_sparse_mla_sm120_configs": raising(ValueError("no table"))}, "ValueError: no table"),
        ({"supported_sparse_mla_sm120_configs": lambda: {"dsv3_2": Config()}}, "for dsv3_2"),
        ({"supported_sparse_mla_sm120_configs": lambda: {"dsv4": object()}}, "AttributeError: 'object'"),
    ],
)
def test_a_package_that_lacks_what_we_call_is_a_reason(
    change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text in refusal(monkeypatch, working(**change))


def test_records_of_another_length_and_an_old_version_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Config):
        bytes_per_token = 528

    configs = working(supported_sparse_mla_sm120_configs=lambda: {"dsv4": Wide()})
    assert "records of 528 bytes, needs 584-byte" in refusal(monkeypatch, configs)
    forget()
    assert "flashinfer 0.6.9, needs 0.6.18 or newer" in refusal(monkeypatch, working(), "0.6.9")
    forget()
    install(monkeypatch, working(), "a build from source")
    assert isinstance(find(), InstalledFlashInfer)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    source = (
        "import sys, dsv4attn.backends.sm120.served, dsv4attn.backends.sm90.served;"
        "heavy = {'torch', 'flashinfer', 'triton'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

    source = "import sys; import dsv4attn.backends.sm120.flashinfer; print('flashinfer' in sys.modules)"
    assert run_forked(["-c", source]).stdout == "False\n"


# reasons


def codes(problem: Problem, *, old: bool = False, **options: Any) -> list[str]:
    return [reason.code for reason in reasons(installed_flashinfer(old=old), problem, **options)]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize("heads", [1, 8, 12, 64, 128])
def test_the_model_itself_is_served(heads: int, kind: LayerKind, phase: str) -> None:
    problem = Problem.of(FLASH, kind, phase, heads=heads, lse=True, capture=True)

    assert codes(problem) == codes(problem, in_range=True) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"heads": 129}, "HEADS"),
        ({"q_dtype": "float32"}, "Q_DTYPE"),
        ({"dtype": "bfloat16"}, "LAYOUT"),
        ({"dtype": "e4m3fnuz"}, "LAYOUT"),
        ({"deterministic": True}, "DETERMINISTIC"),
    ],
)
def test_what_it_cannot_serve_is_named(changes: dict[str, Any], code: str) -> None:
    assert set(codes(Problem.of(FLASH, LayerKind.CSA, **changes))) == {code}


def test_other_dims_arrangements_and_groups_are_named() -> None:
    layer = attrs.evolve(FLASH.layer_of_kind(LayerKind.SWA), head_dim=256)

    assert codes(Problem.of(layer)) == ["HEAD_DIM"]
    for cache in (CacheFacts(arrangement="interleaved"), CacheFacts(group_size=32)):
        problem = Problem.of(FLASH, LayerKind.SWA)
        assert codes(attrs.evolve(problem, swa=cache)) == ["LAYOUT"]


def test_pages_at_odd_distances_are_named_and_even_ones_are_not() -> None:
    problem = Problem.of(FLASH, LayerKind.CSA)

    assert codes(problem, page_strides=(37440, 18720)) == []
    assert codes(problem, page_strides=(37384, 37440)) == ["PAGE_STRIDE"]


def test_a_window_of_no_whole_tiles_is_served_where_indices_are_copied_or_tokens_few() -> None:
    layer = attrs.evolve(FLASH.layer_of_kind(LayerKind.SWA), window=100)
    problem = Problem.of(layer)

    assert codes(problem) == []
    assert codes(problem, in_range=True) == codes(problem, in_range=True, tokens=65) == ["WINDOW"]
    assert codes(problem, in_range=True, tokens=64) == []


def test_a_package_of_fixed_sets_is_taken_at_its_word() -> None:
    plain = Problem.of(FLASH, LayerKind.CSA, swa_page_size=64, compressed_page_size=64)

    assert codes(plain, old=True) == []
    assert codes(Problem.of(FLASH, LayerKind.CSA, swa_page_size=256), old=True) == ["PAGE_SIZE"]
    assert codes(Problem.of(FLASH, LayerKind.CSA, compressed_page_size=2), old=True) == ["PAGE_SIZE"]
    layer = attrs.evolve(FLASH.layer_of_kind(LayerKind.SWA), window=100)
    assert codes(Problem.of(layer), old=True) == ["WINDOW"]


def test_what_its_own_question_denies_is_not_served() -> None:
    class Denying(Config):
        def supports_decode(self, num_heads: int, topk: int, **_: Any) -> bool:
            return num_heads != 64

    denying = InstalledFlashInfer.of("0.7.9", RecordingWrapper, Denying())
    answers = [reasons(denying, Problem.of(FLASH, LayerKind.CSA, heads=heads)) for heads in (32, 33)]

    assert answers[0] == []
    assert [reason.actual for reason in answers[1]] == ["64 heads with 128 columns on pages of 64"]
