"""Which tensors and files of the checkpoints a rank reads, and which of them a host lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from pipedec.checkpoints.digests import VOCABULARY_FILE, fingerprint, tensor_digests
from pipedec.core.errors import UserError
from pipedec.families import ModelConfig, Shape, json_object, model_config
from pipedec.formats import INDEX_FILE, SINGLE_FILE, FileTensor, TensorFiles, file_names
from pipedec.gguf import INDEX_FILE as GGUF_INDEX
from pipedec.gguf import is_gguf, located, model_files

_DESCRIBING = (".json", ".jinja", ".model", ".txt")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_SHOWN = 3  # files that an error names


@dataclass(frozen=True)
class LayerSpan:
    """Consecutive layers of a model: those of the first stage with the embedding, those of the last with final norm and head."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class CheckpointPart:
    """The files of one checkpoint that a rank reads: always those that describe it, and some of its tensors.

    Attributes:
        key: ``target``, ``draft`` or ``bita``.
        model: the directory, a GGUF file, or the name of an installed model.
        spans: the layers whose tensors are read.
        is_whole: whether all tensors are read; then ``spans`` are ignored.
    """

    key: str
    model: str
    spans: tuple[LayerSpan, ...] = ()
    is_whole: bool = False

    @property
    def is_read(self) -> bool:
        """Whether any tensors are."""
        return self.is_whole or bool(self.spans)

    def __or__(self, other: CheckpointPart) -> CheckpointPart:
        """The union of two parts of one checkpoint."""
        spans = tuple(dict.fromkeys(self.spans + other.spans))
        return CheckpointPart(self.key, self.model, spans, self.is_whole or other.is_whole)

    def tensors(self, files: TensorFiles) -> list[str]:
        """The names of the tensors, of a checkpoint with these files."""
        if self.is_whole:
            return list(files.file_of)
        if not self.spans:
            return []
        config = model_config(self.model)
        stored = [stored_tensors(config, span, files.file_of) for span in self.spans]
        return list(dict.fromkeys(name for names in stored for name in names))

    def files(self) -> list[Path]:
        """The files with these tensors, whether or not they are here. Raises UserError if the checkpoint is damaged."""
        if is_gguf(self.model):
            return [located(self.model)]  # which also describes the model
        if not self.is_read:
            return []
        directory = located(self.model)
        if not has_weights(directory):
            return [directory / SINGLE_FILE]
        stored = TensorFiles(directory)
        return sorted({stored.file_of[name] for name in self.tensors(stored) if name in stored.file_of})

    def describing_files(self) -> list[Path]:
        """The files that every host needs, as far as they are here: sizes, tokenizer, chat template, index."""
        if is_gguf(self.model):
            return []
        directory = located(self.model)
        found = [*directory.glob("*"), *directory.glob(_MORE_TEMPLATES)]
        return sorted(directory / file for file in described_by(str(one.relative_to(directory)) for one in found))

    def missing(self) -> list[Path]:
        """The files that are needed and not here. Raises as ``files``."""
        described = [] if is_gguf(self.model) else [located(self.model) / "config.json"]
        return [file for file in described if not file.is_file()] or [file for file in self.files() if not file.is_file()]


def described_by(files: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files that describe it, by their paths in its directory."""
    return [
        file
        for file in files
        if file[0] != "."
        and (
            ("/" not in file and (file.endswith(_DESCRIBING) or file == VOCABULARY_FILE))
            or (file.count("/") == 1 and fnmatch(file, _MORE_TEMPLATES))
        )
    ]


def rank_parts(rank: int, layers: Sequence[tuple[int, int]], models: Mapping[str, str | Path | None]) -> list[CheckpointPart]:
    """The parts of all models that a rank reads; rank 0 has the draft.

    Args:
        layers: for each stage, its first layer of the target and the layer after its last.
        models: the checkpoints by key; None for those that the pipeline does without.
    """
    spans = (LayerSpan(range(*layers[rank - 1]), rank == 1, rank == len(layers)),) if rank else ()
    parts = {
        "target": CheckpointPart("target", str(models["target"]), spans),
        "draft": CheckpointPart("draft", str(models.get("draft")), is_whole=rank == 0),
        "bita": CheckpointPart("bita", str(models.get("bita")), is_whole=True),
    }
    return [part for key, part in parts.items() if models.get(key) is not None]


def merged(parts: Iterable[CheckpointPart]) -> list[CheckpointPart]:
    """One part per model: what all of them read together."""
    found: dict[str, CheckpointPart] = {}
    for part in parts:
        found[part.key] = found[part.key] | part if part.key in found else part
    return list(found.values())


def missing_files(parts: Iterable[CheckpointPart]) -> list[Path]:
    """The files that are needed and not on this host. Raises UserError for a damaged checkpoint."""
    return [file for part in parts for file in part.missing()]


def check_here(parts: Iterable[CheckpointPart], whose: str) -> None:
    """Raises UserError, a sentence that begins with ``whose``, if a file that is needed is not on this host."""
    if missing := missing_files(parts):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        named = ", ".join(file.name for file in missing[:_SHOWN])
        raise UserError(f"{whose} lacks {named}{more} of {missing[0].parent}: copy what is missing with `pipedec distribute`")


def part_digests(parts: Iterable[CheckpointPart], whatever_is_here: bool = False) -> dict[str, dict[str, str]]:
    """Digests by model and name: of the tensors of these parts, or of all tensors that this host has. See ``tensor_digests``.

    Raises UserError if a file that is needed is not here, or cannot be read.
    """
    chosen = {}
    for part in parts:
        if whatever_is_here and not has_weights(model_files(part.model)):
            continue
        files = TensorFiles(part.model)
        names = list(files.places) if whatever_is_here else part.tensors(files)
        files.check_here(names)
        chosen[part.key] = [files.places[name] for name in names]
    digests = tensor_digests([tensor for tensors in chosen.values() for tensor in tensors])
    return {key: {tensor.name: digests[tensor] for tensor in tensors if tensor in digests} for key, tensors in chosen.items()}


def has_weights(directory: Path) -> bool:
    """Whether a directory lists the tensors of its checkpoint."""
    return any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE, GGUF_INDEX))


def is_whole(model: Path) -> bool:
    """Whether this host holds all weights of a checkpoint."""
    return has_weights(model_files(model)) and TensorFiles(model).is_whole


def check_trained_for(bita: Path, target: Path) -> None:
    """Raises UserError if a BiTA was trained for another target. Not checked where a part of the target is missing."""
    trained_for = json_object(bita / "config.json").get("target")
    if is_whole(target) and trained_for != fingerprint(target):
        raise UserError(f"{bita} was trained for another target than {target}: train one for it (pipedec train bita)")


def stored_tensors(config: ModelConfig, span: LayerSpan, known: Collection[str] = ()) -> dict[str, FileTensor]:
    """These tensors as the files of a checkpoint hold them, by name. Of those that a checkpoint may lack, the ones that it has.

    ``known`` are the checkpoint's tensors.
    """
    return {
        stored: tensor
        for name, shape in span_shapes(config, span, known).items()
        for stored, tensor in file_names(name, config.formats.of(name, shape, known), shape).items()
        if stored in known or not tensor.is_optional
    }


def span_shapes(config: ModelConfig, span: LayerSpan, known: Iterable[str] = ()) -> dict[str, Shape]:
    """Name and shape of every tensor of the model that a stage needs, in its order.

    ``known`` are the checkpoint's tensors: if the head is tied and not among them, the last stage needs the embedding.
    """
    shapes = dict(config.embedding_tensors()) if span.first else {}
    for layer in span.layers:
        shapes |= config.layer_tensors(layer)
    return shapes | config.norm_tensors() | config.head_tensors(known) if span.last else shapes
