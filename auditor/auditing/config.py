"""How much work an audit does: images, checks, time. Nothing here loads torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from auditor.auditing.checks import ALWAYS, checked


class AuditConfig(BaseModel):
    """How much work an audit does. The images are a fixed choice; the seed moves only what is sampled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0, description="Seed of noise, shuffled weights and bootstrap.")
    images: int = Field(default=100, ge=20, description="Images on which explanations are measured.")
    slow_images: int = Field(default=4, ge=2, description="The same for kinds that search per image.")
    refits: int = Field(default=0, ge=0, le=10, description="Re-fits per explainer for basis_stability; 0: the fit's.")
    batch_size: int = Field(default=64, ge=1, description="Images per forward pass.")
    layers: bool = Field(default=True, description="Measure the model's layers too.")
    reliance: bool = Field(default=True, description="Measure what each class hangs on, by interventions.")
    reliance_images: int = Field(default=400, ge=20, description="Images on which reliance is measured, at most.")
    regions: Path | None = Field(default=None, description="Masks, a COCO file or VOC files of the images' objects.")
    checks: tuple[str, ...] = Field(default=(), description="The checks to take; none named: all.")
    explainers: tuple[str, ...] | None = Field(default=None, description="The explainers to check; default: all.")
    exhaustive: bool = Field(default=False, description="Take all images and draws, however clear a verdict is.")
    budget_s: float | None = Field(default=None, gt=0, description="Seconds after which no further check is taken.")

    @field_validator("checks")
    @classmethod
    def _in_order(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return checked(names) if names else ()

    def left_out(self, check: str) -> str:
        """Return why a check is not taken; empty when it is."""
        if check == ALWAYS:
            return ""
        if self.checks and check not in self.checks:
            return "the audit was asked for other checks (--checks)"
        if check == "layers" and not self.layers:
            return "the audit was asked to leave it out (layers=False)"
        if check == "reliance" and not self.reliance:
            return "the audit was asked to leave it out (--no-reliance)"
        return ""
