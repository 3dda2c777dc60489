"""Handlers of the public routes: parse, validate, queue, answer."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from auditor.errors import AuditError
from auditor.explainers.answer_options import deprecation, with_new_names
from auditor.explainers.manifest import finite
from auditor.service import kserve_v2
from auditor.service.batch_answer import AnswerJson, Job
from auditor.service.json_bodies import Part, check_count
from auditor.service.openapi import document, release
from auditor.service.problems import Problem, problem_of, problem_of_validation
from auditor.service.prometheus import exposition
from auditor.service.request_parsing import read, read_json, read_tensors
from auditor.service.served_version import ServedVersion
from auditor.service.settings import Settings
from auditor.service.tracing import describe_span, draw_stages
from auditor.service.types import (
    ExplainBatchRequest,
    ExplainRequest,
    InferRequest,
    KServeRequest,
    Options,
    PredictRequest,
)
from auditor.service.worker import Worker
from auditor.subject.preprocessing import from_array

RENAMED_SINCE = "@1794960000"  # 2026-11-18: since then an option has one name by every way
ONLY_PREDICT = Options(explainers=[], heatmaps="none", stability="off")


class Routes:
    """What each route does, on one worker; `auditor.service.routes` has the addresses."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.settings: Settings = worker.settings

    # answers

    async def explain(self, request: Request) -> Response:
        """Explain one image."""
        started = time.perf_counter()
        version = await self.worker.ready()
        body, (file,) = await read(request, ExplainRequest, decoders=self.worker.decoders)
        job = self._job_of(version, await self._pixels(version, file), body)
        return _json(await self._one(request, job, started), body.renamed)

    async def predict(self, request: Request) -> Response:
        """Predict one image."""
        started = time.perf_counter()
        version = await self.worker.ready()
        _, (file,) = await read(request, PredictRequest, decoders=self.worker.decoders)
        job = self._job_of(version, await self._pixels(version, file), ONLY_PREDICT)
        answer = await self._one(request, job, started)
        return _json({k: answer[k] for k in ("prediction", "model", "timings", "request_id")})

    async def explain_batch(self, request: Request) -> Response:
        """Explain several images; a bad one gets its error in its place."""
        started = time.perf_counter()
        version = await self.worker.ready()
        body, files = await read(request, ExplainBatchRequest, "images", self.worker.decoders)
        images = await self.worker.decoders.pixels(files, version.subject.preprocessing)
        jobs = [x if isinstance(x, Problem) else self._job_of(version, x, body) for x in images]
        return _json(await self._several(request, version, jobs, started), body.renamed)

    async def explainers(self, request: Request) -> Response:
        """Return what is attached."""
        return _json((await self.worker.ready()).describe())

    async def model(self, request: Request) -> Response:
        """Return what is served."""
        version = await self.worker.ready()
        subject = version.subject
        return _json(
            {
                **version.explained.identity,
                "uri": version.uri,
                "input_shape": list(subject.input_shape),
                "resize": subject.preprocessing.resize,
                "class_names": list(subject.class_names),
                "output": subject.output.name,
                "engine": version.forward.engine,
                "engine_reason": version.forward.reason,
                "explainers": list(version.explainers),
                "loaded_at": version.time,
            }
        )

    async def samples(self, request: Request) -> Response:
        """Give a few images to try."""
        return _json((await self.worker.ready()).samples)

    async def gallery(self, request: Request) -> Response:
        """Give the pictures kept of each concept."""
        version, name = await self.worker.ready(), request.path_params["explainer"]
        if name not in version.explainers:
            names = ", ".join(version.explainers) or "none"
            raise Problem(404, f"there is no explainer of this name; attached are: {names}.", code="unknown_explainer")
        n, first = version.explainers[name].n_concepts, request.query_params.get("concept", "0")
        if not first.isdecimal() or len(first) > 9 or int(first) >= max(1, n):
            sentence = f"concept: {name} has concepts 0 to {n - 1}, got {first[:20]!r}."
            raise Problem(404, sentence, code="unknown_concept")
        work = functools.partial(version.gallery, name, int(first))
        gallery = await asyncio.get_running_loop().run_in_executor(self.worker.threads, work)
        return _json(gallery)

    # KServe, V1 protocol

    async def kserve_models(self, request: Request) -> Response:
        """List the models, which is one."""
        return _json({"models": [(await self.worker.ready()).name]})

    async def kserve_model(self, request: Request) -> Response:
        """Return whether the model is ready."""
        version = await self._named(request)
        return _json({"name": version.name, "ready": True})

    async def kserve_explain(self, request: Request) -> Response:
        """Explain instances as KServe clients send them; one bad instance refuses the request, as they expect."""
        answers, renamed = await self._instances(request, None)
        return _json({"explanations": answers}, renamed)

    async def kserve_predict(self, request: Request) -> Response:
        """Predict instances as KServe clients send them."""
        answers, _ = await self._instances(request, ONLY_PREDICT)
        return _json({"predictions": [answer["prediction"] for answer in answers]})

    # KServe, V2 protocol

    async def v2_server(self, request: Request) -> Response:
        """Say what this server is."""
        return _json({"name": "mlflow-auditor", "version": release(), "extensions": ["binary_tensor_data"]})

    async def v2_live(self, request: Request) -> Response:
        """Say that the process lives."""
        return _json({"live": True})

    async def v2_ready(self, request: Request) -> Response:
        """Say that a model is loaded; 503 before."""
        await self.worker.ready()
        return _json({"ready": True})

    async def v2_model_ready(self, request: Request) -> Response:
        """Say that the model of this name is loaded."""
        return _json({"name": (await self._named(request)).name, "ready": True})

    async def v2_model(self, request: Request) -> Response:
        """Say what the model takes and gives."""
        version = await self._named(request)
        return _json(
            kserve_v2.metadata(version.name, version.explained.identity["version"], version.subject.input_shape)
        )

    async def v2_infer(self, request: Request) -> Response:
        """Predict a tensor of images, and explain them where that is asked for."""
        started = time.perf_counter()
        version = await self._named(request)
        body, parts = await read_tensors(request, InferRequest, self.worker.decoders)
        names: list[str] = [output.name for output in body.outputs]
        names = names or list(kserve_v2.OUTPUTS)
        if len(set(names)) < len(names):
            raise Problem(422, "outputs: an output is named twice; name each once.", code="invalid")
        asked = body.parameters if isinstance(body.parameters, Options) else Options()
        options = asked if kserve_v2.EXPLANATION in names else ONLY_PREDICT
        answers, renamed = await self._of_parts(request, version, parts, options, started, "inputs.0.data")
        request_id = body.id or request.scope["auditor.request_id"]
        return _json(kserve_v2.answered(answers, names, request_id, version.explained.identity), renamed)

    # operation

    async def metrics(self, request: Request) -> Response:
        """Give all workers' Prometheus metrics."""
        content, media = await asyncio.get_running_loop().run_in_executor(self.worker.threads, exposition)
        return Response(content, media_type=media)

    async def openapi(self, request: Request) -> Response:
        """Give the OpenAPI document."""
        return _json(document())

    # inside

    async def _one(self, request: Request, job: Job, started: float) -> AnswerJson:
        job.timings["read"] = round((time.perf_counter() - started) * 1000, 3)
        (answer,) = await self.worker.answer([job])
        if isinstance(answer, Problem):
            raise answer
        return _finished(request, job, answer, started)

    async def _several(
        self, request: Request, version: ServedVersion, jobs: list[Job | Problem], started: float
    ) -> dict[str, Any]:
        good = [job for job in jobs if isinstance(job, Job)]
        answers = iter(await self.worker.answer(good) if good else [])
        request_id = request.scope["auditor.request_id"]
        answered: list[Any] = []
        for job in jobs:
            answer = next(answers) if isinstance(job, Job) else job
            if isinstance(answer, Problem):
                answered.append(answer.to_json(request_id))
            else:
                assert isinstance(job, Job)
                answered.append(_finished(request, job, answer, started))
        n_errors = sum("error" in item for item in answered)
        return {
            "answers": answered,
            "n_errors": n_errors,
            "model": version.explained.identity,
            "request_id": request_id,
        }

    def _job_of(self, version: ServedVersion, x: Tensor, options: Options) -> Job:
        try:
            return Job(version, version.question(x, options, self.settings))
        except AuditError as error:
            raise problem_of(error) from None

    async def _pixels(self, version: ServedVersion, file: bytes) -> Tensor:
        (x,) = await self.worker.decoders.pixels([file], version.subject.preprocessing)
        if isinstance(x, Problem):
            raise x
        return x

    async def _named(self, request: Request) -> ServedVersion:
        version = await self.worker.ready()
        if request.path_params["name"] != version.name:
            raise Problem(404, f"there is no model of this name; this server has {version.name!r}.", code="no_model")
        return version

    async def _instances(self, request: Request, forced: Options | None) -> tuple[list[AnswerJson], dict[str, str]]:
        started = time.perf_counter()
        version = await self._named(request)
        body, parts = await read_json(request, KServeRequest, "instances", self.worker.decoders)
        shared = forced or body.parameters
        return await self._of_parts(request, version, parts, shared, started, "instances", own_options=forced is None)

    async def _of_parts(
        self,
        request: Request,
        version: ServedVersion,
        parts: list[Part],
        shared: Options,
        started: float,
        where: str,
        *,
        own_options: bool = False,
    ) -> tuple[list[AnswerJson], dict[str, str]]:
        """Return the answers of a request's images, and the old names of options that were used."""
        check_count(len(parts), where)
        files = [part.file for part in parts if part.file is not None]
        decoded = iter(await self.worker.decoders.pixels(files, version.subject.preprocessing))
        jobs: list[Job] = []
        renamed = dict(shared.renamed)
        for i, part in enumerate(parts):
            try:
                x = next(decoded) if part.file is not None else from_numbers(part.numbers, version)
                if isinstance(x, Problem):
                    raise x
                options = options_of_instance(part.options, shared) if own_options else shared
                jobs.append(self._job_of(version, x, options))
            except Problem as problem:
                raise Problem(problem.status, f"{where}.{i}: {problem.message}"[:400], code=problem.code) from None
        answers = await self.worker.answer(jobs)
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Problem):
                raise answer
            renamed |= job.question.options.renamed
        finished = [
            _finished(request, job, a, started) for job, a in zip(jobs, answers, strict=True) if isinstance(a, dict)
        ]
        return finished, renamed


def from_numbers(numbers: Any, version: ServedVersion) -> Tensor:
    """Return an array (height, width[, channels]) of numbers in [0, 1] as pixels."""
    try:
        return torch.from_numpy(from_array(numbers[None], version.subject.preprocessing, "pixels"))[0]
    except AuditError as error:
        raise Problem(422, " ".join(str(error).split()), code="bad_image") from None


def options_of_instance(named: dict[str, Any], shared: Options) -> Options:
    """Return the options of one instance: what it names itself goes before those of all."""
    if not named:
        return shared
    today = set(with_new_names(named)[0])
    others = {name: value for name, value in shared.model_dump(exclude_unset=True).items() if name not in today}
    try:
        return Options.model_validate({**others, **named})
    except ValidationError as error:
        raise problem_of_validation(error) from None


def _finished(request: Request, job: Job, answer: AnswerJson, started: float) -> AnswerJson:
    job.timings["total"] = round((time.perf_counter() - started) * 1000, 3)
    draw_stages(time.time_ns(), job.timings)
    describe_span(version=answer["model"]["version"])
    request.scope.get("auditor.note", {})["version"] = answer["model"]["version"]
    return {**answer, "timings": job.timings, "request_id": request.scope.get("auditor.request_id", "")}


def _json(content: Any, renamed: Mapping[str, str] | None = None) -> Response:
    """Return content as JSON, with headers about the old names of options that were used."""
    try:
        body = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number that is not finite: JSON has none
        body = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    headers = None
    if renamed:
        sentences = " ".join(deprecation(old, new) for old, new in renamed.items())
        headers = {"deprecation": RENAMED_SINCE, "warning": f'299 - "{sentences}"'}
    return Response(body, media_type="application/json", headers=headers)
