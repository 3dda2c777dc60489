"""The handlers of the public routes: read, validate, queue, answer."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from auditor.explainers.artifact import finite
from auditor.service.batch_answer import Answer, Job
from auditor.service.image_decoding import from_base64, from_numbers
from auditor.service.served_version import Loaded
from auditor.service.prometheus import exposition
from auditor.service.openapi import document
from auditor.service.problems import Problem, problem_of_validation
from auditor.service.request_parsing import job_of, parse, pixels, read
from auditor.service.settings import Settings
from auditor.service.tracing import draw_stages, tell_span
from auditor.service.types import (
    ExplainBatchRequest,
    ExplainRequest,
    KServeRequest,
    Options,
    PredictRequest,
)
from auditor.service.worker import Worker

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
        loaded = await self.worker.ready()
        body, (content,) = await read(request, ExplainRequest)
        job = job_of(self.settings, loaded, await pixels(self.worker, loaded, content), body)
        return _json(await self._one(request, job, started))

    async def predict(self, request: Request) -> Response:
        """Predict one image."""
        started = time.perf_counter()
        loaded = await self.worker.ready()
        _, (content,) = await read(request, PredictRequest)
        job = job_of(self.settings, loaded, await pixels(self.worker, loaded, content), ONLY_PREDICT)
        answer = await self._one(request, job, started)
        return _json({k: answer[k] for k in ("prediction", "model", "timings", "request_id")})

    async def explain_batch(self, request: Request) -> Response:
        """Explain several images; a bad one gets its error in its place."""
        started = time.perf_counter()
        loaded = await self.worker.ready()
        body, contents = await read(request, ExplainBatchRequest, "images")
        options = Options.model_validate(body.model_dump(exclude={"images"}))
        jobs = await asyncio.gather(*(self._job(loaded, content, options) for content in contents))
        return _json(await self._several(request, loaded, jobs, started))

    async def explainers(self, request: Request) -> Response:
        """Tell what is attached."""
        return _json((await self.worker.ready()).describe())

    async def model(self, request: Request) -> Response:
        """Tell what is served."""
        loaded = await self.worker.ready()
        subject = loaded.subject
        return _json(
            {
                **loaded.model,
                "uri": loaded.uri,
                "input_shape": list(subject.input_shape),
                "resize": subject.preprocessing.resize,
                "class_names": list(subject.class_names),
                "engine": loaded.runner.engine,
                "engine_reason": loaded.runner.reason,
                "explainers": list(loaded.explainers),
                "loaded_at": loaded.time,
            }
        )

    async def samples(self, request: Request) -> Response:
        """Give a few images to try."""
        return _json((await self.worker.ready()).samples)

    async def gallery(self, request: Request) -> Response:
        """Give the pictures kept of each concept."""
        loaded, name = await self.worker.ready(), request.path_params["explainer"]
        if name not in loaded.explainers:
            known = ", ".join(loaded.explainers) or "none"
            raise Problem(404, f"there is no explainer of this name; attached are: {known}.", code="unknown_explainer")
        found = await asyncio.get_running_loop().run_in_executor(self.worker.decoders, loaded.gallery, name)
        return _json(found)

    # KServe, V1 protocol

    async def kserve_models(self, request: Request) -> Response:
        """List the models, which is one."""
        return _json({"models": [(await self.worker.ready()).name]})

    async def kserve_model(self, request: Request) -> Response:
        """Tell whether the model is ready."""
        loaded = await self._named(request)
        return _json({"name": loaded.name, "ready": True})

    async def kserve_explain(self, request: Request) -> Response:
        """Explain instances as KServe clients send them; one bad instance refuses the request, as they expect."""
        answers = await self._instances(request, None)
        return _json({"explanations": answers})

    async def kserve_predict(self, request: Request) -> Response:
        """Predict instances as KServe clients send them."""
        answers = await self._instances(request, ONLY_PREDICT)
        return _json({"predictions": [answer["prediction"] for answer in answers]})

    # operation

    async def metrics(self, request: Request) -> Response:
        """Give all workers' Prometheus metrics."""
        content, media = await asyncio.get_running_loop().run_in_executor(self.worker.decoders, exposition)
        return Response(content, media_type=media)

    async def openapi(self, request: Request) -> Response:
        """Give the OpenAPI document."""
        return _json(document())

    # inside

    async def _one(self, request: Request, job: Job, started: float) -> Answer:
        job.timings["read"] = round((time.perf_counter() - started) * 1000, 3)
        (answer,) = await self.worker.answer([job])
        if isinstance(answer, Problem):
            raise answer
        return _finished(request, job, answer, started)

    async def _several(
        self, request: Request, loaded: Loaded, jobs: list[Job | Problem], started: float
    ) -> dict[str, Any]:
        good = [job for job in jobs if isinstance(job, Job)]
        answers = iter(await self.worker.answer(good) if good else [])
        request_id = request.scope["auditor.request_id"]
        told_: list[Any] = []
        for job in jobs:
            answer = next(answers) if isinstance(job, Job) else job
            if isinstance(answer, Problem):
                told_.append(answer.to_json(request_id))
            else:
                assert isinstance(job, Job)
                told_.append(_finished(request, job, answer, started))
        n_errors = sum("error" in item for item in told_)
        return {"answers": told_, "n_errors": n_errors, "model": loaded.model, "request_id": request_id}

    async def _job(self, loaded: Loaded, content: bytes, options: Options) -> Job | Problem:
        try:
            x = await pixels(self.worker, loaded, content)
        except Problem as problem:
            return problem
        return job_of(self.settings, loaded, x, options)

    async def _named(self, request: Request) -> Loaded:
        loaded = await self.worker.ready()
        if request.path_params["name"] != loaded.name:
            raise Problem(404, f"there is no model of this name; this server has {loaded.name!r}.", code="no_model")
        return loaded

    async def _instances(self, request: Request, forced: Options | None) -> list[Answer]:
        started = time.perf_counter()
        loaded = await self._named(request)
        body = parse(KServeRequest, await request.body())
        jobs = []
        for i, instance in enumerate(body.instances):
            try:
                jobs.append(await self._instance(loaded, instance, forced or body.parameters, forced is not None))
            except Problem as problem:
                raise Problem(problem.status, f"instances.{i}: {problem.message}"[:400], code=problem.code) from None
        answers = await self.worker.answer(jobs)
        for answer in answers:
            if isinstance(answer, Problem):
                raise answer
        return [
            _finished(request, job, a, started) for job, a in zip(jobs, answers, strict=True) if isinstance(a, dict)
        ]

    async def _instance(self, loaded: Loaded, instance: Any, options: Options, is_forced: bool) -> Job:
        if isinstance(instance, list):
            x = from_numbers(instance, loaded.subject.preprocessing)
            return job_of(self.settings, loaded, x, options)
        text: Any = instance
        own: dict[str, Any] = {}
        if isinstance(instance, dict):
            own = dict(instance)
            given = own.pop("b64", None) or own.pop("image", None) or own.pop("image_bytes", None)
            text = given.get("b64") if isinstance(given, dict) else given
        if not isinstance(text, str) or not text:
            raise Problem(422, "an instance is {'b64': …}, {'image': …}, a base64 string or nested lists of pixels.")
        if own and not is_forced:
            try:
                options = Options.model_validate({**options.model_dump(exclude_unset=True), **own})
            except ValidationError as error:
                raise problem_of_validation(error) from None
        return job_of(self.settings, loaded, await pixels(self.worker, loaded, from_base64(text)), options)


def _finished(request: Request, job: Job, answer: Answer, started: float) -> Answer:
    job.timings["total"] = round((time.perf_counter() - started) * 1000, 3)
    draw_stages(time.time_ns(), job.timings)
    tell_span(version=answer["model"]["version"])
    request.scope.get("auditor.note", {})["version"] = answer["model"]["version"]
    return {**answer, "timings": job.timings, "request_id": request.scope.get("auditor.request_id", "")}


def _json(content: Any) -> Response:
    try:
        body = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number that is not finite: JSON has none
        body = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    return Response(body, media_type="application/json")
