"""What all commands share: the group, common options, and errors told in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from auditor.errors import AuditError

JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
PICKLE = click.option("--allow-pickle", is_flag=True, help="Load models stored as pickles (they can run any code).")
SEED = click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of all that is random."
)


def example(*lines: str) -> str:
    """Return an epilog that shows how a command is used."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def tells(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn every AuditError into one line on standard error and exit code 2."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AuditError as error:
            from auditor.commands.terminal import note

            note(f"auditor: error: {' '.join(str(error).split())}")
            sys.exit(2)
        except OSError as error:  # a full disk, a folder that may not be written
            if isinstance(error, BrokenPipeError):
                raise
            from auditor.commands.terminal import note

            what = f" ({error.filename})" if error.filename else ""
            note(f"auditor: error: {error.strerror or error}{what}; nothing was attached.")
            sys.exit(2)
        except KeyboardInterrupt:
            from auditor.commands.terminal import note

            note("auditor: interrupted; nothing was attached.")
            sys.exit(130)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mlflow-auditor", prog_name="auditor")
@click.option("-v", "--verbose", is_flag=True, help="Tell more about each phase.")
def auditor(verbose: bool) -> None:
    """Make a registered image model explain itself, measure the explanations, and gate releases on them.

    MODEL is any MLflow model URI: models:/name/3, models:/name@champion, runs:/RUN_ID/model. The server or database
    is the one MLflow would use (MLFLOW_TRACKING_URI). DATA is an image folder, an .npz (images, labels),
    sklearn:digits, or torchvision:NAME?root=PATH&split=test.

    Start with: auditor demo
    """
    from auditor.commands.terminal import set_up_logging

    set_up_logging(verbose)
