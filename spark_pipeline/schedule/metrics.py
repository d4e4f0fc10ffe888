"""What monitoring gets to know of a schedule: Prometheus text, on a port of its own or in a file for a collector."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from spark_pipeline.schedule.state import JobState, State, write_whole

# name, kind, help, value
_METRICS: tuple[tuple[str, str, str, Callable[[JobState], float | None]], ...] = (
    ("running", "gauge", "1 while the job runs", lambda job: float(job.running_since_s > 0)),
    ("next_timestamp_seconds", "gauge", "when it runs next", lambda job: job.next_s or None),
    (
        "last_done_timestamp_seconds",
        "gauge",
        "end of the last run that was done: alert on its age",
        lambda job: job.last_done_s or None,
    ),
    (
        "last_duration_seconds",
        "gauge",
        "how long the last run took",
        lambda job: round(job.runs[-1].ended_s - job.runs[-1].began_s, 3) if job.runs else None,
    ),
    ("missed_total", "counter", "times that nothing came of", lambda job: job.missed_total),
)


def render(state: State) -> str:
    lines = []
    for name, kind, text, value in _METRICS:
        full = f"topics_spark_job_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        for job, known in sorted(state.jobs.items()):
            found = value(known)
            if found is not None:
                lines.append(f'{full}{{job="{job}"}} {found:.15g}')
    full = "topics_spark_job_runs_total"
    lines += [f"# HELP {full} runs by result, and those skipped", f"# TYPE {full} counter"]
    for job, known in sorted(state.jobs.items()):
        lines += [
            f'{full}{{job="{job}",result="{result}"}} {count}'
            for result, count in sorted(known.totals.items())
        ]
    full = "topics_spark_job_last_figure"
    lines += [f"# HELP {full} figures that the last run told", f"# TYPE {full} gauge"]
    for job, known in sorted(state.jobs.items()):
        figures = known.runs[-1].figures if known.runs else {}
        lines += [
            f'{full}{{job="{job}",figure="{name}"}} {value:.15g}' for name, value in sorted(figures.items())
        ]
    return "\n".join(lines) + "\n"


class Metrics:
    """Has the text of the last moment at which something changed; `publish` is the scheduler's."""

    def __init__(self, address: str = "", file: str = "") -> None:
        """ValueError and OSError say what is wrong with the address."""
        self._text = render(State())
        self._file = Path(file) if file else None
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        if address:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"{address!r} is no address for metrics; one looks like 127.0.0.1:9464")
            self._server = self._serve(host.strip("[]"), int(port))
            self.port = self._server.server_address[1]

    def publish(self, state: State, _now_s: float) -> None:
        text = render(state)
        if text == self._text:
            return
        self._text = text
        if self._file is not None:
            write_whole(self._file, text.encode())

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serve(self, host: str, port: int) -> ThreadingHTTPServer:
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                known = {"/metrics": metrics._text, "/healthz": "ok\n"}
                text = known.get(self.path.partition("?")[0])
                body = ("not found; there are /metrics and /healthz\n" if text is None else text).encode()
                self.send_response(404 if text is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Every scrape a line would hide the others."""

        server = ThreadingHTTPServer((host, port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        return server
