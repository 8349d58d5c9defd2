"""Which HTTP dialects there are: `name: "module:class"`. Imported by name, so that a dialect can be left out.

A request is compared with the routes in this order, so the one that is asked most comes first.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from frontend.services import Services
from frontend.surfaces.base import Surface

SURFACES: Mapping[str, str] = MappingProxyType(
    {
        "native": "frontend.surfaces.native:NativeSurface",
        "openai": "frontend.surfaces.openai.surface:OpenAISurface",
        "hugging_face": "frontend.surfaces.hugging_face.surface:HuggingFaceSurface",
        "open_inference": "frontend.surfaces.open_inference.surface:OpenInferenceSurface",
        "administration": "frontend.surfaces.administration:AdministrationSurface",
    }
)


def load_surfaces(services: Services) -> list[Surface]:
    """One of each, in the order of the registry."""
    surfaces: list[Surface] = []
    for target in SURFACES.values():
        module, _, attribute = target.partition(":")
        surface_class: type[Surface] = getattr(importlib.import_module(module), attribute)
        surfaces.append(surface_class(services))
    return surfaces
