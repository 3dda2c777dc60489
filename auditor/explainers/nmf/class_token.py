"""What class and register tokens have read: where in the image their part of a concept comes from.

A transformer's class token gathers the image as it passes the blocks. Read as a position like the patches
(`Deviations`), it holds concepts too, but it has no place in the image. Its part of a concept k is put where it was
read: excitation backprop [ExcitationBP] from the token at the explained layer, with the mass on its channels

    p_c ~ [ W_ck (z_c - start_c) ]_+

down through attention to the pixels, and from there to the cells of the grid. A concept's map is then its scores on the
patches and this, in the proportion in which its contribution comes by patches and by tokens.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from auditor.attribution.excitation import ExcitationBackprop
from auditor.errors import AuditError
from auditor.network.aten_graph import graph_of
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)
LITTLE = 0.02  # of a concept's contribution: what less of it comes by tokens is not looked for


def token_heat(
    subject: Subject, layer: str, layout: Layout, images: Tensor, z: Tensor, W: Tensor
) -> tuple[Tensor | None, str]:
    """Return where tokens read each concept, (batch, concepts, cells) of mass 1 or 0; None and why where it is unknown.

    ``z`` is what the layer puts out for pixels ``images``, ``W`` (channels, concepts) the basis.
    """
    p = layout.to_positions(z)[..., : layout.prefix].transpose(1, 2)  # (batch, tokens, channels)
    mass = (p[:, None] * W.to(p).T[None, :, None]).clamp_min(0)  # (batch, concepts, tokens, channels)
    mass = mass / mass.sum((2, 3), keepdim=True).clamp_min(1e-30)
    start = torch.zeros(*mass.shape[:2], *z.shape[1:], dtype=mass.dtype, device=mass.device)
    start[:, :, : layout.prefix] = mass
    pre = subject.preprocessing
    floor = [-m / s for m, s in zip(pre.mean, pre.std, strict=True)]
    try:
        engine = ExcitationBackprop(graph_of(subject), floor=floor)
        neurons = list(range(W.shape[1]))
        maps = engine.maps(subject.normalise(images), neurons, start=layer, mass=start).maps
    except AuditError as error:
        log.warning("nmf: what the class token read is not on the maps: %s", error)
        return None, f"what the class token read is not on the map: {error}"
    cells = torch.nn.functional.adaptive_avg_pool2d(maps, layout.grid).flatten(2)
    return cells / cells.sum(-1, keepdim=True).clamp_min(1e-30), ""


def with_token_heat(layout: Layout, S: Tensor, by_tokens: Tensor, heat: Tensor) -> Tensor:
    """Return maps (batch, concepts, cells) of scores ``S`` (batch, concepts, positions) and what tokens read.

    The sum of a map is that of the scores, tokens included. What a token read and nothing shows is left out.

    >>> from auditor.subject.layers import Deviations
    >>> layout = Deviations.of(Layout("tokens", 1, (1, 2), 1), torch.zeros(1, 1))
    >>> S, heat = torch.tensor([[[2.0, 1.0, 1.0]]]), torch.tensor([[[0.0, 1.0]]])
    >>> with_token_heat(layout, S, torch.tensor([[0.5]]), heat).tolist()
    [[[1.0, 3.0]]]
    """
    cells = layout.on_grid(S)
    share = (by_tokens.to(S) * (heat.sum(-1) > 0))[..., None]
    share = torch.where(share < LITTLE, 0.0, share)
    on_cells = cells / cells.sum(-1, keepdim=True).clamp_min(1e-30)
    return ((1 - share) * on_cells + share * heat.to(S)) * S.sum(-1, keepdim=True)
