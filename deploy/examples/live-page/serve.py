"""Serves the page, and hands everything below /v0/ to the server: one origin for both, since the server refuses pages of others.

    python serve.py [--port 8000] [--url http://127.0.0.1:4000]

For one machine and for trying it. In production a web server does the same, with TLS: see nginx.conf.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from aiohttp import ClientConnectionError, ClientSession, ClientTimeout, web

HERE = Path(__file__).parent
PASSED_ON = ("Content-Type", "Accept", "Last-Event-ID")


async def show(request: web.Request) -> web.FileResponse:
    return web.FileResponse(HERE / "index.html")


async def hand_on(request: web.Request) -> web.StreamResponse:
    """What comes is written at once: a stream of events must not be gathered."""
    session, url = request.app["session"], request.app["url"]
    headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    if token := os.environ.get("TOPICS_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"  # the page needs none: let it do only what this key may
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
        raise web.HTTPBadGateway(text="the server does not answer") from None


async def session(app: web.Application):  # type: ignore[no-untyped-def]
    app["session"] = ClientSession(timeout=ClientTimeout(total=None, sock_connect=5), auto_decompress=False)
    yield
    await app["session"].close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--url", default=os.environ.get("TOPICS_URL", "http://127.0.0.1:4000"))
    wanted = parser.parse_args()
    app = web.Application()
    app["url"] = wanted.url.rstrip("/")
    app.cleanup_ctx.append(session)
    app.router.add_get("/", show)
    app.router.add_route("*", "/v0/{rest:.*}", hand_on)
    # A page that is closed ends its stream at the server, too.
    web.run_app(app, host="127.0.0.1", port=wanted.port, handler_cancellation=True, shutdown_timeout=1)


if __name__ == "__main__":
    main()
