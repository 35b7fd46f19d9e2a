"""Packaging of PaSE: `pip install -e ".[mesh]"`, with `-c constraints.txt` for the versions known to work together."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# Networks live in ./models and are installed as pase.models. In a checkout pase/models is a link to them, with which
# pase is laid out as it is imported: mypy follows it, and an editable installation is one line in a .pth file instead
# of an import hook that every start of Python pays for. Where links were lost on the way, the folder is named.
if (ROOT / "pase" / "models").is_dir():
    PACKAGES = find_packages(include=["pase", "pase.*"])
    PACKAGE_DIR = {"": "."}
else:
    PACKAGES = [
        *find_packages(include=["pase", "pase.*"]),
        "pase.models",
        *(f"pase.models.{name}" for name in find_packages("models")),
    ]
    PACKAGE_DIR = {"pase.models": "models"}

EXTRAS = {
    # What emitted programs run on, and the assignment problem that places shards on devices.
    "mesh": ["tensorflow-cpu==2.21.*", "mesh-tensorflow==0.1.21", "safetensors>=0.5", "scipy>=1.13"],
    # Front ends: each one imports models of one framework.
    "onnx": ["onnx>=1.23"],
    "torch": ["torch>=2.6"],
    # The importer puts JAX in place of what Keras computes with, which was tried with these alone.
    "keras": ["keras>=3.15", "tensorflow-cpu==2.21.*", "jax>=0.10"],
    "jax": ["jax>=0.5"],
    # The 8×8 digits that scikit-learn ships, to train on.
    "data": ["scikit-learn>=1.6"],
    # The page of pase serve.
    "serve": ["starlette>=1.0", "uvicorn>=0.40"],
    # Plans as data frames, and as graphs of networkx.
    "notebook": ["networkx>=3.2", "pandas>=2.2"],
    # The site of the documentation.
    "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=1.0"],
    # Other exact solvers, to compare with, and the plots of docs/benchmarks.md.
    "bench": ["highspy>=1.10", "matplotlib>=3.10", "ortools>=9.12", "pulp[cbc]>=3.3", "pytoulbar2>=1.4"],
    "dev": [
        # Models to import, and programs to compare imported ones with.
        "accelerate>=1.15",
        "diffusers>=0.42",
        # An engine that searches may run in.
        "distributed>=2026.8",
        "equinox>=0.13",
        "flax>=0.12",
        "onnxruntime>=1.20",
        "transformers>=5.0",
        "hypothesis>=6.100",
        "ipython>=9.0",
        "jsonschema>=4.23",
        "mypy>=1.15",
        # Drives a browser, which it does not bring: Chromium, to look at reports with.
        "playwright>=1.50",
        "pre-commit>=4.0",
        "pytest>=8.3",
        "pytest-cov>=6.0",
        "pytest-xdist>=3.6",
        "ruff>=0.9",
        "scipy-stubs>=1.15",
        "types-jsonschema>=4.23",
    ],
}


def version() -> str:
    """Return `pase.__version__`, read as text because importing pase needs what is not installed yet."""
    text = (ROOT / "pase" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('pase/_version.py holds no line of the form __version__ = "1.2.3"')
    return found[1]


def long_description() -> str:
    """Return the README, or nothing where it is not shipped."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


setup(
    name="pase",
    version=version(),
    description="Finds the cheapest way to train a neural network on many devices, and writes the parallel program",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    # Only what was tried.
    python_requires=">=3.11,<3.14",
    install_requires=["click>=8.1", "msgspec>=0.20", "numpy>=2.0", "rich>=13.7"],
    extras_require=EXTRAS,
    packages=PACKAGES,
    package_dir=PACKAGE_DIR,
    package_data={
        "pase": ["py.typed", "**/*.json", "**/*.toml", "views/reports/page/**/*"],
        "pase.models": ["**/*.json", "**/*.toml"],
    },
    include_package_data=False,
    zip_safe=False,
    entry_points={"console_scripts": ["pase = pase.cli:main"]},
)
