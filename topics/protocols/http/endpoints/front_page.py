"""The HTML page at `/`, for browsers: what this server is and how to start. It shows no state of the server."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

from topics.protocols.http.call import Call
from topics.protocols.http.exchange import Respond, Response

VARY = b"Vary: Accept\r\n"

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 1rem/1.6 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 3rem 1.25rem; }
h1 { font-size: 2rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; }
pre, code { font: .875rem/1.6 ui-monospace, monospace; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; overflow-x: auto; }
ul { list-style: none; margin: 0; padding: 0; }
li { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .4rem 0; border-top: 1px solid var(--line); }
li a { flex: 0 0 11rem; }
"""
# The browser fills in the server's address, so that the Host header is not echoed.
_SCRIPT = """
for (const element of document.querySelectorAll(".origin")) element.textContent = location.origin;
"""
_ORIGIN = '<span class="origin">http://127.0.0.1:4000</span>'
_PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>topics</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>topics</h1>
<p>A durable event log, job queue and pub/sub server. Clients write records to named topics over HTTP, follow them
live, and read them back from any point.</p>

<h2>Try it</h2>
<p>Write a record, read the topic, then wait up to 30 seconds for the next record:</p>
<pre>curl -d 'hello' {_ORIGIN}/v0/topics/demo/raw
curl {_ORIGIN}/v0/topics/demo/records
curl '{_ORIGIN}/v0/topics/demo/records?from_seq=1&amp;wait_ms=30000'</pre>
<p>If the server requires API keys, add <code>-H 'Authorization: Bearer &lt;key&gt;'</code>.</p>

<h2>This server</h2>
<ul>
<li><a href="/v0/health">/v0/health</a> liveness</li>
<li><a href="/v0/ready">/v0/ready</a> readiness: whether all topics are served</li>
<li><a href="/metrics">/metrics</a> metrics in Prometheus format</li>
<li><a href="/v0/topics">/v0/topics</a> topics of this server</li>
<li><a href="/v0/openapi.json">/v0/openapi.json</a> the HTTP API, as an OpenAPI document</li>
</ul>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


# connect-src: lets people try a stream in the browser's console.
_POLICY = (
    f"default-src 'none'; connect-src 'self'; img-src data:; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# no-cache: another program may listen on this address later.
_HEAD = (
    VARY
    + (
        f"Content-Security-Policy: {_POLICY}\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Referrer-Policy: no-referrer\r\n"
        "Cache-Control: no-cache\r\n"
    ).encode()
)
_BODY = _PAGE.encode()


def show(call: Call, respond: Respond) -> None:
    respond(Response(200, _BODY, b"text/html; charset=utf-8", _HEAD))
