"""`python -m tests.zoo`: train models of the zoo beside the modules themselves."""

import argparse
import sys
from pathlib import Path

from tests.targets.torch.ranks import Pool
from tests.zoo.registry import zoo
from tests.zoo.report import PAGE, summary, written
from tests.zoo.runner import CRASHED, PLANS, WRONG, Report, run


def main() -> None:
    models = zoo()
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Train the zoo beside the modules alone.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of models or families [all]")
    parser.add_argument("--world", type=int, action="append", metavar="N", help="processes; may be repeated [2 and 4]")
    parser.add_argument("--plans", action="append", choices=PLANS, help="may be repeated [all]")
    parser.add_argument("--list", action="store_true", help="print names alone")
    parser.add_argument("--write", action="store_true", help=f"write the results to {PAGE}")
    arguments = parser.parse_args()
    wanted = arguments.names or list(models)
    families = {model.family for model in models.values()}
    if unknown := [name for name in wanted if name not in models and name not in families]:
        parser.error(f"the zoo has no {unknown[0]!r}; --list prints what it has")
    names = [name for name, model in models.items() if name in wanted or model.family in wanted]
    if arguments.list:
        print("\n".join(f"{models[name].family}: {name}" for name in names))
        return
    pool, reports = Pool(), list[Report]()
    try:
        for report in run(pool, names, arguments.world or (2, 4), arguments.plans or PLANS):
            print(report.text(), flush=True)
            reports.append(report)
    finally:
        pool.end()
    print(summary(reports))
    if arguments.write:
        Path(PAGE).write_text(written(reports))
    sys.exit(any(report.kind in (WRONG, CRASHED) for report in reports))


if __name__ == "__main__":
    main()
