"""Results of a study, stored with every version it was drawn from, and put into their stored audits."""

from __future__ import annotations

from auditor.plugins.registry.audits import latest_audit, store_audit
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.studies import store_results, with_studies
from auditor.study.results import Results


def store_everywhere(results: Results, page: str) -> list[str]:
    """Store results with each version of the study; return the versions' labels.

    A version's metrics are of its own data sets only. Where it has an audit, that is stored again with them, so that
    policy, report and Audits page have them.
    """
    for label in results.study.models:
        version = resolve(label, registered=True)
        of_version = {
            "metrics": {name: m.to_json() for name, m in results.of_model(label).items()},
            "model_digests": sorted({d.model_digest for d in results.study.data if d.model == label}),
        }
        store_results(version, results.study, {**results.to_json(), **of_version}, {"results.html": page.encode()})
        version = resolve(label, registered=True)  # with the tag of now
        audit = latest_audit(version)
        if audit is not None:
            store_audit(with_studies(audit, version), version)
    return results.study.models
