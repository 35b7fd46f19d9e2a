import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import SolverError
from pase.solver.ordering import (
    ORDERINGS,
    breadth_first,
    choose_ordering,
    dependent_sets,
    generate_seq,
    min_fill,
    min_weight,
    ordering_named,
    report_order,
    report_ordering,
)
from scripts.benchmarks import recurrences
from scripts.benchmarks.recurrences import naive_dependent_sets


def neighbours_of(graph: nx.Graph) -> list[frozenset[int]]:
    return [frozenset(graph[v]) for v in range(len(graph))]


@st.composite
def graphs(draw: st.DrawFn) -> nx.Graph:
    size = draw(st.integers(1, 10))
    graph = nx.Graph()
    graph.add_nodes_from(range(size))
    for v in range(1, size):
        graph.add_edge(draw(st.integers(0, v - 1)), v)
    for _ in range(draw(st.integers(0, 12))):
        u, v = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
        if u != v:
            graph.add_edge(u, v)
    return graph


sizes_of = st.lists(st.integers(1, 9), min_size=10, max_size=10)


@given(graphs(), sizes_of, st.sampled_from(sorted(ORDERINGS)))
def test_every_ordering_is_a_permutation_and_repeatable(graph, sizes, name):
    neighbours = neighbours_of(graph)
    order = ORDERINGS[name](neighbours, sizes[: len(graph)])
    assert sorted(order) == list(range(len(graph)))
    assert ORDERINGS[name](neighbours, sizes[: len(graph)]) == order


@given(graphs(), st.randoms(use_true_random=False))
def test_sets_equal_their_definitions_by_networkx(graph, random):
    order = list(range(len(graph)))
    random.shuffle(order)
    sets = recurrences.dependent_sets(neighbours_of(graph), order)
    assert dependent_sets(neighbours_of(graph), order) == sets.dependent
    position = {v: i for i, v in enumerate(order)}
    for i, v in enumerate(order):
        earlier = graph.subgraph(order[: i + 1])
        connected = nx.node_connected_component(earlier, v)
        boundary = {w for x in connected for w in graph[x] if position[w] > i}
        components = {frozenset(c) for c in nx.connected_components(graph.subgraph(connected - {v}))}
        assert sets.connected(i) == connected
        assert sets.dependent[i] == boundary
        assert {sets.connected(j) for j in sets.subsets[i]} == components


@given(graphs(), st.randoms(use_true_random=False))
def test_naive_sets_are_the_boundary_of_the_earlier_vertices(graph, random):
    order = list(range(len(graph)))
    random.shuffle(order)
    sets = naive_dependent_sets(neighbours_of(graph), order)
    for i in range(len(order)):
        assert sets[i] == nx.node_boundary(graph, order[: i + 1])


@given(graphs())
def test_theorem_2_generate_seq_takes_the_smallest_dependent_set(graph):
    # Fig. 3 keeps v.d equal to D of the vertex it would take next, so each choice is minimal among the definitions.
    neighbours = neighbours_of(graph)
    order = generate_seq(neighbours, [1] * len(graph))
    for i, v in enumerate(order):
        rest = order[i:]

        def boundary(w, done=order[:i]):
            return nx.node_boundary(graph, nx.node_connected_component(graph.subgraph([*done, w]), w))

        least = min(len(boundary(w)) for w in rest)
        assert len(boundary(v)) == least
        assert v == min(w for w in rest if len(boundary(w)) == least)


@given(graphs(), sizes_of)
def test_min_weight_takes_the_cheapest_step(graph, sizes):
    order = min_weight(neighbours_of(graph), sizes[: len(graph)])
    for i, v in enumerate(order):

        def weight(w, done=order[:i]):
            around = nx.node_boundary(graph, nx.node_connected_component(graph.subgraph([*done, w]), w))
            return int(np.prod([sizes[x] for x in {w, *around}]))

        assert (weight(v), v) == min((weight(w), w) for w in order[i:])


@given(graphs())
def test_min_fill_adds_the_fewest_edges_at_each_step(graph):
    order = min_fill(neighbours_of(graph), [1] * len(graph))
    filled = graph.copy()

    def missing(w):
        around = list(filled[w])
        return sum(not filled.has_edge(a, b) for i, a in enumerate(around) for b in around[:i])

    for i, v in enumerate(order):
        assert (missing(v), v) == min((missing(w), w) for w in order[i:])
        around = list(filled[v])
        filled.remove_node(v)
        filled.add_edges_from((a, b) for j, a in enumerate(around) for b in around[:j])


@given(graphs())
def test_no_ordering_is_narrower_than_the_degeneracy(graph):
    degeneracy = max(nx.core_number(graph).values())
    for name in ORDERINGS:
        assert report_ordering(name, neighbours_of(graph), [2] * len(graph)).largest_dependent_set >= degeneracy


def test_a_tree_has_dependent_sets_of_one_and_a_chordal_graph_of_its_clique():
    tree = nx.random_labeled_tree(50, seed=1)
    assert report_ordering("generate_seq", neighbours_of(tree), [3] * 50).largest_dependent_set == 1
    band = nx.Graph((u, v) for u in range(30) for v in range(u + 1, min(u + 4, 30)))  # treewidth 3
    for name in ("generate_seq", "min_fill", "min_weight"):
        assert report_ordering(name, neighbours_of(band), [3] * 30).largest_dependent_set == 3


def test_breadth_first_visits_neighbours_by_number():
    graph = nx.Graph([(0, 4), (0, 2), (2, 3), (4, 1)])
    assert breadth_first(neighbours_of(graph), [1] * 5) == (0, 2, 4, 3, 1)


def test_the_papers_point_generate_seq_defers_the_hub():
    # A hub with ten leaves, as in Fig. 5: breadth-first starts at it and depends on all of them.
    star = nx.star_graph(10)
    naive = naive_dependent_sets(neighbours_of(star), breadth_first(neighbours_of(star), [2] * 11))
    assert max(map(len, naive)) == 10
    assert report_ordering("generate_seq", neighbours_of(star), [2] * 11).largest_dependent_set == 1


def test_a_report_counts_combinations_and_bytes():
    path = [frozenset({1}), frozenset({0, 2}), frozenset({1})]
    report = report_order("given", path, [2, 3, 5], [0, 1, 2])
    assert (report.largest_dependent_set, report.operations) == (1, 2 * 3 + 3 * 5 + 5)
    assert (report.table_bytes, report.largest_table_bytes) == (8 * (3 + 5 + 1), 8 * 5)


def test_auto_picks_the_fewest_operations():
    # A cycle through two large vertices: joining them is what costs, which only the weights tell.
    rng = np.random.default_rng(3)
    for seed in range(20):
        graph = nx.connected_watts_strogatz_graph(14, 4, 0.3, seed=seed)
        sizes = [int(k) for k in rng.integers(2, 300, 14)]
        reports = [report_ordering(name, neighbours_of(graph), sizes) for name in ORDERINGS]
        chosen = choose_ordering("auto", neighbours_of(graph), sizes)
        assert chosen.operations == min(r.operations for r in reports)
        assert chosen in reports


def test_thousands_of_vertices_are_ordered_in_no_time():
    ladder = nx.convert_node_labels_to_integers(nx.ladder_graph(3000))
    report = choose_ordering("auto", neighbours_of(ladder), [40] * len(ladder))
    assert report.largest_dependent_set == 2


def test_a_disconnected_graph_can_be_ordered():
    graph = nx.Graph([(0, 1), (2, 3)])
    assert breadth_first(neighbours_of(graph), [1] * 4) == (0, 1, 2, 3)
    assert max(map(len, dependent_sets(neighbours_of(graph), [0, 1, 2, 3]))) == 1


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(SolverError, match=r"unknown ordering 'min_fil'.*did you mean 'min_fill'.*breadth_first"):
        ordering_named("min_fil")


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), ()])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(SolverError, match="each of the 2 vertices once"):
        dependent_sets([frozenset({1}), frozenset({0})], order)
    with pytest.raises(SolverError, match="each of the 2 vertices once"):
        recurrences.dependent_sets([frozenset({1}), frozenset({0})], order)
    with pytest.raises(SolverError, match="each of the 2 vertices once"):
        naive_dependent_sets([frozenset({1}), frozenset({0})], order)
