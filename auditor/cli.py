"""The ``auditor`` command: puts all parts together. Imports happen inside commands, so that help is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
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
            from auditor.terminal import note

            note(f"auditor: error: {' '.join(str(error).split())}")
            sys.exit(2)
        except OSError as error:  # a full disk, a folder that may not be written
            if isinstance(error, BrokenPipeError):
                raise
            from auditor.terminal import note

            what = f" ({error.filename})" if error.filename else ""
            note(f"auditor: error: {error.strerror or error}{what}; nothing was attached.")
            sys.exit(2)
        except KeyboardInterrupt:
            from auditor.terminal import note

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
    from auditor.terminal import set_up_logging

    set_up_logging(verbose)


@auditor.command(epilog=example("auditor demo --dir demo"))
@click.option(
    "--dir", "folder", default="demo", show_default=True, type=click.Path(path_type=Path), help="Where to work."
)
@SEED
@JSON
@tells
def demo(folder: Path, seed: int, as_json: bool) -> None:
    """Train a small CNN on scikit-learn's digits, register it, explain it, and show what to type next."""
    from auditor.plugins.demo import run_demo
    from auditor.terminal import Bar, as_text, say

    with Bar() as bar:
        result = run_demo(folder, seed=seed, progress=bar)
    if as_json:
        say(as_text(result))
        return
    metrics = result["metrics"]
    say(
        f"Trained a CNN on the digits: {result['accuracy']:.1%} of the test images right.",
        f"Registered it as {result['model']} in {result['tracking_uri']}",
        f"Fitted and attached the concepts ({metrics['rank']:.0f} of layer {result['layer']}): the prediction from the "
        f"concepts alone agrees on {metrics['f_cls']:.1%} of held-out images.",
        f"Explained five test images: {result['sheet']}",
        "",
        "What to type next:",
        f"  export MLFLOW_TRACKING_URI={result['tracking_uri']}",
        f"  auditor layers  {result['model']}",
        f"  auditor list    {result['model']}",
        f"  auditor explain {result['model']} {result['image']} --out explained",
        f"  auditor fit nmf {result['model']} --data sklearn:digits --name finer --set rank=16",
        f"  auditor verify  {result['model']}",
    )


@auditor.command(epilog=example("auditor layers models:/digits/1", "auditor layers models:/digits/1 --all"))
@click.argument("model")
@click.option("--all", "show_all", is_flag=True, help="Also the layers that cannot be explained, and why.")
@PICKLE
@JSON
@tells
def layers(model: str, show_all: bool, allow_pickle: bool, as_json: bool) -> None:
    """List the layers of MODEL that can be explained, with shapes; the suggested one is marked."""
    from auditor.plugins import load_subject
    from auditor.terminal import as_text, say, table, waiting

    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        found, best = subject.layers(), subject.default_layer()
    if as_json:
        keys = ("name", "type", "shape", "nonnegative", "explainable", "reason")
        rows = [{**{k: getattr(x, k) for k in keys}, "suggested": x.name == best} for x in found]
        say(as_text(rows if show_all else [r for r in rows if r["explainable"]]))
        return
    body = []
    for x in found:
        if x.explainable or show_all:
            mark = "* suggested" if x.name == best else ("" if x.explainable else x.reason)
            grid = f"{x.layout.grid[0]} x {x.layout.grid[1]}" if x.layout else ""
            channels = str(x.layout.channels) if x.layout else ""
            body.append([x.name, x.type, channels, grid, "non-negative" if x.nonnegative else "signed", mark])
    table(["layer", "type", "channels", "positions", "sign", ""], body)


@auditor.command(
    epilog=example("auditor describe models:/m/1 --classes names.txt --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225")
)
@click.argument("model")
@click.option("--classes", type=click.Path(path_type=Path), help="File with one class name per line.")
@click.option("--mean", help="Mean of pixels in [0, 1], one number or one per channel, with commas.")
@click.option("--std", help="Standard deviation, likewise.")
@click.option("--size", help="Input size in pixels: HEIGHT,WIDTH or one number.")
@click.option("--resize", type=click.Choice(["stretch", "crop"]), help="How images of other sizes are brought to size.")
@PICKLE
@JSON
@tells
def describe(
    model: str,
    classes: Path | None,
    mean: str | None,
    std: str | None,
    size: str | None,
    resize: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Record class names, input size, mean and std with a version, so that nobody has to repeat them."""
    from auditor.plugins import describe as describe_version
    from auditor.terminal import as_text, numbers, read_names, say, waiting

    with waiting(f"describing {model}"):
        notes = describe_version(
            model,
            class_names=read_names(classes) if classes else None,
            mean=numbers("--mean", mean),
            std=numbers("--std", std),
            size=[int(n) for n in numbers("--size", size) or []] or None,
            resize=resize,
            allow_pickle=allow_pickle or None,
        )
    say(as_text(notes) if as_json else f"{model} now carries: {as_text(notes)}")


@auditor.command(
    epilog=example(
        "auditor fit nmf models:/digits/1 --data sklearn:digits --name concepts --set rank=10",
        "auditor fit nmf models:/birds@champion --data photos/ --layer layer4 --set rank=auto",
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
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Fit an explainer of KIND to MODEL and attach it to the version."""
    from auditor.data import open_data
    from auditor.explainer import explainer_class, parse_config
    from auditor.plugins import attach, load_subject
    from auditor.plugins.place import resolve
    from auditor.plugins.registry import check_name
    from auditor.terminal import Bar, as_text, parse_settings, say, table, waiting

    cls = explainer_class(kind)
    options = {"layer": layer, "target": target, "seed": seed, **parse_settings(settings)}
    config = parse_config(cls, {k: v for k, v in options.items() if v is not None})
    name = check_name(name or kind)
    source = open_data(data, strict=strict, limit=limit)
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
            digest = attach(explainer, model, name, subject=subject).digest
    if as_json:
        say(
            as_text(
                {"name": name, "kind": kind, "digest": digest, "layer": explainer.layer_, "metrics": explainer.metrics}
            )
        )
        return
    done = f"attached to models:/{subject.name}/{subject.version}" if digest else "fitted, not attached"
    say(f"{kind} {name!r} of layer {explainer.layer_} {done}" + (f" ({digest[:12]})" if digest else ""))
    table(["metric", "value"], [[key, f"{value:.4g}"] for key, value in explainer.metrics.items()])


@auditor.command("list", epilog=example("auditor list models:/digits/1"))
@click.argument("model")
@PICKLE
@JSON
@tells
def list_(model: str, allow_pickle: bool, as_json: bool) -> None:
    """List the explainers attached to MODEL, their metrics, and whether they verify."""
    from auditor.plugins import list_attached, load_subject
    from auditor.plugins.registry import names
    from auditor.terminal import as_text, say, table, waiting

    with waiting(f"looking at {model}"):
        attached = names(model)
        found = list_attached(model, subject=load_subject(model, allow_pickle=allow_pickle or None)) if attached else []
    if as_json:
        say(as_text([x.to_json() for x in found]))
        return
    if not found:
        say(f"Nothing is attached to {model}; try: auditor fit nmf {model} --data …")
        return
    shown = ("f_cls", "relative_error", "accuracy", "basis_stability")
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
    from auditor.terminal import as_text, note, say, waiting

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
    from auditor.terminal import as_text, say

    detach_explainer(model, name)
    say(as_text({"detached": name}) if as_json else f"Detached {name} from {model}.")


@auditor.command(epilog=example("auditor explain models:/digits/1 seven.png --out explained"))
@click.argument("model")
@click.argument("image", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the heatmap PNGs and a contact sheet.")
@click.option("--explainer", "chosen", multiple=True, help="Only this attached explainer; may be repeated.")
@click.option("--target", help="Class to explain, by name or index; default: the prediction.")
@click.option(
    "--samples", default=8, show_default=True, type=click.IntRange(min=1), help="Noise samples for stability."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds for explainers that search (rde)."
)
@SEED
@PICKLE
@JSON
@tells
def explain(
    model: str,
    image: Path,
    out: Path | None,
    chosen: tuple[str, ...],
    target: str | None,
    samples: int,
    timeout: float | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Explain one IMAGE by every explainer attached to MODEL, at the terminal or as PNGs."""
    from auditor.plugins.explain import explain_image
    from auditor.terminal import as_text, say, table, waiting

    with waiting(f"explaining {image.name}"):
        answer = explain_image(
            model,
            image,
            names=chosen,
            target=target,
            samples=samples,
            seed=seed,
            out=out,
            allow_pickle=allow_pickle or None,
            timeout_s=timeout,
        )
    if as_json:
        say(as_text(answer))
        return
    p, t = answer["prediction"], answer["target"]
    say(f"{image.name}: {p['label']} with probability {p['probability']:.1%}; logit of {t['label']}: {t['logit']:.3f}")
    for e in answer["explanations"]:
        say("", f"{e['name']} ({e['kind']})")
        ranked = sorted(e["concepts"], key=lambda c: -abs(c["contribution"] or c["activation"]))[:8]
        body = [
            [c["label"], f"{c['activation']:.4g}", "" if c["contribution"] is None else f"{c['contribution']:+.3f}"]
            for c in ranked
        ]
        if e["bias"] is not None:
            rest = sum(c["contribution"] for c in e["concepts"]) - sum(c["contribution"] for c in ranked)
            if len(e["concepts"]) > len(ranked):
                body.append([f"{len(e['concepts']) - len(ranked)} more", "", f"{rest:+.3f}"])
            body += [["bias", "", f"{e['bias']:+.3f}"], ["residual", "", f"{e['residual']:+.3f}"]]
            body.append(["= target value", "", f"{e['target_value']:+.3f}"])
        table(["concept", "activation", "contribution"], body)
        if "summary" in e.get("extra", {}):
            say(e["extra"]["summary"])
    s = answer["stability"]
    say(
        "",
        f"stability {s['score']:.2f} (c1 {s['c1']:.3g}, c2 {s['c2']:.3g}, radius {s['radius']}, n {s['samples']})",
    )
    if out is not None:
        say(f"pictures in {out}")


@auditor.command(
    epilog=example("auditor compare models:/digits/1 models:/digits/2 --data sklearn:digits --out drift.png")
)
@click.argument("model_a", metavar="MODEL")
@click.argument("model_b", metavar="MODEL")
@click.option("--data", required=True, help="Images that both versions look at; see auditor --help.")
@click.option("--layer", help="Layer to compare; default: the one auditor layers suggests for the first version.")
@click.option("--rank", default=10, show_default=True, type=click.IntRange(min=1), help="Concepts per version.")
@click.option(
    "--refits", default=8, show_default=True, type=click.IntRange(min=5), help="Fits per version, for the null."
)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N images only.")
@click.option("--out", type=click.Path(path_type=Path), help="Draw the comparison to this PNG.")
@SEED
@PICKLE
@JSON
@tells
def compare(
    model_a: str,
    model_b: str,
    data: str,
    layer: str | None,
    rank: int,
    refits: int,
    limit: int | None,
    out: Path | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Tell whether the concepts of two versions differ by more than re-fitting noise, and which ones."""
    from auditor.data import open_data
    from auditor.drift import check_comparable
    from auditor.drift import compare as compare_versions
    from auditor.drift_picture import drift_picture
    from auditor.plugins import load_subject
    from auditor.terminal import Bar, say, table, waiting

    source = open_data(data, limit=limit)
    with waiting(f"loading {model_a} and {model_b}"):
        a, b = (load_subject(uri, allow_pickle=allow_pickle or None) for uri in (model_a, model_b))
    check_comparable(a, b)
    with Bar() as bar:
        found = compare_versions(a, b, source, layer=layer, rank=rank, refits=refits, seed=seed, progress=bar)
    if out is not None:
        drift_picture(found, out, (model_a, model_b))
    if as_json:
        say(json.dumps(found.to_json()))
        return
    verdict = "DRIFT" if found.drift else "no drift"
    say(
        f"{verdict}: similarity {found.similarity:.3f}; re-fitting the same version explains down to "
        f"{found.null_low:.3f} (p = {found.p_value:.3f}, {found.n_images} images, layer {found.layers[0]})"
    )
    top = [found.classes[int(abs(row).argmax())] for row in found.change]
    body = [
        [
            str(i),
            str(j),
            f"{s:.3f}",
            "died / born" if i in found.died else "",
            f"{change[abs(change).argmax()]:+.3f}",
            name,
        ]
        for (i, j, s), change, name in zip(found.matched, found.change, top, strict=True)
    ]
    table(["concept A", "concept B", "similarity", "", "largest change", "for class"], body)
    table(["layer", "CKA"], [[name, f"{value:.3f}"] for name, value in found.cka.items()])
    if out is not None:
        say(f"picture in {out}")


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
    from auditor.terminal import say, waiting

    with waiting(f"labelling {name}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        explainer = name_concept(load(model, name, subject=subject), concept, text)
        digest = attach(explainer, model, name, subject=subject).digest
    answer = {"name": name, "concept": concept, "label": explainer.label(concept), "digest": digest}
    say(json.dumps(answer) if as_json else f"Concept {concept} of {name} is now {answer['label']!r} ({digest[:12]}).")


@auditor.command(epilog=example("auditor concepts models:/digits/1 concepts --out concepts.html"))
@click.argument("model")
@click.argument("name")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Page to write: .html or .png.")
@PICKLE
@JSON
@tells
def concepts(model: str, name: str, out: Path, allow_pickle: bool, as_json: bool) -> None:
    """Draw the concepts of the explainer NAME: top images, heatmaps, classes, and the latent space if it has one."""
    from auditor.concept_page import write_page
    from auditor.plugins import load, load_subject
    from auditor.terminal import say, waiting

    with waiting(f"drawing {name}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        path = write_page(load(model, name, subject=subject), subject, out)
    say(json.dumps({"name": name, "page": str(path)}) if as_json else f"page in {path}")


def main() -> None:
    """Run the command line."""
    # Threads that spin while waiting make everything crawl when cores are shared; set before torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    auditor(prog_name="auditor")
