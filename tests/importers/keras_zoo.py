"""Small Keras models that together use every family of layers; imports Keras only when a model is made."""

from collections.abc import Callable
from typing import Any


def modules() -> tuple[Any, Any, Any]:
    """Return (keras, keras.layers, keras.ops)."""
    import keras

    return keras, keras.layers, keras.ops


def cnn(data_format: str = "channels_last") -> Any:
    keras, layers, _ = modules()
    axis = 1 if data_format == "channels_first" else -1
    with_format = {"data_format": data_format}
    x = keras.Input((16, 16, 8) if axis == -1 else (8, 16, 16))
    y = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu", **with_format)(x)
    y = layers.BatchNormalization(axis=axis)(y)
    z = layers.Conv2D(16, 3, padding="same", groups=4, **with_format)(y)
    y = layers.Add()([layers.ReLU()(z), y])
    y = layers.DepthwiseConv2D(3, padding="same", **with_format)(y)
    y = layers.MaxPooling2D(2, **with_format)(y)
    y = layers.Concatenate(axis=axis)([y, layers.Conv2D(16, 1, **with_format)(y)])
    y = layers.GlobalAveragePooling2D(**with_format)(y)
    return keras.Model(x, layers.Dense(8, activation="softmax")(y), name="cnn")


def images() -> Any:
    keras, layers, _ = modules()
    x = keras.Input((32, 32, 6))
    y = layers.Rescaling(1 / 255)(layers.RandomFlip()(x))
    y = layers.SeparableConv2D(10, 3, depth_multiplier=2, padding="same")(y)
    y = layers.DepthwiseConv2D(3, depth_multiplier=2)(y)
    y = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(y)
    y = layers.UpSampling2D(2)(y)
    y = layers.Conv2D(4, 3, groups=2, dilation_rate=2)(y)
    y = layers.ZeroPadding2D(((1, 2), (3, 4)))(y)
    y = layers.Cropping2D(((1, 1), (2, 0)))(y)
    y = layers.GroupNormalization(2)(y)
    y = layers.PReLU(shared_axes=[1, 2])(y)
    y = layers.AveragePooling2D(3, padding="same")(y)
    y = layers.Softmax(axis=(1, 2))(y)
    return keras.Model(x, layers.Dense(4)(layers.Flatten()(y)), name="images")


def sequences() -> Any:
    keras, layers, _ = modules()
    x = keras.Input((64, 6))
    y = layers.Conv1D(8, 3, padding="causal", dilation_rate=2)(x)
    y = layers.AveragePooling1D(2)(layers.SeparableConv1D(8, 3)(y))
    y = layers.UpSampling1D(2)(layers.Cropping1D(1)(layers.ZeroPadding1D(2)(y)))
    y = layers.RepeatVector(5)(layers.GlobalMaxPooling1D()(y))
    y = layers.Reshape((10, -1))(layers.Permute((2, 1))(y))
    y = layers.RMSNormalization()(layers.UnitNormalization()(y))
    y = layers.SpectralNormalization(layers.Dense(4))(y)
    return keras.Model(x, y, name="sequences")


def volumes() -> Any:
    keras, layers, _ = modules()
    x = keras.Input((8, 16, 16, 2))
    y = layers.Conv3DTranspose(4, 3)(layers.MaxPooling3D(2)(layers.Conv3D(4, 3)(x)))
    y = layers.GlobalAveragePooling3D()(layers.BatchNormalization(scale=False)(y))
    return keras.Model(x, layers.Dense(4)(y), name="volumes")


def recurrent() -> Any:
    keras, layers, _ = modules()
    x = keras.Input((9,), dtype="int32")
    y = layers.Embedding(100, 16, mask_zero=True)(x)
    y = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(y)
    y = layers.Bidirectional(layers.SimpleRNN(6, return_sequences=True), merge_mode="sum")(y)
    y = layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)], return_sequences=True)(y)
    y = layers.TimeDistributed(layers.Dense(5))(y)
    y, h = layers.GRU(12, return_state=True)(y)
    return keras.Model(x, layers.Dense(3)(layers.Concatenate()([y, h])), name="recurrent")


def transformer() -> Any:
    keras, layers, _ = modules()
    x, memory = keras.Input((16, 32)), keras.Input((20, 24))
    y = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8, dropout=0.1)(x, x, use_causal_mask=True))
    y = y + layers.MultiHeadAttention(4, 8, value_dim=6)(y, memory)
    y = y + layers.GroupQueryAttention(8, 4, 2)(y, y)
    y = layers.Dense(32)(layers.Dense(64, "gelu")(y))
    y = layers.Concatenate()([layers.Attention()([y, x]), layers.AdditiveAttention()([y, x])])
    z = layers.EinsumDense("abc,cde->abde", (None, 4, 8), bias_axes="de")(y)
    z = layers.EinsumDense("...de,def->...f", (7,), bias_axes="f", activation="relu")(z)
    return keras.Model([x, memory], z, name="transformer")


def merges() -> Any:
    keras, layers, _ = modules()
    x, z = keras.Input((8,)), keras.Input((8,))
    kinds = (layers.Add, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum, layers.Subtract)
    pairs = [[layers.Dense(4)(x), layers.Dense(4)(z)] for _ in range(8)]
    found = [kind()(pair) for kind, pair in zip(kinds, pairs, strict=False)]
    found += [layers.Dot(1)(pairs[6]), layers.Dot(1, normalize=True)(pairs[7])]
    return keras.Model([x, z], layers.Concatenate()(found), name="merges")


def operations() -> Any:
    keras, layers, ops = modules()
    x = keras.Input((16, 32))
    w = layers.Dense(32)(x)
    y = ops.softmax(ops.matmul(x, ops.transpose(w, (0, 2, 1))))
    y = ops.einsum("bst,btd->bsd", y, w)[:, 1:, ::2]
    y = ops.reshape(ops.concatenate([y, -y], axis=-1), (-1, 15, 4, 8))
    p, q = ops.split(y, 2, axis=2)
    y = ops.mean(ops.stack([p * 2.0, ops.exp(q)], axis=1), axis=(1, 3))
    y = ops.where(y > 0, y, ops.zeros_like(y))
    y = ops.swapaxes(y, 1, 2)[..., 0]
    return keras.Model(x, layers.Dense(2)(y), name="operations")


def nested() -> Any:
    keras, layers, _ = modules()
    entry = keras.Input((16,))
    inner = keras.Model(entry, layers.Dense(16, "relu")(entry), name="inner")
    chain = keras.Sequential([keras.Input((16,)), layers.Dense(8), layers.Dropout(0.1), layers.Dense(16)], name="chain")
    x = keras.Input((16,))
    y = layers.Add()([chain(inner(inner(x))), x])
    return keras.Model(x, layers.Dense(2)(y), name="nested")


def resnet(depths: tuple[int, ...] = (3, 4, 23, 3), size: int = 224) -> Any:
    """The residual network of the PyTorch zoo, layer by layer."""
    keras, layers, _ = modules()

    def convolution(x: Any, width: int, kernel: int, stride: int = 1) -> Any:
        x = layers.Conv2D(width, kernel, strides=stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    x = keras.Input((size, size, 3))
    y = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(convolution(x, 64, 7, 2)))
    for stage, depth in enumerate(depths):
        for i in range(depth):
            width, stride = 64 << stage, 2 if stage and not i else 1
            z = layers.ReLU()(convolution(y, width, 1))
            z = layers.ReLU()(convolution(z, width, 3, stride))
            z = convolution(z, 4 * width, 1)
            if stride > 1 or y.shape[-1] != 4 * width:
                y = convolution(y, 4 * width, 1, stride)
            y = layers.ReLU()(layers.Add()([z, y]))
    y = layers.Dense(1000)(layers.GlobalAveragePooling2D()(y))
    return keras.Model(x, y, name="resnet")


ZOO: dict[str, Callable[[], Any]] = {
    "cnn": cnn,
    "images": images,
    "merges": merges,
    "nested": nested,
    "operations": operations,
    "recurrent": recurrent,
    "sequences": sequences,
    "transformer": transformer,
    "volumes": volumes,
}
