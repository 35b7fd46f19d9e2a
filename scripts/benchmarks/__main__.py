"""`scripts/bench NAME`: run one benchmark; with --write, put its tables into docs/."""

import argparse
from importlib import import_module

BENCHMARKS = {
    "paper": "the strategies beside those of the PaSE paper (docs/paper.md)",
    "search": "whole-process time of `pase search` (docs/benchmarks.md)",
}


def main() -> None:
    """Run the benchmark that the command line names."""
    listing = "\n".join(f"  {name:8} {text}" for name, text in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Run one benchmark:\n" + listing,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/, in place of the old ones")
    arguments = parser.parse_args()
    import_module(f"scripts.benchmarks.{arguments.name}").main(write=arguments.write)


if __name__ == "__main__":
    main()
