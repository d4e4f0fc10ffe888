"""`python -m workers` is the server: the supervisor, which starts all other processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from router import front
from topics.api.api_keys import secrets_of
from topics.system import logs, process, stdio
from topics.system.settings import Settings
from workers.process import exit_codes, supervisor
from workers.shard import program


def main(argv: Sequence[str] | None = None) -> int:
    if sys.argv[1:] if argv is None else argv:
        print("topics: python -m workers takes no arguments; see topics serve --help", file=sys.stderr)
        return exit_codes.BAD_CONFIGURATION
    return serve()


def serve() -> int:
    stdio.open_standard_streams()
    configured = Settings.from_env(os.environ)
    logs.configure("supervisor", configured.log_format, secrets_of(configured.api_keys))
    process.set_title("supervisor")
    return supervisor.serve(configured, program.main, front.main)


if __name__ == "__main__":
    sys.exit(main())
