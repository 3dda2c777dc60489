"""Files of an attached explainer in an artifact store that is a folder."""

from pathlib import Path

from auditor.plugins.registry.location import resolve


def files_of(uri: str, name: str) -> list[Path]:
    root = Path(resolve(uri).root.removeprefix("file://"))
    return sorted(p for p in (root / "explainers" / name).rglob("*") if p.is_file())
