"""The sources of data, by name: one line here for each."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pase.datasets import files, images
from pase.datasets.dataset import PARTS, Dataset, Part, Read, Source
from pase.errors import DatasetError, unknown_name


def _entries(*rows: tuple[str, str, str, Read, bool]) -> Mapping[str, Source]:
    return MappingProxyType(
        {
            name: Source(
                name=name,
                form=f"{name}:{path}" if path else name,
                description=description,
                needs_path=bool(path),
                has_parts=has_parts,
                read=read,
            )
            for name, path, description, read, has_parts in rows
        }
    )


SOURCES: Mapping[str, Source] = _entries(
    ("digits", "", "8×8 digits that scikit-learn ships, enlarged to 1×28×28", images.read_digits, True),
    ("mnist", "FOLDER", "MNIST, 1×28×28: the four IDX files, plain or .gz", images.read_mnist, True),
    ("cifar10", "PATH", "CIFAR-10, 3×32×32: folder of the binary version, or its .tar.gz", images.read_cifar10, True),
    ("arrays", "PATH", "arrays of your own: an .npz file, or a folder of .npy files", files.read, False),
)


def load_dataset(text: str, *, part: Part = "train") -> Dataset:
    """Return one part of the data that a user names: ``digits``, ``mnist:FOLDER``, ``cifar10:PATH`` or a path.

    A plain path is that of arrays, which are one part, whichever is asked for. Images and labels are as Dataset says;
    those of MNIST and CIFAR-10 have E(X) = 0 and σ(X) = 1 over the images to train on (You et al. 2017, Algorithm 1,
    line 1). Raises DatasetError where there are no such data, or they are damaged; MissingExtraError.
    """
    if part not in PARTS:
        raise DatasetError(unknown_name("part", part, PARTS))
    source, path = _named(text)
    try:
        return source.read(path, part)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"cannot read {text}: {reason}; expected files that can be read") from None
    except MemoryError:
        raise DatasetError(f"{text} does not fit in memory; train on fewer examples, or where there is more") from None


def has_parts(text: str) -> bool:
    """Return whether a text names examples to test with beside those to train on; DatasetError for no data at all."""
    return _named(text)[0].has_parts


def _named(text: str) -> tuple[Source, Path | None]:
    """Return the source that a text names and the path in it: a name of the registry comes before a file's."""
    name, _, rest = text.partition(":")
    source = SOURCES.get(name)
    if source is None:
        return SOURCES["arrays"], _own_path(text)
    if source.needs_path != bool(rest):
        problem = "needs a path" if source.needs_path else "takes no path"
        raise DatasetError(
            f"data {text!r}: {name} {problem}; expected {source.form} (for a file of that name: ./{text})"
        )
    return source, _path(rest) if rest else None


def _own_path(text: str) -> Path:
    path = _path(text)
    try:
        if text and path.exists():
            return path
    except (OSError, ValueError):
        pass  # no name of a file: one that is too long, for example
    forms = ", ".join(source.form for source in SOURCES.values())
    raise DatasetError(
        f"there are no data {text!r}; expected {forms}, or the path of an .npz file or a folder of .npy files"
    )


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()  # the shell expands no ~ behind a colon
    except RuntimeError as error:
        raise DatasetError(f"path {text!r}: {error}; write it out") from None
