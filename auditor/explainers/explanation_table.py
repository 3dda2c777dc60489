"""Explanation table: answers of many images as rows of Arrow, one per image, the same columns whatever the kinds are.

An explanation is a struct with a list of concepts, so that tools that know Parquet can unnest it:
``SELECT image, e.name, c.label, c.contribution FROM t, UNNEST(explanations) e, UNNEST(e.concepts) c``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from auditor.explainers.answer import Answer

SCHEMA_VERSION = 1
PREFIX = "auditor."  # of our entries in a file's metadata

CONCEPT = pa.struct(
    [
        ("index", pa.int32()),
        ("label", pa.string()),
        ("activation", pa.float64()),
        ("contribution", pa.float64()),
        ("heatmap", pa.list_(pa.list_(pa.float32()))),
        ("heatmap_png", pa.string()),
        ("note", pa.string()),
    ]
)
EXPLANATION = pa.struct(
    [
        ("name", pa.string()),
        ("kind", pa.string()),
        ("digest", pa.string()),
        ("target_index", pa.int32()),
        ("target", pa.string()),
        ("target_value", pa.float64()),
        ("target_value_of", pa.string()),
        ("bias", pa.float64()),
        ("residual", pa.float64()),
        ("others", pa.float64()),
        ("problem", pa.string()),
        ("concepts", pa.list_(CONCEPT)),
    ]
)
STABILITY = pa.struct(
    [
        ("score", pa.float64()),
        ("c1", pa.float64()),
        ("c2", pa.float64()),
        ("bound", pa.float64()),
        ("radius", pa.float64()),
        ("samples", pa.int32()),
        ("mode", pa.string()),
        ("layer", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("image", pa.string()),
        ("position", pa.int64()),
        ("label", pa.string()),
        ("label_index", pa.int32()),
        ("prediction", pa.string()),
        ("prediction_index", pa.int32()),
        ("probability", pa.float64()),
        ("target", pa.string()),
        ("target_index", pa.int32()),
        ("target_logit", pa.float64()),
        ("stability", STABILITY),
        ("explanations", pa.list_(EXPLANATION)),
    ]
)


def row_of(answer: Answer, image: str, position: int, label: tuple[int, str] | None) -> dict[str, Any]:
    """Return the row of one image; ``label`` is the class that its data says it is of, as number and name."""
    said = answer.to_json()
    stability = said["stability"]
    return {
        "image": image,
        "position": position,
        "label": None if label is None else label[1],
        "label_index": None if label is None or label[0] < 0 else label[0],
        "prediction": said["prediction"]["label"],
        "prediction_index": said["prediction"]["index"],
        "probability": said["prediction"]["probability"],
        "target": said["target"]["label"],
        "target_index": said["target"]["index"],
        "target_logit": said["target"]["logit"],
        "stability": None if stability is None else {field.name: stability.get(field.name) for field in STABILITY},
        "explanations": [_explanation(entry) for entry in said["explanations"]],
    }


def _explanation(entry: Mapping[str, Any]) -> dict[str, Any]:
    target = entry["target"]
    flat = {
        "target_index": target["index"],
        "target": target["label"],
        "concepts": list(map(_concept, entry["concepts"])),
    }
    return {field.name: flat[field.name] if field.name in flat else entry[field.name] for field in EXPLANATION}


def _concept(concept: Mapping[str, Any]) -> dict[str, Any]:
    drawn = concept["heatmap"]
    return {
        "index": concept["index"],
        "label": concept["label"],
        "activation": concept["activation"],
        "contribution": concept["contribution"],
        "heatmap": drawn["values"] if isinstance(drawn, Mapping) else None,
        "heatmap_png": drawn if isinstance(drawn, str) else None,
        "note": concept["note"],
    }


def table_of(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> Any:
    """Return rows as a table; ``about`` goes into its metadata, each entry as JSON.

    >>> read_about(table_of([], {"model": {"digest": "ab"}}).schema.metadata)
    {'model': {'digest': 'ab'}, 'schema_version': 1}
    """
    notes = {**about, "schema_version": SCHEMA_VERSION}
    metadata = {PREFIX + name: json.dumps(value, sort_keys=True) for name, value in notes.items()}
    return pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata(metadata))


def read_about(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return what the metadata of a file says of it; what is not JSON of ours is left out."""
    about: dict[str, Any] = {}
    for key, value in (metadata or {}).items():
        name = key.decode(errors="replace")
        if name.startswith(PREFIX):
            try:
                about[name.removeprefix(PREFIX)] = json.loads(value)
            except ValueError:
                continue
    return about
