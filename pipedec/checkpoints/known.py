"""The tensors of a model before any is read: by the headers that are here, else by its ``config.json``."""

from __future__ import annotations

from collections.abc import Collection

from pipedec.checkpoints.parts import LayerSpan, span_shapes
from pipedec.families import ModelConfig, Shape
from pipedec.formats import Format, Formats, file_names, known_files, matrix_shape


class KnownTensors:
    """The tensors of a model, with or without files.

    Attributes:
        names: of those in the checkpoint. Of a model without files, of embedding and head, which are plain unless its description
            says otherwise.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._files = known_files(config.directory) if config.location else None
        tables = config.embedding_tensors() | config.head_tensors()
        self.names: Collection[str] = tables.keys() if self._files is None else self._files.file_of.keys()

    def format_of(self, name: str, shape: Shape, formats: Formats, by_headers: bool = True) -> Format:
        """The format of a tensor in a checkpoint of these formats. Raises UserError if its sizes do not suit.

        ``by_headers``: whether the types in the headers that are here count, of which hosts may have different ones.
        """
        if self._files is not None and by_headers:
            return self._files.format_of(formats, name, shape)
        return formats.of(name, shape, self.names)

    def file_bytes(self, span: LayerSpan, element_bytes: int) -> dict[str, int]:
        """The size in the files of every tensor of the model that a stage reads; ``element_bytes``: of a number that is plain, of
        tensors whose headers are not here.
        """
        places = {} if self._files is None else self._files.places
        found = {}
        for name, shape in span_shapes(self._config, span, self.names).items():
            format = self.format_of(name, shape, self._config.formats)
            here = [places[one].total_bytes for one in file_names(name, format, shape) if one in places]
            found[name] = sum(here) if here else format.held_bytes(matrix_shape(name, shape), element_bytes)
        return found
