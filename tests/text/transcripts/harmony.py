"""Messages in channels, as gpt-oss writes them after ``<|start|>assistant``."""

from __future__ import annotations

from support.transcripts import Call, wrote, wrote_text

from pipedec.text.parsers.reader import Thought

HM = "<|channel|>analysis<|message|>Hm.<|end|>"
ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
ADDED = Call("add", '{"a": 1}')
START = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes.\n"
OTHER = '<|channel|>commentary to=functions.other <|constrain|>json<|message|>{"a": 1}<|call|>'
BROWSE = "<|channel|>analysis to=browser.search code<|message|>{}<|call|>"

BOTH = [
    wrote(""),
    wrote_text("Yes."),
    wrote(FINAL, "Yes.\n"),
    wrote(f"{HM}{START}{FINAL}<|return|>", Thought("Hm."), "Yes.\n"),
    wrote(f"{HM}{START}{FINAL}<|end|>", Thought("Hm."), "Yes.\n"),
    wrote(f"{HM}{START}{ADD}", Thought("Hm."), ADDED),
    wrote(f"{HM}{START}{ADD[:-8]}", Thought("Hm."), ADDED),
    wrote(f"{HM}\n{START} to=functions.add<|channel|>commentary json<|message|>{{\"a\": 1}}<|call|>", Thought("Hm."), ADDED),
    wrote(' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}', ADDED),
    wrote('<|channel|>commentary to=functions.add<|constrain|>json<|message|>{"a": 1}<|end|>', ADDED),
    wrote('<|channel|>commentary to=functions.add code<|message|>{"a": 1}<|call|>', ADDED),
    wrote('<|channel|>analysis to=functions.add <|message|> {"a": 1}\n<|call|>', ADDED),
    wrote("<|channel|>commentary to=functions.get.time-now <|constrain|>json<|message|>{}<|call|>", Call("get.time-now", "{}")),
    wrote(f"{ADD}{START}{ADD}", ADDED, ADDED),
    wrote(f"<|channel|>commentary<|message|>I add.<|end|>{START}{ADD}", "I add.", ADDED),
    wrote(f"{HM}{START}<|channel|>analysis<|message|> So.", Thought("Hm.So.")),
    wrote('<|channel|>commentary to=functions.note json<|message|>{"text": "<b> } ü😀 <|x|>"}',
          Call("note", '{"text": "<b> } ü😀 <|x|>"}')),
    wrote("<|channel|>commentary to=functions.add json<|message|><|call|>", Call("add", "{}")),
    wrote("<|channel|>commentary to=functions.add json<|message|>", Call("add", "{}")),
    # marks that are missing, tools that are unknown, and what is no message
    wrote(f"<|channel|>analysis<|message|>Hm.{START}{FINAL}", Thought("Hm."), "Yes.\n"),
    wrote(f"<|channel|>analysis<|message|>Hm.{FINAL}", Thought("Hm."), "Yes.\n"),
    wrote_text(OTHER),
    wrote(f"{HM}{START}{OTHER}{START}{ADD}", Thought("Hm."), f"{START}{OTHER}", ADDED),
    wrote_text(BROWSE),
    wrote_text("<|channel|>else<|message|>Hm."),
    wrote_text("<|start|>user"),
    wrote_text("to=nothing at all"),
    wrote_text("Go to=functions.add"),
    wrote('<|channel|>commentary to=functions.add json<|message|>{"a": oops', Call("add", '{"a": oops')),
    wrote(f"{HM}{START}<|channel|>fin", Thought("Hm."), f"{START}<|channel|>fin"),
    wrote("Hm.<|end|>" + START + FINAL, Thought("Hm."), "Yes.\n", prompt="<|start|>assistant<|channel|>analysis<|message|>"),
]  # fmt: skip
THOUGHTS = [
    wrote(f"{HM}{START}{FINAL}<|return|>", Thought("Hm."), "Yes.\n"),
    wrote(f"{HM}{START}{ADD}", Thought("Hm."), f"{START}{ADD}"),
]
CALLS = [
    wrote(f"{HM}{START}{FINAL}<|return|>", f"{HM}Yes.\n"),
    wrote(f"{HM}{START}{ADD}", HM, ADDED),
]
TABLES = [("harmony", "harmony", BOTH), ("harmony", None, THOUGHTS), (None, "harmony", CALLS)]
