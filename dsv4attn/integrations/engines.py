"""What the wheels for engines share: facts about the engines, checks of versions, refusals, options and the log.

A wheel of `integrations/` has a module `guard` with its `RefusedError` and its `GUARD`. An engine imports it in every
process, also for other models, so this module loads neither torch nor the engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from attrs import field, frozen


@frozen
class Engine:
    """An engine that a wheel of this project plugs into.

    name: as its authors write it.
    article: what stands before its name, "a" or "an".
    package: its distribution, and its module.
    group: entry points that it loads in every process.
    allowed: its variable with the names of the entry points to load.
    lenient: whether that variable is unset when it is empty, and blanks around its names do not count.
    scope: where DeepSeek-V4 runs on dsv4attn when the wheel is active.
    kernels: where it looks for compiled kernels of Triton: a variable with a folder, its default, a folder inside.
    kinds: kinds of devices, such as "cuda", on which it can call dsv4attn.
    options: those that its wheel sets for backends that have them.
    least_heads: heads of q, at least. It fills a rank's heads up to so many.
    """

    name: str
    article: str
    package: str
    group: str
    allowed: str
    lenient: bool
    scope: str
    kernels: tuple[str, str, str]
    kinds: tuple[str, ...]
    options: Mapping[str, str] = {}
    least_heads: int = 1

    @property
    def wheel(self) -> str:
        """The distribution that plugs into it."""
        return f"dsv4attn-{self.package}"

    @property
    def prefix(self) -> str:
        """The prefix of the wheel's environment variables."""
        return f"DSV4ATTN_{self.package.upper()}"

    @property
    def switch(self) -> str:
        """The variable of the wheel. 0: the engine runs as if the wheel were not installed. 1: it is used.

        Unset: it is used, by vLLM where vLLM has no attention of its own for the device.
        """
        return self.prefix

    @property
    def any_version(self) -> str:
        """The variable for versions that were not tested. 1: they are tried. 0, or unset: they are refused."""
        return f"{self.prefix}_ANY_VERSION"

    def kernel_folder(self) -> Path:
        """Where a process of the engine looks for compiled kernels of Triton, if it has the variables of this one."""
        variable, default, inside = self.kernels
        cache = os.environ.get("TRITON_CACHE_DIR")
        return Path(cache) if cache else Path(os.environ.get(variable) or default).expanduser() / inside

    def leaves_out(self, point: str) -> bool:
        """Whether the engine's own variable leaves out an entry point."""
        allowed = os.environ.get(self.allowed)
        if allowed is None or (self.lenient and not allowed):
            return False
        return point not in [name.strip() if self.lenient else name for name in allowed.split(",")]


VLLM = Engine(
    "vLLM",
    "a",
    "vllm",
    "vllm.general_plugins",
    "VLLM_PLUGINS",
    lenient=False,
    scope="where vLLM has no attention of its own, else if --attention-backend DSV4ATTN or DSV4ATTN_VLLM=1 asks for it",
    # Triton's own folder, as vLLM has another one only for models that it compiles by torch.compile
    kernels=("TRITON_HOME", "~", ".triton/cache"),
    kinds=("cuda", "hip", "xpu"),
    options={"projection": "fp8"},
)
SGLANG = Engine(
    "SGLang",
    "an",
    "sglang",
    "sglang.srt.plugins",
    "SGLANG_PLUGINS",
    lenient=True,
    scope="on GPUs of NVIDIA and Intel, else refused",
    kernels=("SGLANG_CACHE_DIR", "~/.cache/sglang", "triton"),
    kinds=("cuda", "xpu"),
    # of FlashMLA, whose functions the wheel replaces
    least_heads=64,
)
ENGINES = (VLLM, SGLANG)


class RefusedError(RuntimeError):
    """dsv4attn cannot serve this engine, model or configuration. The message says what to change.

    Each wheel has a subclass with its `engine`.
    """

    engine: ClassVar[Engine]

    def __init__(self, what: str, *, expected: str, actual: object, cure: str) -> None:
        """Build the message from the name of what is wrong, the expected and the actual value, and the cure."""
        engine = self.engine
        way_out = f"set {engine.switch}=0 to run {engine.name}'s own attention"
        super().__init__(f"{engine.wheel}: {what}: expected {expected}, got {actual} -> {cure}, or {way_out}")


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(map(str, values))


@frozen
class Guard:
    """Which versions of its engine a wheel serves, and the environment variables that change this.

    refused: the wheel's subclass of RefusedError, which names the engine.
    tested: the versions of the engine that the tests of the wheel ran with, oldest first.
    """

    refused: type[RefusedError]
    tested: tuple[str, ...] = field(converter=_texts)

    @property
    def engine(self) -> Engine:
        """The engine that the wheel plugs into."""
        return self.refused.engine

    @property
    def install(self) -> str:
        """What installs a version that was tested, as a cure says it."""
        return f"install {self.engine.package}=={self.tested[-1]}"

    def is_off(self) -> bool:
        """Whether the wheel does nothing. A switch that is neither 0 nor 1 leaves it on: `check` refuses that value."""
        return os.environ.get(self.engine.switch, "").strip() == "0"

    def is_requested(self) -> bool:
        """Whether the switch is 1. Raises RefusedError if it is neither 0 nor 1."""
        return self._flag(self.engine.switch, default=False)

    def installed(self) -> str:
        """The version of the engine, or words for a missing one."""
        engine = self.engine
        try:
            # metadata may lack a version, whatever the type of `version` says
            installed = version(engine.package) or None
        except PackageNotFoundError:  # a source tree on the path
            installed = None
        return installed or f"{engine.article} {engine.name} without version"

    def check(self) -> str:
        """The version of the engine, for the log.

        Raises RefusedError if that version was not tested, unless the variable allows any, and for a variable that is
        neither 0 nor 1.
        """
        engine = self.engine
        self._flag(engine.switch, default=True)
        installed = self.installed()
        if installed.partition("+")[0] not in self.tested and not self._flag(engine.any_version, default=False):
            cure = f"{self.install}, set {engine.any_version}=1 to try this version"
            what, expected = f"version of {engine.name}", " or ".join(self.tested)
            raise self.refused(what, expected=expected, actual=installed, cure=cure)
        return installed

    def refuse_missing(self, installed: str, missing: Sequence[str]) -> None:
        """Raise RefusedError if the engine lacks names that the wheel relies on.

        installed: the version of the engine. missing: a line for each name.
        """
        if missing:
            engine = self.engine
            expected = f"all names of {engine.name} that {engine.wheel} replaces, calls, writes or reads"
            cure = f"{self.install}, or a {engine.wheel} that was tested with {engine.name} {installed}"
            raise self.refused(f"{engine.name} {installed}", expected=expected, actual="; ".join(missing), cure=cure)

    def _flag(self, name: str, *, default: bool) -> bool:
        """The value of a variable that is 0 or 1."""
        text = os.environ.get(name, "").strip()
        if text not in ("", "0", "1"):
            what, actual = f"environment variable {name}", repr(text)
            raise self.refused(what, expected="0 or 1", actual=actual, cure="correct it")
        return default if not text else text == "1"


def parts_named(variable: str, parts: Sequence[str], refused: type[RefusedError]) -> frozenset[str] | None:
    """The parts that an environment variable names with commas between them; None for `auto`, and where it is unset.

    Raises RefusedError for any other word than parts, `auto`, `all` and `none`.
    """
    words = words_of(variable)
    for whole, value in (([], None), (["auto"], None), (["all"], frozenset(parts)), (["none"], frozenset())):
        if words == whole:
            return value
    for word in words:
        if word not in parts:
            near = get_close_matches(word, parts, 1)
            expected = f"auto, all, none, or some of {', '.join(parts)}"
            cure = f"write {near[0]}" if near else "correct it"
            raise refused(f"environment variable {variable}", expected=expected, actual=repr(word), cure=cure)
    return frozenset(words)


def words_of(variable: str) -> list[str]:
    """The words of an environment variable, with commas between them, in small letters."""
    return [word.strip().lower() for word in os.environ.get(variable, "").split(",") if word.strip()]


class OnceLog:
    """The lines of a wheel in an engine's log. Each begins with the name of the wheel and is logged once in a process.

    A model and its draft would log the same lines. name: of the logger. It is below the logger of the engine, so that
    the lines go where the engine's own lines go.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._wheel, self.logger, self._lines = engine.wheel, logging.getLogger(name), set[str]()

    def adopt(self, name: str) -> None:
        """Let the lines of another logger without handlers go where these lines go. name: of that logger."""
        other = logging.getLogger(name)
        if not other.handlers:
            other.parent = self.logger
            # logging forgets what it remembers of levels
            other.setLevel(other.level)

    def info(self, text: str, *values: object) -> None:
        """Log what is done."""
        self._log(logging.INFO, text, values)

    def warning(self, text: str, *values: object) -> None:
        """Log what the user asked for and does not get."""
        self._log(logging.WARNING, text, values)

    def error(self, text: str, *values: object) -> None:
        """Log why the wheel is not used."""
        self._log(logging.ERROR, text, values)

    def _log(self, level: int, text: str, values: Any) -> None:  # noqa: ANN401 - a tuple
        line = text % values
        if line not in self._lines:
            self._lines.add(line)
            self.logger.log(level, "%s: %s", self._wheel, line, stacklevel=3)
