"""``auditor sign``: a signature over a model, its explainers and its graph."""

from __future__ import annotations

import click

from auditor.commands.group import JSON, SIGN_KEY, auditor, example, reports_errors


@auditor.command(epilog=example("auditor sign models:/digits/1 --sign-key keys/alice.pem"))
@click.argument("model")
@SIGN_KEY
@JSON
@reports_errors("not everything was signed")
def sign(model: str, as_json: bool) -> None:
    """Sign the files of MODEL, every explainer attached to it and its ONNX graph, after verifying them.

    The signatures are Sigstore bundles of OpenSSF model-signing; its own command verifies them. Audits and verdicts are
    signed when they are made: auditor audit --sign-key, auditor gate --sign-key.
    """
    from auditor.commands.terminal import as_text, say, waiting
    from auditor.errors import OptionError
    from auditor.plugins.registry.attestations import sign_version
    from auditor.signing.keys import current_signer

    key = current_signer()
    if key is None:
        raise OptionError("sign: give --sign-key KEY or set AUDITOR_SIGN_KEY; auditor keys new NAME makes one.")
    with waiting(f"signing {model}"):
        parts = sign_version(model, key)
    if as_json:
        say(as_text({"signer": key.name, "keyid": key.keyid, "signed": parts}))
        return
    say(f"{key.name} ({key.keyid[:12]}) signed of {model}: {', '.join(parts)}")
