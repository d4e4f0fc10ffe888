"""The real supervisor with fake children, as a program: `python -m tests.support.fake_server`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.support import fake_child
from topics.api.api_keys import secrets_of
from topics.system import logs
from topics.system.settings import Settings
from workers.process import supervisor


def main(_: Sequence[str] = ()) -> int:
    settings = Settings.from_env(os.environ)
    logs.configure("supervisor", settings.log_format, secrets_of(settings.api_keys))
    for name in ("FRONT_DRAIN_S", "FLUSH_COPIES_S", "WORKER_DRAIN_S"):
        if name in os.environ:
            setattr(supervisor, name, float(os.environ[name]))
    return supervisor.serve(settings, fake_child.main, fake_child.main)


if __name__ == "__main__":
    sys.exit(main())
