"""`load_backend`: names and options that exist, and those that do not."""

from __future__ import annotations

import pytest

import dsv4attn
from dsv4attn.core.contract.backend import Capabilities, IndexForm, KeyForm
from dsv4attn.errors import ArgumentError, UnknownNameError
from dsv4attn.selection import backend_names, load_backend


def test_without_a_name_the_reference_is_loaded() -> None:
    assert "reference" in backend_names()
    assert load_backend().name == load_backend("reference").name == "reference"
    assert load_backend() is not load_backend()
    assert dsv4attn.load_backend is load_backend


def test_the_defaults_are_those_of_the_descriptor() -> None:
    assert load_backend().capabilities == Capabilities(max_logits=True, empty_lse=True, prefill_pages=True)


@pytest.mark.parametrize("keys", list(KeyForm))
@pytest.mark.parametrize("indices", list(IndexForm))
def test_options_choose_the_forms(keys: KeyForm, indices: IndexForm) -> None:
    by_word = load_backend("reference", decode_indices=indices.value, prefill_keys=keys.value)
    by_value = load_backend("reference", decode_indices=indices, prefill_keys=keys)

    pages_too = keys is KeyForm.GATHERED
    capabilities = Capabilities(indices, prefill_keys=keys, max_logits=True, empty_lse=True, prefill_pages=pages_too)
    assert by_word.capabilities == by_value.capabilities == capabilities


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        *((name, "; did you mean 'reference'\\?") for name in ("reverence", "Reference", "ref")),
        *((name, "") for name in ("", "quantum", "dsv4attn.backends.reference")),
    ],
)
def test_an_unknown_name_is_an_error_with_a_suggestion_and_all_names(name: str, suggestion: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"^unknown backend '{name}'{suggestion}.*\(known: .*reference"):
        load_backend(name)


def test_an_option_the_backend_does_not_take_is_named() -> None:
    with pytest.raises(
        ArgumentError, match=r"option.*: expected one of decode_indices, .*; did you mean 'prefill_keys'\?"
    ):
        load_backend("reference", prefil_keys="paged")
    with pytest.raises(ArgumentError, match="block_rows"):
        load_backend("reference", block_rows=4)


@pytest.mark.parametrize("option", ["decode_indices", "prefill_indices", "prefill_keys"])
def test_a_value_an_option_does_not_have_is_named(option: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"^unknown {option} form 'diagonal' \(known: "):
        load_backend("reference", **{option: "diagonal"})
    near = "gatherd" if option == "prefill_keys" else "raged"
    with pytest.raises(UnknownNameError, match=rf"^unknown {option} form '{near}'; did you mean '(gathered|ragged)'"):
        load_backend("reference", **{option: near})
