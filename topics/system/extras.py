"""Optional dependencies."""

from __future__ import annotations

import sys


def install_command(extra: str) -> str:
    """The pip command that installs an extra. With the path of the interpreter: another pip would not find this package,
    and install the one of the same name from the public index."""
    return f"{sys.executable} -m pip install 'topics[{extra}]'"
