"""Generates docs/configuration.md from the settings in the code: `python -m tests.support.configuration_page`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from topics.system import settings
from topics.system.settings import LogFormat, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

# Headings, by the first setting of each group.
GROUPS = {
    "host": "Listening and access",
    "data_dir": "Storage",
    "max_body_bytes": "Requests",
    "max_topics": "Caps",
    "fronts": "Processes",
}
# Links and notes.
MORE = {
    "api_keys": "[keys](http/access.md#keys)",
    "allowed_hosts": "[web pages](http/access.md#web-pages)",
    "cors_origins": "[web pages](http/access.md#web-pages)",
    "strict_settings": "[wrong settings](#wrong-settings)",
    "wal_shards": "[another number of shards](resharding.md)",
    "cold_dir": "[tiers](storage.md#tiers)",
    "hot_retain_segments": "[tiers](storage.md#tiers)",
    "relocate_bytes_per_s": "[the pace of moving](storage.md#the-pace-of-moving)",
    "retire_grace_ms": "[what is kept, and how long](consolidation.md#what-is-kept-and-how-long)",
    "plan_ttl_ms": "[consolidation](consolidation.md)",
    "min_free_bytes": "[full disks](storage.md#the-disk-is-full-or-nearly)",
    "reclaim_bytes_per_s": "[giving space back](storage.md#giving-space-back)",
    "wal_file_bytes": "each shard has two of them from the start",
    "max_body_bytes": "413 `payload_too_large`",
    "strict_requests": "[unknown fields](http/basics.md#unknown-fields)",
    "max_topics": "429 `throttled`, as all of these",
    "max_memory_bytes": "[what an ack means](decisions/0002-commit-classes.md)",
    "txn_max_bytes": "[transactions](transactions.md#errors)",
    "txn_shard_bytes": "[transactions](transactions.md#errors)",
    "request_timeout_ms": "408 `request_timeout`",
    "otel": "[tracing](tracing.md#spans-of-the-server)",
}

HEAD = """\
# Configuration

All settings are environment variables; there is no configuration file. Four of them are also options of `topics serve`, which take precedence: `--host`, `--port`, `--data` and `--shards`. `topics serve --help` prints all settings. This page is generated from the code (`python -m tests.support.configuration_page`).

All processes of a server read the variables at its start; restart it after a change. An empty variable counts as unset.

Durations are in milliseconds, or have a unit: `250ms`, `30s`, `5m`, `1h30m`, `2d`. Sizes, also per second, are in bytes, or have a unit: `512KiB`, `64MiB`, `1.5GiB`, or in powers of ten `10MB`, `1GB`.

## Wrong settings

For an invalid value the default is used, and a number outside its range is clamped (a port above 65535: the default). Each of these, and each unknown `TOPICS_…` variable, is a warning in the log at the start, with the value in use and the
nearest known name. Values of unknown variables are not logged, since they may be keys:

```text
warning supervisor: TOPICS_MAX_TOPCIS is not a known variable and is ignored; did you mean TOPICS_MAX_TOPICS? In use: 100000
warning supervisor: TOPICS_FRONTS='two' is not a whole number; in use: 1
```

`TOPICS_STRICT_SETTINGS=1` turns these warnings into a refusal: the server lists all of them and exits with 2. The image, the compose file and the systemd unit set it. Unsafe settings are always refused.

Kubernetes injects variables for each service of a namespace. Those of a service called `topics` (`TOPICS_SERVICE_HOST`, `TOPICS_PORT_4000_TCP` and so on) are ignored, and so is `TOPICS_PORT` if it is a URL like `tcp://10.0.0.1:4000`: the port is then the default. `enableServiceLinks: false` in the pod
specification avoids them.
"""

TAIL = """
## The command and the Python client

| Variable | Default | Meaning | See |
|---|---|---|---|
| `TOPICS_URL` | http://127.0.0.1:4000 | where the server is | [which server](cli.md#which-server) |
| `TOPICS_TOKEN` | – | its key; `TOPICS_API_KEY` is used if this is unset | [keys](http/access.md#keys) |
| `TOPICS_CONFIG` | `~/.config/topics/contexts.json` | file with saved servers, for the command | [contexts](cli.md#which-server) |
| `NO_COLOR` | – | set: no colours in the command's output | |

OpenTelemetry's own variables (`OTEL_…`) are in [tracing](tracing.md#spans-of-the-server).
"""


def page() -> str:
    return "".join([HEAD, *_tables(), TAIL])


def _tables() -> Iterator[str]:
    shown = {name: (default, meaning) for name, default, meaning in settings.describe()}
    for name, kind, meta in settings._fields():
        if name in GROUPS:
            yield f"\n## {GROUPS[name]}\n\n| Variable | Default | Values | Meaning | See |\n|---|---|---|---|---|\n"
        default, meaning = shown[settings.variable(name)]
        # The help text has a default that is not a plain value in brackets; the page has a column for it.
        meaning, _, said = meaning.partition(" [")
        default = f"`{default}`" if default else said.rstrip("]") or "–"
        cells = [
            f"`{settings.variable(name)}`",
            default,
            _values(name, kind, meta.ge, meta.le),
            meaning,
            MORE.get(name, ""),
        ]
        yield f"| {' | '.join(cells)} |\n"


def _values(name: str, kind: object, least: object, most: object) -> str:
    kinds = (kind, *get_args(kind))
    if kind == LogFormat:
        return ", ".join(get_args(LogFormat))
    if bool in kinds:
        return "0, 1"
    if int not in kinds:
        return "text"
    unit = "duration " if name.endswith("_ms") else "size " if "_bytes" in name else ""
    return unit + (f"{least or 0} to {most}" if most is not None else f"from {least or 0}")


assert set(GROUPS) | set(MORE) <= set(Settings.__struct_fields__), (
    "GROUPS, VALUES or LINKS name a setting that does not exist"
)

if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), "utf-8")
