"""Gate: an audit against a policy. Pure: no files, no registry, no clock.

Nothing passes for want of a number: NaN, a skipped or missing metric, a baseline without the metric all fail. A name
that no audit could give is the policy's mistake and an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from auditor.auditing.record import Audit
from auditor.errors import OptionError
from auditor.metrics.measure import Measure
from auditor.metrics.names import can_exist, nearest, plain
from auditor.release.policy import Limit, Policy

Verdict = Literal["pass", "fail"]
TINY = 1e-10  # MLflow's: what better means where a share of a baseline of 0 was asked for


@dataclass(frozen=True, slots=True)
class Check:
    """One limit and what became of it."""

    metric: str
    value: float
    limit: str
    verdict: Verdict
    reason: str = ""
    baseline: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        entry = {k: getattr(self, k) for k in ("metric", "value", "limit", "verdict", "reason")}
        return entry | ({} if self.baseline is None else {"baseline": self.baseline})


@dataclass(frozen=True, slots=True)
class SignedBy:
    """Whose trusted signatures audit and model carry, by name; ``problem`` is why the audit has none."""

    audit: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    problem: str = ""
    required: bool = False  # whether an audit without a signature fails, whatever the policy says


@dataclass(frozen=True, slots=True, repr=False)
class Gate:
    """The verdict with all its checks, and what it is about."""

    checks: tuple[Check, ...]
    model: str = ""
    baseline: str = ""
    policy: str = ""
    policy_digest: str = ""
    audit_digest: str = ""
    promoted: str = ""

    def __repr__(self) -> str:
        held = sum(c.verdict == "pass" for c in self.checks)
        return f"Gate({self.model}: {self.verdict.upper()}, {held} of {len(self.checks)} checks hold)"

    def _repr_html_(self) -> str:
        from auditor.explainers.notebook import cell, table

        rows = [(c.metric, c.value, c.limit, c.verdict, c.reason) for c in self.checks]
        rows.sort(key=lambda row: row[3])  # what failed stands first
        head = f"<p><b>{self.verdict.upper()}</b>: {cell(self.model)}, policy {cell(self.policy)}</p>"
        return head + table(["metric", "value", "limit", "verdict", ""], rows)

    def to_pandas(self) -> Any:
        """Return the checks as a pandas frame, a row each."""
        import pandas as pd

        return pd.DataFrame([c.to_json() for c in self.checks])

    @property
    def verdict(self) -> Verdict:
        """Pass only when there are checks and all of them pass."""
        return "pass" if self.checks and all(c.verdict == "pass" for c in self.checks) else "fail"

    @property
    def failed(self) -> list[str]:
        """Return the metrics of failed checks, each once."""
        return list(dict.fromkeys(c.metric for c in self.checks if c.verdict == "fail"))

    def to_json(self) -> dict[str, Any]:
        """Return what ``auditor gate --json`` prints."""
        about = {
            k: getattr(self, k) for k in ("model", "baseline", "policy", "policy_digest", "audit_digest", "promoted")
        }
        return {"verdict": self.verdict, "checks": [c.to_json() for c in self.checks], **about}


def judge(
    audit: Audit,
    policy: Policy,
    baseline: Audit | None = None,
    drift: Mapping[str, Measure] | None = None,
    signed: SignedBy | None = None,
) -> Gate:
    """Hold an audit against a policy: ``judge(audit, read_policy("policy.toml")).verdict``."""
    _refuse_unknown(audit, policy, drift or {})
    if baseline is None and policy.needs_baseline:
        named = (n for n, limit in policy.limits.items() if limit.needs_baseline or n.startswith("drift/"))
        name = next(named, "pins.baseline_differs")
        raise OptionError(f"policy {policy.name}: {name} refers to a baseline; name one with --baseline MODEL.")
    if baseline is not None:
        check_same_task(audit, baseline)
    metrics = {**audit.metrics, **(drift or {})}
    checks = [*_presence(audit, policy), *_pinned(audit, policy, baseline), *_signers(policy, signed or SignedBy())]
    for name, limit in policy.limits.items():
        checks += _checks(name, limit, metrics.get(name), None if baseline is None else baseline.metrics.get(name))
    checks = [_with_finding(check, audit) for check in checks]
    return Gate(
        tuple(checks),
        model=label_of(audit),
        baseline="" if baseline is None else label_of(baseline),
        policy=policy.name,
        policy_digest=policy.digest,
        audit_digest=audit.digest,
    )


def label_of(audit: Audit) -> str:
    """Return how an audit's model is named: name and version, else its digest."""
    m = audit.model
    return f"{m['name']}/{m['version']}" if m.get("name") else f"model {m['digest'][:12]}"


def check_same_task(a: Audit, b: Audit) -> None:
    """Raise one sentence when two audits are not about the same task or the same data."""
    for key, what in (("input_shape", "image sizes"), ("classes", "class lists")):
        if a.model[key] != b.model[key]:
            raise OptionError(
                f"gate: {label_of(a)} and the baseline {label_of(b)} have different {what}, so they do not do the same "
                "task; give a baseline of the same task."
            )
    if a.data["digest"] != b.data["digest"]:
        raise OptionError(
            f"gate: the baseline {label_of(b)} was audited on other data ({b.data['spec']}) than {label_of(a)} "
            f"({a.data['spec']}); audit both on the same data."
        )


def _refuse_unknown(audit: Audit, policy: Policy, drift: Mapping[str, Measure]) -> None:
    owners = {*audit.explainers, *policy.explainers}
    for name in policy.limits:
        if name in audit.metrics or name in drift or can_exist(name, owners):
            continue
        near = nearest(name, {*audit.metrics, *drift, "drift/alarm", "drift/similarity"})
        hint = f"near names are {', '.join(near)}" if near else "auditor audit --json lists the names"
        raise OptionError(f"policy {policy.name}: no audit gives a metric called {name!r}; {hint}.")


def _presence(audit: Audit, policy: Policy) -> list[Check]:
    """Check that every explainer the policy wants is there, and that none attached fails to verify."""
    checks = []
    for name in sorted({*policy.explainers, *audit.explainers}):
        metric = f"explainer/{name}/verified"
        measure = audit.metrics.get(metric)
        if measure is None:
            checks.append(Check(metric, math.nan, "attached and verified", "fail", "it is not attached"))
        elif measure.status != "passed" or measure.value != 1.0:
            checks.append(Check(metric, measure.value, "attached and verified", "fail", measure.reason))
        elif name in policy.explainers:
            checks.append(Check(metric, 1.0, "attached and verified", "pass"))
    return checks


def _pinned(audit: Audit, policy: Policy, baseline: Audit | None) -> list[Check]:
    """Check what the policy pins: of what, with what and by what the audit was made."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    pins, checks = policy.pins, []

    def hold(name: str, came: Any, limit: str, ok: bool) -> None:
        reason = "" if ok else f"the audit has {came}"
        checks.append(Check(f"pin/{name}", math.nan, limit, "pass" if ok else "fail", reason))

    if pins.data_digest is not None:
        digest = str(audit.data["digest"])
        hold("data", f"data {digest[:12]}", f"data {pins.data_digest[:12]}", digest.startswith(pins.data_digest))
    if pins.images is not None:
        hold("images", f"{audit.data['n']} images", f"{pins.images} images", audit.data["n"] == pins.images)
    if pins.explained is not None:
        n = audit.data.get("n_explained", 0)
        hold("explained", f"{n} explained", f"at least {pins.explained} explained", n >= pins.explained)
    if pins.seed is not None:
        hold("seed", f"seed {audit.seed}", f"seed {pins.seed}", audit.seed == pins.seed)
    if pins.auditor is not None:
        version = str(audit.versions.get("mlflow-auditor", "unknown"))
        try:
            ok = SpecifierSet(pins.auditor).contains(version, prereleases=True)
        except InvalidVersion:
            ok = False
        hold("auditor", f"mlflow-auditor {version}", f"mlflow-auditor {pins.auditor}", ok)
    kinds = {str(info.get("kind")) for info in audit.explainers.values()}
    for kind in pins.kinds:
        hold(
            f"kind/{kind}", f"kinds {', '.join(sorted(kinds)) or 'none'}", f"an explainer of kind {kind}", kind in kinds
        )
    if pins.baseline_differs and baseline is not None:
        ok = _weights(audit) != _weights(baseline)
        hold("baseline", "the weights of its baseline", "a baseline with other weights", ok)
    return checks


def _weights(audit: Audit) -> Any:
    return (audit.model.get("identity") or {}).get("weights") or audit.model["digest"]


def _signers(policy: Policy, signed: SignedBy) -> list[Check]:
    """Check that whom the policy names has signed, and that owner and auditor differ where they must."""
    wanted, checks = policy.signers, []
    for part, allowed, names in (("audit", wanted.audit, signed.audit), ("model", wanted.model, signed.model)):
        required = bool(allowed) or wanted.differ or (part == "audit" and signed.required)
        if not required:
            continue
        ok = bool(set(names) & set(allowed)) if allowed else bool(names)
        came = (
            signed.problem
            if part == "audit" and signed.problem
            else f"signed by {', '.join(names) or 'nobody trusted'}"
        )
        limit = f"signed by {' or '.join(allowed)}" if allowed else "signed by a trusted key"
        checks.append(Check(f"signer/{part}", math.nan, limit, "pass" if ok else "fail", "" if ok else came))
    if wanted.differ:
        both = sorted(set(signed.audit) & set(signed.model))
        ok = bool(signed.audit) and bool(signed.model) and not both
        reason = "" if ok else f"{', '.join(both)} signed both" if both else "a signature is missing"
        checks.append(
            Check("signer/differ", math.nan, "other signers of audit and model", "pass" if ok else "fail", reason)
        )
    return checks


def _checks(name: str, limit: Limit, measure: Measure | None, base: Measure | None) -> list[Check]:
    """Return one check per number the limit sets."""
    missing = _why_no_value(measure, "the audit")
    value = measure.value if measure is not None else math.nan
    up = _is_up(name, limit, measure)
    checks = []
    for text, bound in _absolute(limit, up):
        ok = not missing and bound(value)
        reason = missing or ("" if ok else f"{_short(value)} is not {text}")
        checks.append(Check(name, value, text, "pass" if ok else "fail", reason))
    if limit.needs_baseline:
        no_base = missing or _why_no_value(base, "the baseline's audit")
        old = base.value if base is not None else math.nan
        for text, ok in _relative(limit, value, old, up):
            good = not no_base and ok
            reason = no_base or ("" if good else f"{_short(value)} against {_short(old)} is not {text}")
            checks.append(Check(name, value, text, "pass" if good else "fail", reason, old))
    return checks


def _with_finding(check: Check, audit: Audit) -> Check:
    """Add to a failed check of reliance the sentence that says which class hangs on what."""
    family, _, rest = check.metric.partition("model/reliance/")
    if family or check.verdict == "pass" or not rest:
        return check
    owner = rest.partition("/")[0]
    entries = [f for f in (audit.reliance or {}).get("findings", ()) if f["verdict"] in ("found", "look")]
    named = [f for f in entries if owner in ("found", "worst") or plain(f["name"]) == owner]
    sentences = " ".join(f["sentence"] for f in named[:3])
    return replace(check, reason=f"{check.reason}. {sentences}") if sentences else check


def _why_no_value(measure: Measure | None, where: str) -> str:
    if measure is None:
        return f"{where} has no such metric"
    if measure.status != "passed":
        return f"{measure.status} in {where}: {measure.reason or 'no reason given'}"
    return "" if math.isfinite(measure.value) else f"it is {measure.value} in {where}"


def _is_up(name: str, limit: Limit, measure: Measure | None) -> bool:
    if limit.greater_is_better is not None:
        return limit.greater_is_better
    direction = measure.direction if measure is not None else "none"
    if direction == "none" and (limit.threshold is not None or limit.needs_baseline) and measure is not None:
        raise OptionError(f"policy: {name} has no better direction of its own; set greater_is_better beside its limit.")
    return direction == "up"


def _absolute(limit: Limit, up: bool) -> list[tuple[str, Any]]:
    low = [limit.min] if limit.min is not None else []
    high = [limit.max] if limit.max is not None else []
    if limit.threshold is not None:
        (low if up else high).append(limit.threshold)
    bounds: list[tuple[str, Any]] = [(f"at least {_short(x)}", lambda v, x=x: v >= x) for x in low]
    return bounds + [(f"at most {_short(x)}", lambda v, x=x: v <= x) for x in high]


def _relative(limit: Limit, value: float, base: float, up: bool) -> list[tuple[str, bool]]:
    """Return text and outcome of every limit against a baseline; better is positive."""
    gain = value - base if up else base - value
    # rounding must not decide: 0.9 - 0.895 is not quite 0.005
    slack = 1e-12 * max(1.0, abs(value), abs(base))
    share = gain / abs(base) if base else math.nan
    outcomes = []
    if limit.min_absolute_change is not None:
        outcomes.append(
            (f"better by at least {_short(limit.min_absolute_change)}", gain + slack >= limit.min_absolute_change)
        )
    if limit.min_relative_change is not None:
        ok = share + slack >= limit.min_relative_change if base else gain >= TINY
        outcomes.append((f"better by at least {limit.min_relative_change:.3g} of the baseline", ok))
    if limit.max_absolute_loss is not None:
        outcomes.append(
            (f"worse by at most {_short(limit.max_absolute_loss)}", -gain <= limit.max_absolute_loss + slack)
        )
    if limit.max_relative_loss is not None:
        ok = -share <= limit.max_relative_loss + slack if base else gain >= -TINY
        outcomes.append((f"worse by at most {limit.max_relative_loss:.3g} of the baseline", ok))
    return outcomes


def _short(x: float) -> str:
    return f"{x:.4g}"


def passed(checks: Sequence[Check]) -> int:
    """Return how many checks pass."""
    return sum(c.verdict == "pass" for c in checks)
