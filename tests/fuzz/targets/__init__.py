"""All targets by name. Each module's docstring says what its input is and what is checked."""

from __future__ import annotations

from tests.fuzz.runner import Target
from tests.fuzz.targets import (
    bodies,
    directory,
    files,
    frames,
    http1,
    http2,
    job_files,
    jobs,
    messages,
    texts,
    wal,
)

MODULES = (http1, http2, frames, wal, files, job_files, directory, messages, bodies, jobs, texts)
TARGETS: dict[str, Target] = {module.TARGET.name: module.TARGET for module in MODULES}
