"""What goes into the service and what comes out: one pydantic type per request and answer; unknown fields are refused.

The answer of ``POST /explain`` is the object of ``auditor explain --json`` with the request's id, timings, the
explainers' digests and the probabilities. For every explanation that gives contributions

    bias + sum of contributions + others + residual == target_value

where ``others`` is what ``top_k`` left out (0 without it).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from auditor.explainers.answer_options import AnswerOptions
from auditor.service.json_bodies import MAX_BATCH

# a grey 2 x 2 PNG, small enough for every example
TINY_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAAAAABX3VL4AAAADklEQVR4nGNsYGBiYAAAApIAhPd8o1gAAAAASUVORK5CYII="


class Message(BaseModel):
    """Base of every type here."""

    model_config = ConfigDict(extra="forbid")


# requests


class Options(AnswerOptions, Message):
    """What a caller may ask of an explanation; every field has a default."""


class ExplainRequest(Options):
    """Body of ``POST /explain`` as JSON; a multipart form has the same names, with the file as ``image``."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"image": TINY_PNG},
                {"image": TINY_PNG, "explainers": ["concepts"], "target": "7", "heatmaps": "none", "stability": "off"},
            ]
        },
    )

    image: str = Field(min_length=1, description="The image file in base64, or a data URL.")


class PredictRequest(Message):
    """Body of ``POST /predict`` as JSON; a multipart form has the file as ``image``."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"image": TINY_PNG}]})

    image: str = Field(min_length=1, description="The image file in base64, or a data URL.")


class ExplainBatchRequest(Options):
    """Body of ``POST /explain_batch`` as JSON; a multipart form repeats the part ``image``."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"images": [TINY_PNG, TINY_PNG], "heatmaps": "none", "stability": "off"}]},
    )

    images: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, max_length=MAX_BATCH, description="Image files in base64, or data URLs."
    )


class KServeRequest(Message):
    """Body of ``POST /v1/models/{name}:explain`` and ``:predict``, KServe's V1 protocol.

    An instance is ``{"b64": …}``, ``{"image": …}`` with options as in ``POST /explain``, a base64 string, or pixels as
    nested lists (height, width, channels) of numbers in [0, 1].
    """

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"instances": [{"b64": TINY_PNG}]}]})

    instances: list[Any] = Field(min_length=1, max_length=MAX_BATCH, description="Images in one of the forms above.")
    parameters: Options = Field(default_factory=Options, description="Options for all instances.")


class InferTensor(Message):
    """The tensor of ``POST /v2/models/{name}/infer``: image files, or pixels."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(description="Any name.")
    shape: list[int] = Field(description="(images,) of files, (images, height, width[, channels]) of pixels.")
    datatype: str = Field(description="BYTES for files; UINT8 (0 to 255), FP16, FP32 or FP64 (0 to 1) for pixels.")
    data: Any = Field(default=None, description="Files in base64; numbers, flat or nested. Absent where binary.")
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferOutput(BaseModel):
    """An output that is asked for."""

    name: Literal["label", "index", "probability", "explanation"]


class InferRequest(Message):
    """Body of ``POST /v2/models/{name}/infer``, KServe's V2 protocol (Open Inference Protocol)."""

    model_config = ConfigDict(
        extra="ignore",  # KServe's clients add fields of their own, such as the model's name
        json_schema_extra={
            "examples": [{"inputs": [{"name": "images", "shape": [1], "datatype": "BYTES", "data": [TINY_PNG]}]}]
        },
    )

    id: str = Field(default="", max_length=200, description="Comes back with the answer.")
    inputs: list[InferTensor] = Field(min_length=1, max_length=1)
    outputs: list[InferOutput] = Field(
        default_factory=list, description="`explanation` is computed when it is named here. None named: all others."
    )
    parameters: Options | dict[str, Any] = Field(
        default_factory=Options, description="Options of the explanation; what KServe's own clients add is ignored."
    )


# answers


class ClassProbability(Message):
    """A class with its probability."""

    index: int
    label: str
    probability: float


class Prediction(ClassProbability):
    """What the model says, and its most probable classes, the most probable first."""

    probabilities: list[ClassProbability] = Field(description="At most the ten most probable classes.")
    labels: list[ClassProbability] | None = Field(
        default=None, description="Of a multi-label model: the labels that are more likely than not."
    )


class TargetClass(Message):
    """The class that is explained, with the model's logit for it."""

    index: int
    label: str
    logit: float


class HeatGrid(Message):
    """A heatmap as numbers."""

    size: tuple[int, int] = Field(description="Height and width of the grid.")
    values: list[list[float]]


class ConceptAnswer(Message):
    """One concept behind the decision; ``contribution`` is null for kinds that give relevance only."""

    index: int
    label: str
    activation: float
    contribution: float | None
    heatmap: str | HeatGrid | None = Field(description="Null, a PNG as a data URL (`png`), or a grid (`array`).")
    note: str = ""


class ExplanationAnswer(Message):
    """What one explainer says of the image."""

    name: str
    kind: str
    digest: str = Field(description="Sha256 of the explainer's artifact, verified before it was used.")
    target_value_of: str = Field(default="logit", description="What the parts add up to: the model's `logit`, or else.")
    target: TargetClass = Field(description="As asked; when none is asked for, the one it was fitted for, or its own.")
    target_value: float = Field(
        description="The model's logit of the target, or a value of the explainer's own; see `target_value_of`."
    )
    bias: float | None
    residual: float | None
    others: float = Field(default=0.0, description="Sum of the contributions that `top_k` left out.")
    concepts: list[ConceptAnswer]
    lines: list[str] = Field(default_factory=list, description="What it says beyond its concepts, as lines of text.")
    extra: dict[str, Any] = Field(default_factory=dict, description="What this kind adds to that.")
    problem: str = Field(default="", description="Why this explainer has nothing to say of this image, if so.")


class StabilityAnswer(Message):
    """How much layer and reasons move when the image moves a little; README says how to read it."""

    mode: Literal["fast", "full"]
    c1: float = Field(description="Zeroth order: largest change of the layer per change of the image.")
    c2: float = Field(description="First order: largest change of the gradient per change of the image.")
    radius: float
    samples: int
    bound: float | None = Field(description="Certified upper bound of c1 for every image, where there is one.")
    bound_reason: str = ""
    score: float = Field(ge=0, le=1, description="1: within the radius neither decision nor reasons change.")
    layer: str


class AttestationAnswer(Message):
    """Who says that the version passed its gate (``--require-verdict``)."""

    digest: str = Field(description="Sha256 of the verdict that was signed.")
    signer: str = Field(description="Name of the trusted key.")
    keyid: str
    time: str
    says: str = Field(description="PASSED: what the verification summary says.")
    expires: str = Field(default="", description="When the signer's key or certificate expires; empty: never.")


class ModelAnswer(Message):
    """Which model answered."""

    name: str
    version: str
    digest: str
    attestation: AttestationAnswer | None = Field(
        default=None, description="Who says that it passed its gate; null: the server was not asked to require it."
    )


class ExplainAnswer(Message):
    """Answer of ``POST /explain``."""

    prediction: Prediction
    target: TargetClass
    explanations: list[ExplanationAnswer]
    stability: StabilityAnswer | None
    model: ModelAnswer
    timings: dict[str, float] = Field(
        description="Milliseconds per stage: read, queue, forward, each explainer's name, stability, draw, total."
    )
    request_id: str


class PredictAnswer(Message):
    """Answer of ``POST /predict``."""

    prediction: Prediction
    model: ModelAnswer
    timings: dict[str, float]
    request_id: str


class ErrorBody(Message):
    """What was wrong: a code for programs, a sentence for people."""

    code: str = Field(examples=["bad_image"])
    message: str = Field(examples=["the image cannot be read; send a PNG, JPEG or other image file."])
    request_id: str


class ErrorAnswer(Message):
    """Every answer of status 400 and above."""

    error: ErrorBody


class ExplainBatchAnswer(Message):
    """Answer of ``POST /explain_batch``: per image, in order, an answer or an error. One bad image hurts no other."""

    answers: list[ExplainAnswer | ErrorAnswer]
    n_errors: int
    model: ModelAnswer
    request_id: str


class ExplainerAnswer(Message):
    """One attached explainer, verified."""

    name: str
    kind: str
    digest: str
    layer: str | None
    labels: dict[int, str] = Field(description="Name of every concept by its index.")
    n_concepts: int
    metrics: dict[str, float | None]
    per_request: list[str] = Field(description="Options this explainer takes per request (`timeout_s`, `max_steps`).")
    default: bool = Field(description="Whether it answers when a request names no explainer.")
    searches: bool = Field(default=False, description="Whether it searches per image, which takes seconds.")
    groups: list[list[int]] = Field(
        default=[], description="Concepts that fire together in the same places, by index; each concept is in one."
    )
    gallery: bool = Field(description="Whether `GET /gallery/{name}` has pictures.")
    gallery_of_concepts: bool = Field(
        default=True, description="Whether the pictures at an index are of the concept with this index."
    )
    target_value_of: str = Field(default="logit", description="What its contributions add up to.")
    classes: list[int] | None = Field(default=None, description="The classes it can explain; null: all.")


class ModelInfo(Message):
    """Answer of ``GET /model``."""

    name: str
    version: str
    digest: str
    attestation: AttestationAnswer | None = None
    uri: str
    input_shape: tuple[int, int, int]
    resize: str = Field(
        default="stretch",
        pattern=r"^(stretch|crop)(-\d{1,5})?(-[a-z]+)?$",
        description="How an image comes to that size: stretched, or its middle; crop-256: scaled to 256 before.",
    )
    class_names: list[str]
    output: Literal["logits", "softmax", "log-softmax", "sigmoid", "multilabel"] = Field(
        default="logits", description="What the model puts out; probabilities and logits are right whatever it is."
    )
    engine: Literal["torch", "onnx"]
    engine_reason: str = ""
    explainers: list[str]
    loaded_at: str


class Sample(Message):
    """An image to try."""

    name: str
    label: str
    image: str = Field(description="PNG as a data URL.")


class GalleryPicture(Message):
    """One image that shows a concept well: a crop, where it is seen in it, and where the crop was taken."""

    id: str
    label: str
    score: float
    box: tuple[float, float, float, float] = Field(description="Top, left, bottom, right as shares of the image.")
    image: str = Field(description="PNG as a data URL.")
    heat: str = Field(description="The same crop with the concept laid over it, PNG as a data URL.")


class GalleryConcept(Message):
    """The pictures of one concept."""

    index: int
    label: str
    pictures: list[GalleryPicture]


class GallerySection(Message):
    """Concepts that belong together, such as those of one class: their title and the number of the first of them."""

    title: str
    first: int


class GalleryAnswer(Message):
    """Answer of ``GET /gallery/{explainer}``; no concepts where the kind keeps no pictures.

    Where an explainer has concepts per class, ``sections`` lists them and ``concepts`` are those of one of them: of the
    section that ``?concept=`` belongs to.
    """

    explainer: str
    kind: str
    concepts: list[GalleryConcept]
    sections: list[GallerySection] = []
    section: int = Field(default=0, description="Which of the sections these concepts are of.")


class KServeExplainAnswer(Message):
    """Answer of ``POST /v1/models/{name}:explain``."""

    explanations: list[ExplainAnswer]


class KServePredictAnswer(Message):
    """Answer of ``POST /v1/models/{name}:predict``."""

    predictions: list[Prediction]


class InferredTensor(Message):
    """One output: a value per image."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class InferAnswer(Message):
    """Answer of ``POST /v2/models/{name}/infer``."""

    id: str
    model_name: str
    model_version: str
    outputs: list[InferredTensor]


class TensorMetadata(Message):
    """What a tensor is; -1 is any number."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Message):
    """Answer of ``GET /v2/models/{name}``."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(Message):
    """Answer of ``GET /v2``."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(Message):
    """Answer of ``GET /v2/health/live``."""

    live: bool


class ServerReady(Message):
    """Answer of ``GET /v2/health/ready``."""

    ready: bool


class KServeModel(Message):
    """Answer of ``GET /v1/models/{name}`` and of ``GET /v2/models/{name}/ready``."""

    name: str
    ready: bool
