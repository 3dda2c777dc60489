"""Folders signed by OpenSSF model-signing: one bundle that names every file; its own command verifies it."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

from auditor.errors import OptionError, SignatureError
from auditor.signing.bundles import keyed
from auditor.signing.keys import NEEDED, Signer, TrustedKey

OTHER_FILE = re.compile(r"Hash mismatch for '([^']+)'")


def sign_folder(folder: Path, key: Signer, ignore: Collection[str] = ()) -> bytes:
    """Return the bundle over every file of a folder; paths in ``ignore`` need not be there, and are left out."""
    try:
        from model_signing import hashing, signing
    except ImportError:
        raise OptionError(NEEDED) from None
    with tempfile.TemporaryDirectory(prefix="auditor-") as scratch, contextlib.redirect_stdout(io.StringIO()):
        bundle = Path(scratch) / "model.sig"
        paths = [folder / name for name in ignore]
        config = hashing.Config()  # type: ignore[no-untyped-call]
        config.set_ignored_paths(paths=paths, ignore_git_paths=False)
        signer = signing.Config()  # type: ignore[no-untyped-call]
        signer.set_hashing_config(config)
        with key.choose_in(signer):
            signer.sign(folder, bundle)
        return bundle.read_bytes()


def verify_folder(folder: Path, bundle: bytes, key: TrustedKey, where: str) -> None:
    """Raise unless a bundle is a trusted key's signature over exactly the files of a folder."""
    try:
        from model_signing import verifying
    except ImportError:
        raise OptionError(NEEDED) from None
    problem = key.problem()
    if problem:
        raise SignatureError(f"{where}: {problem}.")
    with tempfile.TemporaryDirectory(prefix="auditor-") as scratch, contextlib.redirect_stdout(io.StringIO()):
        signature, public = Path(scratch) / "model.sig", Path(scratch) / "key.pub"
        signature.write_bytes(keyed(bundle, key.pem, where))
        public.write_bytes(key.pem)
        try:
            verifier = verifying.Config()  # type: ignore[no-untyped-call]
            verifier.use_elliptic_key_verifier(public_key=public).verify(folder, signature)
        except Exception as error:  # whatever a damaged bundle makes of the parsers
            raise SignatureError(f"{where}: the signature of {key.name} does not verify ({_reason(error)}).") from None


def _reason(error: Exception) -> str:
    """Return what does not fit, in a few words; of files that differ, which."""
    text = " ".join(str(error).split())
    changed = OTHER_FILE.findall(text)
    if not changed:
        return text[:120] or type(error).__name__
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"it is of another {changed[0]}{more}"
