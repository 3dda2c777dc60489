"""``auditor fit``: an explainer fitted to a model and attached to its version."""

from __future__ import annotations

from typing import Any

import click

from auditor.commands.cluster_option import CLUSTER
from auditor.commands.config_file import CONFIG
from auditor.commands.device_option import DEVICE
from auditor.commands.group import (
    JSON,
    LABELS,
    LIMIT,
    PICKLE,
    SEED,
    SIGN_KEY,
    auditor,
    example,
    now_holds,
    reports_errors,
    stop,
)
from auditor.errors import AuditError

KIND = "auditor.kind"  # where a command's context keeps the kind whose help is asked for


class OfKind(click.Command):
    """A command whose help, with a kind named, lists the options of that kind: ``auditor fit nmf --help``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the kind for the help."""
        if args and not args[0].startswith("-") and set(args) & set(ctx.help_option_names):
            ctx.meta[KIND] = args[0]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's options, then the kind's with their defaults."""
        super().format_options(ctx, formatter)
        kind = ctx.meta.get(KIND)
        if kind is None:
            return
        from auditor.commands.kinds import options_of

        try:
            options = options_of(kind)
        except AuditError as error:
            stop(f"error: {error}", 2)
        with formatter.section(f"Options of {kind} (--set KEY=VALUE)"):
            formatter.write_dl(
                [(name, f"{o['description']}  [default: {o['default']}]") for name, o in options.items()]
            )


@auditor.command(
    cls=OfKind,
    epilog=example(
        "auditor fit nmf models:/digits/1 --data sklearn:digits --name concepts --set rank=10",
        "auditor fit nmf models:/birds@champion --data photos/ --layer layer4 --set rank=auto",
        "auditor fit deepfacto models:/digits/1 --data sklearn:digits --set rank=16 --register",
        "auditor fit xnn models:/digits/1 --data sklearn:digits --export",
        "auditor fit nmf --help                     # the options of a kind",
        "auditor fit --config audit.toml",
    ),
)
@click.argument("kind")
@click.argument("model")
@click.option("--data", required=True, help="Images to fit on; see auditor --help.")
@LABELS
@click.option("--name", help="Name under which it is attached; default: the kind.")
@click.option("--layer", help="Layer to explain; default: the one auditor layers suggests.")
@click.option("--target", help="Class to explain, by name or index; default: whatever is predicted.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the kind; may be repeated.")
@LIMIT
@click.option("--strict", is_flag=True, help="A broken image is an error, not a warning.")
@click.option("--attach-anyway", is_flag=True, help="Attach it even when it does not stand in for the model.")
@click.option("--dry-run", is_flag=True, help="Fit and measure, but attach nothing.")
@click.option("--register", is_flag=True, help="Also register the network that the kind makes as a new version.")
@click.option(
    "--export/--no-export",
    default=None,
    help="Also store the version's ONNX graph, for auditor serve.  [default: when there is one already]",
)
@CLUSTER
@DEVICE
@SEED
@PICKLE
@SIGN_KEY
@CONFIG
@JSON
@reports_errors("nothing was attached")
def fit(
    kind: str,
    model: str,
    data: str,
    labels: str | None,
    name: str | None,
    layer: str | None,
    target: str | None,
    settings: tuple[str, ...],
    limit: int | None,
    strict: bool,
    attach_anyway: bool,
    dry_run: bool,
    register: bool,
    export: bool | None,
    cluster: str | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Fit an explainer of KIND to MODEL and attach it to the version."""
    from auditor.commands.terminal import Bar, as_text, parse_settings, say, waiting
    from auditor.data.source import open_data
    from auditor.explainers.base import explainer_class, parse_config
    from auditor.plugins import attach, load_subject
    from auditor.plugins.registry.attachments import check_name
    from auditor.plugins.registry.lineage import register_network
    from auditor.plugins.registry.location import resolve
    from auditor.runners.cluster import counted_work

    cls = explainer_class(kind)
    config = parse_config(cls, _without_none(layer=layer, target=target, seed=seed) | parse_settings(settings))
    name = check_name(name or kind)
    source = open_data(data, strict=strict, limit=limit, seed=seed, labels=labels)
    _check_can_store(cls, register, export, dry_run)
    version = resolve(model, registered=not dry_run)  # once, before minutes of fitting
    with waiting(f"loading {model}"):
        subject = load_subject(version, allow_pickle=allow_pickle or None)
    with counted_work(cluster) as work, Bar() as bar:
        explainer = cls(config).fit(subject, source, bar)
    explainer.name = name
    digest = registered = None
    _say_shortcomings(explainer, attach_anyway, dry_run)
    if not dry_run:
        now_holds(f"auditor list {model} says whether {name!r} is attached already")
        with waiting(f"attaching {name}"):
            digest = attach(
                explainer, version, name, subject=subject, export=export, attach_anyway=attach_anyway
            ).digest
        now_holds(f"{name!r} is attached" + (", its network is not registered" if register else ""))
    if register:
        with waiting("registering the network"):
            registered = register_network(explainer, version, subject=subject)
        now_holds(f"{name!r} is attached and its network registered as {registered}")
    if as_json:
        say(as_text({**_about(explainer, digest), **work, **({"registered": registered} if register else {})}))
        return
    done = f"attached to models:/{subject.name}/{subject.version}" if digest else "fitted, not attached"
    headline = f"{kind} {name!r}{_of_layer(explainer)} {done}" + (f" ({digest[:12]})" if digest else "")
    _show(explainer, headline, None if limit is None else source.sample.words, bool(export), registered)


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _of_layer(explainer: Any) -> str:
    return f" of layer {explainer.layer_}" if explainer.layer_ else ""


def _about(explainer: Any, digest: str | None) -> dict[str, Any]:
    """Return what --json says of a fitted explainer."""
    about = {"name": explainer.name, "kind": explainer.kind, "digest": digest, "layer": explainer.layer_}
    return {**about, "metrics": explainer.metrics, "remarks": explainer.remarks()}


def _show(explainer: Any, headline: str, sample_words: str | None, exported: bool, registered: str | None) -> None:
    """Print what was done, on which images, what else was stored, and the metrics."""
    from auditor.commands.terminal import say, table

    say(headline)
    if sample_words:
        say(f"fitted on {sample_words}")
    if exported:
        say("the version's ONNX graph is stored; auditor serve uses it")
    if registered:
        say(f"its network is registered as {registered}")
    for remark in explainer.remarks():
        say(f"note: {remark}")
    table(["metric", "value"], [[key, f"{value:.4g}"] for key, value in explainer.metrics.items()])


def _say_shortcomings(explainer: Any, attach_anyway: bool, dry_run: bool) -> None:
    """Stop where it does not stand in for the model; with --attach-anyway or --dry-run it is only a warning."""
    from auditor.commands.terminal import note

    if not (attach_anyway or dry_run):
        explainer.check_stands_in()
    for reason in explainer.shortcomings():
        note(f"auditor: {explainer.name} does not stand in for the model: {reason}")


def _check_can_store(cls: Any, register: bool, export: bool | None, dry_run: bool) -> None:
    """Raise now what would stop --register or --export after minutes of fitting."""
    from auditor.errors import OptionError
    from auditor.explainers.onnx_export import check_can_export
    from auditor.plugins.registry.lineage import check_has_network

    if register:
        check_has_network(cls)
        if dry_run:
            raise OptionError("--register needs an attached explainer to point to; leave --dry-run out.")
    if export:
        if dry_run:
            raise OptionError("--export stores a graph beside an attached explainer; leave --dry-run out.")
        check_can_export()
