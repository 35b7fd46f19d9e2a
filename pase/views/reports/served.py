"""A page that plans again while its sliders are moved: what it asks for and is told, and who serves it.

The server listens on loopback alone, and answers those who have its token.
"""

import json
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from pase.analysis.explanation.why_not import configuration_text
from pase.common.words import duration, quantity
from pase.errors import PaseError, missing_extra
from pase.graph import Graph
from pase.machine import Machine
from pase.planning.plan import Plan, scope_text
from pase.planning.planner import settings_of
from pase.planning.session import Answer, Session
from pase.views.drawing.plans import repeated_blocks
from pase.views.reports.document import embedded, page_text

FEWER, MORE = 4, 2
"""How often the devices of the plan are halved and doubled at most."""
BANDWIDTH_STEPS = range(-16, 17)
"""In quarters of a doubling, from a sixteenth to sixteen times the machine's."""
MEMORY_STEPS = 24
"""From what the lightest strategy might take to what a device has."""


class Planner:
    """Plans again as sliders move.

    It has one state, which every page shows: the positions of all sliders, and what was answered to them.
    """

    def __init__(self, plan: Plan, *, time_limit_s: float | None = None) -> None:
        """Plan what the page starts from.

        Args:
            plan: Where the sliders stand at first.
            time_limit_s: For the search of each answer.
        """
        self.plan = plan
        self._sliders = self._made_sliders()
        self._rows: KnownRows = {}
        self._lock = Lock()
        self._session = Session(
            plan.graph, plan.num_devices, plan.machine, options={**settings_of(plan), "time_limit_s": time_limit_s}
        )
        self._at = {slider["name"]: slider["at"] for slider in self._sliders}
        self._error = ""

    def start(self) -> dict[str, Any]:
        """Return what the page shows first: its sliders, the names of layers, and the state."""
        plan = self.plan
        with self._lock:
            return {
                "model": plan.graph.name,
                "device": plan.machine.device.name,
                "layers": list(self._session.answer.problem.graph.index),
                "sliders": [{key: slider[key] for key in ("name", "label", "texts")} for slider in self._sliders],
                "state": self._state(),
            }

    def _state(self) -> dict[str, Any]:
        """Return the positions of the sliders, the last answer, and why there is none to these positions, or ""."""
        return {"at": self._at, "answer": told(self._session.answer, self._rows), "error": self._error}

    def _made_sliders(self) -> list[dict[str, Any]]:
        """Return each slider's name, label, texts and values, and where it stands at first."""
        plan = self.plan
        bandwidth = _slowest(plan.machine, plan.num_devices)
        devices = [
            int(p)
            for p in (plan.num_devices * 2.0**k for k in range(-FEWER, MORE + 1))
            if p == int(p) and _spans(plan.machine, int(p))
        ]
        bandwidths = [bandwidth * 2 ** (step / 4) for step in BANDWIDTH_STEPS]
        most = plan.machine.device.memory_bytes
        least = min(most / 64, plan.memory.total_bytes / 16)
        memory = [int(least * (most / least) ** (step / MEMORY_STEPS)) for step in range(MEMORY_STEPS + 1)]
        limit = plan.device_memory_bytes
        if limit is not None:
            memory = sorted({*memory, limit})
        rows: list[tuple[str, str, list[Any], list[str], int]] = [
            ("devices", "Devices", devices, list(map(str, devices)), devices.index(plan.num_devices)),
            (
                "bandwidth_bytes_per_s",
                "Bandwidth of the slowest link",
                [None if value == bandwidth else value for value in bandwidths],
                [quantity(value, "B/s") for value in bandwidths],
                bandwidths.index(bandwidth),
            ),
            (
                "device_memory_bytes",
                "Memory of a device for a step",
                [*memory, None],
                [*(quantity(value, "B") for value in memory), "no limit"],
                len(memory) if limit is None else memory.index(limit),
            ),
        ]
        names = "name", "label", "values", "texts", "at"
        return [dict(zip(names, row, strict=True)) for row in rows]

    def replan(self, positions: object) -> dict[str, Any]:
        """Return the state after the sliders have moved.

        Args:
            positions: The position of every slider, by name; from the page, and not trusted.

        Raises:
            PositionError: They are not such positions; the state stays as it is.
        """
        at = self._checked(positions)
        values = {slider["name"]: slider["values"][at[slider["name"]]] for slider in self._sliders}
        with self._lock:  # a session serves one thread
            self._at, self._error = at, ""
            try:
                self._session.replan(**values)
            except PaseError as error:
                self._error = str(error)
            return self._state()

    def _checked(self, positions: object) -> dict[str, int]:
        last = {slider["name"]: len(slider["values"]) - 1 for slider in self._sliders}
        if isinstance(positions, Mapping) and set(positions) == set(last):
            found = dict(positions)
            if all(type(found[name]) is int and 0 <= found[name] <= last[name] for name in last):
                return found
        expected = ", ".join(f"{name} (0 to {most})" for name, most in last.items())
        raise PositionError(f"expected the position of every slider, {expected}")


class PositionError(PaseError):
    """What was sent are not the positions of the page's sliders."""


Rows = list[tuple[list[int], int]]
KnownRows = dict[tuple[str, ...], Rows]
"""Rows of one graph, by the configuration of each layer: most positions of a slider have one in common with others."""


def told(answer: Answer, known_rows: KnownRows | None = None) -> dict[str, Any]:
    """Return an answer as the page shows it; known_rows: of its graph, is added to.

    of: [V] the number of each layer's configuration among `configurations`. rows: (numbers of the layers in it, how
    often its block comes): layers of blocks that repeat are in one row.
    """
    problem, choice = answer.problem, answer.solution.choice
    known: dict[tuple[int, int], str] = {}
    texts = []
    for vertex, chosen in enumerate(choice):
        key = id(problem.configurations[vertex]), chosen
        if key not in known:
            known[key] = configuration_text(problem.splits(vertex, chosen), problem.num_devices)
        texts.append(known[key])
    known_rows = {} if known_rows is None else known_rows
    if (*texts,) not in known_rows:
        known_rows[*texts,] = rows_of(problem.graph, texts)
    configurations = sorted(set(texts))
    number = {text: i for i, text in enumerate(configurations)}
    certificate = f"gap {answer.gap:.2%}"
    if answer.exact:
        certificate = f"proven optimal{scope_text(answer.constraints, answer.device_memory_bytes)}"
    return {
        "cost": quantity(answer.total_cost, answer.cost_unit),
        "total_cost": answer.total_cost,
        "exact": answer.exact,
        "certificate": certificate,
        "speedup": answer.baselines["data_parallel"] / answer.total_cost if answer.total_cost else 1.0,
        "time": duration(answer.time_s),
        "devices": problem.num_devices,
        "configurations": configurations,
        "of": [number[text] for text in texts],
        "rows": known_rows[*texts,],
    }


def rows_of(graph: Graph, texts: Sequence[str]) -> Rows:
    """Return the rows of a table of layers, in which a block that comes several times in a row stands once."""
    alike = [
        (operator.kind, tuple(operator.extents.items()), text)
        for operator, text in zip(graph.operators, texts, strict=True)
    ]
    rows: Rows = []
    at = 0
    for block in repeated_blocks(graph, alike):
        rows += [([vertex], 1) for vertex in range(at, block.first)]
        for vertex in range(block.first, block.first + block.period):
            rows.append(([vertex + block.period * turn for turn in range(block.count)], block.count))
        at = block.end
    return rows + [([vertex], 1) for vertex in range(at, len(texts))]


def _slowest(machine: Machine, num_devices: int) -> float:
    return min(level.bandwidth_bytes_per_s for level in machine.levels_spanned(num_devices))


def _spans(machine: Machine, num_devices: int) -> bool:
    """Return whether a machine has so many devices, in whole groups."""
    try:
        machine.levels_for(num_devices)
    except PaseError:
        return False
    return True


# -- the server

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
        from starlette.middleware import Middleware
        from starlette.requests import ClientDisconnect, Request
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
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    return JSONResponse({"error": "the request is too large"}, 413)
            positions = json.loads(body)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except (ValueError, RecursionError):
            return JSONResponse({"error": "the request is no JSON"}, 400)
        try:
            return JSONResponse(await run_in_threadpool(planner.replan, positions))
        except PositionError as error:
            return JSONResponse({"error": str(error)}, 400)

    async def nothing(request: Request) -> Response:
        return Response("not found", 404) if is_allowed(request) else _forbidden()

    def _forbidden() -> Response:
        return Response("forbidden: open the address that 'pase serve' printed", 403)

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/replan", replan, methods=["POST"]),
            Route("/{path:path}", nothing),
        ],
        middleware=[Middleware(_Secured)],
    )


class _Secured:
    """ASGI middleware that gives every response the security headers that it lacks."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                for name, value in _headers("").items():
                    if name.lower().encode() not in given:
                        message["headers"].append((name.lower().encode(), value.encode()))
            await send(message)

        await self.app(scope, receive, send_secured)


def rendered(start: dict[str, Any], nonce: str) -> str:
    """Return the page; start: what it shows first. It loads nothing, and runs its own script alone."""
    pieces = {
        "nonce": nonce,
        "style": page_text("style.css") + page_text("served/served.css"),
        "data": embedded(start),
        "program": page_text("served/served.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], page_text("served/index.html"))


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
