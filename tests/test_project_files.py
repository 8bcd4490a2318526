"""Files for contributors and releases agree with each other: versions, workflows, licenses, contents of archives."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

import dsv4attn
from release import check, versions

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text_of(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_page_of_versions_has_the_table_of_the_script() -> None:
    assert versions.page_with(versions.table()) == versions.PAGE.read_text(encoding="utf-8")


def test_a_release_that_is_served_is_one_that_is_tested() -> None:
    [oldest_torch] = re.findall(r"(?m)^OLDEST_TORCH := torch==(\S+)$", text_of("Makefile"))
    rows = {name.partition(",")[0]: (oldest, newest) for name, oldest, newest, _ in versions.rows()}

    assert oldest_torch.startswith(f"{rows['torch'][0]}.")
    [matrix] = re.findall(r"(?m)^ +python: \[(.+)\]$", text_of(".github/workflows/ci.yml"))
    assert re.findall(r'"([\d.]+)"', matrix) == versions.pythons()


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.name)
def test_what_a_workflow_makes_is_a_target(path: Path) -> None:
    targets = set(re.findall(r"(?m)^([\w-]+):", text_of("Makefile")))
    named = set(
        re.findall(r"\bmake ((?:[\w-]+ )*[\w-]+)", re.sub(r'make -s \S+|[A-Z]+=("[^"]*"|\S+)', "", text_of(path)))
    )
    [*listed] = re.findall(r"(?m)^ +target: \[(.+)\]", text_of(path))

    assert {word for words in named for word in words.split()} | {
        word for words in listed for word in words.split(", ")
    } <= targets
    assert named or listed or "pre-commit" in path.name or "make ${{ matrix.target }}" in text_of(path)


def test_the_packages_have_one_version_one_license_and_one_address() -> None:
    projects = [text_of(folder / "pyproject.toml") for folder in check.PACKAGES.values()]
    named = {match[1] for project in projects if (match := re.search(r'(?m)^version = "(.+)"$', project))}

    assert {*named, *re.findall(r"(?m)^version: (.+)$", text_of("CITATION.cff"))} == {dsv4attn.__version__}
    assert len({text_of(folder / "LICENSE") for folder in check.PACKAGES.values()}) == 1
    assert len({url for project in projects for url in re.findall(r'(?m)^Repository = "(.+)"$', project)}) == 1


def archive(folder: Path, files: list[str], metadata: str) -> Path:
    path = folder / "dsv4attn_vllm-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("dsv4attn_vllm-0.1.0.dist-info/METADATA", metadata)
        for name in files:
            wheel.writestr(name, "")
    return path


def test_a_release_with_wrong_contents_or_without_an_address_is_refused(tmp_path: Path) -> None:
    files = ["dsv4attn_vllm/internals.py", "dsv4attn_vllm/tests/test_x.py", "dsv4attn_vllm-0.1.0.dist-info/LICENSE"]
    wheel = archive(tmp_path, files, f"Version: 0.1.0\nProject-URL: Repository, https://{check.PLACEHOLDER}/x\n")

    assert [*check.wrong_contents(wheel)] == [
        f"{wheel.name} lacks py.typed",
        f"{wheel.name} contains dsv4attn_vllm/tests/test_x.py",
    ]
    assert [*check.wrong_metadata([wheel], draft=True)] == []
    assert check.PLACEHOLDER in "".join(check.wrong_metadata([wheel], draft=False))
    assert any(check.PLACEHOLDER in text_of(folder / "pyproject.toml") for folder in check.PACKAGES.values())


def test_the_site_asks_no_other_host_for_fonts_or_scripts() -> None:
    config = text_of("mkdocs.yml")

    assert "  font: false\n" in config
    # its own, without which the plugin `offline` adds one from another host
    assert re.search(r"(?m)^  polyfills: \[site/iframe-worker\.js\]$", config)
    assert (ROOT / "docs" / "site" / "iframe-worker.js").is_file()
    assert "://" not in text_of("docs/site/pages.css") + text_of("docs/site/iframe-worker.js") + config
