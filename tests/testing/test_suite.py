"""The pytest classes and the plugin, as a backend's author meets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

# what a run inside this process imports must be there before: pytester forgets what came in between.
from dsv4attn.testing import plugin, suite
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.plugin import ExpectedFailure, read_xfails

pytest_plugins = ["pytester"]

TWELVE_LINES = """\
import pytest
from dsv4attn.testing import suite

class Acme(suite.Fixtures):
    @pytest.fixture
    def backend(self):
        return "reference"

class TestDecode(Acme, suite.TestDecode): ...
class TestPrefill(Acme, suite.TestPrefill): ...
class TestCache(Acme, suite.TestCache): ...
class TestMemory(Acme, suite.TestMemory): ...
class TestLayer(Acme, suite.TestLayer): ...
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run a test file, by default the one of twelve lines, with the plugin."""

    def run(*args: str, text: str = TWELVE_LINES, **files: str) -> pytest.RunResult:
        pytester.makepyfile(test_acme=text)
        for name, content in files.items():
            (pytester.path / f"{name}.txt").write_text(content, encoding="utf-8")
        # our own filters reach in here; and the plugin is imported already, and so cannot be rewritten
        filters = ["-W", "default", *args, "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return pytester.runpytest_inprocess("-p", plugin.__name__, *filters)

    return run


@pytest.mark.matrix
def test_warnings_of_tritons_interpreter_are_no_errors_of_a_vendors_tests(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfilterwarnings = error")
    quiet = "-W", "ignore::pytest.PytestAssertRewriteWarning"
    config = pytester.parseconfigure("-p", plugin.__name__, *quiet)

    # the last line wins
    assert config.getini("filterwarnings") == ["error", r"ignore::RuntimeWarning:triton\.runtime\.interpreter"]


def test_a_backend_needs_twelve_lines_and_has_every_case(run: Run) -> None:
    assert len([line for line in TWELVE_LINES.splitlines() if line.strip()]) <= 12
    result = run("--collect-only", "-q")

    ids = [line for line in result.outlines if "::test_case[" in line]
    assert len(ids) == len(CASES)
    assert "test_acme.py::TestDecode::test_case[S3-sink-none-decode]" in ids
    assert "test_acme.py::TestMemory::test_case[A5.R1-far-gather]" in ids


def test_its_tests_run_and_what_does_not_apply_is_skipped_with_a_reason(run: Run) -> None:
    result = run("-k", "sink-none or codes-ocp and not copies and not smallest or taken or project-2", "-rs")

    result.assert_outcomes(passed=2 + 2 + 5 + 2, skipped=1, deselected=len(CASES) - 7)
    result.stdout.fnmatch_lines(["SKIPPED*does not apply: this backend reads gathered rows in prefill"])
    result.stdout.fnmatch_lines(["dsv4attn: contract *  python *  torch *"])


def test_without_a_file_of_its_own_a_backend_is_named_on_the_command_line(run: Run) -> None:
    result = run(
        "--dsv4-backend", "reference,prefill_keys=paged", "--dsv4-device", "cpu", "--pyargs", suite.__name__,
        "-k", "codes-fnuz", "-v",
    )  # fmt: skip

    result.assert_outcomes(passed=2, skipped=1, deselected=len(CASES) + 2)
    result.stdout.fnmatch_lines(["dsv4attn: backend reference:prefill_keys=paged (dsv4attn *) on cpu CPU"])


def test_the_header_shows_variables_that_matter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    result = run("--collect-only", "-k", "million", "--dsv4-backend", "reference")

    result.stdout.fnmatch_lines(["dsv4attn: *TRITON_INTERPRET=1*"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--dsv4-backend", "referen"), "*unknown backend 'referen'; did you mean 'reference'?*"),
        (("--dsv4-backend", "reference,fast"), "*expected NAME[[],option=value[]], got 'reference,fast'*"),
        (("--dsv4-backend", "reference", "--dsv4-device", "cuda:77"), "*device: expected a device of this machine*"),
        (("--dsv4-xfails", "nowhere.txt"), "*nowhere.txt*"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(run: Run, args: tuple[str, ...], said: str) -> None:
    result = run(*args)

    assert result.ret is pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([said])


# a backend that is wrong, or refuses

BROKEN = """\
import attrs, pytest
from dsv4attn import load_backend
from dsv4attn.testing import suite

class Acme(suite.Fixtures):
    @pytest.fixture
    def backend(self):
        made = load_backend("reference")
        right = made.decode
        made.decode = lambda call: right(attrs.evolve(call, attn_sink=None))
        return made

class TestDecode(Acme, suite.TestDecode): ...
"""
REFUSING = """\
import pytest
from dsv4attn import load_backend
from dsv4attn.testing import suite

class Acme(suite.Fixtures):
    @pytest.fixture
    def subject(self, backend, device):
        return suite.Subject("acme", load_backend("reference"), refusals=lambda problems: ["DEVICE: cpu, needs acme"])

    @pytest.fixture
    def backend(self):
        return "reference"

class TestDecode(Acme, suite.TestDecode): ...
"""


def test_a_failure_says_the_clause_and_what_is_wrong_without_a_traceback_of_ours(run: Run) -> None:
    result = run("-k", "sink-matters-swa or sink-infinite", text=BROKEN)

    result.assert_outcomes(failed=2, deselected=len([c for c in CASES if c.area.value == "decode"]) - 1)
    result.stdout.fnmatch_lines(["*changing the sink does not change the output"])
    result.stdout.fnmatch_lines(["  clauses S1 of the contract: *", "FAILED *[[]S1-sink-matters-swa-decode[]]*"])
    result.stdout.no_fnmatch_line("*suite.py:*")


def test_refusing_everything_fails(run: Run) -> None:
    result = run("-k", "ragged or taken", text=REFUSING)

    result.assert_outcomes(failed=1, skipped=1, deselected=len([c for c in CASES if c.area.value == "decode"]) - 1)
    result.stdout.fnmatch_lines(["*no case of decode is executed: DEVICE: cpu, needs acme"])


def test_a_class_that_names_no_backend_fails_with_a_hint(run: Run) -> None:
    text = "from dsv4attn.testing import suite\nclass TestDecode(suite.TestDecode): ...\n"
    result = run("-k", "ragged", text=text)

    result.assert_outcomes(errors=1, deselected=len([c for c in CASES if c.area.value == "decode"]))
    result.stdout.fnmatch_lines(["*NotImplementedError: override the fixture `backend` to return your backend*"])


def test_layouts_and_dtypes_can_be_left_out_and_cases_added(run: Run) -> None:
    more = """
class Narrow(Acme):
    skip_layouts = ("e4m3fnuz", "rows/")
    dtypes = (suite.torch.bfloat16,)
    extra_cases = [suite.CASES[0].__class__(name="own", area=suite.Area.CACHE, clauses=["C1"], says="it is so",
                   inputs=suite.CASES[0].inputs, check=lambda bench, inputs: 1 / 0)]

class TestNarrow(Narrow, suite.TestCache): ...
"""
    result = run("--collect-only", "-q", "-k", "TestNarrow", text=TWELVE_LINES + more)
    # weights in fp8 are no layout: their cases stay
    ids = "\n".join(line for line in result.outlines if "project-fp8" not in line)

    assert "quantise-ocp-64" in ids
    assert "TestNarrow::test_case[C1-own]" in ids
    for left_out in ("fnuz", "bf16-64", "fp32"):
        assert left_out not in ids


# expected failures


def test_a_file_of_expected_failures_takes_ids_tails_and_names(run: Run) -> None:
    xfails = """\
# why sinks are wrong is known
test_acme.py::TestDecode::test_case[S4.L2-sink-infinite-decode]  # ACME-17
TestDecode::test_case[S1-sink-matters-swa-decode]
sink-values-decode # three
"""
    result = run("--dsv4-xfails", "x.txt", "-k", "sink and decode", "-rx", text=BROKEN, x=xfails)

    result.assert_outcomes(xfailed=3, failed=2, passed=1, deselected=len(_decode()) - 5)
    result.stdout.fnmatch_lines(["XFAIL *sink-infinite-decode[]] - ACME-17*"])
    result.stdout.fnmatch_lines(["XFAIL *sink-values-decode[]] - three*"])
    result.stdout.fnmatch_lines(["XFAIL *sink-matters-swa-decode[]] - expected, see x.txt*"])


def _decode() -> list[str]:
    return [case.name for case in CASES if case.area.value == "decode"]


def test_an_expected_failure_that_passes_is_a_failure(run: Run) -> None:
    result = run("--dsv4-xfails", "x.txt", "-k", "sink-none-decode", x="sink-none-decode\n")

    result.assert_outcomes(failed=1, deselected=len(CASES) + 4)
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


def test_a_line_that_no_test_answers_to_is_warned_of(run: Run) -> None:
    result = run("--dsv4-xfails", "x.txt", "-k", "sink-none-decode", x="\nfar-insertion  # gone\nfar-insert\n")

    result.assert_outcomes(passed=1, warnings=1, deselected=len(CASES) + 4)
    result.stdout.fnmatch_lines(["*UnmatchedXfailWarning: x.txt:2: no test is called 'far-insertion'*"])


def test_where_warnings_are_errors_it_is_one_and_no_crash(run: Run) -> None:
    result = run("--dsv4-xfails", "x.txt", "-W", "error", "-k", "million", x="far-insertion\n")

    assert result.ret is pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: x.txt:1: no test is called 'far-insertion' -> take the line away"])


def test_a_file_of_expected_failures_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("\n# only a comment\n  a::b[c#1]  # why # not\nplain\n", encoding="utf-8")

    assert read_xfails(path) == [
        ExpectedFailure(3, "a::b[c#1]", "why # not"),
        ExpectedFailure(4, "plain", "expected, see x.txt"),
    ]
