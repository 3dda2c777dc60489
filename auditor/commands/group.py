"""What all commands share: the group, common options, and errors as one line that says what was done and what not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from auditor import __version__
from auditor.errors import AuditError
from auditor.signing import keys

log = logging.getLogger(__name__)
LONGEST_MESSAGE = 240  # characters of what another library says

JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
PICKLE = click.option("--allow-pickle", is_flag=True, help="Load models stored as pickles (they can run any code).")
SEED = click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of all that is random."
)
FRESH = click.option("--fresh", is_flag=True, help="Measure everything again, whatever was finished or stored.")
IMAGES = click.option(
    "--images", default=100, show_default=True, type=click.IntRange(min=20), help="Images to explain and measure on."
)
LIMIT = click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Use N images, spread over the classes, drawn by the seed."
)
LABELS = click.option(
    "--labels",
    metavar="CSV",
    help="Which label of the data is which class of the model, where their names differ: lines folder,class (by name "
    "or number; - for none). 'none' leaves all labels out.",
)
HONEST_HELP = (
    "Versions that differ by their training run only, for the noise of retraining. "
    "Default: earlier versions that passed a gate on the same data."
)
DATA_HELP = "Images to measure on; see auditor --help."


def _choose_key(ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Sign with this key until the command ends; one that cannot be read stops it before any work."""
    if path is None:
        return
    from auditor.signing.keys import signing_with

    try:
        ctx.with_resource(signing_with(path))
    except AuditError as error:
        stop(f"error: {error}", 2)


SIGN_KEY = click.option(
    "--sign-key",
    type=click.Path(path_type=Path),
    envvar=keys.VARIABLE,
    callback=_choose_key,
    expose_value=False,
    help=f"Private key (PEM), or sigstore, to sign the result with; see auditor keys.  [env: {keys.VARIABLE}]",
)
TRUSTED = click.option(
    "--trusted",
    type=click.Path(path_type=Path),
    envvar=keys.TRUSTED_VARIABLE,
    help=f"Folder of public keys whose signatures count; see auditor keys.  [env: {keys.TRUSTED_VARIABLE}]",
)

OUTCOME = "auditor.outcome"  # where a command's context keeps what holds when it ends now


class WithHonest(click.Command):
    """A command whose ``--honest`` takes all values up to the next option: ``--honest models:/m/3 models:/m/4``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each of its values."""
        spread: list[str] = []
        inside = False
        for i, arg in enumerate(args):
            inside = arg == "--honest" or (inside and not arg.startswith("-"))
            if inside and arg != "--honest" and args[i - 1] != "--honest":
                spread.append("--honest")
            spread.append(arg)
        return super().parse_args(ctx, spread)


def example(*lines: str) -> str:
    """Return an epilog that shows how a command is used."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def reports_errors(unfinished: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn every AuditError into one line on standard error and exit code 2.

    ``unfinished`` is what holds when a disk error or Ctrl-C ends the command before it is done, until `now_holds` says
    something else.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            now_holds(unfinished)
            try:
                return function(*args, **kwargs)
            except AuditError as error:
                stop(f"error: {' '.join(str(error).split())}", 2)
            except BrokenPipeError:  # the reader of our output has gone: click ends quietly
                raise
            except OSError as error:  # a full disk, a folder that may not be written
                what = f" ({error.filename})" if error.filename else ""
                stop(f"error: {error.strerror or error}{what}; {_outcome()}.", 2)
            except KeyboardInterrupt:
                stop(f"interrupted; {_outcome()}.", 130)
            except (click.exceptions.Exit, click.Abort, click.ClickException):
                raise
            except Exception as error:  # whatever library raised it: 1 is a verdict and nothing else
                log.info("what raised it", exc_info=True)  # shown by auditor -v
                stop(f"error: {_first_sentence(error)}; {_outcome()}. (auditor -v shows where it was raised.)", 2)

        return run

    return decorate


def _first_sentence(error: Exception) -> str:
    """Return what an error of a library says, with its class, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:LONGEST_MESSAGE]}".rstrip(".")


def signature_words(what: str) -> str:
    """Return who signs what a command makes, for its last lines."""
    from auditor.signing.keys import current_signer

    key = current_signer()
    return f"the {what} is unsigned (no --sign-key)" if key is None else f"the {what} is signed by {key.name}"


def now_holds(outcome: str) -> None:
    """Set what a disk error or Ctrl-C says from here on: a command calls it when a step cannot be undone any more."""
    click.get_current_context().meta[OUTCOME] = outcome


def _outcome() -> str:
    return str(click.get_current_context().meta[OUTCOME])


def stop(line: str, code: int) -> NoReturn:
    """Say one line on standard error and end with a code."""
    from auditor.commands.terminal import note

    note(f"auditor: {line}")
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="auditor")
@click.option("-v", "--verbose", is_flag=True, help="Say more about each phase.")
def auditor(verbose: bool) -> None:
    """Make a registered image model explain itself, measure the explanations, and gate releases on them.

    MODEL is any MLflow model URI: models:/name/3, models:/name@champion, runs:/RUN_ID/model. The server or database
    is the one MLflow would use (MLFLOW_TRACKING_URI). DATA is a folder of images, Parquet, Arrow or tar files, on
    disk or in a store (s3://, gs://, az://, https://), an .npz (images, labels), sklearn:digits, or
    torchvision:NAME?root=PATH&split=test.

    Start with: auditor demo
    """
    from auditor.commands.terminal import set_up_logging

    set_up_logging(verbose)
