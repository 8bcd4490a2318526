"""The plugin contract: the hook that a plugin implements, and the rules for its module.

A plugin is a Python module that an entry point of the group `dsv4attn` names:

    [project.entry-points.dsv4attn]
    acme = "dsv4attn_acme"

It implements hooks by their names, marked with `hookimpl`:

    from dsv4attn.core.contract import BackendInfo
    from dsv4attn.hookspecs import hookimpl

    @hookimpl
    def dsv4attn_backends():
        return [BackendInfo(name="acme", api="1.0", ...)]

**What the module may do.** It is imported in every process that selects a backend, also in processes that never run one
of its backends. So it must import neither torch nor triton nor a vendor's package, touch no device, read no file and
start no thread. Its hook returns descriptors. The implementation that a descriptor names is imported after the backend
was chosen.
Hooks must be functions in the module itself: names from a module's `__getattr__` are ignored.

**What happens when it fails.** Each plugin is loaded and called alone. A failure (an import error, a hook that raises,
a misspelt hook name, a value of the wrong type, a name of another plugin's backend) is recorded with its traceback
under the name of the plugin's distribution. `dsv4attn backends`, `dsv4attn doctor` and every selection error show it.
It does not affect other plugins. Users can leave a plugin out: `plugins.deny`, or `DSV4ATTN_PLUGINS_DENY`.

**Order.** The order of plugins, of distributions and of descriptors means nothing, here or anywhere later.

**Workers.** Plugins are loaded again in every spawned process; a forked process has them already. Workers have the same
backends as their parent, provided that a plugin always returns the same descriptors.

**Versions.** The contract is versioned (`contract.API_VERSION`). Minor versions only add: hooks may gain arguments,
which an implementation is free not to declare, and classes may gain fields with defaults. A backend states the version
it was written for in `BackendInfo.api`. A backend of another major version, or of a newer minor version, is refused,
and the error names both versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from dsv4attn.core.contract.backend import BackendInfo

__all__ = ["GROUP", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "dsv4attn"
GROUP = "dsv4attn"
"""Entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def dsv4attn_backends() -> Sequence[BackendInfo]:  # type: ignore[empty-body]
    """Return the descriptors of the backends of this plugin.

    The hook is called once in every process, when a backend is first selected or listed. Return the same value every
    time: workers must have the same backends as their parent. Return all descriptors on any hardware: `native`,
    `runs_on` and `support` say where a backend runs, and a trace can only show why a backend was not chosen if it is
    listed.

    :return: a list or tuple of `contract.BackendInfo`. Names are lower-case letters, digits, `.`, `_` and `-`, unique
        among all backends (take the name of your distribution or your device) and not `auto`. When two distributions
        use the same name, neither gets it. A name of a built-in backend stays with the built-in backend. If one
        descriptor is refused, the others of the plugin still count.
    """
