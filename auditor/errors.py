"""Every error a user can cause, as one tree.

AuditError                      base: one sentence: where, what was wanted, what came, what to do
├── ModelError                  a model, version or alias that is not there or cannot be loaded
│   └── LayerError              a layer that is not there, did not fire, or cannot be explained
├── DataError                   a data source that is not there, is empty, or does not fit the model
├── ShapeError                  a tensor of the wrong shape, rank or channel count
├── OptionError                 an option or configuration value that is out of range or unknown
│   ├── UnknownClassError       a class that the model does not have
│   └── UnknownExplainerError   the name of an explainer that is not attached
├── WeakFitError                an explainer that does not stand in for the model, so it is not attached
├── NumericsError               NaN, infinite or negative values where the method has no meaning
├── ArtifactError               an artifact folder that is unfinished, too new, or of unknown kind
│   └── TamperError             an artifact whose bytes or subject are not what was attached
│       └── SignatureError      a signature that is missing, of nobody trusted, or of something else
├── StudyError                  a study that cannot be drawn or served, or whose answers are not there
│   └── AnswerError             an answer of a participant that is not taken; its ``code`` says why, in a word
├── ClusterError                a cluster that does not answer, runs other versions, or has no workers left
├── ClockError                  a clock that is behind what was noted before, so that no date means anything
└── RegistryError               the MLflow server is out of reach, or refused what was asked
"""

from __future__ import annotations


class AuditError(Exception):
    """Base of every error that bad input causes; the command line prints it as one line and exits with 2."""


class ModelError(AuditError):
    """A model, version or alias that is not there or cannot be loaded."""


class LayerError(ModelError, ValueError):
    """A layer that is not there, did not fire, or cannot be explained."""


class DataError(AuditError, ValueError):
    """A data source that is not there, is empty, or does not fit the model."""


class ShapeError(AuditError, ValueError):
    """A tensor of the wrong shape, rank or channel count."""


class OptionError(AuditError, ValueError):
    """An option or configuration value that is out of range or unknown."""


class UnknownClassError(OptionError):
    """A class that the model does not have."""


class UnknownExplainerError(OptionError):
    """The name of an explainer that is not attached."""


class WeakFitError(AuditError):
    """An explainer that does not stand in for the model, so it is not attached."""


class NumericsError(AuditError, ArithmeticError):
    """NaN, infinite or negative values where the method has no meaning."""


class ArtifactError(AuditError):
    """An artifact folder that is unfinished, too new, or of unknown kind."""


class TamperError(ArtifactError):
    """An artifact whose bytes or subject are not what was attached."""


class SignatureError(TamperError):
    """A signature that is missing, of nobody trusted, or of something else."""


class StudyError(AuditError, ValueError):
    """A study that cannot be drawn or served, or whose answers are not there."""


class AnswerError(StudyError):
    """An answer of a participant that is not taken; ``code`` says why, in a word for programs."""

    def __init__(self, message: str, code: str = "bad_answer") -> None:
        super().__init__(message)
        self.code = code


class ClusterError(AuditError):
    """A cluster that does not answer, runs other versions, or has no workers left."""


class ClockError(AuditError):
    """A clock that is behind what was noted before, so that no date means anything."""


class RegistryError(AuditError):
    """The MLflow server is out of reach, or refused what was asked."""
