"""Language networks against published parameter counts and closed forms of their papers."""

from collections import Counter
from math import prod

import pytest

from pase.graph import Graph, Operator
from pase.models import build


def _multiply_adds(graph: Graph) -> float:
    """Return the multiply-adds of one sample."""
    return graph.forward_flop(contractions_only=True) / 2 / dict(graph.arguments)["batch"]  # type: ignore[operator]


def _parameters(operator: Operator) -> int:
    return sum(access.size for access in operator.parameters)


# -- RNNLM


def test_rnnlm_is_a_path_of_four_vertices() -> None:
    """PaSE section IV-A: the recurrent layers are one vertex over layer, batch, sequence, input and hidden dims."""
    graph = build("rnnlm")
    assert [operator.name for operator in graph.operators] == ["embedding", "lstm", "fc", "softmax"]
    assert [operator.extents for operator in graph.operators] == [
        {"b": 64, "s": 256, "d": 2048, "v": 100_000},
        {"l": 2, "b": 64, "s": 256, "d": 2048, "e": 2048},
        {"b": 64, "s": 256, "v": 100_000, "d": 2048},
        {"b": 64, "s": 256, "v": 100_000},
    ]
    assert [(edge.producer, edge.consumer) for edge in graph.edges] == [
        ("embedding", "lstm"),
        ("lstm", "fc"),
        ("fc", "softmax"),
    ]


def test_rnnlm_by_hand() -> None:
    vocabulary, units, steps, layers = 100_000, 2048, 256, 2
    graph = build("rnnlm")
    # Four gates, each with an input matrix, a recurrent matrix and a bias.
    lstm = 4 * (units * units + units * units + units)
    assert graph.num_parameters == vocabulary * units + layers * lstm + units * vocabulary + vocabulary
    assert _multiply_adds(graph) == steps * (layers * 4 * 2 * units * units + units * vocabulary)


def test_rnnlm_without_its_recurrent_layers() -> None:
    graph = build("rnnlm", arguments={"layers": "0", "vocabulary": 40, "units": 8, "steps": 4}, batch=2)
    assert [operator.name for operator in graph.operators] == ["embedding", "fc", "softmax"]
    assert graph.num_parameters == 40 * 8 + 8 * 40 + 40


# -- Transformer


def _encoder_parameters(d: int, hidden: int) -> int:
    """One layer: four projections without bias, two feed-forward layers with, two normalisations."""
    return 4 * d * d + (2 * d * hidden + hidden + d) + 2 * 2 * d


def _decoder_parameters(d: int, hidden: int) -> int:
    return _encoder_parameters(d, hidden) + 4 * d * d + 2 * d


@pytest.mark.parametrize(("name", "d", "hidden"), [("transformer", 512, 2048), ("transformer_big", 1024, 4096)])
def test_transformer_s_parameters_in_closed_form(name: str, d: int, hidden: int) -> None:
    stacks = 6 * (_encoder_parameters(d, hidden) + _decoder_parameters(d, hidden))
    assert build(name).num_parameters == 50_000 * d + stacks
    assert build(name, arguments={"tied": "false"}).num_parameters == 3 * 50_000 * d + stacks


@pytest.mark.parametrize(
    ("name", "millions", "tolerance"), [("transformer", 65, 0.031), ("transformer_big", 213, 0.01)]
)
def test_transformer_s_parameters_as_the_paper_rounds_them(name: str, millions: int, tolerance: float) -> None:
    """Vaswani et al. 2017, table 3: 65 and 213 million, with the 37,000 tokens of section 5.1 in one shared matrix.

    The layers as its equations have them hold 63.0 and 214.2 million.
    """
    graph = build(name, arguments={"vocabulary": 37_000})
    assert graph.num_parameters == pytest.approx(millions * 1e6, rel=tolerance)


def test_transformer_s_layers_are_those_of_torch() -> None:
    """torch.nn.Transformer() has 44,140,544: these stacks, biased projections, a last norm on each stack."""
    d = 512
    stacks = build("transformer").num_parameters - 50_000 * d
    biases, last_norms = (6 + 12) * 4 * d, 2 * 2 * d
    assert stacks + biases + last_norms == 44_140_544


def test_transformer_s_vertices() -> None:
    graph = build("transformer")
    assert Counter(operator.kind for operator in graph.operators) == {
        "embedding": 2,
        # Per attention: query, key, value, output; per layer: two feed-forward; and the last projection.
        "dense": 4 * (6 + 12) + 2 * 12 + 1,
        "attention": 6 + 12,
        "elementwise": 12 + 18,
        "layer_norm": 12 + 18,
        "softmax_loss": 1,
    }


def test_transformer_s_iteration_spaces() -> None:
    graph = build("transformer")
    assert graph["source_embedding"].extents == {"b": 64, "s": 256, "d": 512, "v": 50_000}
    assert graph["encoder1_self_q"].extents == {"b": 64, "s": 256, "h": 8, "c": 64, "d": 512}
    assert graph["encoder1_self_k"].extents == {"b": 64, "s": 256, "h": 8, "k": 64, "d": 512}
    assert graph["encoder1_self_attention"].extents == {"b": 64, "h": 8, "s": 256, "t": 256, "k": 64}
    assert graph["encoder1_self_o"].extents == {"b": 64, "s": 256, "d": 512, "h": 8, "k": 64}
    assert graph["encoder1_self_norm"].extents == {"b": 64, "s": 256, "d": 512}
    assert graph["encoder1_ff_1"].extents == {"b": 64, "s": 256, "e": 2048, "d": 512}
    assert graph["encoder1_ff_2"].extents == {"b": 64, "s": 256, "d": 512, "e": 2048}
    assert graph["fc"].extents == {"b": 64, "s": 256, "v": 50_000, "d": 512}
    assert graph["softmax"].extents == {"b": 64, "s": 256, "v": 50_000}


def test_transformer_s_attention_reads_what_it_should() -> None:
    graph = build("transformer", arguments={"layers": 2})
    assert graph.incoming["decoder2_cross_q", 0].producer == "decoder2_self_norm"
    assert graph.incoming["decoder2_cross_k", 0].producer == "encoder2_ff_norm"
    assert graph.incoming["decoder2_cross_v", 0].producer == "encoder2_ff_norm"
    assert graph.incoming["decoder1_self_add", 0].producer == "target_embedding"
    causal = {o.name for o in graph.operators if o.kind == "attention" and o.attribute("causal", False)}
    assert causal == {"decoder1_self_attention", "decoder2_self_attention"}
    # The encoder's output comes from one vertex and feeds a key and a value projection in each layer of the decoder.
    neighbours = {graph.operators[i].name for i in graph.neighbours[graph.index["encoder2_ff_norm"]]}
    assert neighbours == {"encoder2_ff_add", *(f"decoder{i}_cross_{part}" for i in (1, 2) for part in "kv")}


def test_transformer_s_multiply_adds_in_closed_form() -> None:
    """Per token: every matrix once, and 2·s·d for scores and values (Chowdhery et al. 2022, appendix B)."""
    d, hidden, steps, vocabulary = 512, 2048, 256, 50_000
    matrices = 6 * (4 * d * d + 2 * d * hidden) + 6 * (8 * d * d + 2 * d * hidden) + vocabulary * d
    attention = 18 * 2 * steps * d
    assert _multiply_adds(build("transformer")) == steps * (matrices + attention)


# -- BERT


def test_bert_large_s_parameters_are_the_published_ones() -> None:
    """Devlin et al. 2018 round to 340 million; transformers' BertForMaskedLM ("bert-large-uncased") has 335,174,458.

    The model without a head but with its pooler, BertModel, has 335,141,888.
    """
    graph = build("bert_large")
    assert graph.num_parameters == 335_174_458
    assert graph.num_parameters == pytest.approx(340e6, rel=0.02)
    d, vocabulary = 1024, 30_522
    head = _parameters(graph["head_dense"]) + _parameters(graph["head_norm"]) + vocabulary
    pooler = d * d + d
    assert graph.num_parameters - head + pooler == 335_141_888


def test_bert_s_parameters_in_closed_form() -> None:
    layers, d, hidden, vocabulary, steps = 3, 16, 40, 50, 6
    graph = build(
        "bert_large",
        arguments={
            "layers": layers,
            "model_width": d,
            "hidden": hidden,
            "heads": 4,
            "vocabulary": vocabulary,
            "steps": steps,
        },
    )
    embeddings = (vocabulary + steps + 2) * d + 2 * d
    layer = _encoder_parameters(d, hidden) + 4 * d
    head = d * d + d + 2 * d + vocabulary
    assert graph.num_parameters == embeddings + layers * layer + head


def test_bert_base_is_a_matter_of_size() -> None:
    """transformers' BertForMaskedLM ("bert-base-uncased") has 109,514,298 parameters."""
    graph = build("bert_large", arguments={"layers": 12, "model_width": 768, "hidden": 3072, "heads": 12})
    assert graph.num_parameters == 109_514_298


def test_bert_large_s_vertices() -> None:
    graph = build("bert_large")
    assert Counter(operator.kind for operator in graph.operators) == {
        "embedding": 2,
        "add_parameter": 1,
        "dense": 24 * 6 + 2,
        "attention": 24,
        "elementwise": 24 * 2 + 1,
        "layer_norm": 24 * 2 + 2,
        "softmax_loss": 1,
    }
    assert not any(o.attribute("causal", False) for o in graph.operators if o.kind == "attention")


# -- GPT


@pytest.mark.parametrize(
    ("layers", "model_width", "heads", "num_parameters"),
    [
        (12, 768, 12, 124_439_808),
        pytest.param(24, 1024, 16, 354_823_168, marks=pytest.mark.full),
        pytest.param(36, 1280, 20, 774_030_080, marks=pytest.mark.full),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_gpt_s_parameters_are_those_of_gpt2(layers: int, model_width: int, heads: int, num_parameters: int) -> None:
    """transformers' GPT2LMHeadModel: "gpt2", "gpt2-medium", "gpt2-large" and "gpt2-xl"."""
    graph = build("gpt", arguments={"layers": layers, "model_width": model_width, "heads": heads})
    assert graph.num_parameters == num_parameters


@pytest.mark.parametrize(
    ("layers", "model_width", "heads", "billions"),
    [(32, 4096, 32, 6.7), pytest.param(96, 12_288, 96, 175.0, marks=pytest.mark.full)],
)
def test_gpt_s_parameters_are_those_of_gpt3(layers: int, model_width: int, heads: int, billions: float) -> None:
    """Brown et al. 2020, table 2.1; its 2,048 tokens of context."""
    sizes = {"layers": str(layers), "model_width": str(model_width), "heads": str(heads), "steps": "2048"}
    graph = build("gpt", arguments=sizes)
    assert graph.num_parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_gpt_s_multiply_adds_in_closed_form() -> None:
    """Kaplan et al. 2020, table 1: 12·layers·d² weights work once a token; scores and values add 2·layers·s·d."""
    layers, d, steps, vocabulary = 12, 768, 1024, 50_257
    weights = 12 * layers * d * d
    attention = 2 * layers * steps * d
    assert _multiply_adds(build("gpt")) == steps * (weights + attention + vocabulary * d)


def test_gpt_s_attention_is_causal_and_normalised_before() -> None:
    graph = build("gpt", arguments={"layers": 2})
    assert graph.incoming["layer1_self_q", 0].producer == "layer1_self_norm"
    assert graph.incoming["layer1_self_norm", 0].producer == "positions"
    assert graph.incoming["layer1_self_add", 0].producer == "positions"
    assert graph.incoming["fc", 0].producer == "final_norm"
    assert all(o.attribute("causal", False) for o in graph.operators if o.kind == "attention")


def test_tied_matrices_are_as_large_as_one_another() -> None:
    for name in ("transformer", "transformer_big", "bert_large", "gpt"):
        sizes: dict[str, set[int]] = {}
        for operator in build(name).operators:
            for access in operator.parameters:
                if access.shared:
                    sizes.setdefault(access.shared, set()).add(prod(access.shape))
        assert len(sizes) == 1
        assert all(len(found) == 1 for found in sizes.values())
