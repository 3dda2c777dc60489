"""Entry of a built bento, where the folders lie side by side and nothing is installed under the import names.

A bento holds ``auditor/``, ``kernels/``, ``plugins/`` and ``service/`` as they stand in the repository, so the folder
above is where the package ``auditor`` finds its other parts. Then the service is the same.
"""

from __future__ import annotations

from pathlib import Path

import auditor

if __name__ == "service.bento":  # as the bento imports it; an installed copy has its names already
    auditor.__path__.append(str(Path(__file__).resolve().parent.parent))

from auditor.service.service import AuditorService

__all__ = ["AuditorService"]
