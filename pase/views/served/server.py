"""The server of the page: on loopback alone, for those who have its token."""

import json
import re
import secrets
import socket
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from pase.errors import missing_extra
from pase.planning.plan import Plan
from pase.views.reports.document import embedded
from pase.views.served.planner import Planner

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 10_000


def serve(plan: Plan, *, port: int = 0, time_limit_s: float | None = None, on_ready: Callable[[str], None]) -> None:
    """Serve the page of a plan until the process is interrupted; on_ready: is called with its address.

    port: 0 for any that is free. time_limit_s: for the search of each answer. Raises OSError where the port is taken,
    MissingExtraError where starlette or uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise missing_extra("the page of 'pase serve' needs starlette and uvicorn", "serve") from None
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen()  # who opens the page at once waits until it is served
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        app = application(Planner(plan, time_limit_s=time_limit_s), port=port, token=token)
        on_ready(f"http://{LOOPBACK}:{port}/?token={token}")
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])


def application(planner: Planner, *, port: int, token: str) -> Any:
    """Return the ASGI application: the page at /, answers at /replan, and nothing to those who should not ask.

    A request must carry the token, and name this machine and port as its host: no page of another site can send one
    that does, whatever name it gives this address.
    """
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, JSONResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise missing_extra("the page of 'pase serve' needs starlette and uvicorn", "serve") from None
    hosts = {f"{LOOPBACK}:{port}", f"localhost:{port}"}

    def is_allowed(request: Request) -> bool:
        given = request.query_params.get("token", "")
        is_known = secrets.compare_digest(given.encode(), token.encode())
        origin = request.headers.get("origin")
        is_own = origin is None or origin in {f"http://{host}" for host in hosts}
        return is_known and is_own and request.headers.get("host") in hosts

    async def page(request: Request) -> Response:
        if not is_allowed(request):
            return _forbidden()
        nonce = secrets.token_urlsafe(16)
        start = await run_in_threadpool(planner.start)
        return HTMLResponse(rendered(start, nonce), headers=_headers(nonce))

    async def replan(request: Request) -> Response:
        if not is_allowed(request):
            return _forbidden()
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": "the request is too large"}, 413)
        try:
            changes = json.loads(body)
        except ValueError:
            return JSONResponse({"error": "the request is no JSON"}, 400)
        return JSONResponse(await run_in_threadpool(planner.replan, changes), headers=_headers(""))

    async def nothing(request: Request) -> Response:
        return Response("not found", 404) if is_allowed(request) else _forbidden()

    def _forbidden() -> Response:
        return Response("forbidden: open the address that 'pase serve' printed", 403)

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/replan", replan, methods=["POST"]),
            Route("/{path:path}", nothing),
        ]
    )


def rendered(start: dict[str, Any], nonce: str) -> str:
    """Return the page; start: what it shows first. It loads nothing, and runs its own script alone."""
    pieces = {
        "nonce": nonce,
        "style": _text("pase.views.reports", "style.css") + _text("pase.views.served", "served.css"),
        "data": embedded(start),
        "program": _text("pase.views.served", "served.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], _text("pase.views.served", "index.html"))


def _text(package: str, name: str) -> str:
    return files(package).joinpath("page", name).read_text(encoding="utf-8")


def _headers(nonce: str) -> dict[str, str]:
    """Return the headers of an answer; nonce: of the page's style and script, "" for what is no page."""
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    if nonce:
        policy += [f"script-src 'nonce-{nonce}'", f"style-src 'nonce-{nonce}'", "img-src data:", "connect-src 'self'"]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
