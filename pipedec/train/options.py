"""Options of commands that train: the prompts to learn from, the models, where a run writes, and what it computes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.data import PromptSource
from pipedec.engine.build import resolve
from pipedec.engine.devices import chosen_device
from pipedec.families import model_config
from pipedec.flags import Command, Help, given_values, option, option_fields, options_of, partial_of, with_options
from pipedec.text.prompt import Prompter
from pipedec.train.bita import BitaRecipe
from pipedec.train.continuations import SplitPrompts, file_prompts
from pipedec.train.draft import DraftShape
from pipedec.train.replicas import local_rank
from pipedec.train.run import Run

Target = Annotated[Path | None, Help("Target checkpoint directory (default: the shipped pair's).", "DIR")]
DraftStart = Annotated[
    Path | None, Help("Draft checkpoint directory to continue (default: a new one, beside --target).", "DIR", "--draft")
]
BitaStart = Annotated[Path | None, Help("Trained BiTA that only gets a new Markov table (default: none).", "DIR", "--bita")]
Compiled = Annotated[bool, Help("Use torch.compile (needs a C++ compiler).", flag="--compile/--no-compile")]
OnlyAcceptance = Annotated[bool, Help("Do not train: write OUT/draft/acceptance.json for --draft.", flag="--only-acceptance")]
PartialRun = Callable[..., Run]
run_options = partial_of(Run, "run")
# §4.1 of the paper, for targets up to 13B; larger ones have 4 masks. One group of masks follows each sample (§3.1).
PAPER_BITA = {
    "masks": 3, "prompt_tokens": 16, "groups": 1, "batch": 128, "learning_rate": 0.03, "start_std": 0.02, "markov_rank": 0,
}  # fmt: skip
_BITA_DEFAULTS = Help("Whose defaults; the paper's are for targets up to 13B, larger ones have 4 masks.", flag="--recipe")


@dataclass(frozen=True)
class TrainingPromptFlags:
    """Prompts to learn from."""

    prompts: Annotated[
        tuple[str, ...], Help("Prompts to learn from; may be repeated.", "[NAME=]FILE[#KEY=VALUE]", repeated=True)
    ] = ()
    max_prompts: Annotated[Annotated[int, Meta(ge=1)] | None, Help("Maximum number of prompts of each set (default: all).")] = (
        None
    )
    raw_prompt: Annotated[bool, Help("Do not apply the model's chat template.")] = False

    def check(self, alternative: str = "") -> None:
        """Raises UserError if there are no prompts."""
        if not self.prompts:
            raise UserError(f"no prompts to learn from: give --prompts FILE{alternative}")

    def read(self, prompter: Prompter, new_tokens: int, taken: tuple[str, ...] = ()) -> dict[str, SplitPrompts]:
        """Token ids of the prompts of every set. Raises UserError as ``file_prompts`` does."""
        sources = tuple(map(PromptSource.parse, self.prompts))
        return file_prompts(prompter, sources, new_tokens, self.max_prompts, taken, self.raw_prompt)


@dataclass(frozen=True)
class DeviceFlags:
    """Data type and device of forward passes."""

    dtype: Annotated[Literal["float32", "bfloat16"], Help("Data type of forward passes.")] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], Help("Where to train.")] = "auto"

    def chosen(self) -> dict[str, Any]:
        """Fields of ``Run``. Raises UserError if there is no such device."""
        return {"dtype": self.dtype, "device": chosen_device(self.device, local_rank())}


device_options = options_of(DeviceFlags, "device")


def bita_options(command: Command) -> Command:
    """Add the options of training BiTA; the command gets ``asked``, ``run``, ``recipe`` and ``device``."""

    def gather(values: dict[str, Any]) -> dict[str, Any]:
        given, defaults = given_values(values), {} if values.pop("defaults") == "ours" else PAPER_BITA
        if values["prompting"] == "none":
            defaults = {**defaults, "prompt_tokens": 0}
        return {"recipe": BitaRecipe(**{**values, **defaults, **{name: given[name] for name in given if name in values}})}

    named = {"defaults": option("defaults", Literal["ours", "paper"], _BITA_DEFAULTS, "ours")}
    recipe_options = with_options(device_options(command), {**named, **option_fields(BitaRecipe)}, gather)
    return options_of(TrainingPromptFlags, "asked")(run_options(recipe_options))


def shape_options(command: Command) -> Command:
    """Add the size of a new draft; the command gets what is given of it as ``shape``."""
    return with_options(command, option_fields(DraftShape), lambda values: {"shape": given_values(values)})


def chosen_start(target: Path | None, draft: Path | None, shape: dict[str, Any]) -> tuple[Path, Path | DraftShape]:
    """The target, and the draft to continue or the size of a new one. Raises UserError if they do not fit each other."""
    if draft is not None and shape:
        raise UserError("--draft continues a draft, whose size is given: leave out --hidden-size, --layers and --vocabulary")
    if draft is not None or (target is None and not shape):
        return chosen_pair(target, draft)
    return resolve(Settings.of(target=target, draft="none", stages=1)).target, DraftShape(**shape)


def existing_draft(start: Path | DraftShape) -> Path:
    """A draft that is there already. Raises UserError for the size of a new one."""
    if isinstance(start, DraftShape):
        raise UserError("--only-acceptance measures a draft: give --draft DIR")
    return start


def chosen_pair(target: Path | None, draft: Path | None) -> tuple[Path, Path]:
    """The checkpoints, by default the shipped ones. Raises UserError if they do not fit each other."""
    pair = resolve(Settings.of(target=target, draft=draft, stages=1))
    if pair.draft is None:
        raise UserError("--draft none: give the directory of a draft to continue")
    return pair.target, pair.draft


def prompter_of(target: Path, max_tokens: int | None = None) -> Prompter:
    """The tokenizer of a target; prompts are limited to its context, and to ``max_tokens``. Raises UserError if unfit."""
    context = model_config(target).context_length
    return Prompter(target, context if max_tokens is None else min(context, max_tokens))
