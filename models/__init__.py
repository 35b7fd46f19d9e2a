"""The built-in networks, by name; each one's module is imported when it is first used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from pase.errors import ModelError, unknown_name
from pase.graph import Graph
from pase.graph.operator import Scalar

__all__ = ["MODELS", "ModelEntry", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A built-in network.

    Attributes:
        module: Module of its builder, a function with the network's name.
        default_batch: Default number of samples in a step.
    """

    name: str
    module: str
    description: str
    default_batch: int

    @property
    def builder(self) -> Callable[..., Graph]:
        """Builder of the network, a function of keyword arguments; imports its module."""
        builder: Callable[..., Graph] = getattr(import_module(f"{__name__}.{self.module}"), self.name)
        return builder

    @property
    def parameters(self) -> dict[str, Scalar]:
        """Parameters of the builder and their defaults, as written on the command line; batch is the first."""
        from pase.models.parameters import parameters_of

        return {parameter.name: parameter.default for parameter in parameters_of(self.builder)}


def _entries(*rows: tuple[str, str, int, str]) -> dict[str, ModelEntry]:
    return {
        name: ModelEntry(name=name, module=module, default_batch=batch, description=description)
        for name, module, batch, description in rows
    }


MODELS: Mapping[str, ModelEntry] = _entries(
    ("alexnet", "alexnet", 128, "AlexNet, one tower (Krizhevsky 2014); grouped=true for the two of 2012"),
    ("inception_v3", "inception_v3", 128, "InceptionV3 (Szegedy et al. 2015) without its auxiliary head"),
    ("rnnlm", "rnnlm", 64, "recurrent language model: embedding, LSTM layers as one vertex, projection"),
    ("transformer", "transformer", 64, "Transformer, encoder and decoder, base (Vaswani et al. 2017)"),
    ("transformer_big", "transformer", 64, "Transformer, encoder and decoder, big (Vaswani et al. 2017)"),
    ("lenet5", "lenet5", 128, "LeNet-5 (LeCun et al. 1998) with 10 classes"),
    ("vgg16", "vgg", 128, "VGG-16 (Simonyan and Zisserman 2014, configuration D)"),
    ("vgg19", "vgg", 128, "VGG-19 (Simonyan and Zisserman 2014, configuration E)"),
    ("googlenet", "googlenet", 128, "GoogLeNet (Szegedy et al. 2015) without its auxiliary classifiers"),
    ("resnet101", "resnet101", 128, "ResNet-101 (He et al. 2015), stride in the 3x3 convolution"),
    ("densenet121", "densenet121", 128, "DenseNet-121 (Huang et al. 2016)"),
    ("bert_large", "bert_large", 64, "BERT-large (Devlin et al. 2018) with the masked-language-model head"),
    ("gpt", "gpt", 64, "GPT-2 small (Radford et al. 2019); layers, model_width and heads make it any other"),
    ("mlp", "mlp", 128, "multilayer perceptron of any depth and width"),
)


def build(name: str, *, batch: int | None = None, arguments: Mapping[str, Scalar] | None = None) -> Graph:
    """Build a built-in network.

    Args:
        name: Name of the network.
        batch: Samples in a training step; default: the model's own.
        arguments: Parameters of the builder, as values or as text from a command line.

    Raises:
        ModelError: Unknown model or parameter, or an invalid value.
        GraphError: The network cannot be built at this size (an image smaller than a window).
    """
    from pase.models.parameters import check_names

    if name not in MODELS:
        raise ModelError(unknown_name("model", name, MODELS))
    given = dict(arguments or {})
    if batch is not None:
        if "batch" in given:
            raise ModelError(
                f"the batch of model {name!r} is given twice, as {batch} and as batch={given['batch']}; give it once"
            )
        given["batch"] = batch
    builder = MODELS[name].builder
    check_names(builder, name, given)
    return builder(**given)
