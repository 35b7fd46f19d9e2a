"""Names that a model file may hold, made to break out of whatever they are written into."""

from dataclasses import replace
from functools import cache

from pase import Builder, Graph, Plan, search
from pase.graph import Operator
from pase.graph.operators import dense, softmax_loss
from tests.networks import slow_machine

HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "</style></svg><!-- ]]> &lt; &amp;",
    "'\"><b onmouseover='alert(3)'>",
    "<a href=\"javascript:alert(4)\">",
    "\"]; evil [label=\"pwned\"]; n0 -> n1",
    "a\\\"]; b\\",
    "end --> subgraph x[\"`**bold**`\"]; click n0 call alert(5)",
    "#quot;#35;#lt;b#gt; %%{init: {}}%%",
    "---\ntitle: x\n---",
    "line one\nline two\r\nline three",
    "tab\tand\x00\x07\x1b[31m\x7f\x85\u2028\u2029 and \u202e right to left",
    "=1+1",
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1+1)*cmd",
    "\t=1+1",
    "\r=1+1",
    "a,b;c\"d\"\n=2+2",
    "\"\"\"); import os; os.system(\"touch pwned\") #",
    "'''\nimport os\n'''",
    "\\",
    "\\N{BULLET} \\x41 {0} {name} %s ${x} $(touch pwned) `touch pwned`",
    "../../etc/passwd",
    "",
    " ",
    "__proto__",
    "constructor",
    "слой 层 😀 ﷽ e\u0301",
    "lone \ud800 surrogate",
    "long " * 2000,
)  # fmt: skip
"""Unique; the last has 10,000 characters. A lone surrogate is what JSON can hold and UTF-8 cannot."""


TAME_NAMES = tuple(
    f"tame{i}" if not name or (name.isalpha() and name.isascii()) else f"tame {i}"
    for i, name in enumerate(HOSTILE_NAMES)
)
"""As many names that harm nothing, identifiers where those are."""


@cache
def chain(names: tuple[str, ...], *, everywhere: bool = False) -> Graph:
    """Return a chain of dense layers with these names for layers, dims, shared weights, arguments and the model.

    everywhere: for kinds and tensors, too. The graph can then be searched but not emitted: its kinds are unknown.
    """

    def named(position: int, operator: Operator) -> Operator:
        if not everywhere:
            return operator
        name = names[position]
        reads = tuple(replace(access, tensor=f"{access.tensor}{name}") for access in operator.reads)
        writes = tuple(replace(access, tensor=f"{access.tensor}{name}") for access in operator.writes)
        # Nobody knows what a kind of that name computes.
        return replace(operator, kind=name, reads=reads, writes=writes, body=None)

    net = Builder(names[0])
    x = net.input((16, 16))
    for i, name in enumerate(names):
        b, n, c = (f"{dim}{names[(i + j) % len(names)]}" for j, dim in enumerate("bnc"))

        def factory(name: str, *shapes: tuple[int, ...], i: int = i, **options: object) -> Operator:
            return named(i, dense(name, *shapes, **options))  # type: ignore[arg-type]

        x = net.add(factory, name, x, lead=(b,), reduce=(c,), out=((n, 16),), shared=f"w{names[i - i % 2]}")
    net.add(softmax_loss, "loss", x, dims=("b", names[1]))
    return net.build({"batch": 16} | {name: name for name in names})


@cache
def planned(names: tuple[str, ...], *, everywhere: bool = False) -> Plan:
    """Return a plan of `chain` on 4 slow devices of a machine that has such names, too; its layers are split."""
    machine = slow_machine()
    machine = replace(
        machine,
        name=names[1],
        description=names[2],
        device=replace(machine.device, name=names[3]),
        levels=tuple(replace(level, name=f"{level.name}{names[5]}") for level in machine.levels),
    )
    return search(chain(names, everywhere=everywhere), 4, machine=machine)


def hostile_plan(*, everywhere: bool = False) -> Plan:
    """Return the plan of a graph that has these names wherever a graph has names; everywhere: for kinds, too."""
    return planned(HOSTILE_NAMES, everywhere=everywhere)


def tame_plan() -> Plan:
    """Return the same plan of a graph whose names harm nothing."""
    hostile, tame = planned(HOSTILE_NAMES), planned(TAME_NAMES)
    layers = (
        replace(own, splits=dict(zip(own.splits, other.splits.values(), strict=True)), devices=other.devices)
        for own, other in zip(tame.layers, hostile.layers, strict=True)
    )
    return replace(tame, layers=tuple(layers))
