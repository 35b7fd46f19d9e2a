"""Shards: which device holds which part of which tensor, and what is transferred; independent of frameworks and costs.

There are two descriptions, each tested against the other. *Closed form* is arrays over many configurations, for cost
tables (`shards`, `overlap`, `halos.halo_fetch`). *Exact* is boxes of index ranges on each device, for programs
(`boxes`, `layouts`, `halos`, `reshard`). `edges` and `traffic` compute the transfers of a placed graph.
"""
