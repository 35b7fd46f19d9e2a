"""Placement: which device holds which part of each layer (PaSE section II).

A device number is written in mixed-radix digits whose bases are the prime factors of p, most significant first. Each
layer assigns every digit to one prime factor of one of its splits, or to its replicas. If two adjacent layers assign a
digit to the same cut of the tensor between them, that cut needs no transfer. Placing a layer therefore means matching
its splits to the digits of its neighbours, which is cheap even for thousands of devices. The last step chooses which
digits number the devices within a node, so that neighbours share a node.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise, takewhile
from math import gcd, prod

import numpy as np

from pase.graph import Access, AllReduce, Edge, Graph, Operator
from pase.graph.operator import Indexed, access_dims
from pase.sharding.edges import edge_itemsizes
from pase.sharding.overlap import SharedSplit, shared_splits
from pase.sharding.shards import components, prime_factors, shard_size, split_columns, splits_of

Slot = tuple[str, int]
"""A prime factor of a dim's split: (dim, position among the split's factors, coarsest first)."""

Digits = frozenset[int]
"""Positions of digits in a device number."""

Moved = tuple[Digits, float]
"""(digits, bytes): bytes that devices differing in these digits each contribute to a reduction, or fetch."""

MAX_ORDERS = 20_000
"""Largest number of digit orders to evaluate; 4096 devices in nodes of 64 have 924."""

_WORTH_IT = 0.99
"""Improvements must exceed 1 %: traffic ignored here (shared weights, recurrent states) may outweigh a smaller gain."""


_SWEEPS = 4
"""Maximum number of sweeps over all layers: few layers change in the second sweep, hardly any later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Assignment of digits to the splits of one layer.

    Attributes:
        digits: For each digit of a device number, the slot that it selects; None for a replica.
        primes: For each dim that is split, the prime factors of its split, coarsest first.
    """

    digits: tuple[Slot | None, ...]
    primes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """An edge between layers u and v, by number, with the slots that cut its tensor at the same bounds.

    Attributes:
        edge: Number of the edge.
        size: Elements that stay on each device if every pair of slots has the same digit.
        pairs: (u's slot, v's slot, prime); where a pair's digits differ, one in `prime` devices keeps its elements.
    """

    edge: int
    u: int
    v: int
    size: float
    pairs: tuple[tuple[Slot, Slot, int], ...]


def place(
    graph: Graph,
    num_devices: int,
    splits: Sequence[Mapping[str, int]],
    *,
    group_sizes: Sequence[int] = (),
    by_level: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Return, for each layer, the device of each of its parts, [p].

    Layers are placed in topological order, each as close to its producers as possible, the largest tensors first (the
    paper's greedy assignment that maximises locality). Then each layer is placed again among all its neighbours as long
    as this reduces transfers. The same starts from digits in their plain order; the better result is returned.

    Args:
        graph: The graph.
        num_devices: p, the number of devices.
        splits: For each layer, the split factor of each iteration dim; their product divides num_devices. Parts are
            counted row-major over the split dims, in the order of the iteration space, then the replicas.
        group_sizes: Sizes of groups of consecutive devices that are closer to each other than to others, such as nodes.
        by_level: Whether all-reduces reduce within such groups first (`choose_order`).
    """
    bases = prime_factors(num_devices)
    kinds = _kinds(graph, splits)
    cuts = _edge_cuts(graph, splits, kinds)
    best: list[Placement] = []
    best_links: list[_Link] = []
    best_kept = -1.0
    for is_forward in (True, False) if len(set(bases)) > 1 else (True,):
        primes = _prime_orders(graph, splits, cuts, is_forward=is_forward)
        links = _links(graph, cuts, primes)
        incident: list[list[_Link]] = [[] for _ in graph.operators]
        for link in links:
            incident[link.u].append(link)
            incident[link.v].append(link)
        for is_greedy in (True, False):
            # Start from the producers' placements, or from digits in their plain order.
            placed: list[Placement] = []
            for vertex, of_dims in enumerate(primes):
                before = [link for link in incident[vertex] if link.v == vertex] if is_greedy else []
                placed.append(_assign(of_dims, bases, _affinities(vertex, before, placed)))
            _improve(placed, bases, incident)
            kept = _kept(links, placed)
            if kept > best_kept * (1 + 1e-12):
                best, best_links, best_kept = placed, links, kept
    order = tuple(range(len(bases)))
    if inner := [size for size in group_sizes if 1 < size < num_devices]:
        sums, fetches = _sums(graph, splits, kinds, best), _fetches(graph, splits, kinds, best, best_links)
        order = choose_order(bases, inner, sums, fetches, by_level=by_level)
    ordered_bases = [bases[i] for i in order]
    known: dict[Hashable, tuple[int, ...]] = {}
    found = []
    for operator, split, kind, placement in zip(graph.operators, splits, kinds, best, strict=True):
        key = kind, placement.digits, tuple(placement.primes.items())
        if key not in known:
            digits = [placement.digits[i] for i in order]
            known[key] = _devices(operator, split, ordered_bases, digits, placement.primes)
        found.append(known[key])
    return tuple(found)


def _kinds(graph: Graph, splits: Sequence[Mapping[str, int]]) -> list[int]:
    """Return [V] for each layer the first layer that is equal to it and has the same splits."""
    first: dict[Hashable, int] = {}
    keys = ((like, tuple(split.values())) for like, split in zip(graph.repeated, splits, strict=True))
    return [first.setdefault(key, vertex) for vertex, key in enumerate(keys)]


def _edge_cuts(
    graph: Graph, splits: Sequence[Mapping[str, int]], kinds: Sequence[int]
) -> list[tuple[SharedSplit, ...]]:
    """Return the stretches of each edge's tensor that both of its layers split, [E]; equal edges share a value."""
    known: dict[Hashable, tuple[SharedSplit, ...]] = {}
    found = []
    for edge in graph.edges:
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        key = kinds[u], edge.output, kinds[v], edge.input
        if key not in known:
            producer, consumer = graph.operators[u], graph.operators[v]
            written, read = producer.writes[edge.output], consumer.reads[edge.input]
            known[key] = _common_cuts(producer, written, splits[u], consumer, read, splits[v])
        found.append(known[key])
    return found


def _common_cuts(
    u: Operator, written: Access, u_split: Mapping[str, int], v: Operator, read: Access, v_split: Mapping[str, int]
) -> tuple[SharedSplit, ...]:
    sides = []
    for operator, split, access in ((u, u_split, written), (v, v_split, read)):
        parts = components(access, operator.extents)
        row = np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
        sides.append((parts, split_columns(parts, splits_of(operator, row))[0]))
    (u_parts, u_row), (v_parts, v_row) = sides
    return tuple(cut for cut in shared_splits(u_parts, u_row, v_parts, v_row) if cut.u_factor > 1 or cut.v_factor > 1)


def _prime_orders(
    graph: Graph, splits: Sequence[Mapping[str, int]], cuts: Sequence[tuple[SharedSplit, ...]], *, is_forward: bool
) -> list[dict[str, tuple[int, ...]]]:
    """Return, for each layer and dim, the prime factors of its split in an order shared with its neighbours.

    Cuts coincide only as far as both sides split by the same primes from the coarsest on: 12 and 24 parts share
    2 · 2 · 3 if the 24 are 2 · 2 · 3 · 2. A layer adopts the order of its producers (of its consumers, when the layers
    are visited backward), then the factors that it shares with the others.
    """
    seen: list[list[tuple[str, int, str]]] = [[] for _ in splits]
    ahead: list[list[tuple[str, int, str]]] = [[] for _ in splits]
    for edge, shared in zip(graph.edges, cuts, strict=True):
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        for cut in shared:
            if cut.u_above == cut.v_above == 1:
                (seen if is_forward else ahead)[v].append((cut.v_dim, u, cut.u_dim))
                (ahead if is_forward else seen)[u].append((cut.u_dim, v, cut.v_dim))
    orders: list[dict[str, tuple[int, ...]]] = [{} for _ in splits]
    for vertex in range(len(splits)) if is_forward else reversed(range(len(splits))):
        guides: dict[str, list[tuple[int, ...]]] = {}
        for dim, other, other_dim in seen[vertex]:
            guides.setdefault(dim, []).append(orders[other].get(other_dim, ()))
        for dim, other, other_dim in ahead[vertex]:
            common = gcd(splits[vertex].get(dim, 1), splits[other].get(other_dim, 1))
            guides.setdefault(dim, []).append(prime_factors(common))
        orders[vertex] = {
            dim: _ordered(prime_factors(k), guides.get(dim, [])) for dim, k in splits[vertex].items() if k > 1
        }
    return orders


def _ordered(primes: tuple[int, ...], guides: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the primes, those that the guides name first, in their order."""
    left = list(primes)
    result: list[int] = []
    for prime in (prime for guide in guides for prime in guide[len(result) :]):
        if prime in left:
            left.remove(prime)
            result.append(prime)
    return (*result, *left)


def _links(
    graph: Graph, cuts: Sequence[tuple[SharedSplit, ...]], primes: Sequence[Mapping[str, tuple[int, ...]]]
) -> list[_Link]:
    links = []
    for number, (edge, shared) in enumerate(zip(graph.edges, cuts, strict=True)):
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        pairs: list[tuple[Slot, Slot, int]] = []
        size = float(graph.operators[u].writes[edge.output].size)
        for cut in shared:
            first, ours = _run(primes[u].get(cut.u_dim, ()), cut.u_above, cut.u_factor)
            other_first, theirs = _run(primes[v].get(cut.v_dim, ()), cut.v_above, cut.v_factor)
            same = tuple(takewhile(lambda both: both[0] == both[1], zip(ours, theirs, strict=False)))
            pairs += [
                ((cut.u_dim, first + level), (cut.v_dim, other_first + level), prime)
                for level, (prime, _) in enumerate(same)
            ]
            # Past the cuts that they share, the parts of the two sides do not nest.
            size /= cut.u_factor * cut.v_factor / prod(prime for prime, _ in same)
        pairs += _joint_pairs(graph, edge, primes[u], primes[v])
        if pairs:
            links.append(_Link(edge=number, u=u, v=v, size=size, pairs=tuple(pairs)))
    return links


def _joint_pairs(
    graph: Graph, edge: Edge, u: Mapping[str, tuple[int, ...]], v: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Slot, Slot, int]]:
    """Yield pairs of slots of a fan-out and its consumer whose devices hold partial gradients of the same elements.

    Where these pairs, and the parts of the tensor, have the same digits, the fan-out reduces for the consumer, too.
    """
    producer, consumer = graph[edge.producer], graph[edge.consumer]
    if not producer.is_fan_out or not graph.has_gradient(consumer, edge.input):
        return
    open_slots, theirs = (
        [((dim, level), prime) for dim in dims for level, prime in enumerate(of.get(dim, ()))]
        for dims, of in (
            (producer.partial_dims(producer.reads[0]), u),
            (consumer.partial_dims(consumer.reads[edge.input]), v),
        )
    )
    if sorted(prime for _, prime in open_slots) != sorted(prime for _, prime in theirs):
        return
    for slot, prime in theirs:
        own = next(found for found in open_slots if found[1] == prime)
        open_slots.remove(own)
        yield own[0], slot, prime


def _run(primes: tuple[int, ...], above: int, factor: int) -> tuple[int, tuple[int, ...]]:
    """Return where the primes of a factor start, after those of `above`, and the primes; none if they mix."""
    products = [prod(primes[:i]) for i in range(len(primes) + 1)]
    if above not in products or above * factor not in products:
        return 0, ()
    first = products.index(above)
    return first, primes[first : products.index(above * factor)]


def _improve(placed: list[Placement], bases: tuple[int, ...], incident: Sequence[Sequence[_Link]]) -> None:
    """Place one layer after the other again among all its neighbours, wherever that keeps more elements in place."""
    for sweep in range(_SWEEPS):
        changed = False
        order = range(len(placed)) if sweep % 2 else reversed(range(len(placed)))
        for vertex in order:
            kept = _kept(incident[vertex], placed)
            if kept >= sum(link.size for link in incident[vertex]):
                continue
            before = placed[vertex]
            placed[vertex] = _assign(before.primes, bases, _affinities(vertex, incident[vertex], placed))
            if _kept(incident[vertex], placed) > kept * (1 + 1e-12):
                changed = True
            else:
                placed[vertex] = before
        if not changed:
            break


def _kept(links: Sequence[_Link], placed: Sequence[Placement]) -> float:
    """Return the number of elements that stay on an average device."""
    total = 0.0
    for link in links:
        u, v = placed[link.u].digits, placed[link.v].digits
        size = link.size
        for ours, theirs, prime in link.pairs:
            if u.index(ours) != v.index(theirs):
                size /= prime
        total += size
    return total


def _affinities(vertex: int, links: Sequence[_Link], placed: Sequence[Placement]) -> dict[tuple[Slot, int], float]:
    """Return, for a slot of a layer and a digit, the elements that would stay in place with the neighbours' digits."""
    affinities: dict[tuple[Slot, int], float] = {}
    for link in links:
        other = placed[link.u if link.v == vertex else link.v].digits
        for pair in link.pairs:
            theirs, ours = pair[:2] if link.v == vertex else (pair[1], pair[0])
            key = ours, other.index(theirs)
            affinities[key] = affinities.get(key, 0.0) + link.size
    return affinities


def _assign(
    primes: Mapping[str, tuple[int, ...]], bases: tuple[int, ...], affinities: Mapping[tuple[Slot, int], float]
) -> Placement:
    """Assign every digit to a slot of its base, or to a replica: the largest affinities first, the rest in order."""
    open_slots = {(dim, i): prime for dim, of_dim in primes.items() for i, prime in enumerate(of_dim)}
    digits: list[Slot | None] = [None] * len(bases)
    for (slot, digit), _ in sorted(affinities.items(), key=lambda item: (-item[1], item[0][1], item[0][0])):
        if slot in open_slots and digits[digit] is None and bases[digit] == open_slots[slot]:
            digits[digit] = slot
            del open_slots[slot]
    for slot, prime in open_slots.items():
        digit = next(i for i, base in enumerate(bases) if digits[i] is None and base == prime)
        digits[digit] = slot
    return Placement(digits=tuple(digits), primes=primes)


def _sums(
    graph: Graph, splits: Sequence[Mapping[str, int]], kinds: Sequence[int], placed: Sequence[Placement]
) -> Iterator[Moved]:
    """Yield the all-reduces within layers. The states that a recurrent layer passes on are small in comparison.

    Args:
        graph: The graph.
        splits: Splits of each layer.
        kinds: [V] equal for layers that are equal under equal splits.
        placed: Placement of each layer.
    """
    known: dict[tuple[int, Indexed], float] = {}

    def sums_itself(operator: Operator, position: int, digits: frozenset[int]) -> bool:
        edge = graph.incoming.get((operator.name, position))
        if edge is None or not graph[edge.producer].is_fan_out:
            return True
        handed = graph[edge.producer]
        return digits != summed(placed[graph.index[handed.name]], handed.partial_dims(handed.reads[0]))

    def summed(placement: Placement, over: tuple[str, ...]) -> frozenset[int]:
        return frozenset(i for i, slot in enumerate(placement.digits) if slot is not None and slot[0] in over)

    for operator, split, kind, placement in zip(graph.operators, splits, kinds, placed, strict=True):
        types = graph.types[operator.name]
        inside: list[tuple[Indexed, tuple[str, ...], int]] = [
            (write, operator.partial_dims(write), types.write_bytes(position))
            for position, write in enumerate(operator.writes)
            if position not in operator.wholes
        ]
        inside += [
            (read, operator.partial_dims(read), types.gradient_sum_bytes(operator, position))
            for position, read in enumerate(operator.reads)
            if graph.has_gradient(operator, position)
            and sums_itself(operator, position, summed(placement, operator.partial_dims(read)))
        ]
        inside += [
            (exchange, exchange.over, exchange.times * types.exchange_bytes(exchange))
            for exchange in operator.exchanges_with(graph.read_gradients(operator))
            if isinstance(exchange, AllReduce)
        ]
        for tensor, over, size_bytes in inside:
            if digits := summed(placement, over):
                if (kind, tensor) not in known:
                    known[kind, tensor] = _shard_size(operator, tensor, split)
                yield digits, size_bytes * known[kind, tensor]


def _fetches(
    graph: Graph,
    splits: Sequence[Mapping[str, int]],
    kinds: Sequence[int],
    placed: Sequence[Placement],
    links: Sequence[_Link],
) -> Iterator[Moved]:
    """Yield the transfers of each edge, forward and backward: fetches are due to digits that cut differently.

    Args:
        graph: The graph.
        splits: Splits of each layer.
        kinds: [V] equal for layers that are equal under equal splits.
        placed: Placement of each layer.
        links: The edges.
    """
    known: dict[Hashable, tuple[frozenset[str], float]] = {}
    stays: dict[int, set[tuple[Slot, Slot]]] = {}
    for link in links:
        stays.setdefault(link.edge, set()).update(pair[:2] for pair in link.pairs)
    for number, edge in enumerate(graph.edges):
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        written, read = graph.operators[u].writes[edge.output], graph.operators[v].reads[edge.input]
        ends = ((u, written, v, read, False), (v, read, u, written, True))
        for sender, sent, receiver, received, is_backward in ends:
            if is_backward and not graph.has_gradient(graph.operators[v], edge.input):
                continue
            key = kinds[u], edge.output, kinds[v], edge.input, is_backward
            if key not in known:
                size = _shard_size(graph.operators[receiver], received, splits[receiver])
                known[key] = access_dims(sent), size
            sent_dims, size = known[key]
            pairs = {pair[::-1] if is_backward else pair for pair in stays.get(number, ())}
            digits = frozenset(
                i
                for i, (slot, own) in enumerate(zip(placed[sender].digits, placed[receiver].digits, strict=True))
                if slot is not None and slot[0] in sent_dims and (slot, own) not in pairs
            )
            yield digits, edge_itemsizes(graph, edge)[is_backward] * size


def _shard_size(operator: Operator, tensor: Indexed, split: Mapping[str, int]) -> float:
    row = np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
    return float(shard_size(tensor, splits_of(operator, row))[0])


def _devices(
    operator: Operator,
    split: Mapping[str, int],
    bases: Sequence[int],
    digits: Sequence[Slot | None],
    primes_of: Mapping[str, tuple[int, ...]],
) -> tuple[int, ...]:
    """Return the device of each part, row-major over the split dims and the replicas."""
    weights = [prod(bases[i + 1 :]) for i in range(len(bases))]
    names = [dim for dim in operator.extents if split[dim] > 1]
    shape = [split[dim] for dim in names]
    replicas = prod(bases) // prod(shape)
    index = np.indices((*shape, replicas)).reshape(len(shape) + 1, -1)
    device = np.zeros(index.shape[1], dtype=np.int64)
    for dim, position in zip(names, index[:-1], strict=True):
        primes = primes_of[dim]
        for level, prime in enumerate(primes):
            digit = digits.index((dim, level))
            device += position // prod(primes[level + 1 :]) % prime * weights[digit]
    free = [i for i, slot in enumerate(digits) if slot is None]
    for rank, digit in enumerate(free):
        device += index[-1] // prod(bases[i] for i in free[rank + 1 :]) % bases[digit] * weights[digit]
    assert sorted(device.tolist()) == list(range(prod(bases))), f"placement of {operator.name} is not a permutation"
    return tuple(device.tolist())


# -- which digits number the devices within a node
#
# Exchanging two digits of equal base in all layers renumbers the devices and does not change the total transfers. But
# the last digits number the devices within a node and the first ones the nodes. Of all orders of the digits, the one
# with the fewest bytes across nodes is chosen.


def choose_order(
    bases: Sequence[int],
    group_sizes: Sequence[int],
    sums: Iterable[Moved],
    fetches: Iterable[Moved],
    *,
    by_level: bool = False,
) -> tuple[int, ...]:
    """Return the positions of the digits, most significant first, with the fewest bytes across groups.

    Bytes across groups of the outermost level count first, then those of the next one.

    Args:
        bases: [digits] base of each digit.
        group_sizes: Devices in a group of each level, ascending (a node, a rack); sizes that are not a product of
            digits are ignored.
        sums: All-reduces.
        fetches: Transfers of edges.
        by_level: Whether an all-reduce reduces within groups before it crosses them; by default every device exchanges
            a share with every other.
    """
    added, fetched = _together(sums), _together(fetches)

    def crossing(inner: Digits) -> float:
        total = 0.0
        for digits, shard_bytes in added.items():
            count = prod(bases[i] for i in digits)
            inside = prod(bases[i] for i in digits & inner)
            # Every device exchanges a share with each other device, both ways. After a reduction within the inner
            # group, a device's share of the remaining traffic is smaller by the size of that group.
            total += 2 * shard_bytes / count * (count - inside) / (inside if by_level else 1)
        for digits, shard_bytes in fetched.items():
            total += shard_bytes * (1 - 1 / prod(bases[i] for i in digits - inner))
        return total

    plain = tuple(range(len(bases)))
    known: dict[Digits, float] = {}

    def cost(inside: Sequence[Digits]) -> tuple[float, ...]:
        for inner in inside:
            if inner not in known:
                known[inner] = crossing(inner)
        return tuple(known[inner] for inner in inside)

    ways = list(islice(_ways(bases, frozenset(plain), sorted(group_sizes, reverse=True)), MAX_ORDERS))
    first, inside = ways[0], min(ways, key=cost)
    if all(best > _WORTH_IT * old for best, old in zip(cost(inside), cost(first), strict=True)):
        inside = first
    outside: list[Digits] = [frozenset(plain), *inside, frozenset()]
    return tuple(i for outer, inner in pairwise(outside) for i in sorted(outer - inner))


def _ways(bases: Sequence[int], digits: Digits, sizes: Sequence[int]) -> Iterator[tuple[Digits, ...]]:
    """Yield the digits inside a group of each level, outermost level first; trailing digits are tried first."""
    if not sizes:
        yield ()
        return
    size, *others = sizes
    found = False
    for count in range(len(digits) + 1):
        for chosen in combinations(sorted(digits, reverse=True), count):
            if prod(bases[i] for i in chosen) == size:
                found = True
                for rest in _ways(bases, frozenset(chosen), others):
                    yield (frozenset(chosen), *rest)
    if not found:
        yield from _ways(bases, digits, others)


def _together(terms: Iterable[Moved]) -> Mapping[Digits, float]:
    total: dict[Digits, float] = {}
    for digits, shard_bytes in terms:
        if digits and shard_bytes:
            total[digits] = total.get(digits, 0.0) + shard_bytes
    return total
