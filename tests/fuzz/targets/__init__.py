"""All targets by name. Each module says in its opening what is fed, and what must hold."""

from __future__ import annotations

from tests.fuzz.runner import Target
from tests.fuzz.targets import (
    bodies,
    directory,
    files,
    frames,
    handed,
    http1,
    http2,
    jobs,
    messages,
    texts,
    wal,
)

MODULES = (http1, http2, frames, wal, files, handed, directory, messages, bodies, jobs, texts)
TARGETS: dict[str, Target] = {module.TARGET.name: module.TARGET for module in MODULES}
