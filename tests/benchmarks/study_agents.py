"""Agents that take part in a study by its REST routes: they see what people are sent, and nothing else."""

import io
import time
from collections import Counter

import httpx
import numpy as np
from PIL import Image

from auditor.metrics.grouping_purity import masked, small_pictures, ward_groups

SIDE = 48  # pixels of a picture that an agent looks at


class Agent:
    """Groups by what a stage shows: the images, the images through their heatmap, or the numbers; or at random."""

    def __init__(self, address, seed, *, base="/open", code="", is_random=False, seen=None, noise=0.15):
        self.client = httpx.Client(base_url=address, timeout=30)
        self.rng = np.random.default_rng(seed)
        self.base, self.code, self.is_random, self.noise = base, code, is_random, noise
        self.seen = {} if seen is None else seen  # pictures by address, shared between agents to spare the machine
        self.acknowledged = []  # step and answer of every one the server said it saved

    def post(self, path, body, patience_s=120):
        """Ask until the server answers, as the page does."""
        end = time.monotonic() + patience_s
        while True:
            try:
                reply = self.client.post(f"{self.base}/api/{path}", json=body)
                break
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def picture(self, name):
        """Return a picture as floats (channels, height, width); a heatmap has four channels."""
        if name not in self.seen:
            end = time.monotonic() + 120
            while True:
                try:
                    content = self.client.get(f"{self.base}/picture/{name}").content
                    break
                except httpx.TransportError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.2)
            picture = Image.open(io.BytesIO(content)).convert("RGBA").resize((SIDE, SIDE))
            self.seen[name] = np.asarray(picture, dtype=np.float64).transpose(2, 0, 1) / 255
        return self.seen[name]

    def features(self, step):
        """Return what the agent goes by, a row per image."""
        if step["shows"] == "concepts":
            return np.array([image["values"] for image in step["images"]])
        images = np.stack([self.picture(f"image/{image['id']}")[:3] for image in step["images"]])
        if step["shows"] == "heatmap":
            blank = np.zeros((SIDE, SIDE))
            heat = [self.picture(i["heats"][0])[3] if i["heats"][0] else blank for i in step["images"]]
            images = masked(images, np.stack(heat))
        return small_pictures(images)

    def group(self, step):
        keys = [image["id"] for image in step["images"]]
        if self.is_random or step["kind"] == "practice":
            return {k: int(g) for k, g in zip(keys, self.rng.integers(1, step["n_groups"] + 1, len(keys)), strict=True)}
        rows = self.features(step)
        rows = rows + self.rng.normal(0, self.noise * (rows.std() + 1e-12), rows.shape)  # no two people see alike
        return {k: 1 + g for k, g in zip(keys, ward_groups(rows, step["n_groups"]), strict=True)}

    def answer(self, step):
        kind = step["kind"]
        if kind in ("practice", "group"):
            return {"groups": self.group(step)}
        if kind == "confidence":
            return {"confidence": int(self.rng.integers(0, 7))}
        if kind == "rating":
            return {"ratings": {a["key"]: int(self.rng.integers(0, 7)) for a in step["assistants"]}}
        if kind == "questions":
            return {"questions": {q["key"]: (q["choices"] or ["a line of text"])[0] for q in step["questions"]}}
        return {"comment": ""}

    def take_part(self, on_answer=lambda: None):
        """Answer everything and return the code."""
        state = self.post("begin", {"agreed": True, "code": self.code})
        while state["status"] == "running":
            step = state["step"]
            answer = self.answer(step)
            body = {"turn": state["turn"], "step": step["index"], "answer": answer, "seconds": 1.0}
            state = self.post("answer", body)
            self.acknowledged.append((step["index"], answer))
            on_answer()
        return state["code"]


def lost_answers(agents_by_code, everybody):
    """Return how many answers that were acknowledged are not in the store as they were given."""
    stored = {person.code: {given.step: given.body for given in person.given} for person in everybody}
    lost = Counter()
    for code, agent in agents_by_code.items():
        for step, answer in agent.acknowledged:
            body = stored.get(code, {}).get(step)
            same = body is not None and ("ratings" in answer or body == answer)
            lost["lost" if not same else "there"] += 1
    return lost
