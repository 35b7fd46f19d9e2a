"""Normalisations, windows, attention, recurrent networks, and classification losses."""

from math import prod

from pase.importers.ir.call import table
from pase.importers.torch.sharding_rules.points import reduced
from pase.importers.torch.sharding_rules.rule import (
    Call,
    Factor,
    Labels,
    Rule,
    ShardingRule,
    positions,
    relate,
)

# -- normalisations


def layer_norm(call: Call) -> ShardingRule:
    """Relate a tensor and itself normalised over its last dims, which weights have."""
    x = positions(call.rank("input"))
    count = len(call.get("normalized_shape"))
    over = x[len(x) - count :]
    statistics: Labels = [*x[: len(x) - count], *[None] * count]
    operands: dict[str, Labels] = {"input": x, "weight": over, "bias": over}
    return relate(call, operands, [x, *[statistics] * (len(call.results) - 1)], whole=[str(name) for name in over])


def group_norm(call: Call) -> ShardingRule:
    """Relate images normalised over groups of channels: examples pass, and groups."""
    x = call.shape("input") or ()
    groups = int(call.get("num_groups", call.get("group", 1)))
    if not prod(x):
        return relate(call)
    channels = ["g", "c"]
    spatial = [f"s{i}" for i in range(len(x) - 2)]
    extents = {"g": groups, "c": x[1] // groups}
    labels = ["n", channels, *spatial]
    operands: dict[str, Labels] = {"input": labels, "weight": [channels], "bias": [channels]}
    sizes: dict[str, Labels] = {"num_groups": [["g"]], "group": [["g"]], "N": [["n"]], "C": [channels]}
    results: list[Labels] = [labels, *[["n", "g"]] * (len(call.results) - 1)]
    return relate(call, operands, results, extents=extents, whole={"c", *spatial}, sizes=sizes)


def batch_norm(call: Call) -> ShardingRule:
    """Relate images normalised for each channel: over the batch while it trains, by constants otherwise."""
    x: list[Factor | None] = ["n", "c", *positions(call.rank("input") - 2, "s")]
    name = call.name
    uses_batch = bool(call.get("training", call.get("train", True)))
    if "no_update" in name or "no_training" in name:
        uses_batch = False
    if name == "instance_norm":
        has_statistics = "running_mean" in call.numbers
        uses_batch = bool(call.get("use_input_stats", True))
        mixed = x[2:] if uses_batch else []
        mixed = [*mixed, "n"] if uses_batch and has_statistics else mixed
    else:
        mixed = [x[0], *x[2:]] if uses_batch else []
    per_channel: list[Factor] = ["c"]
    operands: dict[str, Labels] = {"input": x}
    operands |= dict.fromkeys(("weight", "bias", "running_mean", "running_var"), per_channel)
    results: list[Labels | None] = [x]
    for shape in call.results[1:]:
        is_per_channel = len(shape) == 1 and shape == call.results[0][1:2]
        results.append(per_channel if is_per_channel else None)
    return relate(call, operands, results, whole=[f for f in mixed if f])


# -- windows


def convolution(call: Call) -> ShardingRule:
    """Relate images, filters and convolutions: output channels pass, input channels are summed, groups are both."""
    rank = call.rank("weight") - 2
    x, out = call.shape("input") or (), call.results[0]
    is_transposed = bool(call.get("transposed", False)) or "transpose" in call.name
    groups = int(call.get("groups", 1))
    lead: list[Factor] = ["n"] if len(x) > rank + 1 else []
    spatial = [None] * rank
    if not (prod(x) and prod(out)):
        return relate(call)
    extents = {"g": groups, "i": x[len(lead)] // groups, "o": out[len(lead)] // groups}
    filters = [["g", "i"], "o"] if is_transposed else [["g", "o"], "i"]
    operands: dict[str, Labels] = {
        "input": [*lead, ["g", "i"], *spatial],
        "weight": [*filters, *spatial],
        "bias": [["g", "o"]],
    }
    return relate(
        call,
        operands,
        [[*lead, ["g", "o"], *spatial]],
        extents=extents,
        sums={"i"},
        linear=["input", "weight"],
        added=["bias"],
        sizes={"groups": [["g"]]},
    )


def time_convolution(call: Call) -> ShardingRule:
    """Relate sequences of shape [time, batch, channels], filters and convolutions."""
    operands: dict[str, Labels] = {"self": [None, "n", "i"], "weight": [None, "i", "o"], "bias": ["o"]}
    linear = ["self", "weight"]
    return relate(call, operands, [[None, "n", "o"]], sums={"i"}, linear=linear, added=["bias"])


def images(rank: int, *, is_linear: bool = False) -> Rule:
    """Return the rule of a function of the last dims of images; rank: the number of these."""

    def rule(call: Call) -> ShardingRule:
        lead = positions(len(call.operands[0]) - rank, "b")
        labels: Labels = [*lead, *[None] * rank]
        inputs = [labels if len(shape) == len(labels) else None for shape in call.operands]
        return relate(call, inputs, [labels] * len(call.results), linear=[0] if is_linear else [])

    return rule


def fractional_pool(call: Call) -> ShardingRule:
    """Relate images and maxima of windows at random places, which are given for each channel."""
    rank = 3 if "3d" in call.name else 2
    x = call.rank("self")
    lead: list[Factor] = ["n", "c"][rank + 2 - x :]
    labels: Labels = [*lead, *[None] * rank]
    samples: Labels = [*(["n"] if x > rank + 1 else [None]), "c", None]
    return relate(call, {"self": labels, "random_samples": samples}, [labels] * len(call.results))


def grid_sample(call: Call) -> ShardingRule:
    """Relate images and values between their pixels, at places of a grid."""
    rank = len(call.operands[0]) - 2
    spatial = positions(rank, "s")
    return relate(call, [["n", "c", *[None] * rank], ["n", *spatial, None]], [["n", "c", *spatial]], linear=[0])


def affine_grid(call: Call) -> ShardingRule:
    """Relate matrices and the places that they move pixels to."""
    count = len(call.results[0]) - 2
    spatial = [f"s{i}" for i in range(count)]
    outputs: Labels = ["n", *spatial, None]
    sizes: dict[str, Labels] = {"size": ["n", [], *spatial]}
    return relate(call, [["n", None, None]], [outputs], whole=spatial, sizes=sizes, linear=[0])


def unfolded_windows(call: Call) -> ShardingRule:
    """Relate images and the elements of windows, which are merged with channels."""
    few, many = call.operands[0], call.results[0]
    if call.name == "col2im":
        few, many = many, few
    is_batched = len(few) == 4
    lead: list[Factor] = ["n"] if is_batched else []
    if not (prod(few) and prod(many)):
        return relate(call)
    channels = few[len(lead)]
    extents = {"c": channels, "k": many[len(lead)] // channels}
    images: Labels = [*lead, ["c"], None, None]
    columns: Labels = [*lead, ["c", "k"], None]
    inputs, outputs = (columns, images) if call.name == "col2im" else (images, columns)
    return relate(call, [inputs], [outputs], extents=extents, whole={"k"}, linear=[0])


# -- sequences


def attention(call: Call) -> ShardingRule:
    """Relate queries, keys, values, a mask and attention; a head of keys may serve several heads of queries.

    Query positions pass through unless attention is causal; key positions are unsplit.
    """
    if call.get("dropout_p", 0.0):
        return relate(call)
    query, key = call.shape("query") or (), call.shape("key") or ()
    rank = len(query)
    lead: list[Factor | list[Factor] | None] = [*positions(rank - 2, "b")]
    key_lead = list(lead)
    extents: dict[Factor, int] = {}
    if rank > 2 and query[-3] != key[-3] and call.get("enable_gqa", False):
        lead[-1] = ["h", "j"]
        key_lead[-1] = ["h"]
        extents = {"h": key[-3], "j": query[-3] // key[-3]}
    is_fused = call.name != "scaled_dot_product_attention"
    operands: dict[str, Labels] = {
        "query": [*lead, "q", "e"],
        "key": [*key_lead[rank - len(key) :], "k", "e"],
        "value": [*key_lead[rank - call.rank("value") :], "k", "v"],
    }
    for mask in ("attn_mask", "attn_bias"):
        operands[mask] = [*lead, "q", "k"][rank - call.rank(mask) :]
    results: list[Labels] = [[*lead, "q", "v"]]
    for shape in call.results[1:]:
        is_by_head = shape[: rank - 2] == query[: rank - 2]
        results.append([*lead, *[None] * (len(shape) - rank + 2)] if is_by_head else [None] * len(shape))
    whole = {"k", "e"}
    if call.get("is_causal", False) or is_fused:
        whole.add("q")
    if is_fused:
        whole.add("v")
    return relate(call, operands, results, extents=extents, whole=whole)


def recurrent(call: Call) -> ShardingRule:
    """Relate sequences, states and weights of a recurrent network: examples pass."""
    if "batch_sizes" in call.arguments or (call.get("dropout", 0.0) and call.get("train", False)):
        return relate(call)
    sequence: Labels = [None, "n", None]
    if call.get("batch_first", False):
        sequence = ["n", None, None]
    state: Labels = [None, "n", None]
    operands: list[Labels | None] = [None] * len(call.operands)
    operands[call.numbers["input"][0]] = sequence
    for number in call.numbers["hx"]:
        operands[number] = state
    return relate(call, operands, [sequence, *[state] * (len(call.results) - 1)])


def cell(call: Call) -> ShardingRule:
    """Relate inputs, states and weights of one step of a recurrent network: examples pass."""
    operands: list[Labels | None] = [None] * len(call.operands)
    for number in (*call.numbers["input"], *call.numbers["hx"]):
        operands[number] = ["n", None]
    return relate(call, operands, [["n", None]] * len(call.results))


# -- losses


def loss_of_classes(call: Call) -> ShardingRule:
    """Relate scores of classes, targets and a loss: its mean is over points that the targets' values tell."""
    scores, target = call.operands[0], call.shape("target") or ()
    names = positions(len(scores))
    at = 1 if len(scores) > 1 else 0
    points = [name for i, name in enumerate(names) if i != at]
    is_of_shares = len(target) == len(scores) and call.name == "cross_entropy_loss" and call.are_floating[1]
    operands: dict[str, Labels] = {"self": names, "target": names if is_of_shares else points}
    whole = [str(names[at])]
    is_mean_of_unknown = call.get("reduction", 1) == 1 and not is_of_shares
    if is_mean_of_unknown:
        whole += [str(name) for name in points]
    return reduced(call, operands, points, whole=whole, others=[[]])


def loss_of_rows(call: Call) -> ShardingRule:
    """Relate vectors, a target of each, and a loss of each vector; the reduction is over vectors."""
    rank = max(len(shape) for shape in call.operands)
    lead = positions(rank - 1, "b")
    operands: dict[str, Labels] = {}
    for name, numbers in call.numbers.items():
        shape = call.operands[numbers[0]]
        is_row = len(shape) == rank
        if name != "weight":
            operands[name] = [*lead, None] if is_row else lead[len(lead) - len(shape) :]
    return reduced(call, operands, lead, others=[[*lead, None]], summed=[0])


def alignment_loss(call: Call) -> ShardingRule:
    """Relate scores of shape [time, batch, classes], labels, lengths and a loss of each example."""
    is_batched = call.rank("log_probs") == 3 and call.rank("targets") == 2
    if not is_batched or call.rank("input_lengths") != 1 or call.rank("target_lengths") != 1:
        return relate(call)
    operands: dict[str, Labels] = {"log_probs": [None, "n", None], "targets": ["n", None]}
    operands |= {"input_lengths": ["n"], "target_lengths": ["n"]}
    return reduced(call, operands, ["n"])


RULES: dict[str, Rule] = table(
    (layer_norm, "layer_norm native_layer_norm rms_norm _fused_rms_norm"),
    (group_norm, "group_norm native_group_norm"),
    (batch_norm, "batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm"),
    (batch_norm, "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training"),
    (batch_norm, "_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update"),
    (convolution, "convolution _convolution conv*d conv_transpose*d"),
    (time_convolution, "conv_tbc"),
    (
        images(1, is_linear=True),
        "avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d",
    ),
    (images(2, is_linear=True), "avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d upsample_nearest2d"),
    (images(3, is_linear=True), "avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d upsample_nearest3d"),
    (
        images(2, is_linear=True),
        "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    (images(2, is_linear=True), "_upsample_nearest_exact2d"),
    (images(3, is_linear=True), "_upsample_nearest_exact3d upsample_trilinear3d"),
    (images(1), "max_pool1d max_pool1d_with_indices adaptive_max_pool1d"),
    (images(2), "max_pool2d max_pool2d_with_indices adaptive_max_pool2d max_unpool2d"),
    (images(2), "max_pool2d_with_indices_backward"),
    (images(3), "max_pool3d max_pool3d_with_indices adaptive_max_pool3d max_unpool3d"),
    (fractional_pool, "fractional_max_pool2d fractional_max_pool3d"),
    (grid_sample, "grid_sampler grid_sampler_2d grid_sampler_3d"),
    (affine_grid, "affine_grid_generator"),
    (unfolded_windows, "im2col col2im"),
    (attention, "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu"),
    (attention, "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"),
    (attention, "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"),
    (recurrent, "lstm gru rnn_tanh rnn_relu"),
    (cell, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    (loss_of_classes, "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward cross_entropy_loss"),
    (loss_of_rows, "multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward cosine_embedding_loss"),
    (loss_of_rows, "triplet_margin_loss"),
    (alignment_loss, "ctc_loss"),
)
