"""`scripts/bench NAME`: run one benchmark; with --write, put its tables into docs/."""

import argparse
from importlib import import_module
from types import ModuleType

BENCHMARKS = {
    "paper": "the strategies beside those of the PaSE paper (docs/paper.md)",
    "report": "what a report takes to make and to open (docs/benchmarks.md)",
    "startup": "what `import pase` and `pase --help` take (docs/benchmarks.md)",
    "session": "planning again after one change, beside a search (docs/benchmarks.md)",
    "search": "whole-process time of `pase search` (docs/benchmarks.md)",
    "levels": "strategies for machines with and without levels (docs/machines.md)",
    "step": "what hides behind the backward pass, and what that changes (docs/step.md)",
    "peak": "the peak of a step beside what PyTorch's tracker of memory counts (docs/memory.md)",
    "modes": "the peak of a step in every mode of its layers, likewise (docs/memory.md)",
    "kernels": "steps of one process beside their prediction by timed kernels (docs/kernels.md)",
    "published": "steps that others measured beside their prediction (docs/published.md)",
    "published-search": "the best of these beside what a search finds (docs/benchmarks.md)",
    "large": "large training: searches beside every step that Megatron allows (docs/benchmarks.md)",
    "growth": "time against devices and layers (docs/benchmarks.md)",
    "memory": "what a limit on the memory of a device costs (docs/benchmarks.md)",
    "simulation": "simulated steps beside measured ones (docs/simulation.md)",
    "cluster": "steps on a cluster of one machine beside their prediction (docs/cluster.md)",
    "cluster-parts": "steps in modes, micro-batches and stages there beside their prediction (docs/cluster.md)",
    "figure6": "speedups over data parallelism beside the PaSE paper's Fig. 6 (docs/paper.md)",
    "runtime": "programs: time to build, bytes moved beside the prediction (docs/benchmarks.md)",
    "torch": "steps of `pase.parallelize` beside PyTorch's own ways (docs/benchmarks.md)",
    "strategies": "networks under random strategies beside one device (docs/testing.md)",
    "easgd": "LeNet-5 with every algorithm on 4 workers: samples and time (docs/easgd.md)",
    "importers": "models of other frameworks: time, memory, vertices (docs/benchmarks.md)",
    "integrated": "figures and statements of the integrated-parallelism paper (docs/integrated.md)",
    "easgd-model": "figures of the EASGD paper beside its cost model (docs/easgd-model.md)",
    "compare": "our strategies beside those of others (docs/baselines.md)",
    "explain": "the worked example (docs/explain.md)",
    "constraints": "searches within constraints beside an integer program (docs/benchmarks.md)",
    "solver": "our solver beside others on the same tables (docs/benchmarks.md)",
}


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Run one benchmark.")
    chosen = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, text in BENCHMARKS.items():
        command = chosen.add_parser(name, help=text, description=text)
        command.add_argument("--write", action="store_true", help="put the tables into docs/, in place of the old ones")
        add_arguments = getattr(_module(name), "add_arguments", None)
        if add_arguments:
            add_arguments(command)
    arguments = vars(parser.parse_args())
    _module(arguments.pop("name")).main(**arguments)


def _module(name: str) -> ModuleType:
    return import_module(f"scripts.benchmarks.{name.replace('-', '_')}")


if __name__ == "__main__":
    main()
