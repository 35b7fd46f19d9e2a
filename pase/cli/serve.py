"""`pase serve`: a page on this machine that plans again while its sliders are moved."""

from typing import Any

import click

from pase.cli.options import WholeNumber, chosen_plan, complete_models, plan_options, time_limit_option
from pase.cli.output import say
from pase.cli.progress import progress
from pase.errors import ConfigurationError
from pase.views.served.server import serve


@click.command("serve", epilog="Example: pase serve plan.json")
@click.argument("plan", metavar="PLAN|MODEL", shell_complete=complete_models)
@plan_options
@click.option(
    "--port", type=WholeNumber(min=0, max=65535), default=0, show_default="any that is free", help="Of the page."
)
@time_limit_option(
    "Seconds for each answer: what is found by then is shown with its gap.", default=5.0, show_default=True
)
def serve_command(plan: str, port: int, time_limit_s: float, **model: Any) -> None:
    """Show PLAN, or the best one for MODEL on --devices, on a page that plans again while its sliders are moved.

    The page is for this machine alone, and for those who have the address that is printed. Ctrl-C ends it.
    """
    with progress() as on_progress:
        found = chosen_plan(plan, model, on_progress)
    try:
        serve(found, port=port, time_limit_s=time_limit_s, on_ready=say)
    except OSError as error:
        raise ConfigurationError(f"port {port} cannot be listened on: {error.strerror}; give another one") from None
