"""How to get packages that only some need: what a message says."""

from __future__ import annotations

import sys


def install(extra: str) -> str:
    """The command. Named with its interpreter: another pip would find no topics there, and take the public index's."""
    return f"{sys.executable} -m pip install 'topics[{extra}]'"
