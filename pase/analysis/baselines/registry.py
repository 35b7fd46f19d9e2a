"""The strategies to compare with, by name: one module and one line here for each."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType

from pase.analysis.baselines import data_parallel, integrated_grid, mcmc, megatron, mesh_tensorflow, owt, rnn
from pase.analysis.baselines.baseline import Baseline, Choose
from pase.analysis.baselines.mcmc import Sampling
from pase.errors import ConfigurationError, unknown_name


def _entries(*rows: tuple[str, Choose, str, str, str]) -> Mapping[str, Baseline]:
    return MappingProxyType(
        {
            name: Baseline(name=name, description=description, source=source, needs=needs, choose=choose)
            for name, choose, source, needs, description in rows
        }
    )


_ATTENTION = "attention"

EXPERTS: Mapping[str, Baseline] = _entries(
    (
        "data_parallel",
        data_parallel.choose,
        "the standard practice",
        "anything",
        "the batch of every layer over all devices",
    ),
    (
        "owt",
        owt.choose,
        "one weird trick, Krizhevsky 2014",
        "convolutions, dense layers behind them, no attention",
        "convolutions data parallel, dense layers split by what they make",
    ),
    (
        "rnn",
        rnn.choose,
        "GNMT, Wu et al. 2016",
        "a stack of several recurrent layers that pipelines",
        "recurrent layers one behind the other on different devices, the batch over the rest",
    ),
    (
        "mesh_tensorflow",
        mesh_tensorflow.choose,
        "Shazeer et al. 2018",
        _ATTENTION,
        "the cheapest mesh: batch n ways; vocabulary, hidden units and heads m ways",
    ),
    (
        "megatron",
        megatron.choose,
        "Shoeybi et al. 2019",
        _ATTENTION,
        "pairs of products split by columns and rows within a node, the batch over the rest",
    ),
    (
        "integrated_grid",
        integrated_grid.choose,
        "Gholami et al. 2018",
        "no weights but those of convolutions and dense layers",
        "the cheapest grid: batch pc ways; channels, or rows of images, pr ways",
    ),
)
"""Rules, which look at costs only to choose between a few sizes of their own."""


def baselines(sampling: Sampling | None = None) -> Mapping[str, Baseline]:
    """Return every baseline by name; sampling: how the random search is done."""
    experts = tuple(expert.choose for expert in EXPERTS.values())
    search = partial(mcmc.choose, options=sampling or Sampling(), experts=experts)
    description = "random search by Metropolis-Hastings, as in FlexFlow"
    searches = _entries(("mcmc", search, "FlexFlow, Jia et al. 2018", "anything", description))
    return MappingProxyType({**EXPERTS, **searches})


BASELINES: Mapping[str, Baseline] = baselines()


def chosen(names: Iterable[str] = (), sampling: Sampling | None = None) -> tuple[Baseline, ...]:
    """Return the baselines of some names, or all for none; ConfigurationError for a name that none has."""
    every = baselines(sampling)
    names = tuple(names)
    for name in names:
        if name not in every:
            raise ConfigurationError(unknown_name("baseline", name, every))
    return tuple(entry for name, entry in every.items() if not names or name in names)
