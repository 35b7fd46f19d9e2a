"""A page that searches again as its controls are moved: its state, its requests, and its server.

The server listens on loopback only, and requires its token.
"""

import json
import re
import secrets
import socket
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from pase.common.containers import FrozenDict
from pase.common.documents import attributes
from pase.common.words import duration, quantity
from pase.costs import REPLICATED, STATES
from pase.errors import PaseError, missing_extra
from pase.graph import Graph
from pase.graph.parts import cuts, with_cuts
from pase.machine import Machine
from pase.planning.constraints import RECOMPUTE, Pin
from pase.planning.plan import Plan, configuration_text, scope_text, step_text
from pase.planning.planner import AUTO_NUMBER, WITHOUT_TIME, settings_of, whole_graph
from pase.planning.session import Answer, Session
from pase.planning.steps import TrainingStep
from pase.sharding.shards import divisors
from pase.views.drawing.plans import repeated_blocks
from pase.views.reports.document import embedded, page_text

FEWER, MORE = 4, 2
"""How often the plan's number of devices is halved and doubled at most."""
BANDWIDTH_STEPS = range(-16, 17)
"""Steps of a quarter of an octave, from a sixteenth to sixteen times the machine's bandwidth."""
MEMORY_STEPS = 24
"""Number of steps from the memory of the lightest strategy to that of a device."""
NO_TIME = (
    "Costs are those of the model 'paper', which knows no time: stages, micro-batches, states of weights and "
    "recomputation can be moved under alpha_beta and step (--cost-model)."
)


Values = Sequence[tuple[str, Mapping[str, Any]]]
"""Positions of a control: text, and the settings of a search that it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A control on the page.

    Attributes:
        name: Its name in requests.
        label: Its label on the page.
        values: Its positions: settings of a search; each setting belongs to one control only.
        at: Its initial position.
        is_list: Whether it is a list; otherwise it is a slider.
    """

    name: str
    label: str
    values: Values
    at: int
    is_list: bool = False

    @property
    def texts(self) -> list[str]:
        """Texts of its positions."""
        return [text for text, _ in self.values]


class Planner:
    """Searches again as controls move.

    It has one state, which all pages show: the positions of all controls, and the answer to them.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        reload: Callable[[int], Graph] | None = None,
        time_limit_s: float | None = None,
        settings: Mapping[str, Any] = FrozenDict(),
    ) -> None:
        """Search the initial answer of the page.

        Args:
            plan: Plan that determines the initial positions of the controls.
            reload: As for `pase.search`; without, imported models keep their number of micro-batches.
            time_limit_s: Limit of the search of each answer.
            settings: Settings of searches that differ from those of the plan.
        """
        self.plan = plan
        graph = whole_graph(plan, reload)
        own: Mapping[str, Any] = {**settings_of(plan), **settings}
        self._has_time = own["cost_model"] != WITHOUT_TIME
        self.controls = tuple(_controls(plan, graph, own, may_reload=reload is not None))
        self._rows: KnownRows = {}
        self._lock = Lock()
        self._session = Session(
            graph,
            plan.num_devices,
            plan.machine,
            reload=reload,
            options={**own, "time_limit_s": time_limit_s},
        )
        self._at = {control.name: control.at for control in self.controls}
        self._error = ""

    def start(self) -> dict[str, Any]:
        """Return the initial contents of the page: its controls and the state."""
        plan = self.plan
        with self._lock:
            return {
                "model": plan.graph.name,
                "device": plan.machine.device.name,
                "note": "" if self._has_time else NO_TIME,
                "controls": [attributes(control, "name label texts is_list") for control in self.controls],
                "state": self._state(),
            }

    def _state(self) -> dict[str, Any]:
        """Return the positions of the controls, the last answer, and why these positions have none, or ""."""
        return {"at": self._at, "answer": told(self._session.answer, self._rows), "error": self._error}

    def replan(self, positions: object) -> dict[str, Any]:
        """Return the state after controls have moved.

        Args:
            positions: The position of every control, by name; untrusted input.

        Raises:
            PositionError: The positions are invalid; the state is unchanged.
        """
        at = self._checked(positions)
        changes: dict[str, Any] = {"constraints": self.plan.constraints, "modes": ()}
        for control in self.controls:
            for name, value in control.values[at[control.name]][1].items():
                # Modes, and constraints on them, combine those of all controls.
                changes[name] = (*changes[name], *value) if name in ("constraints", "modes") else value
        with self._lock:  # a session is not thread-safe
            self._at, self._error = at, ""
            try:
                self._session.replan(**changes)
            except PaseError as error:
                self._error = str(error)
            return self._state()

    def _checked(self, positions: object) -> dict[str, int]:
        last = {control.name: len(control.values) - 1 for control in self.controls}
        if isinstance(positions, Mapping) and set(positions) == set(last):
            found = dict(positions)
            if all(type(found[name]) is int and 0 <= found[name] <= last[name] for name in last):
                return found
        expected = ", ".join(f"{name} (0 to {most})" for name, most in last.items())
        raise PositionError(f"expected the position of every control, {expected}")


class PositionError(PaseError):
    """The request does not contain valid positions of the page's controls."""


def _controls(plan: Plan, graph: Graph, own: Mapping[str, Any], *, may_reload: bool) -> Iterator[Control]:
    """Yield the controls for a plan; graph: of its whole batch; own: initial settings."""
    has_time = own["cost_model"] != WITHOUT_TIME
    yield _devices_control(plan)
    yield _bandwidth_control(plan)
    yield _memory_control(plan, "not set" if has_time else "no limit")
    if not has_time:
        return
    count, modes = plan.micro_batches, own["modes"]
    # Any number of devices may be chosen on the page; the search reports numbers that do not divide.
    numbers = [n for n in divisors(plan.num_devices) if n <= len(cuts(with_cuts(graph))) + 1]
    yield _numbers_control("stages", "Stages", numbers, own["stages"])
    counts = [count]
    if may_reload or not graph.framework:
        examples = max(graph.batch[operator.name].examples for operator in graph.operators)
        counts = sorted({*(n for n in divisors(examples) if n & (n - 1) == 0), count})
    yield _numbers_control("micro_batches", "Micro-batches", counts, own["micro_batches"])
    used = tuple(mode for mode in modes if mode in STATES)
    states: list[tuple[str, Mapping[str, Any]]] = [("replicated", {})]
    states += [(f"{state} where it is cheaper", {"modes": (state,)}) for state in STATES[1:]]
    states.append(("any of these where it is cheaper", {"modes": STATES[1:]}))
    for state in STATES[1:]:
        everywhere = Pin(layers=("*",), splits={}, is_partial=True, state=state, where="the state of all weights")
        states.append((f"{state} everywhere", {"modes": (state,), "constraints": (everywhere,)}))
    if len(used) > 1 and used != STATES[1:]:
        states.append((f"{' or '.join(used)} where it is cheaper", {"modes": used}))
    at = next(i for i, (_, changes) in enumerate(states) if changes.get("modes", ()) == used)
    yield Control(name="state", label="State of weights (ZeRO)", values=states, at=at, is_list=True)
    again = [("nothing", {}), ("what is cheaper to recompute", {"modes": (RECOMPUTE,)})]
    yield Control(name="recompute", label="Recomputed", values=again, at=int(RECOMPUTE in modes), is_list=True)


def _numbers_control(name: str, label: str, numbers: Sequence[int], own: int | str) -> Control:
    values: list[int | str] = [*sorted({*numbers, *([own] if isinstance(own, int) else [])}), AUTO_NUMBER]
    rows = [(str(value), {name: value}) for value in values]
    return Control(name=name, label=label, values=rows, at=values.index(own))


def _devices_control(plan: Plan) -> Control:
    numbers = [
        int(p)
        for p in (plan.num_devices * 2.0**k for k in range(-FEWER, MORE + 1))
        if p == int(p) and _spans(plan.machine, int(p))
    ]
    rows = [(str(number), {"devices": number}) for number in numbers]
    return Control(name="devices", label="Devices", values=rows, at=numbers.index(plan.num_devices))


def _bandwidth_control(plan: Plan) -> Control:
    name, bandwidth = "bandwidth_bytes_per_s", _slowest(plan.machine, plan.num_devices)
    values = [bandwidth * 2 ** (step / 4) for step in BANDWIDTH_STEPS]
    rows = [(quantity(value, "B/s"), {name: None if value == bandwidth else value}) for value in values]
    return Control(name=name, label="Bandwidth of the slowest link", values=rows, at=values.index(bandwidth))


def _memory_control(plan: Plan, unset: str) -> Control:
    """Return the memory control; unset: text of its position without a limit."""
    name, most, limit = "device_memory_bytes", plan.machine.device.memory_bytes, plan.device_memory_bytes
    least = min(most / 64, plan.memory.total_bytes / 16)
    values = [int(least * (most / least) ** (step / MEMORY_STEPS)) for step in range(MEMORY_STEPS + 1)]
    if limit is not None:
        values = sorted({*values, limit})
    rows: list[tuple[str, Mapping[str, Any]]] = [(quantity(value, "B"), {name: value}) for value in values]
    rows.append((unset, {name: None}))
    at = len(values) if limit is None else values.index(limit)
    return Control(name=name, label="Memory of a device for a step", values=rows, at=at)


Rows = list[tuple[list[int], int]]
KnownRows = dict[tuple[Hashable, ...], Rows]
"""Cache of rows by the names and texts of layers: most positions of a slider share them with others."""


def told(answer: Answer, known_rows: KnownRows | None = None) -> dict[str, Any]:
    """Return an answer as the page shows it; known_rows is a cache that is extended.

    layers: [V] names. of: [V] index into `choices` of each layer's text: its stage, configuration, state of weights and
    whether it is recomputed. rows: (numbers of the layers in it, number of repetitions of its block): layers of
    repeated blocks are in one row.
    """
    step = answer.step
    texts = layer_texts(step)
    names = tuple(step.graph.index)
    known_rows = {} if known_rows is None else known_rows
    if (names, *texts) not in known_rows:
        known_rows[names, *texts] = rows_of(step.graph, texts)
    choices = sorted(set(texts))
    number = {text: i for i, text in enumerate(choices)}
    certificate = f"gap {answer.gap:.2%}"
    if answer.exact:
        certificate = f"proven optimal{scope_text(answer.constraints, answer.device_memory_bytes)}"
    made_up = step_text(
        micro_batches=step.micro_batches,
        num_stages=len(step.bounds),
        num_groups=step.num_groups,
        num_devices=step.num_devices,
        schedule=step.schedule,
    )
    return {
        "cost": quantity(answer.total_cost, answer.cost_unit),
        "total_cost": answer.total_cost,
        "exact": answer.exact,
        "certificate": certificate,
        "speedup": answer.baselines["data_parallel"] / answer.total_cost if answer.total_cost else 1.0,
        "time": duration(answer.time_s),
        "devices": step.num_devices,
        "step": made_up,
        "layers": names,
        "choices": choices,
        "of": [number[text] for text in texts],
        "rows": known_rows[names, *texts],
    }


LayerText = tuple[str, str, str, str]
"""A layer's stage, configuration, state of weights, and treatment of saved tensors; "" for defaults."""


def layer_texts(step: TrainingStep) -> list[LayerText]:
    """Return the texts of each layer of a step."""
    has_stages = len(step.bounds) > 1
    known: dict[Hashable, LayerText] = {}
    texts = []
    for layer in step.layers:
        key = tuple(layer.splits.items()), layer.state, layer.is_recomputed, layer.stage
        if key not in known:
            known[key] = (
                str(layer.stage) if has_stages else "",
                configuration_text(layer.splits, step.group),
                layer.state if layer.state != REPLICATED else "",
                "recomputed" if layer.is_recomputed else "",
            )
        texts.append(known[key])
    return texts


def rows_of(graph: Graph, texts: Sequence[Hashable]) -> Rows:
    """Return the rows of a table of layers, in which a block repeated consecutively occurs once."""
    layer_keys = [
        (operator.kind, tuple(operator.extents.items()), text)
        for operator, text in zip(graph.operators, texts, strict=True)
    ]
    rows: Rows = []
    at = 0
    for block in repeated_blocks(graph, layer_keys):
        rows += [([vertex], 1) for vertex in range(at, block.first)]
        for vertex in range(block.first, block.first + block.period):
            rows.append(([vertex + block.period * turn for turn in range(block.count)], block.count))
        at = block.end
    return rows + [([vertex], 1) for vertex in range(at, len(texts))]


def _slowest(machine: Machine, num_devices: int) -> float:
    return min(level.bandwidth_bytes_per_s for level in machine.levels_spanned(num_devices))


def _spans(machine: Machine, num_devices: int) -> bool:
    """Return whether a machine has this number of devices, in whole groups."""
    try:
        machine.levels_for(num_devices)
    except PaseError:
        return False
    return True


# -- the server

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 10_000


def serve(
    plan: Plan,
    *,
    port: int = 0,
    reload: Callable[[int], Graph] | None = None,
    time_limit_s: float | None = None,
    settings: Mapping[str, Any] = FrozenDict(),
    on_ready: Callable[[str], None],
) -> None:
    """Serve the page of a plan until the process is interrupted.

    Args:
        plan: Initial plan.
        port: Port to listen on; 0 for any free one.
        reload: As for `Planner`.
        time_limit_s: Limit of the search of each answer.
        settings: As for `Planner`.
        on_ready: Called with the address of the page.

    Raises:
        OSError: The port is taken.
        MissingExtraError: starlette or uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise missing_extra("the page of 'pase serve' needs starlette and uvicorn", "serve") from None
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen()  # early requests wait until the page is served
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        planner = Planner(plan, reload=reload, time_limit_s=time_limit_s, settings=settings)
        app = application(planner, port=port, token=token)
        on_ready(f"http://{LOOPBACK}:{port}/?token={token}")
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])


def application(planner: Planner, *, port: int, token: str) -> Any:
    """Return the ASGI application: the page at /, answers at /replan, and nothing for unauthorised requests.

    A request must carry the token, and name this machine and port as its host. Pages of other sites cannot send such a
    request, even under a domain name that resolves to this address.
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
            return Response(status_code=400)  # nothing reads it
        except (ValueError, RecursionError):
            return JSONResponse({"error": "the request is not JSON"}, 400)
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
    """ASGI middleware that adds missing security headers to every response."""

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
    """Return the page with its initial contents. It loads nothing, and only runs its own script."""
    pieces = {
        "nonce": nonce,
        "style": page_text("style.css") + page_text("served/served.css"),
        "data": embedded(start),
        "program": page_text("served/served.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], page_text("served/index.html"))


def _headers(nonce: str) -> dict[str, str]:
    """Return the headers of a response; nonce: of the page's style and script, "" for other responses."""
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    if nonce:
        policy += [f"script-src 'nonce-{nonce}'", f"style-src 'nonce-{nonce}'", "img-src data:", "connect-src 'self'"]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
