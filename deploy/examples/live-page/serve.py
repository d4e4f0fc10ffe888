"""Serves the page and proxies /v0/ to the server, so that both have one origin: the server refuses pages of other origins.

    python serve.py [--port 8000] [--url http://127.0.0.1:4000]

For local use. In production use a web server with TLS: see nginx.conf.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from aiohttp import ClientConnectionError, ClientSession, ClientTimeout, web

HERE = Path(__file__).parent
FORWARDED_HEADERS = ("Content-Type", "Accept", "Last-Event-ID")


async def show(request: web.Request) -> web.FileResponse:
    return web.FileResponse(HERE / "index.html")


async def forward(request: web.Request) -> web.StreamResponse:
    """Forward a request. The response is passed on unbuffered, for event streams."""
    session, url = request.app["session"], request.app["url"]
    headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
    if token := os.environ.get("TOPICS_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"  # the page has the permissions of this key
    try:
        async with session.request(
            request.method, f"{url}{request.raw_path}", data=await request.read(), headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/json")
            response.headers["Cache-Control"] = "no-store"
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response
    except ClientConnectionError:
        raise web.HTTPBadGateway(text="the server is unreachable") from None


async def session(app: web.Application):  # type: ignore[no-untyped-def]
    app["session"] = ClientSession(timeout=ClientTimeout(total=None, sock_connect=5), auto_decompress=False)
    yield
    await app["session"].close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--url", default=os.environ.get("TOPICS_URL", "http://127.0.0.1:4000"))
    arguments = parser.parse_args()
    app = web.Application()
    app["url"] = arguments.url.rstrip("/")
    app.cleanup_ctx.append(session)
    app.router.add_get("/", show)
    app.router.add_route("*", "/v0/{rest:.*}", forward)
    # With cancellation, closing the page also closes its stream at the server.
    web.run_app(app, host="127.0.0.1", port=arguments.port, handler_cancellation=True, shutdown_timeout=1)


if __name__ == "__main__":
    main()
