"""Thoughts between marks."""

from __future__ import annotations

from support.transcripts import Transcript, wrote, wrote_text

from pipedec.text.parsers.reader import Thought

_MARKS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma": ("<|channel>thought\n", "<channel|>"),
    "kimi": ("◁think▷", "◁/think▷"),
}


def _transcripts(begin: str, end: str) -> list[Transcript]:
    opened = f"<|user|>Why {begin}{end}?<|assistant|>{begin}\n"
    return [
        wrote(""),
        wrote_text("Yes.\n"),
        wrote(f"{begin}\nHm,\n\n so.\n{end}\n\nYes.\n", Thought("Hm,\n\n so."), "Yes.\n"),
        wrote(f"\n{begin}Hm{end}Yes.", Thought("Hm"), "Yes."),
        wrote(f"{begin}{end}", prompt="Hm"),
        wrote(f"{begin}\n\n{end}\n\nYes.", "Yes."),
        wrote(f"{begin}Hm{end}\n", Thought("Hm")),
        wrote(f"{begin}Hm{end}{begin}So{end} Yes.", Thought("HmSo"), "Yes."),
        # a mark that is missing, cut or in prose
        wrote(f"{begin}Hm, {begin} again", Thought(f"Hm, {begin} again")),
        wrote(f"{begin}Hm {end[:-1]}", Thought(f"Hm {end[:-1]}")),
        wrote(f"{begin} \n"),
        wrote_text(f"Hm{end}Yes."),
        wrote_text(f"Write {begin} and {end}."),
        wrote_text(f"{begin[:-1]} "),
        wrote(f"{begin}Hm{end}Write {begin} and {end}.", Thought("Hm"), f"Write {begin} and {end}."),
        # a thought that the prompt has begun
        wrote(f"Hm\n{end}\n\nYes.", Thought("Hm"), "Yes.", prompt=opened),
        wrote(f"\n{begin}\nHm{end}Yes.", Thought("Hm"), "Yes.", prompt=opened),
        wrote(f"{end}Yes.", "Yes.", prompt=opened),
        wrote("Hm ", Thought("Hm"), prompt=opened),
        wrote("", prompt=opened),
        wrote("Yes.", "Yes.", prompt=f"<|user|>Why {begin}?<|assistant|>"),
        wrote("Yes.", "Yes.", prompt=f"<|assistant|>{begin}\n\n{end}\n\n"),
        wrote_text("<tool_call>"),
    ]


TABLES = [(name, None, _transcripts(*marks)) for name, marks in _MARKS.items()] + [
    (None, None, [wrote_text("<think>Hm</think> Yes.\n")])
]
