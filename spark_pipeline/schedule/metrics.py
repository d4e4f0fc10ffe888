"""Prometheus metrics of a schedule, over HTTP or in a file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from spark_pipeline.schedule.state import JobState, State, replace_file

# name, kind, help, value
_METRICS: tuple[tuple[str, str, str, Callable[[JobState], float | None]], ...] = (
    ("running", "gauge", "1 while the job is running", lambda job: float(job.running_since_s > 0)),
    ("next_timestamp_seconds", "gauge", "time of the next run", lambda job: job.next_s or None),
    (
        "last_done_timestamp_seconds",
        "gauge",
        "end of the last successful run; alert on its age",
        lambda job: job.last_done_s or None,
    ),
    (
        "last_duration_seconds",
        "gauge",
        "duration of the last run",
        lambda job: round(job.runs[-1].ended_s - job.runs[-1].began_s, 3) if job.runs else None,
    ),
    ("missed_total", "counter", "missed runs", lambda job: job.missed_total),
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
    lines += [f"# HELP {full} runs by result, including skipped ones", f"# TYPE {full} counter"]
    for job, known in sorted(state.jobs.items()):
        lines += [
            f'{full}{{job="{job}",result="{result}"}} {count}'
            for result, count in sorted(known.totals.items())
        ]
    full = "topics_spark_job_last_figure"
    lines += [f"# HELP {full} figures of the last run", f"# TYPE {full} gauge"]
    for job, known in sorted(state.jobs.items()):
        figures = known.runs[-1].figures if known.runs else {}
        lines += [
            f'{full}{{job="{job}",figure="{name}"}} {value:.15g}' for name, value in sorted(figures.items())
        ]
    return "\n".join(lines) + "\n"


class Metrics:
    """Serves the metrics of the state last passed to `publish`."""

    def __init__(self, address: str = "", file: str = "") -> None:
        """Raises ValueError or OSError if the address is invalid or in use."""
        self._text = render(State())
        self._file = Path(file) if file else None
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        if address:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"{address!r} is not an address for metrics; write 127.0.0.1:9464")
            self._server = self._serve(host.strip("[]"), int(port))
            self.port = self._server.server_address[1]

    def publish(self, state: State, _now_s: float) -> None:
        text = render(state)
        if text == self._text:
            return
        self._text = text
        if self._file is not None:
            replace_file(self._file, text.encode())

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
                body = ("not found; try /metrics or /healthz\n" if text is None else text).encode()
                self.send_response(404 if text is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Do not log scrapes."""

        server = ThreadingHTTPServer((host, port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        return server
