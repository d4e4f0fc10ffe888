"""Entry point of the `topics-spark` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import topics

USAGE = """\
usage: topics-spark <command> [arguments]

commands:
  doctor      check Java, Spark, the server and the cold directory, and run a small job
  plan        show what `compact` would merge, without changing anything
  compact     merge small and partly dead cold segments into large ones
  purge       rewrite cold segments without their dead records
  scrub       check every cold record against its checksum
  export      write cold records as Parquet files, by topic and day
  report      write statistics and charts of topics as HTML, Parquet and JSON
  schedule    run jobs on a schedule, or print them for systemd or cron
  status      show the last runs of scheduled jobs

options:
  --version   print the version
  --help      print this text

`topics-spark COMMAND --help` lists the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    match list(sys.argv[1:] if argv is None else argv):
        case ["doctor", *rest]:
            from spark_pipeline.cli import doctor

            return doctor.main(rest)
        case ["plan" | "compact" | "purge" as command, *rest]:
            from spark_pipeline.cli import merging

            return merging.main(command, rest)
        case ["scrub", *rest]:
            from spark_pipeline.cli import scrub

            return scrub.main(rest)
        case ["export", *rest]:
            from spark_pipeline.cli import export

            return export.main(rest)
        case ["report", *rest]:
            from spark_pipeline.cli import report

            return report.main(rest)
        case ["schedule", *rest]:
            from spark_pipeline.cli import schedule

            return schedule.main(rest)
        case ["status", *rest]:
            from spark_pipeline.cli import schedule

            return schedule.status(rest)
        case ["--version"]:
            print(f"topics-spark {topics.__version__}")
        case ["--help" | "-h" | "help"]:
            print(USAGE, end="")
        case []:
            print(USAGE, end="", file=sys.stderr)
            return 2
        case [unknown, *_]:
            print(f"topics-spark: unknown command {unknown!r}\n\n{USAGE}", end="", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
