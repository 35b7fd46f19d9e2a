"""RNNLM: the recurrent language model of PaSE section IV (after Mikolov et al. 2010, with LSTM cells)."""

from pase.graph import Builder, Graph
from pase.graph.operators import dense, embedding, lstm, softmax_loss
from pase.models.parameters import DepthOrNone, network


@network
def rnnlm(
    *, batch: int = 64, vocabulary: int = 100_000, units: int = 2048, steps: int = 256, layers: DepthOrNone = 2
) -> Graph:
    """Return an embedding, `layers` LSTM layers as one vertex, a projection to the vocabulary and a softmax loss.

    Every layer, the embedding included, is `units` wide. layers=0 leaves the LSTM out. A path graph with dims
    b (batch), s (step), d (embedding), e (hidden), v (vocabulary), l (layer).
    """
    net = Builder("rnnlm")
    x = net.add(embedding, "embedding", net.input((batch, steps)), vocabulary=vocabulary, size=units)
    if layers:
        x = net.add(lstm, "lstm", x, layers=layers, units=units)
        # The output of the last of the layers is what the projection reads.
        x = net.reshape(x, (batch, steps, units))
    x = net.add(dense, "fc", x, lead=("b", "s"), out=(("v", vocabulary),), reduce=("d",))
    net.add(softmax_loss, "softmax", x, dims=("b", "s", "v"))
    return net.build()
