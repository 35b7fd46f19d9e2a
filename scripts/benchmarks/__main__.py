"""`scripts/bench NAME`: run one benchmark; with --write, put its tables into docs/."""

import argparse
from importlib import import_module

BENCHMARKS = {
    "paper": "the strategies beside those of the PaSE paper (docs/paper.md)",
    "search": "whole-process time of `pase search` (docs/benchmarks.md)",
    "growth": "time against devices and layers (docs/benchmarks.md)",
    "runtime": "programs: time to build, bytes moved beside the prediction (docs/benchmarks.md)",
    "strategies": "networks under random strategies beside one device (docs/testing.md)",
    "importers": "models of other frameworks: time, memory, vertices (docs/benchmarks.md)",
    "solver": "our solver beside others on the same tables (docs/benchmarks.md)",
}


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Run one benchmark.")
    chosen = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, text in BENCHMARKS.items():
        command = chosen.add_parser(name, help=text, description=text)
        command.add_argument("--write", action="store_true", help="put the tables into docs/, in place of the old ones")
        add_arguments = getattr(import_module(f"scripts.benchmarks.{name}"), "add_arguments", None)
        if add_arguments:
            add_arguments(command)
    arguments = vars(parser.parse_args())
    import_module(f"scripts.benchmarks.{arguments.pop('name')}").main(**arguments)


if __name__ == "__main__":
    main()
