"""``pipedec chat``: a conversation on the terminal. Answers go to standard output, everything else to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec import structs
from rich.table import Table

from pipedec.cli.answers import figures_table, local_cluster, metrics_table, shown_ms, started, write
from pipedec.cli.options import (
    MethodName,
    MinP,
    RunningFlags,
    StructureFlags,
    Temperature,
    TopK,
    TopP,
    refuse_flags,
    running_options,
)
from pipedec.cli.show import console
from pipedec.client.chat import ChatAnswer, ClusterPartner, HttpPartner, Message, Partner
from pipedec.config import Settings, settings_options
from pipedec.config.settings import OPTIONS
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.flags import Help, options_of
from pipedec.messages.request import LOCAL_TENANT, PromptRequest

HELP = """/reset  forget the conversation (not the system message)
/stats  figures of the last answer, and of all
/help   this list
/exit   leave (or Ctrl-D)
Ctrl-C  cancel the answer"""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
_MAX_TOKENS = 512
_KEY_VARIABLES = ("PIPEDEC_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True)
class _PartnerFlags:
    """Who answers, and how."""

    url: Annotated[
        str | None,
        Help(
            f"Talk with an OpenAI-compatible server, like http://127.0.0.1:8000/v1 (its key: ${' or $'.join(_KEY_VARIABLES)}).",
            "URL",
        ),
    ] = None
    api_key: Annotated[str | None, Help("Deprecated.", "KEY", variables=_KEY_VARIABLES, hidden=True)] = None
    model: Annotated[str | None, Help("With --url: the model (default: the first that the server names).", "NAME")] = None
    tokenizer: Annotated[
        Path | None,
        Help("With a running cluster: directory of the target's tokenizer, if it is elsewhere on this machine.", "DIR"),
    ] = None
    system: Annotated[str | None, Help("System message at the start of the conversation.", "TEXT")] = None
    method: Annotated[MethodName | None, Help("Decoding method.")] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Annotated[int | None, Help("Random seed of every answer.")] = None
    max_tokens: Annotated[int | None, Help(f"Maximum number of tokens of an answer (default: {_MAX_TOKENS}).")] = None


@dataclass(frozen=True)
class ChatFlags(StructureFlags, _PartnerFlags):
    """The flags of a conversation. What is None is left to the server, or takes the default of a request."""

    def request(self) -> PromptRequest:
        """Without a prompt."""
        values = {"max_tokens": _MAX_TOKENS} | self._given()
        sampling = SamplingParams(**values, structured_outputs=self.structure())
        return PromptRequest("", method=self.method, sampling=sampling, tenant=LOCAL_TENANT)

    def body(self) -> dict[str, Any]:
        """The fields of an HTTP request that were given."""
        outputs = self.structure()
        shown = {} if outputs is None else {name: value for name, value in structs.asdict(outputs).items() if value}
        own = {"method": self.method, "structured_outputs": shown or None}
        return self._given() | {name: value for name, value in own.items() if value is not None}

    def _given(self) -> dict[str, Any]:
        return {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}


@click.command()
@options_of(ChatFlags, "asked")
@running_options
@settings_options
def chat(settings: Settings, place: RunningFlags, asked: ChatFlags) -> None:
    """Talk with a model: one of a temporary cluster on this machine, of a running cluster, or at a URL.

    Ctrl-C cancels an answer and not the program; /help shows what can be typed besides messages.
    """
    with _partner(settings, place, asked) as partner:
        console.print(f"{partner.name}: /help for help, Ctrl-D leaves", style="dim")
        Conversation(partner, asked.system).run()


@contextmanager
def _partner(settings: Settings, place: RunningFlags, asked: ChatFlags) -> Iterator[Partner]:
    if asked.url is not None or place.are_given:
        refuse_flags(OPTIONS, "the cluster runs already: leave it out")
    if asked.url is not None:
        refuse_flags(("redis", "run", "running", "tokenizer"), "not used with --url: leave it out")
        yield HttpPartner(asked.url, asked.api_key, asked.model, asked.body())
        return
    refuse_flags(("model",), "goes with --url")
    request = asked.request()
    if place.are_given:
        running = place.connect()
        yield ClusterPartner(running.client, running.description, request, asked.tokenizer)
        return
    cluster = local_cluster(settings)
    with started(cluster) as client:
        yield ClusterPartner(client, cluster.description(), request, asked.tokenizer)


class Conversation:
    """The messages so far, led by a ``system`` message if there is one. Reads lines of standard input until it ends."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        self._partner = partner
        self._leading: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._leading)
        self._answers: list[ChatAnswer] = []

    def run(self) -> None:
        """Raises PipedecError if there will be no more answers."""
        with suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited, and those before come back
        while (line := _read_line()) is not None:
            word = next(iter(line.split()), "")
            match word:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/reset":
                    self._messages = list(self._leading)
                    console.print("The conversation begins anew.", style="dim")
                case "/stats":
                    self._show_stats()
                case "/help":
                    console.print(HELP, style="dim", markup=False)
                case _ if word.startswith("/"):
                    console.print(f"There is no {word}: /help shows what there is.", style="dim", markup=False)
                case _:
                    self._ask(line)

    def _ask(self, line: str) -> None:
        """Ask for an answer. The part of a cancelled answer is kept; a message that is refused is forgotten."""
        pieces: list[str] = []
        messages = [*self._messages, {"role": "user", "content": line}]

        def show(text: str) -> None:
            write(text)
            pieces.append(text)

        try:
            self._answers.append(self._partner.answer(messages, show))
        except KeyboardInterrupt:
            console.print(" (cancelled)", style="dim", end="")
        except UserError as error:
            console.print(str(error), style="red", markup=False, soft_wrap=True)
            return
        write("\n")
        if pieces:
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def _show_stats(self) -> None:
        if not self._answers:
            console.print("There is no answer yet.", style="dim")
            return
        last, known = self._answers[-1], [answer.tokens for answer in self._answers if answer.tokens is not None]
        console.print(metrics_table(last.completion) if last.completion is not None else stats_table(last))
        console.print(f"{len(self._answers)} answers with {sum(known)} tokens, {len(self._messages)} messages", style="dim")


def stats_table(answer: ChatAnswer) -> Table:
    """Figures of an answer over HTTP."""
    tpot_seconds = None
    if answer.ttft_seconds is not None and answer.tokens is not None and answer.tokens > 1:
        tpot_seconds = (answer.seconds - answer.ttft_seconds) / (answer.tokens - 1)
    return figures_table({
        "prompt tokens": "-" if answer.prompt_tokens is None else answer.prompt_tokens,
        "tokens": f"{'-' if answer.tokens is None else answer.tokens} ({answer.finish_reason})",
        "TTFT": shown_ms(answer.ttft_seconds),
        "TPOT": shown_ms(tpot_seconds),
    })  # fmt: skip


def _read_line() -> str | None:
    """The next line; None at the end of the input. Ctrl-C discards what was typed."""
    while True:
        try:
            return input(">>> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit leaves.", style="dim")
