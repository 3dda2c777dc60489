"""Commands about attached explainers: fit, list, verify, detach, label."""

from __future__ import annotations

import sys

import click

from auditor.commands.group import JSON, PICKLE, SEED, auditor, example, tells


@auditor.command(
    epilog=example(
        "auditor fit nmf models:/digits/1 --data sklearn:digits --name concepts --set rank=10",
        "auditor fit nmf models:/birds@champion --data photos/ --layer layer4 --set rank=auto",
        "auditor fit deepfacto models:/digits/1 --data sklearn:digits --set rank=16 --register",
        "auditor fit xnn models:/digits/1 --data sklearn:digits --export",
    )
)
@click.argument("kind")
@click.argument("model")
@click.option("--data", required=True, help="Images to fit on; see auditor --help.")
@click.option("--name", help="Name under which it is attached; default: the kind.")
@click.option("--layer", help="Layer to explain; default: the one auditor layers suggests.")
@click.option("--target", help="Class to explain, by name or index; default: whatever is predicted.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the kind; may be repeated.")
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N images only.")
@click.option("--strict", is_flag=True, help="A broken image is an error, not a warning.")
@click.option("--dry-run", is_flag=True, help="Fit and measure, but attach nothing.")
@click.option("--register", is_flag=True, help="Also register the network made (kind deepfacto) as a new version.")
@click.option(
    "--export/--no-export",
    default=None,
    help="Also store the version's ONNX graph, for auditor serve.  [default: when there is one already]",
)
@SEED
@PICKLE
@JSON
@tells
def fit(
    kind: str,
    model: str,
    data: str,
    name: str | None,
    layer: str | None,
    target: str | None,
    settings: tuple[str, ...],
    limit: int | None,
    strict: bool,
    dry_run: bool,
    register: bool,
    export: bool | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Fit an explainer of KIND to MODEL and attach it to the version."""
    from auditor.data.source import open_data
    from auditor.errors import OptionError
    from auditor.explainers.base import explainer_class, parse_config
    from auditor.explainers.onnx_export import check_can_export
    from auditor.plugins import attach, load_subject
    from auditor.plugins.registry.lineage import check_has_network, register_network
    from auditor.plugins.registry.location import resolve
    from auditor.plugins.registry.attachments import check_name
    from auditor.commands.terminal import Bar, as_text, parse_settings, say, table, waiting

    cls = explainer_class(kind)
    options = {"layer": layer, "target": target, "seed": seed, **parse_settings(settings)}
    config = parse_config(cls, {k: v for k, v in options.items() if v is not None})
    name = check_name(name or kind)
    source = open_data(data, strict=strict, limit=limit)
    if register:
        check_has_network(cls)
        if dry_run:
            raise OptionError("--register needs an attached explainer to point to; leave --dry-run out.")
    if export:
        if dry_run:
            raise OptionError("--export stores a graph beside an attached explainer; leave --dry-run out.")
        check_can_export()
    if not dry_run:
        resolve(model, registered=True)  # before minutes of fitting
    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
    with Bar() as bar:
        explainer = cls(config).fit(subject, source, bar)
    explainer.name = name
    digest = None
    if not dry_run:
        with waiting(f"attaching {name}"):
            digest = attach(explainer, model, name, subject=subject, export=export).digest
    registered = None
    if register:
        with waiting("registering the network"):
            registered = register_network(explainer, model, subject=subject)
    if as_json:
        answer = {"name": name, "kind": kind, "digest": digest, "layer": explainer.layer_, "metrics": explainer.metrics}
        say(as_text({**answer, "registered": registered} if register else answer))
        return
    done = f"attached to models:/{subject.name}/{subject.version}" if digest else "fitted, not attached"
    say(f"{kind} {name!r} of layer {explainer.layer_} {done}" + (f" ({digest[:12]})" if digest else ""))
    if export:
        say("the version's ONNX graph is stored; auditor serve uses it")
    if registered:
        say(f"its network is registered as {registered}")
    table(["metric", "value"], [[key, f"{value:.4g}"] for key, value in explainer.metrics.items()])


@auditor.command("list", epilog=example("auditor list models:/digits/1"))
@click.argument("model")
@PICKLE
@JSON
@tells
def list_(model: str, allow_pickle: bool, as_json: bool) -> None:
    """List the explainers attached to MODEL, their metrics, and whether they verify."""
    from auditor.plugins import list_attached, load_subject
    from auditor.plugins.registry.attachments import names
    from auditor.commands.terminal import as_text, say, table, waiting

    with waiting(f"looking at {model}"):
        attached = names(model)
        found = list_attached(model, subject=load_subject(model, allow_pickle=allow_pickle or None)) if attached else []
    if as_json:
        say(as_text([x.to_json() for x in found]))
        return
    if not found:
        say(f"Nothing is attached to {model}; try: auditor fit nmf {model} --data …")
        return
    shown = ("f_cls", "relative_error", "basis_stability", "accuracy_tree", "agreement", "flip_area")
    body = [
        [
            x.name,
            x.kind,
            x.digest[:12],
            x.layer or "",
            "yes" if x.verified else f"NO: {x.problem}",
            "  ".join(f"{k} {x.metrics[k]:.3f}" for k in shown if k in x.metrics),
        ]
        for x in found
    ]
    table(["name", "kind", "digest", "layer", "verified", "metrics"], body)


@auditor.command(epilog=example("auditor verify models:/digits/1 && echo untouched"))
@click.argument("model")
@PICKLE
@JSON
@tells
def verify(model: str, allow_pickle: bool, as_json: bool) -> None:
    """Check every byte of what is attached to MODEL; exit 1 when anything is not what was attached."""
    from auditor.plugins import verify as verify_version
    from auditor.commands.terminal import as_text, note, say, waiting

    with waiting(f"verifying {model}"):
        found = verify_version(model, allow_pickle=allow_pickle or None)
    bad = [x for x in found if not x.verified]
    if as_json:
        say(as_text({"verified": not bad, "explainers": [x.to_json() for x in found]}))
    else:
        for x in bad:
            note(f"{x.name}: {x.problem}")
        good = len(found) - len(bad)
        say(f"{good} of {len(found)} attached explainers verify." if found else f"Nothing is attached to {model}.")
    if bad:
        sys.exit(1)


@auditor.command(epilog=example("auditor detach models:/digits/1 concepts"))
@click.argument("model")
@click.argument("name")
@JSON
@tells
def detach(model: str, name: str, as_json: bool) -> None:
    """Remove the explainer NAME from MODEL; its files stay in the artifact store, unseen."""
    from auditor.plugins import detach as detach_explainer
    from auditor.commands.terminal import as_text, say

    detach_explainer(model, name)
    say(as_text({"detached": name}) if as_json else f"Detached {name} from {model}.")


@auditor.command(epilog=example('auditor label models:/digits/1 concepts 3 "upper loop"'))
@click.argument("model")
@click.argument("name")
@click.argument("concept", type=int)
@click.argument("text")
@PICKLE
@JSON
@tells
def label(model: str, name: str, concept: int, text: str, allow_pickle: bool, as_json: bool) -> None:
    """Name CONCEPT (its number) of the explainer NAME; stored as a new attached revision."""
    from auditor.naming import name_concept
    from auditor.plugins import attach, load, load_subject
    from auditor.commands.terminal import as_text, say, waiting

    with waiting(f"labelling {name}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        explainer = name_concept(load(model, name, subject=subject), concept, text)
        digest = attach(explainer, model, name, subject=subject).digest
    answer = {"name": name, "concept": concept, "label": explainer.label(concept), "digest": digest}
    say(as_text(answer) if as_json else f"Concept {concept} of {name} is now {answer['label']!r} ({digest[:12]}).")
