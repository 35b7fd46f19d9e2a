"""Networks for the tests of the integrated model."""

from functools import cache

from pase import Graph, load
from pase.studies.integrated.chain import Chain, chain_of
from pase.studies.integrated.equations import Network

CORI = Network(latency_s=2e-6, s_per_byte=1 / 6e9)
"""The papers' machine."""


@cache
def alexnet_graph() -> Graph:
    """The papers' network: two towers."""
    return load("alexnet", batch=4, arguments={"grouped": True})


@cache
def alexnet() -> Chain:
    return chain_of(alexnet_graph())
