"""Explain one image file by what is attached to a version: what ``auditor explain`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, DataError, ModelError
from auditor.explainers.answer_options import EVERY, AnswerOptions, options_of
from auditor.plugins.registry.attachments import attached_layer, load
from auditor.plugins.registry.attachments import names as attached_names
from auditor.plugins.registry.location import ModelVersion, resolve
from auditor.plugins.registry.subjects import load_subject

if TYPE_CHECKING:
    from auditor.explainers.answer import Answer, ExplainedModel


def explain_image(uri: str, image: Path, *, allow_pickle: bool | None = None, **options: Any) -> dict[str, Any]:
    """Return the answer for one image file, as ``POST /explain`` gives it, without its times and request id.

    The keywords are the fields of ``AnswerOptions``: ``explain_image("models:/m/1", path, target="7", top_k=3)``.
    """
    return answer_image(uri, image, options_of("explain_image", options), allow_pickle=allow_pickle).to_json()


def answer_image(uri: str, image: Path, options: AnswerOptions, *, allow_pickle: bool | None = None) -> Answer:
    """Return the answer for one image file; the URI is resolved once, so a moving alias changes nothing under way."""
    import torch

    from auditor.explainers.answer import Question, answer, class_of, raised
    from auditor.subject.preprocessing import read_image

    if not image.exists():
        raise DataError(f"image {image}: no such file; give the path of a PNG, JPEG or other image.")
    version = resolve(uri, registered=True)
    if not attached_names(version):
        raise ModelError(f"nothing is attached to {uri}; fit something first: auditor fit nmf {uri} --data DATA.")
    subject = load_subject(version, allow_pickle=allow_pickle)
    x = torch.from_numpy(read_image(image, subject.preprocessing))
    if options.target is not None:
        class_of(subject, options.target)  # before artifacts are fetched
    model = explained_version(version, subject, options)
    return raised(answer(model, [Question.of(model, x, options)])[0])


def explained_version(version: ModelVersion, subject: Any, options: AnswerOptions) -> ExplainedModel:
    """Return a version with the explainers that options ask for, verified and loaded.

    The stability is that of the first layer any attached explainer reads, whichever were asked for.
    """
    from auditor.explainers.answer import ExplainedModel, chosen_names

    attached = attached_names(version)
    named = None if options.explainers is None or EVERY in options.explainers else options.explainers
    names = chosen_names(attached, named, attached)
    explainers = {name: load(version, name, subject=subject) for name in attached if name in names}
    layer = None
    for name in attached:
        try:
            layer = explainers[name].layer_ if name in explainers else attached_layer(version, name)
        except AuditError:  # one that was not asked for and does not verify: nothing depends on it
            continue
        if layer:
            break
    return ExplainedModel.of(subject, explainers, stability_layer=layer)


def draw_answer(answer: Answer, out: Path) -> None:
    """Write heatmaps and a contact sheet per explainer as PNG, and the pages that can show one image."""
    from auditor.attribution.heatmap import overlay
    from auditor.explainers.contact_sheet import contact_sheet

    out.mkdir(parents=True, exist_ok=True)
    x = answer.question.x
    for name, explanation in answer.explanations.items():
        explainer = answer.explainers[name]
        if explainer.page_shows_image:
            explainer.write_page(answer.subject, out / f"{name}{explainer.page_suffixes[0]}", explanation, x)
        for c in explanation.concepts:
            if c.heatmap is not None:
                picture = overlay(x, c.heatmap, positive=c.counts_for, side=256)
                picture.save(out / f"{name}-{c.index:02d}.png")
        contact_sheet(x[None], [explanation], out / f"{name}.png", n_concepts=6)
