"""Shards: which device holds which part of which tensor, and what moves between them; no framework, cost or solver.

Two descriptions, each tested against the other: *closed form*, arrays over many configurations, for cost tables
(`shards`, `overlap`, `halos.halo_fetch`); and *exact*, boxes of index ranges on each device, for
programs (`boxes`, `layouts`, `halos`, `reshard`, `sums`). `edges` and `traffic` say what a placed graph moves.
"""
