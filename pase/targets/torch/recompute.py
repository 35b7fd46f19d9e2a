"""Recomputation: what a run of layers makes for its backward pass is made again there instead of kept.

A run is a sequence of layers that stand one after the other. It keeps what it reads of others. When gradients of what
it writes are all there, its forward pass runs again, with its moves and sums, on all ranks at the same place among
these; then its backward pass runs.
"""

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from pase.targets.torch.states import GatheredLayers


class Recomputed(nn.Module):
    """A part of a rank's graph that keeps what it is given alone.

    body: returns a tuple. gathered: the layers whose weights are there while these compute; it keeps none of them.
    """

    def __init__(self, body: nn.Module, gathered: GatheredLayers) -> None:
        super().__init__()
        self.body, self.gathered = body, gathered

    def forward(self, *values: Any) -> Any:
        # To its end, since a rank that stopped early would leave others waiting in a sum. Nothing in it is random.
        return checkpoint(self._begun, *values, use_reentrant=False, preserve_rng_state=False, early_stop=False)

    def _begun(self, *values: Any) -> tuple[Any, ...]:
        # The backward pass gathers a weight again as it comes to need it: a run would have all of its own at once.
        with self.gathered.freed_here():
            made = self.body(*values)
        if torch.compiler.is_compiling():
            # A compiled backward pass has one order.
            return tuple(made)
        moving = [x for x in made if x.requires_grad]
        passed = iter(_Begin.apply(*moving) if moving else ())
        return tuple(next(passed) if x.requires_grad else x for x in made)


class _Begin(torch.autograd.Function):
    """Leaves tensors as they are; the first function of a run on the way back, it has the run computed again.

    Otherwise the run would be computed again where a function first needs what it kept, which need not be at the same
    place among moves and sums on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, *made: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(made[0].new_empty(0))
        return tuple(x.view_as(x) for x in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        return gradients


def gather_runs(module: fx.GraphModule, runs: Sequence[Sequence[str]], gathered: GatheredLayers) -> None:
    """Have the nodes of each run, by the names of its layers, be one call of a module that is computed again."""
    for number, layers in enumerate(runs):
        names = frozenset(layers)
        own = [n for n in module.graph.nodes if n.op.startswith("call") and n.meta["layer"] in names]
        if own:
            _gather(module, own, f"run_{number + 1}", gathered)


def _gather(module: fx.GraphModule, own: Sequence[fx.Node], name: str, gathered: GatheredLayers) -> None:
    graph, members = module.graph, set(own)
    # What is computed of the run goes behind it, all else that stands in its midst before it.
    behind, node, last = set[fx.Node](), own[0], own[-1]
    while node is not last:
        following = node.next
        if node not in members:
            if behind.isdisjoint(node.all_input_nodes) and members.isdisjoint(node.all_input_nodes):
                own[0].prepend(node)
            else:
                behind.add(node)
        node = following
    assert behind.isdisjoint(x for node in own for x in node.all_input_nodes), f"{name} needs what is computed of it"
    given = list(dict.fromkeys(x for node in own for x in node.all_input_nodes if x not in members))
    made = [node for node in own if not members.issuperset(node.users)]
    body = fx.Graph()
    inside = {x: body.placeholder(x.name) for x in given}
    for node in own:
        inside[node] = body.node_copy(node, inside.__getitem__)
    body.output(tuple(inside[node] for node in made))
    module.add_submodule(name, Recomputed(fx.GraphModule(module, body, "Run"), gathered))
    with graph.inserting_before(own[0]):
        found = graph.call_module(name, tuple(given))
        values = [graph.call_function(getitem, (found, place)) for place in range(len(made))]
    for node, value in zip(made, values, strict=True):
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in members)
    for node in reversed(own):
        graph.erase_node(node)
