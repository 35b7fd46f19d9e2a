"""Where the boxes and lines of a plan's graph stand on the page: folded, and whole."""

from typing import Any

from pase.planning.plan import Plan
from pase.views.drawing import arranged, folded_plan

BOX = (168.0, 44.0)
"""Width and height of a layer's box, in CSS pixels at scale 1."""


def drawings(plan: Plan) -> dict[str, Any]:
    """Return the drawing with repeated blocks folded, and the one of every layer."""
    return {"folded": _drawing(plan, is_folded=True), "full": _drawing(plan, is_folded=False)}


def _drawing(plan: Plan, *, is_folded: bool) -> dict[str, Any]:
    graph, repeats = folded_plan(plan, is_folded=is_folded)
    drawn = arranged(graph, repeats, [BOX] * len(graph.vertices))
    return {
        "width": round(drawn.width, 1),
        "height": round(drawn.height, 1),
        "vertices": [
            {
                "layer": layer,
                "x": round(x, 1),
                "y": round(y, 1),
                "w": BOX[0],
                "h": BOX[1],
                "count": len(graph.members[layer]),
                "members": list(graph.members[layer]),
            }
            for layer, (x, y) in zip(graph.vertices, drawn.positions, strict=True)
        ],
        "edges": [
            {
                "edges": list(edge.edges),
                "points": [[round(x, 1), round(y, 1)] for x, y in route],
                "back": edge.is_loop_back,
            }
            for edge, route in zip(graph.edges, drawn.routes, strict=True)
        ],
        "blocks": [
            {
                "x": round(frame.x, 1),
                "y": round(frame.y, 1),
                "w": round(frame.width, 1),
                "h": round(frame.height, 1),
                "count": frame.repeat.count,
                "label": f"×{frame.repeat.count}",
            }
            for frame in drawn.frames
        ],
    }
