"""The computation graph: iteration spaces, accesses, operators, and a builder to write networks with."""

from pase.graph.document import graph_document, graph_from_document
from pase.graph.graph import Edge, Graph
from pase.graph.operator import (
    Access,
    AllReduce,
    AllToAll,
    Dim,
    DimIndex,
    Exchange,
    Handoff,
    Intermediate,
    Operator,
    Pipeline,
    Relayout,
    Role,
    Scalar,
    SliceOf,
    Window,
    Work,
)
from pase.graph.precision import ITEMSIZES, PRECISIONS, LayerTypes, Precision, precision_of, rounding, uniform
from pase.graph.verify import Builder, Tensor, verify, verify_operator

__all__ = [
    "ITEMSIZES",
    "PRECISIONS",
    "Access",
    "AllReduce",
    "AllToAll",
    "Builder",
    "Dim",
    "DimIndex",
    "Edge",
    "Exchange",
    "Graph",
    "Handoff",
    "Intermediate",
    "LayerTypes",
    "Operator",
    "Pipeline",
    "Precision",
    "Relayout",
    "Role",
    "Scalar",
    "SliceOf",
    "Tensor",
    "Window",
    "Work",
    "graph_document",
    "graph_from_document",
    "precision_of",
    "rounding",
    "uniform",
    "verify",
    "verify_operator",
]
