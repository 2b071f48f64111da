"""What a class of ``transformers`` says about itself here; which there are stands in ``interop.families``."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

from lightning_llm.interop.fields import Fields
from lightning_llm.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor there, and what of ours it is made of.

    Attributes:
        name: There.
        ours: Names here; several are joined by rows.
        transposed: It is the transpose of that.
    """

    name: str
    ours: tuple[str, ...]
    transposed: bool = False


class Family(Protocol):
    """A class of transformers."""

    @property
    def architecture(self) -> str:
        """The class."""
        ...

    @property
    def model_type(self) -> str:
        """Its short name."""
        ...

    @property
    def prefix(self) -> str:
        """In front of the names of all tensors but the head's; some folders leave it out."""
        ...

    def refusals(self, config: ModelConfig) -> list[str]:
        """Why a model has no place there; empty where it has."""
        ...

    def to_fields(self, config: ModelConfig) -> dict[str, Any]:
        """The fields of ``config.json``."""
        ...

    def from_fields(self, fields: Fields) -> dict[str, Any]:
        """The options of ``ModelConfig``; adds to the faults and notes of ``fields``."""
        ...

    def places(self, names: Iterable[str]) -> list[Place]:
        """Where the tensors go, given the names of all of ours."""
        ...
